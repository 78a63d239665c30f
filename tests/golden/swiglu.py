# swiglu for cuda:90

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def from_bf16(x):
    """The float32 numbers: their bits, moved. Two in a register come apart in two instructions, three with `.to`."""
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), each step rounded to nearest."""
    below = 1.0 + libdevice.exp(x * -1.0)
    if x.dtype == tl.float64:
        return 1.0 / below
    else:
        return tl.div_rn(1.0, below)


@triton.jit
def swiglu(a_ptr, b_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    N = N // 16 * 16  # a multiple of 16: accesses are wide
    col = tl.arange(0, BLOCK_N)
    first_col = tl.cast(tl.program_id(0), tl.int64) * BLOCK_N
    inside = col < N - first_col
    a = from_bf16(tl.load(a_ptr + first_col + col, mask=inside, other=0.0))
    b = from_bf16(tl.load(b_ptr + first_col + col, mask=inside, other=0.0))
    tl.store(y_ptr + first_col + col, (a * sigmoid(a) * b).to(tl.bfloat16), mask=inside)  # body.py:1  return (F.silu(a.float()) * b.float()).to(a.dtype)
