"""The ground: typed graphs on networkx, the closed list of primitives, what can be said of both without torch."""

import warnings
from typing import Any

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


def __getattr__(name: str) -> Any:
    if name == "Place":
        warnings.warn("fusegrad.ir.Place is now fusegrad.ir.ValueRef", DeprecationWarning, stacklevel=2)
        return ValueRef
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
