"""The ground: typed graphs on networkx, the closed list of primitives, what can be said of both without torch."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import FusegradError, InvalidGraphError
    from .graph import Graph, Value, building, emit, provenance
    from .program import Program, ValueRef
    from .text.text import parse, show
    from .types import Size, TensorType
    from .verify import verify

__all__ = [
    "FusegradError",
    "Graph",
    "InvalidGraphError",
    "Program",
    "Size",
    "TensorType",
    "Value",
    "ValueRef",
    "building",
    "emit",
    "parse",
    "provenance",
    "show",
    "verify",
]
_HOMES = {
    "errors": ("FusegradError", "InvalidGraphError"),
    "graph": ("Graph", "Value", "building", "emit", "provenance"),
    "program": ("Program", "ValueRef"),
    "text.text": ("parse", "show"),
    "types": ("Size", "TensorType"),
    "verify": ("verify",),
}
"""Where each name is: imported when it is asked for, since errors are wanted without graphs, which need networkx."""


def __getattr__(name: str) -> Any:
    if name == "Place":
        warnings.warn("fusegrad.ir.Place is now fusegrad.ir.ValueRef", DeprecationWarning, stacklevel=2)
        return __getattr__("ValueRef")
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    return value
