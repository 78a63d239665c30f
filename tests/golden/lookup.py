# lookup for cuda:90

import triton
import triton.language as tl


@triton.jit
def lookup(x_ptr, index_ptr, y_ptr, N, size, BLOCK_N: tl.constexpr):
    N = N // 8 * 8  # a multiple of 8: accesses are wide
    pid = tl.program_id(0)
    rest = pid // tl.cdiv(N, BLOCK_N)
    col = tl.arange(0, BLOCK_N)
    first_col = tl.cast(pid % tl.cdiv(N, BLOCK_N), tl.int64) * BLOCK_N
    inside = col < N - first_col
    row = tl.cast(rest, tl.int64)
    index = tl.load(index_ptr + row)
    index_2 = tl.where(index < 0, index + tl.cast(size, tl.int64), index)
    tl.device_assert((0 <= index_2) & (index_2 < size), "body.py:2 index: index out of range")
    at = first_col + index_2 * N
    x = tl.load(x_ptr + at + col, mask=inside, other=0.0).to(tl.float32)
    at_2 = row * N + first_col
    tl.store(y_ptr + at_2 + col, (x * 2.0).to(tl.bfloat16), mask=inside)  # body.py:2  y = x[index] * 2
