"""Checks of indices that are not needed: what the graph shows to be in range, and what torch checks itself.

    iota(n)  argmax(x)  min(max(i, 0), n - 1)  i % n  check_index(i, n)        are inside 0 .. n - 1

Two questions, asked operand by operand: is it never negative, and is it below a size. Of sums, differences and products
a third one: do they fit their dtype? max(i, 0) + 1 is negative where i is the largest number there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import sympy

from ..graph import Value
from ..infer import sizes_equal
from ..rewrite import Rules, make
from ..switches import is_on
from ..types import INTEGERS, UNSIGNED, Size, simplify_size

DEPTH = 16
"""Operations between an index and what shows its range; no question goes deeper."""
NEAR = 6
"""The same, to what shows that arithmetic fits its dtype."""
LONGEST = (1 << 31) - 1
"""The largest size that a symbol stands for, as far as arithmetic is asked to fit."""
BITS = {"b1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "u8": 8, "u16": 16, "u32": 32, "u64": 64}
Range = tuple[int, int]


def is_within(index: Value, size: Size) -> bool:
    """True if every element is provably in 0 .. size - 1."""
    return is_never_negative(index) and _is_below(index, size, DEPTH)


def is_never_negative(index: Value) -> bool:
    """True if no element provably is below zero."""
    return _is_nonnegative(index, DEPTH)


def walks(index: Value, axis: int) -> bool:
    """True if every element of an index is its own position along `axis`."""
    if index.prim == "iota":
        return axis == 0
    if index.prim == "check_index":  # of positions that may be as many as the axis is long
        return walks(index.args[0], axis)
    if index.prim not in ("broadcast", "reshape"):
        return False
    (inner,) = index.args
    if index.prim == "reshape":
        return inner.prim == "iota" and sizes_equal(index.shape[axis], inner.shape[0])
    axes = index.params["axes"]
    if axis not in axes:
        return False
    inside = axes.index(axis)
    return sizes_equal(inner.shape[inside], index.shape[axis]) and walks(inner, inside)


# ------------------------------------------------------------------ never negative
def _is_nonnegative(value: Value, depth: int) -> bool:
    rule = nonnegative_rules.get(value.prim)
    return rule is not None and depth > 0 and rule(value, depth - 1)


def _first(value: Value, depth: int) -> bool:
    return _is_nonnegative(value.args[0], depth)


def _all(value: Value, depth: int) -> bool:
    return all(_is_nonnegative(a, depth) for a in value.args)


def _all_exact(value: Value, depth: int) -> bool:
    """Sums and products of what is not negative, which do not wrap around."""
    return _all(value, depth) and _is_exact(value)


def _is_nonnegative_quotient(value: Value, depth: int) -> bool:
    """By a number: what is divided by zero may be anything."""
    return _first(value, depth) and _is_divisor_positive(value)


def _is_divisor_positive(value: Value) -> bool:
    divisor = value.args[1]
    return divisor.prim == "full" and _is_at_most(1, divisor.params["value"])


def _is_nonnegative_cast(value: Value, depth: int) -> bool:
    return _is_kept(value) and (value.args[0].dtype == "b1" or _first(value, depth))


def _is_nonnegative_difference(value: Value, depth: int) -> bool:
    """size - x, where x is at most the size."""
    left, right = value.args
    if left.prim != "full" or not _is_exact(value):
        return False
    return _is_below(right, simplify_size(left.params["value"] + 1), depth)


def _are_choices_nonnegative(value: Value, depth: int) -> bool:
    """where(x < c, c, x): either choice, or what it is not below where it is chosen."""
    return all(any(_is_nonnegative(v, depth) for v in choice) for choice in _choices(value, AT_LEAST))


nonnegative_rules: dict[str, Callable[[Value, int], bool]] = {
    **dict.fromkeys(("iota", "argmax", "argmin", "check_index"), lambda value, depth: True),
    "full": lambda value, depth: _is_at_most(0, value.params["value"]),
    **dict.fromkeys(("broadcast", "reshape", "permute", "slice", "flip", "pad", "gather", "amax", "amin"), _first),
    **dict.fromkeys(("cat", "min"), _all),
    **dict.fromkeys(("add", "mul"), _all_exact),
    "floordiv": _is_nonnegative_quotient,
    "where": _are_choices_nonnegative,
    "max": lambda value, depth: any(_is_nonnegative(a, depth) for a in value.args),
    "rem": lambda value, depth: _is_divisor_positive(value),
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
    for x, constant in (value.args, value.args[::-1]) if _is_exact(value) else ():
        if constant.prim == "full" and _is_below(x, simplify_size(size - constant.params["value"]), depth):
            return True
    return False


def _is_difference_below(value: Value, size: Size, depth: int) -> bool:
    """x - y and size - y, where y is not negative."""
    return _is_exact(value) and _is_nonnegative(value.args[1], depth) and _first_below(value, size, depth)


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


# ------------------------------------------------------------------ arithmetic that fits its dtype
def _is_exact(value: Value) -> bool:
    """True if a sum, a difference or a product provably fits its dtype."""
    low, high = range_rules[value.prim](value, NEAR)
    least, most = _of_dtype(value.dtype)
    return least <= low and high <= most


def _range(value: Value, depth: int) -> Range:
    """The least and the largest number that a value may be."""
    everything = _of_dtype(value.dtype)
    rule = range_rules.get(value.prim) if value.dtype in BITS else None
    if rule is None or depth == 0:
        return everything
    low, high = rule(value, depth - 1)
    fits = everything[0] <= low and high <= everything[1]
    return (low, high) if fits else everything


def _of_dtype(dtype: str) -> Range:
    bits = BITS.get(dtype, 64)  # of a float, that of the integer that a cast makes of it
    return (0, (1 << bits) - 1) if dtype in (*UNSIGNED, "b1") else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def _as_first(value: Value, depth: int) -> Range:
    return _range(value.args[0], depth)


def _ranges(value: Value, depth: int) -> tuple[list[int], list[int]]:
    ranges = [_range(a, depth) for a in value.args]
    return [low for low, _ in ranges], [high for _, high in ranges]


def _sum(value: Value, depth: int) -> Range:
    low, high = _ranges(value, depth)
    return sum(low), sum(high)


def _difference(value: Value, depth: int) -> Range:
    (low, low_off), (high, high_off) = _ranges(value, depth)
    return low - high_off, high - low_off


def _product(value: Value, depth: int) -> Range:
    corners = [a * b for a in _range(value.args[0], depth) for b in _range(value.args[1], depth)]
    return min(corners), max(corners)


def _smaller(value: Value, depth: int) -> Range:
    low, high = _ranges(value, depth)
    return min(low), min(high)


def _larger(value: Value, depth: int) -> Range:
    low, high = _ranges(value, depth)
    return max(low), max(high)


def _any_of(value: Value, depth: int) -> Range:
    low, high = _ranges(value, depth)
    return min(low), max(high)


def _chosen(value: Value, depth: int) -> Range:
    low = min(max(_range(v, depth)[0] for v in limited) for limited in _choices(value, AT_LEAST))
    high = max(min(_range(v, depth)[1] for v in limited) for limited in _choices(value, AT_MOST))
    return low, high


def _number(value: Value, depth: int) -> Range:
    number: Size = value.params["value"]
    return (int(number), int(number)) if isinstance(number, (int, float)) else (-LONGEST, LONGEST)


def _remainder(value: Value, depth: int) -> Range:
    low, high = _range(value.args[1], depth)
    return (0, high - 1) if low > 0 else _of_dtype(value.dtype)


def _padded(value: Value, depth: int) -> Range:
    low, high = _as_first(value, depth)
    return min(low, 0), max(high, 0)


def _size(value: Value, depth: int) -> Range:
    size: Size = value.params.get("size", LONGEST)
    return 0, size - 1 if isinstance(size, int) else LONGEST


range_rules: dict[str, Callable[[Value, int], Range]] = {
    **dict.fromkeys(("iota", "argmax", "argmin", "check_index"), _size),
    "full": _number,
    **dict.fromkeys(("broadcast", "reshape", "permute", "slice", "flip", "gather", "amax", "amin", "cast"), _as_first),
    "pad": _padded,
    "cat": _any_of,
    "where": _chosen,
    "add": _sum,
    "sub": _difference,
    "mul": _product,
    "min": _smaller,
    "max": _larger,
    "rem": _remainder,
}


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


def indices_for_torch(scatter: Value) -> set[int]:
    """Which indices of a node may be such: torch's own operation has to be given none that counts from the end."""
    if scatter.params["mode"] != "add" or not scatter.aval.is_float:
        return set()
    return {at for at, index in enumerate(scatter.args[2:]) if _is_input(index)}


def checked(index: Value, size: Size) -> Value:
    """The index, asserted to be in range where a kernel adds: torch's own addition would say so."""
    index = index if index.dtype == "i64" else make("cast", index, dtype="i64")
    if index.prim == "check_index" or is_within(index, size) or not is_on("index_checks"):
        return index
    return make("check_index", index, make("full", value=size, shape=index.shape, dtype="i64"))


def _is_input(value: Value) -> bool:
    """In memory as it is: no kernel has to write it for the call."""
    while value.prim in ("permute", "broadcast", "slice", "reshape"):
        (value,) = value.args
    return value.prim in ("input", "pick")


index_checks: Rules = {"check_index": (needless,), "scatter": (checked_by_torch,)}
