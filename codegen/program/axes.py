"""An ir.Graph as a program over named axes: every value is a function of the axes it varies along, nothing else.

    y = x - x.sum(1)      sink y[i, j] = sub(load x {i: N, j: 1}, sum over j of load x {i: N, j: 1})

Layout primitives vanish into index arithmetic: a value is asked for *at an index*, one `Index` per dimension, and a
permute, slice, flip or reshape asks its operand at another index. Equal questions have one answer (hash-consing), so
what is shared in the mathematics is shared in the kernel. Merging two axes is a renaming: it is legal when no value
varies along both, and it only ever decides how fast the kernel is, never what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...ir import Graph, Value
from ...ir.prims import PRIMS
from ...ir.types import Size, product
from ..emit.mathematics import lowest
from ..kernel import Ref
from .sizes import divide, nonnegative, positive, same, tidy

REDUCTIONS = ("sum", "prod", "amax", "amin")
SCANS = ("cumsum", "cumsum_reverse")


class Materialize(Exception):
    """These values have to be materialised before the kernel that wants them, or `otherwise` these, where they are."""

    def __init__(self, nodes: Iterable[Value], otherwise: Iterable[Value] = ()) -> None:
        self.nodes, self.otherwise = tuple(dict.fromkeys(nodes)), tuple(dict.fromkeys(otherwise))


class _Restart(Exception):
    """An axis was refined while its values were being built: ask again."""


class Axis:
    """A loop variable 0 .. size-1. Identity is identity; `order` makes every listing deterministic."""

    __slots__ = ("name", "order", "size")

    def __init__(self, size: Size, order: int) -> None:
        self.size, self.order, self.name = size, order, ""

    def __repr__(self) -> str:
        return self.name or f"a{self.order}"


@dataclass(frozen=True, slots=True)
class Index:
    """offset + sum of coefficient * axis + sum of coefficient * value: a place along a dimension, or in memory."""

    terms: tuple[tuple[Axis, Size], ...] = ()
    offset: Size = 0
    values: tuple[tuple[Term, Size], ...] = ()

    @staticmethod
    def over(axis: Axis) -> Index:
        return Index(((axis, 1),))

    def __add__(self, other: Index | Size) -> Index:
        if not isinstance(other, Index):
            return Index(self.terms, tidy(self.offset + other), self.values)
        return Index(
            _added(self.terms, other.terms), tidy(self.offset + other.offset), _added(self.values, other.values)
        )

    def __mul__(self, by: Size) -> Index:
        if by == 0:
            return Index()
        terms = tuple((axis, tidy(c * by)) for axis, c in self.terms)
        return Index(terms, tidy(self.offset * by), tuple((value, tidy(c * by)) for value, c in self.values))

    @property
    def axes(self) -> frozenset[Axis]:
        return frozenset(self.walked).union(*(v.axes for v, _ in self.values))

    @property
    def walked(self) -> tuple[Axis, ...]:
        """The axes of the affine part, in order."""
        return tuple(a for a, _ in self.terms)

    @property
    def kind(self) -> Any:
        """What stays the same when axes are renamed."""
        return tuple((a.size, c) for a, c in self.terms), self.offset, self.values

    def renamed(self, to: Mapping[Axis, Index]) -> Index:
        """The same place with axes replaced; `values` are left alone."""
        if not any(a in to for a, _ in self.terms):
            return self
        moved = Index((), self.offset, self.values)
        for axis, coefficient in self.terms:
            moved = moved + to.get(axis, Index.over(axis)) * coefficient
        return moved

    def bounds(self) -> tuple[Size, Size] | None:
        """Smallest and largest place, or None where a value decides or a sign is unknown."""
        low = high = self.offset
        for axis, coefficient in self.terms:
            reach = tidy(coefficient * (axis.size - 1))
            if nonnegative(coefficient):
                high = tidy(high + reach)
            elif nonnegative(-coefficient):
                low = tidy(low + reach)
            else:
                return None
        return None if self.values else (low, high)

    def within(self, size: Size) -> bool:
        """Provably in 0 .. size-1 (an axis of size zero is never walked)."""
        bounds = self.bounds()
        return bounds is not None and nonnegative(bounds[0]) and nonnegative(tidy(size - 1 - bounds[1]))


def _added(a: tuple[tuple[Any, Size], ...], b: tuple[tuple[Any, Size], ...]) -> tuple[tuple[Any, Size], ...]:
    total = dict(a)
    for what, coefficient in b:
        total[what] = tidy(total.get(what, 0) + coefficient)
    return tuple(sorted(((w, c) for w, c in total.items() if c != 0), key=lambda wc: wc[0].order))


class Term:
    """A value of the axis program.

    op     load    param (ref, place, indirect)   args: the values in `place`, then the guards
           index   param place                    an integer expression of axes
           const   param number or sympy expression
           spread  param axes                     the argument, made to vary along more axes
           sum prod amax amin cumsum   param axes
           random  param kind                     args: seed, counter
           any elementwise primitive
    """

    __slots__ = ("args", "axes", "dtype", "node", "op", "order", "param")

    def __init__(self, op: str, args: tuple[Term, ...], dtype: str, param: Any, order: int, node: Value | None) -> None:
        self.op, self.args, self.dtype, self.param, self.order, self.node = op, args, dtype, param, order, node
        self.axes = _axes(op, args, param)

    def __repr__(self) -> str:
        return f"{self.op}{self.order}"


def _axes(op: str, args: tuple[Term, ...], param: Any) -> frozenset[Axis]:
    below: frozenset[Axis] = frozenset().union(*(a.axes for a in args))
    if op in REDUCTIONS:
        return below - set(param)
    if op in ("spread", *SCANS):
        return below | set(param)
    if op == "load":
        return below | {a for a, _ in param.place.terms}
    return below | {a for a, _ in param.terms} if op == "index" else below


@dataclass(frozen=True, slots=True)
class Access:
    """What a load reads: element `place` of a buffer. Its values are the load's first `indirect` arguments."""

    ref: Ref
    place: Index
    indirect: tuple[Size, ...] = ()


