"""Fewer axes: one name for axes that walk the same memory, then for axes of one size; then neighbours become one axis.

x[i, j], sum over k of x[i, k]   ->  k is j           x[p, q] everywhere at stride(p) = size(q) * stride(q)  ->  x[pq]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from ...ir.switches import is_on
from ...ir.types import Size
from .axes import REDUCTIONS, SCANS, Axis, Index, Program, Sink, Term, axes_mentioned, terms_below
from .sizes import divide, longer_than_one, same, tidy
from .terms import AxisTable, TermTable


def unify(terms: TermTable, sinks: list[Sink]) -> list[Sink]:
    # refine first: loads of the same memory in runs of different lengths have no axes to join
    while (finer := _refinement(terms.axes, sinks)) is not None:
        sinks = terms.renamed(sinks, finer)
    # join before merging: axes of several names are no neighbours of one another
    joined = _Joined(sinks)
    for one, two in _alike(sinks):
        joined.try_all(one, two)
    if mapping := joined.mapping():
        sinks = terms.renamed(sinks, mapping)
    while is_on("merge") and (pair := _neighbours(sinks)) is not None:
        p, q = pair
        sinks = terms.merged(sinks, p, q, tidy(p.size * q.size))
    return sinks


def with_nested_sums(table: TermTable, sinks: Sequence[Sink], inside: Mapping[Term, Term]) -> list[Sink]:
    """sum over rows and columns of x  ->  sum over rows of the sum over columns, where the program has that anyway."""
    new: dict[Term, Term] = {}
    for term in terms_below(t for s in sinks for t in s.terms):
        args, param = tuple(new[a] for a in term.args), term.param
        if (part := inside.get(term)) is not None:
            args = (table.make(part.op, *args, dtype=part.dtype, param=part.param, node=part.node),)
            param = tuple(a for a in term.param if a not in part.param)
        new[term] = table.make(term.op, *args, dtype=term.dtype, param=param, node=term.node)
    return [s.of_terms(new) for s in sinks]


def _refinement(axes: AxisTable, sinks: Sequence[Sink]) -> dict[Axis, Index] | None:
    """An axis to divide, because another load walks the same memory with the same stride in shorter runs."""
    terms = terms_below(t for s in sinks for t in s.terms)
    scanned = {a for t in terms if t.op in SCANS for a in t.param}
    loads = [t.param for t in terms if t.op == "load"]
    for long in loads:
        for short in loads:
            if long.ref != short.ref or long is short:
                continue
            for axis, stride in long.place.terms:
                inner = next((a.size for a, c in short.place.terms if same(c, stride)), axis.size)
                if axis not in scanned and longer_than_one(inner) and (outer := _shorter(axis, inner)) is not None:
                    return {axis: axes.halves(axis, inner, outer)}
    return None


def _shorter(axis: Axis, inner: Size) -> Size | None:
    outer = divide(axis.size, inner)
    return None if outer is None or outer == 1 else outer


class _Joined:
    """A union of axes: two may join unless some value varies along both."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sets = {frozenset(s.axes) | s.value.axes | s.place.axes for s in sinks}
        self.sets |= {frozenset(axes_mentioned(t)) | _over(t) for t in terms_below(t for s in sinks for t in s.terms)}
        self.axes = sorted(frozenset().union(*self.sets), key=lambda a: a.order)
        self.into: dict[Axis, Axis] = {}

    def find(self, axis: Axis) -> Axis:
        while axis in self.into:
            axis = self.into[axis]
        return axis

    def fits(self, a: Axis, b: Axis) -> bool:
        return same(a.size, b.size) and not any(a in s and b in s for s in self.sets)

    def try_all(self, one: Sequence[Axis], two: Sequence[Axis]) -> None:
        """Join pairwise, all or none."""
        before = (dict(self.into), set(self.sets))
        for a, b in zip(one, two, strict=True):
            a, b = self.find(a), self.find(b)
            if a is b:
                continue
            if not self.fits(a, b):
                self.into, self.sets = before
                return
            keep, drop = sorted((a, b), key=lambda axis: axis.order)
            self.into[drop] = keep
            self.sets = {frozenset(keep if x is drop else x for x in s) for s in self.sets}

    def mapping(self) -> dict[Axis, Index]:
        return {a: Index.over(self.find(a)) for a in self.axes if self.find(a) is not a}


def _over(term: Term) -> frozenset[Axis]:
    return term.args[0].axes if term.op in REDUCTIONS else frozenset()


def _alike(sinks: Sequence[Sink]) -> Iterator[tuple[list[Axis], list[Axis]]]:
    """Candidates for joining, most telling first: same buffer and place, same stride in it, same strides, same size."""
    terms = terms_below(t for s in sinks for t in s.terms)
    loads = sorted((t for t in terms if t.op == "load"), key=lambda t: -len(t.param.place.terms))
    ranked = [(t.param.ref, _by_stride(t.param.place)) for t in loads]
    ranked += [(s.ref, _by_stride(s.place)) for s in sinks]
    pairs = list(combinations(ranked, 2))
    for alike in ([pair for pair in pairs if pair[0][0] == pair[1][0]], pairs):
        for (_, one), (_, two) in alike:
            if [c for _, c in one] == [c for _, c in two]:
                yield [a for a, _ in one], [a for a, _ in two]
        for (_, one), (_, two) in alike:
            yield from (([a], [b]) for a, c in one for b, d in two if same(c, d) and same(a.size, b.size))
    yield from (([a], [b]) for a, b in combinations(_Joined(sinks).axes, 2))


def _by_stride(place: Index) -> list[tuple[Axis, Size]]:
    return sorted(place.terms, key=lambda t: (str(t[1]), t[0].order))


def _neighbours(sinks: Sequence[Sink]) -> tuple[Axis, Axis] | None:
    """Two axes that every access treats as one: stride(p) = stride(q) * size(q) wherever either occurs."""
    program = Program(sinks)
    places = [t.param.place for t in program.terms if t.op == "load"]
    places += [t.param for t in program.terms if t.op == "index"] + [s.place for s in sinks]
    sets = [set(t.param) for t in program.terms if t.op in (*REDUCTIONS, *SCANS, "spread")] + [
        set(s.axes) for s in sinks
    ]
    scanned = {a for t in program.terms if t.op in SCANS for a in t.param}
    strides = [dict(p.terms) for p in places]
    for p in program.axes:
        for q in program.axes:
            if p is not q and not {p, q} & scanned and _one_axis(p, q, strides, sets):
                return p, q
    return None


def _one_axis(p: Axis, q: Axis, strides: Sequence[Mapping[Axis, Size]], sets: Sequence[set[Axis]]) -> bool:
    if any((p in s) != (q in s) for s in sets):
        return False
    return all((p in s) == (q in s) and (p not in s or same(s[p], s[q] * q.size)) for s in strides)
