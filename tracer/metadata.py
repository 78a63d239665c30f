"""Fake tensors that answer elementwise operations from the shapes of their arguments.

torch runs a Python decomposition on symbolic sizes for each: 3 ms for exp, 28 for clamp. Only where arguments are dense
and of one shape, by the very expressions of their sizes; and once per pattern the answer is compared with torch's own,
at small sizes that are told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Self

import torch

from .torch_private import FakeTensor, FakeTensorMode, has_kernel

Tensor = torch.Tensor
Pattern = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Of a tensor: dtype, each length (-1 - k: the k-th unknown one), its axes from the innermost outwards."""
APART = (3, 5, 7, 11, 13, 17, 19, 23)
LIKE = dict.fromkeys(
    (torch.ops.aten.softshrink_backward.default, torch.ops.aten.hardshrink_backward.default), torch.ops.aten.mul.Tensor
)
"""Operations that torch has no shapes for where sizes are symbols, and one whose result looks like theirs."""
PLAIN = (bool, int, float, type(None), str, torch.dtype)


class Fakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """torch's fake mode with a shorter way for elementwise operations."""

    def __enter__(self) -> Self:
        if not self.enter_stack:
            self.in_kernel_invocation = False  # an interrupt between two lines of torch leaves it on
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, args = LIKE.get(func, func), args[:2] if func in LIKE else args
        made = elementwise(self, func, args, kwargs or {}) if is_elementwise(func) else None
        return super().__torch_dispatch__(func, types, args, kwargs or {}) if made is None else made


@lru_cache(maxsize=2048)
def is_elementwise(func: Any) -> bool:
    """Whether it makes one fresh tensor, number by number, and draws nothing."""
    tags, returns = func.tags, func._schema.returns
    if func.namespace != "aten" or torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags:
        return False
    fresh = len(returns) == 1 and str(returns[0].type) == "Tensor" and returns[0].alias_info is None
    return fresh and not func._schema.is_mutable and not has_kernel(func.name(), "CompositeImplicitAutograd")


def elementwise(mode: Fakes, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The fake result; None where it takes torch to know."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    if not tensors or not all(_is_simple(mode, t, tensors[0].device) for t in tensors):
        return None
    others = (*(a for a in args if not isinstance(a, Tensor)), *kwargs.values())
    if not all(type(a) in PLAIN for a in others):
        return None
    ids: dict[Any, int] = {}
    patterns = [_pattern(t, ids) for t in tensors]
    if any(p is None for p in patterns) or len(ids) > len(APART):
        return None
    given: list[Pattern] = [p for p in patterns if p is not None]
    whole = _whole(given)
    if whole is None:
        return None
    supply = iter(given)
    slots = tuple(next(supply) if isinstance(a, Tensor) else (type(a), a) for a in args)
    named = tuple((k, type(v), v) for k, v in kwargs.items())
    dtype = _dtype(func, slots, named, given[whole], torch.get_default_dtype())
    return None if dtype is None else _like(mode, tensors[whole], given[whole][2], dtype)


def _is_simple(mode: Fakes, t: Tensor, device: torch.device) -> bool:
    return (
        type(t) is FakeTensor and t.fake_mode is mode and t.constant is None and t.layout is torch.strided
        and t.device == device and not t.dtype.is_complex and not t.is_neg()
    )  # fmt: skip


def _like(mode: Fakes, whole: Tensor, order: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if _is_row_major(order):  # said so, it need not be found out by symbols
        memory = torch.empty(whole.shape, dtype=dtype, device="meta")
    else:
        memory = torch.empty_strided(whole.shape, whole.stride(), dtype=dtype, device="meta")
    made: Tensor = FakeTensor(mode, memory, whole.device)
    return made


# ------------------------------------------------------------------ patterns
def _pattern(t: Tensor, ids: dict[Any, int]) -> Pattern | None:
    """How a tensor lies in memory; None where it has gaps, or covers itself."""
    sizes, strides = [_length(n) for n in t.shape], [_length(n) for n in t.stride()]
    order = _order(sizes, strides)
    if order is None:
        return None
    dims = tuple(n if isinstance(n, int) else -1 - ids.setdefault(n, len(ids)) for n in sizes)
    return t.dtype, dims, order


def _length(n: Any) -> Any:
    """A length as an int, or as the expression that is known of it."""
    expr = n if isinstance(n, int) else n.node.expr
    return int(expr) if not isinstance(expr, int) and expr.is_number else expr


def _order(sizes: Sequence[Any], strides: Sequence[Any]) -> tuple[int, ...] | None:
    """The axes from the innermost outwards, each step as long as what lies within it."""
    left, step, order = list(range(len(sizes)))[::-1], 1, []
    while left:
        axis = next((i for i in left if strides[i] == step), None)
        if axis is None:
            return None
        left.remove(axis)
        order.append(axis)
        step = step * sizes[axis]
    return tuple(order)


def _whole(patterns: Sequence[Pattern]) -> int | None:
    """Which argument has the shape and the order of the result; None where none is sure to."""
    ranks = [len(dims) for _, dims, _ in patterns]
    at = max(range(len(patterns)), key=ranks.__getitem__)
    _, dims, order = patterns[at]
    row_major = _is_row_major(order)
    for _, other, axes in patterns:
        if (other, axes) == (dims, order) or not other:
            continue
        if not row_major or not _is_row_major(axes) or not _fits(other, dims):
            return None
    return at


def _is_row_major(order: Sequence[int]) -> bool:
    return all(i + axis + 1 == len(order) for i, axis in enumerate(order))


def _fits(other: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether it is spread over these lengths: from the right each the same, or one."""
    return all(a in (b, 1) for a, b in zip(other[::-1], dims[::-1], strict=False))


@lru_cache(maxsize=8192)
def _dtype(func: Any, slots: Any, named: Any, whole: Pattern, default: torch.dtype) -> torch.dtype | None:
    """The dtype that torch gives at small sizes; None where it raises, or the result is not like `whole`."""
    args = [_small(slot) if isinstance(slot[0], torch.dtype) else slot[1] for slot in slots]
    try:
        found = func(*args, **{k: v for k, _, v in named})
    except Exception:
        return None
    expected = _small(whole)
    alike = (found.shape, found.stride(), found.storage_offset()) == (expected.shape, expected.stride(), 0)
    return found.dtype if alike and found.device.type == "meta" and not found.is_neg() else None


def _small(pattern: Pattern) -> Tensor:
    dtype, dims, order = pattern
    sizes = [n if n >= 0 else APART[-1 - n] for n in dims]
    strides, step = [0] * len(sizes), 1
    for axis in order:
        strides[axis] = step
        step *= sizes[axis]
    return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
