"""A scheduled axis program to a kernel: coordinates, then values on demand, phase by phase, then the finish.

Only `Coord` differs between the roles of an axis; everything else is written once:

    kernel scope   grid coordinates, what no loop changes, accumulators
      walk         one turn per item of a persistent program
        chunks     one nest of loops per phase and set of row axes
    finish         the last program to arrive adds the partial sums, in order
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import sympy

from ...ir.switches import is_on
from ...ir.types import ITEMSIZE, LOW_FLOATS, Size, product
from ..kernel import Kernel, Pointer, Scalar
from ..program.axes import Axis, Sink, Term, below
from ..program.op_counts import operations_of
from ..program.sizes import blocks, same, tidy
from ..program.sizes import number as evaluated
from .folds import add, combine
from .loop_nests import Loop
from .loops import (
    Accumulate,
    Expr,
    For,
    Let,
    Scope,
    Statement,
    binary,
    call,
    check,
    literal,
    name,
    prune,
    read_names,
    render,
)
from .mathematics import TL, held
from .names import identifier
from .prelude import HELPERS
from .strips import Strips
from .values import Coord, default_name, name_of

PACKED = {"cuda": "packed", "hip": "packed_vector"}
"""What hides a 16-bit tile from the compiler; the interpreter computes everything again anyway."""
WORKSPACE = 8
"""Partial sums are read back from L2 where they fill at most one part in so many of it."""


class Emitter(Strips):
    """One kernel."""

    # ------------------------------------------------------------------ coordinates
    def _split_flat_index(self, axes: Sequence[Axis], flat: Expr, scope: Scope, level: int) -> None:
        """Take a flat number apart, the last axis fastest."""
        axes, slid = [a for a in axes if not self._is_one_block(a)] if level == 0 else list(axes), None
        for position, axis in reversed(list(enumerate(axes))):
            place = flat
            if position:
                place = binary("%", flat, self.count(axis))
                rest = self.names.fresh("rest")
                scope.body.append(Let(rest, binary("//", flat, self.count(axis))))
                flat = name(rest)
            if self.plan.slide is not None and axis is self.plan.slide.axis:
                slid = place
            else:
                (self._block_coord if axis in self.plan.tile else self._scalar_coord)(axis, place, scope, level)
        if slid is not None:
            self._slid_block(axes[-1], slid, scope)

    # ------------------------------------------------------------------ the kernel
    def build(self) -> list[Statement]:
        """The tree of the whole kernel."""
        plan = self.plan
        for axis in plan.whole if plan.chunked else plan.row:
            if not self._slid_whole(axis):
                self._resident(axis)
        if plan.programs is None:
            if any(set(plan.grid) - set(s.axes) for s in self.program.sinks):  # no program, no store
                self._never_zero(a.size for a in plan.grid)
            self._grid(plan.grid, "tl.program_id(0)")
            self._slid_rows(self.top)
            self._phases()
            return self.top.body
        self._emit_walk()
        return self.top.body

    def _slid_whole(self, axis: Axis) -> bool:
        """Held whole, from a boundary on that depends on the row."""
        slide = self.plan.slide
        return slide is not None and axis is slide.axis and axis in self.plan.row and not self.plan.chunked

    def _slid_rows(self, scope: Scope) -> None:
        for axis in filter(self._slid_whole, self.plan.row):
            self._slid_row(axis, scope)

    def _grid(self, axes: Sequence[Axis], flat: str) -> None:
        axes = [a for a in axes if not self._is_one_block(a)]
        if not axes:
            return
        number_ = Expr(flat, names=frozenset(["tl"]))
        if len(axes) > 1:
            self.top.body.append(Let("pid", number_))
            number_ = name("pid")
        self._split_flat_index(axes, number_, self.top, 0)

    def _emit_walk(self) -> None:
        """for item in this program's share: the body; then the finish."""
        plan, top = self.plan, self.top
        assert plan.items is not None and plan.programs is not None
        programs = self.sizes.fixed("PROGRAMS", plan.programs)
        top.body.append(Let("pid", Expr("tl.program_id(0)", names=frozenset(["tl"]))))
        part = name("pid")
        if self._has_strips():
            top.body.append(Let("strip", binary("//", name("pid"), programs)))
            top.body.append(Let("part", binary("%", name("pid"), programs)))
            part = name("part")
        begun = plan.step > 1
        if begun:
            item, over = self._share_loop(part)
            self._begin_alike()
        self._split_flat_index(plan.grid, name("strip") if self._has_strips() else part, top, 0)
        if begun:
            self._slid_rows(top)
        self.body = Scope(1, top)
        if not begun:
            item, over = self._share_loop(part)
        self._split_flat_index(plan.walk, self._rotated_item(item), self.body, 1)
        if not begun:
            self._slid_rows(self.body)
        self._phases()
        top.body.append(For(item, over, self.body.body))
        if plan.final:
            top.closed = True
            self._emit_final_reduction()

    def _never_zero(self, sizes: Iterable[Size]) -> None:
        """Kernels with sizes of zero are kernels of their own."""
        for size in sizes:
            if not isinstance(size, int):
                self.sizes.guards[sympy.Gt(size, 0, evaluate=False)] = None

    def _share_loop(self, part: Expr) -> tuple[str, Expr]:
        """The loop variable and range of a program's share of the items."""
        plan = self.plan
        assert plan.items is not None and plan.programs is not None
        share = self._items_per_program(plan.items, plan.programs)
        self._never_zero(a.size for a in (*plan.walk, *plan.grid, *plan.row))
        each = self.sizes.fixed("ITEMS", share)
        walked = plan.walk[0].size
        whole = self.sizes.text(walked) if same(plan.items, walked) else self.sizes.fixed("TOTAL", plan.items)
        self.sizes.require_below(plan.items, 1 << 30)
        self.share, self.total = share, whole
        stages = {"num_stages": literal(plan.stages)} if plan.stages > 1 and not plan.chunked else {}
        span = self._share_span(part, each, whole)
        if plan.step > 1 or (plan.shared and self._has_strips()):
            span = [self._let(self.top, n, e) for n, e in zip(("start", "stop"), span, strict=True)]
        self.span = [*span, whole]
        return "item", call("tl.range", *span, *self._stride(), **stages)

    def _items_per_program(self, items: Size, programs: Size) -> Size:
        """The most items that a program walks."""
        step = self.plan.step
        if isinstance(items, int) and isinstance(programs, int):
            return -(-blocks(items, step) // (programs // step))
        return sympy.ceiling(sympy.sympify(blocks(items, step)) / tidy(sympy.sympify(programs) / step))

    def _share_span(self, part: Expr, each: Expr, whole: Expr) -> list[Expr]:
        """Where a share begins and ends; programs beside each other walk every so many-th item of the same stretch."""
        place, more = part, literal(0)
        if self.plan.step > 1:
            (step,) = self._stride()
            place, more = binary("//", part, step), binary("%", part, step)
            each = binary("*", each, step)
        start, stop = binary("*", place, each), binary("*", binary("+", place, literal(1)), each)
        return [add(start, more), call("tl.minimum", stop, whole)]

    def _stride(self) -> list[Expr]:
        """From one item of a program to its next."""
        return [literal(self.plan.step)] if self.plan.step > 1 else []

    def _begin_alike(self) -> None:
        """Until the walk, a program is at its first row: the others are as far from the boundary below them."""
        (axis,) = self.plan.walk
        self.coords[axis] = Coord(call("tl.cast", self.span[0], literal("tl.int64")), None, None, 0)

    def _phases(self) -> None:
        """Phase by phase: passes over a chunked row, then what is complete without its lanes."""
        plan, row = self.plan, set(self.plan.row)
        sinks = [s for s in self.program.sinks if not any(t in plan.after for t in below(s.terms))]
        if plan.shared:
            self._strip_phases(sinks)
            return
        if plan.packed:
            self._packed_phases(sinks)
            return
        phase_of = {id(s): max((plan.phase[t] for t in s.terms), default=0) for s in sinks}
        last = max([*phase_of.values(), *(plan.phase[r.args[0]] for r in plan.final), *plan.phase.values()], default=0)
        passes = [p for p in range(last + 1) if self._pass_work(p, sinks, phase_of)] if plan.chunked else []
        for phase in range(last + 1):
            if plan.chunked:
                self._passes(phase, sinks, phase_of, phase == max(passes, default=0))
            for r in plan.final:
                if plan.phase[r.args[0]] == phase and not (plan.chunked and r.args[0].axes & row):
                    self._accumulate(r, self.body)
            for s in sinks:
                if phase_of[id(s)] == phase and not (plan.chunked and set(s.axes) & row):
                    self.store(s, self.body)

    def _strip_phases(self, sinks: Sequence[Sink]) -> None:
        """What is reduced along the whole row, once for all strips; then this program's strip of the rest."""
        self.evict = "evict_last"
        inner = [t for t in self.program.terms if t in self.plan.inner]
        if inner:
            before, self.body.body = self.body.body, []
            self._pass(frozenset(self.plan.row), inner)
            emitted, self.body.body = self.body.body, before
            if self._has_strips():
                self._reduce_once_for_strips(inner, emitted)
            else:
                self.body.body.extend(emitted)
        for r in self.plan.final:
            self._accumulate(r, self.body)
        for s in sinks:
            self.store(s, self.body)

    def _packed_phases(self, sinks: Sequence[Sink]) -> None:
        """Phase by phase, everything along the row made anew out of what was read."""
        phase = self.plan.phase
        work: dict[int, list[Term | Sink]] = {}
        for t in (t for t in self.program.terms if t in self.plan.inner):
            work.setdefault(phase[t.args[0]], []).append(t)
        for s in sinks:
            work.setdefault(max((phase[t] for t in s.terms), default=0), []).append(s)
        for after, number_ in enumerate(sorted(work)):
            if after:
                self._forget_row_values()
            for item in work[number_]:
                self._emit_item(item)

    def _emit_item(self, item: Term | Sink) -> None:
        if isinstance(item, Sink):
            self.store(item, self.body)
        else:
            self.value(item, self.body)

    def _forget_row_values(self) -> None:
        """Nothing along the row is held but the rows as they were read, and that for the compiler, too."""
        row, memo = set(self.plan.row), self.body.memo
        for known in [t for t in memo if isinstance(t, Term) and t.axes & row]:
            del memo[known]
        tiles = [memo["tile", t] for t in self.program.terms if ("tile", t) in memo]
        for tile in tiles if self.target.kind in PACKED else ():
            self.body.body.append(Accumulate(tile.text, "=", call(PACKED[self.target.kind], tile)))

    def _pass_work(
        self, phase: int, sinks: Sequence[Sink], phase_of: Mapping[int, int]
    ) -> dict[frozenset[Axis], list[Term | Sink]]:
        """What has to be done along the row in a phase, by the row axes that it walks."""
        plan, row = self.plan, frozenset(self.plan.row)
        work: dict[frozenset[Axis], list[Term | Sink]] = {}
        for t in self.program.terms:
            reduced = (t in plan.inner or t in plan.final) and t not in plan.online
            if reduced and plan.phase[t.args[0]] == phase and t.args[0].axes & row:
                work.setdefault(t.args[0].axes & row, []).append(t)
        for s in sinks:
            if phase_of[id(s)] == phase and set(s.axes) & row:
                work.setdefault(frozenset(s.axes) & row, []).append(s)
        return work

    def _passes(self, phase: int, sinks: Sequence[Sink], phase_of: Mapping[int, int], last: bool) -> None:
        self.evict = "evict_first" if last else "evict_last"
        for axes, work in self._pass_work(phase, sinks, phase_of).items():
            self._pass(axes, work)

    def _pass(self, axes: frozenset[Axis], work: Sequence[Term | Sink]) -> None:
        """One nest of loops over chunks of the row: lane accumulators before, the loops, the folds after."""
        axes -= frozenset(self.plan.whole)
        outside = {a: c for a, c in self.coords.items() if a in axes}
        direct = next((self.plan.direct[w] for w in work if isinstance(w, Term) and w in self.plan.direct), ())
        kept = [a for a in direct if a in axes]
        self.levels.clear()
        outermost_first = sorted((a for a in self.plan.order if a in axes), key=lambda a: a not in kept)
        nest = self._open_nest(outermost_first, self.body, self.body.level + 1, 1)
        chunk, after, ends = nest[-1].scope if nest else self.body, [], []
        totals = {top: total for total, top in self.plan.online.items()}
        for item in work:
            if isinstance(item, Sink):
                self.store(item, chunk)
            elif item in self.plan.direct:
                ends += self._accumulate_direct(item, nest[len(kept) - 1].scope if kept else self.body, chunk)
            elif item in self.plan.final:
                self._accumulate(item, chunk)
            elif item in totals:
                self._online_lanes(item, totals[item], chunk)
            else:
                after.append((item, self._lane_accumulator(item, chunk)))
        self.body.body.extend(self._close_with_ends(nest, ends, len(kept)))
        self._restore_coords(axes, outside)
        for term, label in after:
            self._fold_lanes(term, label)
        for top, total in totals.items():
            if top in work:
                self._online_folded(top, total)

    def _close_with_ends(self, nest: Sequence[Loop], ends: Sequence[Statement], depth: int) -> list[Statement]:
        """The nest, and behind it what does not belong into its first loops."""
        loops: list[Statement] = [self._close_nest(nest, ends, depth)] if nest else []
        return loops if depth else [*loops, *ends]

    def _restore_coords(self, axes: Iterable[Axis], outside: Mapping[Axis, Coord]) -> None:
        """After the loops over chunks, their axes are where they were before."""
        for axis in axes:
            del self.coords[axis]
        self.coords.update(outside)
        self.levels.clear()

    def _online_lanes(self, top: Term, total: Term, chunk: Scope) -> None:
        """Per lane, the maximum so far and the sum relative to it; finite at first: -inf - -inf never arises."""
        value = self._let(chunk, "value", self._neutral(top, self.value(top.args[0], chunk), chunk))
        tops, sums = (self.names.fresh(f"{identifier(name_of(t)) or default_name(t)}_lanes") for t in (top, total))
        dtype, shape = literal(TL[held(top.dtype)]), self.shape(self._lanes_of(top))
        start = literal("-3.4028234663852886e38" if top.dtype == "f32" else "-1.7976931348623157e308")
        self.body.body.append(Let(tops, call("tl.full", shape, start, dtype)))
        self.body.body.append(Let(sums, call("tl.full", shape, literal("0.0"), dtype)))
        higher = self._let(chunk, "higher", call("larger", name(tops), value))
        before = binary("*", name(sums), self._exp(top, binary("-", name(tops), higher)))
        grown = binary("+", before, self._exp(top, binary("-", value, higher)))
        chunk.body.append(Accumulate(sums, "=", grown, self._comment(total)))
        chunk.body.append(Accumulate(tops, "=", higher, self._comment(top)))
        self.body.memo["lanes", top], self.body.memo["lanes", total] = name(tops), name(sums)

    def _online_folded(self, top: Term, total: Term) -> None:
        """Maximum and sum of the row; a row of nothing but -inf ends as in torch, with NaN for the sum."""
        tops, sums = self.body.memo["lanes", top], self.body.memo["lanes", total]
        highest = self._let(self.body, "highest", self._fold(top, tops, top.args[0].axes))
        relative = binary("*", sums, self._exp(top, binary("-", tops, highest)))
        added = self._let(self.body, "added", self._fold(total, relative, top.args[0].axes))
        nothing = binary("==", added, literal("0.0"))
        for term, value, otherwise in ((top, highest, 'float("-inf")'), (total, added, 'float("nan")')):
            label = self.names.fresh(name_of(term), default_name(term))
            self.body.body.append(Let(label, call("tl.where", nothing, literal(otherwise), value)))
            self.body.memo[term] = name(label)

    def _exp(self, like: Term, x: Expr) -> Expr:
        return self.rules["exp"](like.dtype, x)

    def _lane_accumulator(self, term: Term, chunk: Scope) -> str:
        value = self._neutral(term, self.value(term.args[0], chunk), chunk)
        label = self.names.fresh(f"{identifier(name_of(term)) or term.op}_lanes")
        self.body.body.append(self._accumulator(term, label, self._lanes_of(term)))
        self.lane_labels.append(label)
        operator, combined = combine(term.op, term.dtype, label, value)
        chunk.body.append(Accumulate(label, operator, combined, self._comment(term)))
        return label

    def _fold_lanes(self, term: Term, label: str) -> None:
        """The value of a reduction, from its lanes."""
        value = self._fold(term, name(label), term.args[0].axes)
        if term.dtype in LOW_FLOATS and self._needs_rounding(term):
            value = call("rounded", value, literal(TL[term.dtype]))
        chosen = self.names.fresh(name_of(term), default_name(term))
        self.body.body.append(Let(chosen, value))
        self.body.memo[term] = name(chosen)

    # ------------------------------------------------------------------ the result
    def kernel_of(self) -> Kernel:
        body = prune(self.build(), set())
        used = read_names(body)
        body = self._aligned(used) + body
        pointers = [Pointer(p, ref, self.pointer_dtype[ref]) for ref, p in self.pointers.items()]
        scalars = [Scalar(label, value) for value, label in self.sizes.scalars.items() if label in used]
        constants = {k: v for k, v in self.sizes.constants.items() if k in used}
        known = {p.name for p in pointers} | {s.name for s in scalars} | set(constants) | set(HELPERS)
        check(body, known | {"tl", "libdevice", "range", "float"}, self.kernel)
        head = [*(p.name for p in pointers), *(s.name for s in scalars), *(f"{c}: tl.constexpr" for c in constants)]
        source = "\n".join(["@triton.jit", f"def {self.kernel}({', '.join(head)}):", *render(body)]) + "\n"
        plan = self.plan
        grid = tidy(product([plan.programs, plan.strips])) if plan.programs is not None else tidy(plan.strips)
        reads, writes, cached = self._traffic()
        return Kernel(
            self.kernel, source, (*pointers, *scalars), dict(constants), grid, plan.warps, plan.stages,
            tuple(self.scratch), {}, tuple(self.sizes.guards), reads, writes, cached,
            tuple(p.name for p in pointers if p.name in self.aligned), operations_of(self.program), self.target.fast,
        )  # fmt: skip

    def _aligned(self, used: set[str]) -> list[Statement]:
        """N = N // 16 * 16: lengths and strides that are multiples now have to stay so, or another kernel serves."""
        found: list[Statement] = []
        for size, label in self.sizes.scalars.items() if is_on("multiples") else ():
            if label in used and label in self.sizes.wide and evaluated(size, self.hints) % 16 == 0:
                found.append(
                    Accumulate(
                        label,
                        "=",
                        binary("*", binary("//", name(label), literal(16)), literal(16)),
                        "a multiple of 16: accesses are wide",
                    )
                )
                self.sizes.guards[sympy.Eq(sympy.Mod(size, 16), 0)] = None
        return found

    def _traffic(self) -> tuple[dict[str, Size], dict[str, Size], dict[str, Size]]:
        """Bytes per buffer: every distinct place once; what a row in flight is read again for comes out of L2."""
        reads: dict[str, Size] = {}
        writes: dict[str, Size] = {}
        cached: dict[str, Size] = {}
        seen: set[object] = set()
        for t in self.program.terms:
            if t.op == "load" and (key := (t.param, t.args)) not in seen:
                seen.add(key)
                moved = tidy(_places_read(t) * ITEMSIZE[t.dtype])
                self._add_traffic(reads, self.pointers[t.param.ref], moved)
                again = self.passes.get(t, 0) - (not self.plan.shared)
                if again > 0 and set(self.plan.walk) & t.axes:
                    self._add_traffic(cached, self.pointers[t.param.ref], tidy(again * moved))
        for s in self.program.sinks:
            self._add_traffic(writes, self.pointers[s.ref], tidy(product(a.size for a in s.axes) * ITEMSIZE[s.dtype]))
        for b in self.scratch:
            if not b.zeroed:
                moved = tidy(product(b.shape) * ITEMSIZE[b.dtype])
                stays = evaluated(moved, self.hints) <= self.target.l2 // WORKSPACE
                (cached if stays else reads)[f"{b.name}_ptr"] = writes[f"{b.name}_ptr"] = moved
        return reads, writes, cached

    def _add_traffic(self, into: dict[str, Size], label: str, moved: Size) -> None:
        into[label] = tidy(into.get(label, 0) + moved)


def _places_read(load: Term) -> Size:
    """How many places a load reads: along an axis that its guards bound, those between the bounds."""
    low: dict[Axis, Size] = {}
    high: dict[Axis, Size] = {}
    for guard in load.args[len(load.param.indirect) :]:
        if guard.op in ("ge", "lt", "le") and (bound := _bound_of_guard(guard)) is not None:
            axis, number = bound
            (low if guard.op == "ge" else high)[axis] = number + int(guard.op == "le")
    return tidy(product(high.get(a, a.size) - low.get(a, 0) for a in load.axes))


def _bound_of_guard(guard: Term) -> tuple[Axis, Size] | None:
    """axis + offset < number  ->  (axis, number - offset)"""
    place, number = guard.args
    if place.op != "index" or number.op != "const" or len(place.param.terms) != 1:
        return None
    ((axis, coefficient),) = place.param.terms
    return (axis, tidy(number.param - place.param.offset)) if coefficient == 1 else None
