"""Leaks of a capture into objects that outlive it: the fake tensors and symbolic sizes of that capture.

An operator kept on ctx, a closure over an argument, a partial: anything that a method can reach from it would be stale.
"""

from __future__ import annotations

import gc
import types
from typing import Any

import torch

from ..torch_private import is_fake

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NOT_ITS_OWN = (type, types.ModuleType, types.FrameType, types.CodeType, torch.nn.Module, torch.Tensor)
_LIMIT = 10_000


def holds_fakes(value: Any) -> bool:
    """True if a fake tensor or a symbol can be reached from the object, classes, modules and globals apart."""
    waiting, seen = [value], set[int]()
    while waiting and len(seen) < _LIMIT:
        found = waiting.pop()
        if isinstance(found, _SYMBOLS) or is_fake(found):
            return True
        if id(found) not in seen and not isinstance(found, _NOT_ITS_OWN):
            seen.add(id(found))
            waiting += _parts(found)
    return False


def _parts(value: Any) -> list[Any]:
    if isinstance(value, types.FunctionType):  # not its globals
        cells = [c.cell_contents for c in value.__closure__ or () if _is_filled(c)]
        return [*cells, *(value.__defaults__ or ()), vars(value)]
    return gc.get_referents(value)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
