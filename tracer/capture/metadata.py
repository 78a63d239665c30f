"""Fake tensors that answer most operations from the shapes of their arguments.

torch runs a Python decomposition on symbolic sizes for each: 0.5 ms for a sum, 3 for exp, 28 for clamp. Here
an operation is tried once per pattern on tensors without data, whose sizes are primes told apart, and what becomes of
these becomes of the symbols. Only where arguments are dense, and sizes of the result are sizes of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import sympy
import torch

from ..torch_private import (
    ASKS_DEVICE,
    FakeTensor,
    FakeTensorMode,
    has_kernel,
    memory_like,
    memory_of,
    views_take_symbols,
    within_kernel,
)

Tensor = torch.Tensor
Pattern = tuple[torch.dtype, tuple[int, ...], tuple[Any, ...]]
"""Of a tensor: dtype, each length (-1 - k: the k-th unknown one), its axes from the innermost outwards.

~axis: the stride along it is 0; (n,): the stride along the next is n, after a gap; (n, factor): as many times more.
"""
APART = ((1009, 1021, 1031, 1049, 1061, 1087, 1103, 1123), (2113, 2087, 2063, 2029, 2011, 1999, 1987, 1949))
"""Two examples, so that nothing rests on which size is larger."""
LIKE = dict.fromkeys(
    (torch.ops.aten.softshrink_backward.default, torch.ops.aten.hardshrink_backward.default), torch.ops.aten.mul.Tensor
)
"""Operations that torch has no shapes for where sizes are symbols, and one whose result looks like theirs."""
PLAIN = (bool, int, float, type(None), str, torch.dtype, torch.layout, torch.memory_format, tuple)
_NAMES = """
    sum sum.dim_IntList mean mean.dim prod prod.dim_int amax amin any any.dim all all.dim logsumexp var.correction
    argmax argmin cumsum cumprod _softmax _log_softmax mm bmm _to_copy zeros_like ones_like full_like empty_like
"""
SHAPED = frozenset(f"aten::{name}" for name in _NAMES.split())
"""Operations that are no elementwise ones, whose result has sizes of their arguments."""
SPREAD = (torch.ops.aten.select_backward.default, torch.ops.aten.slice_backward.default)
"""Operations that make zeros of the sizes that they are given, but for what they are given."""
VIEWS = frozenset(f"aten::{name}" for name in "unsqueeze transpose.int t select.int squeeze.dim squeeze.dims".split())
"""Views whose kernel in C++ takes symbols as they are."""


class Fakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """torch's fake mode with a shorter way for what most operations are."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.memories: dict[Any, Tensor] = {}  # one tensor without data for each pattern, by the lengths in it

    def __enter__(self) -> Self:
        if not self.enter_stack:
            self.in_kernel_invocation = False  # an interrupt between two lines of torch leaves it on
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if not self.enter_stack:
            self.in_kernel_invocation = False  # what was captured is asked for its device without the mode, too

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        func, args = LIKE.get(func, func), args[:2] if func in LIKE else args
        fake = self._fake_result(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs or {}) if fake is None else fake

    def _fake_result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        if is_exemplary(func):
            return by_example(self, func, args, kwargs)
        if func in SPREAD and not kwargs and _is_simple(self, args[0], args[0].device) and args[0].constant is None:
            memory = torch.empty(args[1], dtype=args[0].dtype, device="meta")
            return FakeTensor(self, memory, args[0].device)
        if not views_take_symbols or kwargs or not _is_simple_view(self, args):
            return None
        if (axes := AXES.get(func)) is not None:
            layout = axes(*args)
            return None if layout is None else make_view(self, aten.as_strided.default, (args[0], *layout))
        return make_view(self, func, args) if func.name() in VIEWS else None


@lru_cache(maxsize=2048)
def is_exemplary(func: Any) -> bool:
    """True if an operation makes one tensor, as large as what it is given, or writes number by number, and draws
    nothing."""
    tags, returns = func.tags, func._schema.returns
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in tags or torch.Tag.inplace_view in tags:
        return False
    one = len(returns) == 1 and str(returns[0].type) == "Tensor"
    keeps_sizes = torch.Tag.pointwise in tags or (func.name() in SHAPED and not func._schema.is_mutable)
    return one and keeps_sizes and not has_kernel(func.name(), "CompositeImplicitAutograd")


