"""Sums of what is zero but at one place along an axis: the value at that place, which is read there alone.

sum over j of where(j == t[i], f(x[i, j]), 0)   ->   where(0 <= t[i] < n, f(x[i, t[i]]), 0)
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...ir.prims import PRIMS
from ...ir.types import Size
from .axes import Access, Axis, Index, Term, terms_below
from .loops import REGISTERS
from .sizes import tidy
from .terms import TermTable

ODD = frozenset("neg abs sqrt tanh sin tan asin atan sinh asinh atanh erf expm1 log1p cast".split())
"""Functions of one number that are zero at zero."""


def value_at_one_place(terms: TermTable, summed: Term, axis: Axis) -> Term | None:
    """The sum of a term along an axis, where all but one of its elements are zeros by a comparison; else None."""
    place = _place_of_one(summed, axis)
    if place is None:
        return None
    here = terms.cast(place, "i64")
    bounds = _bounds(terms, here, axis)
    value = _at(terms, summed.args[1], axis, here, bounds)
    if value is None or not bounds or _is_zero_at_zeros(value, bounds):
        return value
    inside = terms.test("and", *bounds)
    return terms.make("where", inside, value, summed.args[2], dtype=summed.dtype, node=summed.node)


def _bounds(terms: TermTable, place: Term, axis: Axis) -> tuple[Term, ...]:
    """What has to hold of a place on the axis; nothing where that is asserted."""
    if place.op == "check_index" and place.args[1].param == axis.size:
        return ()
    return terms.test("ge", place, terms.const(0, "i64")), terms.test("lt", place, terms.const(axis.size, "i64"))


def _place_of_one(summed: Term, axis: Axis) -> Term | None:
    """t of where(axis == t, .., 0), which does not vary along the axis."""
    if summed.op != "where" or summed.args[0].op != "eq":
        return None
    zero = summed.args[2]
    for number, place in (summed.args[0].args, summed.args[0].args[::-1]):
        # Narrower numbers, and floats, are equal at more places than one
        walked = number.args[0] if number.op == "cast" and number.dtype == "i32" else number
        is_number = walked.op == "index" and walked.param == Index.over(axis)
        if is_number and axis not in place.axes and zero.op == "const" and zero.param == 0:
            return place
    return None


def _at(terms: TermTable, value: Term, axis: Axis, place: Term, bounds: tuple[Term, ...]) -> Term | None:
    """The value where the axis is at a place, loads only within the bounds; None where that is more than to read it."""
    moved: dict[Term, Term] = {}
    for term in terms_below([value]):
        args = tuple(moved.get(a, a) for a in term.args)
        if axis not in term.axes:
            continue
        if term.op == "load" and term.param.ref.kind in REGISTERS:
            return None  # what a loop carries is in no memory
        if term.op == "load":
            moved[term] = _load_at(terms, term, args, axis, place, bounds)
        elif term.op == "index":
            moved[term] = terms.index(_moved(term.param, axis, place), term.dtype)
        elif term.op == "random" or (term.op in PRIMS and PRIMS[term.op].family == "elementwise"):
            moved[term] = terms.make(term.op, *args, dtype=term.dtype, param=term.param, node=term.node)
        else:
            return None
    return moved.get(value, value)


def _moved(index: Index, axis: Axis, place: Term) -> Index:
    along = dict(index.terms).get(axis, 0)
    return replace(index, terms=tuple(t for t in index.terms if t[0] is not axis)) + Index(values=((place, along),))


def _load_at(
    terms: TermTable, load: Term, args: tuple[Term, ...], axis: Axis, place: Term, bounds: tuple[Term, ...]
) -> Term:
    """The element of the buffer, under the guards of the load and the bounds of the place."""
    access, count = load.param, len(load.param.indirect)
    values: dict[Term, Size] = dict(zip(args[:count], access.indirect, strict=True))
    along = dict(access.place.terms).get(axis, 0)
    if along != 0:
        values[place] = tidy(values.get(place, 0) + along)
    affine = Index(tuple(t for t in access.place.terms if t[0] is not axis), access.place.offset)
    guards = tuple(dict.fromkeys((*args[count:], *bounds)))
    param = Access(access.ref, affine, tuple(values.values()))
    return terms.make("load", *values, *guards, dtype=load.dtype, param=param, node=load.node)


def _is_zero_at_zeros(value: Term, bounds: tuple[Term, ...]) -> bool:
    """Zero where the bounds are not kept, since what is loaded under them is."""
    if value.op == "load":
        return set(bounds) <= set(value.args[len(value.param.indirect) :])
    if value.op in ("mul", "div"):
        return _is_finite(value.args[1]) and _is_zero_at_zeros(value.args[0], bounds)
    return value.op in ODD and _is_zero_at_zeros(value.args[0], bounds)


def _is_finite(factor: Term) -> bool:
    """A number other than zero."""
    number = factor.param if factor.op == "const" else None
    return isinstance(number, (int, float)) and math.isfinite(number) and number != 0
