"""One lane of a warp, followed through a kernel's control flow by its integers alone: how often each block runs.

A branch that hangs on data is taken both ways, as a warp whose lanes differ does; a side that leads out of line (a
division's slow path) is not taken. A loop whose end hangs on data is counted once, and said to be; so is what the first
turn of a loop runs for certain and the others only where data says so.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence

from .flow import BRANCHES, END, Block, Flow, is_conditional
from .operands import PREDICATE, Values, operands_of, registers_read
from .rules import Step, has_rule
from .sass import Instruction

MOST_VISITS = 500_000
Watch = Callable[[Block], None]
CONDITIONS = (*BRANCHES, "EXIT", "RET", "CALL")


class TooLongError(Exception):
    """A lane runs more blocks than are worth following."""


SHARED = "shared memory"
Decisions = dict[int, list[Step]]


def deciding(flow: Flow) -> Decisions:
    """Of each block the instructions that a branch may hang on: what writes what branches read, and so on backwards."""
    every = [i for block in flow.blocks.values() for i in block.instructions]
    relevant: set[str] = {n for i in every if i.base in CONDITIONS for n in registers_read(i)}
    relevant = _closure(relevant, every, lambda i, names: bool(_written(i) & names) and has_rule(i), _read)
    known = _closure(set(), every, lambda i, names: has_rule(i) and _may_be_known(i, names), _written)
    steps = {id(i) for i in every if _written(i) & relevant & known}
    return {at: [Step(i) for i in block.instructions if id(i) in steps] for at, block in flow.blocks.items()}


def _closure(
    names: set[str], every: Sequence[Instruction], applies: Callable[[Instruction, set[str]], bool],
    adds: Callable[[Instruction], frozenset[str]],
) -> set[str]:  # fmt: skip
    """The names, and those that instructions add to them, until none does."""
    size = -1
    while len(names) > size:
        size = len(names)
        for instruction in every:
            if applies(instruction, names):
                names = names | adds(instruction)
    return names


def _may_be_known(instruction: Instruction, known: set[str]) -> bool:
    read = _read(instruction)
    return not read or bool(read & known)


@functools.lru_cache(maxsize=1 << 15)
def _written(instruction: Instruction) -> frozenset[str]:
    return frozenset({SHARED} if instruction.base == "STS" else operands_of(instruction).results)


def _read(instruction: Instruction) -> frozenset[str]:
    return registers_read(instruction) | ({SHARED} if instruction.base == "LDS" else frozenset())


class Lane:
    """Runs one lane of one program. `visits`: how often each block was entered; `data_dependent`: loops cut short."""

    def __init__(self, flow: Flow, decisions: Decisions, values: Values) -> None:
        self.flow, self.decisions, self.values = flow, decisions, values
        self.visits: Counter[int] = Counter()
        self.data_dependent: set[int] = set()
        self.calls: list[int] = []
        self.open: list[int] = []  # branches on data that are being taken both ways
        self.inert: dict[int, Counter[int]] = {}  # branches whose sides decide nothing: what a visit of one adds
        self.decided: dict[int, bool] = {}  # branches that did not hang on data when they were met last
        self.left = MOST_VISITS

    def run(self, watch: Watch) -> None:
        """From the kernel's entry to its exit."""
        self._run(self.flow.entry, END, watch)

    def _run(self, at: int, stop: int, watch: Watch) -> bool:
        """From a block until `stop` is reached, or the lane has exited (False)."""
        while at not in (stop, END):
            block = self._enter(at, watch)
            last = block.last
            taken = self._decide(block)
            if last.base == "CALL" and last.target is not None:
                self.calls.append(block.follows)
                at = last.target
            elif last.base == "RET":
                at = self.calls.pop() if self.calls else END
            elif last.base in BRANCHES and taken is None:
                at = self._both(block, watch)
            elif last.base in BRANCHES and last.target is not None and taken:
                at = last.target
            elif last.base in ("EXIT", "KILL") and taken:
                return False
            else:
                at = block.follows
        return at == stop != END

    def _enter(self, at: int, watch: Watch) -> Block:
        block = self.flow.blocks[at]
        self.visits[at] += 1
        self.left -= 1
        if self.left < 0:
            raise TooLongError
        if self.visits[at] <= 3:
            watch(block)
        for step in self.decisions[at]:
            step.execute(self.values)
        return block

    def _decide(self, block: Block) -> bool | None:
        """The condition of its last instruction; where only a later turn hangs on data, the first was the turn."""
        last, before = block.last, self.decided.get(block.at)
        taken = self._condition(last)
        if taken is None and before is not None and last.base in BRANCHES:
            self.data_dependent.add(block.at)
            return not before
        if taken is not None and is_conditional(last):
            self.decided[block.at] = taken
        return taken

    def _condition(self, branch: Instruction) -> bool | None:
        """Whether the last instruction of a block goes elsewhere; lanes of our programs do not part by BRA.DIV."""
        if branch.is_a("DIV"):
            return False
        if not is_conditional(branch):
            return True
        conditions = (c for c in (branch.guard, *branch.operands) if PREDICATE.match(c.lstrip("!")))
        found = [self.values.predicate(c) for c in conditions]
        if None in found:
            return False if False in found else None
        return all(found)

    def _both(self, block: Block, watch: Watch) -> int:
        """Take a branch on data both ways, up to where they meet; a loop's way back is not taken."""
        branch, meet = block.last, self.flow.meets.get(block.at, END)
        if block.at in self.open or branch.target is None:
            self.data_dependent.add(block.at)
            return meet
        if branch.target <= branch.at:
            self.data_dependent.add(block.at)
            return block.follows
        if block.at in self.inert:
            self.visits.update(self.inert[block.at])
            return meet
        sides = [s for s in (block.follows, branch.target) if s != meet and not self.flow.is_slow(s, meet)]
        before, visits, after = self.values, self.visits.copy(), list[Values]()
        self.open.append(block.at)
        for side in sides:
            self.values = before.copy()
            if self._run(side, meet, watch):
                after.append(self.values)
        self.open.pop()
        self.values = after[0] if after else before
        for other in after[1:] if len(sides) == 2 else [before]:
            self.values.meet(other)
        if not any(self.decisions[at] for side in sides for at in self.flow.between(side, meet)):
            self.inert[block.at] = self.visits - visits
        return meet
