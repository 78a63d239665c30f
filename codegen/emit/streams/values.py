"""Values of a streamed kernel: each term in its own dimensions, vectors spread where tiles read them."""

from __future__ import annotations

from ....ir.text.source_names import assigned_name
from ...program.axes import Term
from ..context import default_name, name_of
from ..emit import Emitter
from ..statements import Expr, Scope
from ..values import Values
from .shapes import Shapes

ROWS = {"mul": "shift", "div": "inverse"}
"""What rows are to tiles: added to exponents, multiplied with."""


SAME = ("cast", "where", "add", "sub")
"""Operations that leave a matrix what it is to the reader: rounded, masked, moved."""


class StreamValues(Values):
    """Values that know the dimensions of a term."""

    def __init__(self, emitter: Emitter, shapes: Shapes) -> None:
        super().__init__(
            emitter.context, emitter.buffers, emitter.tile, emitter.levels, emitter.addresses, emitter.loads,
            emitter.checks, emitter.pairs, emitter.folding,
        )  # fmt: skip
        self.shapes = shapes

    def value(self, term: Term, scope: Scope) -> Expr:
        """The term, spread to the dimensions at hand."""
        dims = self.shapes.dims(term)
        if not dims or term.op == "const":
            return super().value(term, scope)
        with self.shapes.of(*dims):
            found = super().value(term, scope)
        return self.shapes.spread(found, dims)

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
