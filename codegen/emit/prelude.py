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
def rounded_pairs(v):
    """The float32 values that bfloat16 can hold, two at once: one alone is rounded by a slower unit."""
    pair: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return tl.inline_asm_elementwise(pair, "=r,f,f", [v], dtype=tl.bfloat16, is_pure=True, pack=2).to(tl.float32)

@triton.jit
def from_bf16(x):
    """The float32 numbers: their bits, moved. Two in a register come apart in two instructions, three with `.to`."""
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)

@triton.jit
def pairs_from_bf16(x):
    """The same in a loop, whose loads come as vectors: the compiler is told the two instructions."""
    apart: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return tl.inline_asm_elementwise(apart, "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2)

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
def first_order(a, b, c, d):
    """a * h + b and then c * h + d, as one step."""
    return a * c, b * c + d

@triton.jit
def row_max(v, axis: tl.constexpr, keep_dims: tl.constexpr = False):
    """The maximum along an axis; NaN wins."""
    return tl.reduce(v, axis, larger, keep_dims=keep_dims)

@triton.jit
def row_min(v, axis: tl.constexpr, keep_dims: tl.constexpr = False):
    """The minimum along an axis; NaN wins."""
    return tl.reduce(v, axis, smaller, keep_dims=keep_dims)

@triton.jit
def plus_two(a, b, c, d):
    return a + c, b + d

@triton.jit
def plus_three(a, b, c, d, e, f):
    return a + d, b + e, c + f

@triton.jit
def two_sums(a, b):
    """Sums along a row, for which its warps wait for each other once."""
    return tl.reduce((a, b), 0, plus_two)

@triton.jit
def three_sums(a, b, c):
    """Sums along a row, for which its warps wait for each other once."""
    return tl.reduce((a, b, c), 0, plus_three)

@triton.jit
def of_threads(v, fold: tl.constexpr, threads: tl.constexpr, access: tl.constexpr):
    """What each thread has of a tile, folded."""
    each: tl.constexpr = min(access, v.shape[0] // threads)
    return fold(fold(tl.reshape(v, [v.shape[0] // (threads * each), threads, each]), 2), 0)

@triton.jit
def joined(head, tail, fold: tl.constexpr, threads: tl.constexpr, access: tl.constexpr):
    """What each thread has of both tiles of a row, folded."""
    both = tl.join(of_threads(head, fold, threads, access), of_threads(tail, fold, threads, access))
    return fold(both, 1)

@triton.jit
def row_prod(v, axis: tl.constexpr, keep_dims: tl.constexpr = False):
    """The product along an axis."""
    return tl.reduce(v, axis, times, keep_dims=keep_dims)

@triton.jit
def lane_of(place, first, lanes: tl.constexpr):
    """The lane at a place, in a block from `first` on: -1 for all below it, `lanes` for all above."""
    return (tl.minimum(tl.maximum(place, first - 1), first + lanes) - first).to(tl.int32)

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
def are_missing(word, distance, pieces, patience):
    """True while others have not stored all pieces; behind its own piece, a program tells that it has, and waits."""
    tl.debug_barrier()
    own = tl.where(distance == 0, 1, 0)
    stored = tl.atomic_add(word, own, sem="acq_rel") + own
    looks = own * patience
    while (stored < pieces) & (looks > 0):
        stored = tl.atomic_add(word, 0, sem="acquire")
        looks -= 1
    return stored < pieces

@triton.jit
def tell(word):
    """Others may read what this program has stored so far: its word is one from now on."""
    tl.debug_barrier()
    tl.atomic_add(word, 1, sem="acq_rel")

@triton.jit
def is_told(words, mask):
    """Whether all words under the mask are told; what has been stored before that can be read."""
    told = tl.atomic_add(words, 0, mask=mask, sem="acquire") != 0
    return tl.min(tl.where(told | (mask == 0), 1, 0)) != 0

@triton.jit
def in_vain(words, mask, patience: tl.constexpr):
    """Waits until all words under the mask are told; True where they are not, however often it asks.

    They are those of programs with smaller numbers, which run already.
    """
    asked, told = tl.zeros([], tl.int32), is_told(words, mask)
    while (told == 0) & (asked < patience):
        asked, told = asked + 1, is_told(words, mask)
    tl.debug_barrier()
    return told == 0

@triton.jit
def word_of(v):
    """A float32 as a word that is not zero, but for one NaN."""
    return v.to(tl.int32, bitcast=True) ^ 0x7FC0DEAD

@triton.jit
def of_word(word):
    return (word ^ 0x7FC0DEAD).to(tl.float32, bitcast=True)

@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), each step rounded to nearest."""
    below = 1.0 + libdevice.exp(x * -1.0)
    if x.dtype == tl.float64:
        return 1.0 / below
    else:
        return tl.div_rn(1.0, below)

@triton.jit
def near_power(x, ptx: tl.constexpr):
    """2 ** x to about 22 bits; what is subnormal may be zero."""
    if ptx:
        power: tl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(power, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)

@triton.jit
def near_reciprocal(x, ptx: tl.constexpr):
    """1 / x to about 23 bits; what is subnormal may be zero."""
    if ptx:
        quotient: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(quotient, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x

@triton.jit
def newton_sigmoid(x, ptx: tl.constexpr):
    """1 / (1 + exp(-x)), each step rounded to nearest: Newton's of an eighth, whose reciprocal is never subnormal."""
    eighth = tl.fma(libdevice.exp(x * -1.0), 0.125, 0.125)
    inverse = near_reciprocal(eighth, ptx)
    excess = tl.fma(tl.minimum(eighth, 4.2535296e37), inverse, -1.0)  # of infinity, too
    return tl.fma(inverse, excess * -1.0, inverse) * 0.125

@triton.jit
def exp_below(x, ptx: tl.constexpr):
    """exp(x) where x is not positive, to the digits of the device library's; what is subnormal is zero."""
    x = tl.maximum(x, -104.0, propagate_nan=tl.PropagateNan.ALL)
    exponent = x * 1.4426950216293335
    power = near_power(exponent, ptx)
    return tl.fma(power, tl.fma(exponent, -0.6931471824645996, x), power)

@triton.jit
def share(x, total, inverse):
    """x / total as IEEE 754 says, for x of at most 1 and a total of at least 1: what the product leaves is added."""
    quotient = x * inverse
    return tl.fma(tl.fma(quotient * -1.0, total, x), inverse, quotient)

@triton.jit
def tanh(x, ptx: tl.constexpr):
    """Both formulas of the device library: a choice of two results is less than a branch for each element."""
    size, square = tl.abs(x), x * x
    far = tl.fma(near_reciprocal(near_power(size * 2.885390043258667, ptx) + 1.0, ptx), -2.0, 1.0)
    near = tl.fma(tl.fma(square, 0.01573968306183815, -0.05230396240949631), square, 0.13315297663211823)
    near = tl.fma(tl.fma(near, square, -0.33332768082618713) * square, size, size)
    bits = tl.where(size < 0.6000000238418579, near, far).to(tl.int32, bitcast=True)
    return (bits | (x.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)  # the sign of -0.0, too

@triton.jit
def erf(x, ptx: tl.constexpr):
    """Both formulas of the device library: a choice of two results is less than one of each coefficient."""
    size, square = tl.abs(x), x * x
    far = tl.fma(size, 1.6425845e-05, -0.00046802105)
    far = tl.fma(tl.fma(far, size, 0.005264764), size, -0.034303077)
    far = tl.fma(tl.fma(far, size, 0.1532937), size, 0.91631305)
    far = tl.fma(tl.fma(far, size, 0.62829983), size * -1.0, size * -1.0)
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    far = ((1.0 - near_power(far, ptx)).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    near = tl.fma(square, 8.4834945e-05, -0.00082130916)
    near = tl.fma(tl.fma(near, square, 0.005213489), square, -0.026868774)
    near = tl.fma(tl.fma(near, square, 0.11284005), square, -0.37612665)
    near = tl.fma(tl.fma(near, square, 0.12837915), x, x)
    return tl.where(size >= 1.00296, far, near)

@triton.jit
def sign_bit(x):
    """True if the sign is a minus, of zeros and NaN too."""
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) < 0
    else:
        return x.to(tl.int32, bitcast=True) < 0

@triton.jit
def sign(x):
    return tl.where(x > 0, 1, tl.where(x < 0, -1, 0)).to(x.dtype)

@triton.jit
def modulo(x, y):
    """Integers: the remainder with the sign of the divisor, as in Python."""
    m = x % y
    return tl.where((m != 0) & ((m < 0) != (y < 0)), m + y, m)

@triton.jit
def float_modulo(x, y):
    """Floats: the remainder with the sign of the divisor, as in Python."""
    x, y = tl.broadcast(x, y)
    m = libdevice.fmod(x, y)
    return tl.where((m != 0.0) & ((m < 0.0) != (y < 0.0)), m + y, m)

@triton.jit
def floor_quotient(x, y):
    """Integers: the quotient rounded down."""
    return tl.where((x % y != 0) & ((x < 0) != (y < 0)), x // y - 1, x // y)

@triton.jit
def floor_division(x, y):
    """Floats: torch's floor division."""
    x, y = tl.broadcast(x, y)
    m = libdevice.fmod(x, y)
    if x.dtype == tl.float64:
        d, whole = (x - m) / y, x / y
    else:
        d, whole = tl.div_rn(x - m, y), tl.div_rn(x, y)
    d = tl.where((m != 0.0) & ((y < 0.0) != (m < 0.0)), d - 1.0, d)
    f = tl.floor(d)
    f = tl.where(d - f > 0.5, f + 1.0, f)
    return tl.where(y == 0.0, whole, tl.where(d == 0.0, whole * 0.0, f))

@triton.jit
def shifted_left(x, y, most: tl.constexpr):
    inside = (y >= 0) & (y < most)
    return tl.where(inside, x << tl.where(inside, y, 0), 0).to(x.dtype)

@triton.jit
def shifted_right(x, y, most: tl.constexpr):
    """By `most` where the count is out of range: what is left is the sign."""
    return x >> tl.where((y >= 0) & (y < most), y, most).to(x.dtype)

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
def from_f8e4m3fn(x, ptx: tl.constexpr = False):
    """The number that a byte is; `ptx`: by the processor's own conversion."""
    if ptx:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float32)
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
def wide_product(x, factor: tl.constexpr, ptx: tl.constexpr):
    """The 64 bits of a product of words: one instruction of NVIDIA's, whose compiler makes two of it unless told."""
    if ptx:
        wide: tl.constexpr = "mul.wide.u32 $0, $1, $2;"
        return tl.inline_asm_elementwise(wide, "=l,r,r", [x, factor], dtype=tl.uint64, is_pure=True, pack=1)
    else:
        return x.to(tl.uint64) * factor

@triton.jit
def philox(seed, counter, ptx: tl.constexpr):
    """Philox4x32-10 with a 64-bit key and counter: its four words."""
    key = seed.to(tl.uint64)
    count = counter.to(tl.uint64)
    k0 = key.to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    a = count.to(tl.uint32)
    b = (count >> 32).to(tl.uint32)
    c = a * 0
    d = c
    for _ in tl.static_range(10):
        product_a = wide_product(a, 0xD2511F53, ptx)
        product_c = wide_product(c, 0xCD9E8D57, ptx)
        a = (product_c >> 32).to(tl.uint32) ^ b ^ k0
        c = (product_a >> 32).to(tl.uint32) ^ d ^ k1
        b = product_c.to(tl.uint32)
        d = product_a.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return a, b, c, d

@triton.jit
def counter_at(first, place):
    """(first + place) // 4. Of lanes the compiler sees that four share it, and eight its high word."""
    return (first >> 2) + (place >> 3 << 1) | (place >> 2 & 1)

@triton.jit
def random_word(seed, place, first=0, ptx: tl.constexpr = False):
    """The random word at first + place, one of the four of its counter; `first` is a multiple of eight."""
    a, b, c, d = philox(seed, counter_at(first, place), ptx)
    is_odd = (place & 1) != 0
    return tl.where((place & 2) != 0, tl.where(is_odd, d, c), tl.where(is_odd, b, a))

@triton.jit
def uniform(word):
    """In [0, 1): 31 bits of a word."""
    return tl.uint_to_uniform_float(word)

@triton.jit
def uniform_from(word, least: tl.constexpr):
    """Whether `uniform` is that of the integer `least` or more. Words count up to the middle, then down again."""
    return word - least < 4294967296 - 2 * least

@triton.jit
def normal(seed, place, first=0, ptx: tl.constexpr = False):
    """The normal number at first + place, by Box-Muller two of each two words; `first` is a multiple of eight."""
    a, b, c, d = philox(seed, counter_at(first, place), ptx)
    is_second = (place & 2) != 0
    radius = tl.sqrt(-2.0 * tl.log(tl.maximum(1.0e-7, uniform(tl.where(is_second, c, a)))))
    angle = 6.283185307179586 * uniform(tl.where(is_second, d, b))
    return radius * tl.where((place & 1) != 0, tl.sin(angle), tl.cos(angle))
'''


def _split() -> dict[str, str]:
    parts = [p.strip("\n") for p in _SOURCE.split("@triton.jit\n")[1:]]
    return {p[4 : p.index("(")]: f"@triton.jit\n{p}" for p in parts}


HELPERS = _split()
"""Name to text."""


def helpers_in(sources: Iterable[str]) -> list[str]:
    """The texts of the helpers that the sources call, directly or not, in the order above."""
    needed: set[str] = set()
    todo = list(sources)
    while todo:
        code = re.sub(r'#.*|""".*?"""|"[^"]*"', "", todo.pop())
        words = set(re.findall(r"(?<![\w.])[a-z_]\w*", code))
        calls = (words & HELPERS.keys()) - needed
        needed |= calls
        todo.extend(HELPERS[n] for n in sorted(calls))
    return [text for name, text in HELPERS.items() if name in needed]


def libraries_in(texts: Iterable[str]) -> list[str]:
    """The imports of a module with these texts besides Triton's language."""
    return ["from triton.language.extra import libdevice"] if any("libdevice." in text for text in texts) else []
