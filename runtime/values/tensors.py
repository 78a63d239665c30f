"""Predicates on tensors, and tensors made of a description."""

from __future__ import annotations

from typing import Any

import torch

from ...tracer.torch_private import current_device

Tensor = torch.Tensor


def zeros(like: tuple[Any, Any, Any]) -> Tensor:
    """The tangent or gradient of a (shape, dtype, device) that nothing moves: torch takes no None for a float."""
    return torch.zeros(like[0], dtype=like[1], device=like[2])


def records_launches(device: torch.device) -> bool:
    """True while a CUDA graph records what is launched on the device's stream; it need not be the current device."""
    if device.type != "cuda":
        return False
    if device.index is None or device.index == current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
