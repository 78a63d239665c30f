"""Fewer axes: one name for axes that walk the same memory, then for axes of one size; then neighbours become one axis.

x[i, j], sum over k of x[i, k]   ->  k is j           x[p, q] everywhere at stride(p) = size(q) * stride(q)  ->  x[pq]
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from ...ir.switches import is_on
from ...ir.types import Size
from ..kernel import Ref
from .axes import REDUCTIONS, SCANS, Axis, Index, Program, Sink, Term, terms_below
from .joining import joined
from .sizes import divide, longer_than_one, same, tidy
from .terms import AxisTable, TermTable


def unify(terms: TermTable, sinks: list[Sink]) -> list[Sink]:
    # refine first: loads of the same memory in runs of different lengths have no axes to join
    while (finer := _refinement(terms.axes, sinks)) is not None:
        sinks = terms.renamed(sinks, finer)
    # join before merging: axes of several names are no neighbours of one another
    if mapping := joined(sinks).mapping():
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
    """An axis to divide, because the same memory is walked with the same stride in shorter runs elsewhere."""
    terms = terms_below(t for s in sinks for t in s.terms)
    scanned = {a for t in terms if t.op in SCANS for a in t.param}
    for long, short in _places_of_one_buffer(_walked(terms, sinks), scanned):
        for axis, stride in long.terms:
            inner = next((a.size for a, c in short.terms if same(c, stride)), axis.size)
            is_divisible = axis not in scanned and not axis.turn and longer_than_one(inner)
            if is_divisible and (outer := _shorter(axis, inner)) is not None:
                return {axis: axes.halves(axis, inner, outer)}
    return None


def _walked(terms: Iterable[Term], sinks: Iterable[Sink]) -> Iterator[tuple[Ref, Index]]:
    """What is read, where; what a loop carries also where it is stored: what is left of it is read along other axes."""
    yield from ((t.param.ref, t.param.place) for t in terms if t.op == "load")
    yield from ((s.ref, s.place) for s in sinks if s.ref.kind in ("state", "initial"))


def _places_of_one_buffer(
    walked: Iterable[tuple[Ref, Index]], scanned: set[Axis]
) -> Iterator[tuple[Index, Index]]:
    """Pairs of places of one buffer, in order; of places alike in sizes and strides, one says all."""
    kinds: dict[Ref, dict[Hashable, list[tuple[int, Index]]]] = {}
    for number, (ref, place) in enumerate(walked):
        kind = tuple((a.size, stride, a in scanned) for a, stride in place.terms)
        kinds.setdefault(ref, {}).setdefault(kind, []).append((number, place))
    read = [(places[0], places[1:2], alike) for alike in kinds.values() for places in alike.values()]
    for first, second, alike in sorted(read, key=lambda r: r[0][0]):
        others = [places[0] for places in alike.values() if places[0] is not first]
        yield from ((first[1], place) for _, place in sorted([*others, *second], key=lambda o: o[0]))


def _shorter(axis: Axis, inner: Size) -> Size | None:
    outer = divide(axis.size, inner)
    return None if outer is None or outer == 1 else outer


def _neighbours(sinks: Sequence[Sink]) -> tuple[Axis, Axis] | None:
    """Two axes that every access treats as one: stride(p) = stride(q) * size(q) wherever either occurs."""
    program = Program(sinks)
    places = [t.param.place for t in program.terms if t.op == "load"]
    places += [t.param for t in program.terms if t.op == "index"] + [s.place for s in sinks]
    strides = [dict(steps) for steps in dict.fromkeys(p.terms for p in places)]
    sets = [t.param for t in program.terms if t.op in (*REDUCTIONS, *SCANS, "spread")] + [s.axes for s in sinks]
    scanned = {a for t in program.terms if t.op in SCANS for a in t.param}
    for p, q in _always_together(program.axes, [*strides, *dict.fromkeys(sets)]):
        if not ({p, q} & scanned or p.turn or q.turn) and all(p not in s or same(s[p], s[q] * q.size) for s in strides):
            return p, q
    return None


def _always_together(axes: Sequence[Axis], sets: Iterable[Iterable[Axis]]) -> Iterator[tuple[Axis, Axis]]:
    """Pairs of axes that stand in the same sets."""
    within: dict[Axis, list[int]] = {a: [] for a in axes}
    for number, members in enumerate(sets):
        for axis in set(members):
            within[axis].append(number)
    alike: dict[tuple[int, ...], list[Axis]] = {}
    for axis in axes:
        alike.setdefault(tuple(within[axis]), []).append(axis)
    return ((p, q) for p in axes for q in alike[tuple(within[p])] if p is not q)
