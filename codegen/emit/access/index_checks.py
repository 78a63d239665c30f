"""Assertions that an index which memory decides is in range, in front of what is read or written there.

    tl.device_assert((0 <= target) & (target < V), "loss.py:12 gather: index out of range", mask=inside)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...program.axes import Term
from ..context import Context
from ..statements import Assert, Expr, Scope, binary, literal, total
from .coordinates import Coordinates

OUT_OF_RANGE = "index out of range"


@dataclass(eq=False)
class IndexChecks:
    """Assertions for `check_index` terms, where their lanes lie inside and their guards hold."""

    context: Context
    coords: Coordinates

    def check(self, term: Term, index: Expr, guards: Sequence[Expr], scope: Scope) -> Expr:
        """The index under a name, asserted from here on."""
        named = self.context.let(scope, "index", index)
        inside = binary("&", binary("<=", literal(0), named), binary("<", named, self._size(term.args[1])))
        mask = total("&", [*self.coords.masks(term.axes), *guards])
        scope.body.append(Assert(inside, f"{_place(term)}: {OUT_OF_RANGE}", mask))
        return named

    def _size(self, size: Term) -> Expr:
        assert size.op == "const"
        return self.context.sizes.text(size.param)


def _place(term: Term) -> str:
    """`file:line operation` of the user's source, as far as it is known."""
    origin = term.node.origin if term.node is not None else None
    if origin is None:
        return "an access"
    where = (origin.where or "").replace("\\", "/").rsplit("/", 1)[-1]
    return f"{where} {(origin.op or 'index').removeprefix('aten.').split('.')[0]}".strip()
