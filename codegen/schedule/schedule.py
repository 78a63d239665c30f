"""Who walks which axis: every axis gets a role, every value a phase. Rules in order of importance; nothing is searched.

    row    axes that one program covers whole, because a reduction over them is needed inside (at once, or in chunks)
    walk   axes that final reductions sum over: persistent programs walk them, the last to arrive adds the partial sums
    grid   the rest: one program per block
    tile   block sizes of the axes that are vector dimensions; the others are scalars

Phase of a value: how many reductions inside the program lie below it. A row in chunks is read once per phase.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sympy

from ...ir import Value
from ...ir.switches import is_on
from ...ir.types import ITEMSIZE, LOW_FLOATS, Size, product
from ..kernel import Ref, Target
from .alignment import Slide, slide_of
from .axes import REDUCTIONS, SCANS, Axis, Materialize, Program, Sink, Term, below
from .sizes import Hints, blocks, number, power_of_two, tidy

SHARED_ROW = 8192
"""Columns of a strip of rows that several programs walk together: two accumulators of it fit in registers."""
CROWDED = ((32768, 2), (16384, 4))
"""Lanes of a row held whole, and the most reductions that leave them in registers; with more it goes in chunks."""
THREADS = 1024
"""Of the largest program."""
STRIP = 256
"""Columns of a strip whose sums over the rows are wanted: wide accesses, few bytes of partial sums."""
PARTIALS = 0.0295
"""Bytes of partial sums that a program may write, of those that it moves: fewer programs rather than more of them."""
LIGHT = frozenset({
    "const", "cast", "spread", "add", "sub", "mul", "div", "reciprocal", "neg", "abs", "max", "min", "sqrt", "rsqrt",
    "exp", "sigmoid", "where", "eq", "ne", "lt", "le", "gt", "ge",
})  # fmt: skip
"""What takes few registers for one element: rows may stay packed beside it."""
DIVISIONS = frozenset({"div", "reciprocal", "sigmoid"})
STREAMS = 2
"""The most rows that stay packed side by side."""
PASSING = 1.5
"""Bytes of packed rows and of the weights beside them, of those of packed rows alone."""
PADDED = 1.25
"""Lanes of a row over its columns, beyond which a wide row held whole is more waste than its second read."""


class Separate(Exception):
    """These sinks belong in a kernel of their own."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self.sinks = tuple(sinks)


