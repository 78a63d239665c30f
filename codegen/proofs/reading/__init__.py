"""A kernel's text, read by abstract interpretation: integers are polynomials, comparisons facts, the rest unknown."""

from .expressions import EXPRESSIONS
from .reader import Reader, Rules, parse_function
from .statements import STATEMENTS
from .values import Access, Int, Need, Opaque, Pointer, Read, UnreadableText, Value

RULES = Rules(STATEMENTS, EXPRESSIONS)

__all__ = [
    "RULES", "Access", "Int", "Need", "Opaque", "Pointer", "Read", "Reader", "UnreadableText", "Value",
    "parse_function",
]  # fmt: skip
