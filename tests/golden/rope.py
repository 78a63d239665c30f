# rope for cuda:90

import triton
import triton.language as tl


@triton.jit
def from_bf16(x):
    """The float32 numbers: their bits, moved. Two in a register come apart in two instructions, three with `.to`."""
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def rope(q_ptr, cos_ptr, sin_ptr, out_ptr, D, q_stride, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr):
    q_stride = q_stride // 16 * 16  # a multiple of 16: accesses are wide
    c = tl.arange(0, BLOCK_C)[:, None]
    inside_c = c < 3
    col = tl.arange(0, BLOCK_N)[None, :]
    pid = tl.program_id(0)
    rest = pid // D
    d = tl.cast(pid % D, tl.int64)
    row = tl.cast(rest, tl.int64)
    at = row * q_stride + d * 48
    q = from_bf16(tl.load(q_ptr + at + (c * 16 + col), mask=inside_c, other=0.0))
    at_2 = d * 8
    cos = tl.load(cos_ptr + at_2 + col)
    at_3 = row * q_stride + d * 48 + 8
    q_2 = from_bf16(tl.load(q_ptr + at_3 + (c * 16 + col), mask=inside_c, other=0.0))
    sin = tl.load(sin_ptr + at_2 + col)
    tl.store(out_ptr + at + (c * 16 + col), (q * cos - q_2 * sin).to(tl.bfloat16), mask=inside_c)  # body.py:1  out = torch.cat([q1 * cos - q2 * sin, q2 * cos + q1 * sin], -1)
    tl.store(out_ptr + at_3 + (c * 16 + col), (q_2 * cos + q * sin).to(tl.bfloat16), mask=inside_c)
