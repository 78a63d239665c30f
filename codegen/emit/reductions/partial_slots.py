"""Partial sums in memory: one slot per program, as wide as the lanes that the sum keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....ir.types import product
from ...program.axes import Axis, Term
from ...program.sizes import tidy
from ..access.addresses import Addresses
from ..access.aligned_rows import AlignedRows
from ..access.loads import Keywords
from ..context import Context
from ..mathematics import lowest, number
from ..statements import Expr, For, Scope, Store, add, binary, call, literal, name, sum_of, total
from .arrivals import Level
from .folding import Folding
from .folds import accumulator_dtype, take_in


@dataclass(slots=True)
class Partial:
    """A final reduction on its way: the name of its folded accumulator, the lanes it keeps, its scratch buffer."""

    term: Term
    folded: str
    lanes: list[Axis]
    pointer: str = ""


@dataclass(eq=False)
class PartialSlots:
    """Stores of partial sums, and their additions."""

    context: Context
    addresses: Addresses
    rows: AlignedRows
    folding: Folding

    def partial(self, term: Term) -> Partial:
        """The accumulator of a final reduction, folded."""
        top, tile = self.context.top, self.folding.tile
        label, lanes = top.memo["acc", term].text, tile.lanes(term.axes)
        if lanes != tile.lanes(term.args[0].axes):
            folded = self.folding.fold_lanes(term, name(label))
            label = self.context.names.fresh(label)
            top.define(label, folded)
        return Partial(term, label, lanes)

    def store_own(self, partial: Partial) -> None:
        """This program's partial sum, in its slot."""
        plan, dtype = self.context.plan, accumulator_dtype(partial.term)
        slots = tidy(product([plan.programs or 1, plan.strips, *map(self._width, partial.lanes)]))
        label = self.context.name_of_final(partial.term)
        partial.pointer = self.addresses.buffers.add_partial_sums(label, dtype, slots)
        self.context.top.body.append(self.store(partial, name("pid"), name(partial.folded)))

    def store(self, partial: Partial, slot: Expr, value: Expr) -> Store:
        """A value in a slot."""
        return masked_store(self.address(partial, slot), value, self._mask(partial))

    def sum_slots(self, partial: Partial, level: Level, scope: Scope) -> Expr:
        """The sum of the slots of one level, in order."""
        offset = name("k") if level.step is None else binary("*", name("k"), level.step)
        address = self.address(partial, add(level.first, offset))
        over = call("range", level.count)
        return add_slots(self.folding, partial.term, partial.lanes, over, address, self._mask(partial), scope)

    def _width(self, axis: Axis) -> int:
        """Lanes that a partial sum keeps in memory: a row held whole without its padding, in groups of 16 bytes."""
        plan, lanes = self.context.plan, self.folding.tile.block_sizes
        is_whole = axis in plan.row and not plan.chunked and isinstance(axis.size, int)
        return min(lanes[axis], -(-axis.size // 4) * 4) if is_whole else plan.own_columns(axis)

    def _mask(self, partial: Partial) -> Expr | None:
        """The lanes that have a place in the slot."""
        lanes = self.folding.tile.block_sizes
        masked = [a for a in partial.lanes if self._width(a) < lanes[a]]
        return total("&", self.folding.coords.masks(masked, summed=True))

    def address(self, partial: Partial, slot: Expr) -> Expr:
        """The address of a program's partial sum."""
        pointer = name(partial.pointer)
        if not partial.lanes:
            return add(pointer, slot)
        stride = 1
        lanes: list[Expr] = []
        for axis in reversed(partial.lanes):
            lanes.insert(0, self.addresses.times(self._lane(axis), stride, "slot"))
            stride *= self._width(axis)
        begin = binary("*", call("tl.cast", slot, literal("tl.int64")), self._slot(partial.lanes, stride))
        address = sum_of([pointer, *([] if slot.text == "0" else [begin]), *lanes])
        assert address is not None
        return address

    def _slot(self, lanes: Sequence[Axis], width: int) -> Expr:
        """The width of a slot: by the name of the block where a row may have any length up to it."""
        row = lanes[0]
        is_bounded = len(lanes) == 1 and row in self.context.plan.pinned and not isinstance(row.size, int)
        return self.folding.tile.block(row) if is_bounded else literal(width)

    def _lane(self, axis: Axis) -> Expr:
        """The place of a lane in its slot: by column, wherever the row began."""
        lane = self.folding.tile.lane(axis)
        is_aligned = self.context.plan.step > 1 and self.folding.coords[axis].groups is not None
        return binary("-", lane, self.rows.shift()) if is_aligned else lane


def masked_store(address: Expr, value: Expr, mask: Expr | None) -> Store:
    """A store whose lanes outside have no place."""
    return Store(address, value, mask, mask.names if mask else frozenset())


def add_slots(
    folding: Folding, term: Term, lanes: Sequence[Axis], over: Expr, address: Expr, mask: Expr | None, scope: Scope
) -> Expr:
    """for k: total += tl.load(address of slot k), where lanes outside are neutral."""
    context = folding.context
    keywords: Keywords = {}
    if mask is not None:
        neutral = number(lowest(term.op, term.dtype), accumulator_dtype(term))
        keywords = {"mask": mask, "other": literal(neutral)}
    label = context.names.fresh(f"{context.name_of_final(term)}_total")
    scope.body.append(folding.accumulator(term, label, lanes))
    # From L2, where other programs have stored it: the first level of caches may hold what was there before
    loaded = call("tl.load", address, **keywords, cache_modifier='".cg"')
    scope.body.append(For("k", over, [take_in(term, label, loaded)]))
    return name(label)
