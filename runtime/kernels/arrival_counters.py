"""Counters that a kernel finds at zero and leaves at zero: one set per stream, a set of its own for a captured launch.

Launches on one stream follow each other and may share; a CUDA graph may be replayed beside them, on any stream. Zeros
for it are made beforehand, so that no graph has to fill memory at each replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...tracer.torch_private import current_stream

Tensor = torch.Tensor
SPARE = 15
"""Captured launches that find zeros made beforehand; a further one zeroes its own at each replay."""
BOUNDARY = 16
"""Each set begins at a multiple of so many bytes: kernels are compiled for that."""


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
        return cls(device, lambda: current_stream(device.index or 0), torch.cuda.is_current_stream_capturing)

    def __call__(self, user: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """For a launch of now. user: which kernel, and which of its counters."""
        what = (user, shape, dtype)
        if self.capturing():
            spare = self.spare.get(what)
            return spare.pop() if spare else torch.zeros(shape, dtype=dtype, device=self.device)
        key = (*what, self.stream())
        if key not in self.by_stream:
            self.by_stream[key], *more = self._sets(shape, dtype)
            self.spare.setdefault(what, []).extend(more)
        return self.by_stream[key]

    def _sets(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        per_set = BOUNDARY // dtype.itemsize
        count = torch.Size(shape).numel()
        room = torch.zeros((1 + SPARE, -(-count // per_set) * per_set), dtype=dtype, device=self.device)
        return [row[:count].view(shape) for row in room]
