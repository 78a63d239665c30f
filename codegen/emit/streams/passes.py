"""One pass over the stream: accumulators, the loops between the bounds that masks leave, and what a turn takes in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....ir.types import FLOATS
from ...program.axes import REDUCTIONS, Axis, Term, terms_below
from ...schedule.separation.algebra import is_tile_product
from ...schedule.streams.accumulators import Accumulator, operands_of
from ...schedule.streams.masks import NOTHING, Span, whole_bodies
from ..access.coordinates import Coord
from ..mathematics import number
from ..reductions.folds import fold_function, take_in
from ..statements import Accumulate, Expr, For, Scope, assigned_names, binary, call, literal, name
from .bounds import Part, StreamBounds
from .skipped import SkippedPlaces
from .stream import Stream
from .values import uses_of

LARGEST = 3.4028234663852886e38
"""The largest finite float32."""


class StreamPass:
    """The accumulators of one pass, and its loops."""

    def __init__(self, stream: Stream, accumulators: Sequence[Accumulator], span: Span) -> None:
        self.stream, self.accumulators, self.span = stream, accumulators, span
        self.context, self.roles, self.emitter = stream.context, stream.roles, stream.emitter
        self.values, self.levels = stream.values, stream.emitter.levels
        self.labels = {a.term: self._label(a) for a in accumulators}
        stream.labels |= self.labels
        self.followed = {r for a in accumulators for r in a.running}

    def emit(self) -> None:
        top = self.context.top
        for a in self.accumulators:
            self._begin(a, top)
        host, nest = self._open_outer(top)
        bounds = StreamBounds(self.stream, self.span)
        for part in bounds.parts(host):
            self._emit_part(part, host)
        if self.span.added:
            self.levels.clear()
            self._fix_known()
            SkippedPlaces(self.stream, bounds.skipped).add(self.span.added, host)
        self._close_outer(nest, top)
        # Complete from here on
        self.levels.clear()
        for a in self.accumulators:
            self.values.accumulated[a.term] = name(self.labels[a.term])
            self.levels.fix(a.term, 0)

    # ------------------------------------------------------------------ accumulators
    def _label(self, a: Accumulator) -> str:
        wish = self.context.name_of_reduction(a.term) if a.kind != "product" else "acc"
        return self.context.names.fresh(wish)

    def _begin(self, a: Accumulator, scope: Scope) -> None:
        with self.stream.shapes.of(*self.stream.shapes.dims(a.term)):
            accumulator = self.emitter.folding.accumulator(a.term, self.labels[a.term], a.term.axes)
        scope.body.append(accumulator)

    def _folded(self, a: Accumulator, body: Term, scope: Scope) -> Expr:
        """What a turn adds: a tile without its columns."""
        value = self.values.value(body, scope)
        if self.roles.keeps_stream:
            return value
        tile = (self.roles.row, self.roles.stream)
        with self.stream.shapes.of(*tile):
            value = self.stream.shapes.spread(value, self.stream.shapes.dims(body))
        mask = self.stream.shapes.mask_of_stream() if a.term in self.span.apart else None
        if mask is not None:
            value = call("tl.where", mask, value, literal(number(NOTHING[a.kind], a.term.dtype)))
        return call(fold_function(a.term), value, literal(1))

    # ------------------------------------------------------------------ loops
    def _open_outer(self, top: Scope) -> tuple[Scope, list[tuple[str, Axis, Scope]]]:
        """Loops over what is summed beside the stream, one place at a time."""
        host, nest = top, list[tuple[str, Axis, Scope]]()
        for axis in self.roles.outer:
            scope = Scope(1, host)
            variable = self.context.names.fresh(f"{axis.name}_at")
            place = scope.define(
                self.context.names.fresh(axis.name), call("tl.cast", name(variable), literal("tl.int64"))
            )
            self.emitter.coords[axis] = Coord(place, None, None, 1)
            nest.append((variable, axis, scope))
            host = scope
        self.levels.clear()
        self._fix_known()
        return host, nest

    def _close_outer(self, nest: list[tuple[str, Axis, Scope]], top: Scope) -> None:
        """Nothing but what the text has before them is taken out of loops around loops: of the products of all loops
        inside, with masks and without, the compiler would hold what describes their operands, and spill.
        """
        for variable, axis, scope in reversed(nest):
            assert scope.parent is not None
            has_loops = any(isinstance(s, For) for s in scope.body)
            fixed = {"disable_licm": literal("True")} if has_loops else {}
            over = call("tl.range", literal(0), self.context.sizes.text(axis.size), **fixed)
            scope.parent.body.append(For(variable, over, scope.body))

    def _fix_known(self) -> None:
        """Sums of earlier passes are complete."""
        for term in self.values.accumulated:
            if term not in self.labels and not term.axes & self.roles.over:
                self.levels.fix(term, 0)

    def _emit_part(self, part: Part, host: Scope) -> None:
        """One loop along the stream, or its only block; loops beside each other have the same names."""
        known = set(self.context.names)
        scope = Scope(2, host) if part.over is not None else host
        if part.over is not None:
            self.stream.shapes.set_stream(name(part.variable), scope, 2, part.ragged)
        self.levels.clear()
        self._fix_known()
        bodies = [a.body for a in self.accumulators]
        changed = bodies if part.masked else self._whole(bodies)
        self.values.silenced = self._silenced() if part.ragged or part.over is None else {}
        self.values.uses = uses_of(changed, self.stream.labels)
        self._take_in(changed, scope)
        self.values.silenced = {}
        if part.over is not None:
            host.body.append(For(part.variable, part.over, scope.body))
            self.context.names.release({part.variable, *assigned_names(scope.body)} - known)

    def _whole(self, bodies: Sequence[Term]) -> list[Term]:
        return whole_bodies(self.stream.algebra, bodies, self.span.implied, self.stream.labels)

    def _silenced(self) -> dict[Term, tuple[Expr, str]]:
        """Behind the mask of the stream, along the dimensions that each term has."""
        masks = ((t, v, self.stream.shapes.mask_of_stream(t)) for t, v in self.span.silenced.items())
        return {t: (mask, number(v, t.dtype)) for t, v, mask in masks if mask is not None}

    # ------------------------------------------------------------------ one turn
    def _take_in(self, bodies: Sequence[Term], scope: Scope) -> None:
        """Extremes first; then what is relative to them, rescaled."""
        made: set[Term] = set()
        ratios: dict[tuple[Term, str], Expr] = {}
        moved: list[tuple[str, Expr]] = []
        for a, body in zip(self.accumulators, bodies, strict=True):
            self._emit_products(body, scope, made)
            if a.kind in ("amax", "amin"):
                moved.append(self._extreme(a, body, scope))
            else:
                self._sum(a, body, scope, ratios)
        for label, value in moved:
            scope.body.append(Accumulate(label, "=", value))

    def _emit_products(self, body: Term, scope: Scope, made: set[Term]) -> None:
        for term in terms_below([body]):
            if term in made or term in self.labels:
                continue
            if self.roles.is_of_pairs(term):
                self.stream.pairs.emit(term, scope)
                self._fix_sums(scope)
                made.add(term)
            elif is_tile_product(term) and self._is_tile(term):
                self.stream.products.emit(term, scope)
                made.add(term)
            elif term.op in REDUCTIONS and set(term.param) <= set(self.roles.depth):
                self._reduce_depth(term, scope, made)

    def _reduce_depth(self, term: Term, scope: Scope, made: set[Term]) -> None:
        """Of rows once; of what is streamed in each turn."""
        if term.axes & self.roles.over:
            made.add(term)
            self.stream.reduce_depth(term, scope.home(self.levels.of(term)))
        elif term not in self.values.accumulated:
            self.stream.reduce_depth(term, self.context.top)
            self.levels.fix(term, 0)

    def _is_tile(self, term: Term) -> bool:
        return {self.roles.row, self.roles.stream} <= term.axes

    def _extreme(self, a: Accumulator, body: Term, scope: Scope) -> tuple[str, Expr]:
        """The extreme so far; what is relative to it reads it without an infinity of nothing."""
        label, context = self.labels[a.term], self.context
        value = self._folded(a, body, scope)
        taken = take_in(a.term, label if a.beside is None else self._begun_again(a, a.beside, scope), value)
        highest = context.let(scope, "highest" if a.kind == "amax" else "lowest", taken.value)
        for now in {b.now: None for b in self.accumulators if b.beside is a.term and b.now is not None}:
            self.values.accumulated[now] = highest
            self.levels.clear()
            self._fix_sums(scope)
        if a.term not in self.followed:
            return label, highest
        self._set(a.term, self._base(a.term, highest, "base", scope), scope)
        return label, highest

    def _begun_again(self, a: Accumulator, extreme: Term, scope: Scope) -> str:
        """The place or number so far, and none where the extreme that it is of has moved: to or from what is no NaN."""
        assert a.now is not None
        now, before = self.values.accumulated[a.now], name(self.labels[extreme])
        stays = binary("==", now, before)
        if extreme.dtype in FLOATS:
            stays = binary("|", stays, binary("!=", before, before))
        nothing = literal(number(NOTHING[a.kind], a.term.dtype))
        return self.context.let(scope, "so_far", call("tl.where", stays, name(self.labels[a.term]), nothing)).text

    def _base(self, term: Term, extreme: Expr, wish: str, scope: Scope) -> Expr:
        """What sums are relative to: the extreme so far, and 0 where there is none."""
        nothing = "-inf" if term.op == "amax" else "inf"
        empty = binary("==", extreme, literal(f'float("{nothing}")'))
        return self.context.let(scope, wish, call("tl.where", empty, literal("0.0"), extreme))

    def _set(self, term: Term, value: Expr, scope: Scope) -> None:
        """A running value, as the rest of the turn reads it."""
        self.values.accumulated[term] = value
        self.levels.clear()
        self._fix_sums(scope)

    def _fix_sums(self, scope: Scope) -> None:
        """Those of earlier passes are complete, those of this one change in each turn."""
        self._fix_known()
        for known in (*self.labels, *(a.now for a in self.accumulators if a.now is not None)):
            if known in self.values.accumulated:
                self.levels.fix(known, scope.level)

    def _sum(self, a: Accumulator, body: Term, scope: Scope, ratios: dict[tuple[Term, str], Expr]) -> None:
        label, comment = self.labels[a.term], self.context.comment(a.term)
        so_far = name(label)
        if a.scale is not None:
            key = (a.scale, a.base)
            if key not in ratios:
                ratios[key] = self._ratio(a, scope)
            with self.stream.shapes.of(*self.stream.shapes.dims(a.term)):
                so_far = binary("*", so_far, self.stream.shapes.spread(ratios[key], (self.roles.row,)))
        if a.kind == "product":
            scope.body.append(Accumulate(label, "=", self._product(a, body, so_far, scope), comment))
            return
        added = self._folded(a, body, scope)
        if a.beside is not None:
            so_far = name(self._begun_again(a, a.beside, scope))
        if a.scale is None and a.beside is None:
            scope.body.append(replace(take_in(a.term, label, added), comment=comment))
        else:
            scope.body.append(Accumulate(label, "=", binary("+", so_far, added), comment))

    def _product(self, a: Accumulator, body: Term, so_far: Expr, scope: Scope) -> Expr:
        pair = operands_of(body, self.roles)
        assert pair is not None
        x, y = pair
        dtype = self.stream.products.multiplied_in(x, y, a.term)
        left = self.stream.products.operand(x, dtype, scope)
        right = self.stream.products.operand(y, dtype, scope)
        return call("tl.dot", left, right, so_far, **self.context.precision(dtype))

    def _ratio(self, a: Accumulator, scope: Scope) -> Expr:
        """exp(G(now) - G(before)): by what a sum moves."""
        algebra, table = self.stream.algebra, self.stream.algebra.table
        assert a.scale is not None
        before: dict[Term, Term] = {}
        for term in a.running:
            old = table.make("last", dtype=term.dtype, param=term)  # "carried" is what bodies compare with: as it is
            before[term] = old
            self.values.accumulated[old] = self._base(term, name(self.labels[term]), "before", scope)
            self.levels.fix(old, scope.level)
        moved = algebra.difference(a.scale, algebra.replaced(a.scale, before))
        with self.stream.shapes.of(self.roles.row):
            ratio = self.values.value(algebra.make(a.base, moved), scope)
        # from a base of nothing so far to a low one: times a sum of zeros that is zero, and infinity would be NaN
        return self.context.let(scope, "ratio", call("tl.minimum", ratio, literal(str(LARGEST))))
