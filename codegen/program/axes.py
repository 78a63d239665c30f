"""An ir.Graph as a program over named axes: every value is a function of the axes it varies along, nothing else.

    y = x - x.sum(1)      sink y[i, j] = sub(load x {i: N, j: 1}, sum over j of load x {i: N, j: 1})

Layout primitives vanish into index arithmetic: a value is asked for *at an index*, one `Index` per dimension, and a
permute, slice, flip or reshape asks its operand at another index. Equal questions have one answer (hash-consing), so
what is shared in the mathematics is shared in the kernel. Merging two axes is a renaming: it is legal when no value
varies along both, and it only ever decides how fast the kernel is, never what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from ...ir import Value
from ...ir.types import ITEMSIZE, Size
from ..kernel import Ref
from .sizes import divide, divmod_sizes, nonnegative, tidy

REDUCTIONS = ("sum", "prod", "amax", "amin")
SCANS = ("cumsum", "cumsum_reverse")


class Materialize(Exception):
    """These values have to be materialised before the kernel that wants them, or `otherwise` these, where they are."""

    def __init__(self, nodes: Iterable[Value], otherwise: Iterable[Value] = ()) -> None:
        self.nodes, self.otherwise = tuple(dict.fromkeys(nodes)), tuple(dict.fromkeys(otherwise))


Turn: TypeAlias = Literal["forward", "backward"]


class Axis:
    """A loop variable 0 .. size-1. Identity is identity; `order` makes every listing deterministic.

    turn: of an axis whose steps come one after the other, in which direction. It is neither joined nor divided.
    """

    __slots__ = ("name", "order", "size", "turn")

    def __init__(self, size: Size, order: int, turn: Turn | None = None) -> None:
        self.size, self.order, self.turn, self.name = size, order, turn, ""

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

    @staticmethod
    def linear(index: Iterable[Index], strides: Iterable[Size]) -> Index:
        """The place in memory of an index."""
        place = Index()
        for i, stride in zip(index, strides, strict=True):
            place = place + i * stride
        return place

    @staticmethod
    def row_major(index: Iterable[Index], shape: Iterable[Size]) -> Index:
        """The number of an element, the last dimension fastest."""
        place = Index()
        for i, n in zip(index, shape, strict=True):
            place = place * n + i
        return place

    def __add__(self, addend: Index | Size) -> Index:
        if not isinstance(addend, Index):
            return Index(self.terms, tidy(self.offset + addend), self.values)
        terms, values = _summed((*self.terms, *addend.terms)), _summed((*self.values, *addend.values))
        return Index(terms, tidy(self.offset + addend.offset), values)

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
        """The parts that stay the same when axes are renamed."""
        return tuple((a.size, c) for a, c in self.terms), self.offset, self.values

    def renamed(self, to: Mapping[Axis, Index]) -> Index:
        """The same place with axes replaced; `values` are left alone."""
        if not any(a in to for a, _ in self.terms):
            return self
        moved = Index()
        for axis, coefficient in self.terms:
            if axis in to:
                moved = moved + to[axis] * coefficient
        kept = Index(tuple((axis, c) for axis, c in self.terms if axis not in to), self.offset, self.values)
        return kept + moved

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

    def is_within(self, size: Size) -> bool:
        """Provably in 0 .. size-1 (an axis of size zero is never walked)."""
        bounds = self.bounds()
        return bounds is not None and nonnegative(bounds[0]) and nonnegative(tidy(size - 1 - bounds[1]))

    def is_beyond(self, size: Size) -> bool:
        """Provably outside 0 .. size-1, wherever it is."""
        bounds = self.bounds()
        return bounds is not None and (nonnegative(tidy(-1 - bounds[1])) or nonnegative(tidy(bounds[0] - size)))

    def divmod(self, size: Size) -> tuple[Index, Index] | None:
        """Quotient and remainder term by term, where the remainder provably stays below size."""
        return self._divided(size, _whole_part) or self._divided(size, divmod_sizes)

    def _divided(self, size: Size, part: Callable[[Size, Size], tuple[Size, Size]]) -> tuple[Index, Index] | None:
        """The same by what of each coefficient is a quotient, and what is left of it."""
        quotient, rest = part(self.offset, size)
        outer, inner = Index(offset=quotient), Index(offset=rest)
        for axis, coefficient in self.terms:
            quotient, rest = part(coefficient, size)
            outer, inner = outer + Index.over(axis) * quotient, inner + Index.over(axis) * rest
        return (outer, inner) if inner.is_within(size) else None


def _whole_part(coefficient: Size, size: Size) -> tuple[Size, Size]:
    """All of it or nothing."""
    quotient = divide(coefficient, size)
    return (0, coefficient) if quotient is None else (quotient, 0)


def _summed(pairs: Iterable[tuple[Any, Size]]) -> tuple[tuple[Any, Size], ...]:
    """Each key once, in order, with the sum of its coefficients."""
    total: dict[Any, Size] = {}
    for key, coefficient in pairs:
        total[key] = total[key] + coefficient if key in total else coefficient
    found = ((key, tidy(c)) for key, c in total.items())
    return tuple(sorted(((key, c) for key, c in found if c != 0), key=lambda kc: kc[0].order))


class Term:
    """A value of the axis program.

    op     load    param (ref, place, indirect)   args: the values in `place`, then the guards
           index   param place                    an integer expression of axes
           const   param number or sympy expression
           spread  param axes                     the argument, made to vary along more axes
           sum prod amax amin cumsum   param axes
           random  param kind                     args: seed, place
           check_index                            args: an index, the size that it is below, then the guards
       matmul  param the summed axis          args: tiles [rows, its lanes] and [the axis, columns]
       moved   param (axis, place along it)    the argument's other lanes: element `place` for the element at the axis
       crossed param (axis, another)          the argument along another axis of that size, or both exchanged
       carried param reduction, or state      what it was before the turn of the loop that takes more in
       last    param state                    what it is when the loop is over
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
    if op == "matmul":
        return below - {param}
    if op == "crossed":
        return frozenset(dict(zip(param, reversed(param), strict=True)).get(a, a) for a in below)
    if op in ("carried", "last") and param is not None:
        return frozenset(param.axes)
    return below | {a for a, _ in param.terms} if op == "index" else below


