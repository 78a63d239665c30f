"""Products of matrices inside a streamed kernel: `tl.dot` of tiles in the dtype that is multiplied."""

from __future__ import annotations

from dataclasses import dataclass

from ....ir import Value
from ....ir.errors import Unfusible
from ....ir.types import LOW_FLOATS
from ...program.axes import Axis, Term
from ...schedule.separation.algebra import source_of
from ...schedule.streams.roles import Roles
from ..context import Context, name_of
from ..mathematics import narrow
from ..statements import Expr, Let, Scope, call, literal, name
from .shapes import Shapes
from .values import StreamValues


@dataclass(eq=False)
class TileProducts:
    """Products [row, stream] contracted along a depth, and operands of those that are summed along the stream."""

    context: Context
    values: StreamValues
    roles: Roles

    @property
    def shapes(self) -> Shapes:
        return self.values.shapes

    def emit(self, term: Term, scope: Scope) -> None:
        """A tile product [row, stream], under a name; its value is known from here on."""
        x, y = term.args[0].args
        if len(term.param) != 1:
            raise Unfusible(_node(term), "it is contracted along several axes")
        left, right = (x, y) if self.roles.row in x.axes else (y, x)
        dtype = self.multiplied_in(x, y, term)
        first, second = (self._contracted(side, term.param[0], dtype, scope) for side in (left, right))
        second = call("tl.trans", second)
        label = self.context.names.fresh(name_of(term) or self._of_operands(left, right))
        product = call("tl.dot", first, second, **self.context.precision(dtype))
        home = scope.home(self.values.levels.of(term))
        home.body.append(Let(label, product, self.context.comment(term)))
        self.values.accumulated[term] = name(label)

    def _contracted(self, term: Term, depth: Axis, dtype: str, scope: Scope) -> Expr:
        """An operand; its lanes beyond the end of the sum add nothing, whatever it makes of the zeros read there."""
        dims = tuple(dict.fromkeys((*self.shapes.dims(term), depth)))
        with self.shapes.of(*dims):
            mask, value = self.shapes.coords[depth].mask, self.operand(term, dtype, scope)
            if depth not in term.axes:  # one number along all of it, as a gradient of a sum is
                value = self.values.tile.broadcast(value, dims)
        if mask is None or (depth in term.axes and self.values.folding.pad(term, depth) == 0.0):
            return value
        return call("tl.where", mask, value, literal("0.0"))

    def _of_operands(self, *operands: Term) -> str:
        """q_k of q @ k.T, where both are in memory."""
        loads = [source_of(t) for t in operands]
        names = [name_of(t) if t.op == "load" else None for t in loads]
        return "_".join(map(str, names)) if all(names) else "product"

    def multiplied_in(self, x: Term, y: Term, term: Term) -> str:
        """The dtype of the operands: low floats that were only widened are multiplied as they were, exactly."""
        sources = {source_of(t).dtype for t in (x, y)}
        node = term.node.dtype if term.node is not None and term.node.prim == "dot" else term.dtype
        found = sources.pop() if len(sources) == 1 else node
        if found not in ("f16", "bf16", "f32"):
            raise Unfusible(_node(term), f"no tile of {found} is multiplied")
        return found

    def operand(self, term: Term, dtype: str, scope: Scope) -> Expr:
        """A tile in the dtype that is multiplied."""
        term = source_of(term) if dtype in LOW_FLOATS else term
        if term.op == "load" and term.dtype == dtype and dtype in LOW_FLOATS:
            return self.values.read_row(term, scope.home(self.values.levels.of(term)))
        value = self.values.value(term, scope)
        return narrow(value, dtype) if dtype in LOW_FLOATS else value


def _node(term: Term) -> Value:
    assert term.node is not None
    return term.node