@dataclass(frozen=True, slots=True)
class Sink:
    """A store of `value` to element `place` of a buffer, for every point of `axes`; "add" is an atomic addition."""

    ref: Ref
    value: Term
    place: Index
    axes: tuple[Axis, ...]
    dtype: str
    mode: Literal["store", "set", "add"]
    node: Value

    @property
    def terms(self) -> tuple[Term, ...]:
        return (self.value, *(v for v, _ in self.place.values))


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a materialised value lives."""

    ref: Ref
    strides: tuple[Size, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Goal:
    """One thing that a kernel has to write: `node` into memory, or the contributions of a scatter `node`."""

    node: Value
    memory: Memory
    scatter: bool = False


class Program:
    """The sinks of one kernel, over unified axes."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = tuple(sinks)
        self.terms = below(t for s in self.sinks for t in s.terms)
        found = {a for s in self.sinks for a in s.axes}.union(*(mentioned(t) for t in self.terms))
        self.axes = tuple(sorted(found, key=lambda a: a.order))


def mentioned(term: Term) -> set[Axis]:
    return set(term.axes) | (set(term.param) if term.op in (*REDUCTIONS, *SCANS) else set())


def below(roots: Iterable[Term]) -> tuple[Term, ...]:
    """Every term under the roots, arguments first."""
    done: dict[Term, None] = {}
    todo = [(root, False) for root in reversed(list(roots))]
    while todo:
        term, ready = todo.pop()
        if term in done:
            continue
        if ready:
            done[term] = None
        else:
            todo.append((term, True))
            todo.extend((a, False) for a in reversed(term.args) if a not in done)
    return tuple(done)


MAX_PLACES = 8
"""A value that is asked for at more kinds of places than this (x[i], x[i + 1], x[2 * i]) goes through memory."""

MAX_QUESTIONS = 32
"""So does one that is asked for more often: at places and under guards, which each slice of a sum of slices doubles."""


MAX_PIECES = 16
"""A concatenation of at most so many equal pieces is stored piece by piece."""
MAX_UNROLLED = 2
"""Concatenations of concatenations that are."""


