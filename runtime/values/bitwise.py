"""Two functions compared bit for bit on the same arguments, cut down to a few elements where they are large."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import sympy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...tracer.capture.memory import copy_tensor, has_its_storage
from ...tracer.scoped_state import variable_within
from .sizes import traced_numbers

Tensor = torch.Tensor
Call = Callable[[Sequence[Any]], Sequence[Any]]
Sizes = Mapping[sympy.Symbol, int]
CUTS = (4, 5, 8, 16, 64)


_made_up = ContextVar("fusegrad_made_up", default=False)


def made_up_data() -> AbstractContextManager[Any]:
    """Within the block tensors hold made-up data, unfit for a method: its own error says nothing of its capture."""
    return variable_within(_made_up, True)


def is_made_up() -> bool:
    """True if the data is made up, within `made_up_data`."""
    return _made_up.get()


def bitwise_difference(mine: Call, users: Call, args: Sequence[Any]) -> str | None:
    """The first difference of the captured graph from the user's method on `args`, or None; both get clones."""
    with torch.no_grad(), same_random_numbers(args) as rewind:
        theirs_in = [_copy(a) for a in args]
        theirs = list(users(theirs_in))
        rewind()
        ours_in = [_copy(a) for a in args]
        ours = list(mine(ours_in))
    if len(theirs) != len(ours):
        return f"the traced graph returns {len(ours)} values, the method {len(theirs)}"
    pairs = [*zip(ours, theirs, strict=True), *zip(ours_in, theirs_in, strict=True)]
    return next((fault for i, (a, b) in enumerate(pairs) if (fault := _difference(i, a, b))), None)


# ------------------------------------------------------------------ memory that was never written to
_EMPTY = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)


def takes_memory(gm: torch.fx.GraphModule) -> bool:
    """True if a graph asks for memory without saying what is in it."""
    return any(getattr(node.target, "overloadpacket", None) in _EMPTY for node in gm.graph.nodes)


class MemoryFilled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block such memory holds one odd number, so that what is left of it is no difference of two runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.fill_(_odd(result.dtype)) if func.overloadpacket in _EMPTY else result


def _odd(dtype: torch.dtype) -> Any:
    return 91 if not (dtype.is_floating_point or dtype.is_complex) else 0.7361


def _difference(index: int, ours: Any, theirs: Any) -> str | None:
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
        return (
            None
            if isinstance(theirs, Tensor) == isinstance(ours, Tensor)
            else f"value {index} is a tensor in one and not in the other"
        )
    facts = [(t.dtype, tuple(t.shape), t.device, t.layout) for t in (ours, theirs)]
    if facts[0] != facts[1]:
        return f"value {index} is {_describe(ours)} traced and {_describe(theirs)} in the method"
    if not _equal_bits(ours, theirs):
        return f"value {index} differs in content between the traced graph and the method"
    return None


def _describe(t: Tensor) -> str:
    layout = "" if t.layout is torch.strided else f", {str(t.layout).removeprefix('torch.')}"
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}{layout}"


_PARTS: dict[torch.layout, Callable[[Tensor], Sequence[Tensor]]] = {
    torch.sparse_coo: lambda t: (t._indices(), t._values()),
    torch.sparse_csr: lambda t: (t.crow_indices(), t.col_indices(), t.values()),
    torch.sparse_bsr: lambda t: (t.crow_indices(), t.col_indices(), t.values()),
    torch.sparse_csc: lambda t: (t.ccol_indices(), t.row_indices(), t.values()),
    torch.sparse_bsc: lambda t: (t.ccol_indices(), t.row_indices(), t.values()),
    torch.jagged: lambda t: t.unbind(),
}
"""What a tensor is made of that is not strided."""


def _parts_of(t: Tensor) -> Sequence[Tensor]:
    if t.is_quantized:
        return (t.int_repr(),)
    return _PARTS[t.layout](t) if t.layout in _PARTS else (t.to_dense(),)


def _is_strided(t: Tensor) -> bool:
    return t.layout is torch.strided and not t.is_quantized


def _equal_bits(a: Tensor, b: Tensor) -> bool:
    if not _is_strided(a):
        parts = _parts_of(a), _parts_of(b)
        return len(parts[0]) == len(parts[1]) and all(map(_equal_parts, *parts))
    if not (has_its_storage(a) and has_its_storage(b)):
        return has_its_storage(a) == has_its_storage(b)
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    same = (a == b) | ((a != a) & (b != b)) if a.is_floating_point() else a == b
    return bool(same.all())


def _equal_parts(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and _equal_bits(a, b)


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return copy_tensor(value).requires_grad_(value.requires_grad)


@contextmanager
def same_random_numbers(args: Sequence[Any]) -> Iterator[Callable[[], None]]:
    devices = sorted({a.device.index or 0 for a in args if isinstance(a, Tensor) and a.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        cpu, cuda = torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in devices]

        def rewind() -> None:
            torch.set_rng_state(cpu)
            for device, state in zip(devices, cuda, strict=True):
                torch.cuda.set_rng_state(state, device)

        yield rewind


def cut_small(
    values: Sequence[Any],
    fakes: Sequence[Any],
    sizes: Sizes,
    conditions: Sequence[sympy.Basic],
    whole: Collection[sympy.Symbol] = (),
) -> list[Any] | None:
    """The values with every symbolic size a few elements long, where the conditions still hold; None if they never do.

    values and fakes correspond; what is no tensor stays as it is. whole: sizes that stay as they are if they can.
    """
    trial = (small_sizes(sizes, conditions, whole) if whole else None) or small_sizes(sizes, conditions)
    if trial is None:
        return None
    return [_cut_tensor(v, f, trial) if isinstance(v, Tensor) else v for v, f in zip(values, fakes, strict=True)]


def small_sizes(
    sizes: Sizes, conditions: Sequence[sympy.Basic], whole: Collection[sympy.Symbol] = ()
) -> dict[sympy.Symbol, int] | None:
    """A few elements for each symbol, no more than it has, where the conditions hold; None if they never do.

    whole: sizes that stay as they are.
    """
    for small in CUTS:
        trial = {s: n if s in whole else min(n, small + i % 3) for i, (s, n) in enumerate(sizes.items())}
        if all(bool(c.xreplace(trial)) for c in conditions):
            return trial
    return None


def _cut_tensor(tensor: Tensor, fake: Tensor, sizes: Sizes) -> Tensor:
    shape, strides = traced_numbers(fake.shape, sizes), traced_numbers(fake.stride(), sizes)
    data = tensor.detach()[tuple(slice(0, n) for n in shape)]
    if not data.is_floating_point() and not data.is_complex() and data.dtype is not torch.bool:
        limit = min(sizes.values(), default=1)
        data = torch.where(data >= 0, data % limit, data)  # indices stay inside the cut sizes
    if 0 in strides:
        return data.as_strided(shape, data.stride()).requires_grad_(tensor.requires_grad)
    small = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    return small.copy_(data).requires_grad_(tensor.requires_grad)
