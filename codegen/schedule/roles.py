"""Roles of axes and reductions: what one program covers whole, what it walks, what is left for the grid.

    row    axes that one program covers whole, because a reduction over them is needed inside (at once, or in chunks)
    walk   axes that final reductions sum over: persistent programs walk them, the last to arrive adds the partial sums
    outer  all but the row: the grid, but for what is walked

A program that allows no roles is divided: `Materialize` and `Separate` say where.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ...ir.types import LOW_FLOATS
from ..program.axes import REDUCTIONS, Axis, Materialize, Sink, Term, terms_below
from .workload import Separate, Workload, nodes_of

STRIP = 256
"""Columns of a strip whose sums over the rows are wanted: wide accesses, few bytes of partial sums."""


@dataclass(frozen=True)
class AxisRoles:
    """Axes in loop order; reductions inside a program and over several programs, in the order of the terms."""

    row: tuple[Axis, ...]
    outer: tuple[Axis, ...]
    walk: tuple[Axis, ...]
    inner: tuple[Term, ...]
    final: tuple[Term, ...]

    @property
    def accumulators(self) -> list[Term]:
        """Final reductions that keep a row: a program has one in registers for each."""
        return [r for r in self.final if r.args[0].axes & set(self.row)]


def choose_roles(w: Workload) -> AxisRoles:
    # the row first: a reduction over nothing but row axes is inside, every other one is final
    row = row_axes(w)
    inner = tuple(r for r in w.reductions if set(r.param) <= row)
    final = tuple(r for r in w.reductions if not set(r.param) <= row)
    # before the walk: it takes for granted that a final reduction ends its part of the program
    _check_nothing_waits(w, final)
    outer = tuple(a for a in w.order if a not in row)
    walk = _walk(w, final, outer, row)
    return AxisRoles(tuple(a for a in w.order if a in row), outer, tuple(a for a in outer if a in walk), inner, final)


def nested_sums(w: Workload) -> dict[Term, Term]:
    """Sums whose program has a part of them anyway: {sum over rows and columns: sum over columns}."""
    row = row_axes(w)
    sums = [r for r in w.reductions if r.op == "sum"]
    inner = [r for r in sums if set(r.param) <= row and r.dtype not in LOW_FLOATS]
    nested: dict[Term, Term] = {}
    for r in sums:
        parts = [q for q in inner if q.args == r.args and set(q.param) < set(r.param)]
        if parts and not set(r.param) <= row:
            nested[r] = max(parts, key=lambda q: len(q.param))
    return nested


# ------------------------------------------------------------------ the row
def row_axes(w: Workload) -> set[Axis]:
    """Axes reduced inside: the result meets its own axes again, or enough items stay parallel anyway."""
    row: set[Axis] = {a for s in w.scans for a in s.param}
    for r in w.reductions:
        if _meets_its_axes(w, r):
            row |= set(r.param)
    # after those that have to be inside: what they cover is not parallel any more
    for r in w.reductions:
        if not set(r.param) <= row and _is_better_inside(w, r, row):
            row |= set(r.param)
    return row


def _meets_its_axes(w: Workload, r: Term) -> bool:
    """A value made of `r` varies along an axis that `r` reduces (or `r` is stored along one that it ignores)."""
    reduced = set(r.param)
    if any(t.axes & reduced and r in w.under[t] for t in w.program.terms):
        return True
    stored = w.sinks_of({r})
    return any(set(s.axes) & reduced or (s.node == r.node and set(s.axes) - r.axes) for s in stored)


def _is_better_inside(w: Workload, r: Term, row: set[Axis]) -> bool:
    """Enough other items stay parallel, and nothing else wants the axes in parallel, or they fit in registers."""
    parallel = w.elements(a for a in w.program.axes if a not in row and a not in r.param)
    along_vector = w.vector in r.param
    if parallel < w.budget.least_items * (1 if along_vector else 1024):
        return False
    short = w.padded(row | set(r.param)) * 4 <= w.budget.resident and w.is_pinnable(r.param)
    return _reduces_alone(w, r, row) or (along_vector and short)


def _reduces_alone(w: Workload, r: Term, row: set[Axis]) -> bool:
    """No sink or other reduction walks the axes of `r`."""
    reduced = set(r.param)
    if any(set(s.axes) & reduced for s in w.program.sinks):
        return False
    return not any(q.axes & reduced for q in w.reductions if q is not r and not set(q.param) <= row)


# ------------------------------------------------------------------ the walk
def _walk(w: Workload, final: Sequence[Term], outer: Sequence[Axis], row: set[Axis]) -> set[Axis]:
    """The outer axes that all final reductions sum over (or that a few sum over entirely)."""
    if not final:
        return set()
    reduced = {r: frozenset(r.param) - row for r in final}
    walk = min((reduced[r] for r in final), key=lambda axes: (len(axes), sorted(a.order for a in axes)))
    masked = all(a.size != 0 or a is w.vector for a in outer if a not in walk)
    for r in final:
        everything = reduced[r] == set(outer) and set(outer) <= r.args[0].axes and masked
        if not (walk <= r.args[0].axes and (reduced[r] == walk or everything)):
            separate(w, [r])
    return set(walk)


def separate(w: Workload, reductions: Sequence[Term]) -> NoReturn:
    """Move what depends on them to another kernel, or, where everything does, compute them beforehand."""
    dependent = w.sinks_of(set(reductions))
    if len(dependent) < len(w.program.sinks):
        raise Separate(dependent)
    raise Materialize(nodes_of(reductions))


# ------------------------------------------------------------------ checks
def _check_nothing_waits(w: Workload, final: Sequence[Term]) -> None:
    """Nothing inside the program may wait for a final reduction; an atomic sink may not either."""
    atomic = [t for s in w.program.sinks if s.mode != "store" for t in s.terms]
    waiting = [*w.reductions, *w.scans, *atomic]
    bad = [f for f in final if any(f in w.under[t] or (f is t and t not in w.reductions) for t in waiting)]
    if bad:
        raise Materialize(nodes_of(bad))


def of_few_long_rows(w: Workload, roles: AxisRoles) -> list[Term]:
    """Reductions of rows so few and long that a program for each would leave most of the device idle, the first ones.

    They are for kernels of their own, or for teams.
    """
    reused = [r for r in roles.inner if _meets_its_axes(w, r)]
    long = w.elements(roles.row) > w.budget.resident // 2
    few = long and w.elements(roles.outer) < w.budget.units // 4 and not w.scans
    return [r for r in reused if few and not any(q in w.under[r] for q in roles.inner)]


def check_finish(w: Workload, roles: AxisRoles, after: frozenset[Term], chunked: bool) -> None:
    """The finishing program stores what follows a final reduction, only along axes that the reduction keeps."""
    final, row = set(roles.final), set(roles.row)
    for sink in w.program.sinks:
        needed = [r for r in roles.final if any(r is t or r in w.under[t] for t in sink.terms)]
        if not needed:
            continue
        axes = set(sink.axes).union(*(t.axes for t in set(terms_below(sink.terms)) & after if t not in final))
        summed = set(needed[0].param) - row
        partial = [r for r in needed if axes - r.axes - _recomputed(w, roles, r) or set(r.param) - row != summed]
        lost = [t for t in _reached(sink, final) if chunked and t.op in REDUCTIONS]
        if partial or lost:
            raise Materialize(nodes_of(partial or lost))


def _recomputed(w: Workload, roles: AxisRoles, r: Term) -> set[Axis]:
    """Axes whose strips may each find a small sum for themselves: what they read for it is little, and in L2."""
    if roles.row or len(r.axes | set(r.param)) == len(w.program.axes):
        return set()
    missing = set(w.program.axes) - r.axes - set(r.param)
    strips = math.prod(-(-w.size[a] // (STRIP if a is w.vector else 1)) for a in missing)
    return missing if strips * w.bytes_read([r]) <= w.bytes_read(w.program.terms) // 16 else set()


def _reached(sink: Sink, final: set[Term]) -> Iterable[Term]:
    """The terms that a sink reaches without passing through a final reduction."""
    reached: dict[Term, None] = {}
    todo = list(sink.terms)
    while todo:
        term = todo.pop()
        if term not in final and term not in reached:
            reached[term] = None
            todo += term.args
    return reached
