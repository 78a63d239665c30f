"""Final sums that keep a part of a chunked row: every item stores its own, as no accumulator could hold them all.

[n, g, c, x], row c, x:   for c: acc = 0; for x: acc += dy; store partial[item, c]     ->  the last adds over items
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...ir.types import Size, product
from ..kernel import Buffer, Ref, Target
from ..program.axes import Axis, Index, Program, Term, below
from ..program.sizes import Hints, power_of_two, tidy
from ..program.sizes import number as evaluated
from ..schedule.schedule import Schedule
from .folds import accumulator_dtype, add, combine, fold_function, sum_of
from .loop_nests import Nests
from .loops import Accumulate, Expr, For, Scope, Statement, Store, binary, call, literal, name, total
from .mathematics import lowest, number
from .names import identifier
from .values import name_of

WIDE = 1024
"""Sums that the last program adds side by side."""


@dataclass(slots=True)
class Direct:
    """A final sum with a slot per item, as wide as what it keeps of the row."""

    term: Term
    pointer: str
    width: Size
    place: Index


class DirectSums(Nests):
    """Partial sums per item: stored where they are complete, added by programs that arrive last."""

    def __init__(self, program: Program, schedule: Schedule, target: Target, hints: Hints, kernel: str) -> None:
        super().__init__(program, schedule, target, hints, kernel)
        self.directs: list[Direct] = []
        self.share: Size = 0  # items that a program walks at most
        self.total = literal(0)  # items of a strip

    def _final_name(self, term: Term) -> str:
        users = [s for s in self.program.sinks if term in below(s.terms)]
        return identifier(name_of(term) or (name_of(users[0]) if users else None)) or term.op

    def _fold_accumulator(self, term: Term, value: Expr) -> Expr:
        """An accumulator, or the value itself, without the lanes that are summed over."""
        dims = [d for d, a in enumerate(self.plan.tile) if a in term.param and a in term.args[0].axes]
        function = fold_function(term)
        if dims and not self.lanes(term.axes):
            return call(function, value, literal(0 if len(self.plan.tile) == 1 else "None"))
        for d in reversed(dims):
            value = call(function, value, literal(d), keep_dims="True")
        return value

    def _programs(self) -> Expr:
        return self.sizes.fixed("PROGRAMS", self.plan.programs or 1)

    # ------------------------------------------------------------------ in the pass
    def _accumulate_direct(self, term: Term, around: Scope, chunk: Scope) -> list[Statement]:
        """Sum inside the loops over what is not kept; returns what follows after them."""
        value = self._neutral(term, self.value(term.args[0], chunk), chunk)
        if around is not chunk:
            label = self.names.fresh(f"{self._final_name(term)}_acc")
            around.body.append(self._accumulator(term, label, self._lanes_of(term)))
            operator, combined = combine(term.op, term.dtype, label, value)
            chunk.body.append(Accumulate(label, operator, combined, self._comment(term)))
            value = name(label)
        own = self._direct_of(term)
        return [self._direct_store(own, self._item_slot(name("item")), self._fold_accumulator(term, value))]

    def _direct_of(self, term: Term) -> Direct:
        """The scratch of a sum: [strip, program, item of its share, what is kept]."""
        place, width = Index(), 1  # type: tuple[Index, Size]
        for axis in reversed(self.plan.direct[term]):
            place, width = place + Index.over(axis) * width, tidy(width * axis.size)
        pointer = self.names.fresh(f"{self._final_name(term)}_partial_ptr")
        ref, dtype = Ref("scratch", len(self.scratch)), accumulator_dtype(term)
        items = product([self.plan.programs or 1, self.plan.strips, self.share])
        self.sizes.require_below(items, 1 << 30)
        slots = tidy(items * width)
        self.scratch.append(Buffer(pointer.removesuffix("_ptr"), dtype, (slots,), (1,)))
        self.pointers[ref], self.pointer_dtype[ref] = pointer, dtype
        self.directs.append(Direct(term, pointer, width, place))
        return self.directs[-1]

    def _item_slot(self, item: Expr) -> Expr:
        """The slot of an item of this strip."""
        first = binary("*", name("strip"), self._programs()) if self._has_strips() else literal(0)
        return add(self._slots(first), item)

    def _slots(self, programs: Expr) -> Expr:
        """As many slots as so many programs have."""
        return programs if programs.text == "0" else binary("*", programs, self.sizes.fixed("ITEMS", self.share))

    def _direct_address(self, own: Direct, slot: Expr) -> Expr:
        scalar, lanes = self.offset(own.place, (), self.top, own.pointer.removesuffix("_ptr"))
        wide = self._times(call("tl.cast", slot, literal("tl.int64")), own.width, "kept")
        parts = [name(own.pointer), wide if slot.text != "0" else None, scalar, lanes]
        address = sum_of([p for p in parts if p is not None])
        assert address is not None
        return address

    def _direct_store(self, own: Direct, slot: Expr, value: Expr) -> Store:
        mask = total("&", self._masks(own.place.walked))
        return Store(self._direct_address(own, slot), value, mask, mask.names if mask else frozenset())

    # ------------------------------------------------------------------ in the finish
    def _side_by_side(self, kept: Sequence[Axis]) -> Schedule:
        """The plan with what is kept as its tile."""
        last = kept[-1]
        lanes = self.plan.tile.get(last) or min(WIDE, power_of_two(evaluated(last.size, self.hints)))
        return replace(self.plan, tile={last: lanes})

    def _direct_total(self, own: Direct, over: Expr, slot: Expr, scope: Scope) -> Expr:
        """The sum over slots, side by side for what is kept."""
        label = self.names.fresh(f"{self._final_name(own.term)}_total")
        scope.body.append(self._accumulator(own.term, label, self.lanes(own.term.axes)))
        keywords: dict[str, Expr | str] = {}
        if (mask := total("&", self._masks(own.place.walked))) is not None:
            neutral = number(lowest(own.term.op, own.term.dtype), accumulator_dtype(own.term))
            keywords = {"mask": mask, "other": literal(neutral)}
        loaded = call("tl.load", self._direct_address(own, slot), **keywords, cache_modifier='".cg"')
        operator, combined = combine(own.term.op, own.term.dtype, label, loaded)
        scope.body.append(For("k", over, [Accumulate(label, operator, combined)]))
        return name(label)
