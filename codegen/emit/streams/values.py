"""Values of a streamed kernel: each term in its own dimensions, vectors spread where tiles read them."""

from __future__ import annotations

from ...program.axes import Term
from ..emit import Emitter
from ..statements import Expr, Scope
from ..values import Values
from .shapes import Shapes


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

    def read_row(self, term: Term, home: Scope) -> Expr:
        """A tile as it is in memory."""
        with self.shapes.of(*self.shapes.dims(term)):
            return super().read_row(term, home)
