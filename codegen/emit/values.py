"""Terms to expressions, on demand: sizes and names, addresses and masks, folds, stores.

A value is computed in the scope of its level: inside the loops that change it, outside all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sympy

from ...ir.errors import Unfusible
from ...ir.types import FLOAT8, Size
from ..kernel import Buffer, Ref, Target
from ..program.axes import REDUCTIONS, SCANS, Axis, Index, Program, Sink, Term
from ..program.sizes import Hints, tidy
from ..schedule.schedule import Schedule
from .folds import accumulator_dtype, as_result, fold_function, sum_of, to_own_width, widen_booleans
from .loops import (
    Accumulate,
    Expr,
    If,
    Let,
    Scope,
    Store,
    binary,
    call,
    literal,
    method,
    name,
    total,
    unary,
)
from .mathematics import (
    EXACT,
    FLOATING,
    NARROW,
    TL,
    cast,
    fast_rules,
    held,
    is_counted,
    loaded,
    lowest,
    narrowed,
    number,
    of_sizes,
    packed_rules,
    rounded,
    rules,
)
from .names import LABELS, Names, SizeArguments, identifier
from .prelude import HELPERS

FINISH = 100
"""The level of what the last program computes; 0 is the kernel, 1 the walk, 2 and up a pass over chunks."""
LONG = 72
"""A single use is written inline up to this many columns."""


@dataclass(frozen=True, slots=True)
class Coord:
    """Where a program is along an axis: base + lane, and the mask of the lanes that lie inside."""

    base: Expr | None
    lane: Expr | None
    mask: Expr | None
    level: int
    groups: Groups | None = None


@dataclass(frozen=True, slots=True)
class Groups:
    """Masks by groups of 16 bytes: what is read, what is written wide; and whether any lane here is at an edge.

    Where neighbours share lanes, each writes and each sums only its own.
    """

    near: Expr
    whole: Expr
    edge: Expr | None = None
    written: Expr | None = None
    summed: Expr | None = None


class Values:
    """What one kernel computes, before it is known in which loops."""

    def __init__(self, program: Program, schedule: Schedule, target: Target, hints: Hints, kernel: str) -> None:
        self.program, self.plan, self.target, self.hints, self.kernel = program, schedule, target, hints, kernel
        self.rules = fast_rules if target.fast else packed_rules if schedule.packed else rules
        self.names = Names([*HELPERS, *LABELS, kernel, "pid", "part", "strip", "group", "members", "k", "item"])
        self.sizes = SizeArguments(program, hints, self.names)
        self.pointers: dict[Ref, str] = {}
        self.pointer_dtype: dict[Ref, str] = {}
        self.scratch: list[Buffer] = []
        self.coords: dict[Axis, Coord] = {}
        self.letter: dict[Axis, str] = {}
        self.levels: dict[Term, int] = {}
        self.top = Scope(0)
        self.body = self.top
        self.lines: set[str] = set()
        self.laned: set[Axis] = set()  # axes with lanes of their own name
        self.passes: dict[Term, int] = {}  # how often a load is emitted in passes over chunks
        self.uses = self._uses()
        self.padding = self._padding()
        self.evict = ""
        self.span: list[Expr] = []  # where this program's share of the items starts and stops, and how many there are
        self.lane_labels: list[str] = []
        self.aligned: set[str] = set()  # pointers that have to be multiples of 16
        self.row_words: list[Expr] = []  # words by which strips tell each other what they reduced along a row
        self.finishing = False
        self._name_pointers()
        self._name_axes()

    # ------------------------------------------------------------------ preparation
    def _uses(self) -> dict[Term, int]:
        uses: dict[Term, int] = {}
        for t in self.program.terms:
            for a in t.args:
                uses[a] = uses.get(a, 0) + 1
        for s in self.program.sinks:
            for t in s.terms:
                uses[t] = uses.get(t, 0) + 1
        return uses

    def _padding(self) -> dict[Term, float]:
        """Loads that feed a maximum or minimum: what their lanes outside should hold."""
        fill: dict[Term, float] = {}
        for r in self.program.terms:
            if r.op in ("amax", "amin"):
                x = r.args[0]
                while x.op == "cast" and x.dtype in FLOATING:
                    x = x.args[0]
                if x.op == "load" and x.dtype in FLOATING:
                    fill.setdefault(x, float("-inf") if r.op == "amax" else float("inf"))
        return fill

    def _name_pointers(self) -> None:
        loads = [t for t in self.program.terms if t.op == "load"]
        wished: dict[Ref, tuple[str | None, str]] = {}
        for t in loads:
            wished.setdefault(t.param.ref, (name_of(t), t.dtype))
        for s in self.program.sinks:
            wished.setdefault(s.ref, (name_of(s), s.dtype))
        order = {"input": 0, "temporary": 1, "output": 2, "scratch": 3}
        for ref in sorted(wished, key=lambda r: (order[r.kind], r.index)):
            wish, dtype = wished[ref]
            self.pointers[ref] = self.names.fresh(f"{identifier(wish) or ref.kind}_ptr")
            self.pointer_dtype[ref] = dtype

    def _name_axes(self) -> None:
        """row and col over M and N, then c over C, d over D .."""
        letters = iter("CDEFGHIJKLOPQRSTUVWXYZ")
        outer = [a for a in self.plan.order[:-1] if a not in self.plan.row] or list(self.plan.order[:-1])
        for axis in reversed(self.plan.order):
            if axis is self.plan.order[-1]:
                pair = ("N", "col")
            elif outer and axis is outer[0]:
                pair = ("M", "row")
            else:
                letter = next(letters, "X")
                pair = (letter, letter.lower())
            self.names.fresh(pair[0]), self.names.fresh(pair[1])
            axis.name = pair[1]
            self.letter[axis] = pair[0]
            if isinstance(axis.size, int):
                self.sizes.constants[pair[0]] = axis.size
            else:
                self.sizes.scalars.setdefault(tidy(axis.size), pair[0])

    # ------------------------------------------------------------------ sizes
    def block(self, axis: Axis) -> Expr:
        label = f"BLOCK_{self.letter[axis]}"
        self.sizes.constants[label] = self.plan.tile[axis]
        return name(label)

    def count(self, axis: Axis) -> Expr:
        """How many blocks an axis has."""
        if axis in self.plan.tile:
            self.sizes.require_countable(axis.size)
        n = self.sizes.text(axis.size)
        if (beyond := self.plan.reach(axis)) != axis.size:
            n = binary("+", n, literal(tidy(beyond - axis.size)))
        return call("tl.cdiv", n, self.own(axis)) if axis in self.plan.tile else n

    def own(self, axis: Axis) -> Expr:
        """How far blocks are apart."""
        if self.plan.own(axis) == self.plan.tile[axis]:
            return self.block(axis)
        return self.sizes.fixed(f"OWN_{self.letter[axis]}", self.plan.own(axis))

    # ------------------------------------------------------------------ lanes
    def lane(self, axis: Axis) -> Expr:
        """The lanes of a tile axis, shaped for the tile: col = tl.arange(0, BLOCK_N)[None, :]."""
        dims = list(self.plan.tile)
        if (found := self.top.memo.get(("lane", axis, *dims))) is None:
            shape = ", ".join(":" if a is axis else "None" for a in dims)
            arange = call("tl.arange", literal(0), self.block(axis))
            label = self.names.fresh(axis.name) if axis in self.laned else axis.name
            self.laned.add(axis)
            self.top.body.append(
                Let(label, Expr(arange.text + (f"[{shape}]" if len(dims) > 1 else ""), names=arange.names))
            )
            found = self.top.memo[("lane", axis, *dims)] = name(label)
        return found

    def _resident(self, axis: Axis) -> None:
        lane, mask = self.lane(axis), None
        if axis.size != self.plan.tile[axis]:
            label = self.names.fresh("inside" if len(self.plan.tile) == 1 else f"inside_{axis.name}")
            self.top.body.append(Let(label, binary("<", lane, self.sizes.text(axis.size))))
            mask = name(label)
        self.coords[axis] = Coord(None, lane, mask, 0)

    def _is_one_block(self, axis: Axis) -> bool:
        """The axis is one block whatever the sizes: no coordinate."""
        alone = axis in self.plan.tile and isinstance(axis.size, int) and axis.size <= self.plan.tile[axis]
        alone = alone and not (self.plan.slide is not None and axis is self.plan.slide.axis)
        if alone and axis not in self.coords:
            self._resident(axis)
        return alone

    def _has_strips(self) -> bool:
        return any(not self._is_one_block(a) for a in self.plan.grid)

    def _lanes_of(self, term: Term) -> list[Axis]:
        return self.lanes(term.args[0].axes)

    # ------------------------------------------------------------------ levels
    def level(self, term: Term) -> int:
        """The deepest loop that a term depends on."""
        if term not in self.levels:
            self.levels[term] = self._level(term)
        return self.levels[term]

    def _level(self, term: Term) -> int:
        if self.finishing:
            return FINISH
        args = [self.level(a) for a in term.args]
        if term in self.plan.after:
            return FINISH
        if self.plan.chunked and term in self.plan.inner:
            return self.body.level
        if term.op == "load" and not self.plan.hoisted and term.axes & set(self.plan.row):
            args.append(self.body.level)
        if term.op in ("load", "index"):
            place = term.param.place if term.op == "load" else term.param
            args += [self._coord_level(a) for a, _ in place.terms]
        if term.op == "spread" or term.op in SCANS:
            args += [self._coord_level(a) for a in term.param]
        return max(args, default=0)

    def _coord_level(self, axis: Axis) -> int:
        return self.coords[axis].level if axis in self.coords and not self.finishing else FINISH

    # ------------------------------------------------------------------ values
    def value(self, term: Term, scope: Scope) -> Expr:
        """The term as an expression, named in the scope of its level where it is used again, is long, or has a name."""
        if term.op == "const":
            return self._constant(term)
        if (known := scope.find(term)) is not None:
            return known
        home = scope.home(self.level(term))
        if term in self.plan.packed:
            return loaded(self._packed_tile(term, home), term.dtype)
        text = self._computed(term, home)
        if term.dtype in NARROW and self._needs_rounding(term):
            text = rounded(text, term.dtype)
        return self._named(term, text, home, scope)

    def _packed_tile(self, term: Term, home: Scope) -> Expr:
        """A row as it is in memory."""
        if (known := home.find(("tile", term))) is None:
            label = self.names.fresh(name_of(term), default_name(term))
            known = home.memo["tile", term] = name(label)
            home.body.append(Let(label, self._read(term, home)))
        return known

    def _needs_rounding(self, term: Term) -> bool:
        if term.op == "cast":
            return not (term.args[0].dtype == "b1" or term.args[0].dtype == term.dtype)
        return not self.target.fast and term.op not in EXACT

    def _named(self, term: Term, text: Expr, home: Scope, scope: Scope) -> Expr:
        simple = text.text.isidentifier()
        if simple and not (term.op == "load" and text.text not in self.pointers.values()):
            home.memo[term] = text
            return text
        user = name_of(term)
        plain = term.op not in ("load", *REDUCTIONS, *SCANS, "random")
        once = self.uses.get(term, 0) <= 1
        if plain and once and home is scope and len(text.text) <= LONG and not (user and len(text.text) > 24):
            return text
        label = self.names.fresh(user, default_name(term))
        home.body.append(Let(label, text, self._comment(term)))
        home.memo[term] = name(label)
        return home.memo[term]

    def _constant(self, term: Term) -> Expr:
        value = term.param
        if isinstance(value, sympy.Basic) and not value.is_number:
            value = tidy(value)
            integral = isinstance(value, int) or (value.is_integer and is_counted(value))
            text = self.sizes.text(value) if integral else self._of_sizes(value, term)
            text = call("tl.cast", text, literal(TL[held(term.dtype)]))
            return rounded(text, term.dtype) if term.dtype in NARROW else text
        if isinstance(value, sympy.Basic):
            value = int(value) if value.is_integer else float(value)
        return literal(number(value, term.dtype))

    def _of_sizes(self, value: sympy.Expr, term: Term) -> Expr:
        try:
            return of_sizes(value, lambda s: self.sizes.text(s, str(s)))
        except ValueError as error:
            raise Unfusible(term.node or self.program.sinks[0].node, str(error)) from error

    def _as_tensor(self, term: Term, text: Expr) -> Expr:
        """A constant that stands without a tensor beside it."""
        return (
            text
            if term.op != "const" or text.names
            else call("tl.full", literal("[]"), text, literal(TL[held(term.dtype)]))
        )

    def _computed(self, term: Term, scope: Scope) -> Expr:
        if term.op == "load":
            return self._load(term, scope)
        if term.op == "index":
            return self._index_value(term.param, scope)
        if term.op in REDUCTIONS:
            return self._fold(term, self._neutral(term, self.value(term.args[0], scope), scope), term.args[0].axes)
        if term.op in SCANS:
            return self._scan(term, scope)
        if term.op == "spread":
            return self._spread(term, scope)
        args = [self.value(a, scope) for a in term.args]
        if term.op == "random":
            return self._random(term, args)
        return self._elementwise(term, args)

    def _elementwise(self, term: Term, args: list[Expr]) -> Expr:
        varying = term.args[1:] if term.op == "where" else term.args
        if all(a.op == "const" for a in varying):
            first = 1 if term.op == "where" else 0
            args[first] = self._as_tensor(term.args[first], args[first])
        if term.op == "where" and term.args[0].op == "const":
            args[0] = self._as_tensor(term.args[0], args[0])
        if term.op == "cast":
            return cast(args[0], term.args[0].dtype, term.dtype)
        return self.rules[term.op](term.args[0].dtype, *args)

    def _random(self, term: Term, args: list[Expr]) -> Expr:
        drawn = call(term.param, self._as_tensor(term.args[0], args[0]), self._as_tensor(term.args[1], args[1]))
        return method(drawn, "to(tl.float64)") if term.dtype == "f64" else drawn

    def _spread(self, term: Term, scope: Scope) -> Expr:
        value = self._as_tensor(term.args[0], self.value(term.args[0], scope))
        return self._broadcast(value, term.axes)

    def _broadcast(self, value: Expr, axes: Iterable[Axis]) -> Expr:
        shape = self.shape(axes)
        return call("tl.broadcast_to", value, shape) if shape.text != "[]" else value

    def shape(self, axes: Iterable[Axis]) -> Expr:
        """[BLOCK_M, 1]: the shape of something that varies along these axes."""
        own = set(axes)
        dims = [self.block(a) if a in own else literal(1) for a in self.plan.tile]
        if not own & set(self.plan.tile):
            return Expr("[]")
        return Expr(f"[{', '.join(d.text for d in dims)}]", names=frozenset().union(*(d.names for d in dims)))

    def lanes(self, axes: Iterable[Axis]) -> list[Axis]:
        own = set(axes)
        return [a for a in self.plan.tile if a in own]

    # ------------------------------------------------------------------ memory
    def offset(
        self, place: Index, values: Sequence[tuple[Expr, Size, Term]], scope: Scope, buffer: str
    ) -> tuple[Expr | None, Expr | None]:
        """(scalar part, lane part) of an address, in elements."""
        scalar, lanes = [], []
        ordered = sorted(place.terms, key=lambda t: (self.plan.order.index(t[0]), t[0].order))
        for axis, coefficient in ordered:
            coord = self.coords[axis]
            if coord.base is not None:
                scalar.append(self._times(coord.base, coefficient, buffer))
            if coord.lane is not None:
                lanes.append(self._lane_times(axis, coord.lane, coefficient, buffer))
        if place.offset != 0:
            scalar.append(self.sizes.stride(place.offset, f"{buffer}_offset"))
        for value, coefficient, term in values:
            (lanes if self.lanes(term.axes) else scalar).append(self._times(value, coefficient, buffer))
        return sum_of(scalar), sum_of(lanes)

    def _times(self, value: Expr, coefficient: Size, buffer: str) -> Expr:
        if coefficient == 1:
            return value
        if coefficient == -1:
            return unary("-", value)
        return binary("*", value, self.sizes.stride(coefficient, f"{buffer}_stride"))

    def _lane_times(self, axis: Axis, lane: Expr, coefficient: Size, buffer: str) -> Expr:
        """Lanes stay 32 bits wide where the tile provably spans less."""
        narrow = self.sizes.is_narrow(tidy(coefficient * self.plan.tile[axis]))
        return self._times(lane if narrow else call("tl.cast", lane, literal("tl.int64")), coefficient, buffer)

    def _pointer(
        self,
        ref: Ref,
        place: Index,
        values: Sequence[tuple[Expr, Size, Term]],
        scope: Scope,
        groups: Groups | None = None,
    ) -> Expr:
        pointer = self.pointers[ref]
        scalar, lanes = self.offset(place, values, scope, pointer.removesuffix("_ptr"))
        parts = [name(pointer)]
        if scalar is not None and groups is not None and self.plan.slide is not None:
            scalar = call("tl.multiple_of", scalar, literal(self.plan.slide.group))
        if scalar is not None:
            parts.append(self._shared_offset(scalar, place, values, scope))
        if lanes is not None:
            parts.append(lanes if values else self._shared_lanes(lanes, scope))
        result = sum_of(parts)
        assert result is not None
        return result

    def _shared_lanes(self, lanes: Expr, scope: Scope) -> Expr:
        """Lanes of two dimensions, one of them a run-time stride apart, under a name of their own."""
        if not lanes.names & set(self.sizes.scalars.values()) or " + " not in lanes.text:
            return lanes
        known = scope.find(("lanes", lanes.text))
        if known is None:
            home = scope.home(0)
            home.memo[("lanes", lanes.text)] = known = self._let(home, "lanes", lanes)
        return known

    def _shared_offset(
        self, scalar: Expr, place: Index, values: Sequence[tuple[Expr, Size, Term]], scope: Scope
    ) -> Expr:
        """The scalar part under the name `at`, in the scope where it changes."""
        if scalar.text.isidentifier() or not scalar.names:
            return scalar
        level = max([self._coord_level(a) for a, _ in place.terms] + [self.level(t) for _, _, t in values], default=0)
        if (known := scope.find(("at", scalar.text))) is not None:
            return known
        home = scope.home(level)
        label = self.names.fresh("at")
        home.body.append(Let(label, scalar))
        home.memo[("at", scalar.text)] = name(label)
        return name(label)

    def _groups(self, place: Index, plain: bool) -> Groups | None:
        """The masks of an access that begins at a boundary of 16 bytes, where it is one."""
        slide = self.plan.slide
        return self.coords[slide.axis].groups if slide is not None and slide.holds(place, plain) else None

    def _masks(self, axes: Iterable[Axis], summed: bool = False) -> list[Expr]:
        """The lanes that lie inside; `summed`: those that no other program sums or writes."""
        own = set(axes)
        here = [c for a in self.plan.order if a in own and (c := self.coords[a]).mask is not None]
        return [c.groups.summed if summed and c.groups and c.groups.summed else c.mask for c in here if c.mask]

    def _load(self, term: Term, scope: Scope) -> Expr:
        return loaded(self._read(term, scope), term.dtype)

    def _read(self, term: Term, scope: Scope) -> Expr:
        """What is in memory, in the dtype that it has there."""
        access, indirect = term.param, len(term.param.indirect)
        self.passes[term] = self.passes.get(term, 0) + (1 < scope.level < FINISH)
        values = [(self.value(a, scope), c, a) for a, c in zip(term.args, access.indirect, strict=False)]
        guards = [self.value(g, scope) for g in term.args[indirect:]]
        groups = self._groups(access.place, not term.args)
        pointer = self._pointer(access.ref, access.place, values, scope, groups)
        walked = set(self.lanes(a for a, _ in access.place.terms)).union(*(self.lanes(v.axes) for _, _, v in values))
        if set(self.lanes(term.axes)) - walked:
            pointer = binary("+", pointer, call("tl.zeros", self.shape(term.axes), literal("tl.int32")))
        masks = self._masks(term.axes) + guards
        if groups is not None:
            self.aligned.add(self.pointers[access.ref])
            masks = [groups.near]
        keywords = self._mask_keywords(term, masks)
        if self.lanes(term.axes) and not values and (policy := self._policy(term, scope)):
            keywords["eviction_policy"] = literal(f'"{policy}"')
        return call("tl.load", pointer, **keywords)

    def _mask_keywords(self, term: Term, masks: list[Expr]) -> dict[str, Expr | str]:
        mask = total("&", masks)
        if mask is None:
            return {}
        fill = self.padding.get(term, 0.0 if term.dtype in FLOATING else 0)
        dtype = "i8" if term.dtype in ("b1", *FLOAT8) else term.dtype
        return {"mask": mask, "other": literal(number(fill, dtype))}

    def _policy(self, term: Term, scope: Scope) -> str:
        """Rows that come by once leave the cache first; a row that is read again stays until its last pass."""
        if 1 < scope.level < FINISH:
            return self.evict
        walked = set(self.plan.walk) & {a for a, _ in term.param.place.terms}
        return "evict_first" if walked and scope.level == 1 else ""

    def _index_value(self, place: Index, scope: Scope) -> Expr:
        """The integer itself, 64 bits wide."""
        parts = []
        for axis, coefficient in place.terms:
            coord = self.coords[axis]
            if coord.base is not None:
                parts.append(self._times(coord.base, coefficient, "index"))
            if coord.lane is not None:
                narrow = coord.base is not None and coefficient == 1
                lane = coord.lane if narrow else call("tl.cast", coord.lane, literal("tl.int64"))
                parts.append(self._times(lane, coefficient, "index"))
        if place.offset != 0:
            parts.append(self.sizes.text(place.offset, "offset"))
        result = sum_of(parts)
        assert result is not None
        return result

    # ------------------------------------------------------------------ folding
    def pad(self, term: Term, axis: Axis) -> float | None:
        """What lanes outside along `axis` hold, where that is known."""
        if term.op == "const" and isinstance(term.param, (int, float)):
            return float(term.param)
        if axis not in term.axes or term.dtype not in FLOATING or self._is_lent(axis):
            return None
        if term.op == "load":
            neighbours = self._groups(term.param.place, not term.args) is not None
            return None if neighbours else self.padding.get(term, 0.0)
        pads = [self.pad(a, axis) for a in term.args]
        if term.op == "cast":
            return pads[0] if term.args[0].dtype in FLOATING else None
        if term.op == "sub" and pads[0] == float("-inf") and axis not in term.args[1].axes:
            return float("-inf")
        if term.op == "exp" and pads[0] == float("-inf"):
            return 0.0
        if None in pads or not all(p == 0.0 for p in pads):
            return None
        return 0.0 if term.op in ("add", "sub", "mul", "abs", "max", "min", "sqrt") else None

    def _is_lent(self, axis: Axis) -> bool:
        """Some lanes inside are a neighbour's to sum."""
        return (groups := self.coords[axis].groups) is not None and groups.summed is not None

    def _neutral(self, term: Term, value: Expr, scope: Scope) -> Expr:
        """The argument of a reduction with its lanes outside made neutral, where they may not be."""
        arg = term.args[0]
        neutral = lowest(term.op, arg.dtype)
        bad = [a for a in term.param if a in arg.axes and self.coords[a].mask and self.pad(arg, a) != neutral]
        mask = total("&", self._masks(bad, summed=True))
        value = widen_booleans(arg, value)
        if mask is None:
            return value
        dtype = "i32" if arg.dtype == "b1" else arg.dtype
        return call("tl.where", mask, self._as_tensor(arg, value), literal(number(neutral, dtype)))

    def _fold(self, term: Term, value: Expr, axes: frozenset[Axis]) -> Expr:
        """The reduction over the tile axes that the value has."""
        dims = [d for d, a in enumerate(self.plan.tile) if a in term.param and a in axes]
        kept = self.lanes(axes - set(term.param))
        function = fold_function(term)
        if dims and not kept:
            value = call(function, value, literal(0 if len(self.plan.tile) == 1 else "None"))
        for d in reversed(dims) if kept else ():
            value = call(function, value, literal(d), keep_dims="True")
        return as_result(term, value)

    def _accumulator(self, term: Term, label: str, axes: Iterable[Axis]) -> Let:
        dtype = accumulator_dtype(term)
        neutral = lowest(term.op, term.dtype)
        shape, zero = self.shape(axes), neutral == 0 and dtype != "b1"
        if term.dtype == "b1":
            neutral = int(neutral)
        if zero and shape.text != "[]":
            return Let(label, call("tl.zeros", shape, literal(TL[dtype])))
        return Let(label, call("tl.full", shape, literal(number(neutral, dtype)), literal(TL[dtype])))

    def _scan(self, term: Term, scope: Scope) -> Expr:
        """A running sum along a tile axis; in chunks, on top of what the chunks before added up to."""
        (axis,) = term.param
        arg = self.value(term.args[0], scope)
        mask = self.coords[axis].mask
        if mask is not None and self.pad(term.args[0], axis) != 0.0:
            arg = call("tl.where", mask, arg, literal(number(0, term.dtype)))
        if axis not in self.plan.tile:
            return arg if not self.plan.chunked else self._carried(term, arg, arg, scope)
        dim = list(self.plan.tile).index(axis)
        reverse = {"reverse": literal("True")} if term.op == "cumsum_reverse" else {}
        arg = self._let(scope, "step", arg)
        running = to_own_width(term, call("tl.cumsum", arg, literal(dim), **reverse))
        if not self.plan.chunked:
            return running
        keep = {"keep_dims": literal("True")} if len(self.plan.tile) > 1 else {}
        return self._carried(term, running, to_own_width(term, call("tl.sum", arg, literal(dim), **keep)), scope)

    def _let(self, scope: Scope, wish: str, value: Expr) -> Expr:
        if value.text.isidentifier():
            return value
        label = self.names.fresh(wish)
        scope.body.append(Let(label, value))
        return name(label)

    def _carried(self, term: Term, running: Expr, step: Expr, scope: Scope) -> Expr:
        carry = self.names.fresh("carry")
        rest = [a for a in self.lanes(term.axes) if a not in term.param]
        shape, dtype = self.shape(rest), literal(TL[held(term.dtype)])
        self.body.body.append(Let(carry, call("tl.full", shape, literal(0), dtype)))
        result = self._let(scope, "running", binary("+", running, name(carry)))
        scope.body.append(Accumulate(carry, "+=", step))
        return result

    # ------------------------------------------------------------------ statements
    def _comment(self, term: Term | Sink) -> str:
        """`file:line  text` of the user's source, the first time a line is met."""
        origin = term.node.origin if term.node is not None else None
        if (
            origin is None
            or not origin.where
            or origin.where in self.lines
            or (isinstance(term, Term) and term.op == "load")
        ):
            return ""
        self.lines.add(origin.where)
        short = origin.where.rsplit("/", 1)[-1].rsplit("\\", 1)[-1]
        return f"{short}  {' '.join((origin.line or '').split())}".strip()

    def store(self, sink: Sink, scope: Scope) -> None:
        """One sink, in the scope at hand or the outermost one where it is complete."""
        level = max([self.level(t) for t in sink.terms] + [self._coord_level(a) for a in sink.axes], default=0)
        scope = scope.home(level)
        value = self._value_to_store(sink, scope)
        values = [(self.value(v, scope), c, v) for v, c in sink.place.values]
        groups = self._groups(sink.place, sink.mode == "store")
        pointer = self._pointer(sink.ref, sink.place, values, scope, groups)
        walked = set(self.lanes(a for a, _ in sink.place.terms)).union(*(self.lanes(v.axes) for _, _, v in values))
        if set(self.lanes(sink.axes)) - walked:
            pointer = binary("+", pointer, call("tl.zeros", self.shape(sink.axes), literal("tl.int32")))
        if sink.mode == "add" and self.lanes(sink.axes):
            value = self._broadcast(value, sink.axes)
        masks = self._masks(sink.axes, summed=True)
        lanes = frozenset().union(*(m.names for m in masks)) if masks else frozenset()
        comment = self._comment(sink)
        if sink.mode == "add" and sink.dtype in FLOATING:
            comment = f"atomic: in no fixed order  {comment}".rstrip()
        if groups is None:
            scope.body.append(Store(pointer, value, total("&", masks), lanes, sink.mode == "add", comment))
        else:
            inside = groups.written or masks[0]
            self._store_groups(pointer, self._let(scope, "out", value), groups, inside, scope, comment)

    def _store_groups(
        self, pointer: Expr, value: Expr, groups: Groups, inside: Expr, scope: Scope, comment: str
    ) -> None:
        """Whole groups of 16 bytes at once; what is left of a row at its ends, element by element."""
        whole = scope.memo.get("whole") or self._let(scope, "whole", groups.whole)
        scope.memo["whole"] = whole
        rest = binary("&", inside, unary("~", whole))
        scope.body.append(Store(pointer, value, whole, whole.names, False, comment))
        edges = Store(pointer, value, rest, inside.names)
        scope.body.append(If(groups.edge, [edges]) if groups.edge is not None else edges)

    def _value_to_store(self, sink: Sink, scope: Scope) -> Expr:
        """The value in the dtype of the memory; the store itself rounds what is computed for it alone."""
        term, low = sink.value, sink.dtype in NARROW
        alone = self.uses.get(term, 0) <= 1 and scope.find(term) is None and scope.home(self.level(term)) is scope
        computed = term.op not in ("load", "const")
        if low and term.dtype == sink.dtype and alone and computed and self._needs_rounding(term):
            value = self._computed(term, scope)
        else:
            value = self._as_tensor(term, self.value(term, scope)) if term.op == "const" else self.value(term, scope)
        if low:
            return narrowed(value, sink.dtype)
        return cast(value, term.dtype, sink.dtype)


def name_of(what: Term | Sink) -> str | None:
    return what.node.origin.name if what.node is not None else None


def default_name(term: Term) -> str:
    return {"load": "x", "index": "i", "amax": "top", "amin": "low", "sum": "total", "cumsum_reverse": "cumsum"}.get(
        term.op, f"{term.op}_v"
    )
