"""Small @triton.jit functions that kernels call, as text: a module includes the ones it uses, and what those use."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SOURCE = '''
@triton.jit
def rounded(v, dtype: tl.constexpr):
    """The float32 value that `dtype` can hold."""
    return v.to(dtype).to(tl.float32)

@triton.jit
def packed(v):
    """The same 16-bit tile, opaque: what was computed from it is computed again, not kept.

    The assembler sees through a move, but not that programs of a grid with one axis are at zero of the third.
    """
    add_zero: tl.constexpr = "{ .reg .b32 zero; mov.u32 zero, %ctaid.z; add.u32 $0, $1, zero; }"
    return tl.inline_asm_elementwise(add_zero, "=r,r", [v], dtype=v.dtype, is_pure=False, pack=2)

@triton.jit
def packed_vector(v):
    """`packed` for vector registers of AMD."""
    return tl.inline_asm_elementwise("v_mov_b32 $0, $1", "=v,v", [v], dtype=v.dtype, is_pure=False, pack=2)

@triton.jit
def larger(a, b):
    """The maximum; NaN wins, as in torch."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

@triton.jit
def smaller(a, b):
    """The minimum; NaN wins, as in torch."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)

@triton.jit
def times(a, b):
    return a * b

@triton.jit
def row_max(v, axis: tl.constexpr, keep_dims: tl.constexpr = False):
    """The maximum along an axis; NaN wins."""
    return tl.reduce(v, axis, larger, keep_dims=keep_dims)

@triton.jit
def row_min(v, axis: tl.constexpr, keep_dims: tl.constexpr = False):
    """The minimum along an axis; NaN wins."""
    return tl.reduce(v, axis, smaller, keep_dims=keep_dims)

@triton.jit
def row_prod(v, axis: tl.constexpr, keep_dims: tl.constexpr = False):
    """The product along an axis."""
    return tl.reduce(v, axis, times, keep_dims=keep_dims)

@triton.jit
def evens(v):
    """Every other element along the last axis, from the first on."""
    return tl.split(tl.reshape(v, v.shape[:-1] + [v.shape[-1] // 2, 2]))[0]

@triton.jit
def odds(v):
    """Every other element along the last axis, from the second on."""
    return tl.split(tl.reshape(v, v.shape[:-1] + [v.shape[-1] // 2, 2]))[1]

@triton.jit
def last_to_arrive(counter, count):
    """True in the last of `count` programs; leaves the counter at zero for the next launch."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last

@triton.jit
def rotated(item, start, stop, strip, strips, step: tl.constexpr = 1):
    """Another order of start .. stop for each strip: in a group of `strips` items, strip i begins with the i-th."""
    group = strips * step
    first = item - (item - start) % group
    return tl.where(first + group - step < stop, first + (item - first + strip * step) % group, item)

@triton.jit
def known(pointer):
    """The word that some program stored here, or zero; one thread asks, so that all branch alike."""
    return tl.atomic_add(pointer, 0, sem="relaxed")

@triton.jit
def word_of(v):
    """A float32 as a word that is not zero, but for one NaN."""
    return v.to(tl.int32, bitcast=True) ^ 0x7FC0DEAD

@triton.jit
def of_word(word):
    return (word ^ 0x7FC0DEAD).to(tl.float32, bitcast=True)

@triton.jit
def expm1(x):
    """exp(x) - 1 without cancellation (Kahan)."""
    u = tl.exp(x)
    y = tl.where(u == 1.0, x, (u - 1.0) * (x / tl.log(u)))
    y = tl.where(u - 1.0 == -1.0, -1.0, y)
    return tl.where(u == float("inf"), u, y)

@triton.jit
def log1p(x):
    """log(1 + x) without cancellation (Kahan)."""
    u = 1.0 + x
    y = tl.where(u == 1.0, x, tl.log(u) * (x / (u - 1.0)))
    return tl.where(u == float("inf"), u, y)