def by_example(mode: Fakes, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The fake result; None where it takes torch to know."""
    tensors: list[Any] = [a for a in args if isinstance(a, Tensor)]
    if not tensors or not all(_is_simple(mode, t, tensors[0].device) for t in tensors):
        return None
    # What torch knows the values of, or what is written to under another name, takes torch's own way.
    device, constants = tensors[0].device, [t.constant is not None for t in tensors]
    if any(constants) and (func._schema.is_mutable or all(constants)):  # values that torch follows
        return None
    if func._schema.is_mutable and (args[0] is not tensors[0] or _is_shared(tensors)):
        return None
    # The arguments as a pattern: one answer serves all calls that have the same one.
    lengths: dict[Any, tuple[int, Any]] = {}
    slots = tuple(_slot(a, lengths, device) for a in args)
    named = tuple((k, _slot(v, lengths, device)) for k, v in kwargs.items())
    if None in slots or any(slot is None for _, slot in named) or len(lengths) > len(APART[0]):
        return None
    answer = _result_pattern(func, slots, named, torch.get_default_dtype())
    if answer is None or isinstance(answer, _Written):
        return None if answer is None else tensors[0]
    return _fake_in_memory(mode, answer, [(expr, n) for expr, (_, n) in lengths.items()], device)


def _is_simple(mode: Fakes, t: Tensor, device: torch.device) -> bool:
    return (
        type(t) is FakeTensor and t.fake_mode is mode and t.layout is torch.strided
        and t.device == device and not t.dtype.is_complex and not t.is_neg()
    )  # fmt: skip


def _is_shared(tensors: Sequence[Tensor]) -> bool:
    """True if the memory that is written to may be read elsewhere."""
    return any(t is not tensors[0] and memory_of(t) == memory_of(tensors[0]) for t in tensors)


def _fake_in_memory(mode: Fakes, answer: Pattern, lengths: Sequence[tuple[Any, Any]], device: torch.device) -> Tensor:
    key = (answer, *(lengths[-1 - n][0] for n in answer[1] if n < 0))
    memory = mode.memories.get(key) if memory_like is not None else None
    if memory is None:
        memory = mode.memories[key] = _memory(answer, [s for _, s in lengths])
        return FakeTensor(mode, memory, device)
    return FakeTensor(mode, memory if memory_like is None else memory_like(memory), device)


def _memory(pattern: Pattern, lengths: Sequence[Any]) -> Tensor:
    dtype, dims, order = pattern
    sizes = [n if n >= 0 else lengths[-1 - n] for n in dims]
    if _is_row_major(order):  # said so, it need not be found out by symbols
        return torch.empty(sizes, dtype=dtype, device="meta")
    return torch.empty_strided(sizes, strides_in_order(sizes, order), dtype=dtype, device="meta")


# ------------------------------------------------------------------ views
def make_view(mode: Fakes, func: Any, args: Sequence[Any]) -> Tensor:
    """A view as the kernel in C++ makes it, without torch's decomposition."""
    with within_kernel(mode):
        memory = func(*args)
    fake: Tensor = FakeTensor(mode, memory, args[0].device)
    return fake


def _is_simple_view(mode: Fakes, args: Sequence[Any]) -> bool:
    t = args[0] if args else None
    return (
        type(t) is FakeTensor and t.fake_mode is mode and t.constant is None and t.layout is torch.strided
    )  # fmt: skip


def _permute_layout(t: Tensor, order: Sequence[int]) -> tuple[Any, ...] | None:
    """Sizes and strides of `t.permute(order)`; None where it raises."""
    axes = [a + t.dim() if a < 0 else a for a in order]
    if sorted(axes) != list(range(t.dim())):
        return None
    return [t.shape[a] for a in axes], [t.stride()[a] for a in axes], t.storage_offset()


def _expand_layout(t: Tensor, target: Sequence[Any], implicit: bool = False) -> tuple[Any, ...] | None:
    """Sizes and strides of `t.expand(target)`; None where it raises, or a length may be one."""
    new = len(target) - t.dim()
    if new < 0 or not all(map(_is_longer_than_one, target[:new])):
        return None
    sizes, strides = list(target[:new]), [0] * new
    for n, size, stride in zip(target[new:], t.shape, t.stride(), strict=True):
        same = (type(n) is int and n == -1) or _length(n) == _length(size)
        if not same and not (type(size) is int and size == 1 and _is_longer_than_one(n)):
            return None
        sizes.append(size if same else n)
        strides.append(stride if same else 0)
    return sizes, strides, t.storage_offset()


def _slice_layout(
    t: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[Any, ...] | None:
    """Sizes and strides of `t[start:end:step]` along an axis whose length is a number; None where it is not."""
    sizes, strides = list(t.shape), list(t.stride())
    numbers = (dim, step, *(n for n in (start, end) if n is not None))
    if not all(type(n) is int for n in numbers) or step < 1 or not -len(sizes) <= dim < len(sizes):
        return None
    if type(length := _length(sizes[dim])) is not int:
        return None
    begin, stop, _ = slice(start, end, step).indices(length)
    offset = t.storage_offset() + begin * strides[dim]
    sizes[dim], strides[dim] = max(0, -((begin - stop) // step)), strides[dim] * step
    return sizes, strides, offset


def _is_longer_than_one(n: Any) -> bool:
    """True if a length is known to be two at least."""
    return n > 1 if type(n) is int else bool(n.node.shape_env.bound_sympy(n.node.expr).lower >= 2)


aten = torch.ops.aten
Axes = Callable[..., tuple[Any, ...] | None]
AXES: dict[Any, Axes] = {
    aten.permute.default: _permute_layout,
    aten.expand.default: _expand_layout,
    aten.slice.Tensor: _slice_layout,
}
"""Views that take axes of their argument: sizes, strides and offset."""


# ------------------------------------------------------------------ patterns
def _slot(value: Any, lengths: dict[Any, tuple[int, Any]], device: torch.device) -> Any:
    """The pattern that tells an argument apart from others; None where it has no pattern."""
    if isinstance(value, Tensor):
        return _pattern(value, lengths)
    if isinstance(value, torch.device):
        return (torch.device, torch.device("meta")) if value == device else None
    value = tuple(value) if isinstance(value, list) else value
    kinds = tuple(map(type, value)) if isinstance(value, tuple) else ()
    return (type(value), value, kinds) if type(value) in PLAIN and set(kinds) <= {int} else None


def _pattern(t: Tensor, lengths: dict[Any, tuple[int, Any]]) -> Pattern | None:
    """The layout of a tensor in memory; None where it covers itself in part, or has gaps of a length that is not
    known."""
    shape = t.shape
    sizes, strides = [_length(n) for n in shape], [_length(n) for n in t.stride()]
    order = _order(sizes, strides)
    if order is None:
        return None
    dims = tuple(
        n if isinstance(n, int) else _number_of(n, lengths, s) for n, s in zip(sizes, shape, strict=True)
    )
    return t.dtype, dims, tuple(_numbered(axis, lengths) for axis in order)


def _number_of(expr: Any, lengths: dict[Any, tuple[int, Any]], length: Any = None) -> int:
    """-1 - k of the k-th unknown length."""
    known = lengths.get(expr)
    if known is None or known[1] is None:
        lengths[expr] = known = (len(lengths) if known is None else known[0], length)
    return -1 - known[0]


def _numbered(axis: Any, lengths: dict[Any, tuple[int, Any]]) -> Any:
    """A gap of unknown length by its number."""
    return (axis[0], _number_of(axis[1], lengths)) if isinstance(axis, tuple) and len(axis) == 2 else axis


def _length(n: Any) -> Any:
    """A length as an int, or as the expression that is known of it."""
    expr = n if isinstance(n, int) else n.node.expr
    return int(expr) if not isinstance(expr, int) and expr.is_number else expr


def _order(sizes: Sequence[Any], strides: Sequence[Any]) -> tuple[Any, ...] | None:
    """The axes from the innermost outwards, each step as long as what lies within it, or as it says."""
    axes_left, step = list(range(len(sizes)))[::-1], 1
    order: list[Any] = []
    while axes_left:
        axis = next((i for i in axes_left if strides[i] == step), None)
        if axis is None and (axis := _beyond(axes_left, strides, step)) is not None:
            order.append((step := strides[axis],))
        elif axis is None and (axis := _beyond_unknown(axes_left, strides, step)) is not None:
            order.append((None, strides[axis] / step))
            step = strides[axis]
        if axis is None:
            break
        axes_left.remove(axis)
        order.append(axis)
        step = step * sizes[axis]
    return None if any(strides[i] != 0 for i in axes_left) else (*order, *(~i for i in axes_left))


def _beyond(axes_left: Sequence[int], strides: Sequence[Any], step: Any) -> int | None:
    """The axis that lies next behind a gap, where both its step and what lies within it are numbers."""
    if not isinstance(step, int):
        return None
    candidates = [i for i in axes_left if isinstance(strides[i], int) and strides[i] > step]
    return min(candidates, key=strides.__getitem__, default=None)


def _beyond_unknown(axes_left: Sequence[int], strides: Sequence[Any], step: Any) -> int | None:
    """The same where the gap is as many times longer as sizes say: `x[:, :, t]`."""
    factors = {i: strides[i] / step for i in axes_left if isinstance(strides[i], sympy.Expr)}
    within = {i: f.free_symbols for i, f in factors.items() if _is_product(f)}
    best = min(within, key=lambda i: len(within[i]), default=None)
    return best if best is not None and all(within[best] <= symbols for symbols in within.values()) else None


def _is_product(factor: sympy.Expr) -> bool:
    """True for sizes and numbers multiplied."""
    return all((f.is_Symbol or f.is_Integer) and f.is_positive for f in sympy.Mul.make_args(factor))


def _is_row_major(order: Sequence[int]) -> bool:
    return all(i + axis + 1 == len(order) for i, axis in enumerate(order))


def strides_in_order(sizes: Sequence[Any], order: Sequence[Any]) -> list[Any]:
    """The strides of axes that lie in this order, from the innermost outwards; see Pattern."""
    strides, step = [0] * len(sizes), 1
    for axis in order:
        if isinstance(axis, tuple):
            step = axis[0] if axis[0] is not None else step * axis[1]
        elif axis >= 0:
            strides[axis] = step
            step = step * sizes[axis]
    return strides


# ------------------------------------------------------------------ examples
@dataclass(frozen=True)
class _Written:
    """The answer of an operation in place that leaves its first argument as long as it was."""


WRITTEN = _Written()
LOW_FLOATS = (torch.float16, torch.bfloat16)


@lru_cache(maxsize=8192)
def _result_pattern(func: Any, slots: Any, named: Any, default: torch.dtype) -> Pattern | _Written | None:
    """The result of an operation for such arguments; None where torch raises, or sizes come from elsewhere."""
    try:
        answers = {_result_at_primes(func, slots, named, primes) for primes in APART}
    except Exception:
        return None
    return answers.pop() if len(answers) == 1 else None


def _result_at_primes(func: Any, slots: Any, named: Any, primes: Sequence[int]) -> Pattern | _Written | None:
    args, kwargs = [_example(s, primes) for s in slots], {k: _example(s, primes) for k, s in named}
    inputs = [(a.shape, a.stride(), a.dtype) for a in args if isinstance(a, Tensor)]
    result = func(*args, **kwargs)
    if result is args[0]:
        return WRITTEN if inputs[0] == (result.shape, result.stride(), result.dtype) else None
    fills_memory = result.device.type == "meta" and result.layout is torch.strided and not result.storage_offset()
    if not fills_memory or result.is_neg() or result.is_conj() or result._is_view():
        return None
    number_of_prime = {n: -1 - k for k, n in enumerate(primes)}
    constants = {1, *(n for shape, _, _ in inputs for n in shape if n not in number_of_prime)}
    order = _order(result.shape, _strides_as_run(func, args, kwargs, result))
    if order is None or any(isinstance(axis, tuple) or axis < 0 for axis in order):
        return None
    if not all(n in number_of_prime or n in constants for n in result.shape):
        return None
    return result.dtype, tuple(number_of_prime.get(n, n) for n in result.shape), order


def _strides_as_run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> Sequence[int]:
    """The strides of an elementwise result as a device has them: torch widens low floats without data first, of which
    one number for all of an axis becomes as many."""
    if torch.Tag.pointwise not in func.tags or not any(isinstance(a, Tensor) and a.dtype in LOW_FLOATS for a in args):
        return result.stride()
    wide = [_widened(a) if isinstance(a, Tensor) and a.dtype in LOW_FLOATS else a for a in args]
    strides: Sequence[int] = func(*wide, **kwargs).stride()
    return strides


def _widened(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=torch.float32, device=t.device)


def _example(slot: Any, primes: Sequence[int]) -> Any:
    if not isinstance(slot[0], torch.dtype):
        return slot[1]
    dtype, dims, order = slot
    sizes = [n if n >= 0 else primes[-1 - n] for n in dims]
    apart = [(None, primes[-1 - a[1]]) if isinstance(a, tuple) and a[0] is None else a for a in order]
    return torch.empty_strided(sizes, strides_in_order(sizes, apart), dtype=dtype, device="meta")
