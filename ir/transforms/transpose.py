"""Reverse mode: cotangents of the outputs of a linear graph -> cotangents of its inputs. None is zero.

Cotangents of complex values pair as torch's do, Re<a, conj b>: the adjoint of a product conjugates the other factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy

from ..errors import InvalidGraphError
from ..graph import Graph, Value, building, emit, provenance
from ..infer import sizes_equal
from ..loops.prune import prune_scans
from ..loops.reverse_mode import transpose_scan
from ..loops.separate import separate_scans
from ..rewrite import name_of, nodes_between
from ..types import Size, simplify_size
from .extern import NO_RULES, Batched, ExternRules, inline_rule
from .linearity import linear_part
from .linearize import push_forward, require_no_draws
from .ops import (
    DIFFERENTIABLE,
    EXTERN,
    add,
    broadcast,
    cast,
    conj,
    div,
    drop_unused_effects,
    inline,
    mul,
    on_behalf_of,
    permute,
    reshape,
    restore_axes,
    results_of,
    set_derived_name,
    sum_over,
    where,
    zeros,
)


def transpose(graph: Graph, linear_in: Sequence[int], rules: ExternRules = NO_RULES) -> Graph:
    """(other inputs, cotangents of the outputs that are not None) -> cotangents of the inputs `linear_in`.

    Raises NonLinearError where the graph is not linear in these inputs together.
    """
    graph = separate_scans(prune_scans(graph), linear_in)
    out = _graph_with_inputs(f"{graph.name}_transposed", [v for i, v in enumerate(graph.inputs) if i not in linear_in])
    results = [o for o in graph.outputs if o is not None]
    cotangents = [(o, out.input(o.aval, f"{name_of(o)}_bar")) for o in results]
    return _pull_back(graph, linear_in, out, cotangents, rules)


def vjp(
    graph: Graph, wrt: Sequence[int], cotangent_of: Sequence[int] | None = None, rules: ExternRules = NO_RULES
) -> Graph:
    """(inputs, cotangents of outputs `cotangent_of`) -> cotangents of inputs `wrt`: transpose(linearize(graph)).

    By default: of every output that has a float type. `aten` and `call` nodes have the vjp that the rules supply.
    """
    if cotangent_of is None:
        cotangent_of = [i for i, o in enumerate(graph.outputs) if o is not None and o.dtype in DIFFERENTIABLE]
    deferred = Deferred(rules)
    forward = push_forward(graph, wrt, deferred)
    out = _graph_with_inputs(f"{graph.name}_vjp", graph.inputs)
    bars = [out.input(o.aval, f"{name_of(o)}_bar") for i in cotangent_of if (o := graph.outputs[i]) is not None]
    pairs = [(forward.outputs[i], bar) for i, bar in zip(cotangent_of, bars, strict=True)]
    live = [(dot, bar) for dot, bar in pairs if dot is not None]
    tangents = range(len(graph.inputs), len(forward.inputs))
    forward = separate_scans(prune_scans(forward.returning([dot for dot, _ in live])), tangents)
    seeds = list(zip(forward.results, (bar for _, bar in live), strict=True))
    pulled = _pull_back(forward, tangents, out, seeds, deferred)
    return require_no_draws("vjp", pulled)


def _graph_with_inputs(name: str, inputs: Sequence[Value]) -> Graph:
    out = Graph(name)
    for v in inputs:
        out.input_like(v)
    return out


def _pull_back(
    graph: Graph, linear_in: Sequence[int], out: Graph, cotangents: Sequence[tuple[Value, Value]], rules: ExternRules
) -> Graph:
    """`out`, whose first inputs are those of the graph that are not linear, returning cotangents of the others."""
    if graph.mutations:
        raise InvalidGraphError("a graph that writes into its inputs has no transpose", node=graph.name)
    # The proof of linearity comes first: the rules below are right for linear nodes only.
    on_the_way = linear_part(graph, linear_in, rules)
    nodes = [v for v in graph.order() if v.id in on_the_way]
    rest_inputs = [v for i, v in enumerate(graph.inputs) if i not in linear_in]
    env = dict(zip((v.id for v in rest_inputs), out.inputs, strict=False))
    bars = Cotangents()
    with building(out):
        # Coefficients of the linear nodes are recomputed: they depend on the other inputs alone.
        for node in nodes_between({a for v in nodes for a in v.args if a.id not in on_the_way}, env):
            with provenance(node.origin):
                env[node.id] = emit(node.prim, *(env[a.id] for a in node.args), **node.params)
        # The seeds, before any pull: one value may be several outputs.
        for value, bar in cotangents:
            if value.id in on_the_way:
                bars.add(value, bar)
        # Users before operands: a cotangent is complete when its node is reached.
        for node in reversed(nodes):
            if (bar := bars.pop(node)) is not None:
                with on_behalf_of(node):
                    _pull(node, bar, [env.get(a.id, a) for a in node.args], on_the_way, bars, rules)
    return drop_unused_effects(out.returning([bars.pop(graph.inputs[i]) for i in linear_in]))


class Cotangents:
    """Cotangents accumulated so far, by value. A node with several results has one for each."""

    def __init__(self) -> None:
        self._bars: dict[int, Any] = {}

    def add(self, value: Value, bar: Value | None) -> None:
        self._bars[value.id] = add(self._bars.get(value.id), bar)

    def add_to(self, node: Value, index: int, bar: Value | None) -> None:
        bars = self._bars.setdefault(node.id, [None] * len(node.avals))
        bars[index] = add(bars[index], bar)

    def pop(self, value: Value) -> Any:
        return self._bars.pop(value.id, None)


def _pull(
    node: Value, bar: Any, args: list[Value], on_the_way: set[int], bars: Cotangents, rules: ExternRules
) -> None:
    """Add what the cotangent of a node is for its linear operands, of which `args` has nothing but the type."""
    hits = [i for i, a in enumerate(node.args) if a.id in on_the_way]
    if node.prim == "pick":
        bars.add_to(node.args[0], node.params["index"], bar)
        return
    if node.prim in EXTERN:
        contributions = _extern(node, bar, args, hits, rules)
    elif node.prim == "scan":
        each = bar if isinstance(bar, list) else [bar]
        contributions = transpose_scan(node, each, args, hits, partial(transpose, rules=rules))
    else:
        rule = transpose_rules[node.prim]
        contributions = [rule(i, bar, *args, **node.params) for i in hits]
    for i, contribution in zip(hits, contributions, strict=True):
        bars.add(node.args[i], contribution)
        set_derived_name(contribution, node.args[i].origin.name, "_bar")


def _extern(node: Value, bar: Any, args: list[Value], hits: list[int], rules: ExternRules) -> list[Value | None]:
    """The rule of a linear node reads neither its linear operands nor its results: zeros stand for them."""
    each = bar if isinstance(bar, list) else [bar]
    present = tuple(i for i, b in enumerate(each) if b is not None)
    operands = [zeros(a.aval) if i in hits else a for i, a in enumerate(args)]
    rule = rules.vjp(node, tuple(hits), present)
    return inline_rule(rule, node, [*operands, *map(zeros, node.avals), *(each[i] for i in present)])


# ---------------------------------------------------------------------------------- nodes that are not primitives
@dataclass(frozen=True)
class Pushforward:
    """The jvp of a node that is no primitive, as one node: it is there to be transposed, never to be run."""

    node: Value
    wrt: tuple[int, ...]


class Deferred:
    """Rules under which the jvp of an `aten` or `call` node stays one node, whose transpose is the vjp supplied."""

    def __init__(self, rules: ExternRules) -> None:
        self.rules = rules

    def batch(self, node: Value, mapped: tuple[bool, ...], size: Size, randomness: str) -> Batched:
        return self.rules.batch(node, mapped, size, randomness)

    def jvp(self, node: Value, wrt: tuple[int, ...]) -> Graph:
        rule = Graph(f"{node.prim}_jvp")
        types = [*(a.avals[0] for a in node.args), *node.avals]
        args = [rule.input(t, f"x{i}") for i, t in enumerate([*types, *(types[i] for i in wrt)])]
        avals = tuple(t for t in node.avals if t.dtype in DIFFERENTIABLE)
        with building(rule):
            pushed = emit("aten", *args, op=Pushforward(node, wrt), spec=(), avals=avals)
            tangents = iter(results_of(pushed))
            return rule.returning([next(tangents) if t.dtype in DIFFERENTIABLE else None for t in node.avals])

    def is_linear(self, node: Value, wrt: tuple[int, ...]) -> bool | None:
        if isinstance(node.params.get("op"), Pushforward):
            return True  # in tangents, and nothing else on the way from tangents
        return self.rules.is_linear(node, wrt)

    def keeps_zero(self, node: Value, wrt: tuple[int, ...]) -> bool:
        return not isinstance(node.params.get("op"), Pushforward) and self.rules.keeps_zero(node, wrt)

    def vjp(self, node: Value, wrt: tuple[int, ...], cotangent_of: tuple[int, ...]) -> Graph:
        """The vjp of the node that was pushed forward, as a rule of the node that pushes."""
        push = node.params.get("op")
        if not isinstance(push, Pushforward):
            return self.rules.vjp(node, wrt, cotangent_of)
        first = len(node.args) - len(push.wrt)
        floats = [i for i, t in enumerate(push.node.avals) if t.dtype in DIFFERENTIABLE]
        wrt_of_node, outputs = tuple(push.wrt[i - first] for i in wrt), tuple(floats[i] for i in cotangent_of)
        pulled = self.rules.vjp(push.node, wrt_of_node, outputs)
        rule = Graph(pulled.name)
        args = [rule.input(a.aval, f"x{i}") for i, a in enumerate(node.args)]
        _ = [rule.input(t, f"y{i}") for i, t in enumerate(node.avals)]
        bars = [rule.input(node.avals[i], f"y{i}_bar") for i in cotangent_of]
        with building(rule):
            return rule.returning(inline(pulled, [*args[:first], *bars]))


# ---------------------------------------------------------------------------------------------- the table
transpose_rules: dict[str, Callable[..., Value]] = {}


def deftranspose(prims: str, *rules: Callable[..., Value] | None) -> None:
    """One rule per operand, the last for the rest: (cotangent, operands, parameters) -> cotangent of the operand."""

    def rule(position: int, bar: Value, *args: Value, **params: Any) -> Value:
        operand_rule = rules[min(position, len(rules) - 1)]
        assert operand_rule is not None  # the proof of linearity has seen to it
        return operand_rule(bar, *args, **params)

    transpose_rules.update(dict.fromkeys(prims.split(), rule))


deftranspose("neg", lambda c, x: emit("neg", c))
deftranspose("conj", lambda c, x: conj(c))
deftranspose("cast", lambda c, x, dtype: cast(c, x.dtype))
deftranspose("add", lambda c, x, y: c)
deftranspose("sub", lambda c, x, y: c, lambda c, x, y: emit("neg", c))
deftranspose("mul", lambda c, x, y: mul(c, conj(y)), lambda c, x, y: mul(c, conj(x)))
deftranspose("div", lambda c, x, y: div(c, conj(y)))
deftranspose("where", None, lambda c, m, x, y: where(m, c, 0), lambda c, m, x, y: where(m, 0, c))
deftranspose("broadcast", lambda c, x, shape, axes: transpose_broadcast(c, x, axes))
deftranspose("reshape", lambda c, x, shape: reshape(c, x.shape))
deftranspose("permute", lambda c, x, perm: permute(c, sorted(range(len(perm)), key=perm.__getitem__)))
deftranspose("slice", lambda c, x, start, stop, step: transpose_slice(c, x, start, step))
deftranspose("pad", lambda c, x, lo, hi, inner: transpose_pad(c, x, lo, inner))
deftranspose("flip", lambda c, x, axes: emit("flip", c, axes=axes))
deftranspose("sum", lambda c, x, axes: restore_axes(c, x.shape, axes))
deftranspose("cumsum", lambda c, x, axis, reverse: emit("cumsum", c, axis=axis, reverse=not reverse))
deftranspose("gather", lambda c, x, *index, axes: emit("scatter", zeros(x.aval), c, *index, axes=axes, mode="add"))
deftranspose(
    "scatter",
    lambda c, base, src, *index, axes, mode: c if mode == "add" else transpose_set(c, src, index, axes),
    lambda c, base, src, *index, axes, mode: emit("gather", c, *index, axes=axes),
)
deftranspose(
    "dot",
    lambda c, x, y, x_axes, y_axes, out_axes: transpose_dot(c, y, x, out_axes, y_axes, x_axes),
    lambda c, x, y, x_axes, y_axes, out_axes: transpose_dot(c, x, y, out_axes, x_axes, y_axes),
)


def _transpose_cat(position: int, bar: Value, *pieces: Value, axis: int) -> Value:
    """The part of the cotangent where the piece is."""
    start = sum((p.shape[axis] for p in pieces[:position]), start=sympy.Integer(0))
    ends = [(simplify_size(start), simplify_size(start + pieces[position].shape[axis])) if a == axis else (0, n)
            for a, n in enumerate(bar.shape)]  # fmt: skip
    return emit("slice", bar, start=tuple(e[0] for e in ends), stop=tuple(e[1] for e in ends), step=(1,) * bar.ndim)


transpose_rules["cat"] = _transpose_cat


# ---------------------------------------------------------------------------------------------- longer rules
def transpose_broadcast(c: Value, x: Value, axes: tuple[int, ...]) -> Value:
    """The sum over the axes that are new, and over those that were stretched."""
    stretched = {a for a, n in zip(axes, x.shape, strict=True) if sizes_equal(n, 1) and not sizes_equal(c.shape[a], 1)}
    return reshape(sum_over(c, (a for a in range(c.ndim) if a not in axes or a in stretched)), x.shape)


def transpose_slice(c: Value, x: Value, start: tuple[Size, ...], step: tuple[int, ...]) -> Value:
    """A slice in its place, zeros around and between."""
    if 0 in c.shape:
        return zeros(x.aval)
    hi = (_elements_behind(*sizes) for sizes in zip(x.shape, start, c.shape, step, strict=True))
    return emit("pad", c, lo=start, hi=tuple(hi), inner=tuple(s - 1 for s in step))


def _elements_behind(size: Size, start: Size, length: Size, step: int) -> Size:
    """The number of elements behind the last one of the slice."""
    return simplify_size(sympy.expand(sympy.sympify(size) - start - length - (length - 1) * (step - 1)))


def transpose_pad(c: Value, x: Value, lo: tuple[Size, ...], inner: tuple[int, ...]) -> Value:
    """The cotangent of a padded operand: the slice without the padding."""
    if 0 in x.shape:
        return zeros(x.aval)
    stop = tuple(simplify_size(sympy.expand(a + n + (n - 1) * i)) for a, n, i in zip(lo, x.shape, inner, strict=True))
    return emit("slice", c, start=lo, stop=stop, step=tuple(i + 1 for i in inner))


def transpose_set(c: Value, src: Value, index: tuple[Value, ...], axes: tuple[int, ...]) -> Value:
    """Nothing comes from where `src` was put."""
    return emit("scatter", c, zeros(src.aval), *index, axes=axes, mode="set")


def transpose_dot(
    c: Value, y: Value, x: Value, c_axes: tuple[int, ...], y_axes: tuple[int, ...], x_axes: tuple[int, ...]
) -> Value:
    """The cotangent of x in dot(x, y): c times y. An axis that x alone had, and that was summed, is spread again."""
    labels = tuple(a for a in x_axes if a in c_axes or a in y_axes)
    product = emit("dot", c, conj(y), x_axes=c_axes, y_axes=y_axes, out_axes=labels)
    return broadcast(product, x.shape, (i for i, a in enumerate(x_axes) if a in labels))
