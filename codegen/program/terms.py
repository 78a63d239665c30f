"""Tables of axes and terms: an axis by its key, refined into two where a reshape asks for it; equal terms are one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ...ir import Value
from ...ir.types import Size, contiguous_strides
from ..kernel import Buffer, Ref
from .axes import REDUCTIONS, SCANS, Access, Axis, Index, Memory, Sink, Term, Turn, terms_below
from .sizes import divide, same, tidy


class Restart(Exception):
    """An axis was refined while its values were being built: all of them are to be built again."""


def is_zero(term: Term) -> bool:
    """The constant zero."""
    return term.op == "const" and term.param == 0


def with_whole_values(place: Index) -> Index:
    """(v // d) * d + v % d  ->  v, as where a row-major tensor is read at a place along dimensions that were joined."""
    scales = dict(place.values)
    for rest, scale in place.values:
        if rest.op != "rem":
            continue
        whole, divisor = rest.args
        quotient = next((v for v in scales if v.op == "floordiv" and v.args == rest.args), None)
        if quotient is not None and divisor.op == "const" and same(tidy(divisor.param * scale), scales[quotient]):
            others = tuple((v, c) for v, c in place.values if v not in (rest, quotient))
            return with_whole_values(Index(place.terms, place.offset, others) + _place_of(whole) * scale)
    return place


def _place_of(number: Term) -> Index:
    """An integer as a place: its affine part apart."""
    if number.op == "index":
        return number.param  # type: ignore[no-any-return]
    if number.op == "add":
        return _place_of(number.args[0]) + _place_of(number.args[1])
    return Index(values=((number, 1),))


class AxisTable:
    """The axes by their keys, and those that were refined into (outer, inner)."""

    def __init__(self) -> None:
        self.refined: dict[Axis, Index] = {}
        self._axes: dict[Any, Axis] = {}
        self._keys: dict[Axis, Any] = {}

    def axis(self, key: Any, size: Size, turn: Turn | None = None) -> Axis:
        """The axis known by `key`."""
        if key not in self._axes:
            self._axes[key] = Axis(size, len(self._axes), turn)
            self._keys[self._axes[key]] = key
        return self._axes[key]

    def settled(self, place: Index) -> Index:
        """The place in terms of axes that were not refined further."""
        while any(a in self.refined for a, _ in place.terms):
            place = place.renamed(self.refined)
        return place

    def walked(self, index: Iterable[Index]) -> tuple[Axis, ...]:
        """The axes that an index runs over, dimension by dimension."""
        return tuple(a for i in index for a in self.settled(i).walked)

    def halves(self, axis: Axis, inner: Size, outer: Size) -> Index:
        """axis  ->  outer axis * inner + inner axis"""
        pair = self.axis((axis, "outer"), outer), self.axis((axis, "inner"), inner)
        return Index.over(pair[0]) * inner + Index.over(pair[1])

    def refine(self, axis: Axis, inner: Size) -> None:
        """Divide an axis for good. Every term built so far is stale."""
        outer = divide(axis.size, inner)
        assert outer is not None
        self.refined[axis] = self.halves(axis, inner, outer)
        raise Restart

    def replace(self, axis: Axis, place: Index) -> NoReturn:
        """An axis is a place along others from now on. Every term built so far is stale."""
        self.refined[axis] = place
        raise Restart

    def is_of_goal(self, axis: Axis, goal: int) -> bool:
        """A dimension of what a goal stores, or a part of one."""
        key = self._keys[axis]
        return key[:2] == ("goal", goal) or (isinstance(key[0], Axis) and self.is_of_goal(key[0], goal))


class TermTable:
    """The terms of one kernel, interned, over its axes."""

    def __init__(self) -> None:
        self.axes = AxisTable()
        self._terms: dict[Any, Term] = {}

    def clear(self) -> None:
        self._terms = {}

    def make(self, op: str, *args: Term, dtype: str, param: Any = None, node: Value | None = None) -> Term:
        key = (op, args, dtype, repr(param) if op == "const" else param)
        if key not in self._terms:
            self._terms[key] = Term(op, args, dtype, param, len(self._terms), node)
        return self._terms[key]

    def const(self, number: Any, dtype: str) -> Term:
        return self.make("const", dtype=dtype, param=number)

    def test(self, op: str, a: Term, b: Term) -> Term:
        return self.make(op, a, b, dtype="b1")

    def integer(self, op: str, a: Term, b: Term) -> Term:
        return self.make(op, a, b, dtype="i64")

    def cast(self, term: Term, dtype: str, node: Value | None = None) -> Term:
        """The term itself where it has the dtype."""
        return term if term.dtype == dtype else self.make("cast", term, dtype=dtype, node=node)

    def index(self, place: Index, dtype: str = "i64") -> Term:
        """The integer that a place is."""
        place = self.axes.settled(place)
        total = self.make("index", dtype=dtype, param=Index(place.terms, place.offset))
        if not place.terms:
            total = self.const(place.offset, dtype)
        for value, coefficient in place.values:
            scaled = value if coefficient == 1 else self.integer("mul", value, self.const(coefficient, "i64"))
            is_zero = not place.terms and place.offset == 0 and total.op == "const"
            total = scaled if is_zero else self.integer("add", total, scaled)
        return total

    def load(self, memory: Memory, index: Sequence[Index], guards: tuple[Term, ...], node: Value) -> Term:
        """The element of a buffer; its guards are dropped where the index is provably inside."""
        place = with_whole_values(self.axes.settled(Index.linear(index, memory.strides)))
        safe = all(self.axes.settled(i).is_within(n) for i, n in zip(index, node.shape, strict=True))
        values = tuple(v for v, _ in place.values)
        access = Access(memory.ref, Index(place.terms, place.offset), tuple(c for _, c in place.values))
        loaded = self.make("load", *values, *(() if safe else guards), dtype=memory.dtype, param=access, node=node)
        return self.cast(loaded, node.dtype, node)

    def as_i64(self, index: Index) -> Index:
        """An index whose values are 64 bits wide, constants folded into the offset."""
        wide = Index(index.terms, index.offset)
        for value, coefficient in index.values:
            if value.op == "const":
                wide = wide + value.param * coefficient
            else:
                wide = wide + Index(values=((self.cast(value, "i64"), coefficient),))
        return wide

    # ------------------------------------------------------------------ other arguments
    def again(self, term: Term, args: tuple[Term, ...]) -> Term:
        """The same operation of other arguments."""
        if args == term.args:
            return term
        return self.make(term.op, *args, dtype=term.dtype, param=term.param, node=term.node)

    def replaced(self, roots: Iterable[Term], values: Mapping[Term, Term]) -> dict[Term, Term]:
        """Every term below the roots, with others in the place of some."""
        new: dict[Term, Term] = {}
        for term in terms_below(roots):
            new[term] = values[term] if term in values else self.again(term, tuple(new[a] for a in term.args))
        return new

    def without_zeros(self, root: Term) -> Term:
        """x + 0 -> x: what is added to a sum, which begins with 0.0, may be -0.0 or 0.0."""
        new: dict[Term, Term] = {}
        for term in terms_below([root]):
            args = tuple(new[a] for a in term.args)
            rest = [a for a in args if not is_zero(a)]
            is_sum = term.op == "add" and len(rest) < 2
            new[term] = (rest or args)[0] if is_sum else self.again(term, args)
        return new[root]

    # ------------------------------------------------------------------ renaming
    def moved(self, term: Term, to: Mapping[Axis, Index]) -> Term:
        """The term at another place."""
        new: dict[Term, Term] = {}
        for t in terms_below([term]):
            new[t] = self.moved_of(t, tuple(new[a] for a in t.args), to)
        return new[term]

    def moved_of(self, term: Term, args: tuple[Term, ...], to: Mapping[Axis, Index]) -> Term:
        """The same operation at another place, of other arguments."""
        return self._placed(term, args, to, lambda place: place.renamed(to))

    def _placed(
        self, term: Term, args: tuple[Term, ...], to: Mapping[Axis, Index], place_of: Callable[[Index], Index]
    ) -> Term:
        """The same operation at another place; an index along no axis is a constant."""
        if term.op == "index":
            return self.index(place_of(term.param), term.dtype)
        return self.make(term.op, *args, dtype=term.dtype, param=_param(term, to, place_of), node=term.node)

    def renamed(self, sinks: Sequence[Sink], to: Mapping[Axis, Index]) -> list[Sink]:
        """The sinks with axes replaced, every term interned again."""
        full = {a: self.axes.settled(Index.over(a).renamed(to)) for a in to}
        return self._rewritten(sinks, full, lambda place: place.renamed(full))

    def merged(self, sinks: Sequence[Sink], p: Axis, q: Axis, size: Size) -> list[Sink]:
        """p, q  ->  one axis: the stride of q is its stride, p disappears."""
        to = {p: Index(), q: Index.over(self.axes.axis((p, q, "merged"), size))}
        return self._rewritten(sinks, to, lambda place: replace(place.renamed(to), values=place.values))

    def _rewritten(
        self, sinks: Sequence[Sink], to: Mapping[Axis, Index], place_of: Callable[[Index], Index]
    ) -> list[Sink]:
        new: dict[Term, Term] = {}
        terms, self._terms = terms_below(t for s in sinks for t in s.terms), {}
        for term in terms:
            new[term] = self._placed(term, tuple(new[a] for a in term.args), to, place_of)
        return [replace(s, place=place_of(s.place), axes=_axes(s.axes, to)).of_terms(new) for s in sinks]


def _param(term: Term, to: Mapping[Axis, Index], place_of: Callable[[Index], Index]) -> Any:
    if term.op == "load":
        return replace(term.param, place=place_of(term.param.place))
    if term.op == "moved":
        return term.param[0], place_of(term.param[1])
    return _axes(term.param, to) if term.op in (*REDUCTIONS, *SCANS, "spread") else term.param


def _axes(axes: Iterable[Axis], to: Mapping[Axis, Index]) -> tuple[Axis, ...]:
    leaves = (a for axis in axes for a in to.get(axis, Index.over(axis)).walked)
    return tuple(sorted(dict.fromkeys(leaves), key=lambda a: a.order))


@dataclass(frozen=True)
class Temporary:
    """Memory between kernels: a value at each place along its axes, the last one fastest. `node`: where it is from."""

    number: int
    label: str
    dtype: str
    axes: tuple[Axis, ...]
    node: Value | None

    @property
    def ref(self) -> Ref:
        return Ref("temporary", self.number)

    @property
    def strides(self) -> tuple[Size, ...]:
        return contiguous_strides(tuple(a.size for a in self.axes))

    @property
    def buffer(self) -> Buffer:
        return Buffer(f"{self.label}_{self.number}", self.dtype, tuple(a.size for a in self.axes), self.strides)

    @property
    def place(self) -> Index:
        return Index.linear([Index() if a.size == 1 else Index.over(a) for a in self.axes], self.strides)

    def store(self, value: Term, node: Value) -> Sink:
        return Sink(self.ref, value, self.place, self.axes, self.dtype, "store", node)

    def load(self, table: TermTable) -> Term:
        return table.make("load", dtype=self.dtype, param=Access(self.ref, self.place), node=self.node)
