"""Expressions and a small tree of statements: what a kernel body is before it is text.

    Let(x, load)   For(row, range, [ .. Accumulate(dw_acc, +, ..) .. Store(..) ])   If(last, [ .. ])

`prune` drops what nothing reads, `check` proves that every name is defined once and before its use, and that a vector
store to lanes that may lie outside carries a mask; `render` is the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ...ir.errors import InvalidGraphError

ATOM, UNARY, PRODUCT, SUM, SHIFT, AND, XOR, OR, COMPARISON = 10, 9, 8, 7, 6, 5, 4, 3, 2
STRENGTH = {
    "*": PRODUCT, "/": PRODUCT, "//": PRODUCT, "%": PRODUCT, "+": SUM, "-": SUM, "<<": SHIFT, ">>": SHIFT,
    "&": AND, "^": XOR, "|": OR, "==": COMPARISON, "!=": COMPARISON, "<": COMPARISON, "<=": COMPARISON,
    ">": COMPARISON, ">=": COMPARISON,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Expr:
    """Text, how tightly it binds, and the names that it reads (helpers and arguments included)."""

    text: str
    strength: int = ATOM
    names: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.text

    def inside(self, strength: int) -> str:
        """The text as an operand of something that binds with `strength`."""
        return self.text if self.strength >= strength else f"({self.text})"


def name(text: str) -> Expr:
    return Expr(text, ATOM, frozenset([text]))


def literal(text: str | int | float) -> Expr:
    """A number or constant; a negative one binds as a unary minus does."""
    text = str(text)
    return Expr(text, UNARY if text.startswith("-") else ATOM)


def binary(operator: str, left: Expr, right: Expr) -> Expr:
    """left operator right, left-associative; comparisons never chain."""
    own = STRENGTH[operator]
    chained = own if own != COMPARISON else own + 1
    return Expr(f"{left.inside(chained)} {operator} {right.inside(own + 1)}", own, left.names | right.names)


def unary(operator: str, operand: Expr) -> Expr:
    return Expr(f"{operator}{operand.inside(UNARY)}", UNARY, operand.names)


def call(function: str, *operands: Expr, **keywords: Expr | str) -> Expr:
    """function(operands, keyword=..); a helper's name counts as read."""
    texts = [o.text for o in operands] + [f"{k}={v}" for k, v in keywords.items()]
    names = frozenset().union(*(o.names for o in (*operands, *keywords.values()) if isinstance(o, Expr)))
    return Expr(f"{function}({', '.join(texts)})", ATOM, names | {function.split(".")[0]})


def method(operand: Expr, call_text: str) -> Expr:
    """operand.call_text"""
    return Expr(f"{operand.inside(ATOM)}.{call_text}", ATOM, operand.names)


def total(operator: str, operands: Iterable[Expr]) -> Expr | None:
    """a + b + .., None for nothing."""
    result: Expr | None = None
    for operand in operands:
        result = operand if result is None else binary(operator, result, operand)
    return result


def add(a: Expr, b: Expr) -> Expr:
    """Their sum, without a zero that is written out."""
    return a if b.text == "0" else b if a.text == "0" else binary("+", a, b)


def sum_of(parts: Sequence[Expr]) -> Expr | None:
    """The sum in order, negative parts subtracted; None of nothing."""
    result: Expr | None = None
    for part in parts:
        negative = part.text.startswith("-") and result is not None
        flipped = Expr(part.text[1:], part.strength, part.names) if negative and " " not in part.text else part
        result = part if result is None else binary("-" if flipped is not part else "+", result, flipped)
    return result


@dataclass(slots=True)
class Let:
    name: str
    value: Expr
    comment: str = ""


@dataclass(slots=True)
class Accumulate:
    """name = combined, where combined reads name; `name += value` for sums."""

    name: str
    operator: str  # "+=", "*=" or "="
    value: Expr
    comment: str = ""


@dataclass(slots=True)
class Store:
    """A store or, for `atomic`, an atomic addition. `lanes`: masks of the lanes that may lie outside."""

    pointer: Expr
    value: Expr
    mask: Expr | None
    lanes: frozenset[str] = frozenset()
    atomic: bool = False
    comment: str = ""


@dataclass(slots=True)
class Assert:
    """tl.device_assert: a fault where the condition is false under the mask; whatever comes later relies on it."""

    condition: Expr
    message: str
    mask: Expr | None = None


@dataclass(slots=True)
class Barrier:
    """tl.debug_barrier: what the program has stored so far is there for all of its threads."""


@dataclass(slots=True)
class Tell:
    """tell(word): other programs may read what this one has stored so far."""

    word: Expr


@dataclass(slots=True)
class For:
    variable: str
    over: Expr
    body: list[Statement]


@dataclass(slots=True)
class If:
    condition: Expr
    body: list[Statement]


Line = Let | Accumulate | Store | Assert | Barrier | Tell
Statement = Line | For | If


