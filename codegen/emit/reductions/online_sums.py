"""Sums along a row in chunks in the pass of the extreme that they are relative to, as sum(exp(x - max(x))) is.

They are relative to the extreme so far. What a thread has of a chunk has one, and a sum so far is scaled once for all
of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ....ir.types import ITEMSIZE
from ...program.axes import Axis, Term, terms_below
from ...program.sizes import evaluate_size
from ...program.terms import TermTable
from ...schedule.separation.algebra import Algebra, moving
from ...schedule.separation.online import OnlineSum
from ..context import Context, as_tensor, default_name, name_of
from ..mathematics import TL, exp_below, register_dtype
from ..names import identifier
from ..statements import ATOM, Accumulate, Expr, Scope, binary, call, literal, name
from ..statements import total as combined
from ..values import Values
from .folding import ACCESS, Folding
from .folds import fold_function

LARGEST = {"f32": "3.4028234663852886e38", "f64": "1.7976931348623157e308"}
"""Beside which an extreme begins: finite, so that -inf - -inf never arises."""
NEUTRAL = {"amax": "-", "amin": ""}
"""The sign of the number, and of the infinity, that an extreme is of nothing."""
FUNCTIONS = {"amax": "larger", "amin": "smaller"}
MOVED = {"amax": "higher", "amin": "lower"}
FOUND = {"amax": "highest", "amin": "lowest"}


@dataclass(frozen=True)
class Columns:
    """A chunk of columns as [accesses, rows read at once, columns]: with one thread's elements along the first."""

    block: Expr
    rows: int
    columns: Expr

    @property
    def shape(self) -> Expr:
        accesses = binary("//", self.block, literal(self.rows))
        names = self.block.names | self.columns.names
        return Expr(f"[{accesses}, {self.rows}, {self.columns}]", names=names)

    @property
    def lanes(self) -> Expr:
        return Expr(f"[{self.rows}, {self.columns}]", names=self.columns.names)

    def fold(self, term: Term, parts: Expr) -> Expr:
        """What each thread has of a column, folded."""
        return call(fold_function(term), parts, literal(0))

    def spread(self, value: Expr) -> Expr:
        """A value of each thread beside all that it has."""
        return Expr(f"{value.inside(ATOM)}[None, :, :]", names=value.names)


@dataclass(frozen=True)
class Parts:
    """A chunk as [accesses, threads, elements of one access]: with one thread's elements along the outer two."""

    block: Expr
    threads: int
    access: int

    @property
    def shape(self) -> Expr:
        accesses = binary("//", self.block, literal(self.threads * self.access))
        return Expr(f"[{accesses}, {self.threads}, {self.access}]", names=accesses.names)

    @property
    def lanes(self) -> Expr:
        return Expr(f"[{self.threads}]")

    def fold(self, term: Term, parts: Expr) -> Expr:
        """What each thread has, folded."""
        return call(fold_function(term), call(fold_function(term), parts, literal(2)), literal(0))

    def spread(self, value: Expr) -> Expr:
        """A value of each thread beside all that it has."""
        return Expr(f"{value.inside(ATOM)}[None, :, None]", names=value.names)


@dataclass(frozen=True)
class Turn:
    """What a chunk has of an extreme: its values, as threads have them, and the extreme so far before and with it."""

    value: Expr
    parts: Parts | Columns | None
    before: Expr
    now: Expr