@dataclass(frozen=True, slots=True)
class Access:
    """The source of a load: element `place` of a buffer. Its values are the load's first `indirect` arguments."""

    ref: Ref
    place: Index
    indirect: tuple[Size, ...] = ()


@dataclass(frozen=True, slots=True)
class Sink:
    """A store of `value` to element `place` of a buffer, for every point of `axes`; "add" is an atomic addition.

    goal: the number of the goal that it is a part of; -1 where it is of none. within: conditions under which it is.
    by: the bin that each element of a tile is added to, which is a place along the last axis.
    """

    ref: Ref
    value: Term
    place: Index
    axes: tuple[Axis, ...]
    dtype: str
    mode: Literal["store", "set", "add"]
    node: Value
    goal: int = -1
    within: tuple[Term, ...] = ()
    by: Term | None = None

    @property
    def terms(self) -> tuple[Term, ...]:
        return (self.value, *(v for v, _ in self.place.values), *self.within, *([self.by] if self.by else []))

    def of_terms(self, new: Mapping[Term, Term]) -> Sink:
        """The sink of other terms."""
        values = tuple((new[v], c) for v, c in self.place.values)
        within = tuple(new[t] for t in self.within)
        by = None if self.by is None else new[self.by]
        return replace(self, value=new[self.value], place=replace(self.place, values=values), within=within, by=by)


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a materialised value lives."""

    ref: Ref
    strides: tuple[Size, ...]
    dtype: str


class Part(NamedTuple):
    """The places start .. start + size - 1 along one dimension of a value."""

    dim: int
    start: Size
    size: Size


@dataclass(frozen=True, slots=True)
class Goal:
    """One thing that a kernel has to write: `node` into memory, a part of it, or the contributions of a scatter.

    piece: of a concatenation, what is in that part. whole: what the node is that part of, where all of it is made.
    """

    node: Value
    memory: Memory
    scatter: bool = False
    part: Part | None = None
    piece: Value | None = None
    whole: Value | None = None


class Traffic(NamedTuple):
    """A load or a store: elements of `place` that move, for every point of `axes`. `sink`: None for a load.

    `plain`: it has no indices or conditions of its own.
    """

    ref: Ref
    place: Index
    axes: frozenset[Axis]
    itemsize: int
    plain: bool
    sink: Sink | None = None


class Program:
    """The sinks of one kernel, over unified axes; `roots`: what they read, once for each of them.

    `cached`: loads that find in L2 what the kernel has read or written before.
    """

    cached: frozenset[Term] = frozenset()

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = tuple(sinks)
        self.roots = tuple(t for s in self.sinks for t in s.terms)
        self.terms = terms_below(self.roots)
        axes = {a for s in self.sinks for a in s.axes}.union(*(axes_mentioned(t) for t in self.terms))
        self.axes = tuple(sorted(axes, key=lambda a: a.order))

    @property
    def counted(self) -> tuple[Term, ...]:
        """The terms whose bytes and operations count."""
        return self.terms

    def traffic(self) -> Iterator[Traffic]:
        for t in self.terms:
            if t.op == "load":
                yield Traffic(t.param.ref, t.param.place, t.axes, ITEMSIZE[t.dtype], not t.args)
        for s in self.sinks:
            plain = not s.place.values and not s.within and s.mode == "store"
            yield Traffic(s.ref, s.place, frozenset(s.axes), ITEMSIZE[s.dtype], plain, s)


def axes_mentioned(term: Term) -> set[Axis]:
    return set(term.axes) | (set(term.param) if term.op in (*REDUCTIONS, *SCANS) else set())


def terms_below(roots: Iterable[Term], ends: Container[Term] = ()) -> tuple[Term, ...]:
    """Every term under the roots, arguments first; nothing below `ends`."""
    ordered: dict[Term, None] = {}
    todo = [(root, False) for root in reversed(list(roots))]
    while todo:
        term, ready = todo.pop()
        if term in ordered:
            continue
        if ready:
            ordered[term] = None
        else:
            todo.append((term, True))
            todo.extend((a, False) for a in reversed(term.args if term not in ends else ()) if a not in ordered)
    return tuple(ordered)
