"""Products of matrices inside a streamed kernel: `tl.dot` of tiles in the dtype that is multiplied."""

from __future__ import annotations

from dataclasses import dataclass

from ....ir.types import LOW_FLOATS
from ...program.axes import Axis, Term
from ...schedule.streams.algebra import source_of
from ...schedule.streams.roles import Roles
from ..context import Context, name_of
from ..mathematics import narrow
from ..statements import Expr, Let, Scope, call, name
from ..values import Values
from .shapes import Shapes

PRECISION, EXACTLY = "PRECISION", "ieee"
"""The constant of kernels that multiply float32, and its value where torch's setting allows no TF32."""


@dataclass(eq=False)
class TileProducts:
    """`beside`: the turn of a loop, and its values in tiles that have the stream along their first axis."""

    context: Context
    shapes: Shapes
    values: Values
    roles: Roles
    beside: tuple[Scope, Scope] | None = None

    def emit(self, term: Term, scope: Scope) -> None:
        """A tile product [row, stream], under a name; its value is known from here on."""
        (depth, *more), (x, y) = term.param, term.args[0].args
        assert not more
        left, right = (x, y) if self.roles.row in x.axes else (y, x)
        dtype = self.multiplied_in(x, y, term)
        first = self.operand(left, (self.roles.row, depth), dtype, scope)
        second = call("tl.trans", self.operand(right, (self.roles.stream, depth), dtype, scope))
        label = self.context.names.fresh(name_of(term), "product")
        product = call("tl.dot", first, second, **self.precision(dtype))
        home = scope.home(self.values.levels.of(term))
        home.body.append(Let(label, product, self.context.comment(term)))
        self.values.accumulated[term] = name(label)

    def multiplied_in(self, x: Term, y: Term, term: Term) -> str:
        """The dtype of the operands: low floats that were only widened are multiplied as they were, exactly."""
        sources = {source_of(t).dtype for t in (x, y)}
        node = term.node.dtype if term.node is not None and term.node.prim == "dot" else term.dtype
        return sources.pop() if len(sources) == 1 else node

    def operand(self, term: Term, dims: tuple[Axis, Axis], dtype: str, scope: Scope) -> Expr:
        """A tile of these two axes."""
        term = source_of(term) if dtype in LOW_FLOATS else term
        home = self.scope_of(dims, scope)
        with self.shapes.of(*dims):
            if term.op == "load" and term.dtype == dtype and dtype in LOW_FLOATS:
                return self.values.read_row(term, home.home(self.values.levels.of(term)))
            value = self.values.value(term, home)
        return narrow(value, dtype) if dtype in LOW_FLOATS else value

    def scope_of(self, dims: tuple[Axis, Axis], scope: Scope) -> Scope:
        """The block at hand; with its own memory of values where the stream lies along the first axis."""
        if dims[0] is not self.roles.stream:
            return scope
        if self.beside is None or self.beside[0] is not scope:
            self.beside = scope, Scope(scope.level, scope.parent, scope.body)
        return self.beside[1]

    def precision(self, dtype: str) -> dict[str, Expr | str]:
        """The precision of float32 operands; what torch's setting allows is looked up at each launch."""
        if dtype != "f32":
            return {}
        self.context.sizes.constants[PRECISION] = EXACTLY
        return {"input_precision": name(PRECISION)}