@dataclass(frozen=True)
class Budget:
    """What one program may hold, in elements: `held` in resident rows, `lanes` in a tile, `chunk` of a row.

    Before its partial sums are worth their bytes, a program walks at least `turns` items and `walked` elements, and so
    many that the sums are at most the share `partials` of the bytes that it moves; but more than `long` of them only
    where half of the units are busy. From `alone` lanes on, a row that begins at an odd place is worth its own tile.
    Of 16-bit elements `packed` may stay as they were read, two in a register; as many registers are for the rest.
    """

    held: int
    lanes: int
    chunk: int
    units: int
    least_items: int
    turns: int
    walked: int
    partials: float
    long: int
    alone: int
    packed: int

    @staticmethod
    def of(target: Target) -> Budget:
        leaning = target.leaning
        if target.kind == "interpret":
            held = max(16, int(target.shared * 8 * 2.0**leaning.held))
            chunk = 1 << max(4, min(15, (held // 2).bit_length() - 1))
            lanes = min(1 << 16, held)
            return Budget(held, lanes, chunk, target.units, target.units, 1, 1, 1.0, 1, 128, target.packed)
        lanes, chunk = (max(256, int(n * 2.0**leaning.lanes)) for n in (2048, 4096))
        units, packed = target.units, target.packed if leaning.held >= 0 else 0
        held = int((48 << 10) * 2.0**leaning.held)
        return Budget(held, lanes, chunk, units, units // 2, 4, 1 << 14, PARTIALS, 12, 1024, packed)


@dataclass(frozen=True)
class Schedule:
    """The roles. `programs` and `items` are per strip (block of grid axes); both None where nothing is walked.

    shared: the row is a grid axis too. Programs walk the same rows, each keeps the sums over them of one strip; what is
    reduced along a row, over chunks of all of it, is found by the first of them to come by.
    """

    row: tuple[Axis, ...]
    chunked: bool
    walk: tuple[Axis, ...]
    grid: tuple[Axis, ...]
    tile: dict[Axis, int]
    inner: frozenset[Term]
    final: tuple[Term, ...]
    after: frozenset[Term]
    phase: dict[Term, int]
    items: Size | None
    programs: Size | None
    warps: int
    stages: int
    order: tuple[Axis, ...]
    hoisted: bool
    online: dict[Term, Term]
    direct: dict[Term, tuple[Axis, ...]]  # final sums with a partial sum per item, and the row axes that they keep
    shared: bool = False
    slide: Slide | None = None
    whole: tuple[Axis, ...] = ()  # row axes that are in the tile from end to end, though the row is in chunks
    packed: frozenset[Term] = frozenset()  # loads that stay 16 bits wide from phase to phase; others are made anew
    step: int = 1  # items between those of one program: rows that begin alike, so that its lanes stay columns

    def blocks(self, axis: Axis) -> Size:
        return blocks(self.reach(axis), self.own(axis))

    def own(self, axis: Axis) -> int:
        """Columns of a block that nobody else sums; the lanes of the boundary below are the neighbour's, too."""
        lanes = self.tile.get(axis, 1)
        shared = self.slide is not None and axis is self.slide.axis and axis in self.grid and self.step > 1
        return lanes - self.slide.group if shared and self.slide is not None else lanes

    def reach(self, axis: Axis) -> Size:
        """The size of an axis, with the neighbours that the boundary below it may bring in."""
        return axis.size + self.slide.group - 1 if self.slide is not None and axis is self.slide.axis else axis.size

    @property
    def strips(self) -> Size:
        """Blocks of the grid axes; one at least where a reduction is over them too."""
        count = product(self.blocks(a) for a in self.grid)
        return count if isinstance(count, int) or not self.final else sympy.Max(1, count)

    @property
    def lanes(self) -> int:
        return math.prod(self.tile.values())


class Scheduler:
    """One program, one target, the current sizes."""

    def __init__(self, program: Program, target: Target, hints: Hints) -> None:
        self.program, self.target, self.hints = program, target, hints
        self.budget = Budget.of(target)
        self.size = {a: number(a.size, hints) for a in program.axes}
        self.reductions = [t for t in program.terms if t.op in REDUCTIONS]
        self.scans = [t for t in program.terms if t.op in SCANS]
        self.under = {t: set(below([t])) - {t} for t in program.terms}
        self.order = self._by_stride()
        self.online: dict[Term, Term] = {}
        self.direct: dict[Term, tuple[Axis, ...]] = {}
        slides = bool(self.order) and is_on("boundary")
        self.begin = slide_of(program, self.order[-1], self.size, hints) if slides else None

    def nested_sums(self) -> dict[Term, Term]:
        """Sums whose program has a part of them anyway: {sum over rows and columns: sum over columns}."""
        row = self._row()
        inner = [r for r in self.reductions if r.op == "sum" and set(r.param) <= row and r.dtype not in LOW_FLOATS]
        found: dict[Term, Term] = {}
        for r in (r for r in self.reductions if r.op == "sum" and not set(r.param) <= row):
            parts = [q for q in inner if q.args == r.args and set(q.param) < set(r.param)]
            if parts:
                found[r] = max(parts, key=lambda q: len(q.param))
        return found

    def schedule(self) -> Schedule:
        order = self.order
        row = self.row = self._row()
        inner = [r for r in self.reductions if set(r.param) <= row]
        final = [r for r in self.reductions if r not in set(inner)]
        self._check_finals(final, row)
        outer = [a for a in order if a not in row]
        walk = self._walk(final, outer, row)
        rows = tuple(a for a in order if a in row)
        self._check_serial(inner, rows, outer)
        accumulators = [r for r in final if r.args[0].axes & row]
        held = not rows or self._resident(rows, accumulators)
        packed = frozenset[Term]() if held else self._packed(rows, inner, final)
        resident = held or bool(packed)
        self.shared = not resident and self._shareable(rows, inner, final, outer, walk)
        chunked = not resident and (self.shared or self._in_chunks(rows, inner, final))
        self.online = self._online(inner) if chunked else {}
        walked = tuple(a for a in outer if a in walk)
        if chunked and not final:
            walked = tuple(outer)
        grid = tuple(a for a in outer if a not in walked) if not self.shared else rows
        tile = self._tile(rows, chunked, outer, walked if final else ())
        after = frozenset(t for t in self.program.terms if t in set(final) or self.under[t] & set(final))
        self._check_after(final, after, chunked, rows)
        slide = self._slide(rows, chunked, tile, final, walked)
        step = slide.group if slide is not None and self._columns_kept(final) else 1
        narrow = chunked and slide is None and self._odd()
        warps = self._warps(math.prod(tile.values()) * (4 if narrow else 1), bool(accumulators))
        items, programs = self._persistent(walked, grid, tile, rows, chunked, warps, final, step)
        if programs is None:
            walked, grid = (), tuple(outer)
        return Schedule(
            rows, chunked, walked, grid, tile, frozenset(inner), tuple(final), after, self._phases(frozenset(inner)),
            items, programs, warps, self._stages(tile, chunked), tuple(order),
            not self.shared and (chunked or self._hoisted(rows, tile, accumulators)), self.online,
            self.direct if chunked else {}, self.shared, slide,
            self._whole(rows, tile) if chunked else (), packed, step,
        )  # fmt: skip

    # ------------------------------------------------------------------ roles
    def _by_stride(self) -> list[Axis]:
        """Axes, the largest stride first; the last is the vector: it has stride 1 in most of the memory that moves."""
        stride = {a: 0 for a in self.program.axes}
        weight = {a: 0 for a in self.program.axes}
        for terms, axes, itemsize in self._accesses():
            moved = math.prod(self.size[a] for a in axes) * itemsize
            for axis, coefficient in terms:
                step = abs(number(coefficient, self.hints))
                stride[axis] = max(stride[axis], step)
                weight[axis] += moved if step == 1 else 0
        vector = max(self.program.axes, key=lambda a: (weight[a], -stride[a], a.order), default=None)
        self.weight = weight
        return sorted(self.program.axes, key=lambda a: (a is vector, -stride[a], a.order))

    def _accesses(self) -> Iterable[tuple[Sequence[tuple[Axis, Size]], frozenset[Axis], int]]:
        for term in self.program.terms:
            if term.op == "load":
                yield term.param.place.terms, term.axes, ITEMSIZE[term.dtype]
        for sink in self.program.sinks:
            yield sink.place.terms, frozenset(sink.axes), ITEMSIZE[sink.dtype]

    def _row(self) -> set[Axis]:
        """Axes reduced inside: the result meets its own axes again, or enough items stay parallel anyway."""
        row: set[Axis] = {a for s in self.scans for a in s.param}
        for r in self.reductions:
            if self._meets_itself(r):
                row |= set(r.param)
        for r in self.reductions:
            if not set(r.param) <= row and self._worth_a_row(r, row):
                row |= set(r.param)
        return row

    def _meets_itself(self, r: Term) -> bool:
        """What is made of `r` varies along an axis that `r` reduces (or `r` is stored along one that it ignores)."""
        reduced = set(r.param)
        if any(r in self.under[t] and t.axes & reduced for t in self.program.terms):
            return True
        stored = [s for s in self.program.sinks if any(r is t or r in self.under[t] for t in s.terms)]
        return any(set(s.axes) & reduced or (s.node == r.node and set(s.axes) - r.axes) for s in stored)

    def _worth_a_row(self, r: Term, row: set[Axis]) -> bool:
        """Enough other items stay parallel, and the axes are wanted in parallel by nobody else, or fit in registers."""
        parallel = math.prod(self.size[a] for a in self.program.axes if a not in row and a not in r.param)
        along_vector = self._vector() in r.param
        if parallel < self.budget.least_items * (1 if along_vector else 1024):
            return False
        short = self._padded(row | set(r.param)) * 4 <= self.budget.held and self._pinnable(r.param)
        return self._unshared(r, row) or (along_vector and short)

    def _unshared(self, r: Term, row: set[Axis]) -> bool:
        """No sink or other reduction walks the axes of `r`."""
        reduced = set(r.param)
        if any(set(s.axes) & reduced for s in self.program.sinks):
            return False
        return not any(q.axes & reduced for q in self.reductions if q is not r and not set(q.param) <= row)

    # ------------------------------------------------------------------ legality
    def _check_finals(self, final: list[Term], row: set[Axis]) -> None:
        """Nothing inside the program may wait for a final reduction; an atomic sink may not either."""
        waiting = [
            *self.reductions,
            *self.scans,
            *(t for s in self.program.sinks if s.mode != "store" for t in s.terms),
        ]
        bad = [f for f in final if any(f in self.under[t] or (f is t and t not in self.reductions) for t in waiting)]
        if bad:
            raise Materialize(_nodes(bad))

    def _walk(self, final: list[Term], outer: list[Axis], row: set[Axis]) -> set[Axis]:
        """The outer axes that all final reductions sum over (or that a few sum over entirely)."""
        if not final:
            return set()
        reduced = {r: frozenset(r.param) - row for r in final}
        walk = min((reduced[r] for r in final), key=lambda axes: (len(axes), sorted(a.order for a in axes)))
        masked = all(a.size != 0 or a is self._vector() for a in outer if a not in walk)
        for r in final:
            everything = reduced[r] == set(outer) and set(outer) <= r.args[0].axes and masked
            if not (walk <= r.args[0].axes and (reduced[r] == walk or everything)):
                self._apart([r])
        return set(walk)

    def _apart(self, reductions: list[Term]) -> None:
        """Move what depends on them to another kernel, or, where everything does, compute them beforehand."""
        mine = [s for s in self.program.sinks if set(below(s.terms)) & set(reductions)]
        if len(mine) < len(self.program.sinks):
            raise Separate(mine)
        raise Materialize(_nodes(reductions))

    def _check_serial(self, inner: list[Term], row: tuple[Axis, ...], outer: list[Axis]) -> None:
        """A few long rows would leave most of the device idle: reduce them in a kernel of their own."""
        length = math.prod(self.size[a] for a in row)
        items = math.prod(self.size[a] for a in outer)
        used = [r for r in inner if self._meets_itself(r)]
        if length > self.budget.held // 2 and items < self.budget.units // 4 and used and not self.scans:
            first = [r for r in used if not any(q in self.under[r] for q in inner)]
            if first:
                raise Materialize(_nodes(first))

    def _in_chunks(self, row: tuple[Axis, ...], inner: list[Term], final: list[Term]) -> bool:
        """True for a row that is read in chunks; what cannot be done in chunks is cut."""
        kept = [r for r in (*inner, *self.scans) if r.axes & set(row) and r not in self.scans]
        if kept:
            lower = [i for i in (*self.scans, *inner) if any(i in self.under[r] for r in kept)]
            raise Materialize(_nodes([s for s in lower if s in self.scans] or kept), _nodes(lower))
        if self.scans and (len(row) > 1 or len({s.op for s in self.scans}) > 1):
            other = [
                r for s in self.scans for r in self.under[s] if r.op in REDUCTIONS and set(r.param) != set(s.param)
            ]
            raise Materialize(_nodes(other or self.scans))
        wide = [r for r in final if r.axes & set(row)]
        if self._partials_pay(wide, row):
            self.direct = {r: tuple(a for a in row if a in r.axes) for r in wide}
            return True
        for r in wide:
            below_r = [i for i in (*inner, *self.scans) if i in self.under[r]]
            if below_r:
                raise Materialize(_nodes(below_r))
        if wide:
            self._apart(wide)
        return True

    def _partials_pay(self, wide: list[Term], row: tuple[Axis, ...]) -> bool:
        """A partial sum per item, along the part of the row that is kept: written and read, against reading all again.

        [n, g, c, x] with the row c, x: the gradient of w[g, c] needs one number per n, g and c.
        """
        if self.scans or any(set(row) <= r.axes for r in wide) or self.order[-1] in self._outer(row):
            return False
        if not is_on("partials"):
            return False
        again = sum(ITEMSIZE[t.dtype] for t in self._row_loads(row)) * math.prod(self.size[a] for a in row)
        return sum(8 * math.prod(self.size[a] for a in r.axes & set(row)) for r in wide) < again

    def _outer(self, row: tuple[Axis, ...]) -> list[Axis]:
        return [a for a in self.order if a not in row]

    def _shareable(
        self, row: tuple[Axis, ...], inner: list[Term], final: list[Term], outer: list[Axis], walk: set[Axis]
    ) -> bool:
        """Whether strips of the row may be programs of their own: everything but one pass of reductions is along it."""
        if list(row) != self.order[-1:] or self.scans or not final or set(outer) != walk or not is_on("strips"):
            return False
        (axis,) = row
        last = [s for s in self.program.sinks if any(t in final or self.under[t] & set(final) for t in s.terms)]
        stored = [s for s in self.program.sinks if s not in last]
        along = all(axis in s.axes and s.mode == "store" for s in stored) and all(axis in r.args[0].axes for r in final)
        once = all(r.dtype == "f32" and not self.under[r] & set(inner) for r in inner)
        return along and once and any(axis in r.axes for r in final)

    def _pinnable(self, axes: Iterable[Axis]) -> bool:
        """Only the length of a row may be compiled in: a new batch size needs no new kernel."""
        return all(isinstance(a.size, int) or a is self._vector() for a in axes)

    def _resident(self, row: tuple[Axis, ...], accumulators: list[Term]) -> bool:
        if not self._pinnable(row) or not is_on("resident"):
            return False
        loads = self._row_loads(row)
        width = 1 if row[-1] is self._vector() else min(16, power_of_two(self.size[self._vector()]))
        wide = 2 if any(t.dtype == "f64" for t in self.program.terms) else 1
        copies = max(1, len([t for t in loads if t.axes - set(row)]) + len(accumulators)) * wide
        return self._padded(row) * width * copies <= self.budget.held and self._roomy(row)

    def _roomy(self, row: tuple[Axis, ...]) -> bool:
        """Few lanes lie outside, and few reductions want registers beside the row."""
        padded = self._padded(row)
        wasteful = padded > 32768 and padded > PADDED * math.prod(self.size[a] for a in row)
        many = any(padded >= lanes and len(self.reductions) > most for lanes, most in CROWDED)
        return not wasteful and not (many and self.target.kind != "interpret")

    def _packed(self, row: tuple[Axis, ...], inner: list[Term], final: list[Term]) -> frozenset[Term]:
        """The rows that are read once because they stay packed; none where anything else had to stay, too."""
        streams = [t for t in self.program.terms if t.op == "load" and t.axes > set(row)]
        narrow = all(t.dtype in LOW_FLOATS and not t.args for t in streams)
        alone = not final and not self.scans and not any(r.axes & set(row) for r in inner)
        plain = self._pinnable(row) and self._vector() in row and self.begin is None and self._roomy(row)
        wanted = narrow and alone and plain and self._passes() > 1 and is_on("packed")
        return frozenset(streams if wanted and self._packable(row, streams) else ())

    def _packable(self, row: tuple[Axis, ...], streams: list[Term]) -> bool:
        """What was read fits, beside it the weights that come by, and what is computed from both takes little room."""
        rows = len({t.param for t in streams})
        kept = 2 * rows
        passing = sum(ITEMSIZE[t.dtype] for t in self._row_loads(row) if t not in streams)
        room = 2 * self.budget.packed // self._padded(row)
        fits = kept <= room and kept + passing <= PASSING * room
        return rows <= STREAMS and fits and self._light_along(set(row))

    def _light_along(self, row: set[Axis]) -> bool:
        """No term along the row takes many registers, one extreme is looked for at most, one row is written."""
        along = [t for t in self.program.terms if t.axes & row and t.op not in ("load", *REDUCTIONS)]
        extremes = [r for r in self.reductions if r.op != "sum"]
        written = [s for s in self.program.sinks if set(s.axes) & row]
        return all(self._light_for(t, row) for t in along) and len(extremes) <= 1 and len(written) <= 1

    def _light_for(self, term: Term, row: set[Axis]) -> bool:
        """Few registers for one element; AMD divides, and rounds what it computes to 16 bits, in many."""
        divides = term.op in DIVISIONS and bool(term.args[-1].axes & row)
        if self.target.kind == "hip" and (divides or (term.dtype in LOW_FLOATS and term.op != "cast")):
            return False
        return term.op in LIGHT and term.dtype in ("b1", "f32", *LOW_FLOATS)

    def _row_loads(self, row: Iterable[Axis]) -> list[Term]:
        """One load of every whole row that is read."""
        return list({t.param: t for t in self.program.terms if t.op == "load" and t.axes >= set(row)}.values())

    def _hoisted(self, row: tuple[Axis, ...], tile: dict[Axis, int], accumulators: list[Term]) -> bool:
        """Whether rows that no item changes (weights) stay in registers; else every item reads them again, from L2."""
        copies = len(self._row_loads(row)) + len(accumulators)
        return not row or (math.prod(tile.values()) * copies <= self.budget.held and is_on("hoist"))

    def _vector(self) -> Axis:
        return self.order[-1]

    def _padded(self, row: Iterable[Axis]) -> int:
        return math.prod(power_of_two(self.size[a]) for a in row)

    def _check_after(self, final: list[Term], after: frozenset[Term], chunked: bool, row: tuple[Axis, ...]) -> None:
        """The finishing program stores what follows a final reduction, only along axes that the reduction keeps."""
        for sink in self.program.sinks:
            mine = [r for r in final if any(r is t or r in self.under[t] for t in sink.terms)]
            if not mine:
                continue
            axes = set(sink.axes).union(*(t.axes for t in set(below(sink.terms)) & after if t not in final))
            partial = [
                r
                for r in mine
                if axes - r.axes - self._again(r) or set(r.param) - set(row) != set(mine[0].param) - set(row)
            ]
            lost = [t for t in _between(sink, set(final)) if chunked and t.op in REDUCTIONS]
            if partial or lost:
                raise Materialize(_nodes(partial or lost))

    def _again(self, r: Term) -> set[Axis]:
        """Axes whose strips may each find a small sum for themselves: what they read for it is little, and in L2."""
        if self.row or len(r.axes | set(r.param)) == len(self.program.axes):
            return set()
        missing = set(self.program.axes) - r.axes - set(r.param)
        strips = math.prod(-(-self.size[a] // (STRIP if a is self._vector() else 1)) for a in missing)
        return missing if strips * self._bytes_of([r]) <= self._bytes_of(self.program.terms) // 16 else set()

    def _bytes_of(self, terms: Iterable[Term]) -> int:
        """Of all loads below."""
        loads = {t.param: t for t in below(terms) if t.op == "load"}
        return sum(ITEMSIZE[t.dtype] * math.prod(self.size[a] for a in t.axes) for t in loads.values())

    # ------------------------------------------------------------------ blocks
    def _tile(self, row: tuple[Axis, ...], chunked: bool, outer: list[Axis], summed: Sequence[Axis]) -> dict[Axis, int]:
        tile: dict[Axis, int] = {}
        order = self.order
        if not order:
            return tile
        vector, left = order[-1], self.budget.lanes
        if summed and not row:
            left //= 2
        alone = self._row_alone(row, chunked, summed)
        if row and not chunked:
            tile = {a: power_of_two(self.size[a]) for a in row}
            left = 1 if alone else max(1, self._lanes_of_rows(outer, summed) // math.prod(tile.values()))
        elif alone and not row:
            tile[vector], left = min(power_of_two(self.size[vector]), left), 1
        elif row:
            left = self.budget.chunk if vector in row else min(256, self.budget.chunk // 16)
            if self.shared and self.target.kind != "interpret":
                left = SHARED_ROW // (2 if self._odd() else 1)
            for a in [a for a in reversed(order) if a in row]:
                tile[a] = min(power_of_two(self.size[a]), left)
                left //= tile[a]
            left = 1
        strip = STRIP if summed and not row and vector not in summed else left
        across = sorted((a for a in reversed(order) if a in outer and a not in tile), key=lambda a: a not in summed)
        self._tile_outer(tile, vector, left, across, bool(row), strip)
        tile = {a: n for a, n in tile.items() if n > 1 or (a in row and not chunked)}
        return {a: tile[a] for a in order if a in tile}

    def _lanes_of_rows(self, outer: Sequence[Axis], summed: Sequence[Axis]) -> int:
        """Lanes for rows side by side: twice as many where few programs sum up few rows."""
        lanes = self.budget.lanes
        few = math.prod(self.size[a] for a in outer) * self._padded(self.row) < lanes * 4 * self.budget.units
        return 2 * lanes if summed and few else lanes

    def _tile_outer(
        self, tile: dict[Axis, int], vector: Axis, left: int, outer: list[Axis], row: bool, strip: int
    ) -> None:
        """Blocks for the vector, then for the next axes, until a program has enough lanes."""
        if vector in outer:
            least = min(32 if row else 1, power_of_two(self.size[vector]))
            second = [a for a in outer if a is not vector and self.weight[a] * 4 > self.weight[vector]]
            wide = min(left, 64) if second and left > 64 else min(left, strip)
            tile[vector] = min(power_of_two(self.size[vector]), max(least, wide))
            left //= tile[vector]
            outer = [*second, *(a for a in outer if a is not vector and a not in second)]
        for a in outer[: 1 if self.target.kind != "interpret" else 2]:
            if left > 1 and len(tile) < 4:
                tile[a] = min(power_of_two(self.size[a]), left)
                left //= tile[a]

    def _odd(self) -> bool:
        """Accesses are narrow, and want more threads: addresses for every element are in registers."""
        return any(self.size[a] % 8 for a in self.order[-1:])

    def _row_alone(self, row: Sequence[Axis], chunked: bool, summed: Sequence[Axis]) -> bool:
        """Whether a tile is one odd row (or a strip of one), so that it may begin at the boundary below it."""
        if self.begin is None or chunked:
            return False
        vector = self._vector()
        if not row:
            return self._begin_alike(summed) and vector not in summed and self.size[vector] >= self.budget.alone
        lanes = power_of_two(self.size[vector])
        return list(row) == [vector] and lanes >= max(self.budget.alone, self.size[vector] + self.begin.group - 1)

    def _begin_alike(self, walked: Sequence[Axis]) -> bool:
        """Whether every so many items a row begins at the same place between two boundaries."""
        return self.begin is not None and len(walked) == 1 and walked[0] in dict(self.begin.terms)

    def _columns_kept(self, final: Iterable[Term]) -> bool:
        """Sums over rows, of every column its own."""
        return any(self._vector() in r.axes for r in final)

    def _slide(
        self, row: tuple[Axis, ...], chunked: bool, tile: dict[Axis, int], final: list[Term], walked: Sequence[Axis]
    ) -> Slide | None:
        """Where rows, chunks or blocks of them begin at the boundary below: lanes mean other columns in every row."""
        if (found := self.begin) is None or list(tile) != self.order[-1:] or list(row) not in ([], self.order[-1:]):
            return None
        (vector, lanes), kept = *tile.items(), self._columns_kept(final)
        if kept:
            fits = self._begin_alike(walked)
        elif row:
            fits = not (chunked and (self.direct or self.scans))
        else:
            fits = not final and not (isinstance(vector.size, int) and vector.size <= lanes)
        whole = row and not chunked
        fits = fits and (not whole or self._row_alone(row, chunked, walked))
        return found if fits and lanes % found.group == 0 and lanes > found.group else None

    def _whole(self, row: tuple[Axis, ...], tile: dict[Axis, int]) -> tuple[Axis, ...]:
        """The vector, where it fits: then the loop around it is the innermost, and its loads are in flight ahead."""
        vector = self._vector()
        if self.shared or self.scans or vector not in row or len(row) < 2 or self.size[vector] > tile.get(vector, 1):
            return ()
        return (vector,)

    def _warps(self, lanes: int, accumulators: bool) -> int:
        steps = ((512, 1), (2048, 4), *(((4095, 8), (8192, 16)) if accumulators else ((8192, 8), (16384, 16))))
        warps = next((w for most, w in steps if lanes <= most), 32)
        most, leant = THREADS // self.target.warp, int(warps * 2.0**self.target.leaning.warps)
        return max(1, min(most, leant * 32 // self.target.warp))

    def _stages(self, tile: dict[Axis, int], chunked: bool) -> int:
        """Loads in flight per loop, as far as shared memory holds them; 1 where only registers are used."""
        if self.target.kind == "hip" or not is_on("stages"):
            return 1
        loads = {t.param: ITEMSIZE[t.dtype] for t in self.program.terms if t.op == "load" and t.axes & set(tile)}
        turn = math.prod(tile.values()) * sum(loads.values())
        wanted = (3 if chunked else 2) + self.target.leaning.stages
        return next((n for n in range(wanted, 1, -1) if n * turn <= self.target.shared * 3 // 4), 1)

    # ------------------------------------------------------------------ persistence
    def _persistent(
        self,
        walk: tuple[Axis, ...],
        grid: tuple[Axis, ...],
        tile: dict[Axis, int],
        row: tuple[Axis, ...],
        chunked: bool,
        warps: int,
        final: list[Term],
        step: int,
    ) -> tuple[Size | None, Size | None]:
        """(items to walk, programs that walk them), per strip of the grid."""
        if not final and not (chunked and walk and self._passes() > 1):
            return None, None
        items = product(blocks(a.size, tile.get(a, 1)) for a in walk)
        strips = product(blocks(a.size, tile.get(a, 1)) for a in grid)
        per_unit = max(1, 16 * 32 // (warps * self.target.warp)) if self.target.kind != "interpret" else 1
        wanted: Size = self.budget.units * per_unit
        if chunked:
            wanted = self._fitting_l2(row, tile, wanted)
        if any(r.axes & set(tile) for r in final):
            each, most = blocks(items, step), _rounds(_per_strip(wanted, strips), step)
            return items, tidy(step * _even(each, _least(most, self._worth(each, tile, walk, final))))
        return items, tidy(_least(_per_strip(wanted, strips), items))

    def _worth(self, items: Size, tile: dict[Axis, int], walk: Sequence[Axis], final: list[Term]) -> Size:
        """Programs whose partial sums weigh little; more of them rather than long walks on an idle device."""
        turns = max(self.budget.turns, self.budget.walked // math.prod(tile.values()))
        light = blocks(items, max(turns, self._light(tile, walk, final)))
        quick = _least(blocks(items, max(turns, self.budget.long)), max(1, self.budget.units // 2))
        return max(light, quick) if isinstance(light, int) and isinstance(quick, int) else sympy.Max(light, quick)

    def _light(self, tile: dict[Axis, int], walk: Sequence[Axis], final: list[Term]) -> int:
        """Items after which a program has moved so much that its partial sums weigh little."""
        each = {(ref, axes): size for ref, axes, size in self._moved(final) if axes & set(walk)}
        width = {a: min(n, self.size[a]) for a, n in tile.items()}
        moved = sum(size * math.prod(width.get(a, 1) for a in axes) for (_, axes), size in each.items())
        sums = sum(4 * math.prod(width[a] for a in r.axes if a in tile) for r in final)
        return math.ceil(sums / (self.budget.partials * moved)) if moved else 1

    def _moved(self, final: Iterable[Term]) -> Iterable[tuple[Ref, frozenset[Axis], int]]:
        """What every item reads and writes: buffer, axes, bytes of an element."""
        done = set(final)
        for term in self.program.terms:
            if term.op == "load":
                yield term.param.ref, term.axes, ITEMSIZE[term.dtype]
        for sink in self.program.sinks:
            if not done & set(below(sink.terms)):
                yield sink.ref, frozenset(sink.axes), ITEMSIZE[sink.dtype]

    def _passes(self) -> int:
        """How often a chunked row is read: once per phase in which something walks it."""
        row, phase = set(self.row), self._phases(frozenset(self.reductions))
        walked = {phase[r.args[0]] for r in self.reductions if r.args[0].axes & row and r not in self.online}
        return len(walked | {max(phase[t] for t in s.terms) for s in self.program.sinks if set(s.axes) & row})

    def _fitting_l2(self, row: tuple[Axis, ...], tile: dict[Axis, int], wanted: Size) -> Size:
        """So few rows in flight that the second pass over them reads L2, not memory."""
        loads = {t.param: ITEMSIZE[t.dtype] for t in self.program.terms if t.op == "load" and t.axes > set(row)}
        width = math.prod(n for a, n in tile.items() if a not in row)
        length = product(a.size for a in row) * max(1, sum(loads.values())) * width
        if isinstance(length, int):
            return max(1, min(int(wanted), self.target.l2 // 2 // max(1, length)))
        return sympy.Max(1, sympy.Min(wanted, sympy.floor(sympy.Integer(self.target.l2 // 2) / length)))

    def _phases(self, inner: frozenset[Term]) -> dict[Term, int]:
        phase: dict[Term, int] = {}
        for term in self.program.terms:
            phase[term] = max((phase[a] for a in term.args), default=0) + (term in inner)
            if term in self.online:
                phase[term] = phase[self.online[term]]
        return phase

    def _online(self, inner: list[Term]) -> dict[Term, Term]:
        """sum(exp(x - max(x))) -> max(x): in chunks, the sum rides along in the pass of the maximum."""
        found: dict[Term, Term] = {}
        for total in inner if is_on("online") else ():
            e = total.args[0]
            d = e.args[0] if total.op == "sum" and e.op == "exp" else e
            if d.op == "sub" and d is not e and d.dtype in ("f32", "f64") and (top := d.args[1]) in inner:
                if top.op == "amax" and top.args[0] is d.args[0] and top.param == total.param:
                    found[total] = top
        return {total: top for total, top in found.items() if list(found.values()).count(top) == 1}


def _per_strip(wanted: Size, strips: Size) -> Size:
    """ceil(wanted / strips), at least one."""
    if isinstance(wanted, int) and isinstance(strips, int):
        return max(1, -(-wanted // max(1, strips)))
    return sympy.ceiling(sympy.sympify(wanted) / (strips if strips != 0 else 1))


def _rounds(programs: Size, step: int) -> Size:
    """How often `step` programs fit, at least once."""
    if step == 1:
        return programs
    return max(1, programs // step) if isinstance(programs, int) else sympy.Max(1, sympy.floor(programs / step))


def _least(a: Size, b: Size) -> Size:
    """The smaller one, at least one; symbols are not zero here (see Walk.require_nonzero)."""
    b = max(b, 1) if isinstance(b, int) else b
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else sympy.Min(a, b)


def _even(items: Size, programs: Size) -> Size:
    """As many programs as have something to do where all but the last walk equally many items."""
    if isinstance(items, int) and isinstance(programs, int):
        return -(-items // -(-items // programs)) if items else programs
    return sympy.ceiling(items / sympy.ceiling(sympy.sympify(items) / programs))


def _between(sink: Sink, final: set[Term]) -> list[Term]:
    """What a sink needs besides final reductions: terms that are reached without passing through one."""
    found: dict[Term, None] = {}
    todo = list(sink.terms)
    while todo:
        term = todo.pop()
        if term not in final and term not in found:
            found[term] = None
            todo += term.args
    return list(found)


def _nodes(terms: Iterable[Term]) -> list[Value]:
    return [t.node for t in terms if t.node is not None]