@dataclass(eq=False)
class OnlineSums:
    """Extremes, and the sums that ride along with each. `labels`: their accumulators."""

    context: Context
    folding: Folding
    values: Values
    labels: list[str] = field(default_factory=list)
    algebra: Algebra = field(default_factory=lambda: Algebra(TermTable(), lambda _: True))

    def of(self, top: Term) -> list[Term]:
        """The sums that are relative to an extreme; one that is a witness of what went into it comes first."""
        known = [(online, total) for total, online in self.context.plan.online.items() if online.top is top]
        return [total for online, total in sorted(known, key=lambda pair: not pair[0].is_plain)]

    def accumulate(self, top: Term, chunk: Scope) -> None:
        """The extreme and its sums take a chunk in."""
        context, parts = self.context, self.parts(top)
        value = context.let(chunk, "value", self.values.argument_of_reduction(top, chunk))
        if parts is not None:
            value = context.let(chunk, "parts", call("tl.reshape", value, parts.shape))
        extreme = self._accumulator(top, parts, NEUTRAL[top.op] + LARGEST[top.dtype])
        sums = {total: self._accumulator(total, parts, "0.0") for total in self.of(top)}
        # The sum so far is relative to the extreme before: it is scaled before the extreme changes
        folded = value if parts is None else parts.fold(top, value)
        moved = context.let(chunk, MOVED[top.op], call(FUNCTIONS[top.op], extreme, folded))
        turn = Turn(value, parts, extreme, moved)
        for total, so_far in sums.items():
            scaled = binary("*", so_far, self._ratio(total, extreme, moved, chunk))
            relative = self._relative(total, turn, chunk)
            added = relative if parts is None else parts.fold(total, relative)
            chunk.body.append(Accumulate(so_far.text, "=", binary("+", scaled, added), context.comment(total)))
        chunk.body.append(Accumulate(extreme.text, "=", moved, context.comment(top)))

    def _accumulator(self, term: Term, parts: Parts | Columns | None, start: str) -> Expr:
        """What a term accumulates in."""
        context, body = self.context, self.context.body
        label = context.names.fresh(f"{identifier(name_of(term)) or default_name(term)}_lanes")
        shape = self.folding.tile.shape(term.args[0].axes) if parts is None else parts.lanes
        note = "one for each thread" if parts is not None and term.op in NEUTRAL else ""
        filled = call("tl.full", shape, literal(start), literal(TL[register_dtype(term.dtype)]))
        body.memo["lanes", term] = body.define(label, filled, note)
        self.labels.append(label)
        return name(label)

    # ------------------------------------------------------------------ relative to the extreme so far
    def _ratio(self, total: Term, before: Expr, now: Expr, scope: Scope) -> Expr:
        """exp(G(now) - G(before)): by what a sum moves."""
        online = self.context.plan.online[total]
        if online.is_plain:
            return self._power(online, before, now)
        held = [self._held(online.top, extreme, scope) for extreme in (now, before)]
        scales = [self.algebra.replaced(online.scale, {online.top: h}) for h in held]
        ratio = self.values.value(self.algebra.make(online.base, self.algebra.difference(*scales)), scope)
        # From an extreme of nothing so far to another: times a sum of zeros that is zero, and infinity would be NaN
        return call("tl.minimum", ratio, literal(LARGEST[total.dtype]))

    def _relative(self, total: Term, turn: Turn, chunk: Scope) -> Expr:
        """What a chunk adds, relative to the extreme."""
        online, (body,) = self.context.plan.online[total], total.args
        now = turn.now if turn.parts is None else turn.parts.spread(turn.now)
        if online.is_plain:
            return self._power(online, turn.value, now)
        read = {leaf: self._arranged(leaf, turn, chunk) for leaf in self._leaves(body, online.top)} | {online.top: now}
        held = {term: self._held(term, value, chunk) for term, value in read.items()}
        return self._inside(total, self.values.value(self.algebra.replaced(body, held), chunk), turn)

    def _power(self, online: OnlineSum, x: Expr, extreme: Expr) -> Expr:
        """exp of what is not positive: x beside an extreme of it."""
        target = self.context.target
        below = binary("-", x, extreme) if online.top.op == "amax" else binary("-", extreme, x)
        if online.base != "exp":
            return self.values.rules[online.base](online.top.dtype, below)
        return exp_below(target.kind, target.fast, online.top.dtype, below)

    def _leaves(self, body: Term, top: Term) -> list[Term]:
        """What the body reads along the row beside the extreme."""
        moves, row = moving(body, (top,)), set(self.context.plan.row)
        read = [a for t in terms_below([body]) if t in moves and t is not top for a in t.args]
        return [a for a in dict.fromkeys(read) if a not in moves and a.axes & row]

    def _arranged(self, leaf: Term, turn: Turn, chunk: Scope) -> Expr:
        """A value of the chunk, one thread's elements beside each other where the extreme's are."""
        value = as_tensor(leaf, self.values.value(leaf, chunk))
        return self._by_thread(value, turn.parts)

    def _by_thread(self, value: Expr, parts: Parts | Columns | None) -> Expr:
        tile = self.folding.tile
        return value if parts is None else call("tl.reshape", tile.broadcast(value, tile.dims), parts.shape)

    def _inside(self, total: Term, relative: Expr, turn: Turn) -> Expr:
        """Zero in the lanes outside."""
        mask = combined("&", self.folding.coords.masks(total.param, summed=True))
        if mask is None:
            return relative
        return call("tl.where", self._by_thread(mask, turn.parts), relative, literal("0.0"))

    def _held(self, term: Term, value: Expr, scope: Scope) -> Term:
        """What stands for a value that a term has in one turn."""
        held = Term("carried", (), term.dtype, term, len(self.values.accumulated), None)
        self.values.accumulated[held] = value
        self.values.levels.fix(held, scope.level)
        return held

    # ------------------------------------------------------------------ complete
    def fold(self, top: Term, scope: Scope) -> dict[Term, Expr]:
        """The lanes of all folded: the extreme, and the sums relative to it."""
        let, memo = self.context.let, self.context.body.memo
        extremes = memo["lanes", top]
        found = {top: let(scope, FOUND[top.op], self.folding.fold(top, extremes))}
        for total in self.of(top):
            relative = binary("*", memo["lanes", total], self._ratio(total, extremes, found[top], scope))
            found[total] = let(scope, "added", self.folding.fold(total, relative))
        return found

    def results(self, top: Term, folded: Mapping[Term, Expr]) -> Iterator[tuple[Term, Expr]]:
        """The extreme, which nothing but infinities may have gone into, and the sums that eager makes of it then."""
        witness, *_ = self.of(top)
        infinity = literal(f'float("{NEUTRAL[top.op]}inf")')
        is_empty = binary("==", folded[witness], literal("0.0"))
        yield top, call("tl.where", is_empty, infinity, folded[top])
        found, nan = self.context.body.memo[top], literal('float("nan")')
        is_infinite = binary("==", call("tl.abs", found), literal('float("inf")'))
        for total in self.of(top):
            if self.context.plan.online[total].is_bare:
                yield total, call("tl.where", is_empty, nan, folded[total])
            else:
                yield total, call("tl.where", is_infinite, self._beside_infinity(total, folded), folded[total])

    def _beside_infinity(self, total: Term, folded: Mapping[Term, Expr]) -> Expr:
        """The sum, where its extreme is infinite."""
        online, body, make = self.context.plan.online[total], self.context.body, self.algebra.make
        found = self._held(online.top, body.memo[online.top], body)
        scale = self.algebra.replaced(online.scale, {online.top: found})
        if online.is_plain:  # each power is zero, but for those of the extreme
            sign = "add" if online.top.op == "amax" else "sub"
            return self.values.value(make(online.base, self.algebra.combined(sign, scale, found)), body)
        before = self.algebra.replaced(online.scale, {online.top: self._held(online.top, folded[online.top], body)})
        return binary("*", folded[total], self.values.value(make(online.base, make("sub", scale, before)), body))

    def parts(self, reduction: Term) -> Parts | Columns | None:
        """The chunk by threads, where each keeps whole accesses of it; None where a thread has lanes of many places."""
        context, plan, tile = self.context, self.context.plan, self.folding.tile
        if plan.order[-1:] != tile.dims[-1:]:
            return None
        axis = tile.dims[-1]
        loads = [t for t in terms_below([reduction.args[0]]) if t.op == "load" and axis in t.axes]
        access = min((ACCESS // ITEMSIZE[t.dtype] for t in loads), default=1)
        threads, lanes = plan.warps * context.target.warp, tile.block_sizes[axis]
        if len(tile.dims) == 2 and tile.dims[:1] == reduction.param:
            rows, block = threads * access // lanes, tile.block_sizes[tile.dims[0]]
            fits = access > 1 and 0 < rows < block and all(self._is_wide(t, axis, access) for t in loads)
            return Columns(tile.block(tile.dims[0]), rows, tile.block(axis)) if fits else None
        if tile.dims != reduction.param:
            return None
        fits = access > 1 and lanes >= access * threads and all(self._is_wide(t, axis, access) for t in loads)
        return Parts(tile.block(axis), threads, access) if fits else None

    def _is_wide(self, load: Term, axis: Axis, access: int) -> bool:
        """Rows begin at multiples of an access, or are read from such a boundary on."""
        place, slide, hints = load.param.place, self.context.plan.slide, self.context.hints
        if slide is not None:
            return slide.holds(place, not load.args)
        steps = [place.offset, *(c for a, c in place.terms if a is not axis)]
        return dict(place.terms).get(axis) == 1 and all(evaluate_size(n, hints) % access == 0 for n in steps)
