# swiglu for cuda:90

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def from_bf16(x):
    """The float32 numbers: their bits, moved. Two in a register come apart in two instructions, three with `.to`."""
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


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
def swiglu(a_ptr, b_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    N = N // 8 * 8  # a multiple of 8: accesses are wide
    col = tl.arange(0, BLOCK_N)
    first_col = tl.cast(tl.program_id(0), tl.int64) * BLOCK_N
    inside = col < N - first_col
    a = from_bf16(tl.load(a_ptr + first_col + col, mask=inside, other=0.0))
    y = a * newton_sigmoid(a, True)  # body.py:1  return (F.silu(a.float()) * b.float()).to(a.dtype)
    b = from_bf16(tl.load(b_ptr + first_col + col, mask=inside, other=0.0))
    tl.store(y_ptr + first_col + col, (y * b).to(tl.bfloat16), mask=inside)
