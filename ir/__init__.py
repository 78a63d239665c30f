"""The ground: typed graphs on networkx, the closed list of primitives, what can be said of both without torch."""

from .errors import FusegradError, InvalidGraphError
from .graph import Graph, Value, building, emit, provenance
from .program import Place, Program
from .text.text import parse, show
from .types import Size, TensorType
from .verify import verify

__all__ = [
    "FusegradError",
    "Graph",
    "InvalidGraphError",
    "Place",
    "Program",
    "Size",
    "TensorType",
    "Value",
    "building",
    "emit",
    "parse",
    "provenance",
    "show",
    "verify",
]
