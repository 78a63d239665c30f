"""A kernel's text, read by abstract interpretation: integers are polynomials, comparisons facts, the rest unknown."""

from .expressions import EXPRESSIONS
from .reader import Reader, Rules, parse_function
from .statements import STATEMENTS
from .values import LARGEST, Access, Int, Need, Opaque, Pointer, Read, UnreadableText, Value, margins

RULES = Rules(STATEMENTS, EXPRESSIONS)

__all__ = [
    "LARGEST", "RULES", "Access", "Int", "Need", "Opaque", "Pointer", "Read", "Reader", "UnreadableText", "Value",
    "margins", "parse_function",
]  # fmt: skip
