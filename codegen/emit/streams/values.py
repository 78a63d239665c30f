"""Values of a streamed kernel: each term in its own dimensions, vectors spread where tiles read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

import numpy as np

from ....ir.text.source_names import assigned_name
from ....ir.types import FLOATS, Size
from ...program.axes import Term
from ...program.sizes import evaluate_size
from ...schedule.separation.algebra import LOG2E, is_number
from ...schedule.streams.masks import affine
from ...schedule.streams.powers import BESIDE_ONE
from ..access.descriptors import Descriptors
from ..context import default_name, name_of
from ..emit import Emitter
from ..mathematics import cast, register_dtype
from ..names import LONGEST
from ..statements import Expr, Scope, binary, call, literal
from ..values import Values, digits_of
from .shapes import Shapes

ROWS = {"mul": "shift", "div": "inverse"}
"""What rows are to tiles: added to exponents, multiplied with."""


SAME = ("cast", "where", "add", "sub")
"""Operations that leave a matrix what it is to the reader: rounded, masked, moved."""


NEAR = 1 << 16
"""Offsets that a length leaves room for in 32 bits."""


def _is_near(offset: Size) -> bool:
    return isinstance(offset, int) and abs(offset) < NEAR


class StreamValues(Values):
    """Values that know the dimensions of a term."""

    def __init__(self, emitter: Emitter, shapes: Shapes) -> None:
        super().__init__(
            emitter.context, emitter.buffers, emitter.tile, emitter.levels, emitter.addresses, emitter.loads,
            emitter.checks, emitter.pairs, emitter.folding,
        )  # fmt: skip
        self.shapes = shapes
        self.descriptors: Descriptors | None = None

    def value(self, term: Term, scope: Scope) -> Expr:
        """The term, spread to the dimensions at hand."""
        dims = self.shapes.dims(term)
        if not dims or term.op == "const":
            return super().value(term, scope)
        with self.shapes.of(*dims):
            found = super().value(term, scope)
        return self.shapes.spread(found, dims)

    def read(self, term: Term, scope: Scope) -> Expr:
        """Tiles of the stream by the tensor memory accelerator, where it takes them."""
        tile = self.descriptors.read(term) if self.descriptors is not None and self._is_described(term) else None
        return super().read(term, scope) if tile is None else tile

    def _is_described(self, term: Term) -> bool:
        """Operands of products go to shared memory anyway; of other tiles, those that lie across."""
        roles = self.shapes.roles
        return not {roles.row, roles.stream} <= term.axes or dict(term.param.place.terms).get(self.tile.dims[-1]) != 1

    def compute(self, term: Term, scope: Scope) -> Expr:
        """Distances of places are of 32 bits, where a float is made of them."""
        if term.op == "cast" and term.dtype in FLOATS and (distance := self._distance(term.args[0], scope)) is not None:
            return cast(distance, "i32", register_dtype(term.dtype))
        return super().compute(term, scope)

    def _elementwise(self, term: Term, args: list[Expr], scope: Scope) -> Expr:
        """Powers that count for nothing where they are subnormal are one instruction of NVIDIA's processors."""
        target = self.context.target
        if term.param == BESIDE_ONE and target.kind == "cuda" and not target.fast:
            exponent = args[0] if term.op == "exp2" else binary("*", args[0], literal(repr(LOG2E)))
            return call("near_power", exponent, literal("True"))
        return super()._elementwise(term, args, scope)

    def rounded(self, term: Term, value: Expr) -> Expr:
        """Tiles of bfloat16 two at once, but for what NVIDIA's processors compute in bfloat16."""
        is_tile = term.dtype == "bf16" and self._is_tile(term)
        if is_tile and self.context.target.kind == "cuda" and not _is_of_bfloat16(term):
            return call("rounded_pairs", value)
        return super().rounded(term, value)

    def _distance(self, term: Term, scope: Scope) -> Expr | None:
        """j - i + n, of a place along the stream and a row, both of which 32 bits count; None for other terms."""
        roles, sizes = self.shapes.roles, self.context.sizes
        found = affine(term, roles) if term.dtype == "i64" else None
        if found is None or {found.stream, found.row} != {1, -1} or found.numbers or not _is_near(found.offset):
            return None
        axes = (roles.stream, roles.row) if found.stream == 1 else (roles.row, roles.stream)
        if any(evaluate_size(a.size, self.context.hints) >= LONGEST for a in axes):
            return None
        for axis in axes:
            sizes.require_countable(axis.size)
        plus, minus = axes
        between = binary("-", *map(self.shapes.first_in_32_bits, axes))
        if found.offset:
            between = binary("+", between, literal(found.offset))
        apart = self.context.let(scope, "apart", between)
        with self.shapes.of(roles.row, roles.stream):
            return binary("-", binary("+", self.tile.lane(plus), apart), self.tile.lane(minus))

    def _named(self, term: Term, value: Expr, home: Scope, scope: Scope) -> Expr:
        """A product of tiles is rounded where it is read, if it is read once."""
        is_inline = term in self.accumulated and self.uses.get(term, 0) <= 1 and not value.text.isidentifier()
        return value if is_inline else super()._named(term, value, home, scope)

    def default_name(self, term: Term) -> str:
        """p for a power, z for its exponent; else what its line gives a name, or what it is made of."""
        if not self._is_tile(term):
            return ROWS.get(term.op) or default_name(term)
        if self._is_power(term):
            return "p"
        if term.op in ("fma", *SAME):
            return self._moved_from(term) or "z"
        return (term.node and assigned_name(term.node)) or default_name(term)

    def _is_tile(self, term: Term) -> bool:
        return len(self.shapes.dims(term)) > 1

    def _is_power(self, term: Term) -> bool:
        """An exponential, masked, rounded or divided by a row."""
        while term.op in ("cast", "where") or (term.op == "mul" and not self._is_tile(term.args[1])):
            term = term.args[1 if term.op == "where" else 0]
        return term.op in ("exp", "exp2")

    def _moved_from(self, term: Term) -> str | None:
        """The user's name of the matrix below sums, masks and roundings."""
        while term.op in SAME and name_of(term) is None:
            term = term.args[1 if term.op == "where" else 0]
        return name_of(term) if self._is_tile(term) else None

    def read_row(self, term: Term, home: Scope) -> Expr:
        """A tile as it is in memory."""
        with self.shapes.of(*self.shapes.dims(term)):
            return super().read_row(term, home)


