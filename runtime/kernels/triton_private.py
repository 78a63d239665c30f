"""Every private name of Triton that fusegrad uses lives here. Import it lazily: it imports triton.

The interpreter's builder is corrected so that it rounds, compares and reduces as a GPU does. It is a subclass behind a
semantic of its own: Triton's are never changed. Seen with Triton 3.6.0 and 3.7.1; `interpret` runs a self-test.
"""

from __future__ import annotations

import contextvars
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
import triton.language.extra.libdevice
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle, _get_np_dtype
from triton.runtime.jit import JITFunction

Array = np.ndarray[Any, Any]
VERSION = str(triton.__version__)


# -- launching ---------------------------------------------------------------------------------------------------------


def launches_are_watched() -> bool:
    """True where a profiler, say, hooks into Triton's launches."""
    runtime = triton.knobs.runtime
    return any(getattr(h, "calls", h is not None) for h in (runtime.launch_enter_hook, runtime.launch_exit_hook))


def launch_of(function: Any, compiled: Any, constants: Mapping[str, Any]) -> Callable[[int, int, Sequence[Any]], None]:
    """`f(grid, stream, arguments)` of a compiled kernel: what `JITFunction.run` ends with, after 6 to 12 microseconds.

    Raises AttributeError where this Triton has other names for it.
    """
    run, handle, metadata = compiled.run, compiled.function, compiled.packed_metadata
    names = [p.name for p in function.params]
    last = [constants[n] for n in names if n in constants]
    if any(n not in constants for n in names[len(names) - len(last) :]):
        raise AttributeError("constants between the arguments")

    def launch(grid: int, stream: int, arguments: Sequence[Any]) -> None:
        run(grid, 1, 1, stream, handle, metadata, None, None, None, *arguments, *last)

    return launch


def with_workspace(launch: Callable[..., None]) -> Callable[..., None]:
    """The same launch, in which Triton finds memory for what it keeps there itself; the caller's allocator stays."""

    def launch_with_workspace(*arguments: Any) -> None:
        context = contextvars.copy_context()
        context.run(triton.set_allocator, _workspace)
        context.run(launch, *arguments)

    return launch_with_workspace


def _workspace(size: int, _alignment: int, _stream: int | None) -> torch.Tensor:
    """On the current device and stream, where torch's blocks begin at multiples of more than Triton asks for."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")


_loaded: dict[int, Any] = {}


def keep_loaded(compiled: Any) -> None:
    """A compiled kernel stays loaded for CUDA graphs, which may outlive its class: Triton 3.8 unloads what it drops."""
    if hasattr(type(compiled), "__del__"):
        _loaded[id(compiled)] = compiled


# -- floats that numpy does not have -----------------------------------------------------------------------------------

FLOAT8 = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}


def bf16_to_f32(bits: Array) -> Array:
    """uint16 bits -> float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: Array) -> Array:
    """float32 -> uint16 bits, rounding to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(values.shape)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), nearest).astype(np.uint16)


def float8_to_f32(bits: Array, dtype: torch.dtype) -> Array:
    """uint8 bits -> float32, exactly."""
    return torch.tensor(bits, dtype=torch.uint8).view(dtype).float().numpy()


def f32_to_float8(values: Array, dtype: torch.dtype) -> Array:
    """float32 -> uint8 bits, to nearest even, saturating as the GPU's conversion does."""
    top = torch.finfo(dtype).max
    return torch.tensor(np.clip(values, -top, top), dtype=torch.float32).to(dtype).view(torch.uint8).numpy()


def widen(handle: Any) -> Array:
    """The numbers in a handle: bf16 and fp8 bits as float32, everything else as it is."""
    dtype = handle.dtype.scalar
    if dtype == tl.bfloat16:
        return bf16_to_f32(handle.data)
    if str(dtype) in FLOAT8:
        return float8_to_f32(handle.data, FLOAT8[str(dtype)])
    return np.asarray(handle.data)


def narrow(values: Array, dtype: Any) -> Any:
    """Numbers -> a handle of `dtype`, rounded to nearest even."""
    if dtype == tl.bfloat16:
        return TensorHandle(f32_to_bf16(values.astype(np.float32)), dtype)
    if str(dtype) in FLOAT8:
        return TensorHandle(f32_to_float8(values.astype(np.float32), FLOAT8[str(dtype)]), dtype)
    return TensorHandle(values.astype(_get_np_dtype(dtype), copy=False), dtype)


