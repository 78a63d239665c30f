"""From the programs of two lengths to one with loops, which at a third length is proved to be the program of that.

The steps are aligned by what they do; what each of them reads is then told by its place: the same step of its loop,
one of the steps before, a value from outside, or one of many, at an index that is affine in the step and the length.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..sizes import hint_of
from .affine import Affine, Fit, Sample, fit, fit_lengths, fitted
from .alignment import LEAST, Region, alignments, going_on, repetitions
from .description import (
    Carried,
    Each,
    Items,
    Layout,
    Operand,
    Outside,
    Parts,
    Place,
    Read,
    Rolled,
    Run,
    Same,
    Source,
    steps_by_place,
)
from .floats import Float, formula_of
from .program import Constant, Expression, Program, Ref, Step, constant_of, is_sliced, refs_in
from .reasons import LoopFailure, NotRolled, OtherSteps

APART = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1), (0, 2), (1, 2))
"""How many steps of a loop, at its beginning and at its end, may be unlike the others in what they read."""

MOST_WAYS = 8
"""Ways to align two programs that are tried."""

aten = torch.ops.aten
PRODUCTS = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default})
JOINED = frozenset({aten.stack.default, aten.cat.default})
LARGE = 1 << 20
"""Elements of a product that is worth memory of its own: a fixed number of turns that make one stay turns."""


def roll(short: Program, long: Program) -> Rolled:
    """The rolled form of programs whose lengths differ by one. Raises NotRolled."""
    failures: list[NotRolled] = [OtherSteps("its steps are not the same ones each time")]
    ways = alignments([s.token for s in short.steps], [s.token for s in long.steps])
    for regions in itertools.islice(ways, MOST_WAYS):
        try:
            return _rolled(short, long, regions)
        except NotRolled as failure:
            failures.append(failure)
    raise failures[:2][-1] from None


def _rolled(short: Program, long: Program, regions: Sequence[Region]) -> Rolled:
    """The same where the loops are there, or cut elsewhere."""
    ways = [list(_cuts(short, region)) for region in regions]
    chosen = [0] * len(regions)
    while True:
        cut = [way[c] for way, c in zip(ways, chosen, strict=True)]
        try:
            return _Roller(short, long, _layout(short.length, cut, short is long)).rolled()
        except LoopFailure as failure:
            chosen[failure.loop] += 1
            if chosen[failure.loop] == len(ways[failure.loop]):
                raise NotRolled(failure.reason) from None


def _cuts(program: Program, region: Region) -> Iterator[Region]:
    """Where a loop may be cut: where a step hands the least on to the next, or where it was; a step or two apart."""
    for turned in dict.fromkeys((_turned(program, region), region)):
        yield from (turned.without(*apart) for apart in APART)


def _turned(program: Program, region: Region) -> Region:
    """The region, its steps beginning where the fewest values go from one to the next.

    Autograd adds up in the order in which gradients come: a turn may begin in the middle of what is one step.
    """
    rest = going_on([s.token for s in program.steps], region)
    handed = handed_on(program, region.start, region.stop, region.period)
    best = min(range(region.period), key=lambda r: (handed[r], r > rest, r))
    turned = replace(region, start=region.start + best, count=region.count - (best > rest))
    return turned if turned.count >= LEAST + 2 or best <= rest else region


def handed_on(program: Program, start: int, stop: int, period: int) -> list[int]:
    """For each step at which turns may begin, from `start` on, how many values go from one to the next."""
    first = stop - period
    pairs = ((ref, first + j) for j, step in enumerate(program.steps[first:stop]) for ref in refs_in(step.leaves))
    ends: dict[Ref, int] = {}
    for ref, reader in pairs:
        if ref.step >= start:
            ends[ref] = max(ends.get(ref, 0), reader)
    handed = [0] * period
    for ref, reader in ends.items():
        for boundary in range(max(ref.step, first - period) + 1, reader + 1):
            handed[(boundary - start) % period] += 1
    return handed


def roll_fixed(program: Program, least: int) -> Rolled:
    """The rolled form of what repeats in one program, for so many steps at least. Raises NotRolled.

    Not of chunks that are multiplied one by one: for all turns at once their products would fill memory, and no kernel
    has such a step. As they are, each is let go before the next.
    """
    regions = repetitions([s.token for s in program.steps], least)
    regions = [r for r in regions if not any(map(_is_large_product, program.steps[r.start : r.start + r.period]))]
    if not regions:
        raise NotRolled("nothing repeats")
    return _rolled(program, program, regions)


def _is_large_product(step: Step) -> bool:
    return step.target in PRODUCTS and math.prod(map(hint_of, step.value.shape)) >= LARGE


def _layout(length: int, regions: Sequence[Region], is_fixed: bool = False) -> Layout:
    for loop, region in enumerate(regions):
        if region.count < LEAST:
            raise LoopFailure(loop, "its steps are not the same ones each time")
    return Layout(length, tuple(regions), is_fixed)


class Located:
    """A program whose values are told by their places."""

    def __init__(self, program: Program, layout: Layout) -> None:
        self.program, self.layout = program, layout
        self.places = layout.places(program)
        self.steps = steps_by_place(program, self.places)

    def place(self, ref: Ref) -> Place:
        """The place of a value."""
        if ref.step < 0:
            return Place(Outside(ref.step, ref.port))
        place = self.places[ref.step]
        if isinstance(place.source, Each):
            return Place(Each(place.source.loop, place.source.step, ref.port), place.index)
        assert isinstance(place.source, Outside)
        if ref.port is not None and is_sliced(self.program.steps[ref.step]):
            return Place(Items(place.source.step), ref.port)
        return Place(Outside(place.source.step, ref.port))

    def kind(self, place: Place) -> tuple[Any, ...]:
        """dtype, device and shape of the value at a place."""
        source, index = place.source, place.index
        if isinstance(source, Outside) and source.step < 0:
            return _kind_of((self.program.trace.fakes + self.program.trace.lifted)[~source.step])
        if isinstance(source, Items):
            return _kind_of(self.steps[Place(Outside(source.step))].value[index])
        bare = Each(source.loop, source.step) if isinstance(source, Each) else Outside(source.step)
        value = self.steps[Place(bare, index)].value
        return _kind_of(value if source.port is None else value[source.port])


class _Roller:
    def __init__(self, short: Program, long: Program, layout: Layout) -> None:
        self.layout, self.programs = layout, [Located(p, layout) for p in (short, long)]
        self.lengths = [short.length, long.length]
        self.is_functional = short.had_writes

    def rolled(self) -> Rolled:
        short, long = self.programs
        outside = [p for p in short.places if isinstance(p.source, Outside)]
        steps = [[located.steps[p] for located in self.programs] for p in outside]
        operands = [self.outside_step(pair) for pair in steps]
        bodies = [self.body(loop) for loop in range(len(self.layout.regions))]
        if len(short.program.results) != len(long.program.results):
            raise NotRolled("what it returns or keeps depends on the length of the loop")
        pairs = zip(short.program.results, long.program.results, strict=True)
        return Rolled(short.program, self.layout, operands, bodies, [self.outside(pair) for pair in pairs])

    # ------------------------------------------------------------------ outside the loops
    def outside_step(self, pair: Sequence[Step]) -> list[Operand]:
        """The operands of a step outside the loops, at both lengths."""
        leaves = list(zip(*(step.leaves for step in pair), strict=True))
        if self.layout.is_fixed and pair[0].target in JOINED and isinstance(leaves[0][0], list):
            return [self.in_runs(leaves[0]), *map(self.outside, leaves[1:])]
        return [self.outside(each) for each in leaves]

    def outside(self, leaves: Sequence[Any]) -> Operand:
        """An operand of a step outside the loops, at both lengths."""
        first = leaves[0]
        if isinstance(first, Ref):
            return self.read([located.place(ref) for located, ref in zip(self.programs, leaves, strict=True)])
        if isinstance(first, list):
            return self.list_of(leaves)
        return _plain(leaves, lambda: fit_lengths(leaves, self.lengths))

    def read(self, places: Sequence[Place]) -> Read:
        """A value of the same source, at an index by the length."""
        index = fitted({(0, n): p.index for n, p in zip(self.lengths, places, strict=True)})
        if len({p.source for p in places}) > 1 or index is None:
            raise NotRolled("what is read after the loop depends on its length")
        return Read(places[0].source, index)

    def list_of(self, leaves: Sequence[Sequence[Ref]]) -> Operand:
        """A list of tensors: read one by one, or, where the length decides how many there are, in runs."""
        lists = [[p.place(ref) for ref in refs] for p, refs in zip(self.programs, leaves, strict=True)]
        if len(lists[0]) == len(lists[1]):
            return tuple(self.read(places) for places in zip(*lists, strict=True))
        return self.parts_of(lists)

    def in_runs(self, leaves: Sequence[Sequence[Ref]]) -> Operand:
        """A list that is put together behind turns of a fixed number: in runs, where it has any."""
        parts = self.parts_of([[p.place(ref) for ref in refs] for p, refs in zip(self.programs, leaves, strict=True)])
        return self.list_of(leaves) if all(isinstance(part, Read) for part in parts.parts) else parts

    def parts_of(self, lists: Sequence[Sequence[Place]]) -> Parts:
        runs = [_runs(places) for places in lists]
        if len(runs[0]) != len(runs[1]):
            raise NotRolled("a list of tensors is not in the order of the loop")
        return Parts(tuple(self.run(pair) for pair in zip(*runs, strict=True)))

    def run(self, pair: Sequence[list[list[Place]]]) -> Read | Run | tuple[Run, ...]:
        """A part of a list at both lengths, in columns: the first, second, .. of every turn."""
        short, long = pair
        if len(short) != len(long):
            raise NotRolled("a list of tensors is not in the order of the loop")
        if len(short) == len(short[0]) == len(long[0]) == 1:
            return self.read([columns[0][0] for columns in pair])
        columns = tuple(self.column(each) for each in zip(short, long, strict=True))
        return columns if len(columns) > 1 else columns[0]

    def column(self, pair: Sequence[list[Place]]) -> Run:
        starts, counts = [run[0] for run in pair], [len(run) for run in pair]
        count = fitted({(0, n): c for n, c in zip(self.lengths, counts, strict=True)})
        assert count is not None  # two values
        start, direction = self.read(starts), pair[1][1].index - pair[1][0].index
        return Run(start.source, start.index, count, direction)

    # ------------------------------------------------------------------ within a loop
    def body(self, loop: int) -> list[list[Operand]]:
        return [self.step(loop, step) for step in range(self.layout.regions[loop].period)]

    def step(self, loop: int, step: int) -> list[Operand]:
        samples = [(p, t) for p in self.programs for t in self._ts(p, loop)]
        every = {(t, p.program.length): p.steps[Place(Each(loop, step), t)] for p, t in samples}
        if len({len(s.leaves) for s in every.values()}) > 1:
            raise LoopFailure(loop, "its steps are not the same ones each time")
        leaves = zip(*(s.leaves for s in every.values()), strict=True)
        return [self.within(loop, dict(zip(every, column, strict=True))) for column in leaves]

    def _ts(self, located: Located, loop: int) -> range:
        return range(self.layout.at(located.program.length)[loop].count)

    def within(self, loop: int, leaves: Mapping[Sample, Any]) -> Operand:
        """An operand of a step of a loop, at all its steps and both lengths."""
        first = next(iter(leaves.values()))
        if isinstance(first, list):
            if len({len(refs) for refs in leaves.values()}) > 1:
                raise LoopFailure(loop, "a step of the loop reads a list that grows with it")
            columns = ({s: refs[i] for s, refs in leaves.items()} for i in range(len(first)))
            return tuple(self.within(loop, column) for column in columns)
        if isinstance(first, Ref):
            by_length = {p.program.length: p for p in self.programs}
            return self.value(loop, {(t, n): by_length[n].place(ref) for (t, n), ref in leaves.items()})
        if isinstance(first, Float):
            return _float(loop, leaves)
        found = fit(leaves) if isinstance(first, Mapping) else None
        if isinstance(first, Mapping) and found is None:
            raise LoopFailure(loop, "a number is no affine function of the step")
        return found if found is not None else _plain(list(leaves.values()), None)

    def value(self, loop: int, places: Mapping[Sample, Place]) -> Operand:
        """A tensor that a step of a loop reads."""
        source, index = self._common(places)
        if isinstance(source, Each) and source.loop == loop:
            offset = {p.index - t for (t, _), p in places.items()}
            if offset == {0}:
                return Same(source.step, source.port)
        elif source is not None:
            if index is None:
                raise LoopFailure(loop, "what it reads is at no affine index")
            return Read(source, index)
        return self.carried(loop, places)

    def _common(self, places: Mapping[Sample, Place]) -> tuple[Source | None, Affine | None]:
        sources = {p.source for p in places.values()}
        return (sources.pop(), fitted({s: p.index for s, p in places.items()})) if len(sources) == 1 else (None, None)

    def carried(self, loop: int, places: Mapping[Sample, Place]) -> Carried:
        """A value of steps before; the first steps read something else."""
        (last_t, _), last = max(places.items(), key=lambda item: item[0])
        source, distance = last.source, last_t - last.index
        if not isinstance(source, Each) or source.loop != loop or not 0 < distance <= DEEPEST:
            raise LoopFailure(loop, "what it reads is another value in each step")
        own = {t for (t, _), p in places.items() if isinstance(p.source, Each) and p.source.loop == loop}
        if own != set(range(distance, last_t + 1)) or any(
            p != Place(source, t - distance) for (t, _), p in places.items() if t >= distance
        ):
            raise LoopFailure(loop, "what it reads is another value in each step")
        self.require_small(source)
        first = [[places[t, n] for n in self.lengths] for t in range(distance)]
        kinds = {self.programs[0].kind(p) for p in (*(pair[0] for pair in first), Place(source, 0))}
        if len(kinds) > 1:
            raise LoopFailure(loop, "what a step hands on to the next has another shape or dtype than at first")
        try:
            return Carried(source.step, source.port, tuple(map(self.read, first)))
        except NotRolled as why:
            raise LoopFailure(loop, why.reason) from None

    def require_small(self, source: Each) -> None:
        """Raises NotRolled where a buffer as long as the loop would be copied in each step, that was written to."""
        if not self.is_functional or not is_partial(self.programs[0].steps[Place(Each(source.loop, source.step))]):
            return
        shapes = [p.kind(Place(source, 0))[-1] for p in self.programs]
        if shapes[0] != shapes[1] or self.layout.is_fixed:
            raise NotRolled("each of its steps writes to a part of a tensor that is as long as the loop")


DEEPEST = 4
"""The most steps back that a value is read from."""


def _plain(leaves: Sequence[Any], number: Callable[[], Fit] | None) -> Operand:
    """What is no tensor: the same everywhere, or a number."""
    if isinstance(leaves[0], Mapping) and number is not None:
        return number()
    if any(leaf != leaves[0] for leaf in leaves):
        raise NotRolled("a value is another one at each length")
    if isinstance(leaves[0], Float):
        return constant_of(leaves[0].value)
    assert isinstance(leaves[0], Constant | Expression)
    return leaves[0]


def _float(loop: int, floats: Mapping[Sample, Float]) -> Operand:
    """A float that all steps are given, or one that each computes."""
    first, *others = floats.values()
    if all(first.is_bitwise(other.value) for other in others):
        return constant_of(first.value)
    if (found := formula_of(floats)) is None:
        raise LoopFailure(loop, "a float is another one in each step, and of no form that is known")
    return found


def is_partial(step: Step) -> bool:
    """True for an operation that was a write to a part of a tensor."""
    return bool(PARTIAL.search(str(step.target)))


PARTIAL = re.compile(r"scatter|index_(put|add|copy|fill)|masked_fill")


def _kind_of(value: Any) -> tuple[Any, ...]:
    return value.dtype, value.device, tuple(hint_of(n) for n in value.shape)


def _runs(places: Sequence[Place]) -> list[list[list[Place]]]:
    """The list cut where its values no longer go on as they did; each part in columns: of every turn the first, .."""
    runs: list[list[list[Place]]] = []
    at = 0
    while at < len(places):
        found = ((width, _turns(places[at:], width)) for width in range(1, WIDEST + 1))
        width, turns = next(((w, n) for w, n in found if n > 1), (1, 1))
        runs.append([list(places[at + i : at + width * turns : width]) for i in range(width)])
        at += width * turns
    return runs


WIDEST = 4
"""The most values that every turn of a loop puts into one list."""


def _turns(places: Sequence[Place], width: int) -> int:
    """How often so many values are followed by the next ones, or those before, of the same sources."""
    if len(places) < 2 * width:
        return 1
    moves = [b.index - a.index for a, b in zip(places, places[width : 2 * width], strict=False)]
    if any(move not in (1, -1) for move in moves):
        return 1
    pairs = zip(places, places[width:], itertools.cycle(moves), strict=False)
    following = itertools.takewhile(lambda p: p[1] == Place(p[0].source, p[0].index + p[2]), pairs)
    return 1 + sum(1 for _ in following) // width
