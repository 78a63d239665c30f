"""What a value of a rolled trace is, in terms of its loops: at each length, the same words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .affine import Affine, Fit
from .alignment import Region
from .floats import Formula
from .program import Constant, Expression, Program, Step

# ---------------------------------------------------------------------------------------------- where values come from


@dataclass(frozen=True)
class Outside:
    """An input (`~index`), or a result of a step outside the loops, by its number among these."""

    step: int
    port: int | None = None


@dataclass(frozen=True)
class Items:
    """The slices that `unbind` or `split(1)`, a step outside the loops, takes."""

    step: int


@dataclass(frozen=True)
class Each:
    """A result of one step of a loop's body, which there is once for each t."""

    loop: int
    step: int
    port: int | None = None


Source = Outside | Items | Each


@dataclass(frozen=True)
class Place:
    """One value: its source, and which of its values (0 where it has one)."""

    source: Source
    index: int = 0


# ---------------------------------------------------------------------------------------------- what is read
@dataclass(frozen=True)
class Read:
    """A value from a source at an index; within a body the index may depend on the step."""

    source: Source
    index: Affine


@dataclass(frozen=True)
class Same:
    """A value of the same step of the same loop."""

    step: int
    port: int | None = None


@dataclass(frozen=True)
class Carried:
    """A value of the loop's own, of as many steps before as there are `first` ones to begin with."""

    step: int
    port: int | None
    first: tuple[Any, ...]


@dataclass(frozen=True)
class Run:
    """Values of a source in a row, in a list: from `start` on, `count` of them, forwards (1) or backwards (-1)."""

    source: Source
    start: Affine
    count: Affine
    direction: int


@dataclass(frozen=True)
class Parts:
    """A list of tensors that is as long as a loop. (a run, a run): one value of each, the next one of each, .."""

    parts: tuple[Read | Run | tuple[Run, ...], ...]


Operand = Read | Same | Carried | Parts | Fit | Formula | Constant | Expression | tuple[Any, ...]


@dataclass(frozen=True)
class Rolled:
    """Steps outside the loops, and loops between them; for each step its operands.

    shown: the program that says what each step calls.
    """

    shown: Program
    layout: Layout
    outside: list[list[Operand]]
    bodies: list[list[list[Operand]]]
    results: list[Operand]


@dataclass(frozen=True)
class Layout:
    """Where the loops are in the program of length `length`; with each step more of it, so many of theirs are more.

    is_fixed: there is one program, and they are as long as they are in it.
    """

    length: int
    regions: tuple[Region, ...]
    is_fixed: bool = False

    def at(self, length: int) -> tuple[Region, ...]:
        """The regions in the program of another length."""
        more, moved, found = length - self.length, 0, list[Region]()
        for region in self.regions:
            count = region.count + more * region.more
            found.append(replace(region, start=region.start + moved, count=count))
            moved += more * region.more * region.period
        return tuple(found)

    def counts(self, loop: int) -> Affine:
        """How often a loop's body runs."""
        region = self.regions[loop]
        if self.is_fixed:
            return Affine(0, 0, region.count)
        return Affine(0, region.more, region.count - region.more * self.length)

    def places(self, program: Program) -> list[Place]:
        """The place of each step of a program."""
        found, regions, number, at = list[Place](), self.at(program.length), 0, 0
        for loop, region in enumerate(regions):
            outside = region.start - at
            found += [Place(Outside(number + i)) for i in range(outside)]
            found += [Place(Each(loop, j), t) for t in range(region.count) for j in range(region.period)]
            number, at = number + outside, region.stop
        return found + [Place(Outside(number + i)) for i in range(len(program.steps) - at)]

    def order(self, program: Program) -> list[tuple[str, int]]:
        """The steps outside and the loops as they run: ("step", its number), ("loop", its number)."""
        found: list[tuple[str, int]] = []
        for place in self.places(program):
            source = place.source
            entry = ("loop", source.loop) if isinstance(source, Each) else ("step", source.step)
            found += [entry] if not found or found[-1] != entry else []
        return found


def steps_by_place(program: Program, places: Sequence[Place]) -> dict[Place, Step]:
    """The steps of a program by their places."""
    return dict(zip(places, program.steps, strict=True))


def reads_in(operand: Any) -> list[Any]:
    """Everything that an operand reads."""
    if isinstance(operand, Carried):
        return [operand, *(r for first in operand.first for r in reads_in(first))]
    if isinstance(operand, Parts | tuple):
        parts = operand.parts if isinstance(operand, Parts) else operand
        return [r for part in parts for r in reads_in(part)]
    return [operand]

