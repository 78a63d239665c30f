"""Claims about a kernel's accesses, and the kernel as it was read while proofs of them are looked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..kernel import Kernel
from .bounds import World
from .polynomials import Poly
from .reading import Read, Reader

Answer = Literal["proved", "group", "data", "unproved"]


@dataclass(frozen=True)
class Claim:
    """One access, and the answer whether it stays in its tensor; `condition`: of the values of an index, for that.

    `asserted`: the proof rests on what the kernel asserts of an index, right before.
    """

    line: int
    text: str
    kind: str
    answer: Answer
    condition: str = ""
    asserted: bool = False


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
    """The claims about one kernel, and the faults: all that was not proved."""

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


@dataclass
class Subject:
    """A kernel that was read, and the memory behind its pointers."""

    kernel: Kernel
    world: World
    memory: dict[str, Memory]
    scalars: dict[str, Poly]
    reader: Reader
    faults: list[Fault] = field(default_factory=list)

    @property
    def read(self) -> Read:
        return self.reader.read