def truncated_to_bf16(handle: Any) -> Any:
    """The one explicit rounding mode that hardware offers besides nearest: towards zero."""
    bits = np.ascontiguousarray(handle.data, np.float32).view(np.uint32) >> 16
    return TensorHandle(bits.astype(np.uint16).reshape(handle.data.shape), tl.bfloat16)


# -- functions of libdevice and of inline PTX, by name -----------------------------------------------------------------

LIBDEVICE: dict[str, Callable[..., torch.Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in (
            "abs acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc erfinv exp exp2 expm1 floor "
            "fmax fmin hypot isinf isnan lgamma log log10 log1p log2 nextafter pow rsqrt sin sinh sqrt "
            "tan tanh trunc"
        ).split()
    },
    "fabs": torch.abs,
    "finitef": torch.isfinite,
    "isfinited": torch.isfinite,
    "isinfd": torch.isinf,
    "isnand": torch.isnan,
    "signbitf": torch.signbit,
    "signbitd": torch.signbit,
    "exp10": lambda x: torch.pow(10.0, x),
    "cbrt": lambda x: torch.copysign(x.abs() ** (1 / 3), x),
    "fmod": lambda x, y: torch.from_numpy(np.fmod(x.numpy(), y.numpy())),  # torch's own on CPUs is NaN of far quotients
    "fma": lambda x, y, z: (x.double() * y.double() + z.double()).to(x.dtype),
    "nearbyint": torch.round,
    "rint": torch.round,
    "llrint": lambda x: torch.round(x).to(torch.int64),
    "round": lambda x: torch.trunc(x.double() + torch.copysign(torch.full_like(x, 0.5), x)).to(x.dtype),
    "rcp_rn": torch.reciprocal,
    "div_rn": torch.div,
    "sqrt_rn": torch.sqrt,
    "fast_exp": torch.exp,
    "fast_log": torch.log,
    "fast_tanh": torch.tanh,
    "fast_pow": torch.pow,
    "fast_divide": torch.div,
    "normcdf": torch.special.ndtr,
    "normcdfinv": torch.special.ndtri,
    "erfcx": torch.special.erfcx,
    "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1,
    "y0": torch.special.bessel_y0,
    "y1": torch.special.bessel_y1,
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
}

INLINE_ASM: dict[str, Callable[[Array], Array]] = {
    "mov": lambda x: x,
    "v_mov": lambda x: x,
    "tanh.approx": np.tanh,
    "ex2.approx": np.exp2,
    "lg2.approx": np.log2,
    "sin.approx": np.sin,
    "cos.approx": np.cos,
    "sqrt.approx": np.sqrt,
    "rsqrt.approx": lambda x: 1 / np.sqrt(x),
    "rcp.approx": lambda x: 1 / x,
}
ASM_OF_HELPERS: dict[str, Callable[..., Any]] = {
    "mul.wide.u32 $0, $1, $2;": lambda x, y: TensorHandle(x.data.astype(np.uint64) * y.data, tl.uint64),
    "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;": lambda x: TensorHandle(widen(x), tl.float32),
    "cvt.rn.bf16x2.f32 $0, $2, $1;": lambda x: narrow(x.data, tl.bfloat16),
    "{ .reg .b32 zero; mov.u32 zero, %ctaid.z; add.u32 $0, $1, zero; }": lambda x: x,
}
"""What the helpers of emitted text ask of NVIDIA's assembler."""
_ASM = re.compile(r"(?P<name>v_mov|mov|\w+\.approx)[\w.]* \$0, ?\$1;?")


def by_torch(function: Callable[..., torch.Tensor], *arrays: Array) -> Array:
    """Apply a torch function to arrays. -> an array"""
    return function(*(torch.tensor(array) for array in arrays)).numpy()


def libdevice(symbol: str) -> Callable[..., torch.Tensor]:
    """`__nv_tanhf` -> torch.tanh."""
    name = symbol.removeprefix("__nv_").removeprefix("__ocml_").removesuffix("_f32").removesuffix("_f64")
    function = LIBDEVICE.get(name) or LIBDEVICE.get(name.removesuffix("f"))
    if function is None:
        raise NotImplementedError(f"libdevice function {symbol}")
    return function


class Results(list[Any]):
    """The results of an operation that has several, as Triton takes them."""

    def get_result(self, index: int) -> Any:
        return self[index]


# -- memory ------------------------------------------------------------------------------------------------------------


