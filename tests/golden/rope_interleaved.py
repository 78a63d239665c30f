# rope_interleaved for cuda:90

import triton
import triton.language as tl


@triton.jit
def evens(v):
    """Every other element along the last axis, from the first on."""
    return tl.split(tl.reshape(v, v.shape[:-1] + [v.shape[-1] // 2, 2]))[0]


@triton.jit
def odds(v):
    """Every other element along the last axis, from the second on."""
    return tl.split(tl.reshape(v, v.shape[:-1] + [v.shape[-1] // 2, 2]))[1]


@triton.jit
def rope_interleaved(q_ptr, c_ptr, s_ptr, output_ptr, N, M, q_stride, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    N = N // 4 * 4  # a multiple of 4: accesses are wide
    q_stride = q_stride // 4 * 4  # a multiple of 4: accesses are wide
    pid = tl.program_id(0)
    rest = pid // tl.cdiv(N, BLOCK_N)
    col = tl.arange(0, BLOCK_N)[None, :]
    first_col = tl.cast(pid % tl.cdiv(N, BLOCK_N), tl.int64) * BLOCK_N
    inside_col = col < N - first_col
    row = tl.arange(0, BLOCK_M)[:, None]
    first_row = tl.cast(rest, tl.int64) * BLOCK_M
    inside_row = row < M - first_row
    pairs = tl.arange(0, BLOCK_N * 2)[None, :]
    at = first_row * q_stride + first_col * 2
    lanes = row * q_stride + pairs
    inside_pairs = pairs < (N - first_col) * 2
    q_pairs = tl.load(q_ptr + at + lanes, mask=inside_row & inside_pairs, other=0.0)
    q = evens(q_pairs)
    c = tl.load(tl.broadcast_to(c_ptr + first_col + col, [BLOCK_M, BLOCK_N]), mask=inside_col, other=0.0)
    q_2 = odds(q_pairs)
    s = tl.load(tl.broadcast_to(s_ptr + first_col + col, [BLOCK_M, BLOCK_N]), mask=inside_col, other=0.0)
    tl.store(output_ptr + at + lanes, tl.interleave(q * c - q_2 * s, q_2 * c + q * s), mask=inside_row & inside_pairs)
