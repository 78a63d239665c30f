# rms_backward for cuda:90

import triton
import triton.language as tl


@triton.jit
def from_bf16(x):
    """The float32 numbers: their bits, moved. Two in a register come apart in two instructions, three with `.to`."""
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def pairs_from_bf16(x):
    """The same in a loop, whose loads come as vectors: the compiler is told the two instructions."""
    apart: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return tl.inline_asm_elementwise(apart, "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def last_to_arrive(counter, count):
    """True in the last of `count` programs; leaves the counter at zero for the next launch."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def rms_backward(dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, dw_partial_ptr, arrived_ptr, M, PROGRAMS, ITEMS, GROUPS, N: tl.constexpr, BLOCK_N: tl.constexpr, FAN: tl.constexpr):
    col = tl.arange(0, BLOCK_N)
    pid = tl.program_id(0)
    dw_acc = tl.zeros([BLOCK_N], tl.float32)
    w = from_bf16(tl.load(w_ptr + col))
    for item in tl.range(pid * ITEMS, tl.minimum((pid + 1) * ITEMS, M), num_stages=4):
        row = tl.cast(item, tl.int64)
        at = row * N
        dy = pairs_from_bf16(tl.load(dy_ptr + at + col, eviction_policy="evict_first"))
        x = pairs_from_bf16(tl.load(x_ptr + at + col, eviction_policy="evict_first"))
        rstd = tl.load(rstd_ptr + row)
        x_hat = x * rstd  # body.py:1  x_hat = x.float() * rstd
        dw_acc += dy * x_hat  # body.py:6  dw = (g * x_hat).sum(0).to(w.dtype)
        gw = dy * w  # body.py:3  gw = g * w.float()
        c = tl.sum(gw * x_hat, 0)  # body.py:4  c = (gw * x_hat).mean(-1, keepdim=True)
        dx = x_hat * (c * 0.000244140625)  # body.py:5  dx = ((gw - x_hat * c) * rstd).to(x.dtype)
        tl.store(dx_ptr + at + col, ((gw - dx) * rstd).to(tl.bfloat16))
    tl.store(dw_partial_ptr + tl.cast(pid, tl.int64) * 4096 + col, dw_acc)
    group = pid // FAN
    members = tl.minimum(FAN, PROGRAMS - group * FAN)
    if last_to_arrive(arrived_ptr + group, members):
        dw_total = tl.zeros([BLOCK_N], tl.float32)
        for k in range(members):
            dw_total += tl.load(dw_partial_ptr + tl.cast(group * FAN + k, tl.int64) * 4096 + col, cache_modifier=".cg")
        tl.store(dw_partial_ptr + tl.cast(group * FAN, tl.int64) * 4096 + col, dw_total)
        if last_to_arrive(arrived_ptr + GROUPS, GROUPS):
            dw_total_2 = tl.zeros([BLOCK_N], tl.float32)
            for k in range(GROUPS):
                dw_total_2 += tl.load(dw_partial_ptr + tl.cast(k * FAN, tl.int64) * 4096 + col, cache_modifier=".cg")
            tl.store(dw_ptr + col, dw_total_2.to(tl.bfloat16))