@triton.jit
def tanh(x):
    """Odd polynomial near zero (Cephes), 1 - 2 / (exp(2 |x|) + 1) elsewhere; expm1 for float64."""
    a = tl.abs(x)
    if x.dtype == tl.float64:
        e = expm1(2.0 * a)
        t = tl.where(a > 22.0, 1.0, e / (e + 2.0))
        return tl.where(x < 0.0, -t, tl.where(x == 0.0, x, t))
    else:
        z = x * x
        p = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
        near = x + x * z * (p - 3.33332819422e-1)
        t = 1.0 - 2.0 / (tl.exp(2.0 * a) + 1.0)
        return tl.where(a < 0.625, near, tl.where(x < 0.0, -t, t))

@triton.jit
def sinh(x):
    a = tl.abs(x)
    e = expm1(a)
    half = tl.exp(0.5 * a)
    t = tl.where(a > 20.0, 0.5 * half * half, 0.5 * (e + e / (e + 1.0)))
    return tl.where(x < 0.0, -t, t)

@triton.jit
def cosh(x):
    a = tl.abs(x)
    half = tl.exp(0.5 * a)
    return tl.where(a > 20.0, 0.5 * half * half, 0.5 * (tl.exp(a) + tl.exp(-a)))

@triton.jit
def asinh(x):
    a = tl.abs(x)
    t = tl.where(a > 1.0e8, tl.log(a) + 0.6931471805599453, log1p(a + a * a / (1.0 + tl.sqrt(a * a + 1.0))))
    return tl.where(x < 0.0, -t, t)

@triton.jit
def acosh(x):
    d = x - 1.0
    t = tl.where(x > 1.0e8, tl.log(x) + 0.6931471805599453, log1p(d + tl.sqrt(d * (d + 2.0))))
    return tl.where(x < 1.0, float("nan"), t)

@triton.jit
def atanh(x):
    a = tl.abs(x)
    t = 0.5 * log1p(2.0 * a / (1.0 - a))
    return tl.where(x < 0.0, -t, t)

@triton.jit
def atan(x):
    """Cephes: reduce to |x| <= 0.66, then a rational function."""
    a = tl.abs(x)
    high = a > 2.414213562373095
    middle = (a > 0.66) & (a <= 2.414213562373095)
    r = tl.where(high, -1.0 / a, tl.where(middle, (a - 1.0) / (a + 1.0), a))
    z = r * r
    p = -8.750608600031904e-1 * z - 1.615753718733365e1
    p = ((p * z - 7.500855792314705e1) * z - 1.2288666844901361e2) * z - 6.485021904942025e1
    q = ((z + 2.485846490142306e1) * z + 1.650270098316988e2) * z + 4.328810604912903e2
    q = (q * z + 4.853903996359137e2) * z + 1.945506571482614e2
    t = r + r * (z * p / q)
    t = tl.where(high, 1.5707963267948966 + t, tl.where(middle, 0.7853981633974483 + t, t))
    return tl.where(x < 0.0, -t, t)

@triton.jit
def atan2(y, x):
    t = atan(tl.abs(y) / tl.abs(x))
    both = (y == 0.0) & (x == 0.0)
    t = tl.where(both, 0.0, tl.where((tl.abs(y) == float("inf")) & (tl.abs(x) == float("inf")), 0.7853981633974483, t))
    negative_x = (x < 0.0) | ((x == 0.0) & (1.0 / x < 0.0))
    t = tl.where(negative_x, 3.141592653589793 - t, t)
    negative_y = (y < 0.0) | ((y == 0.0) & (1.0 / y < 0.0))
    t = tl.where(negative_y, -t, t)
    return tl.where((x != x) | (y != y), float("nan"), t)

@triton.jit
def asin(x):
    return atan2(x, tl.sqrt((1.0 - x) * (1.0 + x)))

@triton.jit
def acos(x):
    return atan2(tl.sqrt((1.0 - x) * (1.0 + x)), x)

@triton.jit
def tan(x):
    return tl.sin(x) / tl.cos(x)

@triton.jit
def trunc(x):
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))

@triton.jit
def rint(x):
    """To the nearest integer, halves to even."""
    low = tl.floor(x)
    d = x - low
    odd = low - 2.0 * tl.floor(0.5 * low)
    return tl.where(d < 0.5, low, tl.where(d > 0.5, low + 1.0, low + odd))

@triton.jit
def sign(x):
    return tl.where(x > 0, 1, tl.where(x < 0, -1, 0)).to(x.dtype)

