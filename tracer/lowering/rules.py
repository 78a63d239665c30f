"""The tools of every ATen rule: the table, the call it is given, and the few ways to emit.

A rule takes the call and its arguments, tensors as values of the graph and sizes as expressions, and returns a value,
a tuple of values, or None where it does not apply. `composite` formulas are written in torch and lowered op by op.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from ...ir import Size, TensorType, Value, emit
from ...ir.infer import same_shape, sizes_equal
from ...ir.types import INTEGERS, LOW_FLOATS, product
from ..dtypes import from_torch
from ..sizes import hint_of
from ..torch_private import plain_tensors

Result: TypeAlias = "Value | tuple[Value | None, ...] | None"
Rule: TypeAlias = Callable[..., Any]

rules: dict[OpOverload, Rule] = {}
composites: dict[OpOverload, Callable[..., Any]] = {}


@dataclass(frozen=True)
class Call:
    """One ATen call: the op, its arguments as torch gave them (fakes, SymInts), and the types of its results.

    `reads(i)`: whether result i may have a reader.
    """

    op: OpOverload
    args: tuple[Any, ...]
    outs: tuple[TensorType, ...]
    sizes: Callable[[Any], Any]
    reads: Callable[[int], bool]

    @property
    def out(self) -> TensorType:
        return self.outs[0]

    @property
    def name(self) -> str:
        return self.op._schema.name.split("::")[1]

    def agree(self, a: Any, b: Any) -> bool:
        """True if two sizes, as torch gave them, are equal now; if so they are from now on, by a guard."""
        return bool(hint_of(a) == hint_of(b) and a == b)

    def argument(self, index: int, default: Any = None) -> Any:
        """The positional argument as torch gave it."""
        return self.args[index] if len(self.args) > index else default


def overloads(names: str, namespace: str = "aten") -> Iterator[OpOverload]:
    """The overloads that `names` mean ("mul", "max.dim") in this version of torch; names it lacks mean none."""
    for name in names.split():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops, namespace), packet, None)
        if not isinstance(operator, OpOverloadPacket):
            continue
        for each in [overload] if overload else operator.overloads():  # type: ignore[no-untyped-call]
            if each in operator.overloads():  # type: ignore[no-untyped-call]
                yield getattr(operator, each)


def rule(names: str, namespace: str = "aten") -> Callable[[Rule], Rule]:
    """Decorator: the rule of the ops that `names` mean."""
    return _registration(rules, overloads(names, namespace))


def composite(names: str) -> Callable[[Rule], Rule]:
    """Decorator: the formula, in torch, of the ops that `names` mean."""
    return _registration(composites, overloads(names))


def _registration(table: dict[OpOverload, Rule], ops: Iterable[OpOverload]) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        table.update(dict.fromkeys(ops, function))
        return function

    return register


# ---------------------------------------------------------------------------------------------- emitting
def full(value: Any, aval: TensorType) -> Value:
    """A constant of that type; the number is spelled as the dtype says."""
    return emit("full", value=number_of_dtype(value, aval.dtype), shape=aval.shape, dtype=aval.dtype)


def number_of_dtype(value: Any, dtype: str) -> Any:
    if isinstance(value, sympy.Basic):
        return value
    if dtype == "b1":
        return bool(value)
    return int(value) if dtype in INTEGERS else round_to_dtype(float(value), dtype)


def cast(x: Value, dtype: str) -> Value:
    if x.dtype == dtype:
        return x
    return emit("cast", x if dtype != "f8e4m3fn" or SATURATES else _nan_beyond(x), dtype=dtype)


def _saturates() -> bool:
    with plain_tensors():  # this module may be imported within a mode of the user's, and for another device
        return bool(torch.tensor(500.0, device="cpu").to(torch.float8_e4m3fn).float() == 448.0)


SATURATES = _saturates()
"""True if this torch makes what is too large for float8_e4m3fn the largest value, as the primitive does, or NaN."""


def _nan_beyond(x: Value) -> Value:
    """x, with NaN where rounding to float8_e4m3fn leaves its range."""
    wide = cast(x, "f32")
    is_too_large = emit("gt", emit("abs", wide), full(464.0, wide.aval))
    return emit("where", is_too_large, full(math.nan, wide.aval), wide)


def broadcast(x: Value, shape: Sequence[Size], axes: Iterable[int]) -> Value:
    """Axis i of x becomes axis axes[i] of the result."""
    axes = tuple(axes)
    if axes == tuple(range(len(shape))) and same_shape(x.shape, shape):
        return x
    if x.prim == "full":
        return emit("full", value=x.params["value"], shape=tuple(shape), dtype=x.dtype)
    return emit("broadcast", x, shape=tuple(shape), axes=axes)


def expand(x: Value, shape: Sequence[Size]) -> Value:
    """Right-aligned broadcasting."""
    return broadcast(x, shape, range(len(shape) - x.ndim, len(shape)))


def fit(x: Any, aval: TensorType) -> Value:
    """A number or value as that type: torch's promotion and broadcasting made explicit."""
    if not isinstance(x, Value):
        return full(x, aval)
    return expand(cast(x, aval.dtype), aval.shape)


