"""Stores: each output where it is complete, whole groups of 16 bytes and pairs of neighbours at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..program.axes import Sink
from .access.addresses import Addresses
from .access.coordinates import Coordinates, Groups
from .access.levels import Levels
from .access.strided_pairs import StridedPairs
from .access.tile_axes import TileAxes
from .context import Context, as_tensor
from .mathematics import FLOATING
from .statements import Expr, If, Scope, Store, binary, call, total, unary
from .values import Values

SHORT = 24
"""An operand of an interleaving is written inline up to this many columns."""


@dataclass(eq=False)
class Stores:
    """`waiting`: first sinks of pairs, whose second stores both."""

    context: Context
    tile: TileAxes
    coords: Coordinates
    levels: Levels
    addresses: Addresses
    pairs: StridedPairs
    values: Values
    waiting: set[Sink] = field(default_factory=set)

    def store(self, sink: Sink, scope: Scope) -> None:
        """One sink, in the scope at hand or the outermost one where it is complete; the second of a pair, both."""
        pair = self.pairs.sinks(sink, scope)
        if pair is None:
            self._store_one(sink, scope.home(self.levels.deepest(sink.terms, sink.axes)))
        elif pair[0] not in self.waiting:
            self.waiting.add(pair[0])
        else:
            terms = (*pair[0].terms, *pair[1].terms)
            self._store_pair(*pair, scope.home(self.levels.deepest(terms, pair[0].axes)))

    def _store_one(self, sink: Sink, scope: Scope) -> None:
        value = self.values.value_to_store(sink, scope)
        indices = self.values.indices(sink.place.values, scope)
        groups = self.coords.groups_of(sink.place, sink.mode == "store" and not sink.within)
        pointer = self.addresses.pointer(sink.ref, sink.place, indices, scope, sink.axes, groups)
        is_atomic = sink.mode == "add"
        # Each lane adds its own, even where all have the same value
        if is_atomic and self.tile.lanes(sink.axes):
            value = self.tile.broadcast(value, sink.axes)
        masks = [*self._conditions(sink, scope), *self.coords.masks(sink.axes, summed=True)]
        comment = self.context.comment(sink)
        # The text says where a result may differ from run to run
        if is_atomic and sink.dtype in FLOATING:
            comment = f"atomic: in no fixed order  {comment}".rstrip()
        if groups is None:
            scope.body.append(Store(pointer, value, total("&", masks), names_of(masks), is_atomic, comment))
        else:
            inside = groups.stored or masks[0]
            self._store_groups(pointer, self.context.let(scope, "out", value), groups, inside, scope, comment)

    def _conditions(self, sink: Sink, scope: Scope) -> list[Expr]:
        return [as_tensor(term, self.values.value(term, scope)) for term in sink.within]

    def _store_groups(
        self, pointer: Expr, value: Expr, groups: Groups, inside: Expr, scope: Scope, comment: str
    ) -> None:
        """Whole groups of 16 bytes at once; the ends of a row, element by element."""
        whole_groups = scope.memo.get("whole") or self.context.let(scope, "whole", groups.whole)
        scope.memo["whole"] = whole_groups
        ends = binary("&", inside, unary("~", whole_groups))
        scope.body.append(Store(pointer, value, whole_groups, whole_groups.names, False, comment))
        edges = Store(pointer, value, ends, inside.names)
        scope.body.append(If(groups.edge, [edges]) if groups.edge is not None else edges)

    def _store_pair(self, first: Sink, second: Sink, scope: Scope) -> None:
        """tl.store(pointer, tl.interleave(even, odd))"""
        both = [self._side_of_pair(first, "even", scope), self._side_of_pair(second, "odd", scope)]
        pointer = self.pairs.pointer(first.ref, first.place, scope)
        masks = self.pairs.masks(first.axes, scope)
        comment = self.context.comment(first) or self.context.comment(second)
        value = call("tl.interleave", *both)
        scope.body.append(Store(pointer, value, total("&", masks), names_of(masks), False, comment))

    def _side_of_pair(self, sink: Sink, wish: str, scope: Scope) -> Expr:
        """The value in all lanes of the sink, under a name if it is long."""
        value = self.values.value_to_store(sink, scope)
        if self.tile.lanes(sink.value.axes) != self.tile.lanes(sink.axes):
            value = self.tile.broadcast(value, sink.axes)
        return value if len(value.text) <= SHORT else self.context.let(scope, wish, value)


def names_of(masks: list[Expr]) -> frozenset[str]:
    """The names that masks read."""
    return frozenset().union(*(m.names for m in masks))
