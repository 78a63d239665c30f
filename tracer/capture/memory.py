"""The memory of real tensors: copies, comparisons, addresses.

A tensor can be larger than its storage, once that was resized (`untyped_storage().resize_(0)` frees what is needed no
more, until backward makes it again): what is not there is neither copied nor compared, for reading it ends the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

Tensor = torch.Tensor
RESIZES = "it resizes the storage of a tensor, or writes to it directly"
"""The reason why a method is no graph, nor taken apart into some: what a graph keeps for backward may be freed by the
method."""


def storage_bytes(tensor: Tensor) -> int | None:
    """The bytes of a tensor's storage; None where it has none."""
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # sparse tensors, and subclasses that wrap others
        return None


def has_its_storage(tensor: Tensor) -> bool:
    """True if the storage is as large as the tensor says."""
    storage_size = storage_bytes(tensor)
    if storage_size is None or tensor.numel() == 0:
        return True
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last + 1) * tensor.element_size() <= storage_size


def copy_tensor(tensor: Tensor) -> Tensor:
    """The same content and layout in memory of its own."""
    source = tensor.detach()
    if source.layout is not torch.strided or source.is_quantized:
        return source.clone()
    has_storage = has_its_storage(source)
    if has_storage and 0 in source.stride() and source.numel():
        distinct = source[tuple(slice(0, 1) if s == 0 else slice(None) for s in source.stride())]
        return distinct.clone().expand(source.shape)
    copy = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=source.device)
    if has_storage:
        return copy.copy_(source)
    copy.untyped_storage().resize_(0)
    return copy


def has_same_content(a: Tensor, b: Tensor) -> bool:
    """Equal content, NaN with NaN."""
    if a.is_sparse or a.numel() == 0:
        return True
    if not (has_its_storage(a) and has_its_storage(b)):
        return has_its_storage(a) == has_its_storage(b)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def address_range(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's memory."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def overlap(a: Tensor, b: Tensor) -> bool:
    """True if two tensors' memory has an address in common."""
    (a0, a1), (b0, b1) = address_range(a), address_range(b)
    return a.device == b.device and max(a0, b0) < min(a1, b1)


# ------------------------------------------------------------------ storages in a trace
_CHANGES = ("resize_", "fill_", "copy_", "byteswap")


@contextlib.contextmanager
def storages_watched(on_resize: Callable[[], None]) -> Iterator[None]:
    """Within the block `met` is called before a trace changes a storage, of which no dispatch hears."""
    for name in _CHANGES:  # inherited from a class in C: as attributes of its own they are in front
        setattr(torch.UntypedStorage, name, _calling_first(getattr(torch.UntypedStorage, name), on_resize))
    try:
        yield
    finally:
        for name in _CHANGES:
            delattr(torch.UntypedStorage, name)


def _calling_first(own: Callable[..., Any], on_resize: Callable[[], None]) -> Callable[..., Any]:
    def method(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if get_proxy_mode() is not None:  # this thread is the one that traces
            on_resize()
        return own(storage, *args, **kwargs)

    return method
