"""Folds without a place in a kernel: which function folds, how an accumulator takes a value in, in which dtype."""

from __future__ import annotations

from ...program.axes import Term
from ..mathematics import FLOATING, TL, register_dtype
from ..statements import Accumulate, Expr, binary, call, literal, method, name


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


def take_in(term: Term, label: str, value: Expr, comment: str = "") -> Accumulate:
    """An accumulator takes a value in: label += value, or label = larger(label, value)."""
    if term.op in ("sum", "prod"):
        return Accumulate(label, "+=" if term.op == "sum" else "*=", value, comment)
    is_maximum = term.op == "amax"
    if term.dtype in FLOATING:
        function = "larger" if is_maximum else "smaller"
    else:
        function = "tl.maximum" if is_maximum else "tl.minimum"
    return Accumulate(label, "=", call(function, name(label), value), comment)


def accumulator_dtype(term: Term) -> str:
    """The dtype in which a reduction accumulates."""
    dtype = register_dtype(term.dtype)
    return {"b1": "i32", "i8": "i32", "i16": "i32", "u8": "i32", "u16": "i32"}.get(dtype, dtype)


def to_own_width(term: Term, value: Expr) -> Expr:
    """Triton folds small integers in 32 bits."""
    return method(value, f"to({TL[term.dtype]})") if term.dtype in ("i8", "i16", "u8", "u16") else value