def _is_of_bfloat16(term: Term) -> bool:
    """Whether the compiler sees one operation of bfloat16 in this one of float32, which is rounded then.

    And where an integer is rounded: apart, both steps take more registers.
    """
    if term.op == "cast" and term.args[0].dtype not in FLOATS:
        return True
    term = term.args[0] if term.op == "cast" else term
    if term.op == "div" and is_number(term.args[1]):
        return _fits_bfloat16(np.float32(1) / np.float32(term.args[1].param))
    return term.op in ("add", "sub", "mul") and all(
        _fits_bfloat16(a.param) if is_number(a) else digits_of(a) == "bf16" for a in term.args
    )


def _fits_bfloat16(number: float | np.float32) -> bool:
    return int(np.float32(number).view(np.uint32)) & 0xFFFF == 0


def uses_of(roots: Sequence[Term], complete: Container[Term]) -> dict[Term, int]:
    """How often each term is read below the roots, as far down as sums that a loop makes."""
    uses: dict[Term, int] = dict(Counter(roots))
    todo, seen = list(roots), set[Term]()
    while todo:
        term = todo.pop()
        if term in seen or term in complete:
            continue
        seen.add(term)
        for arg in term.args:
            uses[arg] = uses.get(arg, 0) + 1
        todo += term.args
    return uses
