"""First-order linear recurrences: a step makes `a * h + b` of what is carried, where a and b are known without it.

Then steps are associative: many are taken at once, (a, b) then (c, d) being (a * c, c * b + d). Found from what a step
computes, whatever it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ....ir.types import LOW_FLOATS
from ...program.axes import Term, terms_below
from ...program.terms import TermTable
from .roles import LoopProgram, LoopState

FLOATS = ("f16", "bf16", "f32", "f64")
BETWEEN_LANES = ("moved", "crossed", "matmul")
"""What lanes read of one another is made step by step."""


class Linear(NamedTuple):
    """factor * h + rest; None is zero."""

    factor: Term | None
    rest: Term | None


def recurrences_of(table: TermTable, program: LoopProgram) -> dict[LoopState, Linear] | None:
    """Each state's own recurrence, if all have one, in an order in which each reads earlier ones alone."""
    if any(t.op in BETWEEN_LANES for t in program.terms):
        return None
    found: dict[LoopState, Linear] = {}
    todo = list(program.states)
    while todo:
        ready = [s for s in todo if _reads(s) <= {o.before for o in found} | {s.before}]
        if not ready:
            return None
        for state in ready:
            linear = linear_in(table, state.update.value, state.before)
            if linear is None or state.dtype not in FLOATS:
                return None
            found[state] = linear
            todo.remove(state)
    return found


def _reads(state: LoopState) -> set[Term]:
    return {t for t in terms_below([state.update.value]) if t.op == "carried"}


def added_to(program: LoopProgram, state: LoopState) -> Term | None:
    """What every step adds to a state that is read once the last step is over, and not before; None for others."""
    update, before = state.update.value, state.before
    if update.op != "add" or before not in update.args or state.dtype in LOW_FLOATS:
        return None
    read = {t for s in program.sinks for t in s.terms} | {s.update.value for s in program.states if s is not state}
    read |= {a for t in program.terms if t is not update for a in t.args}
    added = [a for a in update.args if a is not before]
    return added[0] if len(added) == 1 and not read & {before, update} else None


def is_multiplied(state: LoopState) -> bool:
    """A step does not just add something to it."""
    update = state.update.value
    return update.op != "add" or state.before not in update.args


def linear_in(table: TermTable, term: Term, carried: Term) -> Linear | None:
    """What a term is as a function of what is carried; None where it is not linear."""
    known: dict[Term, Linear | None] = {}
    for t in terms_below([term]):
        args = [known[a] for a in t.args]
        if t is carried:
            known[t] = Linear(table.const(1, t.dtype), None)
        elif all(a is not None and a.factor is None for a in args):
            known[t] = Linear(None, t)
        elif any(a is None for a in args) or t.op not in _rules:
            known[t] = None
        else:
            known[t] = _rules[t.op](table, t, [a for a in args if a is not None])
    return known[term]


Rule = Callable[[TermTable, Term, "list[Linear]"], "Linear | None"]


def _sum(table: TermTable, term: Term, args: list[Linear]) -> Linear:
    """The sum, or difference, of factors and of rests; what is zero leaves the other."""
    return Linear(*(_added(table, term, *pair) for pair in zip(*args, strict=True)))


def _added(table: TermTable, term: Term, x: Term | None, y: Term | None) -> Term | None:
    if x is not None and y is not None:
        return table.make(term.op, x, y, dtype=term.dtype, node=term.node)
    if y is None or term.op == "add":
        return x if y is None else y
    return table.make("neg", y, dtype=term.dtype, node=term.node)


def _of(table: TermTable, term: Term, args: tuple[Term | None, ...]) -> Term:
    dtypes = [a.dtype for a in term.args]
    filled = [table.const(0, d) if a is None else a for a, d in zip(args, dtypes, strict=True)]
    return table.make(term.op, *filled, dtype=term.dtype, param=term.param, node=term.node)


def _same(table: TermTable, term: Term, args: list[Linear]) -> Linear:
    """The same of factor and rest."""
    (x,) = args
    return Linear(*(None if part is None else _of(table, term, (part,)) for part in x))


def _times(table: TermTable, term: Term, args: list[Linear]) -> Linear | None:
    (x, y) = args
    if x.factor is not None and y.factor is not None:
        return None
    line, by = (x, y.rest) if x.factor is not None else (y, x.rest)
    assert by is not None
    return Linear(*(None if a is None else _product(table, term, a, by) for a in line))


def _product(table: TermTable, term: Term, a: Term, by: Term) -> Term:
    if a.op == "const" and a.param == 1:
        return by
    return table.make("mul", a, by, dtype=term.dtype, node=term.node)


def _divided(table: TermTable, term: Term, args: list[Linear]) -> Linear | None:
    x, by = args
    divisor = by.rest
    if by.factor is not None or divisor is None:
        return None
    quotients = [None if a is None else table.make("div", a, divisor, dtype=term.dtype, node=term.node) for a in x]
    return Linear(*quotients)


def _chosen(table: TermTable, term: Term, args: list[Linear]) -> Linear | None:
    condition, *sides = args
    if condition.factor is not None:
        return None
    pairs = zip(*sides, strict=True)
    return Linear(*(None if x is y is None else _of(table, term, (condition.rest, x, y)) for x, y in pairs))


def _converted(table: TermTable, term: Term, args: list[Linear]) -> Linear | None:
    is_float = term.dtype in FLOATS and term.args[0].dtype in FLOATS
    return _same(table, term, args) if is_float else None


_rules: dict[str, Rule] = {
    "add": _sum, "sub": _sum, "neg": _same, "mul": _times, "div": _divided, "where": _chosen, "cast": _converted,
    "spread": _same,
}  # fmt: skip
