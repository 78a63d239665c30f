"""Plain tensors in the place of functorch's wrappers: for a look-up by shapes, and for what a first call reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...tracer.torch_private import (
    dual_level,
    first_of_every_batch,
    is_batched,
    is_differentiated,
    is_fake,
    plain_tensors,
    unwrap_functorch,
)
from ..capture.guards import is_float

Tensor = torch.Tensor


def example(value: Any) -> Any:
    """A plain tensor of the logical shape behind any number of functorch wrappers; other values as they are.

    Its content is undefined, and does not matter to look a graph up. `readable` fills it, for a first call.
    """
    if not isinstance(value, Tensor):
        return value
    inner = unwrap_functorch(value)
    if inner is value and not value.requires_grad and dual_level() < 0:
        return value
    shape, strides, differentiable = tuple(value.shape), _strides(value), is_float(value) and is_differentiated(value)
    with plain_tensors():
        plain = torch.empty_strided(shape, strides, dtype=inner.dtype, device=inner.device)
        return plain.requires_grad_(differentiable)


def readable(examples: Sequence[Any], values: Sequence[Any]) -> bool:
    """Fill examples with the first lanes of the values, with zeros where there are none; true if all is the user's."""
    pairs = [(p, v) for p, v in zip(examples, values, strict=True) if p is not v and isinstance(p, Tensor)]
    with torch.no_grad():  # where a mode keeps gradients on, too
        return all([_fill(plain.detach(), value) for plain, value in pairs])


def _fill(plain: Tensor, value: Tensor) -> bool:
    data = None if is_fake(value) or is_batched(value) or not plain.numel() else first_of_every_batch(value)
    if data is None:
        plain.zero_()
        return not plain.numel()
    distinct = tuple(slice(0, 1) if step == 0 else slice(None) for step in plain.stride())
    plain[distinct].copy_(data[distinct])
    return True


def _strides(value: Tensor) -> tuple[int, ...]:
    """The logical strides; row-major where the wrapper has none that fit its shape."""
    return tuple(value.stride()) if value.dim() else ()
