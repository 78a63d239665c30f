# rope for cuda:90

import triton
import triton.language as tl


@triton.jit
def from_bf16(x):
    """The float32 numbers: their bits, moved. Two in a register come apart in two instructions, three with `.to`."""
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def rope(q_ptr, cos_ptr, sin_ptr, out_ptr, D, q_stride, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    q_stride = q_stride // 8 * 8  # a multiple of 8: accesses are wide
    c = tl.arange(0, BLOCK_C)[None, :, None]
    inside_c = c < 3
    col = tl.arange(0, BLOCK_N)[None, None, :]
    pid = tl.program_id(0)
    rest = pid // tl.cdiv(D, BLOCK_D)
    d = tl.arange(0, BLOCK_D)[:, None, None]
    first_d = tl.cast(pid % tl.cdiv(D, BLOCK_D), tl.int64) * BLOCK_D
    inside_d = d < D - first_d
    row = tl.cast(rest, tl.int64)
    at = row * q_stride + first_d * 48
    q = from_bf16(tl.load(q_ptr + at + (d * 48 + c * 16 + col), mask=inside_d & inside_c, other=0.0))
    at_2 = first_d * 8
    cos = tl.load(cos_ptr + at_2 + (d * 8 + col), mask=inside_d, other=0.0)
    at_3 = row * q_stride + first_d * 48 + 8
    q_2 = from_bf16(tl.load(q_ptr + at_3 + (d * 48 + c * 16 + col), mask=inside_d & inside_c, other=0.0))
    sin = tl.load(sin_ptr + at_2 + (d * 8 + col), mask=inside_d, other=0.0)
    tl.store(out_ptr + at + (d * 48 + c * 16 + col), (q * cos - q_2 * sin).to(tl.bfloat16), mask=inside_d & inside_c)  # body.py:1  out = torch.cat([q1 * cos - q2 * sin, q2 * cos + q1 * sin], -1)
    tl.store(out_ptr + at_3 + (d * 48 + c * 16 + col), (q_2 * cos + q * sin).to(tl.bfloat16), mask=inside_d & inside_c)
