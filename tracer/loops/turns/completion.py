"""A run of turns that are alike, completed at both ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..alignment import Region, going_on
from ..program import Program
from ..rolling import handed_on
from .first_turn import FirstTurn
from .following import follows
from .last_turn import LastTurn
from .nodes import Node, Use
from .turns import Incomplete, Turns


def run_of(nodes: Sequence[Node], region: Region, program: Program) -> Run | None:
    """The turns of a region that are alike in what they read as well; None where they are too few."""
    period, stop = region.period, region.stop + going_on([node.step.token for node in nodes], region)
    begin, end = _longest([follows(nodes, i, period) for i in range(region.start + 2 * period, stop)])
    if end - begin < period:
        return None
    first, last = begin + region.start, end + region.start + 2 * period
    handed = handed_on(program, first, last, period)
    return Run(Turns(nodes, first, last, period), [first + r for r in range(period) if handed[r] == min(handed)])


def _longest(flags: Sequence[bool]) -> tuple[int, int]:
    """From where to where flags are set, one after the other."""
    best, begin = (0, 0), 0
    for i, flag in enumerate([*flags, False]):
        if not flag:
            best, begin = max(best, (begin, i), key=lambda r: r[1] - r[0]), i + 1
    return best


class Run:
    """Turns, and the positions at which they may begin: where the fewest values go from one to the next."""

    def __init__(self, turns: Turns, boundaries: Sequence[int]) -> None:
        self.turns, self.boundaries = turns, boundaries
        self.neutral: list[Node] = []
        self.sums: dict[int, Use] = {}

    def complete(self, lowest: int) -> None:
        """Adds turns before and behind, as long as they are nearly whole. lowest: where another run ends."""
        boundary = next((b for b in self.boundaries if _is_done(partial(self._before, b, lowest))), None)
        if boundary is not None:
            _is_done(partial(self._before, boundary, lowest))
        _is_done(partial(self._behind, self.boundaries[0] if boundary is None else boundary))

    def _before(self, boundary: int, lowest: int) -> None:
        last = self.turns.first - 1
        turn = FirstTurn(self.turns, last - (last - boundary) % self.turns.period, lowest)
        turn.complete()
        self.neutral = [*turn.neutral, *self.neutral]
        self.sums |= turn.sums

    def _behind(self, boundary: int) -> None:
        last = self.turns.last
        LastTurn(self.turns, last + self.turns.period - (last - boundary) % self.turns.period).complete()

    def rename_readers(self, order: Sequence[Node]) -> None:
        """Those who read a sum of the first turn, as they read that of the others, read what is added up there now."""
        others = [node for node in order if node not in self.turns.position]
        for position, value in self.sums.items():
            new, second = Use(self.turns.at[position]), Use(self.turns.at[position + self.turns.period])
            alike = {(n.step.token, s) for n in others for s, leaf in enumerate(n.leaves) if leaf == second}
            for node in others:
                for slot, leaf in enumerate(node.leaves):
                    is_alike = (node.step.token, slot) in alike
                    node.leaves[slot] = _exchanged(leaf, value, new, second, is_alike)


def _is_done(side: Callable[[], None]) -> bool:
    try:
        side()
    except Incomplete:
        return False
    return True


def _exchanged(leaf: Any, value: Use, new: Use, second: Use, is_alike: bool) -> Any:
    if isinstance(leaf, list):
        return [new if one == value else one for one in leaf] if second in leaf else leaf
    return new if is_alike and leaf == value else leaf
