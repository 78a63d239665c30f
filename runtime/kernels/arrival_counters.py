"""Counters that a kernel finds at zero and leaves at zero: one set per stream, a set of its own for a captured launch.

Launches on one stream follow each other and may share; a CUDA graph may be replayed beside them, on any stream. Zeros
for it are made beforehand, so that no graph has to fill memory at each replay. What a captured launch counts in is not
freed any more: the graph may outlive the class that it was captured from.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ...tracer.torch_private import current_stream
from ..values.tensors import records_launches

Tensor = torch.Tensor
SPARE = 15
"""Captured launches that find zeros made beforehand; a further one zeroes its own at each replay."""
BOUNDARY = 16
"""Each set begins at a multiple of so many bytes: kernels are compiled for that."""


_of_graphs: list[Tensor] = []


class ArrivalCounters:
    """The counters of the kernels of one group."""

    def __init__(self, device: torch.device, stream: Callable[[], int], capturing: Callable[[], bool]) -> None:
        self.device, self.stream, self.capturing = device, stream, capturing
        self.by_stream: dict[Any, Tensor] = {}
        self.spare: dict[Any, list[Tensor]] = {}

    @classmethod
    def on(cls, device: torch.device) -> ArrivalCounters:
        """Those of kernels on a device."""
        if device.type != "cuda":
            return cls(device, lambda: 0, lambda: False)
        return cls(device, lambda: current_stream(device.index or 0), lambda: records_launches(device))

    def __call__(self, user: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """For a launch of now. user: which kernel, and which of its counters."""
        counter = (user, shape, dtype)
        if self.capturing():
            spare = self.spare.get(counter)
            if not spare:  # of the graph's own pool
                return torch.zeros(shape, dtype=dtype, device=self.device)
            _of_graphs.append(spare.pop())
            return _of_graphs[-1]
        key = (*counter, self.stream())
        if key not in self.by_stream:
            self.by_stream[key], *more = self._sets(shape, dtype)
            self.spare.setdefault(counter, []).extend(more)
        return self.by_stream[key]

    def _sets(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        per_set = BOUNDARY // dtype.itemsize
        count = torch.Size(shape).numel()
        room = _outside_of_pools(self.device, (1 + SPARE, -(-count // per_set) * per_set), dtype)
        return [row[:count].view(shape) for row in room]


def _outside_of_pools(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that are kept, made on the current stream by a thread of its own.

    CUDA-graph trees send what the calling thread allocates to a pool of theirs, and take all that is in it for theirs.
    """
    if device.type != "cuda":
        return torch.zeros(shape, dtype=dtype, device=device)
    stream = torch.cuda.current_stream(device)
    # The thread knows the current stream only if it is told; its error belongs to the caller.
    outcome: list[Tensor | Exception] = []

    def make() -> None:
        try:
            with torch.cuda.stream(stream):
                outcome.append(torch.zeros(shape, dtype=dtype, device=device))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=make, name="fusegrad counters")
    thread.start()
    thread.join()
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
