"""Final reductions: every program stores its partial sum, and the last to arrive adds them, in order, level by level.

programs of a group -> groups of a strip -> strips        deterministic; nobody waits; counters reset themselves
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...ir.types import LOW_FLOATS, Size, product
from ..kernel import Buffer, Ref
from ..program.axes import Axis, Sink, Term, below
from ..program.sizes import blocks, tidy
from .direct_partials import DirectSums
from .folds import accumulator_dtype, add, as_result, combine, sum_of
from .loops import (
    Accumulate,
    Expr,
    For,
    If,
    Let,
    Scope,
    Statement,
    Store,
    binary,
    call,
    literal,
    name,
    total,
)
from .mathematics import TL, lowest, number
from .values import FINISH

FAN = 12
"""Partial sums that one program adds: about the square root of the programs on a device."""


@dataclass(slots=True)
class Partial:
    """A final reduction on its way: the folded accumulator, the lanes it keeps, its scratch buffer."""

    term: Term
    folded: str
    kept: list[Axis]
    pointer: str


@dataclass(slots=True)
class Level:
    """One level of arrivals: who counts where, whose slots are added, and which reductions are complete then.

    `first`: the first of the programs whose sums are added, `start`: the same within the strip.
    """

    setup: list[Statement]
    counter: Expr
    count: Expr
    first: Expr
    step: Expr | None
    completes: str
    start: Expr

    def completed(self, everything: bool) -> bool:
        """True where a sum is complete here, over everything or over the walk."""
        return self.completes == "all" or (self.completes == "walk" and not everything)


class Finishing(DirectSums):
    """Accumulators, partial sums and what is stored once they are complete."""

    # ------------------------------------------------------------------ final reductions
    def _accumulate(self, term: Term, scope: Scope) -> None:
        """A final reduction takes in its value, lanes apart."""
        value = self._neutral(term, self.value(term.args[0], scope), scope)
        label = self.names.fresh(f"{self._final_name(term)}_acc")
        self.top.body.append(self._accumulator(term, label, self._lanes_of(term)))
        operator, combined = combine(term.op, term.dtype, label, value)
        scope.body.append(Accumulate(label, operator, combined, self._comment(term)))
        self.top.memo[("acc", term)] = name(label)

    def _emit_final_reduction(self) -> None:
        """Fold the lanes; store partial sums; the last to arrive, level by level, adds them and stores the results."""
        plan = self.plan
        partials = [self._partial(r) for r in plan.final if r not in plan.direct]
        within = set(plan.row) - set(plan.grid)
        everything = [r for r in plan.final if set(r.param) - within != set(plan.walk)]
        if plan.programs == 1 and not everything and not plan.direct and not self.row_words:
            scope = Scope(FINISH, self.top)
            self._emit_complete_sums(scope, {p.term: name(p.folded) for p in partials}, set(plan.final))
            self.top.body.extend(scope.body)
            return
        for p in partials:
            self._store_partial(p)
        self._undo_slide()
        body, parent, left = self.top.body, self.top, list(partials)
        for level in self._levels(bool(everything)):
            scope = Scope(FINISH, parent)
            totals = {p.term: self._add_partials(p, level, scope) for p in left}
            done = {p.term for p in left if level.completed(p.term in everything)}
            left = [p for p in left if p.term not in done]
            for p in left:
                scope.body.append(self._slot_store(p, level.first, totals[p.term]))
            self._emit_complete_sums(scope, {t: v for t, v in totals.items() if t in done}, done)
            self._finish_direct(level, everything, scope)
            body.extend(level.setup)
            body.append(If(call("last_to_arrive", level.counter, level.count), scope.body))
            body, parent = scope.body, scope
            scope.closed = True
        for pointer in self.row_words:
            body.append(self._clear_words(pointer))

    def _clear_words(self, pointer: Expr) -> Statement:
        """Zeros for the next launch."""
        (axis,) = self.plan.row
        place = binary("+", binary("+", pointer, name("first")), self.lane(axis))
        zeros = call("tl.zeros", self.shape([axis]), literal("tl.int32"))
        over = call("range", literal(0), self.span[-1], self.block(axis))
        return For("first", over, [Store(place, zeros, None)])

    def _finish_direct(self, level: Level, everything: Sequence[Term], scope: Scope) -> None:
        """The same for sums with a slot per item: the first level adds items, the others what the level before left."""
        if not self.directs:
            return
        whole, outside, kept = self.plan, dict(self.coords), self.plan.direct[self.directs[0].term]
        self.plan = self._side_by_side(kept)
        nest = self._open_nest(kept, scope, FINISH, 0)
        inner, (over, slot) = nest[-1].scope, self._slots_of(level)
        totals = {d.term: self._direct_total(d, over, slot, inner) for d in self.directs}
        done = {t for t in totals if level.completed(t in everything)}
        self.directs = [d for d in self.directs if d.term not in done]
        for d in self.directs:
            inner.body.append(self._direct_store(d, self._slots(level.first), totals[d.term]))
        self._emit_complete_sums(inner, {t: v for t, v in totals.items() if t in done}, done)
        scope.body.append(self._close_nest(nest))
        self.plan, self.coords = whole, outside

    def _slots_of(self, level: Level) -> tuple[Expr, Expr]:
        """What k runs over, and the slot that it stands for."""
        if level.step is not None:
            return call("range", level.count), self._slots(add(level.first, binary("*", name("k"), level.step)))
        end = call("tl.minimum", self._slots(add(level.start, level.count)), self.total)
        start = [] if level.start.text == "0" else [self._slots(level.start)]
        return call("range", *start, end), self._item_slot(name("k"))

    def _partial(self, term: Term) -> Partial:
        label = self.top.memo["acc", term].text
        lanes = self._lanes_of(term)
        kept = [a for a in lanes if a in term.axes]
        if len(kept) < len(lanes):
            folded = self._fold_accumulator(term, name(label))
            label = self.names.fresh(label)
            self.top.body.append(Let(label, folded))
        return Partial(term, label, kept, "")

    def _store_partial(self, p: Partial) -> None:
        width = product(self._slot_width(a) for a in p.kept)
        p.pointer = self.names.fresh(f"{self._final_name(p.term)}_partial_ptr")
        slots = tidy(product([self.plan.programs or 1, self.plan.strips]) * width)
        ref = Ref("scratch", len(self.scratch))
        self.scratch.append(Buffer(p.pointer.removesuffix("_ptr"), accumulator_dtype(p.term), (slots,), (1,)))
        self.pointers[ref], self.pointer_dtype[ref] = p.pointer, accumulator_dtype(p.term)
        self.top.body.append(self._slot_store(p, name("pid"), name(p.folded)))

    def _slot_width(self, axis: Axis) -> int:
        """Lanes that a partial sum keeps in memory: a row held whole without its padding, in groups of 16 bytes."""
        held = axis in self.plan.row and not self.plan.chunked and isinstance(axis.size, int)
        return min(self.plan.tile[axis], -(-axis.size // 4) * 4) if held else self.plan.own(axis)

    def _slot_mask(self, p: Partial) -> Expr | None:
        """The lanes that have a place in the slot."""
        masked = [a for a in p.kept if self._slot_width(a) < self.plan.tile[a]]
        return total("&", self._masks(masked, summed=True))

    def _slot_keywords(self, p: Partial) -> dict[str, Expr | str]:
        if (mask := self._slot_mask(p)) is None:
            return {}
        neutral = number(lowest(p.term.op, p.term.dtype), accumulator_dtype(p.term))
        return {"mask": mask, "other": literal(neutral)}

    def _slot_store(self, p: Partial, slot: Expr, value: Expr) -> Store:
        mask = self._slot_mask(p)
        return Store(self._slot_address(p, slot), value, mask, mask.names if mask else frozenset())

    def _slot_address(self, p: Partial, slot: Expr) -> Expr:
        """The address of a program's partial sum."""
        pointer = name(p.pointer)
        if not p.kept:
            return pointer if slot.text == "0" else binary("+", pointer, slot)
        stride = 1
        lanes: list[Expr] = []
        for a in reversed(p.kept):
            lanes.insert(0, self._times(self._slot_lane(a), stride, "slot"))
            stride *= self._slot_width(a)
        base = binary("*", call("tl.cast", slot, literal("tl.int64")), literal(stride))
        parts = [pointer] + ([] if slot.text == "0" else [base])
        result = sum_of([*parts, *lanes])
        assert result is not None
        return result

    def _slot_lane(self, axis: Axis) -> Expr:
        """The place of a lane in its slot: by column, wherever the row began."""
        slid = self.plan.step > 1 and self.coords[axis].groups is not None
        return binary("-", self.lane(axis), self._shift()) if slid else self.lane(axis)

    def _levels(self, everything: bool) -> list[Level]:
        """A tree of arrivals: FAN programs, the programs of a strip, the strips."""
        programs = self._programs()
        strips = self._has_strips()
        base = binary("*", name("strip"), programs) if strips else literal(0)
        part = name("part") if strips else name("pid")
        counter = self._counter()
        number_ = name("strip") if strips else literal(0)
        levels: list[Level] = []
        if self.target.units > 16:
            groups = self.sizes.fixed("GROUPS", blocks(self.plan.programs or 1, FAN))
            fan = self.sizes.fixed("FAN", FAN)
            first = binary("*", name("group"), fan)
            members = call("tl.minimum", fan, binary("-", programs, first))
            setup: list[Statement] = [Let("group", binary("//", part, fan)), Let("members", members)]
            own = add(binary("*", number_, groups), name("group")) if strips else name("group")
            levels.append(
                Level(setup, add(counter, own), name("members"), add(base, first), None, "none", first)
            )
            count = self._strip_count() if strips else literal(1)
            done = add(add(counter, binary("*", count, groups) if strips else groups), number_)
            levels.append(Level([], done, groups, base, fan, "walk", literal(0)))
            last = add(counter, binary("*", count, binary("+", groups, literal(1))))
        else:
            levels.append(Level([], add(counter, number_), programs, base, None, "walk", literal(0)))
            last = add(counter, self._strip_count()) if strips else counter
        if (everything or self.row_words) and strips:
            levels.append(Level([], last, self._strip_count(), literal(0), programs, "all", literal(0)))
        elif everything:
            levels[-1].completes = "all"
        return levels

    def _counter(self) -> Expr:
        groups = blocks(self.plan.programs or 1, FAN) + 1 if self.target.units > 16 else 1
        counters = product([self.plan.strips, groups])
        self.sizes.require_below(counters, 1 << 31)
        return self._zeroed_words("arrived", tidy(counters + 1))

    def _zeroed_words(self, label: str, count: Size) -> Expr:
        """Words that are zero before and after every launch."""
        ref = Ref("scratch", len(self.scratch))
        self.scratch.append(Buffer(label, "i32", (count,), (1,), zeroed=True))
        self.pointers[ref], self.pointer_dtype[ref] = self.names.fresh(f"{label}_ptr"), "i32"
        return name(self.pointers[ref])

    def _strip_count(self) -> Expr:
        return self.sizes.fixed("STRIPS", self.plan.strips)

    def _add_partials(self, p: Partial, level: Level, scope: Scope) -> Expr:
        label = self.names.fresh(f"{self._final_name(p.term)}_total")
        scope.body.append(self._accumulator(p.term, label, p.kept))
        step = name("k") if level.step is None else binary("*", name("k"), level.step)
        keywords = self._slot_keywords(p)
        address = self._slot_address(p, add(level.first, step))
        loaded = call("tl.load", address, **keywords, cache_modifier='".cg"')
        operator, combined = combine(p.term.op, p.term.dtype, label, loaded)
        over = call("range", level.count)
        scope.body.append(For("k", over, [Accumulate(label, operator, combined)]))
        return name(label)

    def _emit_complete_sums(self, scope: Scope, totals: Mapping[Term, Expr], done: set[Term]) -> None:
        """Give the finished sums their values and store what depends on nothing else."""
        self.levels.clear()
        for term, value in totals.items():
            value = as_result(term, value)
            if term.dtype in LOW_FLOATS and self._needs_rounding(term):
                value = call("rounded", value, literal(TL[term.dtype]))
            scope.memo[term] = self._let(scope, self._final_name(term), value)
        for sink in self.program.sinks:
            mine = set(below(sink.terms)) & set(self.plan.final)
            if mine & done and all(scope.find(t) is not None for t in mine):
                self._store_last(sink, scope)

    def _store_last(self, sink: Sink, scope: Scope) -> None:
        """A store in the finishing program: everything it still needs is computed there."""
        self.finishing = True
        self.levels.clear()
        self.store(sink, scope)
        self.finishing = False
        self.levels.clear()
