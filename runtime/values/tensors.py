"""Predicates on tensors, and tensors made of a description."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor




def zeros(like: tuple[Any, Any, Any]) -> Tensor:
    """The tangent or gradient of a (shape, dtype, device) that nothing moves: torch takes no None for a float."""
    return torch.zeros(like[0], dtype=like[1], device=like[2])