def reshape(x: Value, shape: Sequence[Size]) -> Value:
    if same_shape(x.shape, shape):
        return x
    if x.prim == "full":
        return emit("full", value=x.params["value"], shape=tuple(shape), dtype=x.dtype)
    return emit("reshape", x, shape=tuple(shape))


def permute(x: Value, perm: Iterable[int]) -> Value:
    perm = tuple(perm)
    return x if perm == tuple(range(x.ndim)) else emit("permute", x, perm=perm)


def where(condition: Value, x: Any, y: Any) -> Value:
    """One of x and y may be a number."""
    like = x if isinstance(x, Value) else y
    return emit("where", condition, fit(x, like.aval), fit(y, like.aval))


def compare(prim: str, x: Value, y: Any) -> Value:
    return emit(prim, x, fit(y, x.aval))


def cut(x: Value, axis: int, start: Size, stop: Size, step: int = 1) -> Value:
    """x[..., start:stop:step, ...]"""
    if step == 1 and sizes_equal(start, 0) and sizes_equal(stop, x.shape[axis]):
        return x
    return emit(
        "slice",
        x,
        start=_at((0,) * x.ndim, axis, start),
        stop=_at(x.shape, axis, stop),
        step=_at((1,) * x.ndim, axis, step),
    )


def place(x: Value, axis: int, lo: Size, hi: Size, step: int = 1) -> Value:
    """The adjoint of `cut`: zeros around and between the elements along one axis."""
    zeros = (0,) * x.ndim
    return emit("pad", x, lo=_at(zeros, axis, lo), hi=_at(zeros, axis, hi), inner=_at(zeros, axis, step - 1))


def _at(values: Sequence[Any], axis: int, value: Any) -> tuple[Any, ...]:
    return tuple(value if i == axis else v for i, v in enumerate(values))


def iota(size: Size, dtype: str = "i64") -> Value:
    return emit("iota", size=size, dtype=dtype)


def positions(shape: Sequence[Size], axis: int) -> Value:
    """The i64 tensor of that shape which holds each element's index along `axis`."""
    return broadcast(iota(shape[axis]), shape, (axis,))


def is_at_index(x: Value, index: Value, axis: int) -> Value:
    """True where an element of x lies at the index along an axis. index: x.shape without the axis."""
    other_axes = [a for a in range(x.ndim) if a != axis]
    return emit("eq", positions(x.shape, axis), broadcast(index, x.shape, other_axes))


def count(shape: Sequence[Size], axes: Iterable[int]) -> Size:
    return product(shape[a] for a in axes)


def axes_of(dims: Any, ndim: int) -> tuple[int, ...]:
    """torch's `dim` argument (None or empty: all) as ascending axes."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return tuple(range(ndim))
    return tuple(sorted({d % ndim for d in ((dims,) if isinstance(dims, int) else dims)})) if ndim else ()


# ---------------------------------------------------------------------------------------------- dtypes
def compute_dtype(dtype: str) -> str:
    """The dtype in which eager computes: float32 for the low floats."""
    return "f32" if dtype in LOW_FLOATS else dtype


def operand_dtype(call: Call) -> str:
    """The common dtype of the operands, by torch's promotion."""
    operands = [a for a in call.args if isinstance(a, (torch.Tensor, int, float, bool, torch.SymInt, torch.SymFloat))]
    computed, _ = elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    return from_torch(computed)


def round_to_dtype(number: float, dtype: str) -> float:
    """The number as a low float holds it: to nearest, ties to even, too large to infinity."""
    if number != number or dtype not in LOW_FLOATS:
        return number
    try:
        if dtype == "f16":
            return float(struct.unpack("<e", struct.pack("<e", number))[0])
        (bits,) = struct.unpack("<I", struct.pack("<f", number))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return float(struct.unpack("<f", struct.pack("<I", bits))[0])
    except OverflowError:
        return math.copysign(math.inf, number)


def is_exact(number: Any, dtype: str) -> bool:
    """True if a Python number survives being stored in that dtype; False for an expression."""
    return isinstance(number, (int, float)) and (dtype not in LOW_FLOATS or round_to_dtype(number, dtype) == number)


LOW_TORCH = (torch.float16, torch.bfloat16)


def in_float32(formula: Callable[..., Any]) -> Callable[..., Any]:
    """The formula on low floats computed in float32 and rounded once, as eager kernels do."""

    @functools.wraps(formula)
    def widened(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(a, torch.Tensor) and a.dtype in LOW_TORCH for a in args):
            return formula(*args, **kwargs)
        wide = [a.float() if isinstance(a, torch.Tensor) and a.dtype in LOW_TORCH else a for a in args]
        floats = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
        _, common = elementwise_dtypes(*floats, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
        return formula(*wide, **kwargs).to(common)

    return widened