class Builder:
    """Builds terms; interns them; remembers which axes were refined into (outer, inner)."""

    def __init__(self, graph: Graph, memory: Mapping[int, Memory]) -> None:
        self.graph, self.memory = graph, memory
        self.refined: dict[Axis, Index] = {}
        self._axes: dict[Any, Axis] = {}
        self._keys: dict[Axis, Any] = {}
        self._unrolled: dict[int, list[Axis]] = {}  # by goal: axes whose values are stored one by one
        self._reset()

    def _reset(self) -> None:
        self._terms: dict[Any, Term] = {}
        self._asked: dict[Any, Term] = {}
        self._places: dict[int, set[Any]] = {}
        self._questions: dict[int, set[Any]] = {}
        self.goal = -1
        self.nested = False

    # ------------------------------------------------------------------ making
    def axis(self, key: Any, size: Size) -> Axis:
        """The axis known by `key`."""
        if key not in self._axes:
            self._axes[key] = Axis(size, len(self._axes))
            self._keys[self._axes[key]] = key
        return self._axes[key]

    def term(self, op: str, *args: Term, dtype: str, param: Any = None, node: Value | None = None) -> Term:
        key = (op, args, dtype, repr(param) if op == "const" else param)
        if key not in self._terms:
            self._terms[key] = Term(op, args, dtype, param, len(self._terms), node)
        return self._terms[key]

    def const(self, number: Any, dtype: str) -> Term:
        return self.term("const", dtype=dtype, param=number)

    def index(self, place: Index, dtype: str = "i64") -> Term:
        """The integer that a place is."""
        place = self.settled(place)
        total = self.term("index", dtype=dtype, param=Index(place.terms, place.offset))
        if not place.terms:
            total = self.const(place.offset, dtype)
        for value, coefficient in place.values:
            scaled = value if coefficient == 1 else self.term("mul", value, self.const(coefficient, "i64"), dtype="i64")
            plain = not place.terms and place.offset == 0 and total.op == "const"
            total = scaled if plain else self.term("add", total, scaled, dtype="i64")
        return total

    def load(self, memory: Memory, index: Sequence[Index], guards: tuple[Term, ...], node: Value) -> Term:
        place = Index()
        for i, stride in zip(index, memory.strides, strict=True):
            place = place + i * stride
        place = self.settled(place)
        safe = all(self.settled(i).within(n) for i, n in zip(index, node.shape, strict=True))
        values = tuple(v for v, _ in place.values)
        access = Access(memory.ref, Index(place.terms, place.offset), tuple(c for _, c in place.values))
        loaded = self.term("load", *values, *(() if safe else guards), dtype=memory.dtype, param=access, node=node)
        return loaded if memory.dtype == node.dtype else self.term("cast", loaded, dtype=node.dtype, node=node)

    # ------------------------------------------------------------------ refining
    def settled(self, place: Index) -> Index:
        """The place in terms of axes that were not refined further."""
        while any(a in self.refined for a, _ in place.terms):
            place = place.renamed(self.refined)
        return place

    def refine(self, axis: Axis, inner: Size) -> None:
        """axis  ->  outer * inner + inner axis. Every term built so far is stale."""
        outer = divide(axis.size, inner)
        assert outer is not None
        pair = self.axis((axis, "outer"), outer), self.axis((axis, "inner"), inner)
        self.refined[axis] = Index.over(pair[0]) * inner + Index.over(pair[1])
        raise _Restart

    # ------------------------------------------------------------------ asking
    def at(self, node: Value, index: Sequence[Index], guards: tuple[Term, ...] = ()) -> Term:
        """The value of `node` at an index."""
        if any(n == 0 for n in node.shape):  # never looked at: there may be no memory behind it
            return self.const(0, node.dtype)
        place = tuple(self.settled(i) if n != 1 else Index() for i, n in zip(index, node.shape, strict=True))
        key = (node.id, place, guards)
        if key not in self._asked:
            self._count(node, place, guards)
            self._asked[key] = self._rule(node)(self, node, place, guards)
        return self._asked[key]

    def whole(self, node: Value, index: Sequence[Index]) -> Term:
        """The argument of a reduction or scan: it is never looked at piece by piece."""
        outer, self.nested = self.nested, True
        term = self.at(node, index)
        self.nested = outer
        return term

    def _rule(self, node: Value) -> Callable[[Builder, Value, tuple[Index, ...], tuple[Term, ...]], Term]:
        if node.id in self.memory:
            return lambda b, n, index, guards: b.load(b.memory[n.id], index, guards, n)
        return self._rule_of(node)

    def _own(self, node: Value, index: tuple[Index, ...]) -> Term:
        """The value computed here, though its memory is known."""
        return self.const(0, node.dtype) if 0 in node.shape else self._rule_of(node)(self, node, index, ())

    def _rule_of(self, node: Value) -> Callable[[Builder, Value, tuple[Index, ...], tuple[Term, ...]], Term]:
        return rules.get(node.prim) or family_rules[PRIMS[node.prim].family]

    def _count(self, node: Value, place: tuple[Index, ...], guards: tuple[Term, ...]) -> None:
        """Places along other axes of the same sizes are one kind: reductions have axes of their own, until unified."""
        if node.id in self.memory or PRIMS[node.prim].family in ("input", "source"):
            return
        kinds = self._places.setdefault(node.id, set())
        kinds.add(tuple(i.kind for i in place))
        questions = self._questions.setdefault(node.id, set())
        questions.add((place, guards))
        often = len(kinds) > MAX_PLACES or len(questions) > MAX_QUESTIONS
        if often and PRIMS[node.prim].family == "elementwise":
            raise Materialize([node])

    def covers(self, place: Index, size: Size) -> bool:
        """The place runs over 0 .. size-1 exactly once: a mixed-radix number in axes of their own."""
        if place.values or place.offset != 0:
            return False
        reach: Size = 1
        rest = list(self.settled(place).terms)
        while rest:
            found = next((t for t in rest if same(t[1], reach)), None)
            if found is None:
                return False
            rest.remove(found)
            reach = tidy(reach * found[0].size)
        return same(reach, size)

    def plain(self, node: Value, index: Sequence[Index]) -> None:
        """Have `node` materialized unless it is asked for at every place exactly once."""
        axes = [a for i in index for a in self.settled(i).axes]
        whole = all(self.covers(i, n) for i, n in zip(index, node.shape, strict=True))
        if not whole or len(axes) != len(set(axes)):
            raise Materialize([node])

    # ------------------------------------------------------------------ sinks
    def sinks(self, goals: Sequence[Goal]) -> list[Sink]:
        """All stores of the goals; starts again whenever an axis had to be refined."""
        for _ in range(200):
            self._reset()
            try:
                found = [s for number, goal in enumerate(goals) for s in self._sinks_of(number, goal)]
            except _Restart:
                continue
            return self._rebuilt(found, self.refined)
        raise Materialize([g.node for g in goals])

    def _sinks_of(self, number: int, goal: Goal) -> list[Sink]:
        self.goal = number
        return self._scatter(goal) if goal.scatter else [self._store(goal, p) for p in self._parts(goal.node)]

    def _parts(self, node: Value) -> list[tuple[Index, ...]]:
        """The index of the whole value, or of its pieces where concatenations divide it."""
        parts = [tuple(self._dimension(node, d, n) for d, n in enumerate(node.shape))]
        for axis in self._unrolled.get(self.goal, ()):
            at = [{axis: Index(offset=k)} for k in range(int(axis.size))]
            parts = [tuple(self.settled(i).renamed(here) for i in part) for part in parts for here in at]
        return parts

    def _dimension(self, node: Value, dim: int, size: Size) -> Index:
        return Index() if size == 1 else Index.over(self.axis(("goal", self.goal, node.id, dim), size))

    def _store(self, goal: Goal, index: tuple[Index, ...]) -> Sink:
        place = Index()
        for i, stride in zip(index, goal.memory.strides, strict=True):
            place = place + i * stride
        axes = tuple(a for i in index for a in self.settled(i).walked)
        node = goal.node
        value = self.at(node, index) if self._elsewhere(goal) else self._own(node, index)
        return Sink(goal.memory.ref, value, self.settled(place), axes, goal.memory.dtype, "store", goal.node)

    def _elsewhere(self, goal: Goal) -> bool:
        """The value is not the one that this store materialises."""
        return goal.node.id not in self.memory or self.memory[goal.node.id].ref != goal.memory.ref

    def _scatter(self, goal: Goal) -> list[Sink]:
        node = goal.node
        _, source, *targets = node.args
        (index,) = [tuple(self._dimension(source, d, n) for d, n in enumerate(source.shape))]
        rank, axes = targets[0].ndim, node.params["axes"]
        found = {a: Index(values=((self.at(t, index[:rank]), 1),)) for a, t in zip(axes, targets, strict=True)}
        others = iter(index[rank:])
        place = Index()
        for dim, stride in enumerate(goal.memory.strides):
            place = place + self.as_i64(found[dim] if dim in found else next(others)) * stride
        loop = tuple(sorted((a for i in index for a in self.settled(i).walked), key=lambda a: a.order))
        value = self.at(source, index)
        mode: Literal["add", "set"] = "add" if node.params["mode"] == "add" else "set"
        return [Sink(goal.memory.ref, value, self.settled(place), loop, goal.memory.dtype, mode, node)]

    def as_i64(self, index: Index) -> Index:
        """An index whose values are 64 bits wide, constants folded into the offset."""
        wide = Index(index.terms, index.offset)
        for value, coefficient in index.values:
            if value.op == "const":
                wide = wide + value.param * coefficient
            else:
                value = value if value.dtype == "i64" else self.term("cast", value, dtype="i64")
                wide = wide + Index(values=((value, coefficient),))
        return wide

    def pieces(self, index: Index, sizes: tuple[Size, ...]) -> None:
        """Store a concatenation piece by piece, where pieces are alike and the index is an axis of the sink."""
        alike = not self.nested and len(sizes) <= MAX_PIECES and all(same(n, sizes[0]) for n in sizes[1:])
        if not alike or len(self._unrolled.get(self.goal, ())) == MAX_UNROLLED:
            return
        if (whole := self._axis_of_sink(index)) is not None and not same(sizes[0], 1):
            self.refine(whole, sizes[0])
        exact = _radix(index, sizes[0])
        if exact is not None and (piece := self._axis_of_sink(exact[0])) is not None and piece.size == len(sizes):
            self._unrolled.setdefault(self.goal, []).append(piece)
            raise _Restart

    def _axis_of_sink(self, index: Index) -> Axis | None:
        """The axis that an index is, if it is one of what is stored."""
        if len(index.terms) != 1 or index != Index.over(axis := index.terms[0][0]):
            return None
        return axis if self._is_of_sink(axis) else None

    def _is_of_sink(self, axis: Axis) -> bool:
        """A dimension of what is stored, or a part of one."""
        key = self._keys[axis]
        return key[:2] == ("goal", self.goal) or (isinstance(key[0], Axis) and self._is_of_sink(key[0]))

    # ------------------------------------------------------------------ renaming
    def _rebuilt(self, sinks: Sequence[Sink], to: Mapping[Axis, Index]) -> list[Sink]:
        """The sinks with axes replaced, every term interned again."""
        full = {a: self.settled(Index.over(a).renamed(to)) for a in to}
        new: dict[Term, Term] = {}
        old, self._terms = below(t for s in sinks for t in s.terms), {}
        for term in old:
            args = tuple(new[a] for a in term.args)
            new[term] = self.term(term.op, *args, dtype=term.dtype, param=_renamed(term, full), node=term.node)
        return [_moved(s, full, new) for s in sinks]

    def renamed(self, sinks: Sequence[Sink], to: Mapping[Axis, Index]) -> list[Sink]:
        return self._rebuilt(sinks, to) if to else list(sinks)


