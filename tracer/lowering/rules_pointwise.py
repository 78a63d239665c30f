"""Elementwise ops, conversions and constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

from ...ir import TensorType, Value, emit
from ...ir.prims import COMPARE, PREDICATES
from ...ir.types import INTEGERS, LOW_FLOATS
from .rules import Call, Result, cast, compare, fit, full, iota, is_exact, operand_dtype, reshape, rule, where

WITH_SCALARS_IN_FLOAT32 = ("add", "sub", "mul", "div", "pow")
"""Where eager keeps a Python number in float32 beside a low-float tensor."""

table = {
    **{name: name for name in (
        "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
        "erf lgamma sigmoid reciprocal neg abs sign mul fmod atan2 hypot eq ne lt le gt ge isnan isinf floor ceil "
        "trunc".split()
    )},
    "sgn": "sign", "logical_not": "not", "bitwise_not": "not", "remainder": "rem", "maximum": "max", "minimum": "min",
    "logical_and": "and", "logical_or": "or", "logical_xor": "xor", "bitwise_and": "and", "bitwise_or": "or",
    "bitwise_xor": "xor", "__and__": "and", "__or__": "or", "__xor__": "xor", "bitwise_left_shift": "shl",
    "bitwise_right_shift": "shr", "__lshift__": "shl", "__rshift__": "shr", "div.Tensor": "div", "div.Scalar": "div",
    "floor_divide": "floordiv", "round.default": "round",
}  # fmt: skip
"""ATen name -> primitive, for the ops that are one primitive."""

INTEGERS_ALREADY = ("floor", "ceil", "trunc", "round")


def pointwise(prim: str) -> Callable[..., Result]:
    """The rule of an op that is one primitive: operands fitted to the result type (comparisons: to the common type)."""

    def apply(call: Call, *xs: Any, **_: Any) -> Result:
        if prim in INTEGERS_ALREADY and call.out.dtype in INTEGERS:
            return cast(xs[0], call.out.dtype)
        dtype = operand_dtype(call) if prim in (*COMPARE, *PREDICATES) else call.out.dtype
        if prim in PREDICATES and dtype not in ("f64", "f32", *LOW_FLOATS):
            return full(False, call.out)
        if prim in WITH_SCALARS_IN_FLOAT32 and any(not isinstance(x, Value) and not is_exact(x, dtype) for x in xs):
            dtype = "f32" if dtype in LOW_FLOATS else dtype
        return cast(emit(prim, *[fit(x, call.out.with_dtype(dtype)) for x in xs]), call.out.dtype)

    return apply


@rule("signbit")
def _signbit(call: Call, x: Value) -> Result:
    return emit("signbit", x) if x.aval.is_float else compare("lt", x, 0)


for names, prim in table.items():
    rule(names)(pointwise(prim))

for name in "add sub mul div pow neg abs sqrt rsqrt exp log sin cos round floor ceil trunc eq ne lt le gt ge".split():
    rule(name, namespace="prims")(pointwise(name))


@rule("add sub rsub")
def _add(call: Call, x: Any, y: Any, alpha: Any = 1) -> Result:
    """x +- alpha*y; with a factor, low floats round once. rsub has its operands the other way round."""
    prim = call.name.removeprefix("r")
    if call.out.dtype == "b1":
        return pointwise("or")(call, x, y)
    if call.name == "rsub":
        x, y = y, x
    if alpha == 1:
        return pointwise(prim)(call, x, y)
    scaled = _times(call, y, alpha)
    return cast(emit(prim, fit(x, scaled.aval), scaled), call.out.dtype)


def _times(call: Call, x: Any, factor: Any) -> Value:
    wide = call.out.with_dtype("f32") if call.out.dtype in LOW_FLOATS else call.out
    return emit("mul", fit(x, wide), fit(factor, wide))


@rule("div.Tensor_mode div.Scalar_mode")
def _div_mode(call: Call, x: Any, y: Any, rounding_mode: str | None = None) -> Result:
    a, b = fit(x, call.out), fit(y, call.out)
    if rounding_mode is None:
        return emit("div", a, b)
    if rounding_mode == "floor":
        return emit("floordiv", a, b)
    if call.out.is_float:
        return emit("trunc", emit("div", a, b))
    return emit("floordiv", emit("sub", a, emit("fmod", a, b)), b)


POWERS: dict[float, Callable[[Value], Value]] = {
    0: lambda x: full(1, x.aval),
    1: lambda x: x,
    2: lambda x: emit("mul", x, x),
    3: lambda x: emit("mul", emit("mul", x, x), x),
    0.5: lambda x: emit("sqrt", x),
    -0.5: lambda x: emit("rsqrt", x),
    -1: lambda x: emit("reciprocal", x),
    -2: lambda x: emit("reciprocal", emit("mul", x, x)),
}
"""Exponents that eager computes without pow."""


@rule("pow")
def _pow(call: Call, x: Any, exponent: Any) -> Result:
    if isinstance(exponent, Value) or exponent not in POWERS or not (call.out.is_float or exponent in (0, 1, 2, 3)):
        return pointwise("pow")(call, x, exponent)
    wide = "f32" if call.out.dtype in LOW_FLOATS and exponent not in (0, 1, 2) else call.out.dtype
    return cast(POWERS[exponent](fit(x, call.out.with_dtype(wide))), call.out.dtype)


@rule("relu")
def _relu(call: Call, x: Value) -> Result:
    return where(compare("le", x, 0), 0, x)


@rule("clamp.default clamp.Tensor clamp_min clamp_max")
def _clamp(call: Call, x: Value, lo: Any = None, hi: Any = None, **named: Any) -> Result:
    """The gradient passes on a bound, as torch's does: hence where, not min and max."""
    lo, hi = named.get("min", lo), named.get("max", hi)
    if call.name == "clamp_max":
        lo, hi = None, lo
    x = fit(x, call.out)
    x = x if lo is None else _bound("lt", x, lo)
    return x if hi is None else _bound("gt", x, hi)


