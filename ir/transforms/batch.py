"""vmap: every mapped value has the batch axis in front, so that rules only shift axes. The rest is computed once.

The primitive `random` is a function of its seed and offset: the same for every lane, as long as these are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from ..graph import Graph, Value, building, emit, provenance
from ..loops.batched import batch_scan
from ..prims import BINARY, COMPARE, UNARY
from ..rewrite import name_of
from ..types import Size
from .extern import NO_RULES, Batched, ExternRules, inline_rule, no_rule_error
from .ops import EXTERN, broadcast, cast, permute, shift_axes

Randomness: TypeAlias = Literal["error", "same", "different"]
Mapped = tuple[bool, ...]


def batch(
    graph: Graph,
    mapped: Sequence[bool],
    size: Size,
    rules: ExternRules = NO_RULES,
    *,
    randomness: Randomness = "error",
    steps: Sequence[Size | None] = (),
) -> Batched:
    """The graph over a batch of `size`. Mapped inputs and mapped outputs have the batch axis in front.

    randomness: what a draw from torch's generator (an `aten_effect` node) does, as in torch.vmap. steps: per input the
    stride of the batch axis, before the strides of the lane; None (for all, by default) for one that is row-major.
    """
    out = Graph(f"{graph.name}_batched")
    # Inputs first: a mapped one gets the batch axis in front, so that a rule only shifts axes.
    env: dict[int, Any] = {
        v.id: _lane_input(out, v, size, step) if m else out.input_like(v)
        for v, m, step in zip(graph.inputs, mapped, steps or [None] * len(graph.inputs), strict=True)
    }
    flags: dict[int, Any] = {v.id: m for v, m in zip(graph.inputs, mapped, strict=True)}
    with building(out):
        for node in graph.order():
            # A node without mapped operands is computed once for the whole batch.
            args, lanes = [env[a.id] for a in node.args], tuple(flags[a.id] for a in node.args)
            with provenance(node.origin):
                env[node.id], flags[node.id] = _batch_node(node, args, lanes, size, rules, randomness)
        # Mutations after all nodes: the value written last may come from any of them.
        for i, v in graph.mutations.items():
            out.mutations[i] = _batch_mutation(graph.inputs[i], v, mapped[i], env, flags, size)
    # An output keeps its own layout for each sample, the batch outermost.
    mapped_out = tuple(o is not None and flags[o.id] for o in graph.outputs)
    strides = [
        (o.aval.numel, *s) if m and o is not None and s is not None else s
        for o, s, m in zip(graph.outputs, graph.output_strides, mapped_out, strict=True)
    ]
    return Batched(out.returning([None if o is None else env[o.id] for o in graph.outputs], strides), mapped_out)


def _lane_input(out: Graph, value: Value, size: Size, step: Size | None) -> Value:
    strides = None if step is None else (step, *value.params["strides"])
    return out.input(value.aval.with_shape((size, *value.shape)), value.params["name"], strides)


def _batch_node(
    node: Value, args: list[Any], mapped: tuple[Any, ...], size: Size, rules: ExternRules, randomness: Randomness
) -> tuple[Any, Any]:
    """A node over the batch, and whether it has the axis; lists of both for a node with several results."""
    if node.prim == "pick" and isinstance(args[0], list):
        return args[0][node.params["index"]], mapped[0][node.params["index"]]
    if (in_every_lane := extern_batch_rules.get(node.params.get("op", ""))) is not None and any(mapped):
        return in_every_lane(node, *args), False
    if node.prim in EXTERN and (any(mapped) or _differs_per_lane(node, randomness)):
        rule = rules.batch(node, mapped, size, randomness)
        results = inline_rule(rule.graph, node, args)
        return (results[0], rule.mapped[0]) if len(results) == 1 else (results, list(rule.mapped))
    if node.prim == "scan" and any(mapped):
        return batch_scan(node, args, mapped, size, lambda body, lanes: batch(body, lanes, size, rules))
    if any(mapped):
        return batch_rules[node.prim](size, mapped, node, *args, **node.params), True
    return emit(node.prim, *args, **node.params), False


def _differs_per_lane(node: Value, randomness: Randomness) -> bool:
    """True if a node without mapped operands still differs per sample: it draws random numbers."""
    if node.prim != "aten_effect" or not node.avals or randomness == "same":
        return False
    if randomness == "error":
        raise no_rule_error("vmap", node, "draws random numbers, and randomness is 'error'")
    return True


def _batch_mutation(
    target: Value, value: Value, mapped: bool, env: dict[int, Any], flags: dict[int, Any], size: Size
) -> Value:
    """The value written into an input, which has room for a batch only if it has the axis itself."""
    if flags[value.id] and not mapped:
        raise no_rule_error("vmap", value, f"is written into `{name_of(target)}`, which is not mapped")
    return with_batch_axis(size, env[value.id], flags[value.id]) if mapped else env[value.id]


# ---------------------------------------------------------------------------------------------- the table
batch_rules: dict[str, Callable[..., Value]] = {}


def defbatch(prims: str, rule: Callable[..., Value]) -> None:
    """(batch size, which operands are mapped, the node, operands, parameters) -> the result with the axis in front."""
    batch_rules.update(dict.fromkeys(prims.split(), rule))


def with_batch_axis(size: Size, x: Value, mapped: bool) -> Value:
    """The value with a batch axis, if need be the same in every lane."""
    return x if mapped else broadcast(x, (size, *x.shape), shift_axes(range(x.ndim)))


def batch_elementwise(size: Size, mapped: Mapped, node: Value, *xs: Value, **params: Any) -> Value:
    return emit(node.prim, *(with_batch_axis(size, x, m) for x, m in zip(xs, mapped, strict=True)), **params)


defbatch(" ".join((*UNARY, *BINARY, *COMPARE, "where", "cast", "check_index")), batch_elementwise)
defbatch("sum prod amax amin flip", lambda n, m, node, x, axes: emit(node.prim, x, axes=shift_axes(axes)))
defbatch("argmax argmin", lambda n, m, node, x, axis: emit(node.prim, x, axis=axis + 1))
defbatch("cumsum", lambda n, m, node, x, axis, reverse: emit("cumsum", x, axis=axis + 1, reverse=reverse))
defbatch("cat", lambda n, m, node, *xs, axis: batch_elementwise(n, m, node, *xs, axis=axis + 1))
defbatch(
    "broadcast",
    lambda n, m, node, x, shape, axes: emit("broadcast", x, shape=(n, *shape), axes=(0, *shift_axes(axes))),
)
defbatch("reshape", lambda n, m, node, x, shape: emit("reshape", x, shape=(n, *shape)))
defbatch("permute", lambda n, m, node, x, perm: emit("permute", x, perm=(0, *shift_axes(perm))))
defbatch(
    "slice",
    lambda n, m, node, x, start, stop, step: emit(
        "slice", x, start=(0, *start), stop=(n, *stop), step=(1, *step)
    ),
)
defbatch(
    "pad", lambda n, m, node, x, lo, hi, inner: emit("pad", x, lo=(0, *lo), hi=(0, *hi), inner=(0, *inner))
)


def _dot(
    size: Size, mapped: Mapped, node: Value, x: Value, y: Value,
    x_axes: tuple[int, ...], y_axes: tuple[int, ...], out_axes: tuple[int, ...],
) -> Value:  # fmt: skip
    """The batch is one more label, on the operands that are mapped."""
    lane = (max((*x_axes, *y_axes), default=-1) + 1,)
    x_labels, y_labels = ((lane if m else ()) + axes for m, axes in zip(mapped, (x_axes, y_axes), strict=True))
    return emit("dot", x, y, x_axes=x_labels, y_axes=y_labels, out_axes=lane + out_axes)


def _gather(size: Size, mapped: Mapped, node: Value, x: Value, *index: Value, axes: tuple[int, ...]) -> Value:
    """Where the indices are mapped, the batch is one of their axes, and each lane reads its own part of x."""
    if not any(mapped[1:]):
        return move_to_front(emit("gather", x, *index, axes=shift_axes(axes)), index[0].ndim)
    every = [with_batch_axis(size, i, m) for i, m in zip(index, mapped[1:], strict=True)]
    if not mapped[0]:
        return emit("gather", x, *every, axes=axes)
    return emit("gather", x, lane_numbers(every[0]), *every, axes=(0, *shift_axes(axes)))


def _scatter(
    size: Size, mapped: Mapped, node: Value, base: Value, src: Value, *index: Value, axes: tuple[int, ...], mode: str
) -> Value:
    base, src = with_batch_axis(size, base, mapped[0]), with_batch_axis(size, src, mapped[1])
    if not any(mapped[2:]):
        k = index[0].ndim
        behind = permute(src, (*range(1, k + 1), 0, *range(k + 1, src.ndim)))
        return emit("scatter", base, behind, *index, axes=shift_axes(axes), mode=mode)
    every = [with_batch_axis(size, i, m) for i, m in zip(index, mapped[2:], strict=True)]
    return emit("scatter", base, src, lane_numbers(every[0]), *every, axes=(0, *shift_axes(axes)), mode=mode)


def move_to_front(x: Value, axis: int) -> Value:
    return permute(x, (axis, *(a for a in range(x.ndim) if a != axis)))


def lane_numbers(index: Value) -> Value:
    """For every element of a mapped index, the number of its sample."""
    return broadcast(emit("iota", size=index.shape[0], dtype="i64"), index.shape, (0,))


def _random(size: Size, mapped: Mapped, node: Value, *args: Value, **params: Any) -> Value:
    raise no_rule_error("vmap", node, "draws from a seed or an offset that differs over the batch")


def _batch_assertion(node: Value, condition: Value) -> Value:
    """An assertion that holds for every sample: the minimum of 0 and 1."""
    least = emit("amin", cast(condition, "i32"), axes=(0,))
    return emit(node.prim, cast(least, "b1"), **node.params)


extern_batch_rules: dict[str, Callable[..., Value]] = {
    "aten._assert_async.default": _batch_assertion,
    "aten._assert_async.msg": _batch_assertion,
}
"""Calls without a result, of which torch has no rule. (the node, operands with the axis) -> one call for all lanes."""

defbatch("dot", _dot)
defbatch("gather", _gather)
defbatch("scatter", _scatter)
defbatch("random", _random)

unmapped = ("input", "full", "iota")
"""The primitives without operands: the same in every lane."""