def _renamed(term: Term, to: Mapping[Axis, Index]) -> Any:
    param = term.param
    if term.op == "load":
        return Access(param.ref, param.place.renamed(to), param.indirect)
    if term.op == "index":
        return param.renamed(to)
    return _renamed_axes(param, to) if term.op in (*REDUCTIONS, *SCANS, "spread") else param


def _renamed_axes(axes: Iterable[Axis], to: Mapping[Axis, Index]) -> tuple[Axis, ...]:
    leaves = (a for axis in axes for a in to.get(axis, Index.over(axis)).walked)
    return tuple(sorted(dict.fromkeys(leaves), key=lambda a: a.order))


def _moved(sink: Sink, to: Mapping[Axis, Index], new: Mapping[Term, Term]) -> Sink:
    place = sink.place.renamed(to)
    place = Index(place.terms, place.offset, tuple((new[v], c) for v, c in place.values))
    return Sink(sink.ref, new[sink.value], place, _renamed_axes(sink.axes, to), sink.dtype, sink.mode, sink.node)


# ---------------------------------------------------------------------- what each primitive is, at an index
Place = tuple[Index, ...]
Guards = tuple[Term, ...]


def _elementwise(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    args = [b.at(a, index, guards) for a in node.args]
    return b.term(node.prim, *args, dtype=node.dtype, node=node)


def _full(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    return b.const(node.params["value"], node.dtype)


def _iota(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    counted = b.index(index[0])
    return counted if node.dtype == "i64" else b.term("cast", counted, dtype=node.dtype, node=node)


def _input(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    return b.load(Memory(Ref("input", node.params["index"]), node.params["strides"], node.dtype), index, guards, node)


def _broadcast(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    (x,) = node.args
    return b.at(x, [Index() if n == 1 else index[a] for n, a in zip(x.shape, node.params["axes"], strict=True)], guards)


def _permute(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    place = dict(zip(node.params["perm"], index, strict=True))
    return b.at(node.args[0], [place[d] for d in range(len(index))], guards)


def _slice(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    steps = zip(index, node.params["start"], node.params["step"], strict=True)
    return b.at(node.args[0], [i * step + start for i, start, step in steps], guards)


def _flip(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    flipped = node.params["axes"]
    turned = [i * -1 + (n - 1) if d in flipped else i for d, (i, n) in enumerate(zip(index, node.shape, strict=True))]
    return b.at(node.args[0], turned, guards)


def _pad(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    """where(the place is inside x, x there, 0), loads guarded."""
    (x,) = node.args
    places, tests = [], []
    for i, n, lo, inner in zip(index, x.shape, node.params["lo"], node.params["inner"], strict=True):
        place, found = _inside(b, i + (-lo if isinstance(lo, int) else tidy(-lo)), n, inner)
        places.append(place)
        tests.extend(found)
    value = b.at(x, places, (*guards, *tests))
    return _chosen(b, tests, value, b.const(0, node.dtype), node)


def _inside(b: Builder, place: Index, size: Size, inner: int) -> tuple[Index, list[Term]]:
    """The place in x of a place in its padded self, and what has to hold for it to be there."""
    zero = b.const(0, "i64")
    bounds = place.bounds()
    reach = tidy((size - 1) * (inner + 1))
    tests = []
    if bounds is None or not nonnegative(bounds[0]):
        tests.append(b.term("ge", b.index(place), zero, dtype="b1"))
    if bounds is None or not nonnegative(tidy(reach - bounds[1])):
        tests.append(b.term("le", b.index(place), b.const(reach, "i64"), dtype="b1"))
    if not inner:
        return place, tests
    step = b.const(inner + 1, "i64")
    tests.append(b.term("eq", b.term("rem", b.index(place), step, dtype="i64"), zero, dtype="b1"))
    return Index(values=((b.term("floordiv", b.index(place), step, dtype="i64"), 1),)), tests


def _chosen(b: Builder, tests: Sequence[Term], value: Term, otherwise: Term, node: Value) -> Term:
    if not tests:
        return value
    return b.term("where", _all(b, tests), value, otherwise, dtype=node.dtype, node=node)


def _all(b: Builder, tests: Sequence[Term]) -> Term:
    together = tests[0]
    for test in tests[1:]:
        together = b.term("and", together, test, dtype="b1")
    return together


def _cat(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    """A piece where the place provably lies in it, else a chain of choices with guarded loads."""
    axis = node.params["axis"]
    sizes = tuple(x.shape[axis] for x in node.args)
    starts = [tidy(sum(sizes[:k])) for k in range(len(sizes) + 1)]
    place = index[axis]
    for x, start, size in zip(node.args, starts, sizes, strict=False):
        shifted = place + tidy(-start)
        if shifted.within(size):
            return b.at(x, (*index[:axis], shifted, *index[axis + 1 :]), guards)
    if not guards:
        b.pieces(place, sizes)
    return _cat_chain(b, node, index, guards, starts)


def _cat_chain(b: Builder, node: Value, index: Place, guards: Guards, starts: list[Size]) -> Term:
    axis = node.params["axis"]
    value: Term | None = None
    for k in reversed(range(len(node.args))):
        low = b.term("ge", b.index(index[axis]), b.const(starts[k], "i64"), dtype="b1")
        high = b.term("lt", b.index(index[axis]), b.const(starts[k + 1], "i64"), dtype="b1")
        tests = ((low,) if k else ()) + ((high,) if k < len(node.args) - 1 else ())
        place = (*index[:axis], index[axis] + tidy(-starts[k]), *index[axis + 1 :])
        piece = b.at(node.args[k], place, (*guards, *tests))
        value = piece if value is None else b.term("where", high, piece, value, dtype=node.dtype, node=node)
    assert value is not None
    return value


def _reshape(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    """Flatten the index, then take it apart again along the operand's dimensions, refining axes where it helps."""
    (x,) = node.args
    flat = Index()
    for i, n in zip(index, node.shape, strict=True):
        flat = flat * n + i
    places: list[Index] = []
    for n in reversed(x.shape[1:]):
        flat, last = _divided(b, b.settled(flat), n)
        places.insert(0, last)
    return b.at(x, [flat, *places] if x.shape else [], guards)


def _divided(b: Builder, place: Index, size: Size) -> tuple[Index, Index]:
    """(place // size, place % size)."""
    if size == 1:
        return place, Index()
    if not place.values and (exact := _radix(place, size)) is not None:
        return exact
    if not place.values:
        _refine_for(b, place, size)
    whole, divisor = b.index(place), b.const(size, "i64")
    quotient = b.term("floordiv", whole, divisor, dtype="i64")
    return Index(values=((quotient, 1),)), Index(values=((b.term("rem", whole, divisor, dtype="i64"), 1),))


def _radix(place: Index, size: Size) -> tuple[Index, Index] | None:
    """Quotient and remainder term by term, where the remainder provably stays below size."""
    outer, inner = Index(), Index()
    for axis, coefficient in place.terms:
        quotient = divide(coefficient, size)
        if quotient is not None:
            outer = outer + Index.over(axis) * quotient
        else:
            inner = inner + Index.over(axis) * coefficient
    quotient = divide(place.offset, size)
    outer, inner = (outer + quotient, inner) if quotient is not None else (outer, inner + place.offset)
    return (outer, inner) if inner.within(size) else None


def _refine_for(b: Builder, place: Index, size: Size) -> None:
    """Split the axis that straddles a multiple of `size`, if it divides."""
    for axis, coefficient in place.terms:
        per = divide(size, coefficient if nonnegative(coefficient) else tidy(-coefficient))
        if per is None or per == 1 or not longer_than_one(per):
            continue
        quotient = divide(axis.size, per)
        if quotient is not None and quotient != 1 and not same(axis.size, per):
            b.refine(axis, per)


def longer_than_one(size: Size) -> bool:
    return not isinstance(size, int) or size > 1


def _reduce(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    b.plain(node, index)
    (x,) = node.args
    axes = node.params["axes"]
    kept = iter(index)
    own = {d: _reduced(b, node, d, x.shape[d]) for d in axes}
    arg = b.whole(x, [own[d] if d in own else next(kept) for d in range(x.ndim)])
    over = [a for d in axes for a in b.settled(own[d]).walked]
    return _folded(b, node, arg, over)


def _reduced(b: Builder, node: Value, dim: int, size: Size) -> Index:
    return Index() if size == 1 else Index.over(b.axis(("over", node.id, dim), size))


def _folded(b: Builder, node: Value, arg: Term, over: list[Axis]) -> Term:
    """The reduction of a term; a sum along an axis that the term does not know is a multiplication."""
    if any(a.size == 0 for a in over):
        return b.const(lowest(node.prim, node.dtype), node.dtype)
    absent = [a for a in over if a not in arg.axes]
    if absent and node.prim == "sum" and all(positive(a.size) for a in absent):
        over = [a for a in over if a in arg.axes]
        times = b.const(product(a.size for a in absent), node.dtype)
        total = _folded(b, node, arg, over)
        return b.term("mul", total, times, dtype=node.dtype, node=node)
    if absent:
        arg = b.term("spread", arg, dtype=arg.dtype, param=tuple(absent), node=node)
    if not over:
        return arg
    return b.term(node.prim, arg, dtype=node.dtype, param=tuple(sorted(over, key=lambda a: a.order)), node=node)


def _dot(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    """sum(x * y): what a product is, and how it is known (`codegen.products`); it is never formed."""
    b.plain(node, index)
    x, y = node.args
    x_axes, y_axes, out_axes = (node.params[p] for p in ("x_axes", "y_axes", "out_axes"))
    place = dict(zip(out_axes, index, strict=True))
    sizes = dict(zip((*x_axes, *y_axes), (*x.shape, *y.shape), strict=True))
    summed = [label for label in sizes if label not in place]
    place |= {label: _reduced(b, node, label, sizes[label]) for label in summed}
    factors = [b.whole(v, [place[label] for label in axes]) for v, axes in ((x, x_axes), (y, y_axes))]
    over = sorted({a for label in summed for a in b.settled(place[label]).walked}, key=lambda a: a.order)
    product_ = b.term("mul", *factors, dtype=node.dtype, node=node)
    return b.term("sum", product_, dtype=node.dtype, param=tuple(over), node=node)


def _cumsum(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    (x,) = node.args
    if node.shape[node.params["axis"]] == 1:
        return b.at(x, index)
    b.plain(node, index)
    along = b.settled(index[node.params["axis"]])
    if len(along.terms) != 1:
        raise Materialize([x] if x.prim != "input" and x.id not in b.memory else [node])
    ((axis, _),) = along.terms
    arg = b.whole(x, index)
    if axis not in arg.axes:
        arg = b.term("spread", arg, dtype=arg.dtype, param=(axis,), node=node)
    op = "cumsum_reverse" if node.params["reverse"] else "cumsum"
    return b.term(op, arg, dtype=node.dtype, param=(axis,), node=node)


def _gather(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    x, *positions = node.args
    rank, axes = positions[0].ndim, node.params["axes"]
    found = {a: Index(values=((b.at(p, index[:rank], guards), 1),)) for a, p in zip(axes, positions, strict=True)}
    others = iter(index[rank:])
    place = [b.as_i64(found[d]) if d in found else next(others) for d in range(x.ndim)]
    return b.at(x, place, guards)


def _random(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    seed, offset = (b.at(a, ()) for a in node.args)
    flat = Index()
    for i, n in zip(index, node.shape, strict=True):
        flat = flat * n + i
    counter = b.term("add", offset, b.index(flat), dtype="i64")
    return b.term("random", seed, counter, dtype=node.dtype, param=node.params["kind"], node=node)


def _scattered(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    raise Materialize([node])


Rule = Callable[[Builder, Value, Place, Guards], Term]
rules: dict[str, Rule] = {
    "input": _input,
    "full": _full,
    "iota": _iota,
    "broadcast": _broadcast,
    "permute": _permute,
    "slice": _slice,
    "flip": _flip,
    "pad": _pad,
    "cat": _cat,
    "reshape": _reshape,
}
family_rules: dict[str, Rule] = {
    "elementwise": _elementwise,
    "reduce": _reduce,
    "contract": _dot,
    "scan": _cumsum,
    "gather": _gather,
    "scatter": _scattered,
    "random": _random,
}
