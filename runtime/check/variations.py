"""Variations of example arguments for `fusegrad.check`: layouts, sizes, dtypes, the same tensor twice.

Every variation keeps the user's own numbers, or picks among them: what was positive, or an index, stays so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Tensor = torch.Tensor


def copy_of(t: Tensor) -> Tensor:
    """The numbers and the strides of t in memory of its own; what is expanded stays expanded."""
    once = [s == 0 and n > 0 for s, n in zip(t.stride(), t.shape, strict=True)]
    numbers = t.detach()[tuple(slice(0, 1) if o else slice(None) for o in once)]
    memory = torch.empty_strided(numbers.shape, t.stride(), dtype=t.dtype, device=t.device)
    memory = memory.copy_(numbers).expand(t.shape) if numbers.shape != t.shape else memory.copy_(numbers)
    return memory.requires_grad_(t.requires_grad)


def copies_of(xs: Sequence[Tensor]) -> list[Tensor]:
    """Copies; the same tensor twice stays the same."""
    fresh = {id(x): copy_of(x) for x in xs}
    return [fresh[id(x)] for x in xs]


# ------------------------------------------------------------------ layouts
def _transpose(t: Tensor) -> Tensor:
    axes = list(range(t.dim()))[::-1]
    return t.permute(axes).contiguous().permute(axes)


def _offset(t: Tensor) -> Tensor:
    memory = t.new_zeros(t.numel() + 1)
    memory[1:] = t.reshape(-1)
    return memory[1:].view(t.shape)


def _step(t: Tensor) -> Tensor:
    memory = t.new_zeros((*t.shape[:-1], 2 * t.shape[-1]))
    memory[..., ::2] = t
    return memory[..., ::2]


def _expand_first_axis(t: Tensor) -> Tensor:
    return t[:1].contiguous().expand(t.shape)


def _one_number(t: Tensor) -> Tensor:
    return t.reshape(-1)[0].clone().expand(t.shape)


def _channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def _odd_strides(t: Tensor) -> Tensor:
    """Axes of length one with a stride that no contiguous tensor has."""
    strides = [7 if n == 1 else s for n, s in zip(t.shape, t.contiguous().stride(), strict=True)]
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


LAYOUTS: dict[str, tuple[Callable[[Tensor], bool], Callable[[Tensor], Tensor]]] = {
    "contiguous": (lambda t: True, lambda t: t.contiguous()),
    "transposed": (lambda t: t.dim() > 1, _transpose),
    "offset 1": (lambda t: t.dim() > 0, _offset),
    "step 2": (lambda t: t.dim() > 0, _step),
    "first axis expanded": (lambda t: t.dim() > 0 and t.shape[0] > 1, _expand_first_axis),
    "one number expanded": (lambda t: t.dim() > 0 and t.numel() > 1, _one_number),
    "channels last": (lambda t: t.dim() == 4, _channels_last),
    "odd strides of size 1": (lambda t: 1 in t.shape, _odd_strides),
}


def with_layout(t: Tensor, layout: str) -> Tensor | None:
    """The tensor in a layout; None where it has no such layout."""
    applies, make = LAYOUTS[layout]
    return make(t.detach()).requires_grad_(t.requires_grad) if applies(t) else None


def with_layouts(xs: Sequence[Any], layouts: Sequence[str]) -> list[Any] | None:
    """Each tensor in its layout where it can have it; None where none can."""
    variations = [with_layout(x, name) if isinstance(x, Tensor) else None for x, name in zip(xs, layouts, strict=True)]
    if all(m is None for m in variations):
        return None
    return [x if m is None else m for x, m in zip(xs, variations, strict=True)]


# ------------------------------------------------------------------ sizes and dtypes
def with_sizes(xs: Sequence[Tensor], sizes: Mapping[int, int]) -> list[Tensor]:
    """Every axis of a length in `sizes` gets the new length: axes of one length are taken to be one size."""
    smallest = min([n for n in sizes.values() if n > 0], default=None)
    shrinks = any(new < old for old, new in sizes.items())
    return [_with_sizes(x, sizes, smallest if shrinks else None) for x in xs]


def _with_sizes(x: Tensor, sizes: Mapping[int, int], limit: int | None) -> Tensor:
    # Numbers again from the start where an axis grows; ones where it had none.
    picked = x.detach()
    for axis, n in enumerate(x.shape):
        if (new := sizes.get(n, n)) != n:
            at = torch.arange(new, device=x.device) % max(n, 1)
            picked = picked.index_select(axis, at) if n else _grown(picked, axis, new)
    if limit is not None and not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool):
        picked = torch.where(picked >= limit, picked % limit, picked)  # indices stay inside the new sizes
    return picked.requires_grad_(x.requires_grad)


def _grown(x: Tensor, axis: int, new: int) -> Tensor:
    return x.new_ones((*x.shape[:axis], new, *x.shape[axis + 1 :]))


def lengths(xs: Sequence[Tensor]) -> list[int]:
    """The distinct lengths of axes, longest first."""
    return sorted({n for x in xs for n in x.shape}, reverse=True)


def scalars(xs: Sequence[Tensor]) -> list[Tensor]:
    """The first number of each tensor, 0-d."""
    return [x.detach().reshape(-1)[0].clone().requires_grad_(x.requires_grad) for x in xs]


def cast(x: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in a dtype, complex ones in the complex dtype of that width; others as they are."""
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    to = (torch.complex128 if dtype is torch.float64 else torch.complex64) if x.is_complex() else dtype
    return _cast_with_strides(x, to) if x.dtype is not to else x


def _cast_with_strides(x: Tensor, to: torch.dtype) -> Tensor:
    result = torch.empty_strided(x.shape, x.stride(), dtype=to, device=x.device) if 0 not in x.stride() else None
    result = x.detach().to(to) if result is None else result.copy_(x.detach())
    return result.requires_grad_(x.requires_grad)


def all_cast(xs: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """`cast` of each; the same tensor twice stays the same."""
    fresh = {id(x): cast(x, dtype) for x in xs}
    return [fresh[id(x)] for x in xs]


def aliasable_pairs(xs: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Pairs of arguments that one tensor could be both of."""
    pairs = [(i, j) for j in range(len(xs)) for i in range(j)]
    return [(i, j) for i, j in pairs if xs[i].shape == xs[j].shape and xs[i].dtype == xs[j].dtype]
