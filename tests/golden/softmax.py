# softmax for cuda:90

import triton
import triton.language as tl


@triton.jit
def from_bf16(x):
    """The float32 numbers: their bits, moved. Two in a register come apart in two instructions, three with `.to`."""
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def larger(a, b):
    """The maximum; NaN wins, as in torch."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_max(v, axis: tl.constexpr, keep_dims: tl.constexpr = False):
    """The maximum along an axis; NaN wins."""
    return tl.reduce(v, axis, larger, keep_dims=keep_dims)


@triton.jit
def near_power(x, ptx: tl.constexpr):
    """2 ** x to about 22 bits; what is subnormal may be zero."""
    if ptx:
        power: tl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(power, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


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
def softmax(x_ptr, y_ptr, N: tl.constexpr, BLOCK_N: tl.constexpr):
    col = tl.arange(0, BLOCK_N)
    row = tl.cast(tl.program_id(0), tl.int64)
    at = row * N
    x = from_bf16(tl.load(x_ptr + at + col))
    top = row_max(x, 0)  # body.py:1  top = x.float().amax(-1, keepdim=True)
    e = exp_below(x - top, True)  # body.py:2  e = torch.exp(x.float() - top)
    y = tl.sum(e, 0)  # body.py:3  return (e / e.sum(-1, keepdim=True)).to(x.dtype)
    reciprocal = tl.div_rn(1.0, y)
    tl.store(y_ptr + at + col, share(e, y, reciprocal).to(tl.bfloat16))
