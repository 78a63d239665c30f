"""Leaks of a capture into objects that outlive it: the fake tensors and symbolic sizes of that capture.

An operator kept on ctx, a closure over an argument, a partial: anything that a method can reach from it would be stale.
"""

from __future__ import annotations

import gc
import types
from typing import Any

import torch

from ..arithmetic import SYMBOLIC
from ..reads.attributes import closed_over
from ..torch_private import is_fake

_NOT_ITS_OWN = (type, types.ModuleType, types.FrameType, types.CodeType, torch.nn.Module, torch.Tensor)
_LIMIT = 10_000


def holds_fakes(value: Any) -> bool:
    """True if a fake tensor or a symbol can be reached from the object, classes, modules and globals apart."""
    waiting, visited = [value], set[int]()
    while waiting and len(visited) < _LIMIT:
        current = waiting.pop()
        if isinstance(current, SYMBOLIC) or is_fake(current):
            return True
        if id(current) not in visited and not isinstance(current, _NOT_ITS_OWN):
            visited.add(id(current))
            waiting += _parts(current)
    return False


def _parts(value: Any) -> list[Any]:
    if isinstance(value, types.FunctionType):  # not its globals
        return [*closed_over(value), *(value.__defaults__ or ()), vars(value)]
    return gc.get_referents(value)