def _bound(comparison: str, x: Value, bound: Any) -> Value:
    """A NaN bound gives NaN."""
    if isinstance(bound, float) and bound != bound:
        return full(bound, x.aval)
    limit = fit(bound, x.aval)
    past = emit(comparison, x, limit)
    if isinstance(bound, Value) and x.aval.is_float:
        past = emit("or", past, emit("isnan", limit))
    return emit("where", past, limit, x)


@rule("where.self")
@rule("where", namespace="prims")
def _where(call: Call, condition: Value, x: Any, y: Any) -> Result:
    return emit("where", fit(condition, call.out.with_dtype("b1")), fit(x, call.out), fit(y, call.out))


@rule("masked_fill")
def _masked_fill(call: Call, x: Value, mask: Value, value: Any) -> Result:
    return emit("where", fit(mask, call.out.with_dtype("b1")), fit(value, call.out), fit(x, call.out))


# ---------------------------------------------------------------------------------------------- conversions
@rule("_to_copy clone alias detach lift lift_fresh lift_fresh_copy contiguous copy positive")
@rule("alias_copy detach_copy resolve_conj resolve_neg")
def _same(call: Call, x: Value, *source: Any, **_: Any) -> Result:
    """copy(x, source) has the values of its source and the type of x."""
    return fit(source[0] if call.name == "copy" else x, call.out)


@rule("conj_physical _conj conj")
def _conj(call: Call, x: Value) -> Result:
    return x


@rule("convert_element_type", namespace="prims")
def _convert(call: Call, x: Value, *_: Any) -> Result:
    return cast(x, call.out.dtype)


# ---------------------------------------------------------------------------------------------- constants
def constant(value: Any) -> Callable[..., Result]:
    return lambda call, *args, **kwargs: full(value, call.out)


rule("zeros zeros_like new_zeros empty empty_like new_empty empty_permuted empty_strided new_empty_strided zero")(
    constant(0)
)
rule("ones ones_like new_ones")(constant(1))


@rule("full full_like new_full scalar_tensor fill")
def _full(call: Call, *args: Any, **_: Any) -> Result:
    value = args[0] if call.name == "scalar_tensor" else args[2] if call.name == "new_full" else args[1]
    return fit(value, call.out)


@rule("arange.start_step arange.start arange.default")
def _arange(call: Call, first: Any, *rest: Any, **_: Any) -> Result:
    start, step = (first if rest else 0), (rest[1] if len(rest) > 1 else 1)
    return _progression(call, start, step)


@rule("iota", namespace="prims")
def _iota(call: Call, length: Any, *, start: Any, step: Any, **_: Any) -> Result:
    return _progression(call, start, step)


def _progression(call: Call, start: Any, step: Any) -> Value:
    """start + step*i, computed in 64 bits for low and single floats as eager does, then rounded."""
    out = call.out
    wide = out.with_dtype("i64" if all(isinstance(n, (int, sympy.Basic)) for n in (start, step)) else "f64")
    if out.dtype in INTEGERS:
        wide = out
    x = cast(iota(out.shape[0], "i64"), wide.dtype)
    x = x if step == 1 else emit("mul", x, full(step, wide))
    x = x if start == 0 else emit("add", x, full(start, wide))
    return cast(x, out.dtype)


@rule("eye.default eye.m")
def _eye(call: Call, *_: Any, **__: Any) -> Result:
    rows, columns = (_line(call.out, axis) for axis in (0, 1))
    return cast(emit("eq", rows, columns), call.out.dtype)


def _line(aval: TensorType, axis: int) -> Value:
    shape = tuple(aval.shape[axis] if a == axis else 1 for a in (0, 1))
    return fit(reshape(iota(aval.shape[axis]), shape), aval.with_dtype("i64"))


# ---------------------------------------------------------------------------------------------- random numbers
@rule("philox_rand", namespace="rngprims")
def _philox_rand(call: Call, size: Any, seed: Value, offset: Value, *_: Any, **__: Any) -> Result:
    """(uniform numbers at seed and offset + flat index, how many were drawn)."""
    numbers, drawn = call.outs
    at = [reshape(cast(v, "i64"), ()) for v in (seed, offset)]
    uniform = emit("random", *at, shape=numbers.shape, dtype=numbers.dtype, kind="uniform")
    return uniform, full(numbers.numel, drawn)
