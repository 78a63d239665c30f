"""Checks of indices that are not needed: what the graph shows to be in range, and what torch checks itself.

    iota(n)  argmax(x)  min(max(i, 0), n - 1)  i % n  check_index(i, n)        are inside 0 .. n - 1

Two questions, asked operand by operand: is it never negative, and is it below a size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import sympy

from ..graph import Value
from ..rewrite import Rules, make
from ..types import INTEGERS, Size, simplify_size

DEPTH = 16
"""Operations between an index and what shows its range; no question goes deeper."""


def is_within(index: Value, size: Size) -> bool:
    """True if every element is provably in 0 .. size - 1."""
    return is_never_negative(index) and _is_below(index, size, DEPTH)


def is_never_negative(index: Value) -> bool:
    """True if no element provably is below zero."""
    return _is_nonnegative(index, DEPTH)


# ------------------------------------------------------------------ never negative
def _is_nonnegative(value: Value, depth: int) -> bool:
    rule = nonnegative_rules.get(value.prim)
    return rule is not None and depth > 0 and rule(value, depth - 1)


def _first(value: Value, depth: int) -> bool:
    return _is_nonnegative(value.args[0], depth)


def _all(value: Value, depth: int) -> bool:
    return all(_is_nonnegative(a, depth) for a in value.args)


def _is_nonnegative_cast(value: Value, depth: int) -> bool:
    return _is_kept(value) and (value.args[0].dtype == "b1" or _first(value, depth))


def _is_nonnegative_difference(value: Value, depth: int) -> bool:
    """size - x, where x is at most the size."""
    left, right = value.args
    return left.prim == "full" and _is_below(right, simplify_size(left.params["value"] + 1), depth)


def _are_choices_nonnegative(value: Value, depth: int) -> bool:
    """where(x < c, c, x): either choice, or what it is not below where it is chosen."""
    return all(any(_is_nonnegative(v, depth) for v in choice) for choice in _choices(value, AT_LEAST))


nonnegative_rules: dict[str, Callable[[Value, int], bool]] = {
    **dict.fromkeys(("iota", "argmax", "argmin", "check_index"), lambda value, depth: True),
    "full": lambda value, depth: _is_at_most(0, value.params["value"]),
    **dict.fromkeys(("broadcast", "reshape", "permute", "slice", "flip", "pad", "gather", "amax", "amin"), _first),
    **dict.fromkeys(("cat", "min", "add", "mul", "floordiv"), _all),
    "where": _are_choices_nonnegative,
    "max": lambda value, depth: any(_is_nonnegative(a, depth) for a in value.args),
    "rem": lambda value, depth: value.args[1].prim == "full" and _is_at_most(1, value.args[1].params["value"]),
    "cast": _is_nonnegative_cast,
    "sub": _is_nonnegative_difference,
}


# ------------------------------------------------------------------ below a size
def _is_below(value: Value, size: Size, depth: int) -> bool:
    rule = below_rules.get(value.prim)
    return rule is not None and depth > 0 and rule(value, size, depth - 1)


def _first_below(value: Value, size: Size, depth: int) -> bool:
    return _is_below(value.args[0], size, depth)


def _all_below(value: Value, size: Size, depth: int) -> bool:
    return all(_is_below(a, size, depth) for a in value.args)


def _is_cast_below(value: Value, size: Size, depth: int) -> bool:
    is_bit = value.args[0].dtype == "b1"
    return _is_kept(value) and (_is_at_most(2, size) if is_bit else _first_below(value, size, depth))


def _is_sum_below(value: Value, size: Size, depth: int) -> bool:
    """x + constant"""
    for x, constant in (value.args, value.args[::-1]):
        if constant.prim == "full" and _is_below(x, simplify_size(size - constant.params["value"]), depth):
            return True
    return False


def _is_difference_below(value: Value, size: Size, depth: int) -> bool:
    """x - y and size - y, where y is not negative."""
    return _is_nonnegative(value.args[1], depth) and _first_below(value, size, depth)


def _is_remainder_below(value: Value, size: Size, depth: int) -> bool:
    return value.args[1].prim == "full" and _is_at_most(value.args[1].params["value"], size)


def _is_checked_below(value: Value, size: Size, depth: int) -> bool:
    end = value.args[1]
    return _first_below(value, size, depth) or (end.prim == "full" and _is_at_most(end.params["value"], size))


def _are_choices_below(value: Value, size: Size, depth: int) -> bool:
    """where(x > c, c, x): either choice, or what it is not above where it is chosen."""
    return all(any(_is_below(v, size, depth) for v in choice) for choice in _choices(value, AT_MOST))


below_rules: dict[str, Callable[[Value, Size, int], bool]] = {
    "iota": lambda value, size, depth: _is_at_most(value.params["size"], size),
    **dict.fromkeys(
        ("argmax", "argmin"),
        lambda value, size, depth: _is_at_most(value.args[0].shape[value.params["axis"]], size),
    ),
    "check_index": _is_checked_below,
    "full": lambda value, size, depth: _is_at_most(value.params["value"] + 1, size),
    **dict.fromkeys(("broadcast", "reshape", "permute", "slice", "flip", "gather", "amax", "amin"), _first_below),
    "pad": lambda value, size, depth: _is_at_most(1, size) and _first_below(value, size, depth),
    **dict.fromkeys(("cat", "max"), _all_below),
    "min": lambda value, size, depth: any(_is_below(a, size, depth) for a in value.args),
    "where": _are_choices_below,
    "rem": _is_remainder_below,
    "cast": _is_cast_below,
    "add": _is_sum_below,
    "sub": _is_difference_below,
}


# ------------------------------------------------------------------ comparisons
AT_LEAST = (("lt", False), ("le", False), ("gt", True), ("ge", True))
"""Comparisons of x with y after whose answer x >= y."""
AT_MOST = (("lt", True), ("le", True), ("gt", False), ("ge", False))


def _choices(value: Value, comparisons: Sequence[tuple[str, bool]]) -> Iterator[list[Value]]:
    """Either choice of a `where`, and what it was compared with, where the answer makes that a limit."""
    condition, *choices = value.args
    for choice, answer in zip(choices, (True, False), strict=True):
        is_limited = (condition.prim, answer) in comparisons and condition.args[0] == choice
        yield [choice, condition.args[1]] if is_limited else [choice]


# ------------------------------------------------------------------ numbers
def _is_kept(value: Value) -> bool:
    """A cast between integers that keeps every value."""
    source, target = value.args[0].dtype, value.dtype
    return source == "b1" or (source in INTEGERS and target == "i64" and source != "u64")


def _is_at_most(a: Size, b: Size) -> bool:
    """a <= b, provably."""
    difference = simplify_size(sympy.sympify(b) - a)
    return bool(difference >= 0) if isinstance(difference, int) else bool(difference.is_nonnegative)


# ------------------------------------------------------------------ the rules
def needless(value: Value) -> Value | None:
    """check_index(i, n)  ->  i   where the graph shows that it is inside"""
    index, size = value.args
    return index if size.prim == "full" and is_within(index, size.params["value"]) else None


def checked_by_torch(value: Value) -> Value | None:
    """scatter(x, src, check_index(i, n))  ->  scatter(x, src, i)   of an input, where torch adds, in its own order"""
    if value.params["mode"] != "add" or not value.aval.is_float:
        return None
    base, source, *index = value.args
    plain = [i.args[0] if i.prim == "check_index" and _is_input(i.args[0]) else i for i in index]
    return make("scatter", base, source, *plain, **value.params) if plain != index else None


def _is_input(value: Value) -> bool:
    """In memory as it is: no kernel has to write it for the call."""
    while value.prim in ("permute", "broadcast", "slice", "reshape"):
        (value,) = value.args
    return value.prim in ("input", "pick")


index_checks: Rules = {"check_index": (needless,), "scatter": (checked_by_torch,)}