class LaunchMemory:
    """The address ranges that a launch may touch. Reads may run to the end of an aligned group of 16 bytes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        spans = [_span(tensor) for tensor in tensors if tensor.numel()]
        self.exact = np.array(spans, np.int64).reshape(-1, 2)
        self.rounded = np.stack([self.exact[:, 0] // 16 * 16, -(-self.exact[:, 1] // 16) * 16], axis=1)

    def check(self, pointers: Any, mask: Any, *, writes: bool) -> None:
        """Raise IndexError when an active lane lies outside every range."""
        addresses = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))
        active = addresses[np.broadcast_to(mask.data, addresses.shape).astype(bool)].astype(np.int64)
        if active.size and not self._covers(active, pointers.get_element_ty().primitive_bitwidth // 8 or 1, writes):
            raise IndexError(f"{'store' if writes else 'load'} outside the arguments' memory")

    def _covers(self, addresses: Array, itemsize: int, writes: bool) -> bool:
        spans = self.exact if writes else self.rounded
        first, last = addresses.min(), addresses.max() + itemsize
        if np.any((spans[:, 0] <= first) & (last <= spans[:, 1])):
            return True
        inside = (spans[:, :1] <= addresses) & (addresses + itemsize <= spans[:, 1:])
        return bool(inside.any(axis=0).all())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the byte after the last one of a strided tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


# -- the corrected builder ---------------------------------------------------------------------------------------------


class Builder(InterpreterBuilder):  # type: ignore[misc]
    """Triton's interpreter with a GPU's numerics: casts round to nearest even, bf16 computes in f32, max drops NaN."""

    memory = LaunchMemory(())

    def get_bf16(self, value: float) -> Any:
        return narrow(np.array([value], np.float32), tl.bfloat16)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        """Low floats go through float32, as they do on the GPU and in eager mode."""
        return narrow(widen(src), dst_type.scalar)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        toward_zero = str(rounding_mode).endswith("RTZ")
        if toward_zero and dst_type.scalar == tl.bfloat16:
            return truncated_to_bf16(src)
        if toward_zero:
            raise NotImplementedError(f"rounding towards zero to {dst_type.scalar}")
        return self.cast_impl(src, dst_type)

    def binary_op(self, lhs: Any, rhs: Any, op: Callable[..., Array]) -> Any:
        """A comparison stays boolean; the rest is rounded to the operands' dtype."""
        result = op(widen(lhs), widen(rhs))
        return TensorHandle(result, tl.int1) if result.dtype == np.bool_ else narrow(result, lhs.dtype.scalar)

    def unary_op(self, arg: Any, op: Callable[..., Array]) -> Any:
        return narrow(op(widen(arg)), arg.dtype.scalar)

    def create_minnumf(self, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_clampf(self, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> Any:
        low, high = (np.maximum, np.minimum) if str(propagate_nans).endswith("ALL") else (np.fmax, np.fmin)
        return narrow(high(low(widen(arg), widen(lo)), widen(hi)), arg.dtype.scalar)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        """Rounded once (through float64, which holds every product of two float32 exactly)."""
        wide = widen(x).astype(np.float64) * widen(y).astype(np.float64) + widen(z).astype(np.float64)
        return narrow(wide, z.dtype.scalar)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        """Each sum rounded once: scores and their transpose, made anew, agree bit for bit, as on a GPU."""
        dtype = d.data.dtype
        wide = np.float64 if dtype.kind == "f" else dtype
        return TensorHandle((np.matmul(widen(a), widen(b), dtype=wide) + d.data).astype(dtype), d.dtype.scalar)

    def create_umulhi(self, lhs: Any, rhs: Any) -> Any:
        """The upper half of an unsigned product, from halves of the operands: no 128-bit type is needed."""
        bits = lhs.data.itemsize * 8
        unsigned = np.dtype(f"uint{bits}")
        product = _high_product(lhs.data.view(unsigned), rhs.data.view(unsigned), bits // 2)
        return TensorHandle(product.view(lhs.data.dtype), lhs.dtype.scalar)

    def create_erf(self, arg: Any) -> Any:
        return self.unary_op(arg, lambda x: by_torch(torch.erf, x))

    def create_masked_load(
        self, ptrs: Any, mask: Any, other: Any, cache_modifier: Any, eviction_policy: Any, is_volatile: Any
    ) -> Any:
        self.memory.check(ptrs, mask, writes=False)
        return super().create_masked_load(ptrs, mask, other, cache_modifier, eviction_policy, is_volatile)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, cache: Any, eviction: Any) -> Any:
        self.memory.check(ptrs, mask, writes=True)
        return super().create_masked_store(ptrs, value, mask, cache, eviction)

    def create_atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        self.memory.check(ptr, mask, writes=True)
        return super().create_atomic_rmw(op, ptr, val, mask, sem, scope)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        self.memory.check(ptr, TensorHandle(np.ones_like(ptr.data, bool), tl.int1), writes=True)
        return super().create_atomic_cas(ptr, cmp, val, sem, scope)

    def create_extern_elementwise(self, lib: str, path: str, symbol: str, args: Any, ret_type: Any, pure: bool) -> Any:
        return narrow(by_torch(libdevice(symbol), *map(widen, args)), ret_type.scalar)

    def create_inline_asm(self, asm: str, constraints: str, values: Any, types: Any, pure: bool, pack: int) -> Results:
        if (known := ASM_OF_HELPERS.get(asm)) is not None:
            return Results([known(*values)])
        form = _ASM.fullmatch(" ".join(asm.split()))
        function = form and INLINE_ASM.get(form["name"])
        if function is None:
            raise NotImplementedError(f"inline assembly {asm!r}")
        return Results([self.unary_op(values[0], function)])


def _high_product(x: Array, y: Array, half: int) -> Array:
    """(x * y) >> 2*half, schoolbook, in the operands' own width."""
    shift = x.dtype.type(half)
    low = x.dtype.type((1 << half) - 1)
    x_high, x_low, y_high, y_low = x >> shift, x & low, y >> shift, y & low
    middle = x_high * y_low + (x_low * y_low >> shift)
    carried = (middle & low) + x_low * y_high
    return np.asarray(x_high * y_high + (middle >> shift) + (carried >> shift))


builder = Builder()
semantic = TritonSemantic(builder)


def tensor(values: Array, dtype: Any) -> Any:
    """An array -> a Triton tensor; one element without dimensions is a scalar."""
    if values.ndim == 0:
        return tl.tensor(TensorHandle(values.reshape(1), dtype), dtype)
    return tl.tensor(TensorHandle(values, dtype), tl.block_type(dtype, list(values.shape)))


def pointer(address: int, dtype: str) -> Any:
    """An argument of type `*dtype` (Triton's name for it)."""
    kind = tl.str_to_ty(f"*{dtype}", None)
    return tl.tensor(TensorHandle(np.array([address], np.uint64), kind), kind)


def integer(value: int) -> Any:
    """A run-time integer argument: i32 where it fits, as Triton's launcher types it."""
    kind, width = (tl.int32, np.int32) if -(2**31) <= value < 2**31 else (tl.int64, np.int64)
    return tl.tensor(TensorHandle(np.array([value], width), kind), kind)


# -- reductions and scans ----------------------------------------------------------------------------------------------

Combine = Callable[..., Any]


def _values(tensors: Sequence[Any]) -> list[Array]:
    return [np.broadcast_to(t.handle.data, [int(n) for n in t.shape]) for t in tensors]


def _combine(combine: Combine, left: Sequence[Array], right: Sequence[Array], dtypes: Sequence[Any]) -> list[Array]:
    """One call of the combining function on whole arrays."""
    result = combine(*(tensor(v, d) for side in (left, right) for v, d in zip(side, dtypes, strict=True)))
    results = result if isinstance(result, (tuple, tl.core.tuple)) else (result,)
    return [np.broadcast_to(r.handle.data, left[0].shape) for r in results]


def _tree(combine: Combine, values: list[Array], axis: int, dtypes: Sequence[Any]) -> list[Array]:
    """Fold neighbours in pairs, which keeps the order of the operands: log2(n) calls (n is a power of two)."""
    values = [np.moveaxis(v, axis, 0) for v in values]
    while len(values[0]) > 1:
        values = _combine(combine, [v[::2] for v in values], [v[1::2] for v in values], dtypes)
    return [v[0] for v in values]


def _prefixes(combine: Combine, values: list[Array], axis: int, dtypes: Sequence[Any]) -> list[Array]:
    """Inclusive scan by doubling the distance: log2(n) calls."""
    values = [np.moveaxis(v, axis, 0) for v in values]
    step = 1
    while step < len(values[0]):
        folded = _combine(combine, [np.roll(v, step, 0) for v in values], values, dtypes)
        values = [np.concatenate([v[:step], f[step:]]) for v, f in zip(values, folded, strict=True)]
        step *= 2
    return [np.moveaxis(v, 0, axis) for v in values]


def plain(value: Any) -> Any:
    """A constexpr -> its value."""
    return value.value if isinstance(value, tl.constexpr) else value


def _wrap(results: Sequence[Array], dtypes: Sequence[Any], single: bool) -> Any:
    tensors = tuple(tensor(np.asarray(r, order="C"), d) for r, d in zip(results, dtypes, strict=True))
    return tensors[0] if single else tensors


def reduce(input: Any, axis: Any, combine_fn: Combine, keep_dims: Any = False, **_: Any) -> Any:
    """tl.reduce on whole arrays; `axis=None` folds everything."""
    tensors = [input] if isinstance(input, tl.tensor) else list(input)
    values, dtypes = _values(tensors), [t.dtype for t in tensors]
    axis, ndim = plain(axis), values[0].ndim
    if axis is None:
        values = [v.reshape(-1) for v in values]
    folded = _fold(combine_fn, values, 0 if axis is None else axis % ndim, dtypes)
    if plain(keep_dims):
        folded = [v.reshape([1] * ndim) if axis is None else np.expand_dims(v, axis) for v in folded]
    return _wrap(folded, dtypes, isinstance(input, tl.tensor))


def _fold(combine: Combine, values: list[Array], axis: int, dtypes: Sequence[Any]) -> list[Array]:
    fast = FAST_FOLDS.get(getattr(combine, "__qualname__", "")) if combine.__module__ == tl.standard.__name__ else None
    if fast is None or dtypes[0] == tl.bfloat16:
        return _tree(combine, values, axis, dtypes)
    return [np.asarray(fast.reduce(values[0], axis=axis, dtype=values[0].dtype))]


FAST_FOLDS: dict[str, np.ufunc] = {"_sum_combine": np.add, "_elementwise_max": np.fmax, "_elementwise_min": np.fmin}


def scan(input: Any, axis: Any, combine_fn: Combine, reverse: Any = False, **_: Any) -> Any:
    """tl.associative_scan on whole arrays."""
    tensors = [input] if isinstance(input, tl.tensor) else list(input)
    values, dtypes = _values(tensors), [t.dtype for t in tensors]
    axis = plain(axis) % values[0].ndim

    def turn(value: Array) -> Array:
        return np.flip(value, axis) if plain(reverse) else value

    scanned = _prefixes(combine_fn, [turn(v) for v in values], axis, dtypes)
    return _wrap([turn(v) for v in scanned], dtypes, isinstance(input, tl.tensor))


# -- Python constructs that mean something else in a kernel ------------------------------------------------------------


def loop(first: Any, last: Any = None, step: Any = 1, **_: Any) -> Iterator[Any]:
    """tl.range and range: the loop variable is an integer tensor, i64 as soon as one of the bounds is."""
    first, last = (0, first) if last is None else (first, last)
    bounds = [semantic.to_tensor(plain(bound)) for bound in (first, last, step)]
    dtype = tl.int64 if any(b.dtype.primitive_bitwidth == 64 for b in bounds) else tl.int32
    for index in range(*(int(b.handle.data.item()) for b in bounds)):
        yield tensor(np.array(index, _get_np_dtype(dtype)), dtype)


def static_loop(first: Any, last: Any = None, step: Any = 1, **_: Any) -> range:
    """tl.static_range: the loop variable is a constant."""
    first, last = (0, first) if last is None else (first, last)
    return range(int(plain(first)), int(plain(last)), int(plain(step)))


def truth(value: Any) -> bool:
    """The condition of an `if` or `while`, which only a scalar can be."""
    if isinstance(value, tl.tensor) and value.handle.data.size != 1:
        raise TypeError("a condition must be a scalar, not a block")
    return bool(plain(value))


def both(left: Any, right: Callable[[], Any]) -> Any:
    """`left and right`: elementwise on tensors."""
    return left.logical_and(right()) if isinstance(left, tl.tensor) else (plain(left) and right())


def either(left: Any, right: Callable[[], Any]) -> Any:
    """`left or right`: elementwise on tensors."""
    return left.logical_or(right()) if isinstance(left, tl.tensor) else (plain(left) or right())


def opposite(value: Any) -> Any:
    """`not value`: elementwise on tensors."""
    return value == 0 if isinstance(value, tl.tensor) else not plain(value)


def carry(value: Any) -> Any:
    """A number kept in a variable that a loop or branch changes is a tensor."""
    return semantic.to_tensor(value, False)


def multiple_of(value: Any, factor: Any) -> Any:
    """tl.multiple_of checks the claim where it is about a scalar."""
    if isinstance(value, tl.tensor) and value.handle.data.size == 1 and int(value.handle.data.item()) % plain(factor):
        raise ValueError(f"multiple_of: {int(value.handle.data.item())} is not a multiple of {plain(factor)}")
    return value


def _static_assert(condition: Any, message: Any = "") -> None:
    if not truth(condition):
        raise AssertionError(plain(message))


class DeviceAssertion(AssertionError):
    """A condition of `tl.device_assert` that is false in a lane."""


def _device_assert(condition: Any, message: Any = "", mask: Any = None) -> None:
    holds = condition.handle.data.astype(bool)
    if mask is not None:
        holds = holds | ~mask.handle.data.astype(bool)
    if not holds.all():
        raise DeviceAssertion(plain(message))


def _is_true(value: Any) -> bool:
    """bool(tensor) as Triton's own code means it: `if mask` asks whether there is a mask."""
    return bool(value.handle.data.item()) if value.handle.data.size == 1 else True


# -- what has to be exchanged in triton.language while a kernel runs ---------------------------------------------------


class Exchange(NamedTuple):
    """`owner.name` is `replacement` while a kernel is interpreted."""

    owner: Any
    name: str
    replacement: Any


def is_jit(value: object) -> bool:
    """A @triton.jit function, also under TRITON_INTERPRET=1."""
    return isinstance(value, (JITFunction, InterpretedFunction))


def _with_our_semantic(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return function(*args, _semantic=semantic, **kwargs)

    return call


def _members(owner: Any, interpreted: Callable[[Any], Any]) -> Iterator[Exchange]:
    for name, member in list(vars(owner).items()):
        if is_jit(member):
            yield Exchange(owner, name, interpreted(member))
        elif inspect.isfunction(member) and tl.core.is_builtin(member):
            yield Exchange(owner, name, _with_our_semantic(member))


def _device_library() -> Iterator[Exchange]:
    """libdevice is a module of empty functions that the compiler fills in per backend: take CUDA's."""
    from triton.language.extra.cuda import libdevice as cuda

    for name, member in list(vars(triton.language.extra.libdevice).items()):
        if inspect.isfunction(member) and hasattr(cuda, name):
            yield Exchange(triton.language.extra.libdevice, name, _with_our_semantic(getattr(cuda, name)))


def _language() -> dict[str, Any]:
    return {
        "range": loop, "static_range": static_loop, "reduce": reduce, "associative_scan": scan,
        "static_assert": _static_assert, "static_print": print, "device_assert": _device_assert,
        "multiple_of": multiple_of, "max_contiguous": lambda value, _: value, "max_constancy": lambda value, _: value,
    }  # fmt: skip


def _methods() -> dict[str, Any]:
    return {
        "__bool__": _is_true,
        "__index__": lambda self: int(self.handle.data.item()),
        "__repr__": lambda self: repr(self.handle.data),
        "__str__": lambda self: str(self.handle.data),
        "T": property(lambda self: semantic.permute(self, (1, 0))),
        "reduce": reduce,
        "associative_scan": scan,
    }


def exchanges(interpreted: Callable[[Any], Any]) -> list[Exchange]:
    """All exchanges, in order. `interpreted` turns a jit function of Triton's own library into a Python function."""
    names = ("core", "math", "standard", "random")
    modules: list[ModuleType] = [tl, *(sys.modules[f"triton.language.{name}"] for name in names)]
    owners = (*modules, tl.tensor, tl.core.tensor_descriptor_base)
    result = [e for owner in owners for e in _members(owner, interpreted)]
    result += _device_library()
    result += [Exchange(owner, name, value) for owner in (tl, tl.core) for name, value in _language().items()]
    result += [Exchange(tl.tensor, name, value) for name, value in _methods().items()]
    return [*result, Exchange(tl.dtype, "to_ir", lambda self, _: self)]


KERNEL_BUILTINS: dict[str, Any] = {
    "range": loop, "_truth": truth, "_both": both, "_either": either, "_opposite": opposite, "_carried": carry,
}  # fmt: skip
"""Names that a rewritten function sees besides its module's."""
