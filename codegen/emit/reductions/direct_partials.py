"""Final sums that keep a part of a chunked row: every item stores its own, as no accumulator could hold them all.

[n, g, c, x], row c, x:   for c: acc = 0; for x: acc += dy; store partial[item, c]     ->  the last adds over items
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ....ir.types import Size, product
from ...program.axes import Axis, Index, Term
from ...program.sizes import evaluate_size, power_of_two, tidy
from ..access.addresses import Addresses
from ..context import Context
from ..statements import Expr, Scope, Statement, Store, add, binary, call, literal, name, sum_of, total
from ..values import Values
from ..walk import Walk
from .arrivals import Level
from .folding import Folding
from .folds import accumulator_dtype, take_in
from .partial_slots import add_slots, masked_store

WIDE = 1024
"""Sums that the last program adds side by side."""


@dataclass(frozen=True, slots=True)
class Direct:
    """A final sum with a slot per item, as wide as the part of the row that it keeps."""

    term: Term
    pointer: str
    width: Size
    place: Index


@dataclass(eq=False)
class DirectPartials:
    """Partial sums per item: stored where they are complete, added by programs that arrive last."""

    context: Context
    addresses: Addresses
    folding: Folding
    values: Values
    walk: Walk
    sums: list[Direct] = field(default_factory=list)

    # ------------------------------------------------------------------ in the pass
    def accumulate(self, term: Term, outer: Scope, chunk: Scope) -> list[Statement]:
        """Sum inside the loops over what is not kept; returns the statements that follow after them."""
        value = self.values.argument_of_reduction(term, chunk)
        if outer is not chunk:
            label = self.context.names.fresh(f"{self.context.name_of_final(term)}_acc")
            lanes = self.folding.tile.lanes(term.args[0].axes)
            outer.body.append(self.folding.accumulator(term, label, lanes))
            chunk.body.append(take_in(term, label, value, self.context.comment(term)))
            value = name(label)
        direct = self._allocate(term)
        return [self.store(direct, self._slot_of_item(name("item")), self.folding.fold_lanes(term, value))]

    def _allocate(self, term: Term) -> Direct:
        """The scratch of a sum: [strip, program, item of its share, what is kept]."""
        place, width = Index(), 1  # type: tuple[Index, Size]
        for axis in reversed(self.context.plan.direct[term]):
            place, width = place + Index.over(axis) * width, tidy(width * axis.size)
        plan = self.context.plan
        items = product([plan.programs or 1, plan.strips, self.walk.share])
        self.context.sizes.require_below(items, 1 << 30)
        label, dtype = self.context.name_of_final(term), accumulator_dtype(term)
        pointer = self.addresses.buffers.add_partial_sums(label, dtype, tidy(items * width))
        self.sums.append(Direct(term, pointer, width, place))
        return self.sums[-1]

    # ------------------------------------------------------------------ slots
    def _slot_of_item(self, item: Expr) -> Expr:
        """The slot of an item of this strip."""
        has_strips = self.walk.coords.has_strips()
        return add(self.slots(binary("*", name("strip"), self.walk.programs()) if has_strips else literal(0)), item)

    def slots(self, programs: Expr) -> Expr:
        """As many slots as so many programs have."""
        is_zero = programs.text == "0"
        return programs if is_zero else binary("*", programs, self.context.sizes.fixed("ITEMS", self.walk.share))

    def slots_of(self, level: Level) -> tuple[Expr, Expr]:
        """The range of k in a level, and the slot that it stands for."""
        if level.step is not None:
            return call("range", level.count), self.slots(add(level.first, binary("*", name("k"), level.step)))
        end = call("tl.minimum", self.slots(add(level.start, level.count)), self.walk.total)
        start = [] if level.start.text == "0" else [self.slots(level.start)]
        return call("range", *start, end), self._slot_of_item(name("k"))

    def store(self, direct: Direct, slot: Expr, value: Expr) -> Store:
        """A value in a slot."""
        return masked_store(self._address(direct, slot), value, self._mask(direct))

    def _mask(self, direct: Direct) -> Expr | None:
        return total("&", self.folding.coords.masks(direct.place.walked))

    def _address(self, direct: Direct, slot: Expr) -> Expr:
        scalar, lanes = self.addresses.offset(direct.place, (), direct.pointer.removesuffix("_ptr"))
        begin = self.addresses.times(call("tl.cast", slot, literal("tl.int64")), direct.width, "kept")
        parts = [name(direct.pointer), begin if slot.text != "0" else None, scalar, lanes]
        address = sum_of([p for p in parts if p is not None])
        assert address is not None
        return address

    # ------------------------------------------------------------------ in the finish
    def lanes_side_by_side(self, axis: Axis) -> int:
        """Lanes along the last axis that is kept."""
        size = evaluate_size(axis.size, self.context.hints)
        return self.context.plan.tile.get(axis) or min(WIDE, power_of_two(size))

    def sum_slots(self, direct: Direct, over: Expr, slot: Expr, scope: Scope) -> Expr:
        """The sum over slots, side by side for what is kept."""
        lanes, address = self.folding.tile.lanes(direct.term.axes), self._address(direct, slot)
        return add_slots(self.folding, direct.term, lanes, over, address, self._mask(direct), scope)
