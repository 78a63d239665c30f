"""What is claimed of a kernel's accesses, and what is known of a kernel while that is looked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..kernel import Kernel
from . import reading
from .bounds import World
from .polynomials import Poly
from .reading import Reader
from .symbols import Sizes

Answer = Literal["proved", "group", "data", "unproved"]


@dataclass(frozen=True)
class Claim:
    """One access and whether it stays in its tensor. `condition`: what the values of an index have to be for that."""

    line: int
    text: str
    kind: str
    answer: Answer
    condition: str = ""


@dataclass(frozen=True)
class Fault:
    """Something that no proof was found for."""

    kind: str  # "range", "width", "overlap", "hint", "division", "text"
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.kind}, line {self.line}: {self.text}"


@dataclass(frozen=True)
class Proof:
    """What is known of one kernel."""

    kernel: str
    claims: tuple[Claim, ...] = ()
    faults: tuple[Fault, ...] = ()
    narrow: int = 0  # 32-bit values of which it was proved that they fit
    apart: int = 0  # stores of which it was proved that programs do not share a place

    @property
    def proved(self) -> bool:
        return not self.faults

    def count(self, *answers: Answer) -> int:
        return sum(c.answer in answers for c in self.claims)


@dataclass(frozen=True)
class Memory:
    """A tensor: how many elements of it there are, where it is not empty, and its dimensions."""

    extent: Poly
    shape: tuple[Poly, ...]
    strides: tuple[Poly, ...]


@dataclass
class Subject:
    """A kernel that was read, and the memory behind its pointers."""

    kernel: Kernel
    world: World
    sizes: Sizes
    memory: dict[str, Memory]
    scalars: dict[str, Poly]
    reader: Reader
    faults: list[Fault] = field(default_factory=list)

    @property
    def read(self) -> reading.Read:
        return self.reader.read


def multiple(world: World, value: Poly, factor: int, depth: int = 6) -> bool:
    """Provably a multiple: with choices made and remainders written out."""
    if value.divided(Poly.of(factor)) is not None:
        return True
    open_ = [a for a in value.atoms if a in world.cases or (a in world.divisions and world.divisions[a].kind == "%")]
    if not open_ or not depth:
        return False
    atom = max(open_)
    cases = [c.value for c in world.cases[atom][1]] if atom in world.cases else [_remainder(world, atom)]
    return all(multiple(world, value.with_atom(atom, c), factor, depth - 1) for c in cases)


def _remainder(world: World, atom: int) -> Poly:
    """x % d  ->  x - d * (x // d)"""
    division = world.divisions[atom]
    found = world.divided(division.x, division.d)
    assert found is not None
    return division.x - division.d * found[0]
