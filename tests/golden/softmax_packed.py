# softmax_packed for cuda:90

import triton
import triton.language as tl


@triton.jit
def packed(v):
    """The same 16-bit tile, opaque: what was computed from it is computed again, not kept.

    The assembler sees through a move, but not that programs of a grid with one axis are at zero of the third.
    """
    add_zero: tl.constexpr = "{ .reg .b32 zero; mov.u32 zero, %ctaid.z; add.u32 $0, $1, zero; }"
    return tl.inline_asm_elementwise(add_zero, "=r,r", [v], dtype=v.dtype, is_pure=False, pack=2)


@triton.jit
def larger(a, b):
    """The maximum; NaN wins, as in torch."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_max(v, axis: tl.constexpr, keep_dims: tl.constexpr = False):
    """The maximum along an axis; NaN wins."""
    return tl.reduce(v, axis, larger, keep_dims=keep_dims)


@triton.jit
def softmax_packed(x_ptr, y_ptr, N: tl.constexpr, BLOCK_N: tl.constexpr):
    col = tl.arange(0, BLOCK_N)
    row = tl.cast(tl.program_id(0), tl.int64)
    at = row * N
    x = tl.load(x_ptr + at + col)
    cast_v = x.to(tl.float32)
    top = row_max(cast_v, 0)  # body.py:1  top = x.float().amax(-1, keepdim=True)
    x = packed(x)
    cast_v_2 = x.to(tl.float32)
    e = tl.exp(cast_v_2 - top)  # body.py:2  e = torch.exp(x.float() - top)
    y = tl.sum(e, 0)  # body.py:3  return (e / e.sum(-1, keepdim=True)).to(x.dtype)
    x = packed(x)
    cast_v_3 = x.to(tl.float32)
    e_2 = tl.exp(cast_v_3 - top)
    tl.store(y_ptr + at + col, (e_2 / y).to(tl.bfloat16))