@dataclass(slots=True)
class Scope:
    """A block under construction. `memo` remembers which expression stands for what; lookups go outward."""

    level: int
    parent: Scope | None = None
    body: list[Statement] = field(default_factory=list)
    memo: dict[object, Expr] = field(default_factory=dict)
    closed: bool = False

    def define(self, label: str, value: Expr, comment: str = "") -> Expr:
        """The value under a name, from here on."""
        self.body.append(Let(label, value, comment))
        return name(label)

    def find(self, key: object) -> Expr | None:
        scope: Scope | None = self
        while scope is not None:
            if key in scope.memo:
                return scope.memo[key]
            scope = scope.parent
        return None

    def home(self, level: int) -> Scope:
        """The outermost open block at or below which something of this level may be computed."""
        scope = self
        while scope.level > level and scope.parent is not None and not scope.parent.closed:
            scope = scope.parent
        return scope


def assigned_names(body: Sequence[Statement]) -> set[str]:
    """The names that statements give, without those in blocks below."""
    return {s.name for s in body if isinstance(s, (Let, Accumulate))}


def prune(body: list[Statement], needed: set[str]) -> list[Statement]:
    """The statements that a store depends on; `needed` collects what they read, last first."""
    live: list[Statement] = []
    # From the last on: whatever is read below has to stay
    for statement in reversed(body):
        if isinstance(statement, (For, If)):
            live += _pruned_block(statement, needed)
        elif isinstance(statement, (Store, Assert, Barrier, Tell)) or statement.name in needed:
            needed |= _reads(statement)
            live.append(statement)
    return live[::-1]


def _pruned_block(block: For | If, needed: set[str]) -> list[Statement]:
    """Again as long as a turn of a loop is found to read, a condition too, what an earlier turn wrote."""
    head = block.over if isinstance(block, For) else block.condition
    within, known = needed | head.names, -1
    while known != len(within):
        known = len(within)
        inner = prune(block.body, within)
    if not inner:
        return []
    needed |= within
    block.body = inner
    return [block]


def _reads(statement: Line) -> frozenset[str]:
    if isinstance(statement, Barrier):
        return frozenset(["tl"])
    if isinstance(statement, Tell):
        return statement.word.names | {"tell"}
    if isinstance(statement, Assert):
        return statement.condition.names | (statement.mask.names if statement.mask else frozenset())
    if isinstance(statement, Store):
        return (
            statement.pointer.names | statement.value.names | (statement.mask.names if statement.mask else frozenset())
        )
    own = {statement.name} if isinstance(statement, Accumulate) else set()
    return statement.value.names | own


def check(body: Sequence[Statement], arguments: Iterable[str], kernel: str) -> None:
    """Every name defined once and before its use, every store masked where its lanes may lie outside."""
    defined = set(arguments)
    for fault in _text_faults(body, defined):
        raise InvalidGraphError(fault, node=f"kernel {kernel}")


def _text_faults(body: Sequence[Statement], defined: set[str]) -> Iterator[str]:
    for statement in body:
        yield from (f"{n} is read before it is defined" for n in sorted(_names_read(statement) - defined))
        if isinstance(statement, (For, If)):
            inner = set(defined) | ({statement.variable} if isinstance(statement, For) else set())
            yield from _text_faults(statement.body, inner)
        elif isinstance(statement, Let):
            if statement.name in defined:
                yield f"{statement.name} is defined twice"
            defined.add(statement.name)
        elif isinstance(statement, Store):
            masks = statement.mask.names if statement.mask else frozenset()
            yield from (f"a store lacks the mask {n}" for n in sorted(statement.lanes - masks))


def _names_read(statement: Statement) -> frozenset[str]:
    if isinstance(statement, For):
        return statement.over.names
    return statement.condition.names if isinstance(statement, If) else _reads(statement)


def render(body: Iterable[Statement], indent: str = "    ") -> Iterator[str]:
    """The lines of text."""
    for statement in body:
        if isinstance(statement, For):
            yield f"{indent}for {statement.variable} in {statement.over}:"
            yield from render(statement.body, indent + "    ")
        elif isinstance(statement, If):
            yield f"{indent}if {statement.condition}:"
            yield from render(statement.body, indent + "    ")
        else:
            comment = "" if isinstance(statement, (Assert, Barrier, Tell)) else statement.comment
            yield f"{indent}{_line(statement)}{'  # ' + comment if comment else ''}"


def _line(statement: Line) -> str:
    if isinstance(statement, Barrier):
        return "tl.debug_barrier()"
    if isinstance(statement, Tell):
        return f"tell({statement.word})"
    if isinstance(statement, Let):
        return f"{statement.name} = {statement.value}"
    if isinstance(statement, Accumulate):
        return f"{statement.name} {statement.operator} {statement.value}"
    mask = f", mask={statement.mask}" if statement.mask else ""
    if isinstance(statement, Assert):
        return f"tl.device_assert({statement.condition}, {json.dumps(statement.message)}{mask})"
    if statement.atomic:
        return f'tl.atomic_add({statement.pointer}, {statement.value}{mask}, sem="relaxed")'
    return f"tl.store({statement.pointer}, {statement.value}{mask})"


def read_names(body: Iterable[Statement]) -> set[str]:
    """Every name that a body reads."""
    names: set[str] = set()
    for statement in body:
        names |= _names_read(statement)
        if isinstance(statement, (For, If)):
            names |= read_names(statement.body)
    return names
