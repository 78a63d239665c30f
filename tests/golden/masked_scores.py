# masked_scores for cuda:90

import triton
import triton.language as tl


@triton.jit
def rounded(v, dtype: tl.constexpr):
    """The float32 value that `dtype` can hold."""
    return v.to(dtype).to(tl.float32)


@triton.jit
def from_bf16(x):
    """The float32 numbers: their bits, moved. Two in a register come apart in two instructions, three with `.to`."""
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def masked_scores(q_ptr, k_ptr, mask_ptr, s_ptr, M, N, q_stride, k_stride, s_stride, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    N = N // 8 * 8  # a multiple of 8: accesses are wide
    q_stride = q_stride // 8 * 8  # a multiple of 8: accesses are wide
    k_stride = k_stride // 8 * 8  # a multiple of 8: accesses are wide
    s_stride = s_stride // 8 * 8  # a multiple of 8: accesses are wide
    pid = tl.program_id(0)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    tile = pid % tiles
    b = tl.cast(pid // tiles, tl.int64)
    in_group = GROUP * tl.cdiv(N, BLOCK_N)
    above = tile // in_group * GROUP
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - above, GROUP)
    place = tile % in_group
    row = tl.arange(0, BLOCK_M)[:, None]
    first_row = tl.cast(above + place % height, tl.int64) * BLOCK_M
    inside_row = row < M - first_row
    col = tl.arange(0, BLOCK_N)[None, :]
    first_col = tl.cast(place // height, tl.int64) * BLOCK_N
    inside_col = col < N - first_col
    k = tl.arange(0, BLOCK_K)[None, :]
    k_down = tl.arange(0, BLOCK_K)[:, None]
    inside_k = k < K
    at = b * q_stride + first_row * K
    q = tl.load(q_ptr + at + (row * K + k), mask=inside_row & inside_k, other=0.0)
    inside_k_2 = k_down < K
    at_2 = b * k_stride + first_col * K
    k_2 = tl.load(k_ptr + at_2 + (k_down + col * K), mask=inside_k_2 & inside_col, other=0.0)
    acc = tl.dot(q, k_2)  # body.py:1  return torch.bmm(q, k.mT) * scale + mask
    s = rounded(acc, tl.bfloat16)
    at_3 = first_row * N + first_col
    lanes = row * N + col
    mask = from_bf16(tl.load(mask_ptr + at_3 + lanes, mask=inside_row & inside_col, other=0.0))
    at_4 = b * s_stride + first_row * N + first_col
    tl.store(s_ptr + at_4 + lanes, (s * 0.125 + mask).to(tl.bfloat16), mask=inside_row & inside_col)
