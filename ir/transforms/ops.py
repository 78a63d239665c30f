"""The few ways in which the rules of the transforms emit: numbers become constants like the operand beside them.

None is a structural zero: `add(None, y)` is y. Nothing else is folded; that is the business of the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import sympy

from ..graph import Graph, Value, emit, provenance
from ..infer import same_shape
from ..prims import PRIMS
from ..rewrite import extract
from ..types import COMPLEX, FLOAT8, FLOATS, INTEGERS, Size, TensorType

Number: TypeAlias = "bool | int | float | sympy.Expr"
Operand: TypeAlias = "Value | Number"
Result: TypeAlias = "Value | Sequence[Value | None] | None"
"""What stands for a node: a value, one per result where it has several, or None for zero."""

EXTERN = tuple(p.name for p in PRIMS.values() if p.family == "extern")
DIFFERENTIABLE = (*FLOATS, *COMPLEX, *FLOAT8)


def full(value: Number, aval: TensorType) -> Value:
    """A constant of that type, the number spelled as its dtype says."""
    return emit("full", value=_number_of_dtype(value, aval.dtype), shape=aval.shape, dtype=aval.dtype)


def zeros(aval: TensorType) -> Value:
    return full(0, aval)


def _number_of_dtype(value: Number, dtype: str) -> Any:
    if isinstance(value, sympy.Basic):
        return value
    return bool(value) if dtype == "b1" else int(value) if dtype in INTEGERS else float(value)


def _pair(x: Operand, y: Operand) -> tuple[Value, Value]:
    if isinstance(x, Value):
        return x, y if isinstance(y, Value) else full(y, x.aval)
    assert isinstance(y, Value)
    return full(x, y.aval), y


def _binary(prim: str) -> Callable[[Operand, Operand], Value]:
    return lambda x, y: emit(prim, *_pair(x, y))


mul, div, sub, plus, power = map(_binary, ("mul", "div", "sub", "add", "pow"))
eq, lt, gt, ge = map(_binary, ("eq", "lt", "gt", "ge"))


def where(condition: Value, x: Operand, y: Operand) -> Value:
    return emit("where", condition, *_pair(x, y))


def add(x: Value | None, y: Value | None) -> Value | None:
    """The sum of two tangents or cotangents, each of which may be zero."""
    if x is None or y is None:
        return y if x is None else x
    return emit("add", x, y)


def sum_terms(terms: Iterable[Value | None]) -> Value | None:
    result = None
    for term in terms:
        result = add(result, term)
    return result


def conj(x: Value) -> Value:
    return emit("conj", x) if x.dtype in COMPLEX else x


def cast(x: Value, dtype: str) -> Value:
    return x if x.dtype == dtype else emit("cast", x, dtype=dtype)


def sum_over(x: Value, axes: Iterable[int]) -> Value:
    axes = tuple(axes)
    return emit("sum", x, axes=axes) if axes else x


def reshape(x: Value, shape: Sequence[Size]) -> Value:
    return x if x.shape == tuple(shape) else emit("reshape", x, shape=tuple(shape))


def permute(x: Value, perm: Iterable[int]) -> Value:
    perm = tuple(perm)
    return x if perm == tuple(range(x.ndim)) else emit("permute", x, perm=perm)


def broadcast(x: Value, shape: Sequence[Size], axes: Iterable[int]) -> Value:
    """Axis i of x becomes axis axes[i] of the result."""
    axes, shape = tuple(axes), tuple(shape)
    return x if len(axes) == len(shape) and x.shape == shape else emit("broadcast", x, shape=shape, axes=axes)


def restore_axes(x: Value, shape: Sequence[Size], axes: Sequence[int]) -> Value:
    """The result of a reduction along `axes`, spread over them again."""
    return broadcast(x, shape, (a for a in range(len(shape)) if a not in axes))


def shift_axes(axes: Iterable[int]) -> tuple[int, ...]:
    """Axes behind one that is put in front."""
    return tuple(a + 1 for a in axes)


# ------------------------------------------------------------------------------------------------- whole graphs
def inline(graph: Graph, args: Sequence[Value]) -> list[Value | None]:
    """The outputs of a graph computed on `args`, in the graph being built."""
    env = dict(zip((v.id for v in graph.inputs), args, strict=True))
    for value in graph.order():
        env[value.id] = emit(value.prim, *(env[a.id] for a in value.args), **value.params)
    return [None if o is None else env[o.id] for o in graph.outputs]


def drop_unused_effects(graph: Graph) -> Graph:
    """The graph without the effects that its results do not need: they are those of another graph."""
    if not any(PRIMS[v.prim].effect for v in graph):
        return graph
    needed = extract([*graph.outputs, *graph.mutations.values()], graph.inputs, name=graph.name)
    split = len(graph.outputs)
    needed.mutations = {i: v for i, v in zip(graph.mutations, needed.outputs[split:], strict=True) if v is not None}
    return needed.returning(needed.outputs[:split], graph.output_strides)


def results_of(node: Value) -> list[Value]:
    """The single results of a node."""
    if len(node.avals) == 1:
        return [node]
    return [emit("pick", node, index=i) for i in range(len(node.avals))]


def set_derived_name(value: Value | None, name: str | None, suffix: str) -> None:
    """The user's name for y as that of what belongs to y: y_dot, y_bar."""
    if value is not None and name is not None and value.prim != "input" and value.origin.name is None:
        value.attrs["origin"] = replace(value.origin, name=f"{name}{suffix}")


def on_behalf_of(node: Value) -> Any:
    """Within the block, new nodes come from the user's line that `node` comes from."""
    origin = node.origin
    return provenance(origin if origin.name is None else replace(origin, name=None))


def same_type(a: TensorType, b: TensorType) -> bool:
    return a == b or (a.dtype == b.dtype and same_shape(a.shape, b.shape))
