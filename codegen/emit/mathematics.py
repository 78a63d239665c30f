"""A table of the elementwise primitives in Triton. Low floats are held in float32; the caller rounds."""

from __future__ import annotations

import bisect
import functools
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import sympy

from ...ir.errors import FusegradError
from ...ir.types import FLOAT8, LOW_FLOATS, UNSIGNED
from ..schedule.separation.algebra import LOG2E
from .statements import Expr, binary, call, literal, method, unary

TL = {
    "b1": "tl.int1", "i8": "tl.int8", "i16": "tl.int16", "i32": "tl.int32", "i64": "tl.int64", "u8": "tl.uint8",
    "u16": "tl.uint16", "u32": "tl.uint32", "u64": "tl.uint64", "f16": "tl.float16", "bf16": "tl.bfloat16",
    "f32": "tl.float32", "f64": "tl.float64",
}  # fmt: skip
FLOATING = frozenset({"f16", "bf16", "f32", "f64"})
NARROW = frozenset({*LOW_FLOATS, *FLOAT8})
"""Dtypes that registers hold as float32."""
BITS = {name: int(name[1:]) for name in ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")}


def register_dtype(dtype: str) -> str:
    """The dtype that registers hold: float32 for low floats."""
    return "f32" if dtype in NARROW else dtype


def widen(bits: Expr, dtype: str) -> Expr:
    """A value of memory as registers hold it. Eight-bit floats are bytes to Triton: no target has them all."""
    if dtype in FLOAT8:
        return call(f"from_{dtype}", bits)
    return method(bits, "to(tl.float32)") if dtype in LOW_FLOATS else bits


def narrow(value: Expr, dtype: str) -> Expr:
    """A float32 value as memory holds it in a low float dtype: rounded to nearest, ties to even."""
    return call(f"to_{dtype}", value) if dtype in FLOAT8 else method(value, f"to({TL[dtype]})")


def round_to(value: Expr, dtype: str) -> Expr:
    """The float32 value that a low float dtype can hold."""
    if dtype in FLOAT8:
        return widen(narrow(value, dtype), dtype)
    return call("rounded", value, literal(TL[dtype]))


def number(value: Any, dtype: str) -> str:
    """A Python number as a literal of this dtype; of integers an infinity is the farthest one."""
    if dtype == "b1":
        return str(bool(value))
    if dtype in FLOATING:
        value = _as_low(float(value), dtype)
        if value == 0 and math.copysign(1.0, value) < 0:  # Triton makes any zero constant a positive one
            return f"(tl.full([], 0.0, {TL[register_dtype(dtype)]}) * -1.0)"
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if dtype in FLOAT8:
        return "0.0" if value == 0 else _refuse_constant(value, dtype)
    bits = BITS[dtype]
    if isinstance(value, float) and math.isinf(value):
        value = lowest("amin" if value > 0 else "amax", dtype)
    wrapped = int(value) % (1 << bits)
    return str(wrapped if dtype in UNSIGNED or wrapped < 1 << (bits - 1) else wrapped - (1 << bits))


def _refuse_constant(value: Any, dtype: str) -> str:
    raise FusegradError(f"internal: the constant {value!r} of dtype {dtype} is not emitted")


def _as_low(value: float, dtype: str) -> float:
    """The nearest value of a low float dtype."""
    if not math.isfinite(value) or dtype in ("f32", "f64"):
        return value
    if dtype == "f16":
        try:
            return float(struct.unpack("<e", struct.pack("<e", value))[0])
        except OverflowError:
            return math.copysign(math.inf, value)
    try:
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def lowest(kind: str, dtype: str) -> Any:
    """The neutral element of a reduction, held in `dtype`."""
    if kind in ("sum", "prod"):
        return 0 if kind == "sum" else 1
    if dtype in FLOATING:
        return -math.inf if kind == "amax" else math.inf
    if dtype == "b1":
        return kind == "amin"
    low, high = (
        (0, 2 ** BITS[dtype] - 1) if dtype in UNSIGNED else (-(2 ** (BITS[dtype] - 1)), 2 ** (BITS[dtype] - 1) - 1)
    )
    return low if kind == "amax" else high


def cast(x: Expr, source: str, target: str) -> Expr:
    """torch's conversion between dtypes as registers hold them; the caller rounds to low floats."""
    if target == "b1":
        return x if source == "b1" else binary("!=", x, literal("0.0" if source in FLOATING else 0))
    if register_dtype(source) == register_dtype(target):
        return x
    return method(x, f"to({TL[register_dtype(target)]})")


Rule = Callable[..., Expr]
FIRST_DIGITS = 13
"""Beside the 11 digits of float16 and 8 of bfloat16, a product of so many more is exact in float32."""
UNIFORM_STEP = np.float32(4.6566127342e-10)
"""Triton's uniform numbers are multiples of it, rounded: by 31 of the 32 bits of a word."""
Numbers = npt.NDArray[np.float32]


def _infix(operator: str) -> Rule:
    return lambda d, x, y: binary(operator, x, y)


def _tl(name: str) -> Rule:
    return lambda d, *xs: call(f"tl.{name}", *xs)


def _helper(name: str) -> Rule:
    return lambda d, *xs: call(name, *xs)


def _on_tensors(name: str) -> Rule:
    """A helper that needs its operands in one shape."""
    return lambda d, *xs: call(name, *(_tensor(d, x) for x in xs))


def _exactly(rule: Rule) -> Rule:
    """A rule whose literals Triton would round to float32 first, as it does where no operator tells their dtype."""
    return lambda d, *xs: rule(d, *(_tensor(d, x) if d == "f64" else x for x in xs))


def _floats_only(name: str) -> Rule:
    """A rounding function: integers are whole already."""
    return lambda d, x: call(name, x) if d in FLOATING else x


def _by_kind(floats: Rule, integers: Rule, booleans: Rule | None = None) -> Rule:
    def rule(d: str, *xs: Expr) -> Expr:
        rule_of_kind = floats if d in FLOATING else booleans if d == "b1" and booleans else integers
        return rule_of_kind(d, *xs)

    return rule


def _ordered(operator: str) -> Rule:
    """A comparison; booleans compare as 0 < 1, not as signed bits."""
    return lambda d, x, y: binary(operator, _widened(d, x), _widened(d, y))


def _widened(d: str, x: Expr) -> Expr:
    return method(x, "to(tl.int32)") if d == "b1" else x


def _library(name: str) -> Rule:
    """A function of the device library, which is the one that torch's own kernels call there."""
    return lambda d, *xs: call(f"libdevice.{name}", *(_tensor(d, x) for x in xs))


def _divided(d: str, x: Expr, y: Expr) -> Expr:
    """IEEE's quotient: Triton's x / y of float32 is off by up to two units in the last place."""
    return binary("/", x, y) if register_dtype(d) == "f64" else call("tl.div_rn", x, y)


def _root(d: str, x: Expr) -> Expr:
    """IEEE's square root: tl.sqrt of float32 is an approximation that takes subnormal numbers for zeros."""
    return call("tl.sqrt" if register_dtype(d) == "f64" else "tl.sqrt_rn", x)


def _shifted(operator: str) -> Rule:
    """A shift; by less than nothing or by the whole width and more it is torch's: all bits leave."""

    def rule(d: str, x: Expr, y: Expr) -> Expr:
        if y.text.isdigit() and int(y.text) < BITS[d] - 1:
            return binary(operator, x, y)
        helper = "shifted_left" if operator == "<<" else "shifted_right"
        return call(helper, _tensor(d, x), _tensor(d, y), literal(BITS[d] - (d not in UNSIGNED and operator == ">>")))

    return rule


def _power(d: str, x: Expr, y: Expr) -> Expr:
    """Squares are products."""
    short = {"2.0": lambda: binary("*", x, x), "1.0": lambda: x}
    if d in FLOATING and y.text in short and x.text.isidentifier():
        return short[y.text]()
    return call("libdevice.pow" if d in FLOATING else "integer_power", _tensor(d, x), _tensor(d, y))


def _tensor(d: str, x: Expr) -> Expr:
    """A literal as a tensor: helpers convert their operands."""
    return x if x.names else call("tl.full", literal("()"), x, literal(TL[register_dtype(d)]))


_absolute: Rule = lambda d, x: x if d in UNSIGNED or d == "b1" else call("tl.abs", x)  # noqa: E731
_infinite: Rule = lambda d, x: binary("==", call("tl.abs", x), literal('float("inf")'))  # noqa: E731

rules: dict[str, Rule] = {
    "add": _by_kind(_infix("+"), _infix("+"), _infix("|")),
    "sub": _infix("-"),
    "mul": _by_kind(_infix("*"), _infix("*"), _infix("&")),
    "div": _by_kind(_divided, _infix("/")),
    "and": _infix("&"),
    "or": _infix("|"),
    "xor": _infix("^"),
    "shl": _shifted("<<"),
    "shr": _shifted(">>"),
    "eq": _infix("=="),
    "ne": _infix("!="),
    "lt": _ordered("<"),
    "le": _ordered("<="),
    "gt": _ordered(">"),
    "ge": _ordered(">="),
    "max": _by_kind(_exactly(_helper("larger")), _tl("maximum"), _infix("|")),
    "min": _by_kind(_exactly(_helper("smaller")), _tl("minimum"), _infix("&")),
    "rem": _by_kind(_on_tensors("float_modulo"), _helper("modulo")),
    "fmod": _by_kind(_library("fmod"), _infix("%")),
    "floordiv": _by_kind(_on_tensors("floor_division"), _helper("floor_quotient")),
    "pow": _power,
    "where": _tl("where"),
    "check_index": lambda d, index, size: index,  # the assertion is a statement of its own (access/index_checks.py)
    # Triton's -x is 0 - x, which loses the sign of zero
    "neg": _by_kind(lambda d, x: binary("*", x, literal("-1.0")), lambda d, x: unary("-", x)),
    "conj": lambda d, x: x,
    "abs": _absolute,
    "sign": _helper("sign"),
    "not": lambda d, x: binary("^", x, literal(2 ** BITS[d] - 1)) if d in UNSIGNED else unary("~", x),
    "isnan": lambda d, x: binary("!=", x, x),
    "isinf": lambda d, x: _infinite(d, x) if d in FLOATING else binary("!=", x, x),
    "signbit": _helper("sign_bit"),
    "reciprocal": lambda d, x: _divided(d, literal("1.0"), x),
    "fma": lambda d, x, y, z: call("tl.fma", x, y, z),
    "sqrt": _root,
    "sigmoid": _helper("sigmoid"),
    "floor": _floats_only("tl.floor"),
    "ceil": _floats_only("tl.ceil"),
    "trunc": _floats_only("libdevice.trunc"),
    "round": _floats_only("libdevice.nearbyint"),
    **{name: _library(name) for name in (
        "exp exp2 expm1 log log2 log10 log1p rsqrt sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh "
        "erf lgamma hypot".split()
    )},
}  # fmt: skip
"""With the accuracy of eager: see docs/numerics.md."""

fast_rules: dict[str, Rule] = {
    **rules,
    "div": _infix("/"),
    "reciprocal": lambda d, x: binary("/", literal("1.0"), x),
    **{name: _tl(name) for name in ("exp", "exp2", "sqrt", "rsqrt", "sigmoid")},
}
"""What numerics="fast" has in their place: the approximations of the hardware."""

packed_rules: dict[str, Rule] = {**rules, **{name: fast_rules[name] for name in ("exp", "div", "reciprocal")}}
"""Beside rows that fill the registers: for 16-bit numbers the hardware's quotients and powers are exact enough."""

def _of_ptx(name: str, helper: str) -> Rule:
    return lambda d, x: call(helper, _tensor(d, x), literal("True")) if d != "f64" else rules[name](d, x)


ptx_rules: dict[str, Rule] = {
    name: _of_ptx(name, helper) for name, helper in (("tanh", "tanh"), ("erf", "erf"), ("sigmoid", "newton_sigmoid"))
}
"""What NVIDIA's processors have in fewer instructions, with the accuracy of the device library's function."""


def _flushed_exp(dtype: str, x: Expr) -> Expr:
    """Triton's exponential keeps subnormal numbers whatever it is told, its power of two does not."""
    return fast_rules["exp"](dtype, x) if dtype == "f64" else call("tl.exp2", binary("*", x, literal(repr(LOG2E))))


def exp_below(kind: str, fast: bool, dtype: str, x: Expr) -> Expr:
    """exp of what is not positive, where subnormal results count for nothing: beside the 1 that its maximum has."""
    if kind == "cuda" and dtype == "f32" and not fast:
        return call("exp_below", x, literal("True"))
    return rules_for(kind, fast, packed=False)["exp"](dtype, x)


def rules_for(kind: str, fast: bool, packed: bool) -> dict[str, Rule]:
    """The table of a target; `packed`: of kernels whose rows fill the registers."""
    table = fast_rules if fast else packed_rules if packed else rules
    table = {**table, "exp": _flushed_exp} if fast and kind == "cuda" else table
    shorter = {name: rule for name, rule in ptx_rules.items() if kind == "cuda" and table[name] is rules[name]}
    return table | shorter


EXACT = frozenset(
    "neg conj abs sign max min where floor ceil trunc round spread load amax amin fmod carried last".split()
)
"""Operations on low floats whose result needs no rounding."""


# ------------------------------------------------------------------ quotients by numbers
def divided_by_number(x: Expr, divisor: float, digits: str, rounded: str) -> Expr | None:
    """x / divisor out of products, all bits the same; None where products are not.

    `digits`: a dtype that holds all x; `rounded`: the one that the quotient is rounded to.

    x / 4096.0                       ->  x * 0.000244140625                   exact, as for all powers of two
    rounded(x / 0.9, tl.bfloat16)    ->  rounded(x * 1.1111111, tl.bfloat16)  so for all 65,536 numbers
    x / 3.0, x a bfloat16 before     ->  tl.fma(x, low, x * high)             so for them, high + low being 1 / 3
    """
    if (reciprocal := exact_reciprocal(divisor, digits, rounded)) is not None:
        return binary("*", x, literal(repr(reciprocal)))
    if digits not in LOW_FLOATS or (parts := split_reciprocal(divisor, digits)) is None:
        return None
    high, low = (literal(repr(p)) for p in parts)
    return call("tl.fma", x, low, binary("*", x, high))


def times_reciprocal(x: Expr, divisor: float, dtype: str) -> Expr:
    """x / divisor as torch's own kernels for GPUs have it, whatever the divisor: times its reciprocal, rounded once.

    That of float32 for 16-bit numbers, too; so are means, sums times one over the count.
    """
    as_float = np.float64 if dtype == "f64" else np.float32
    with np.errstate(all="ignore"):
        reciprocal = float(as_float(1) / as_float(divisor))
    return binary("*", x, literal(number(reciprocal, register_dtype(dtype))))


def multiplied_by_reciprocal(x: Expr, divisor: float, dtype: str) -> Expr | None:
    """x / divisor for numerics="fast": off by a unit in the last place at most."""
    if dtype == "f64" or (reciprocal := _nearest_reciprocal(divisor)) is None:
        return None
    return binary("*", x, literal(repr(reciprocal)))


@functools.lru_cache(maxsize=256)
def exact_reciprocal(divisor: float, digits: str, rounded: str) -> float | None:
    """The factor in place of a divisor for all numbers of a dtype, where the result is rounded to another."""
    if (nearest := _nearest_reciprocal(divisor)) is None:
        return None
    if abs(math.frexp(divisor)[0]) == 0.5:
        return 1 / divisor
    if digits not in LOW_FLOATS or rounded not in LOW_FLOATS:
        return None
    x = all_numbers(digits)
    with np.errstate(all="ignore"):
        quotients, products = x / np.float32(divisor), x * np.float32(nearest)
        is_same = _are_same(rounded_numbers(quotients, rounded), rounded_numbers(products, rounded))
    return nearest if is_same else None


@functools.lru_cache(maxsize=256)
def split_reciprocal(divisor: float, digits: str) -> tuple[float, float] | None:
    """(high, low) such that x * high + x * low, rounded once, is x / divisor in float32 for all x of a 16-bit dtype.

    `high` is cut off, so that x * high is exact, and towards zero: where both are infinite, they have one sign.
    """
    if _nearest_reciprocal(divisor) is None:
        return None
    exact = 1 / float(np.float32(divisor))
    # A grid keeps the products with subnormal numbers exact; a large divisor needs one of its own
    for places in (FIRST_DIGITS, FIRST_DIGITS - math.frexp(exact)[1]):
        high = math.ldexp(math.trunc(math.ldexp(exact, places)), -places)
        low = float(np.float32(exact - high))
        if _is_quotient(high, low, divisor, digits):
            return high, low
    return None


def _is_quotient(high: float, low: float, divisor: float, digits: str) -> bool:
    x = all_numbers(digits)
    with np.errstate(all="ignore"):
        products = x * np.float32(high)
        return _are_same(x / np.float32(divisor), (x.astype(np.float64) * low + products).astype(np.float32))


def _nearest_reciprocal(divisor: float) -> float | None:
    """In float32, unless that is too large or small for float32's own digits."""
    is_ordinary = 2.0**-100 < abs(divisor) < 2.0**100
    return float(np.float32(1) / np.float32(divisor)) if is_ordinary else None


@functools.cache
def all_numbers(dtype: str) -> Numbers:
    """The 65,536 numbers of a 16-bit dtype, in float32."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    if dtype == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float32)
    return (bits << 16).view(np.float32)


def rounded_numbers(x: Numbers, dtype: str) -> Numbers:
    """float32 numbers as a 16-bit dtype holds them: to nearest, ties to even."""
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
    return np.where(np.isnan(x), x, rounded)


def _are_same(a: Numbers, b: Numbers) -> bool:
    """True of equal bits, but for those of NaN."""
    is_same = (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))
    return bool(is_same.all())


# ------------------------------------------------------------------ uniform numbers beside a number
def first_uniform(comparison: str, limit: float) -> int:
    """The least i in 1 .. 2 ** 31 for which a uniform number made of i is >= (of "ge" and "lt") or > the limit."""

    def is_below(i: int) -> bool:
        number = np.float32(i) * UNIFORM_STEP
        return bool(number < np.float32(limit) if comparison in ("ge", "lt") else number <= np.float32(limit))

    return bisect.bisect_left(range(1 << 31), True, lo=1, key=lambda i: not is_below(i))


# ------------------------------------------------------------------ sizes
def of_sizes(value: sympy.Expr, symbol: Callable[[sympy.Symbol], Expr]) -> Expr:
    """A sympy expression over sizes, computed in float64 in the kernel."""
    if value.is_Symbol:
        return call("tl.cast", symbol(value), literal("tl.float64"))
    if value.is_number:
        return literal(repr(float(value)))
    args = [of_sizes(a, symbol) for a in value.args]
    if value.is_Add or value.is_Mul:
        folded = args[0]
        for a in args[1:]:
            folded = binary("+" if value.is_Add else "*", folded, a)
        return folded
    if value.is_Pow and value.exp == -1:
        return binary("/", literal("1.0"), args[0])
    if value.is_Pow and value.exp in (sympy.Rational(1, 2), sympy.Rational(-1, 2)):
        root = call("tl.sqrt", args[0])
        return root if value.exp > 0 else binary("/", literal("1.0"), root)
    return _call_of_sizes(value, args)


def is_whole_number(value: sympy.Expr, dtype: str) -> bool:
    """True where an expression has only functions that sizes have, and is an integer: c * h / 3, if an index has it."""
    counts = (sympy.floor, sympy.ceiling, sympy.Max, sympy.Min, sympy.Mod)
    counted = all(f.func in counts for f in value.atoms(sympy.Function))
    is_index = dtype[0] in "iu" and not value.atoms(sympy.Float) and value.is_polynomial()
    return counted and bool(value.is_integer or is_index)


def _call_of_sizes(value: sympy.Expr, args: list[Expr]) -> Expr:
    if value.is_Pow:
        logarithm = literal(repr(math.log(value.base))) if value.base.is_number else call("tl.log", args[0])
        return call("tl.exp", binary("*", args[1], logarithm))
    rule = SIZES.get(type(value).__name__)
    if rule is None:
        raise ValueError(f"kernels have no {type(value).__name__} of sizes")
    return functools.reduce(rule, args) if len(args) > 2 else rule(*args)


def _remainder(a: Expr, b: Expr) -> Expr:
    return binary("-", a, binary("*", call("tl.floor", binary("/", a, b)), b))


def _rounded_half_even(x: Expr) -> Expr:
    above = call("tl.floor", binary("+", x, literal("0.5")))
    is_tie, is_odd = (binary("-", above, x), "0.5"), (_remainder(above, literal("2.0")), "1.0")
    down = [call("tl.where", binary("==", a, literal(b)), literal("1.0"), literal("0.0")) for a, b in (is_tie, is_odd)]
    return binary("-", above, binary("*", *down))


def _sign(x: Expr) -> Expr:
    ends = [call("tl.where", binary(op, x, literal("0.0")), literal("1.0"), literal("0.0")) for op in (">", "<")]
    return binary("-", *ends)


def _tangent(x: Expr) -> Expr:
    """tanh(x) = 1 - 2 / (exp(2 x) + 1), which has no overflow that shows."""
    grown = call("tl.exp", binary("*", literal("2.0"), x))
    return binary("-", literal("1.0"), binary("/", literal("2.0"), binary("+", grown, literal("1.0"))))


SIZES: dict[str, Callable[..., Expr]] = {
    "floor": lambda x: call("tl.floor", x),
    "ceiling": lambda x: call("tl.ceil", x),
    "Max": lambda a, b: _exactly(_tl("maximum"))("f64", a, b),
    "Min": lambda a, b: _exactly(_tl("minimum"))("f64", a, b),
    "Abs": lambda x: call("tl.abs", x),
    "Mod": _remainder,
    "RoundHalfEven": _rounded_half_even,
    "sign": _sign,
    "exp": lambda x: call("tl.exp", x),
    "log": lambda x: call("tl.log", x),
    "sin": lambda x: call("tl.sin", x),
    "cos": lambda x: call("tl.cos", x),
    "tanh": _tangent,
}
"""sympy's functions of sizes by name; those of two arguments are folded."""
