"""Folds without a place in a kernel: which function folds, how an accumulator takes a value in, in which dtype."""

from __future__ import annotations

from collections.abc import Sequence

from ..program.axes import Term
from .loops import Expr, binary, call, literal, method, name
from .mathematics import FLOATING, TL, held


def add(a: Expr, b: Expr) -> Expr:
    """Their sum, without a zero that is written out."""
    return a if b.text == "0" else b if a.text == "0" else binary("+", a, b)


def sum_of(parts: Sequence[Expr]) -> Expr | None:
    """The sum in order, negative parts subtracted; None of nothing."""
    result: Expr | None = None
    for part in parts:
        negative = part.text.startswith("-") and result is not None
        flipped = Expr(part.text[1:], part.strength, part.names) if negative and " " not in part.text else part
        result = part if result is None else binary("-" if flipped is not part else "+", result, flipped)
    return result


def widen_booleans(arg: Term, value: Expr) -> Expr:
    """Booleans reduce as integers."""
    return method(value, "to(tl.int32)") if arg.dtype == "b1" else value


def fold_function(term: Term) -> str:
    """The function of Triton, or of the prelude, that folds lanes."""
    floating = term.dtype in FLOATING
    return {
        "sum": "tl.sum",
        "prod": "row_prod",
        "amax": "row_max" if floating else "tl.max",
        "amin": "row_min" if floating else "tl.min",
    }[term.op]


def as_result(term: Term, value: Expr) -> Expr:
    """Back from the width that the fold used to the dtype of the result."""
    if term.dtype == "b1":
        return binary("!=", value, literal(0))
    return to_own_width(term, value)


def combine(kind: str, dtype: str, name_: str, value: Expr) -> tuple[str, Expr]:
    """How an accumulator takes a value in: (+=, value) or (=, combined)."""
    if kind in ("sum", "prod"):
        return ("+=" if kind == "sum" else "*=", value)
    floating = {"amax": "larger", "amin": "smaller"}
    function = floating[kind] if dtype in FLOATING else {"amax": "tl.maximum", "amin": "tl.minimum"}[kind]
    return "=", call(function, name(name_), value)


def accumulator_dtype(term: Term) -> str:
    """The dtype in which a reduction accumulates."""
    dtype = held(term.dtype)
    return {"b1": "i32", "i8": "i32", "i16": "i32", "u8": "i32", "u16": "i32"}.get(dtype, dtype)


def to_own_width(term: Term, value: Expr) -> Expr:
    """Triton folds small integers in 32 bits."""
    return method(value, f"to({TL[term.dtype]})") if term.dtype in ("i8", "i16", "u8", "u16") else value
