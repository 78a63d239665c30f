"""Folds over the lanes of a tile: arguments made neutral outside, accumulators, reductions, running sums."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ....ir.types import ITEMSIZE
from ...program.axes import Axis, Term, terms_below
from ..access.coordinates import Coordinates
from ..access.loads import Loads
from ..access.tile_axes import TileAxes
from ..access.two_tiles import both
from ..context import Context, as_tensor
from ..mathematics import FLOATING, TL, lowest, number, register_dtype
from ..statements import Accumulate, Expr, Let, Scope, binary, call, literal, name, total
from .folds import accumulator_dtype, as_result, fold_function, to_own_width, widen_booleans

KEEPS_ZERO = frozenset("add sub mul abs neg max min sqrt tanh sin tan asin atan sinh asinh erf expm1 log1p".split())
"""Operations whose result is zero where their arguments are."""
ACCESS = 16
"""Bytes that one thread reads at once."""
SMALLEST = 2.0**-126
"""A divisor as large has a finite reciprocal in float32."""


@dataclass(eq=False)
class Folding:
    """Reductions and scans along the axes of a tile."""

    context: Context
    tile: TileAxes
    coords: Coordinates
    loads: Loads

    # ------------------------------------------------------------------ lanes outside
    def pad(self, term: Term, axis: Axis) -> float | None:
        """The value of lanes outside along `axis`, where that is known."""
        known: dict[Term, float | None] = {}
        for below in terms_below([term]):
            known[below] = self._pad(below, axis, [known[a] for a in below.args])
        return known[term]

    def _pad(self, term: Term, axis: Axis, pads: list[float | None]) -> float | None:
        """The same, by those of its arguments."""
        if term.op == "const" and isinstance(term.param, (int, float)):
            return float(term.param)
        if axis not in term.axes or term.dtype not in FLOATING or self.coords.is_lent(axis):
            return None
        if term.op == "load":
            has_neighbours = self.coords.groups_of(term.param.place, not term.args) is not None
            return None if has_neighbours and not self.loads.silent else self.loads.pad(term)
        if term.op == "cast":
            return pads[0] if term.args[0].dtype in FLOATING else None
        if term.op == "sub" and pads[0] == float("-inf") and axis not in term.args[1].axes:
            return float("-inf")
        if term.op == "exp" and pads[0] == float("-inf"):
            return 0.0
        if term.op in ("mul", "div") and pads[0] == 0.0 and (factor := pads[1]):
            return 0.0 if SMALLEST <= abs(factor) < math.inf else None
        return 0.0 if term.op in KEEPS_ZERO and all(p == 0.0 for p in pads) else None

    def unsafe_axes(self, term: Term) -> list[Axis]:
        """The axes along which lanes outside may hold what a reduction must not take in."""
        arg, neutral = term.args[0], lowest(term.op, term.args[0].dtype)
        return [a for a in term.param if a in arg.axes and self.coords[a].mask and self.pad(arg, a) != neutral]

    def nothing(self, term: Term) -> Expr:
        """What a reduction takes in without effect."""
        dtype = term.args[0].dtype
        return literal(number(lowest(term.op, dtype), "i32" if dtype == "b1" else dtype))

    def neutral(self, term: Term, value: Expr) -> Expr:
        """The argument of a reduction with its lanes outside made neutral, where they may not be."""
        mask = total("&", self.coords.masks(self.unsafe_axes(term), summed=True))
        value = widen_booleans(term.args[0], value)
        return value if mask is None else call("tl.where", mask, as_tensor(term.args[0], value), self.nothing(term))

    # ------------------------------------------------------------------ reductions
    def fold(self, term: Term, value: Expr) -> Expr:
        """The reduction of its argument's lanes."""
        return as_result(term, self.fold_lanes(term, value))

    def folded_together(self) -> dict[Term, tuple[Term, ...]]:
        """{sum: itself and others} for sums along a row that all warps hold, which wait for the same.

        They are two or three: more values of a row would be in registers at once.
        """
        plan = self.context.plan
        if len(self.tile.dims) != 1 or plan.chunked or plan.packed or plan.shared:
            return {}
        alike: dict[object, list[Term]] = {}
        for t in (t for t in self.context.program.terms if t in plan.inner and t.op == "sum" and t not in plan.online):
            if t.dtype == t.args[0].dtype == "f32" and t not in plan.after_final and self.tile.lanes(t.args[0].axes):
                alike.setdefault((plan.phase[t.args[0]], t.param, t.args[0].axes), []).append(t)
        groups = (tuple(ts[i : i + 3]) for ts in alike.values() for i in range(0, len(ts), 3))
        return {t: group for group in groups if len(group) > 1 for t in group}

    def fold_together(self, group: tuple[Term, ...], values: list[Expr]) -> Expr:
        """two_sums(a, b)"""
        values = [self.of_both(t, "tl.sum", v) for t, v in zip(group, values, strict=True)]
        return call("two_sums" if len(group) == 2 else "three_sums", *values)

    def of_both(self, term: Term, function: str, value: Expr) -> Expr:
        """What each thread has of a row that is held as two tiles, folded; of any other, all of it."""
        plan = self.context.plan
        if not plan.tail:
            return value
        loads = [t for t in terms_below([term.args[0]]) if t.op == "load" and t.axes & set(plan.row)]
        access = min((ACCESS // ITEMSIZE[t.dtype] for t in loads), default=1)
        threads = min(plan.warps * self.context.target.warp, plan.tail)
        return call("joined", both(value), name(function), literal(threads), literal(access))

    def fold_lanes(self, term: Term, value: Expr) -> Expr:
        """The argument, or an accumulator, without the lanes that are reduced; as wide as the fold makes it."""
        dims = [d for d, a in enumerate(self.tile.dims) if a in term.param and a in term.args[0].axes]
        function = fold_function(term)
        if dims and self.context.plan.tail:
            return call(function, self.of_both(term, function, value), literal(0))
        if dims and not self.tile.lanes(term.axes):
            return call(function, value, literal(0 if len(self.tile.dims) == 1 else "None"))
        for dim in reversed(dims):
            value = call(function, value, literal(dim), keep_dims="True")
        return value

    def accumulator(self, term: Term, label: str, axes: Iterable[Axis], shape: Expr | None = None) -> Let:
        """An accumulator with lanes along these axes, or of a shape of its own, neutral at first."""
        dtype, neutral, shape = accumulator_dtype(term), lowest(term.op, term.dtype), shape or self.tile.shape(axes)
        if neutral == 0 and dtype != "b1" and shape.text != "[]":
            return Let(label, call("tl.zeros", shape, literal(TL[dtype])))
        start = int(neutral) if term.dtype == "b1" else neutral
        return Let(label, call("tl.full", shape, literal(number(start, dtype)), literal(TL[dtype])))

    # ------------------------------------------------------------------ running sums
    def scan(self, term: Term, arg: Expr, scope: Scope) -> Expr:
        """A running sum along a tile axis; in chunks, on top of what the chunks before added up to."""
        (axis,) = term.param
        is_chunked = self.context.plan.chunked
        # Lanes outside would go into the sum of the chunk
        mask = self.coords[axis].mask
        if mask is not None and self.pad(term.args[0], axis) != 0.0:
            arg = call("tl.where", mask, arg, literal(number(0, term.dtype)))
        if axis not in self.tile.dims:
            return self._carried(term, arg, arg, scope) if is_chunked else arg
        dim = literal(self.tile.dims.index(axis))
        reverse = {"reverse": literal("True")} if term.op == "cumsum_reverse" else {}
        arg = self.context.let(scope, "step", arg)
        running = to_own_width(term, call("tl.cumsum", arg, dim, **reverse))
        if not is_chunked:
            return running
        keep_dims = {"keep_dims": literal("True")} if len(self.tile.dims) > 1 else {}
        return self._carried(term, running, to_own_width(term, call("tl.sum", arg, dim, **keep_dims)), scope)

    def _carried(self, term: Term, running: Expr, step: Expr, scope: Scope) -> Expr:
        """The running sum of a chunk on top of the carry, which takes in the sum of the chunk."""
        label = self.context.names.fresh("carry")
        shape = self.tile.shape(a for a in term.axes if a not in term.param)
        zeros = call("tl.full", shape, literal(0), literal(TL[register_dtype(term.dtype)]))
        carry = self.context.body.define(label, zeros)
        result = self.context.let(scope, "running", binary("+", running, carry))
        scope.body.append(Accumulate(label, "+=", step))
        return result
