"""Conditions on sizes as plain data for JSON: {"left": "s0*s1", "is": "<", "right": 2147483648}, {"any": [..]}."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from ..types import Size, simplify_size
from .document import Symbols, document_error, list_from, size_document, size_from_document

WORDS = {"Equality": "==", "Unequality": "!=", "StrictLessThan": "<", "LessThan": "<=", "StrictGreaterThan": ">",
         "GreaterThan": ">="}  # fmt: skip
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
JOINED = {"And": "all", "Or": "any"}


@dataclass(frozen=True)
class Relation:
    """left `word` right, over sizes."""

    word: str
    left: Size
    right: Size

    def holds(self, value: Callable[[Size], Any]) -> bool:
        """Evaluate the relation at sizes of these values."""
        return bool(COMPARE[self.word](value(self.left), value(self.right)))

    def __str__(self) -> str:
        return f"{self.left} {self.word} {self.right}"


@dataclass(frozen=True)
class Joined:
    """All, or any, of several conditions; or none ("not")."""

    word: str
    parts: tuple[Relation | Joined, ...]

    def holds(self, value: Callable[[Size], Any]) -> bool:
        """Evaluate the condition at sizes of these values."""
        results = (p.holds(value) for p in self.parts)
        return not any(results) if self.word == "not" else all(results) if self.word == "all" else any(results)

    def __str__(self) -> str:
        words = {"all": " and ", "any": " or ", "not": " or "}[self.word].join(map(str, self.parts))
        return f"not ({words})" if self.word == "not" else f"({words})"


Condition = Relation | Joined


def relation(condition: Any) -> Condition | None:
    """A condition of sympy; None for one that always holds. Raises ValueError for one that is of another kind."""
    kind = type(condition).__name__
    if condition is sympy.true:
        return None
    if kind in WORDS:
        return Relation(WORDS[kind], simplify_size(condition.lhs), simplify_size(condition.rhs))
    if kind in JOINED or kind == "Not":
        parts = [relation(a) for a in condition.args]
        return Joined(JOINED.get(kind, "not"), tuple(p for p in parts if p is not None))
    raise ValueError(f"a {kind} is no condition on sizes")


def relation_document(condition: Condition) -> dict[str, Any]:
    """The condition as dicts, lists, texts and numbers."""
    if isinstance(condition, Relation):
        return {"left": size_document(condition.left), "is": condition.word, "right": size_document(condition.right)}
    return {condition.word: [relation_document(p) for p in condition.parts]}


def relation_from(data: Any, symbols: Symbols, at: object, depth: int = 4) -> Condition:
    """The condition that `relation_document` wrote. Raises ParseError."""
    if isinstance(data, dict) and set(data) == {"left", "is", "right"} and data["is"] in list(COMPARE):
        left, right = (size_from_document(data[side], symbols, at, signed=True) for side in ("left", "right"))
        return Relation(data["is"], left, right)
    if isinstance(data, dict) and len(data) == 1 and depth:
        ((word, parts),) = data.items()
        if word in ("all", "any", "not"):
            return Joined(word, tuple(relation_from(p, symbols, at, depth - 1) for p in list_from(parts, at, 100)))
    raise document_error("that is no condition on sizes", at)


def relations(conditions: Sequence[Any]) -> list[Condition]:
    """The conditions of sympy that do not always hold."""
    return [c for c in map(relation, conditions) if c is not None]


