"""What sums over pairs are summed along is an axis of their own: a tile goes through it one place after the other.

    d[i, j] = sum over k of (x[i, k] - y[j, k]) ** 2;   d @ z[j, k]    ->    the k of z are columns, and another axis

What is summed within a side, as x / x.norm(-1), keeps its axis: it is whole in a tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...program.axes import Axis, Index, Sink, Term, terms_below
from ...program.sizes import Hints, evaluate_size
from ...program.terms import TermTable
from ..separation.algebra import is_tile_product
from .roles import Roles, virtual_products

UNROLLED = 16
"""Places that are written out by the compiler, at most."""


def few_places(roles: Roles, hints: Hints) -> list[Axis]:
    """The axes of sums over pairs that are short enough to be written out."""
    return [a for a in roles.places if evaluate_size(a.size, hints) <= UNROLLED]


def with_own_places(table: TermTable, sinks: Sequence[Sink], virtual: frozenset[int]) -> list[Sink]:
    """The sinks, sums over pairs along axes that nothing else has."""
    roots = [t for s in sinks for t in s.terms]
    terms = terms_below(roots)
    pairs = {t for t in virtual_products(terms, virtual) if not is_tile_product(t)}
    if not pairs:
        return list(sinks)
    new: dict[Term, Term] = {}
    for term in terms:
        made = table.again(term, tuple(new[a] for a in term.args))
        new[term] = _along_places(table, made) if term in pairs else made
    return [s.of_terms(new) for s in sinks]


def _along_places(table: TermTable, total: Term) -> Term:
    own = {a: table.axes.axis((a, "places"), a.size) for a in total.param}
    (body,) = total.args
    moved = _moved(table, body, {a: Index.over(place) for a, place in own.items()})
    return table.make(total.op, moved, dtype=total.dtype, param=tuple(own.values()), node=total.node)


def _moved(table: TermTable, root: Term, to: Mapping[Axis, Index]) -> Term:
    """The term at other places of axes that vary in it, not of those that are summed within it."""
    new: dict[Term, Term] = {}
    for term in terms_below([root]):
        args = tuple(new[a] for a in term.args)
        new[term] = table.moved_of(term, args, to) if term.axes & to.keys() else term
    return new[root]
