"""Tiles by the tensor memory accelerator: a descriptor of a matrix before the loop, a place in it for each turn.

k_tiles = tl.make_tensor_descriptor(k_ptr + e * k_stride, [N, D], [D, 1], [BLOCK_N, BLOCK_D])
for col_at in ..:
    k = k_tiles.load([col_at, 0])      zeros outside of the matrix: no mask

The accelerator takes matrices that begin at multiples of 16 bytes, whose rows do, too, and have no steps between
elements; everything else is read through pointers. So is float32: exact products read operands into registers from end
to end, and spill what descriptors take (triton 3.7.1). On devices without it, Triton makes pointers of descriptors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import sympy

from ....ir.types import ITEMSIZE, LOW_FLOATS, Size
from ...kernel import Ref
from ...program.axes import Axis, Index, Term
from ...program.sizes import evaluate_size
from ...schedule.alignment import GROUP
from ..names import LONGEST, WIDTH
from ..statements import Expr, binary, call, literal, name
from .addresses import Addresses


class Matrix(NamedTuple):
    """What a descriptor is of: memory from a place on, rows of `inner` that are `stride` elements apart."""

    ref: Ref
    first: Index
    outer: Axis
    inner: Axis
    stride: Size


@dataclass(eq=False)
class Descriptors:
    """The descriptors of one kernel, at its head. walked: by the loop; `first`: of an axis the first element of the
    block at hand, of 32 bits."""

    addresses: Addresses
    walked: Axis
    first: Callable[[Axis], Expr]

    def read(self, term: Term) -> Expr | None:
        """The tile that a load reads, along the dimensions at hand; None where it is to be read through a pointer."""
        matrix = self._matrix(term)
        if matrix is None or not self._is_kept(matrix, GROUP // ITEMSIZE[term.dtype]):
            return None
        tiles, places = self._tiles(matrix), map(self.first, (matrix.outer, matrix.inner))
        tile = call(f"{tiles}.load", _listed(*places))
        return tile if (matrix.outer, matrix.inner) == self.addresses.tile.dims else call("tl.trans", tile)

    # ------------------------------------------------------------------ which
    def _matrix(self, term: Term) -> Matrix | None:
        """The matrix that a load walks, if it begins at the same place in each turn.

        What the kernel itself has stored would have to be seen by the accelerator, too.
        """
        place, dims = term.param.place, self.addresses.tile.dims
        steps, stored = dict(place.terms), {s.ref for s in self.addresses.context.program.sinks}
        if term.args or place.values or term.dtype not in LOW_FLOATS or term.param.ref in stored:
            return None
        if len(dims) != 2 or self.walked not in dims or not set(dims) <= steps.keys():
            return None
        outer, inner = dims if steps[dims[1]] == 1 else dims[::-1]
        first = Index(tuple(t for t in place.terms if t[0] not in dims), place.offset)
        moves = any(self.addresses.coords[a].level for a in first.walked)
        return None if moves or steps[inner] != 1 else Matrix(term.param.ref, first, outer, inner, steps[outer])

    def _is_kept(self, matrix: Matrix, group: int) -> bool:
        """True where the accelerator takes such a matrix, as long as guards hold. group: elements of 16 bytes."""
        sizes, pair = self.addresses.context.sizes, (matrix.outer, matrix.inner)
        begins = (matrix.stride, matrix.first.offset, *(c for _, c in matrix.first.terms))
        apart = sympy.Ge(matrix.stride, matrix.inner.size)  # rows that overlap are no matrix to it
        has_room = self.addresses.tile.block_sizes[matrix.inner] >= group
        is_short = all(evaluate_size(a.size, sizes.hints) < LONGEST for a in pair)
        is_apart = evaluate_size(matrix.stride - matrix.inner.size, sizes.hints) >= 0
        if not (has_room and is_short and is_apart) or any(evaluate_size(n, sizes.hints) % group for n in begins):
            return False
        if not all(sizes.stays_multiple(n, group, WIDTH) for n in begins):
            return False
        for axis in pair:
            sizes.require_countable(axis.size)
        sizes.guards[apart] = None
        self.addresses.buffers.aligned.add(self.addresses.buffers.labels[matrix.ref])
        return True

    # ------------------------------------------------------------------ their text
    def _tiles(self, matrix: Matrix) -> Expr:
        """The descriptor, by its name."""
        top, context, buffers = self.addresses.context.top, self.addresses.context, self.addresses.buffers
        if ("descriptor", matrix) not in top.memo:
            stem, pair = buffers.stem(matrix.ref), (matrix.outer, matrix.inner)
            first, _ = self.addresses.offset(matrix.first, (), stem)
            pointer = name(buffers.labels[matrix.ref])
            made = call(
                "tl.make_tensor_descriptor", pointer if first is None else binary("+", pointer, first),
                _listed(*(context.sizes.text(a.size) for a in pair)),
                _listed(context.sizes.stride(matrix.stride, f"{stem}_stride"), literal(1)),
                _listed(*map(self.addresses.tile.block, pair)),
            )  # fmt: skip
            top.memo["descriptor", matrix] = top.define(context.names.fresh(f"{stem}_tiles"), made)
        return top.memo["descriptor", matrix]


def _listed(*items: Expr) -> Expr:
    return Expr(f"[{', '.join(i.text for i in items)}]", names=frozenset[str]().union(*(i.names for i in items)))
