"""Every other element: two accesses beside each other become one of twice the lanes, wide, taken apart in registers.

x[..., 0::2], x[..., 1::2]   ->   x_pairs = tl.load(x + pairs);  evens(x_pairs), odds(x_pairs)
stack([a, b], -1)            ->   tl.store(y + pairs, tl.interleave(a, b))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from ...ir.switches import is_on
from ..kernel import Ref, Target
from ..program.axes import Axis, Index, Program, Sink, Term
from ..program.sizes import Hints, tidy
from ..schedule.schedule import Schedule
from .loops import Expr, Let, Scope, Store, binary, call, literal, name, total
from .mathematics import loaded
from .values import FINISH, Values

SHORT = 24
"""An operand of an interleaving is written inline up to this many columns."""
T = TypeVar("T", Term, Sink)


class Pairs(Values):
    """Loads and stores of neighbours, two at a time."""

    def __init__(self, program: Program, schedule: Schedule, target: Target, hints: Hints, kernel: str) -> None:
        super().__init__(program, schedule, target, hints, kernel)
        vector = schedule.order[-1] if schedule.order and is_on("pairs") else None
        plain = [t for t in program.terms if t.op == "load" and not t.args]
        self.paired_loads = _find_pairs(plain, vector, lambda t: t.param.place, lambda t: t.param.ref)
        own = [s for s in program.sinks if s.mode == "store" and not s.place.values]
        self.paired_sinks = _find_pairs(own, vector, lambda s: s.place, lambda s: (s.ref, s.axes, self._store_phase(s)))
        self.waiting: set[Sink] = set()
        for pair in self.paired_loads.values():
            self._fill_alike(*pair)

    def _fill_alike(self, *pair: Term) -> None:
        """What lanes outside hold is the same for both."""
        if len({self.padding.get(load) for load in pair}) > 1:
            for load in pair:
                self.padding.pop(load, None)

    def _store_phase(self, sink: Sink) -> tuple[int, bool]:
        """Sinks are stored at one place: the later one's, while a row is held whole, else that of their phase."""
        phases, after = (self.plan.phase[t] for t in sink.terms), any(t in self.plan.after for t in sink.terms)
        return max(phases, default=0) if self.plan.chunked else 0, after

    def _pairable(self, axis: Axis, scope: Scope) -> bool:
        """In the body, along lanes that begin where a block does."""
        tiled = axis in self.plan.tile and list(self.plan.tile)[-1] is axis
        return tiled and scope.level < FINISH and not self.finishing and self.coords[axis].groups is None

    # ------------------------------------------------------------------ lanes of twice the width
    def _pair_lanes(self, axis: Axis) -> Expr:
        """pairs = tl.arange(0, BLOCK_N * 2)"""
        if (known := self.top.memo.get(("pairs", axis))) is None:
            shape = "".join("None, " for _ in list(self.plan.tile)[1:]) + ":"
            lanes = call("tl.arange", literal(0), binary("*", self.block(axis), literal(2)))
            text = lanes.text + (f"[{shape}]" if len(self.plan.tile) > 1 else "")
            known = self._let(self.top, "pairs", Expr(text, names=lanes.names))
            self.top.memo["pairs", axis] = known
        return known

    def _inside_pairs(self, axis: Axis, scope: Scope) -> Expr | None:
        """The mask of a block, of twice the lanes."""
        coord = self.coords[axis]
        if coord.mask is None:
            return None
        home = scope.home(coord.level)
        if (known := home.find(("inside pairs", coord.mask.text))) is None:
            size = self.sizes.stride(axis.size, "size")
            left = size if coord.base is None else binary("-", size, coord.base)
            mask = binary("<", self._pair_lanes(axis), binary("*", left, literal(2)))
            known = self._let(home, "inside_pairs", mask)
            home.memo["inside pairs", coord.mask.text] = known
        return known

    def _pair_masks(self, axes: Iterable[Axis], axis: Axis, scope: Scope) -> list[Expr]:
        others = self._masks(a for a in axes if a is not axis)
        own = self._inside_pairs(axis, scope)
        return [*others, *([own] if own is not None else [])]

    def _pair_pointer(self, ref: Ref, place: Index, axis: Axis, scope: Scope) -> Expr:
        """Where the first of every two is, and the second beside it."""
        one = self.coords[axis]
        begin = None if one.base is None else binary("*", one.base, literal(2))
        self.coords[axis] = replace(one, base=begin, lane=self._pair_lanes(axis))
        terms = tuple((a, 1 if a is axis else c) for a, c in place.terms)
        pointer = self._pointer(ref, Index(terms, place.offset), (), scope)
        self.coords[axis] = one
        return pointer

    # ------------------------------------------------------------------ accesses
    def _load(self, term: Term, scope: Scope) -> Expr:
        """Both of a pair come from one load; who asks first emits it."""
        first, second = self.paired_loads.get(term, (term, term))
        axis = self.plan.order[-1] if first is not second else None
        if axis is None or not self._pairable(axis, scope):
            return super()._load(term, scope)
        self.passes[term] = self.passes.get(term, 0) + (1 < scope.level < FINISH)
        if (both := scope.memo.get(("pair", first))) is None:
            both = scope.memo["pair", first] = self._load_pair(first, axis, scope)
        return loaded(call("evens" if term is first else "odds", both), term.dtype)

    def _load_pair(self, first: Term, axis: Axis, scope: Scope) -> Expr:
        pointer = self._pair_pointer(first.param.ref, first.param.place, axis, scope)
        keywords = self._mask_keywords(first, self._pair_masks(first.axes, axis, scope))
        if policy := self._policy(first, scope):
            keywords["eviction_policy"] = literal(f'"{policy}"')
        wish = self.pointers[first.param.ref].removesuffix("_ptr") + "_pairs"
        label = self.names.fresh(wish)
        scope.body.append(Let(label, call("tl.load", pointer, **keywords)))
        return name(label)

    def store(self, sink: Sink, scope: Scope) -> None:
        """The second of a pair stores both."""
        pair = self.paired_sinks.get(sink)
        if pair is None or not self._pairable(self.plan.order[-1], scope):
            super().store(sink, scope)
        elif pair[0] not in self.waiting:
            self.waiting.add(pair[0])
        else:
            self._store_pair(*pair, self.plan.order[-1], scope)

    def _store_pair(self, first: Sink, second: Sink, axis: Axis, scope: Scope) -> None:
        level = max(
            [self.level(t) for s in (first, second) for t in s.terms] + [self._coord_level(a) for a in first.axes]
        )
        scope, named = scope.home(level), ((first, "even"), (second, "odd"))
        both = [
            self._let_if_long(wish, self._broadcast_to_sink(s, self._value_to_store(s, scope)), scope)
            for s, wish in named
        ]
        pointer = self._pair_pointer(first.ref, first.place, axis, scope)
        masks = self._pair_masks(first.axes, axis, scope)
        lanes = frozenset().union(*(m.names for m in masks))
        comment = self._comment(first) or self._comment(second)
        value = call("tl.interleave", *both)
        scope.body.append(Store(pointer, value, total("&", masks), lanes, False, comment))

    def _let_if_long(self, wish: str, value: Expr, scope: Scope) -> Expr:
        return value if len(value.text) <= SHORT else self._let(scope, wish, value)

    def _broadcast_to_sink(self, sink: Sink, value: Expr) -> Expr:
        """The value in all lanes of the sink."""
        return value if self.lanes(sink.value.axes) == self.lanes(sink.axes) else self._broadcast(value, sink.axes)


def _find_pairs(
    accesses: Sequence[T], vector: Axis | None, place: Callable[[T], Index], alike: Callable[[T], object]
) -> dict[T, tuple[T, T]]:
    """{access: (first, second)} for accesses that take every other element, one beside the other."""
    found: dict[T, tuple[T, T]] = {}
    for first in accesses:
        here = place(first)
        if vector is None or dict(here.terms).get(vector) != 2:
            continue
        for second in accesses:
            there = place(second)
            free = first not in found and second not in found and alike(first) == alike(second)
            if free and there.terms == here.terms and tidy(there.offset - here.offset) == 1:
                found[first] = found[second] = first, second
    return found
