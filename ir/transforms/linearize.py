"""Forward mode: (inputs, tangents of some) -> tangents of the outputs. A tangent that is None is zero.

Where a derivative is a matter of choice the rules choose as torch does: |x|, max and clamp at their kinks, pow at
zero, ties of amax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..errors import InvalidGraphError
from ..graph import Graph, Value, building, emit, provenance
from ..loops.forward_mode import push_scan
from ..prims import COMPARE, PREDICATES, Arg
from ..rewrite import name_of, nodes_between
from ..types import COMPLEX, LOW_FLOATS, Size, product
from .extern import NO_RULES, ExternRules, inline_rule, no_rule_error
from .linearity import linear, linear_positions
from .ops import (
    DIFFERENTIABLE,
    EXTERN,
    Result,
    cast,
    div,
    drop_unused_effects,
    eq,
    full,
    ge,
    gt,
    lt,
    mul,
    on_behalf_of,
    permute,
    plus,
    power,
    reshape,
    restore_axes,
    results_of,
    set_derived_name,
    sub,
    sum_over,
    sum_terms,
    where,
    zeros,
)


def linearize(
    graph: Graph, wrt: Sequence[int], rules: ExternRules = NO_RULES, *, with_primal: bool = False
) -> Graph:
    """(inputs, tangents of the inputs `wrt`) -> tangents of the outputs, after the outputs themselves `with_primal`.

    Tangents alone come from a graph without effects: it draws no random numbers again, and writes into no input.
    """
    if with_primal:
        return push_forward(graph, wrt, rules, with_primal=True)
    return require_no_draws("jvp", drop_unused_effects(push_forward(graph, wrt, rules)))


def push_forward(graph: Graph, wrt: Sequence[int], rules: ExternRules, *, with_primal: bool = False) -> Graph:
    """`linearize`, effects of the primal included.

    Where it writes into an input, the tangent is written into the input's tangent: the input must be among `wrt`.
    """
    if graph.mutations and not with_primal:
        raise InvalidGraphError("tangents alone are asked of a graph that writes into its inputs", node=graph.name)
    out = Graph(f"{graph.name}_jvp")
    env: dict[int, Any] = {v.id: out.input_like(v) for v in graph.inputs}
    # Tangents come behind all inputs, so that the primal's inputs keep their numbers.
    moving = [graph.inputs[i] for i in wrt]
    dot: dict[int, Any] = {v.id: out.input(v.aval, f"{v.params['name']}_dot") for v in moving}
    with building(out):
        for node in graph.order():
            with provenance(node.origin):
                args, dots = [env[a.id] for a in node.args], [dot.get(a.id) for a in node.args]
                if node.prim == "scan" and any(d is not None for d in dots):
                    env[node.id], dot[node.id] = push_scan(node, args, dots, partial(_push_body, rules))
                    continue
                # The primal first: a jvp rule may read its result.
                ans = env[node.id] = _primal(node, args)
            # No tangent is a structural zero: such a node gets none, and costs nothing.
            if any(d is not None for d in dots):
                with on_behalf_of(node):
                    dot[node.id] = tangent_of(node, dots, ans, args, rules)
                set_derived_name(dot[node.id] if isinstance(dot[node.id], Value) else None, node.origin.name, "_dot")
        # Last, since a mutation may write any value and its tangent.
        _write_tangents(graph, wrt, out, env, dot)
    primal = [None if o is None else env[o.id] for o in graph.outputs]
    tangents = [None if o is None else dot.get(o.id) for o in graph.outputs]
    if with_primal:
        return out.returning([*primal, *tangents], [*graph.output_strides, *_row_major(out, tangents)])
    return out.returning(tangents)


def _primal(node: Value, args: list[Any]) -> Value:
    """The node itself; of a loop that carries tangents too, its results are at hand."""
    if node.prim == "pick" and isinstance(args[0], list):
        return args[0][node.params["index"]]  # type: ignore[no-any-return]
    return emit(node.prim, *args, **node.params)


def _push_body(rules: ExternRules, body: Graph, wrt: Sequence[int]) -> Graph:
    return push_forward(body, wrt, rules, with_primal=True)


def tangent_of(node: Value, dots: list[Any], ans: Value, args: list[Value], rules: ExternRules) -> Result:
    """The tangent of a node, or of each of its results; None where it is zero."""
    if node.prim == "pick":
        return dots[0][node.params["index"]]  # type: ignore[no-any-return]
    if node.prim in EXTERN:
        if not node.avals:
            return None
        wrt = tuple(i for i, d in enumerate(dots) if d is not None)
        operands = [*args, *results_of(ans), *(d for d in dots if d is not None)]
        tangents = inline_rule(rules.jvp(node, wrt), node, operands)
        return tangents[0] if len(tangents) == 1 else tangents
    if node.prim in constant or ans.dtype not in DIFFERENTIABLE:
        return None
    if node.prim in REAL_ONLY and args[0].dtype in COMPLEX:
        raise no_rule_error("jvp", node, "of complex numbers has no rule")
    return jvp_rules[node.prim](dots, ans, *args, **node.params)


def _write_tangents(graph: Graph, wrt: Sequence[int], out: Graph, env: dict[int, Value], dot: dict[int, Any]) -> None:
    """Write a value back into an input, and its tangent into the tangent of the input."""
    place = {i: len(graph.inputs) + k for k, i in enumerate(wrt)}
    for i, value in graph.mutations.items():
        out.mutations[i] = env[value.id]
        if i in place:
            tangent = dot.get(value.id)
            out.mutations[place[i]] = zeros(value.aval) if tangent is None else tangent
        elif dot.get(value.id) is not None:
            raise no_rule_error("jvp", value, f"is written into `{name_of(graph.inputs[i])}`, which has no tangent")


def _row_major(graph: Graph, values: Sequence[Value | None]) -> Sequence[tuple[Size, ...] | None]:
    return Graph.returning(Graph(), values).output_strides


def require_no_draws(transform: str, graph: Graph) -> Graph:
    """The graph; raises where it needs random numbers, which are gone when the primal has run."""
    results = [o for o in graph.results if o.prim != "input"]
    for node in nodes_between(results, [v.id for v in graph.inputs]):
        if node.prim == "aten_effect":
            raise no_rule_error(transform, node, "draws random numbers, and its derivative alone would draw others")
    return graph


# ---------------------------------------------------------------------------------------------- the table
jvp_rules: dict[str, Callable[..., Value | None]] = {}


def defjvp(prims: str, *rules: Callable[..., Value | None]) -> None:
    """One rule per operand: (its tangent, the result, operands, parameters) -> its share of the tangent."""

    def rule(dots: Sequence[Value | None], ans: Value, *args: Value, **params: Any) -> Value | None:
        pairs = zip(dots, rules, strict=True)
        return sum_terms(r(t, ans, *args, **params) for t, r in pairs if t is not None)

    jvp_rules.update(dict.fromkeys(prims.split(), rule))


def deflinear(prim: str) -> None:
    """The jvp of a linear primitive is the primitive itself, on tangents."""

    def rule(dots: Sequence[Value | None], ans: Value, *args: Value, **params: Any) -> Value | None:
        moving = linear_positions(prim, len(args))
        if all(dots[i] is None for i in moving):
            return None
        pairs = enumerate(zip(dots, args, strict=True))
        return emit(prim, *(_tangent_or_zeros(d, a) if i in moving else a for i, (d, a) in pairs), **params)

    jvp_rules[prim] = rule


def _tangent_or_zeros(tangent: Value | None, like: Value) -> Value:
    return zeros(like.aval) if tangent is None else tangent


for _prim in linear:
    deflinear(_prim)

LN2 = math.log(2)

defjvp("add", lambda t, a, x, y: t, lambda t, a, x, y: t)
defjvp("sub", lambda t, a, x, y: t, lambda t, a, x, y: emit("neg", t))
defjvp("mul", lambda t, a, x, y: mul(t, y), lambda t, a, x, y: mul(x, t))
defjvp("div", lambda t, a, x, y: div(t, y), lambda t, a, x, y: emit("neg", mul(t, div(a, y))))
defjvp("exp", lambda t, y, x: mul(t, y))
defjvp("exp2", lambda t, y, x: mul(t, mul(y, LN2)))
defjvp("expm1", lambda t, y, x: mul(t, plus(y, 1)))
defjvp("log", lambda t, y, x: div(t, x))
defjvp("log2", lambda t, y, x: div(t, mul(x, LN2)))
defjvp("log10", lambda t, y, x: div(t, mul(x, math.log(10))))
defjvp("log1p", lambda t, y, x: div(t, plus(x, 1)))
defjvp("sqrt", lambda t, y, x: div(t, mul(y, 2)))
defjvp("rsqrt", lambda t, y, x: mul(mul(t, -0.5), mul(y, mul(y, y))))
defjvp("reciprocal", lambda t, y, x: emit("neg", mul(t, mul(y, y))))
defjvp("sin", lambda t, y, x: mul(t, emit("cos", x)))
defjvp("cos", lambda t, y, x: emit("neg", mul(t, emit("sin", x))))
defjvp("tan", lambda t, y, x: mul(t, plus(mul(y, y), 1)))
defjvp("asin", lambda t, y, x: mul(t, emit("rsqrt", sub(1, mul(x, x)))))
defjvp("acos", lambda t, y, x: emit("neg", mul(t, emit("rsqrt", sub(1, mul(x, x))))))
defjvp("atan", lambda t, y, x: div(t, plus(mul(x, x), 1)))
defjvp("sinh", lambda t, y, x: mul(t, emit("cosh", x)))
defjvp("cosh", lambda t, y, x: mul(t, emit("sinh", x)))
defjvp("tanh", lambda t, y, x: mul(t, sub(1, mul(y, y))))
defjvp("asinh", lambda t, y, x: mul(t, emit("rsqrt", plus(mul(x, x), 1))))
defjvp("acosh", lambda t, y, x: mul(t, emit("rsqrt", sub(mul(x, x), 1))))
defjvp("atanh", lambda t, y, x: div(t, sub(1, mul(x, x))))
defjvp("sigmoid", lambda t, y, x: mul(t, mul(y, sub(1, y))))
defjvp("erf", lambda t, y, x: mul(t, mul(emit("exp", emit("neg", mul(x, x))), 2 / math.sqrt(math.pi))))
defjvp("lgamma", lambda t, y, x: mul(t, torch_function("aten.digamma.default", x)))
defjvp("abs", lambda t, y, x: mul(t, emit("sign", x)))
defjvp(
    "pow",
    lambda t, a, x, y: zero_where(eq(y, 0), t, mul(y, power(x, sub(y, 1)))),
    lambda t, a, x, y: zero_where(emit("and", eq(x, 0), ge(y, 0)), t, mul(a, emit("log", x))),
)
defjvp("max", lambda t, a, x, y: extremum_of_two(t, x, y, lt), lambda t, a, x, y: extremum_of_two(t, y, x, lt))
defjvp("min", lambda t, a, x, y: extremum_of_two(t, x, y, gt), lambda t, a, x, y: extremum_of_two(t, y, x, gt))
defjvp("rem", lambda t, a, x, y: t, lambda t, a, x, y: emit("neg", mul(t, emit("floordiv", x, y))))
defjvp("fmod", lambda t, a, x, y: t, lambda t, a, x, y: emit("neg", mul(t, emit("trunc", div(x, y)))))
defjvp(
    "atan2",
    lambda t, a, x, y: mul(t, over_square_sum(y, x, y)),
    lambda t, a, x, y: emit("neg", mul(t, over_square_sum(x, x, y))),
)
defjvp("hypot", lambda t, a, x, y: mul(t, div(x, a)), lambda t, a, x, y: mul(t, div(y, a)))
defjvp("amax amin", lambda t, a, x, axes: mean_over_extrema(t, a, x, axes))
defjvp("prod", lambda t, a, x, axes: sum_over(mul(t, product_of_others(x, axes)), axes))
defjvp("dot", lambda t, a, x, y, **p: emit("dot", t, y, **p), lambda t, a, x, y, **p: emit("dot", x, t, **p))

constant: dict[str, str] = {
    **dict.fromkeys("sign floor ceil round trunc floordiv".split(), "constant between its steps"),
    **dict.fromkeys((*COMPARE, *PREDICATES, "argmax", "argmin"), "no float comes out"),
    **dict.fromkeys("and or xor shl shr not check_index".split(), "of integers"),
    **dict.fromkeys(("full", "iota", "random", "input"), "depends on no float"),
}
"""The primitives without a tangent, and why."""

REAL_ONLY = ("abs", "sign", "max", "min", "amax", "amin", "pow")
"""Rules that would be another for complex numbers, which no captured graph computes by primitives."""


# ---------------------------------------------------------------------------------------------- longer rules
def zero_where(condition: Value, t: Value, slope: Value) -> Value:
    """t * slope, and 0 where the condition holds, whatever both are there: in the transpose too."""
    return where(condition, 0, mul(t, where(condition, 0, slope)))


def extremum_of_two(t: Value, x: Value, y: Value, loses: Callable[[Value, Value], Value]) -> Value:
    """The tangent of x where it is the larger (smaller) of two, half of it where they are equal."""
    return where(eq(x, y), mul(t, 0.5), where(loses(x, y), 0, t))


def over_square_sum(z: Value, x: Value, y: Value) -> Value:
    """z * (1 / (x*x + y*y)), and 0 at the origin, as torch has it."""
    square = plus(mul(x, x), mul(y, y))
    return mul(z, where(emit("eq", square, zeros(square.aval)), 0, emit("reciprocal", square)))


def mean_over_extrema(t: Value, a: Value, x: Value, axes: tuple[int, ...]) -> Value:
    """The mean of the tangents of those that are the extremum."""
    hit = eq(x, restore_axes(a, x.shape, axes))
    count = sum_over(cast(hit, "f32" if x.dtype in LOW_FLOATS else x.dtype), axes)
    return div(sum_over(where(hit, t, 0), axes), cast(count, x.dtype))


def product_of_others(x: Value, axes: tuple[int, ...]) -> Value:
    """For each element the product of the others along `axes`, right where some are zero: before it times after it."""
    outer = [a for a in range(x.ndim) if a not in axes]
    order = [*outer, *axes]
    flat = reshape(permute(x, order), [*(x.shape[a] for a in outer), product(x.shape[a] for a in axes)])
    behind = emit("flip", exclusive_cumprod(emit("flip", flat, axes=(len(outer),))), axes=(len(outer),))
    spread = reshape(mul(exclusive_cumprod(flat), behind), [x.shape[a] for a in order])
    return permute(spread, sorted(range(x.ndim), key=order.__getitem__))


def exclusive_cumprod(x: Value) -> Value:
    """[a, b, c]  ->  [1, a, a*b], along the last axis"""
    lines, n = x.shape[:-1], x.shape[-1]
    if n == 0:
        return x
    running = torch_function("aten.cumprod.default", x, x.ndim - 1)
    first = full(1, x.aval.with_shape((*lines, 1)))
    zero, one = (0,) * x.ndim, (1,) * x.ndim
    return emit("cat", first, emit("slice", running, start=zero, stop=(*lines, n - 1), step=one), axis=x.ndim - 1)


def torch_function(op: str, x: Value, *rest: Any) -> Value:
    """A derivative that is no primitive: one of torch's functions of x."""
    return emit("aten", x, op=op, spec=((Arg(0), *rest), ()), avals=(x.aval,))
