"""Layouts of tensors on their way into a graph and out of it: strides as captured, results with memory of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ...tracer.torch_private import memory_of

Tensor = torch.Tensor
Strides = tuple[int, ...]


def same_strides(shape: Sequence[int], actual: Sequence[int], strides: Sequence[int]) -> bool:
    """True where two layouts of one shape are the same places in memory."""
    return 0 in shape or all(a == b or n == 1 for a, b, n in zip(actual, strides, shape, strict=True))


def has_layout(tensor: Tensor, strides: Strides) -> bool:
    """True where a tensor lies in memory as these strides say."""
    actual = tensor.stride()
    return actual == strides or same_strides(tensor.shape, actual, strides)


def expected_layout(tensor: Tensor, strides: Strides) -> Tensor:
    """The tensor in the layout that the graph was captured with (a hook may have handed back another one)."""
    if has_layout(tensor, strides):
        return tensor
    if 0 in strides and tensor.numel():  # an expanded fake of a tensor that is not: read as it is
        return tensor.as_strided(tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def own_memory(tensor: Tensor, strides: Strides, occupied: set[int]) -> Tensor:
    """An output must not share memory with an input or another output, and has eager's strides."""
    if memory_of(tensor) in occupied or not has_layout(tensor, strides):
        distinct = tensor[tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)]  # one element per stride 0
        own = torch.empty_strided(distinct.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(distinct)
        return own if own.shape == tensor.shape else own.expand(tensor.shape).detach()
    return tensor.detach() if tensor._is_view() else tensor  # of memory that nothing else sees


def own_results(results: Iterable[Tensor], strides: Iterable[Strides], inputs: Iterable[Tensor]) -> list[Tensor]:
    """Results of which none shares memory with an input or with another result."""
    occupied, owned = {memory_of(t) for t in inputs}, list[Tensor]()
    for result, layout in zip(results, strides, strict=True):
        owned.append(own_memory(result, layout, occupied))
        occupied.add(memory_of(owned[-1]))
    return owned


def copy_if_shared(value: Tensor, inputs: Iterable[Tensor]) -> Tensor:
    """A value that writing to the inputs does not change."""
    return value.clone() if memory_of(value) in {memory_of(t) for t in inputs} else value
