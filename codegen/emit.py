"""A scheduled axis program to a kernel: coordinates, then values on demand, phase by phase, then the finish.

Only `Coord` differs between the roles of an axis; everything else is written once:

    kernel scope   grid coordinates, what no loop changes, accumulators
      walk         one turn per item of a persistent program
        chunks     one nest of loops per phase and set of row axes
    finish         the last program to arrive adds the partial sums, in order
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import sympy

from ..ir.types import ITEMSIZE, LOW_FLOATS, Size, product
from .axes import REDUCTIONS, SCANS, Axis, Index, Program, Sink, Term, below
from .kernel import Buffer, Kernel, Pointer, Ref, Scalar, Target
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
    check,
    literal,
    method,
    name,
    prune,
    read_names,
    render,
    total,
    unary,
)
from .mathematics import EXACT, FLOATING, TL, cast, held, lowest, number, of_sizes, rules
from .names import Names, identifier
from .prelude import HELPERS
from .schedule import Schedule
from .sizes import Hints, same, symbols, tidy
from .sizes import number as evaluated

FAN = 12
"""Partial sums that one program adds: about the square root of the programs on a device."""
FINISH = 10
"""The level of what the last program computes; 0 is the kernel, 1 the walk, 2 a pass over chunks."""
LONG = 72
"""A single use is written inline up to this many columns."""


@dataclass(frozen=True, slots=True)
class Coord:
    """Where a program is along an axis: base + lane, and the mask of the lanes that lie inside."""

    base: Expr | None
    lane: Expr | None
    mask: Expr | None
    level: int


class Emitter:
    """One kernel."""

    def __init__(self, program: Program, schedule: Schedule, target: Target, hints: Hints, kernel: str) -> None:
        self.program, self.plan, self.target, self.hints, self.kernel = program, schedule, target, hints, kernel
        self.names = Names([*HELPERS, kernel, "pid", "part", "strip", "group", "members", "k", "item"])
        self.pointers: dict[Ref, str] = {}
        self.pointer_dtype: dict[Ref, str] = {}
        self.scalars: dict[Size, str] = {}
        self.constants: dict[str, int] = {}
        self.scratch: list[Buffer] = []
        self.guards: dict[sympy.Basic, None] = {}
        self.steps: set[str] = set()  # scalars whose divisibility makes accesses wide
        self.coords: dict[Axis, Coord] = {}
        self.levels: dict[Term, int] = {}
        self.top = Scope(0)
        self.lines: set[str] = set()
        self.uses = self._uses()
        self.padding = self._padding()
        self.evict = ""
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
            wished.setdefault(t.param.ref, (_name_of(t), t.dtype))
        for s in self.program.sinks:
            wished.setdefault(s.ref, (_name_of(s), s.dtype))
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
            self._letter = {**getattr(self, "_letter", {}), axis: pair[0]}
            if isinstance(axis.size, int):
                self.constants[pair[0]] = axis.size
            else:
                self.scalars.setdefault(tidy(axis.size), pair[0])

    # ------------------------------------------------------------------ sizes
    def size(self, size: Size, wish: str = "size") -> Expr:
        """A size as text: a number, the name of an axis's size, or a scalar argument."""
        size = tidy(size)
        if isinstance(size, int):
            known = next((n for n, v in self.constants.items() if v == size and v > 16 and len(n) == 1), None)
            return name(known) if known else literal(size)
        if size not in self.scalars:
            self.scalars[size] = self.names.fresh(wish)
        return name(self.scalars[size])

    def fixed(self, label: str, size: Size) -> Expr:
        """A size under its own name: a constant where it is a number, else a scalar argument."""
        if isinstance(size, int):
            self.constants[label] = size
            return name(label)
        self.scalars.setdefault(size, label)
        return name(self.scalars[size])

    def block(self, axis: Axis) -> Expr:
        label = f"BLOCK_{self._letter[axis]}"
        self.constants[label] = self.plan.tile[axis]
        return name(label)

    def count(self, axis: Axis) -> Expr:
        """How many blocks an axis has."""
        n = self.size(axis.size)
        return call("tl.cdiv", n, self.block(axis)) if axis in self.plan.tile else n

    # ------------------------------------------------------------------ coordinates
    def lane(self, axis: Axis) -> Expr:
        """The lanes of a tile axis, shaped for the tile: col = tl.arange(0, BLOCK_N)[None, :]."""
        if (found := self.top.memo.get(("lane", axis))) is None:
            dims = list(self.plan.tile)
            shape = ", ".join(":" if a is axis else "None" for a in dims)
            arange = call("tl.arange", literal(0), self.block(axis))
            label = self.names.fresh(axis.name + "s") if axis in self._loop_named() else axis.name
            self.top.body.append(Let(label, Expr(arange.text + (f"[{shape}]" if len(dims) > 1 else ""), names=arange.names)))
            found = self.top.memo[("lane", axis)] = name(label)
        return found

    def _loop_named(self) -> set[Axis]:
        return set()

    def _resident(self, axis: Axis) -> None:
        lane, mask = self.lane(axis), None
        if axis.size != self.plan.tile[axis]:
            label = self.names.fresh("inside" if len(self.plan.tile) == 1 else f"inside_{axis.name}")
            self.top.body.append(Let(label, binary("<", lane, self.size(axis.size))))
            mask = name(label)
        self.coords[axis] = Coord(None, lane, mask, 0)

    def _blocked(self, axis: Axis, place: Expr, scope: Scope, level: int, first: str | None = None) -> None:
        """Lanes from `first` on, where `place` is a block number (or, for a loop over elements, the first element)."""
        lane = self.lane(axis)
        if first is None:
            first = self.names.fresh(f"first_{axis.name}")
            scope.body.append(Let(first, binary("*", call("tl.cast", place, literal("tl.int64")), self.block(axis))))
        mask = None
        if not (isinstance(axis.size, int) and axis.size % self.plan.tile[axis] == 0):
            label = self.names.fresh("inside" if len(self.plan.tile) == 1 else f"inside_{axis.name}")
            scope.body.append(Let(label, binary("<", lane, binary("-", self._step(axis.size, "size"), name(first)))))
            mask = name(label)
        self.coords[axis] = Coord(name(first), lane, mask, level)

    def _scalar(self, axis: Axis, place: Expr, scope: Scope, level: int) -> None:
        wide = call("tl.cast", place, literal("tl.int64"))
        label = axis.name if not scope.find(("scalar", axis)) else self.names.fresh(axis.name)
        scope.body.append(Let(label, wide))
        scope.memo[("scalar", axis)] = name(label)
        self.coords[axis] = Coord(name(label), None, None, level)

    def _coordinates(self, axes: Sequence[Axis], flat: Expr, scope: Scope, level: int) -> None:
        """Take a flat number apart, the last axis fastest."""
        axes = [a for a in axes if not self._alone(a)] if level == 0 else list(axes)
        for position, axis in reversed(list(enumerate(axes))):
            place = flat
            if position:
                place = binary("%", flat, self.count(axis))
                rest = self.names.fresh("rest")
                scope.body.append(Let(rest, binary("//", flat, self.count(axis))))
                flat = name(rest)
            (self._blocked if axis in self.plan.tile else self._scalar)(axis, place, scope, level)

    def _alone(self, axis: Axis) -> bool:
        """The axis is one block whatever the sizes: no coordinate."""
        alone = axis in self.plan.tile and isinstance(axis.size, int) and axis.size <= self.plan.tile[axis]
        if alone and axis not in self.coords:
            self._resident(axis)
        return alone

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
        text = self._computed(term, home)
        if term.dtype in LOW_FLOATS and self._rounds(term):
            text = call("rounded", text, literal(TL[term.dtype]))
        return self._named(term, text, home, scope)

    def _rounds(self, term: Term) -> bool:
        if term.op == "cast":
            return not (term.args[0].dtype == "b1" or term.args[0].dtype == term.dtype)
        return term.op not in EXACT

    def _named(self, term: Term, text: Expr, home: Scope, scope: Scope) -> Expr:
        simple = text.text.isidentifier()
        if simple and not (term.op == "load" and text.text not in self.pointers.values()):
            home.memo[term] = text
            return text
        user = _name_of(term)
        plain = term.op not in ("load", *REDUCTIONS, *SCANS, "random")
        once = self.uses.get(term, 0) <= 1
        if plain and once and home is scope and len(text.text) <= LONG and not (user and len(text.text) > 24):
            return text
        label = self.names.fresh(user, _default_name(term))
        home.body.append(Let(label, text, self._comment(term)))
        home.memo[term] = name(label)
        return home.memo[term]

    def _constant(self, term: Term) -> Expr:
        value = term.param
        if isinstance(value, sympy.Basic) and not value.is_number:
            value = tidy(value)
            integral = isinstance(value, int) or value.is_integer
            text = self.size(value) if integral else of_sizes(value, lambda s: self.size(s, str(s)))
            text = call("tl.cast", text, literal(TL[held(term.dtype)]))
            return call("rounded", text, literal(TL[term.dtype])) if term.dtype in LOW_FLOATS else text
        if isinstance(value, sympy.Basic):
            value = int(value) if value.is_integer else float(value)
        return literal(number(value, term.dtype))

    def _typed(self, term: Term, text: Expr) -> Expr:
        """A constant that stands without a tensor beside it."""
        return text if term.op != "const" or text.names else call("tl.full", literal("[]"), text, literal(TL[held(term.dtype)]))

    def _computed(self, term: Term, scope: Scope) -> Expr:
        if term.op == "load":
            return self._load(term, scope)
        if term.op == "index":
            return self._index(term.param, scope)
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
            args[first] = self._typed(term.args[first], args[first])
        if term.op == "where" and term.args[0].op == "const":
            args[0] = self._typed(term.args[0], args[0])
        if term.op == "cast":
            return cast(args[0], term.args[0].dtype, term.dtype)
        result = rules[term.op](term.args[0].dtype, *args)
        return result

    def _random(self, term: Term, args: list[Expr]) -> Expr:
        drawn = call(term.param, self._typed(term.args[0], args[0]), self._typed(term.args[1], args[1]))
        return method(drawn, "to(tl.float64)") if term.dtype == "f64" else drawn

    def _spread(self, term: Term, scope: Scope) -> Expr:
        value = self._typed(term.args[0], self.value(term.args[0], scope))
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
    def offset(self, place: Index, values: Sequence[tuple[Expr, Size, Term]], scope: Scope, buffer: str) -> tuple[Expr | None, Expr | None]:
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
            scalar.append(self._step(place.offset, f"{buffer}_offset"))
        for value, coefficient, term in values:
            (lanes if self.lanes(term.axes) else scalar).append(self._times(value, coefficient, buffer))
        return self._sum(scalar), self._sum(lanes)

    def _sum(self, parts: Sequence[Expr]) -> Expr | None:
        result: Expr | None = None
        for part in parts:
            negative = part.text.startswith("-") and result is not None
            flipped = Expr(part.text[1:], part.strength, part.names) if negative and " " not in part.text else part
            result = part if result is None else binary("-" if flipped is not part else "+", result, flipped)
        return result

    def _times(self, value: Expr, coefficient: Size, buffer: str) -> Expr:
        if coefficient == 1:
            return value
        if coefficient == -1:
            return unary("-", value)
        return binary("*", value, self._step(coefficient, f"{buffer}_stride"))

    def _step(self, size: Size, wish: str) -> Expr:
        """A size whose divisibility decides how wide accesses are."""
        text = self.size(size, wish)
        self.steps |= text.names
        return text

    def _lane_times(self, axis: Axis, lane: Expr, coefficient: Size, buffer: str) -> Expr:
        """Lanes stay 32 bits wide where the tile provably spans less."""
        narrow = isinstance(coefficient, int) and abs(coefficient) * self.plan.tile[axis] < 1 << 29
        return self._times(lane if narrow else call("tl.cast", lane, literal("tl.int64")), coefficient, buffer)

    def _pointer(self, ref: Ref, place: Index, values: Sequence[tuple[Expr, Size, Term]], scope: Scope) -> Expr:
        pointer = self.pointers[ref]
        scalar, lanes = self.offset(place, values, scope, pointer.removesuffix("_ptr"))
        parts = [name(pointer)]
        if scalar is not None:
            parts.append(self._shared_offset(scalar, place, values, scope))
        if lanes is not None:
            parts.append(lanes)
        result = self._sum(parts)
        assert result is not None
        return result

    def _shared_offset(self, scalar: Expr, place: Index, values: Sequence[tuple[Expr, Size, Term]], scope: Scope) -> Expr:
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

    def _masks(self, axes: Iterable[Axis]) -> list[Expr]:
        own = set(axes)
        return [c.mask for a in self.plan.order if a in own and (c := self.coords[a]).mask is not None]

    def _load(self, term: Term, scope: Scope) -> Expr:
        access, indirect = term.param, len(term.param.indirect)
        values = [(self.value(a, scope), c, a) for a, c in zip(term.args, access.indirect, strict=False)]
        guards = [self.value(g, scope) for g in term.args[indirect:]]
        pointer = self._pointer(access.ref, access.place, values, scope)
        walked = set(self.lanes(a for a, _ in access.place.terms)).union(*(self.lanes(v.axes) for _, _, v in values))
        if set(self.lanes(term.axes)) - walked:
            pointer = binary("+", pointer, call("tl.zeros", self.shape(term.axes), literal("tl.int32")))
        keywords = self._mask_keywords(term, self._masks(term.axes) + guards)
        if self.lanes(term.axes) and not values and (policy := self._policy(term, scope)):
            keywords["eviction_policy"] = literal(f'"{policy}"')
        loaded = call("tl.load", pointer, **keywords)
        return method(loaded, "to(tl.float32)") if term.dtype in LOW_FLOATS else loaded

    def _mask_keywords(self, term: Term, masks: list[Expr]) -> dict[str, Expr | str]:
        mask = total("&", masks)
        if mask is None:
            return {}
        fill = 0.0 if term.dtype in FLOATING else 0
        return {"mask": mask, "other": literal(number(self.padding.get(term, fill), term.dtype if term.dtype != "b1" else "i8"))}

    def _policy(self, term: Term, scope: Scope) -> str:
        """Rows that come by once leave the cache first; a row that is read again stays until its last pass."""
        if scope.level == 2:
            return self.evict
        walked = set(self.plan.walk) & {a for a, _ in term.param.place.terms}
        return "evict_first" if walked and scope.level == 1 else ""

    def _index(self, place: Index, scope: Scope) -> Expr:
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
            parts.append(self.size(place.offset, "offset"))
        result = self._sum(parts)
        assert result is not None
        return result

    # ------------------------------------------------------------------ folding
    def pad(self, term: Term, axis: Axis) -> float | None:
        """What lanes outside along `axis` hold, where that is known."""
        if term.op == "const" and isinstance(term.param, (int, float)):
            return float(term.param)
        if axis not in term.axes or term.dtype not in FLOATING:
            return None
        if term.op == "load":
            return self.padding.get(term, 0.0)
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

    def _neutral(self, term: Term, value: Expr, scope: Scope) -> Expr:
        """The argument of a reduction with its lanes outside made neutral, where they may not be."""
        arg = term.args[0]
        neutral = lowest(term.op, arg.dtype)
        bad = [a for a in term.param if a in arg.axes and self.coords[a].mask and self.pad(arg, a) != neutral]
        mask = total("&", self._masks(bad))
        value = self._widened(arg, value)
        if mask is None:
            return value
        dtype = "i32" if arg.dtype == "b1" else arg.dtype
        return call("tl.where", mask, self._typed(arg, value), literal(number(neutral, dtype)))

    def _widened(self, arg: Term, value: Expr) -> Expr:
        """Booleans reduce as integers."""
        return method(value, "to(tl.int32)") if arg.dtype == "b1" and not value.text.isdigit() else value

    def _fold(self, term: Term, value: Expr, axes: frozenset[Axis]) -> Expr:
        """The reduction over the tile axes that the value has."""
        dims = [d for d, a in enumerate(self.plan.tile) if a in term.param and a in axes]
        kept = self.lanes(axes - set(term.param))
        function = self._folding(term)
        if dims and not kept:
            value = call(function, value, literal(0 if len(self.plan.tile) == 1 else "None"))
        for d in reversed(dims) if kept else ():
            value = call(function, value, literal(d), keep_dims="True")
        return self._as_result(term, value)

    def _folding(self, term: Term) -> str:
        floating = term.dtype in FLOATING
        return {
            "sum": "tl.sum",
            "prod": "row_prod",
            "amax": "row_max" if floating else "tl.max",
            "amin": "row_min" if floating else "tl.min",
        }[term.op]

    def _as_result(self, term: Term, value: Expr) -> Expr:
        """Back from the width that the fold used to the dtype of the result."""
        if term.dtype == "b1":
            return binary("!=", value, literal(0))
        narrow = term.dtype in ("i8", "i16", "u8", "u16")
        return method(value, f"to({TL[term.dtype]})") if narrow else value

    def _combine(self, kind: str, dtype: str, name_: str, value: Expr) -> tuple[str, Expr]:
        """How an accumulator takes a value in: (+=, value) or (=, combined)."""
        if kind in ("sum", "prod"):
            return ("+=" if kind == "sum" else "*=", value)
        floating = {"amax": "larger", "amin": "smaller"}
        function = floating[kind] if dtype in FLOATING else {"amax": "tl.maximum", "amin": "tl.minimum"}[kind]
        return "=", call(function, name(name_), value)

    def _accumulator_dtype(self, term: Term) -> str:
        dtype = held(term.dtype)
        return {"b1": "i32", "i8": "i32", "i16": "i32", "u8": "i32", "u16": "i32"}.get(dtype, dtype)

    def _accumulator(self, term: Term, label: str, axes: Iterable[Axis]) -> Let:
        dtype = self._accumulator_dtype(term)
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
        if (self.coords[axis].mask is not None) and self.pad(term.args[0], axis) != 0.0:
            arg = call("tl.where", self.coords[axis].mask, arg, literal(number(0, term.dtype)))
        if axis not in self.plan.tile:
            return arg if not self.plan.chunked else self._carried(term, arg, arg, scope)
        dim = list(self.plan.tile).index(axis)
        reverse = {"reverse": literal("True")} if term.op == "cumsum_reverse" else {}
        arg = self._let(scope, "step", arg)
        running = self._narrow(term, call("tl.cumsum", arg, literal(dim), **reverse))
        if not self.plan.chunked:
            return running
        keep = {"keep_dims": literal("True")} if len(self.plan.tile) > 1 else {}
        return self._carried(term, running, self._narrow(term, call("tl.sum", arg, literal(dim), **keep)), scope)

    def _narrow(self, term: Term, value: Expr) -> Expr:
        return method(value, f"to({TL[term.dtype]})") if term.dtype in ("i8", "i16", "u8", "u16") else value

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
        if origin is None or not origin.where or origin.where in self.lines or isinstance(term, Term) and term.op == "load":
            return ""
        self.lines.add(origin.where)
        short = origin.where.rsplit("/", 1)[-1].rsplit("\\", 1)[-1]
        return f"{short}  {' '.join((origin.line or '').split())}".strip()

    def store(self, sink: Sink, scope: Scope) -> None:
        """One sink, in the scope at hand or the outermost one where it is complete."""
        level = max([self.level(t) for t in sink.terms] + [self._coord_level(a) for a in sink.axes], default=0)
        scope = scope.home(level)
        value = self._stored(sink, scope)
        values = [(self.value(v, scope), c, v) for v, c in sink.place.values]
        pointer = self._pointer(sink.ref, sink.place, values, scope)
        walked = set(self.lanes(a for a, _ in sink.place.terms)).union(*(self.lanes(v.axes) for _, _, v in values))
        if set(self.lanes(sink.axes)) - walked:
            pointer = binary("+", pointer, call("tl.zeros", self.shape(sink.axes), literal("tl.int32")))
        if sink.mode == "add" and self.lanes(sink.axes):
            value = self._broadcast(value, sink.axes)
        masks = self._masks(sink.axes)
        lanes = frozenset().union(*(m.names for m in masks)) if masks else frozenset()
        scope.body.append(Store(pointer, value, total("&", masks), lanes, sink.mode == "add", self._comment(sink)))

    def _stored(self, sink: Sink, scope: Scope) -> Expr:
        """The value in the dtype of the memory; the store itself rounds what is computed for it alone."""
        term, low = sink.value, sink.dtype in LOW_FLOATS
        alone = self.uses.get(term, 0) <= 1 and scope.find(term) is None and scope.home(self.level(term)) is scope
        if low and term.dtype == sink.dtype and alone and term.op not in ("load", "const") and self._rounds(term):
            value = self._computed(term, scope)
        else:
            value = self._typed(term, self.value(term, scope)) if term.op == "const" else self.value(term, scope)
        if low:
            return method(value, f"to({TL[sink.dtype]})")
        return cast(value, term.dtype, sink.dtype)

    # ------------------------------------------------------------------ the kernel
    def build(self) -> list[Statement]:
        """The tree of the whole kernel."""
        plan = self.plan
        if not plan.chunked:
            for axis in plan.row:
                self._resident(axis)
        if plan.programs is None:
            self.body = self.top
            self._grid(plan.grid, "tl.program_id(0)")
            self._phases()
            return self.top.body
        self._walked()
        return self.top.body

    def _grid(self, axes: Sequence[Axis], flat: str) -> None:
        axes = [a for a in axes if not self._alone(a)]
        if not axes:
            return
        number_ = Expr(flat, names=frozenset(["tl"]))
        if len(axes) > 1:
            self.top.body.append(Let("pid", number_))
            number_ = name("pid")
        self._coordinates(axes, number_, self.top, 0)

    def _walked(self) -> None:
        """for item in this program's share: the body; then the finish."""
        plan, top = self.plan, self.top
        assert plan.items is not None and plan.programs is not None
        programs = self.fixed("PROGRAMS", plan.programs)
        top.body.append(Let("pid", Expr("tl.program_id(0)", names=frozenset(["tl"]))))
        part = name("pid")
        if self._strips():
            top.body.append(Let("strip", binary("//", name("pid"), programs)))
            top.body.append(Let("part", binary("%", name("pid"), programs)))
            part = name("part")
            self._coordinates(plan.grid, name("strip"), top, 0)
        else:
            self._coordinates(plan.grid, part, top, 0)
        self.body = Scope(1, top)
        item, over = self._share(part)
        self._coordinates(plan.walk, name(item), self.body, 1)
        self._phases()
        top.body.append(For(item, over, self.body.body))
        if plan.final:
            top.closed = True
            self._finish()

    def _strips(self) -> bool:
        return any(not self._alone(a) for a in self.plan.grid)

    def _share(self, part: Expr) -> tuple[str, Expr]:
        """The loop variable and range of a program's share of the items."""
        plan = self.plan
        assert plan.items is not None and plan.programs is not None
        both = isinstance(plan.items, int) and isinstance(plan.programs, int)
        share = -(-plan.items // plan.programs) if both else sympy.ceiling(sympy.sympify(plan.items) / plan.programs)
        for symbol in sorted(symbols([plan.items, plan.programs]), key=str):
            self.guards[sympy.Gt(symbol, 0, evaluate=False)] = None
        each = self.fixed("ITEMS", share)
        whole = self.fixed("TOTAL", plan.items) if not same(plan.items, plan.walk[0].size) else self.size(plan.walk[0].size)
        if not isinstance(plan.items, int):
            self.guards[sympy.Lt(plan.items, 1 << 30)] = None
        start, stop = binary("*", part, each), binary("*", binary("+", part, literal(1)), each)
        stages = {"num_stages": literal(plan.stages)} if plan.stages > 1 and not plan.chunked else {}
        return "item", call("tl.range", start, call("tl.minimum", stop, whole), **stages)

    def _phases(self) -> None:
        """Phase by phase: passes over a chunked row, then what is complete without its lanes."""
        plan, row = self.plan, set(self.plan.row)
        sinks = [s for s in self.program.sinks if not any(t in plan.after for t in below(s.terms))]
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

    def _pass_work(self, phase: int, sinks: Sequence[Sink], phase_of: Mapping[int, int]) -> dict[frozenset[Axis], list[Term | Sink]]:
        """What has to be done along the row in a phase, by the row axes that it walks."""
        plan, row = self.plan, frozenset(self.plan.row)
        work: dict[frozenset[Axis], list[Term | Sink]] = {}
        for t in self.program.terms:
            if (t in plan.inner or t in plan.final) and plan.phase[t.args[0]] == phase and t.args[0].axes & row:
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
        chunk, after = Scope(2, self.body), []
        loops = self._chunk_loops(axes, chunk)
        for item in work:
            if isinstance(item, Sink):
                self.store(item, chunk)
            elif item in self.plan.final:
                self._accumulate(item, chunk)
            else:
                after.append((item, self._lane_accumulator(item, chunk)))
        body = chunk.body
        for variable, over in reversed(loops):
            body = [For(variable, over, body)]
        self.body.body.extend(body)
        for axis in axes:
            del self.coords[axis]
        self.levels.clear()
        self.names.release([v for v, _ in loops] + [s.name for s in chunk.body if isinstance(s, Let)])
        for term, label in after:
            self._folded(term, label)

    def _chunk_loops(self, axes: frozenset[Axis], chunk: Scope) -> list[tuple[str, Expr]]:
        self.levels.clear()
        loops = []
        down = any(t.op == "cumsum_reverse" for t in self.program.terms)
        for axis in [a for a in self.plan.order if a in axes]:
            step, n = (self.block(axis) if axis in self.plan.tile else literal(1)), self.size(axis.size)
            turn = self.names.fresh(f"{axis.name}_at")
            stages = {"num_stages": literal(self.plan.stages)} if self.plan.stages > 1 else {}
            loops.append((turn, call("tl.range", literal(0), n, step, **stages)))
            start: Expr = name(turn)
            if down:
                start = binary("-", binary("*", binary("-", call("tl.cdiv", n, step), literal(1)), step), start)
            label = self.names.fresh(f"first_{axis.name}" if axis in self.plan.tile else axis.name + "_i")
            chunk.body.append(Let(label, call("tl.cast", start, literal("tl.int64"))))
            if axis in self.plan.tile:
                self._blocked(axis, name(label), chunk, 2, label)
            else:
                self.coords[axis] = Coord(name(label), None, None, 2)
        return loops

    def _lane_accumulator(self, term: Term, chunk: Scope) -> str:
        value = self._neutral(term, self.value(term.args[0], chunk), chunk)
        label = self.names.fresh(f"{identifier(_name_of(term)) or term.op}_lanes")
        self.body.body.append(self._accumulator(term, label, self._lanes_of(term)))
        operator, combined = self._combine(term.op, term.dtype, label, value)
        chunk.body.append(Accumulate(label, operator, combined, self._comment(term)))
        return label

    def _lanes_of(self, term: Term) -> list[Axis]:
        return self.lanes(term.args[0].axes)

    def _folded(self, term: Term, label: str) -> None:
        """The value of a reduction, from its lanes."""
        value = self._fold(term, name(label), term.args[0].axes)
        if term.dtype in LOW_FLOATS and self._rounds(term):
            value = call("rounded", value, literal(TL[term.dtype]))
        chosen = self.names.fresh(_name_of(term), _default_name(term))
        self.body.body.append(Let(chosen, value))
        self.body.memo[term] = name(chosen)

    # ------------------------------------------------------------------ final reductions
    def _accumulate(self, term: Term, scope: Scope) -> None:
        """A final reduction takes in its value, lanes apart."""
        value = self._neutral(term, self.value(term.args[0], scope), scope)
        label = self.names.fresh(f"{self._final_name(term)}_acc")
        self.top.body.append(self._accumulator(term, label, self._lanes_of(term)))
        operator, combined = self._combine(term.op, term.dtype, label, value)
        scope.body.append(Accumulate(label, operator, combined, self._comment(term)))
        self.top.memo[("acc", term)] = name(label)

    def _final_name(self, term: Term) -> str:
        users = [s for s in self.program.sinks if term in below(s.terms)]
        return identifier(_name_of(term) or (_name_of(users[0]) if users else None)) or term.op

    def _finish(self) -> None:
        """Fold the lanes; store partial sums; the last to arrive, level by level, adds them and stores the results."""
        plan = self.plan
        partials = [self._partial(r) for r in plan.final]
        everything = [r for r in plan.final if set(r.param) - set(plan.row) != set(plan.walk)]
        if plan.programs == 1 and not everything:
            scope = Scope(FINISH, self.top)
            self._complete(scope, {p.term: name(p.folded) for p in partials}, set(plan.final))
            self.top.body.extend(scope.body)
            return
        for p in partials:
            self._store_partial(p)
        body, parent, left = self.top.body, self.top, list(partials)
        for level in self._levels(bool(everything)):
            scope = Scope(FINISH, parent)
            totals = {p.term: self._add_partials(p, level, scope) for p in left}
            done = {p.term for p in left if level.completes == "all" or level.completes == "walk" and p.term not in everything}
            left = [p for p in left if p.term not in done]
            for p in left:
                scope.body.append(Store(self._slot(p, level.first), totals[p.term], None))
            self._complete(scope, {t: v for t, v in totals.items() if t in done}, done)
            body.extend(level.setup)
            body.append(If(call("last_to_arrive", level.counter, level.count), scope.body))
            body, parent = scope.body, scope
            scope.closed = True

    def _partial(self, term: Term) -> _Partial:
        label = self.top.memo["acc", term].text
        lanes = self._lanes_of(term)
        kept = [a for a in lanes if a in term.axes]
        if len(kept) < len(lanes):
            folded = self._fold_accumulator(term, label)
            label = self.names.fresh(label)
            self.top.body.append(Let(label, folded))
        return _Partial(term, label, kept, "")

    def _fold_accumulator(self, term: Term, label: str) -> Expr:
        dims = [d for d, a in enumerate(self.plan.tile) if a in term.param and a in term.args[0].axes]
        function, value = self._folding(term), name(label)
        if not self.lanes(term.axes):
            return call(function, value, literal(0 if len(self.plan.tile) == 1 else "None"))
        for d in reversed(dims):
            value = call(function, value, literal(d), keep_dims="True")
        return value

    def _store_partial(self, p: _Partial) -> None:
        width = product(self.plan.tile[a] for a in p.kept)
        p.pointer = self.names.fresh(f"{self._final_name(p.term)}_partial_ptr")
        slots = tidy(product([self.plan.programs or 1, self.plan.strips]) * width)
        ref = Ref("scratch", len(self.scratch))
        self.scratch.append(Buffer(p.pointer.removesuffix("_ptr"), self._accumulator_dtype(p.term), (slots,), (1,)))
        self.pointers[ref], self.pointer_dtype[ref] = p.pointer, self._accumulator_dtype(p.term)
        self.top.body.append(Store(self._slot(p, name("pid")), name(p.folded), None))

    def _slot(self, p: _Partial, slot: Expr) -> Expr:
        """The address of a program's partial sum."""
        pointer = name(p.pointer)
        if not p.kept:
            return pointer if slot.text == "0" else binary("+", pointer, slot)
        stride, lanes = 1, []
        for a in reversed(p.kept):
            lanes.insert(0, self._times(self.lane(a), stride, "slot"))
            stride *= self.plan.tile[a]
        base = binary("*", call("tl.cast", slot, literal("tl.int64")), literal(stride))
        parts = [pointer] + ([] if slot.text == "0" else [base])
        result = self._sum([*parts, *lanes])
        assert result is not None
        return result

    def _levels(self, everything: bool) -> list[_Level]:
        """A tree of arrivals: FAN programs, the programs of a strip, the strips."""
        programs = name("PROGRAMS") if "PROGRAMS" in self.constants else name(self.scalars[self.plan.programs or 1])
        strips = self._strips()
        base = binary("*", name("strip"), programs) if strips else literal(0)
        part = name("part") if strips else name("pid")
        counter = self._counter()
        number_ = name("strip") if strips else literal(0)
        levels: list[_Level] = []
        if self.target.units > 16:
            groups = self.fixed("GROUPS", _ceiling(self.plan.programs or 1, FAN))
            fan = self.fixed("FAN", FAN)
            first = binary("*", name("group"), fan)
            members = call("tl.minimum", fan, binary("-", programs, binary("*", name("group"), fan)))
            setup = [Let("group", binary("//", part, fan)), Let("members", members)]
            own = self._plus(binary("*", number_, groups), name("group")) if strips else name("group")
            levels.append(_Level(setup, self._plus(counter, own), name("members"), self._plus(base, first), None, "none"))
            count = self.fixed("STRIPS", self.plan.strips) if strips else literal(1)
            done = self._plus(self._plus(counter, binary("*", count, groups) if strips else groups), number_)
            levels.append(_Level([], done, groups, base, fan, "walk"))
            last = self._plus(counter, binary("*", count, binary("+", groups, literal(1))))
        else:
            levels.append(_Level([], self._plus(counter, number_), programs, base, None, "walk"))
            last = self._plus(counter, self.fixed("STRIPS", self.plan.strips)) if strips else counter
        if everything and strips:
            levels.append(_Level([], last, self.fixed("STRIPS", self.plan.strips), literal(0), programs, "all"))
        elif everything:
            levels[-1].completes = "all"
        return levels

    def _plus(self, a: Expr, b: Expr) -> Expr:
        return a if b.text == "0" else b if a.text == "0" else binary("+", a, b)

    def _counter(self) -> Expr:
        groups = _ceiling(self.plan.programs or 1, FAN) + 1 if self.target.units > 16 else 1
        ref = Ref("scratch", len(self.scratch))
        counters = tidy(product([self.plan.strips, groups]) + 1)
        self.scratch.append(Buffer("arrived", "i32", (counters,), (1,), zeroed=True))
        self.pointers[ref], self.pointer_dtype[ref] = self.names.fresh("arrived_ptr"), "i32"
        return name(self.pointers[ref])

    def _add_partials(self, p: _Partial, level: _Level, scope: Scope) -> Expr:
        label = self.names.fresh(f"{self._final_name(p.term)}_total")
        scope.body.append(self._accumulator(p.term, label, p.kept))
        step = name("k") if level.step is None else binary("*", name("k"), level.step)
        loaded = call("tl.load", self._slot(p, self._plus(level.first, step)), cache_modifier='".cg"')
        operator, combined = self._combine(p.term.op, p.term.dtype, label, loaded)
        over = call("range", level.count)
        scope.body.append(For("k", over, [Accumulate(label, operator, combined)]))
        return name(label)

    def _complete(self, scope: Scope, totals: Mapping[Term, Expr], done: set[Term]) -> None:
        """Give the finished sums their values and store what depends on nothing else."""
        self.levels.clear()
        for term, value in totals.items():
            value = self._as_result(term, value)
            if term.dtype in LOW_FLOATS and self._rounds(term):
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

    # ------------------------------------------------------------------ the result
    def kernel_of(self) -> Kernel:
        body = prune(self.build(), set())
        used = read_names(body)
        body = self._aligned(used) + body
        pointers = [Pointer(p, ref, self.pointer_dtype[ref]) for ref, p in self.pointers.items()]
        scalars = [Scalar(label, value) for value, label in self.scalars.items() if label in used]
        constants = {k: v for k, v in self.constants.items() if k in used}
        known = {p.name for p in pointers} | {s.name for s in scalars} | set(constants) | set(HELPERS)
        check(body, known | {"tl", "range", "float"}, self.kernel)
        head = [*(p.name for p in pointers), *(s.name for s in scalars), *(f"{c}: tl.constexpr" for c in constants)]
        source = "\n".join(["@triton.jit", f"def {self.kernel}({', '.join(head)}):", *render(body)]) + "\n"
        plan = self.plan
        grid = tidy(product([plan.programs, plan.strips])) if plan.programs is not None else tidy(plan.strips)
        reads, writes = self._traffic()
        return Kernel(
            self.kernel, source, (*pointers, *scalars), dict(constants), grid, plan.warps, plan.stages,
            tuple(self.scratch), {}, tuple(self.guards), reads, writes,
        )  # fmt: skip

    def _aligned(self, used: set[str]) -> list[Statement]:
        """N = N // 16 * 16: row lengths and strides that are multiples now have to stay so, or another kernel serves."""
        found: list[Statement] = []
        for size, label in self.scalars.items():
            if label in used and label in self.steps and evaluated(size, self.hints) % 16 == 0:
                found.append(Accumulate(label, "=", binary("*", binary("//", name(label), literal(16)), literal(16)), "a multiple of 16: accesses are wide"))
                self.guards[sympy.Eq(sympy.Mod(size, 16), 0)] = None
        return found

    def _traffic(self) -> tuple[dict[str, Size], dict[str, Size]]:
        """Bytes per buffer: every distinct place once, however often a row is read again out of L2."""
        reads: dict[str, Size] = {}
        writes: dict[str, Size] = {}
        seen: set[object] = set()
        for t in self.program.terms:
            if t.op == "load" and (key := (t.param, t.args)) not in seen:
                seen.add(key)
                moved = tidy(product(a.size for a in t.axes) * ITEMSIZE[t.dtype])
                self._add(reads, self.pointers[t.param.ref], moved)
        for s in self.program.sinks:
            self._add(writes, self.pointers[s.ref], tidy(product(a.size for a in s.axes) * ITEMSIZE[s.dtype]))
        for b in self.scratch:
            if not b.zeroed:
                moved = tidy(product(b.shape) * ITEMSIZE[b.dtype])
                reads[f"{b.name}_ptr"] = writes[f"{b.name}_ptr"] = moved
        return reads, writes

    def _add(self, into: dict[str, Size], label: str, moved: Size) -> None:
        into[label] = tidy(into.get(label, 0) + moved)


@dataclass(slots=True)
class _Partial:
    """A final reduction on its way: the folded accumulator, the lanes it keeps, its scratch buffer."""

    term: Term
    folded: str
    kept: list[Axis]
    pointer: str


@dataclass(slots=True)
class _Level:
    """One level of arrivals: who counts where, whose slots are added, and which reductions are complete then."""

    setup: list[Statement]
    counter: Expr
    count: Expr
    first: Expr
    step: Expr | None
    completes: str


def _ceiling(a: Size, b: int) -> Size:
    return -(-a // b) if isinstance(a, int) else sympy.ceiling(a / b)


def _name_of(what: Term | Sink) -> str | None:
    return what.node.origin.name if what.node is not None else None


def _default_name(term: Term) -> str:
    return {"load": "x", "index": "i", "amax": "top", "amin": "low", "sum": "total", "cumsum_reverse": "cumsum"}.get(term.op, f"{term.op}_v")

