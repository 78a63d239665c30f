"""Reductions, scans and products. Low floats: sums and products accumulate in float32 and round once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ir import Graph, TensorType, Value, building, emit
from ...ir.loops.body import Body
from ...ir.loops.loop import results_of
from .rules import (
    Call,
    Result,
    axes_of,
    cast,
    compute_dtype,
    count,
    fit,
    full,
    is_at_index,
    permute,
    positions,
    reshape,
    rule,
)


def reduce_axes(prim: str, x: Value, axes: Sequence[int]) -> Value:
    return emit(prim, x, axes=tuple(axes)) if axes else x


def reduction(prim: str) -> Any:
    """The rule of sum, prod, amax, amin: operands of the result's dtype, kept axes put back by a reshape."""

    def apply(call: Call, x: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Result:
        axes = axes_of(dim, x.ndim)
        return reshape(reduce_axes(prim, cast(x, call.out.dtype), axes), call.out.shape)

    return apply


rule("sum.default sum.dim_IntList")(reduction("sum"))
rule("prod.default prod.dim_int")(reduction("prod"))
rule("amax max.default")(reduction("amax"))
rule("amin min.default")(reduction("amin"))


@rule("mean.default mean.dim")
def _mean(call: Call, x: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Result:
    axes = axes_of(dim, x.ndim)
    total = reduce_axes("sum", cast(x, compute_dtype(call.out.dtype)), axes)
    average = emit("div", total, full(count(x.shape, axes), total.aval))
    return cast(reshape(average, call.out.shape), call.out.dtype)


@rule("any.default any.dim any.dims all.default all.dim all.dims")
def _any(call: Call, x: Value, dim: Any = None, keepdim: bool = False) -> Result:
    """True if the largest (smallest) of 0 and 1 is over 0; of nothing, it is the least (greatest) integer.

    An empty list of dims reduces all; no dims at all does too.
    """
    axes = axes_of(dim, x.ndim)
    bits = cast(cast(x, "b1"), "i32")
    extreme = reduce_axes("amax" if call.name == "any" else "amin", bits, axes)
    return cast(reshape(_is_positive(extreme), call.out.shape), call.out.dtype)


def _is_positive(x: Value) -> Value:
    return emit("gt", x, full(0, x.aval))


@rule("argmax argmin")
def _argmax(call: Call, x: Value, dim: Any = None, keepdim: bool = False) -> Result:
    if x.ndim == 0:
        return full(0, call.out)
    flat = reshape(x, (x.aval.numel,)) if dim is None else x
    return reshape(emit(call.name, flat, axis=0 if dim is None else dim % x.ndim), call.out.shape)


@rule("max.dim min.dim")
def _extreme(call: Call, x: Value, dim: int, keepdim: bool = False) -> Result:
    """(value, index). The value is read at the index, whose element gets all the gradient; alone it is amax or amin."""
    value, index = call.outs
    if x.ndim == 0:
        return x, full(0, index)
    axis, name = dim % x.ndim, call.name
    if not call.reads(1):
        return reshape(reduce_axes(f"a{name}", x, (axis,)), value.shape), None
    at = emit(f"arg{name}", cast(x, "i32") if x.dtype == "b1" else x, axis=axis)
    return reshape(at_one_index(x, at, axis), value.shape), reshape(at, index.shape)


def at_one_index(x: Value, index: Value, axis: int) -> Value:
    """x at one index along an axis: a gather from memory, or the sum over a mask where x is computed.

    index: x.shape without the axis; so is the result.
    """
    if x.prim == "input":
        grid = [positions(index.shape, a) for a in range(index.ndim)]
        return emit("gather", x, *grid[:axis], index, *grid[axis:], axes=tuple(range(x.ndim)))
    condition = is_at_index(x, index, axis)
    if x.dtype == "b1":
        return _is_positive(emit("amax", cast(emit("and", condition, x), "i32"), axes=(axis,)))
    return emit("sum", emit("where", condition, x, full(0, x.aval)), axes=(axis,))


@rule("cumsum")
def _cumsum(call: Call, x: Value, dim: int, **_: Any) -> Result:
    x = cast(x, call.out.dtype)
    return emit("cumsum", x, axis=dim % x.ndim, reverse=False) if x.ndim else x


@rule("cumprod")
def _cumprod(call: Call, x: Value, dim: int, **_: Any) -> Result:
    """A loop along the axis, which kernels walk in blocks: c = c * x[t], in float32 at least, as in torch's kernels."""
    if not call.out.is_float:
        return None
    x = cast(x, call.out.dtype)
    if not x.ndim:
        return x
    axis = dim % x.ndim
    order = (axis, *(a for a in range(x.ndim) if a != axis))
    wide = cast(permute(x, order), "f64" if x.dtype == "f64" else "f32")
    one = TensorType(wide.shape[1:], wide.dtype)
    step = Graph("cumprod_step")
    with building(step):
        product_so_far = emit("mul", step.input(one, "c"), step.input(one, "x"))
    body = Body(step.returning([product_so_far, product_so_far]))
    loop = emit("scan", full(1, one), wide, body=body, carries=1, steps=1, length=wide.shape[0], reverse=False)
    back = tuple(order.index(a) for a in range(x.ndim))
    return permute(cast(results_of(loop)[1], x.dtype), back)


# ---------------------------------------------------------------------------------------------- products
def dot(x: Value, y: Value, labels: str) -> Value:
    """A two-operand einsum, "ik,kj->ij". Low floats accumulate in float32 and round once."""
    x_labels, y_labels, out_labels = labels.replace("->", ",").split(",")
    number = {label: i for i, label in enumerate(sorted({*x_labels, *y_labels}))}
    axes = [tuple(number[label] for label in part) for part in (x_labels, y_labels, out_labels)]
    return emit("dot", x, y, x_axes=axes[0], y_axes=axes[1], out_axes=axes[2])


products = {"mm.default": "ik,kj->ij", "bmm.default": "bik,bkj->bij", "mv": "ik,k->i", "dot": "i,i->", "vdot": "i,i->"}


def product(labels: str) -> Any:
    return lambda call, x, y: dot(x, y, labels)


for name, labels in products.items():
    rule(name)(product(labels))

sums_with_products = {
    "addmm.default": "ik,kj->ij", "baddbmm.default": "bik,bkj->bij", "addmv": "ik,k->i", "addbmm": "bik,bkj->ij",
    "addr": "i,j->ij",
}  # fmt: skip


def sum_with_product(labels: str) -> Any:
    """beta*c + alpha*(x @ y). beta = 0 drops c, NaNs included. Low floats: the product rounds, then the sum."""

    def apply(call: Call, c: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Result:
        out = call.out.with_dtype(compute_dtype(call.out.dtype))
        z = _scale(cast(dot(x, y, labels), out.dtype), alpha, out)
        z = z if beta == 0 else emit("add", _scale(fit(c, out), beta, out), z)
        return cast(z, call.out.dtype)

    return apply


def _scale(x: Value, factor: Any, aval: TensorType) -> Value:
    return x if factor == 1 else emit("mul", x, full(factor, aval))


for name, labels in sums_with_products.items():
    rule(name)(sum_with_product(labels))