@triton.jit
def modulo(x, y):
    """The remainder with the sign of the divisor, as in Python."""
    m = x % y
    return tl.where((m != 0) & ((m < 0) != (y < 0)), m + y, m)

@triton.jit
def floor_quotient(x, y):
    """Integers: the quotient rounded down."""
    return tl.where((x % y != 0) & ((x < 0) != (y < 0)), x // y - 1, x // y)

@triton.jit
def floor_division(x, y):
    """Floats: torch's floor division."""
    m = x % y
    d = (x - m) / y
    d = tl.where((m != 0.0) & ((y < 0.0) != (m < 0.0)), d - 1.0, d)
    f = tl.floor(d)
    f = tl.where(d - f > 0.5, f + 1.0, f)
    return tl.where(y == 0.0, x / y, tl.where(d == 0.0, 0.0, f))

@triton.jit
def power(x, y):
    """x ** y through float64."""
    x, y = tl.where(y == y, x, x), tl.where(x == x, y, y)  # both blocks: Triton's interpreter mixes a bool up with one
    a = tl.abs(x).to(tl.float64)
    b = y.to(tl.float64)
    r = tl.exp(b * tl.log(a))
    whole = tl.floor(b) == b
    odd = whole & (tl.floor(0.5 * b) != 0.5 * b) & (tl.abs(b) < 9007199254740992.0)
    negative = (x < 0.0) | ((x == 0.0) & (1.0 / x < 0.0))
    r = tl.where(negative & odd, -r, r)
    r = tl.where((x < 0.0) & ~whole & (tl.abs(b) != float("inf")) & (a != float("inf")), float("nan"), r)
    r = tl.where((b == 0.0) | (x == 1.0) | ((x == -1.0) & (tl.abs(b) == float("inf"))), 1.0, r)
    return r.to(x.dtype)

@triton.jit
def integer_power(x, y):
    """x ** y by squaring, wrapping around; a negative exponent leaves 0, except of 1 and -1."""
    r = x * 0 + 1
    square = x
    left = y
    for _ in range(64):
        r = tl.where((left & 1) != 0, r * square, r)
        square = square * square
        left = left >> 1
    unit = tl.where(x == 1, 1, tl.where(x == -1, tl.where((y & 1) != 0, -1, 1), 0)).to(x.dtype)
    return tl.where(y < 0, unit, r)

@triton.jit
def lgamma(x):
    """Lanczos (g = 7, 9 terms) in float64, reflected below one half."""
    v = x.to(tl.float64)
    z = tl.where(v < 0.5, 1.0 - v, v) - 1.0
    s = 0.99999999999980993 + 676.5203681218851 / (z + 1.0) - 1259.1392167224028 / (z + 2.0)
    s = s + 771.32342877765313 / (z + 3.0) - 176.61502916214059 / (z + 4.0) + 12.507343278686905 / (z + 5.0)
    s = s - 0.13857109526572012 / (z + 6.0) + 9.9843695780195716e-6 / (z + 7.0) + 1.5056327351493116e-7 / (z + 8.0)
    t = z + 7.5
    g = 0.91893853320467274 + (z + 0.5) * tl.log(t) - t + tl.log(s)
    f = v - tl.floor(v)
    g = tl.where(v < 0.5, tl.log(3.141592653589793 / tl.abs(tl.sin(3.141592653589793 * f))) - g, g)
    return tl.where(tl.abs(v) == float("inf"), float("inf"), g).to(x.dtype)

@triton.jit
def float8_code(x, mantissa: tl.constexpr, bias: tl.constexpr):
    """The magnitude of the byte nearest to a float32, ties to even, as if there were no largest."""
    a = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    normal = (a - ((127 - bias) << 23) + ((1 << (22 - mantissa)) - 1) + ((a >> (23 - mantissa)) & 1)) >> (23 - mantissa)
    small = (tl.abs(x) + 2.0 ** (24 - mantissa - bias)).to(tl.int32, bitcast=True) - ((151 - mantissa - bias) << 23)
    return tl.where(a < ((128 - bias) << 23), small, normal)

@triton.jit
def float8_value(code, mantissa: tl.constexpr, bias: tl.constexpr):
    """The number that a byte is, NaN and infinity aside."""
    value = ((code & 0x7F) << (23 - mantissa)).to(tl.float32, bitcast=True) * 2.0 ** (127 - bias)
    return tl.where(code >= 0x80, value * -1.0, value)

@triton.jit
def to_f8e4m3fn(x):
    """The byte nearest to a float32, ties to even; what is too large becomes the largest, 448."""
    bits = x.to(tl.int32, bitcast=True)
    a = bits & 0x7FFFFFFF
    code = tl.where(a < 0x43E00000, float8_code(x, 3, 7), 0x7E)
    code = tl.where(a > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)

@triton.jit
def from_f8e4m3fn(x):
    code = x.to(tl.int32)
    return tl.where((code & 0x7F) == 0x7F, float("nan"), float8_value(code, 3, 7))

@triton.jit
def to_f8e5m2(x):
    """The byte nearest to a float32, ties to even; what is too large is infinite, as in torch."""
    bits = x.to(tl.int32, bitcast=True)
    a = bits & 0x7FFFFFFF
    code = tl.where(a < 0x47800000, float8_code(x, 2, 15), 0x7C)
    code = tl.where(a > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)

@triton.jit
def from_f8e5m2(x):
    return (x.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)

@triton.jit
def to_float8_fnuz(x, mantissa: tl.constexpr, bias: tl.constexpr, beyond: tl.constexpr):
    """The byte nearest to a float32, ties to even; no negative zero, and what is too large is NaN, as in torch."""
    bits = x.to(tl.int32, bitcast=True)
    code = float8_code(x, mantissa, bias)
    signed = tl.where(code == 0, 0, code | ((bits >> 24) & 0x80))
    return tl.where((bits & 0x7FFFFFFF) < beyond, signed, 0x80).to(tl.uint8)

@triton.jit
def from_float8_fnuz(x, mantissa: tl.constexpr, bias: tl.constexpr):
    code = x.to(tl.int32)
    return tl.where(code == 0x80, float("nan"), float8_value(code, mantissa, bias))

@triton.jit
def to_f8e4m3fnuz(x):
    return to_float8_fnuz(x, 3, 8, 0x43780000)

@triton.jit
def from_f8e4m3fnuz(x):
    return from_float8_fnuz(x, 3, 8)

@triton.jit
def to_f8e5m2fnuz(x):
    return to_float8_fnuz(x, 2, 16, 0x47700000)

@triton.jit
def from_f8e5m2fnuz(x):
    return from_float8_fnuz(x, 2, 16)

@triton.jit
def philox(seed, counter):
    """Philox4x32-10 with a 64-bit key and counter: the first two of its four words."""
    key = seed.to(tl.uint64)
    count = counter.to(tl.uint64)
    low = (count & 0xFFFFFFFF).to(tl.uint32)
    zero = low * 0
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    a, b, _, _ = tl.philox_impl(low, (count >> 32).to(tl.uint32), zero, zero, k0, k1)
    return a, b

@triton.jit
def uniform(seed, counter):
    """In [0, 1), one number per counter."""
    a, _ = philox(seed, counter)
    return tl.uint_to_uniform_float(a)

@triton.jit
def normal(seed, counter):
    """Box-Muller, one number per counter."""
    a, b = philox(seed, counter)
    u = tl.maximum(1.0e-7, tl.uint_to_uniform_float(a))
    return tl.sqrt(-2.0 * tl.log(u)) * tl.cos(6.283185307179586 * tl.uint_to_uniform_float(b))
'''


def _split() -> dict[str, str]:
    parts = [p.strip("\n") for p in _SOURCE.split("@triton.jit\n")[1:]]
    return {p[4 : p.index("(")]: f"@triton.jit\n{p}" for p in parts}


HELPERS = _split()
"""Name to text."""


def helpers_in(sources: Iterable[str]) -> list[str]:
    """The texts of the helpers that the sources call, directly or not, in the order above."""
    wanted: set[str] = set()
    todo = list(sources)
    while todo:
        code = re.sub(r'#.*|""".*?"""|"[^"]*"', "", todo.pop())
        words = set(re.findall(r"(?<![\w.])[a-z_]\w*", code))
        found = (words & HELPERS.keys()) - wanted
        wanted |= found
        todo.extend(HELPERS[n] for n in sorted(found))
    return [text for name, text in HELPERS.items() if name in wanted]
