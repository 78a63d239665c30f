# linear_silu for cuda:90

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def rounded(v, dtype: tl.constexpr):
    """The float32 value that `dtype` can hold."""
    return v.to(dtype).to(tl.float32)


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
def linear_silu(x_ptr, b_ptr, w_ptr, y_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    N = N // 8 * 8  # a multiple of 8: accesses are wide
    K = K // 8 * 8  # a multiple of 8: accesses are wide
    pid = tl.program_id(0)
    in_group = GROUP * tl.cdiv(N, BLOCK_N)
    above = pid // in_group * GROUP
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - above, GROUP)
    place = pid % in_group
    row = tl.arange(0, BLOCK_M)[:, None]
    first_row = tl.cast(above + place % height, tl.int64) * BLOCK_M
    inside_row = row < M - first_row
    col = tl.arange(0, BLOCK_N)[None, :]
    first_col = tl.cast(place // height, tl.int64) * BLOCK_N
    inside_col = col < N - first_col
    x_tiles = tl.make_tensor_descriptor(x_ptr, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    row_at = tl.cast(first_row, tl.int32)
    w_tiles = tl.make_tensor_descriptor(w_ptr, [K, N], [N, 1], [BLOCK_K, BLOCK_N])
    col_at = tl.cast(first_col, tl.int32)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k_at in tl.range(0, K, BLOCK_K, num_stages=2):
        x = x_tiles.load([row_at, k_at])
        w = w_tiles.load([k_at, col_at])
        acc = tl.dot(x, w, acc)  # body.py:1  h = x @ w + b
    h = rounded(acc, tl.bfloat16)
    b = from_bf16(tl.load(b_ptr + first_col + col, mask=inside_col, other=0.0))
    h_2 = h + b
    y = newton_sigmoid(h_2, True)  # body.py:2  return h * torch.sigmoid(h)
    at = first_row * N + first_col
    lanes = row * N + col
    tl.store(y_ptr + at + lanes, (h_2 * y).to(tl.bfloat16), mask=inside_row & inside_col)
