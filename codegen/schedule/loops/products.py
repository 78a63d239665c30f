"""Products with what is carried: the sum over k of h[i, k] * w[k, j] has h as a tile, whose lanes are j and k by turns.

    sum over k of mul(f(state[i, k]), w[j, k])   ->   matmul(f(state[i, j]), w[j, k]) along k
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...kernel import Ref
from ...program.axes import Axis, Index, Sink, Term, terms_below
from ...program.loops import HELD, STATE
from ...program.sizes import same
from ...program.terms import TermTable


def with_products(table: TermTable, sinks: Sequence[Sink]) -> list[Sink]:
    """The sinks with products of matrices in the place of sums that read a state along another axis than its own."""
    places = {s.ref: s.place for s in sinks if s.ref.kind in (STATE, HELD)}
    new: dict[Term, Term] = {}
    todo = [t for s in reversed(sinks) for t in s.terms]
    while todo:
        term = todo[-1]
        if term in new:
            todo.pop()
            continue
        # the operand of a product is asked for at its own place, and nothing in it anywhere else
        made = _product(table, term, places) or term
        if missing := [a for a in made.args if a not in new]:
            todo += missing
            continue
        new[todo.pop()] = _rebuilt(table, made, new)
    return [s.of_terms(new) for s in sinks]


def _rebuilt(table: TermTable, term: Term, new: Mapping[Term, Term]) -> Term:
    args = tuple(new[a] for a in term.args)
    return table.make(term.op, *args, dtype=term.dtype, param=term.param, node=term.node)


def _product(table: TermTable, term: Term, places: Mapping[Ref, Index]) -> Term | None:
    """The product that a sum is."""
    if term.op != "sum" or len(term.param) != 1 or term.args[0].op != "mul":
        return None
    (depth,) = term.param
    sides = [(factor, _other_axis(factor, depth, places)) for factor in term.args[0].args]
    across = [(factor, axis) for factor, axis in sides if axis is not None]
    if not across:
        return None
    if len(across) == 2:
        return None
    ((tile, column),) = across
    matrix = next(f for f, axis in sides if axis is None)
    is_matrix = column in matrix.axes and matrix.axes <= {depth, column, *_steps(matrix)}
    # without rows, or with more than a matrix, it is a sum over a tile in which what is carried is turned
    if not is_matrix or tile.axes <= {depth, column, *_steps(tile)}:
        return None
    own = table.moved(tile, {depth: Index.over(column)})
    return table.make("matmul", own, matrix, dtype=term.dtype, param=depth, node=term.node)


def _steps(term: Term) -> set[Axis]:
    return {a for a in term.axes if a.turn}


def _other_axis(factor: Term, depth: Axis, places: Mapping[Ref, Index]) -> Axis | None:
    """The axis that a state has where this factor reads it along `depth`."""
    found: set[Axis] = set()
    for load in (t for t in terms_below([factor]) if t.op == "load" and t.param.ref in places):
        strides = dict(load.param.place.terms)
        own = places[load.param.ref]
        if depth in strides and depth not in own.walked:
            found |= {a for a, c in own.terms if same(c, strides[depth]) and same(a.size, depth.size)}
    return found.pop() if len(found) == 1 else None
