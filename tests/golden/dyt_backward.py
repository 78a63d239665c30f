# dyt_backward for cuda:90

import triton
import triton.language as tl


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
def near_power(x, ptx: tl.constexpr):
    """2 ** x to about 22 bits; what is subnormal may be zero."""
    if ptx:
        power: tl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(power, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def near_reciprocal(x, ptx: tl.constexpr):
    """1 / x to about 23 bits; what is subnormal may be zero."""
    if ptx:
        quotient: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(quotient, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x


@triton.jit
def tanh(x, ptx: tl.constexpr):
    """Both formulas of the device library: a choice of two results is less than a branch for each element."""
    size, square = tl.abs(x), x * x
    far = tl.fma(near_reciprocal(near_power(size * 2.885390043258667, ptx) + 1.0, ptx), -2.0, 1.0)
    near = tl.fma(tl.fma(square, 0.01573968306183815, -0.05230396240949631), square, 0.13315297663211823)
    near = tl.fma(tl.fma(near, square, -0.33332768082618713) * square, size, size)
    bits = tl.where(size < 0.6000000238418579, near, far).to(tl.int32, bitcast=True)
    return (bits | (x.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)  # the sign of -0.0, too


@triton.jit
def dyt_backward(g_ptr, x_ptr, alpha_ptr, w_ptr, output_ptr, sums_ptr, sums_ptr_2, g_sum_ptr, sum_partial_ptr, sum_partial_ptr_2, sum_partial_ptr_3, arrived_ptr, N, PROGRAMS, ITEMS, TOTAL, GROUPS, STRIPS, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, FAN: tl.constexpr):
    N = N // 8 * 8  # a multiple of 8: accesses are wide
    pid = tl.program_id(0)
    strip = pid // PROGRAMS
    part = pid % PROGRAMS
    col = tl.arange(0, BLOCK_N)[None, :]
    first_col = tl.cast(strip, tl.int64) * BLOCK_N
    inside_col = col < N - first_col
    row = tl.arange(0, BLOCK_M)[:, None]
    lanes = row * N + col
    w = tl.load(tl.broadcast_to(w_ptr + first_col + col, [BLOCK_M, BLOCK_N]), mask=inside_col, other=0.0)
    alpha = tl.load(alpha_ptr)
    sum_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    sum_acc_2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    sum_acc_3 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for item in tl.range(part * ITEMS, tl.minimum((part + 1) * ITEMS, TOTAL), num_stages=4):
        first_row = tl.cast(item, tl.int64) * BLOCK_M
        at = first_row * N + first_col
        g = pairs_from_bf16(tl.load(g_ptr + at + lanes, mask=inside_col, other=0.0, eviction_policy="evict_first"))
        x = pairs_from_bf16(tl.load(x_ptr + at + lanes, mask=inside_col, other=0.0, eviction_policy="evict_first"))
        tanh_v = tanh(alpha * x, True)
        mul_v = g * w * (1.0 - tanh_v * tanh_v)
        sum_acc += tl.where(inside_col, mul_v * x, 0.0)
        sum_acc_2 += g * tanh_v
        sum_acc_3 += g
        tl.store(output_ptr + at + lanes, (mul_v * alpha).to(tl.bfloat16), mask=inside_col)
    sum_acc_4 = tl.sum(sum_acc, None)
    sum_acc_2_2 = tl.sum(sum_acc_2, 0, keep_dims=True)
    sum_acc_3_2 = tl.sum(sum_acc_3, 0, keep_dims=True)
    tl.store(sum_partial_ptr + pid, sum_acc_4)
    tl.store(sum_partial_ptr_2 + tl.cast(pid, tl.int64) * 256 + col, sum_acc_2_2)
    tl.store(sum_partial_ptr_3 + tl.cast(pid, tl.int64) * 256 + col, sum_acc_3_2)
    group = part // FAN
    members = tl.minimum(FAN, PROGRAMS - group * FAN)
    if last_to_arrive(arrived_ptr + (strip * GROUPS + group), members):
        sum_total = tl.full([], 0.0, tl.float32)
        for k in range(members):
            sum_total += tl.load(sum_partial_ptr + (strip * PROGRAMS + group * FAN + k), cache_modifier=".cg")
        sum_total_2 = tl.zeros([1, BLOCK_N], tl.float32)
        for k in range(members):
            sum_total_2 += tl.load(sum_partial_ptr_2 + tl.cast(strip * PROGRAMS + group * FAN + k, tl.int64) * 256 + col, cache_modifier=".cg")
        sum_total_3 = tl.zeros([1, BLOCK_N], tl.float32)
        for k in range(members):
            sum_total_3 += tl.load(sum_partial_ptr_3 + tl.cast(strip * PROGRAMS + group * FAN + k, tl.int64) * 256 + col, cache_modifier=".cg")
        tl.store(sum_partial_ptr + (strip * PROGRAMS + group * FAN), sum_total)
        tl.store(sum_partial_ptr_2 + tl.cast(strip * PROGRAMS + group * FAN, tl.int64) * 256 + col, sum_total_2)
        tl.store(sum_partial_ptr_3 + tl.cast(strip * PROGRAMS + group * FAN, tl.int64) * 256 + col, sum_total_3)
        if last_to_arrive(arrived_ptr + STRIPS * GROUPS + strip, GROUPS):
            sum_total_4 = tl.full([], 0.0, tl.float32)
            for k in range(GROUPS):
                sum_total_4 += tl.load(sum_partial_ptr + (strip * PROGRAMS + k * FAN), cache_modifier=".cg")
            sum_total_5 = tl.zeros([1, BLOCK_N], tl.float32)
            for k in range(GROUPS):
                sum_total_5 += tl.load(sum_partial_ptr_2 + tl.cast(strip * PROGRAMS + k * FAN, tl.int64) * 256 + col, cache_modifier=".cg")
            sum_total_6 = tl.zeros([1, BLOCK_N], tl.float32)
            for k in range(GROUPS):
                sum_total_6 += tl.load(sum_partial_ptr_3 + tl.cast(strip * PROGRAMS + k * FAN, tl.int64) * 256 + col, cache_modifier=".cg")
            tl.store(sum_partial_ptr + strip * PROGRAMS, sum_total_4)
            tl.store(sums_ptr_2 + first_col + col, sum_total_5, mask=inside_col)
            tl.store(g_sum_ptr + first_col + col, sum_total_6, mask=inside_col)
            if last_to_arrive(arrived_ptr + STRIPS * (GROUPS + 1), STRIPS):
                sum_total_7 = tl.full([], 0.0, tl.float32)
                for k in range(STRIPS):
                    sum_total_7 += tl.load(sum_partial_ptr + k * PROGRAMS, cache_modifier=".cg")
                tl.store(sums_ptr, sum_total_7)
