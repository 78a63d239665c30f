"""Say the same in fewer nodes: common subexpressions, dead code, constants, exact algebra, layout.

Every identity holds bit for bit, for NaN, infinities and signed zeros too: x + (-0.0) is x, x + 0.0 is not (-0.0 + 0.0
is 0.0); 0 * x stays. A cast down and up again rounds, so it stays. The one licence taken is the order of float32 sums.

The first pass, so that later ones meet few forms of one program; again after `Contract`, which leaves layout behind.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from ..graph import Graph, Value
from ..loops.tidy import in_bodies
from ..rewrite import Number, Op, Rule, Rules, X, Y, Z, join_rules, make, number_of, rebuild, rules
from ..switches import switch_state
from ..types import FLOAT8, FLOATS, INTEGERS, UNSIGNED
from .identities.constants import constants
from .identities.flattened import flattened
from .identities.lone_pieces import lone_pieces
from .identities.made import made
from .identities.places import places
from .identities.regions import regions
from .index_checks import index_checks
from .layout import layout


@dataclass(frozen=True)
class Simplify:
    """Graph -> an equal graph in normal form, with as few nodes as the rules find."""

    rounds: int = 4

    def __call__(self, graph: Graph) -> Graph:
        graph = in_bodies(graph, self)
        for _ in range(self.rounds):
            size, graph = len(graph.order()), rebuild(graph, rules_without(switch_state().off))
            if len(graph.order()) == size:
                break
        return graph


# ------------------------------------------------------------------------------------------------------- algebra
def _node(prim: str) -> Callable[..., Op]:
    return lambda *args: Op(prim, args)


neg, abs_, not_, add, sub, mul, div = map(_node, ("neg", "abs", "not", "add", "sub", "mul", "div"))
max_, min_, and_, or_, xor, pow_, where = map(_node, ("max", "min", "and", "or", "xor", "pow", "where"))
eq, ne = map(_node, ("eq", "ne"))


def _keep(x: Value, *rest: Value) -> Value:
    return x


def _int(prim: str) -> Callable[..., Op]:
    """The pattern on integers and booleans only."""
    return lambda *args: Op(prim, args, lambda v: v.dtype in (*INTEGERS, "b1"))


def _filled(x: Value, number: bool | int | float) -> Value:
    return make("full", value=number, shape=x.shape, dtype=x.dtype)


ONE, ZERO, MINUS_ZERO, MINUS_ONE = Number(1), Number(0), Number(-0.0), Number(-1)

algebra: Rules = rules(
    (neg(neg(X)), _keep),
    (neg(sub(MINUS_ZERO, X)), _keep),
    (abs_(abs_(X)), lambda x: make("abs", x)),
    (abs_(neg(X)), lambda x: make("abs", x)),
    (not_(not_(X)), _keep),
    (not_(eq(X, Y)), lambda x, y: make("ne", x, y)),
    (not_(ne(X, Y)), lambda x, y: make("eq", x, y)),
    (add(X, MINUS_ZERO), _keep),
    (add(MINUS_ZERO, X), _keep),
    (_int("add")(X, ZERO), _keep),
    (_int("add")(ZERO, X), _keep),
    (add(X, neg(Y)), lambda x, y: make("sub", x, y)),
    (add(neg(X), Y), lambda x, y: make("sub", y, x)),
    (sub(X, ZERO), _keep),
    (sub(MINUS_ZERO, X), lambda x: make("neg", x)),
    (sub(X, neg(Y)), lambda x, y: make("add", x, y)),
    (_int("sub")(X, X), lambda x: _filled(x, 0)),
    (mul(X, ONE), _keep),
    (mul(ONE, X), _keep),
    (mul(X, MINUS_ONE), lambda x: make("neg", x)),
    (mul(MINUS_ONE, X), lambda x: make("neg", x)),
    (mul(neg(X), neg(Y)), lambda x, y: make("mul", x, y)),
    (_int("mul")(X, ZERO), lambda x: _filled(x, 0)),
    (_int("mul")(ZERO, X), lambda x: _filled(x, 0)),
    (div(X, ONE), _keep),
    (div(X, MINUS_ONE), lambda x: make("neg", x)),
    (div(neg(X), neg(Y)), lambda x, y: make("div", x, y)),
    (_int("floordiv")(X, ONE), _keep),
    (max_(X, X), _keep),
    (min_(X, X), _keep),
    (and_(X, X), _keep),
    (or_(X, X), _keep),
    (_int("xor")(X, X), lambda x: _filled(x, 0)),
    (xor(X, ZERO), _keep),
    (or_(X, ZERO), _keep),
    (or_(ZERO, X), _keep),
    (and_(X, ZERO), lambda x: _filled(x, 0)),
    (and_(ZERO, X), lambda x: _filled(x, 0)),
    (Op("and", (X, ONE), lambda v: v.dtype == "b1"), _keep),
    (Op("and", (ONE, X), lambda v: v.dtype == "b1"), _keep),
    (Op("or", (X, ONE), lambda v: v.dtype == "b1"), lambda x: _filled(x, True)),
    (Op("or", (ONE, X), lambda v: v.dtype == "b1"), lambda x: _filled(x, True)),
    (where(ONE, X, Y), _keep),
    (where(ZERO, X, Y), lambda x, y: y),
    (where(X, Y, Y), lambda c, y: y),
    (where(not_(X), Y, Z), lambda c, y, z: make("where", c, z, y)),
    (Op("where", (X, ONE, ZERO), lambda v: v.dtype == "b1"), _keep),
    (Op("where", (X, ZERO, ONE), lambda v: v.dtype == "b1"), lambda c: make("not", c)),
)


# --------------------------------------------------------------------------------------------- powers and quotients
def power(value: Value) -> Value | None:
    """pow(x, 2) -> mul(x, x), and the other constant exponents that torch computes without pow.

    The special cases are torch's own for a number as exponent: they are what eager computes.
    """
    base, exponent = value.args
    number = number_of(exponent)
    if number is None or number not in POWERS:
        return None
    exact = value.dtype in ("f32", "f64") or number in (0, 1, 2)
    integral = value.dtype in INTEGERS and number in (0, 1, 2, 3)
    return POWERS[number](base) if (value.dtype in FLOATS and exact) or integral else None


POWERS: dict[float, Callable[[Value], Value]] = {
    0: lambda x: _filled(x, 1),
    1: lambda x: x,
    2: lambda x: make("mul", x, x),
    3: lambda x: make("mul", make("mul", x, x), x),
    -1: lambda x: make("reciprocal", x),
}
SMALLEST_EXPONENT = {"f16": -14, "bf16": -126, "f32": -126, "f64": -1022}


def quotient(value: Value) -> Value | None:
    """div(x, 8)  ->  mul(x, 0.125)   the reciprocal of a power of two is exact, and so is the product"""
    number = number_of(value.args[1])
    if number is None or value.dtype not in FLOATS or number == 0 or not math.isfinite(number):
        return None
    mantissa, exponent = math.frexp(number)
    if abs(mantissa) != 0.5 or abs(exponent - 1) > -SMALLEST_EXPONENT[value.dtype]:
        return None
    return make("mul", value.args[0], _filled(value.args[0], 1.0 / number))


# --------------------------------------------------------------------------------------------------------- casts
def _holders() -> dict[str, set[str]]:
    """For each dtype, those that hold every one of its values."""
    integers = {
        "b1": (0, 1), "u8": (0, 8), "u16": (0, 16), "u32": (0, 32), "u64": (0, 64),
        "i8": (1, 7), "i16": (1, 15), "i32": (1, 31), "i64": (1, 63),
    }  # fmt: skip
    mantissa = {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}
    holders = {d: {e for e, (t, m) in integers.items() if t >= s and m >= n} for d, (s, n) in integers.items()}
    for dtype, (_, bits) in integers.items():
        holders[dtype] |= {f for f, digits in mantissa.items() if bits <= digits}
    wider = {"f16": {"f32", "f64"}, "bf16": {"f32", "f64"}, "f32": {"f64"}, "f64": set[str]()}
    return holders | wider | {f8: {"f32", "f64"} for f8 in FLOAT8}


HOLDERS = _holders()


def cast(value: Value) -> Value | None:
    """cast(cast(x, wider), dtype)  ->  cast(x, dtype)   where nothing is lost on the way"""
    (source,) = value.args
    if source.dtype == value.dtype:
        return source
    if source.prim != "cast":
        return None
    first = source.args[0]
    if source.dtype not in HOLDERS.get(first.dtype, ()) or not _converts_alike(first.dtype, source.dtype, value.dtype):
        return None
    return make("cast", first, dtype=value.dtype)


def _converts_alike(first: str, middle: str, last: str) -> bool:
    """first -> last is middle -> last on the values of `first`: not where a float becomes a narrow integer."""
    if last == first or last in HOLDERS.get(first, ()) or last in (*FLOATS, "b1"):
        return True
    return last in INTEGERS and first in (*INTEGERS, "b1") and middle in INTEGERS


def truth(value: Value) -> Value | None:
    """ne(cast(b, dtype), 0)  ->  b   for a boolean b"""
    left, right = value.args
    is_flag = left.prim == "cast" and left.args[0].dtype == "b1"
    return left.args[0] if is_flag and number_of(right) == 0 else None


def _same_if(dtypes: tuple[str, ...]) -> Callable[[Value], Value | None]:
    return lambda value: value.args[0] if value.dtype in dtypes else None


numbers: Rules = {
    "pow": (power,),
    "div": (quotient,),
    "cast": (cast,),
    "ne": (truth,),
    "abs": (_same_if((*UNSIGNED, "b1")),),
    "conj": (_same_if((*FLOATS, *INTEGERS, "b1")),),
    **{prim: (_same_if((*INTEGERS, "b1")),) for prim in ("floor", "ceil", "round", "trunc")},
}

FAMILIES: dict[str, Rules] = {
    "constants": constants, "algebra": join_rules(algebra, places), "numbers": numbers, "index_checks": index_checks,
    "layout": join_rules(layout, made, lone_pieces, flattened), "regions": regions,
}  # fmt: skip
"""The rules by the name under which they can be left out; those of an earlier family are tried first."""


def family_of(rule: Rule, prim: str) -> str | None:
    """The name of the family that a rule for a primitive belongs to."""
    return next((name for name, table in FAMILIES.items() if rule in table.get(prim, ())), None)


@functools.lru_cache(maxsize=64)
def rules_without(off: frozenset[str]) -> Rules:
    """The rules that are left."""
    return join_rules(*(table for name, table in FAMILIES.items() if name not in off))
