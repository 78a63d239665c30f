"""Every other element: two accesses beside each other become one of twice the lanes, wide, taken apart in registers.

x[..., 0::2], x[..., 1::2]   ->   x_pairs = tl.load(x + pairs);  evens(x_pairs), odds(x_pairs)
stack([a, b], -1)            ->   tl.store(y + pairs, tl.interleave(a, b))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from ....ir.switches import is_on
from ...kernel import Ref
from ...program.axes import Axis, Index, Sink, Term
from ...program.sizes import tidy
from ...schedule.schedule import Schedule
from ..context import FINISH, Context
from ..mathematics import widen
from ..statements import Expr, Scope, binary, call, literal
from .addresses import Addresses
from .coordinates import Coordinates
from .levels import Levels
from .loads import Loads
from .tile_axes import TileAxes

T = TypeVar("T", Term, Sink)


class StridedPairs:
    """Loads and stores of neighbours, two at a time, along the last axis."""

    def __init__(
        self, context: Context, tile: TileAxes, coords: Coordinates, levels: Levels, addresses: Addresses, loads: Loads
    ) -> None:
        self._context, self._tile, self._coords = context, tile, coords
        self._levels, self._addresses, self._loads = levels, addresses, loads
        plan = context.plan
        self._vector = plan.order[-1] if plan.order and is_on("pairs") else None
        plain = [t for t in context.program.terms if t.op == "load" and not t.args]
        sinks = [s for s in context.program.sinks if s.mode == "store" and not s.place.values and not s.within]
        self._loads_of = _find_pairs(plain, self._vector, lambda t: t.param.place, lambda t: t.param.ref)
        self._sinks_of = _find_pairs(
            sinks, self._vector, lambda s: s.place, lambda s: (s.ref, s.axes, _store_phase(s, plan))
        )
        for pair in self._loads_of.values():
            loads.fill_alike(*pair)

    def load(self, term: Term, scope: Scope) -> Expr | None:
        """One of a pair, out of the load of both, which the first to be asked for emits; None for any other load."""
        pair = self._loads_of.get(term)
        if pair is None or not self._fits(scope):
            return None
        self._loads.count_pass(term, scope)
        if (both := scope.memo.get(("pair", pair[0]))) is None:
            both = scope.memo["pair", pair[0]] = self._load_pair(pair[0], scope)
        return widen(call("evens" if term is pair[0] else "odds", both), term.dtype)

    def sinks(self, sink: Sink, scope: Scope) -> tuple[Sink, Sink] | None:
        """The two sinks that one store serves, if this is one of them."""
        pair = self._sinks_of.get(sink)
        return pair if pair is not None and self._fits(scope) else None

    def pointer(self, ref: Ref, place: Index, scope: Scope) -> Expr:
        """The pointer to the first of every two, and to the second beside it."""
        axis = self._axis
        single = self._coords[axis]
        begin = None if single.base is None else binary("*", single.base, literal(2))
        # For this one address the axis has lanes of twice the number, one element apart instead of two
        self._coords[axis] = replace(single, base=begin, lane=self._lanes())
        terms = tuple((a, 1 if a is axis else c) for a, c in place.terms)
        pointer = self._addresses.pointer(ref, Index(terms, place.offset), (), scope)
        self._coords[axis] = single
        return pointer

    def masks(self, axes: Iterable[Axis], scope: Scope) -> list[Expr]:
        """The masks of an access to both."""
        masks = self._coords.masks(a for a in axes if a is not self._axis)
        inside = self._inside(scope)
        return masks if inside is None else [*masks, inside]

    @property
    def _axis(self) -> Axis:
        assert self._vector is not None
        return self._vector

    def _fits(self, scope: Scope) -> bool:
        """In the body, along lanes that begin where a block does."""
        dims, axis = self._tile.dims, self._axis
        is_last = axis in dims and dims[-1] is axis
        return is_last and scope.level < FINISH and not self._levels.finishing and self._coords[axis].groups is None

    def _lanes(self) -> Expr:
        """pairs = tl.arange(0, BLOCK_N * 2)"""
        top, axis, dims = self._context.top, self._axis, self._tile.dims
        if (lanes := top.memo.get(("pairs", axis))) is None:
            arange = call("tl.arange", literal(0), binary("*", self._tile.block(axis), literal(2)))
            shape = "".join("None, " for _ in dims[1:]) + ":"
            text = arange.text + (f"[{shape}]" if len(dims) > 1 else "")
            lanes = top.memo["pairs", axis] = self._context.let(top, "pairs", Expr(text, names=arange.names))
        return lanes

    def _inside(self, scope: Scope) -> Expr | None:
        """The mask of a block, of twice the lanes."""
        axis = self._axis
        coord = self._coords[axis]
        if coord.mask is None:
            return None
        home = scope.home(coord.level)
        if (inside := home.find(("inside pairs", coord.mask.text))) is None:
            size = self._context.sizes.stride(axis.size, "size")
            remaining = size if coord.base is None else binary("-", size, coord.base)
            mask = binary("<", self._lanes(), binary("*", remaining, literal(2)))
            inside = home.memo["inside pairs", coord.mask.text] = self._context.let(home, "inside_pairs", mask)
        return inside

    def _load_pair(self, first: Term, scope: Scope) -> Expr:
        access = first.param
        pointer = self.pointer(access.ref, access.place, scope)
        both = self._loads.load(first, pointer, self.masks(first.axes, scope), scope, hinted=True)
        return self._context.let(scope, f"{self._addresses.buffers.stem(access.ref)}_pairs", both)


def _store_phase(sink: Sink, plan: Schedule) -> tuple[int, bool]:
    """Sinks are stored at one place: the later one's, while a row is held whole, else that of their phase."""
    phases, comes_last = (plan.phase[t] for t in sink.terms), any(t in plan.after_final for t in sink.terms)
    return max(phases, default=0) if plan.chunked else 0, comes_last


def _find_pairs(
    accesses: Sequence[T], vector: Axis | None, place: Callable[[T], Index], key: Callable[[T], object]
) -> dict[T, tuple[T, T]]:
    """{access: (first, second)} for accesses that take every other element, one beside the other."""
    pairs: dict[T, tuple[T, T]] = {}
    for first in accesses:
        begin = place(first)
        if vector is None or dict(begin.terms).get(vector) != 2:
            continue
        for second in accesses:
            end = place(second)
            is_free = first not in pairs and second not in pairs and key(first) == key(second)
            if is_free and end.terms == begin.terms and tidy(end.offset - begin.offset) == 1:
                pairs[first] = pairs[second] = first, second
    return pairs
