"""Numbers made of a dim's size, where the dim is divided: on a part they are made of the part's size.

    y = (x * x).sum(0) * (1 / n)      n rows on this rank, of N: the share of this rank is n / N

A value has a degree where  share**degree * (the value on a part)  is what it would be with the whole size in the place
of the part's: 1 / n has degree 1, and so has y, so that each rank's y times its share is its part of the whole mean.
Sums and layouts keep the degree, products add it, comparisons lose it; whatever else a size gets into, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import sympy

from ..errors import FusegradError
from ..graph import Graph, Value
from ..rewrite import number_of
from ..text.text import plain_sympy
from ..transforms.extern import op_name, source_place
from ..types import COMPLEX, FLOATS

Degree: TypeAlias = "Fraction | None"
"""None of a value that any factor leaves as it is: zero, or infinite."""
NONE = Fraction(0)
SIZED = "computes with its size"


class NotDivisible(FusegradError):
    """A dim cannot be divided among ranks: a node needs all of it. Internal: the runtime tells what it means."""

    speaks = "inside"
    message = "{why}"


def refusal(node: Value, why: str) -> NotDivisible:
    """The error, with the user's operation and its line."""
    at = source_place(node)
    return NotDivisible(why=f"`{op_name(node)}` {why}" + ("" if at == "unknown" else f" ({at})"))


def mentions(param: Any, symbol: sympy.Symbol) -> bool:
    """True if a symbol is in a parameter of a node."""
    if isinstance(param, tuple):
        return any(mentions(p, symbol) for p in param)
    return isinstance(param, sympy.Basic) and symbol in param.free_symbols


def degrees(
    graph: Graph, symbol: sympy.Symbol, input_degrees: Mapping[int, Fraction] | None = None
) -> tuple[Fraction, ...]:
    """The degree of each output that there is. Raises NotDivisible, naming the node.

    input_degrees: of inputs by number, where they are not 0.
    """
    by_value: dict[int, Degree] = {v.id: (input_degrees or {}).get(i, NONE) for i, v in enumerate(graph.inputs)}
    for node in graph.order():
        operands = [by_value[a.id] for a in node.args]
        by_value[node.id] = _degree(node, operands, symbol)
    return tuple(_checked_degree(o, by_value[o.id]) for o in graph.outputs if o is not None)


def _checked_degree(value: Value, degree: Degree) -> Fraction:
    if degree and value.dtype not in (*FLOATS, *COMPLEX):
        raise refusal(value, SIZED)
    return degree or NONE


def _degree(node: Value, operands: Sequence[Degree], symbol: sympy.Symbol) -> Degree:
    if node.prim == "full":
        return _degree_of_full(node, symbol)
    if node.prim == "scan":
        return _degree_of_scan(node, operands, symbol)
    if any(operands):
        rule = degree_rules.get(node.prim)
        if rule is None:
            raise refusal(node, SIZED)
        return rule(node, operands)
    return NONE if any(d is not None for d in operands) or not operands else _degree_of_zeros(node)


def _degree_of_zeros(node: Value) -> Degree:
    """Of what is computed of zeros and infinities alone: whatever stays so."""
    return None if node.prim in KEEPS_ZEROS else NONE


def _degree_of_scan(node: Value, operands: Sequence[Degree], symbol: sympy.Symbol) -> Degree:
    """A step that computes with the size has another degree in each step."""
    if any(operands) or any(degrees(node.params["body"].graph, symbol)):
        raise refusal(node, SIZED)
    return NONE


def _degree_of_full(node: Value, symbol: sympy.Symbol) -> Degree:
    value = node.params["value"]
    if not mentions(value, symbol):
        number = number_of(node)
        return None if number is not None and (number == 0 or math.isinf(number)) else NONE
    factor, power = plain_sympy(value).as_coeff_exponent(symbol)
    if mentions(factor, symbol) or not power.is_Number or (node.dtype not in FLOATS and not value.is_integer):
        raise refusal(node, SIZED)
    return -Fraction(str(power))


# ---------------------------------------------------------------------------------------------- the rules
Rule: TypeAlias = "Callable[[Value, Sequence[Degree]], Degree]"
"""(the node, the degrees of its operands, one of which at least is not 0) -> the degree of its result."""


def _keep_first(node: Value, degrees: Sequence[Degree]) -> Degree:
    return degrees[0]


def _common_degree(node: Value, degrees: Sequence[Degree]) -> Degree:
    """The degree that operands share which are added, compared or concatenated."""
    present = {d for d in degrees if d is not None}
    if len(present) > 1:
        raise refusal(node, "puts what is computed with its size beside what is not")
    return next(iter(present), None)


def _comparison(node: Value, degrees: Sequence[Degree]) -> Degree:
    _common_degree(node, degrees)
    return NONE


def _product(node: Value, degrees: Sequence[Degree]) -> Degree:
    return None if None in degrees else sum((d for d in degrees if d is not None), NONE)


def _quotient(node: Value, degrees: Sequence[Degree]) -> Degree:
    above, below = degrees
    return None if above is None or below is None else above - below


def _power(node: Value, degrees: Sequence[Degree]) -> Degree:
    number = number_of(node.args[1])
    if number is None or degrees[0] is None or not math.isfinite(number):
        raise refusal(node, SIZED)
    return degrees[0] * Fraction(number)


def _times(factor: Fraction) -> Rule:
    return lambda node, degrees: None if degrees[0] is None else factor * degrees[0]


def _where(node: Value, degrees: Sequence[Degree]) -> Degree:
    return _common_degree(node, degrees[1:])


def _cast(node: Value, degrees: Sequence[Degree]) -> Degree:
    """A conversion to integers rounds."""
    if node.dtype not in (*FLOATS, *COMPLEX):
        raise refusal(node, SIZED)
    return degrees[0]


def _gather(node: Value, degrees: Sequence[Degree]) -> Degree:
    _require_none(node, degrees[1:])
    return degrees[0]


def _scatter(node: Value, degrees: Sequence[Degree]) -> Degree:
    _require_none(node, degrees[2:])
    return _common_degree(node, degrees[:2])


def _require_none(node: Value, degrees: Sequence[Degree]) -> None:
    if any(degrees):
        raise refusal(node, SIZED)


KEEPS = "neg conj abs broadcast reshape permute slice pad flip amax amin sum cumsum pick".split()
"""Share times the operand is share times the result."""
ALIKE = "add sub max min hypot cat".split()
LOSES = "eq ne lt le gt ge atan2".split()
KEEPS_ZEROS = (*KEEPS, "mul", "cast")
degree_rules: dict[str, Rule] = {
    **dict.fromkeys(KEEPS, _keep_first),
    **dict.fromkeys(ALIKE, _common_degree),
    **dict.fromkeys(LOSES, _comparison),
    **dict.fromkeys(("sign", "isnan", "isinf", "signbit", "argmax", "argmin"), lambda node, degrees: NONE),
    **dict.fromkeys(("mul", "dot"), _product),
    "div": _quotient,
    "reciprocal": _times(Fraction(-1)),
    "sqrt": _times(Fraction(1, 2)),
    "rsqrt": _times(Fraction(-1, 2)),
    "pow": _power,
    "where": _where,
    "cast": _cast,
    "gather": _gather,
    "scatter": _scatter,
}
