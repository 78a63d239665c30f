"""Pretended CUDA graphs: what is called on a stream that is recorded happens at each replay, in the same memory.

What is given back to a graph's pool is what the pool's next allocations get. `torch._C` has what CUDA-graph trees ask
for: which blocks of a pool are in use, and that they are again those of an earlier time. Out of reach: kernels that
Inductor generates (the interpreter is given ours alone), so that graphs here have ours and the library's operations;
and a driver's own errors while it records, such as a synchronization.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pretending  # before torch
import torch

driver, tensors = pretending.driver, pretending.tensors

FIRST_POOL = 100
"""Numbers of graphs' pools begin here, in tensors.cpp too."""
_numbers, _pools = itertools.count(1), itertools.count(FIRST_POOL)
nodes: list[Callable[[], None]] = []
"""Recorded launches, by the numbers that graphs have them under."""


class CUDAGraph:
    """torch.cuda.CUDAGraph."""

    replayed = 0
    """How often any graph was."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.number, self.memory = next(_numbers), (0, 0)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        self.memory = pool or new_pool()
        stream = tensors.pretended_stream(tensors.pretended_device())
        if not stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        tensors.pretend_recording(self.number, self.memory[1], stream)

    def capture_end(self) -> None:
        tensors.pretend_recording(0, 0, 0)

    def replay(self) -> None:
        CUDAGraph.replayed += 1
        tensors.pretended_replay(self.number)

    def reset(self) -> None:
        tensors.pretended_forget(self.number)

    def pool(self) -> tuple[int, int]:
        return self.memory

    def __del__(self) -> None:
        self.reset()


def new_pool() -> tuple[int, int]:
    """torch.cuda.graph_pool_handle."""
    return 0, next(_pools)


def is_recorded() -> bool:
    """True while a graph records the current device's stream."""
    return bool(tensors.pretended_recording())


def record_launch(run: Callable[[], None]) -> None:
    nodes.append(run)
    tensors.pretended_node(len(nodes) - 1)


def is_mapped(place: int) -> bool:
    """Whether a replay finds memory there: blocks of graphs' pools stay."""
    return bool(tensors.pretended_is_mapped(place))


def is_unloaded(function: Any) -> bool:
    """Whether the module of a function was taken from the driver. AMD's says nothing about it."""
    asked = getattr(driver, "pretended_unloaded", None)
    return asked is not None and bool(asked(ctypes.byref(function)))


# ------------------------------------------------------------------ the allocator, as trees see it
def live_in(pool: tuple[int, int]) -> set[int]:
    """The addresses of a pool that are in use."""
    room = (ctypes.c_void_p * tensors.pretended_in_pool(pool[1], None, 0))()
    tensors.pretended_in_pool(pool[1], room, len(room))
    return {int(place or 0) for place in room}


def _restore(device: int, state: tuple[tuple[int, int], set[int]], stale: Any, storages: Iterable[int]) -> None:
    """Exactly these addresses are in use again; these storages give back what they have."""
    pool, places = state
    tensors.pretend_in_pool(pool[1], (ctypes.c_void_p * len(places))(*places), len(places))
    for storage in storages:
        tensors.pretend_owner(storage)


def _tensor_of(facts: Any, storage: Any) -> torch.Tensor:
    made = torch.empty(0, dtype=facts["dtype"], device=facts["device"])
    return made.set_(storage, facts["storage_offset"], facts["size"], facts["stride"])


def _storage_of(place: int, device: torch.device, size: int) -> torch.UntypedStorage:
    return torch._C._construct_storage_from_data_pointer(place, device, size)


def _same_places(given: Any, places: Any, indices: Any) -> bool:
    return all(given[i].data_ptr() == places[i] for i in indices)


def _segments() -> list[dict[str, Any]]:
    """torch.cuda.memory_snapshot, as far as it is about pools of graphs: a segment for each block."""
    return [
        {"segment_pool_id": (0, pool), "address": place, "blocks": [{"state": "active_allocated", "size": 512}]}
        for pool in range(FIRST_POOL, new_pool()[1]) for place in live_in((0, pool))
    ]  # fmt: skip


_PRIVATE: dict[str, Callable[..., Any]] = {
    "_graph_pool_handle": new_pool,
    "_cuda_beginAllocateCurrentThreadToPool": lambda device, pool: tensors.pretend_pool(pool[1]) and None,
    "_cuda_endAllocateToPool": lambda device, pool: tensors.pretend_pool(0) and None,
    "_cuda_releasePool": lambda device, pool: None,
    "_cuda_checkPoolLiveAllocations": lambda device, pool, places: live_in(pool) == set(places),
    "_cuda_getCheckpointState": lambda device, pool: (pool, live_in(pool)),
    "_cuda_setCheckpointPoolState": _restore,
    "_cuda_cudaCachingAllocator_raw_delete": lambda place: tensors.pretended_give_back(place) and None,
    "_free_And_Remove_DeleterFn": lambda storage: tensors.pretended_free(storage) and None,
    "_has_Standard_Deleter": lambda storage: bool(tensors.pretended_owner(storage)),
    "_construct_CUDA_Tensor_From_Storage_And_Metadata": _tensor_of,
    "_tensors_data_ptrs_at_indices_equal": _same_places,
    "_set_storage_access_error_msg": lambda tensor, text: None,
    "_set_storage_data_ptr_access_error_msg": lambda storage, text: None,
    "_cuda_memorySnapshot": lambda *_: {"segments": _segments()},
    "_cuda_isHistoryEnabled": lambda: True,
    "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
    "_cuda_clearCublasWorkspaces": lambda: None,
    "_cuda_get_conv_benchmark_empty_cache": lambda: False,
    "_cudnn_set_conv_benchmark_empty_cache": lambda wanted: None,
    "_host_emptyCache": lambda: None,
}


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_node(number: int) -> None:
    nodes[number]()


def _pretend() -> None:
    for name, answer in _PRIVATE.items():
        setattr(torch._C, name, answer)
    cuda: Any = torch.cuda
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = CUDAGraph
    cuda.graph_pool_handle = cuda.graphs.graph_pool_handle = new_pool
    cuda.memory_snapshot = cuda.memory.memory_snapshot = lambda *_, **__: _segments()
    capturing = cuda.is_current_stream_capturing
    for owner, name in ((cuda, "is_current_stream_capturing"), (torch._C, "_cuda_isCurrentStreamCapturing")):
        setattr(owner, name, lambda: capturing() or is_recorded())
    tensors.pretend_recording.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    for name in ("give_back", "free", "is_mapped", "owner"):
        getattr(tensors, f"pretended_{name}").argtypes = (ctypes.c_void_p,)
    tensors.pretend_owner.argtypes = (ctypes.c_void_p,)
    tensors.pretended_give_back.restype = tensors.pretended_free.restype = None
    tensors.pretend_nodes(_on_node)


_pretend()
