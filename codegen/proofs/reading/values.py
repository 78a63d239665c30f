"""Values of a kernel's text, and what reading it gathers: accesses, promises, and values that 32 bits have to hold."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ..atoms import Facts
from ..polynomials import ZERO, Poly


class UnreadableText(Exception):
    """The text has something that is not understood."""

    def __init__(self, reason: str, line: int) -> None:
        super().__init__(f"line {line}: {reason}")


@dataclass(frozen=True, slots=True)
class Need:
    """A value that 32 bits have to hold while the size arguments `narrow` are 32 bits wide, under `facts`."""

    value: Poly
    narrow: frozenset[str]
    facts: Facts
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Int:
    """An integer, or a block of them; its width in bits (0: known when compiled), and what has to fit on the way."""

    poly: Poly
    width: int = 0
    narrow: frozenset[str] = frozenset()
    needs: tuple[Need, ...] = ()


@dataclass(frozen=True, slots=True)
class Truth:
    """A condition: facts where it is true, facts where it is false."""

    true: Facts = ()
    false: Facts = ()
    needs: tuple[Need, ...] = ()
    ticket: Ticket | None = None


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address: so many elements behind an argument."""

    name: str
    offset: Poly = ZERO
    needs: tuple[Need, ...] = ()


@dataclass(frozen=True, slots=True)
class Opaque:
    """A float, or anything else that no address is made of."""

    value: Any = None


@dataclass(frozen=True, slots=True)
class Tiles:
    """A descriptor: tiles of `blocks` elements of a matrix; its lengths, and the elements from place to place."""

    matrix: Pointer
    lengths: tuple[Poly, ...]
    strides: tuple[Poly, ...]
    blocks: tuple[Poly, ...]


Value: TypeAlias = "Int | Truth | Pointer | Tiles | Opaque"
Kind = Literal["load", "store", "atomic"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """True in one of the programs that meet at a counter: those for which it is the same."""

    pointer: str
    offset: Poly


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of a mask: its text, and what the names in it stood for."""

    text: str
    values: tuple[Value, ...]

    def is_same(self, other: Condition) -> bool:
        """The same text about the very same values: of equal ones as little may be known."""
        return self.text == other.text and all(a is b for a, b in zip(self.values, other.values, strict=True))


@dataclass(frozen=True, slots=True)
class Assertion:
    """`tl.device_assert`: facts about the lanes under its mask, from there on."""

    facts: Facts
    mask: tuple[Condition, ...]

    def holds_under(self, mask: tuple[Condition, ...]) -> bool:
        """True if another mask has all conditions of the assertion's own."""
        return all(any(condition.is_same(c) for c in mask) for condition in self.mask)


@dataclass(frozen=True, slots=True)
class Access:
    """One place of the text that touches memory, in every turn of the loops around it."""

    kind: Kind
    pointer: str
    offset: Poly
    facts: Facts  # of the branches and loops around it, of its mask, and what was asserted of the lanes under it
    tickets: tuple[Ticket, ...]
    line: int
    text: str
    stored: frozenset[str] = frozenset()  # names that the value is made of
    asserted: bool = False  # of its place, too


@dataclass(frozen=True, slots=True)
class Hint:
    """`tl.multiple_of(value, factor)`: promised to the compiler."""

    value: Poly
    factor: int
    line: int
    text: str


@dataclass
class Read:
    """All that a text says."""

    accesses: list[Access] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)
    needs: dict[Need, None] = field(default_factory=dict)  # of loops, masks and addresses
    divisions: list[tuple[str, int]] = field(default_factory=list)  # of which the sign or a zero is not excluded
    spans: dict[int, tuple[Poly, Poly]] = field(default_factory=dict)  # turn: start, stop of the loop's variable
    steps: dict[int, Poly] = field(default_factory=dict)
    program: int | None = None


LARGEST = 2**31 - 1
"""The largest integer of 32 bits."""


def margins(value: Poly) -> tuple[Poly, Poly]:
    """Not negative where 32 bits hold the value."""
    return -value + LARGEST, value + LARGEST + 1


def union_of_needs(*needs: tuple[Need, ...]) -> tuple[Need, ...]:
    return tuple(dict.fromkeys(need for group in needs for need in group))


def integer_result(a: Int, b: Int, poly: Poly) -> Int:
    """As wide as Triton makes the result: of two integers the wider, an argument as wide as its value."""
    width = max(a.width, b.width)
    return Int(poly, width, frozenset() if width == 64 else a.narrow | b.narrow, union_of_needs(a.needs, b.needs))


def atoms_of(value: Value) -> set[int]:
    if isinstance(value, Truth):
        return {a for fact in (*value.true, *value.false) for a in fact.atoms}
    poly = value.poly if isinstance(value, Int) else value.offset if isinstance(value, Pointer) else ZERO
    return poly.atoms


def names_in(node: ast.expr) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
