# group_norm_backward for cuda:90

import triton
import triton.language as tl


@triton.jit
def last_to_arrive(counter, count):
    """True in the last of `count` programs; leaves the counter at zero for the next launch."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def group_norm_backward(dy_ptr, x_ptr, w_ptr, mu_ptr, rstd_ptr, output_ptr, sums_ptr, dy_sum_ptr, sum_partial_ptr, sum_partial_ptr_2, arrived_ptr, C, M, PROGRAMS, ITEMS, dy_stride, dy_stride_2, GROUPS, N: tl.constexpr, BLOCK_N: tl.constexpr, FAN: tl.constexpr, STRIPS: tl.constexpr, BLOCK_C: tl.constexpr):
    C = C // 4 * 4  # a multiple of 4: accesses are wide
    dy_stride = dy_stride // 4 * 4  # a multiple of 4: accesses are wide
    dy_stride_2 = dy_stride_2 // 4 * 4  # a multiple of 4: accesses are wide
    col = tl.arange(0, BLOCK_N)
    pid = tl.program_id(0)
    strip = pid // PROGRAMS
    part = pid % PROGRAMS
    d = tl.cast(strip, tl.int64)
    reciprocal = tl.div_rn(1.0, tl.cast(dy_stride_2, tl.float32))
    for item in tl.range(part * ITEMS, tl.minimum((part + 1) * ITEMS, M)):
        row = tl.cast(item, tl.int64)
        at = row * 4 + d
        rstd = tl.load(rstd_ptr + at)
        mu = tl.load(mu_ptr + at)
        sum_lanes = tl.zeros([BLOCK_N], tl.float32)
        sum_lanes_2 = tl.zeros([BLOCK_N], tl.float32)
        for c_at in tl.range(0, C, 1, num_stages=3):
            c_i = tl.cast(c_at, tl.int64)
            at_2 = row * dy_stride + d * dy_stride_2 + c_i * N
            dy = tl.load(dy_ptr + at_2 + col, eviction_policy="evict_last")
            at_3 = d * C + c_i
            w = tl.load(w_ptr + at_3)
            mul_v = dy * w
            sum_lanes += mul_v
            x = tl.load(x_ptr + at_2 + col, eviction_policy="evict_last")
            mul_v_2 = (x - mu) * rstd
            sum_lanes_2 += mul_v * mul_v_2
            tl.store(sum_partial_ptr + tl.cast(strip * PROGRAMS * ITEMS + item, tl.int64) * C + c_i, tl.sum(dy * mul_v_2, 0))
            tl.store(sum_partial_ptr_2 + tl.cast(strip * PROGRAMS * ITEMS + item, tl.int64) * C + c_i, tl.sum(dy, 0))
        total = tl.sum(sum_lanes, 0)
        total_2 = tl.sum(sum_lanes_2, 0)
        div_v = total * reciprocal
        div_v_2 = total_2 * reciprocal
        for c_at in tl.range(0, C, 1, num_stages=3):
            c_i = tl.cast(c_at, tl.int64)
            at_2 = row * dy_stride + d * dy_stride_2 + c_i * N
            dy = tl.load(dy_ptr + at_2 + col, eviction_policy="evict_first")
            at_3 = d * C + c_i
            w = tl.load(w_ptr + at_3)
            mul_v = dy * w
            x = tl.load(x_ptr + at_2 + col, eviction_policy="evict_first")
            mul_v_2 = (x - mu) * rstd
            tl.store(output_ptr + at_2 + col, rstd * (mul_v - div_v - mul_v_2 * div_v_2))
    c = tl.arange(0, BLOCK_C)
    group = part // FAN
    members = tl.minimum(FAN, PROGRAMS - group * FAN)
    if last_to_arrive(arrived_ptr + (strip * GROUPS + group), members):
        for c_at in tl.range(0, C, BLOCK_C):
            first_c = tl.cast(c_at, tl.int64)
            inside = c < C - c_at
            sum_total = tl.zeros([BLOCK_C], tl.float32)
            for k in range(group * FAN * ITEMS, tl.minimum((group * FAN + members) * ITEMS, M)):
                sum_total += tl.load(sum_partial_ptr + tl.cast(strip * PROGRAMS * ITEMS + k, tl.int64) * C + first_c + c, mask=inside, other=0.0, cache_modifier=".cg")
            sum_total_2 = tl.zeros([BLOCK_C], tl.float32)
            for k in range(group * FAN * ITEMS, tl.minimum((group * FAN + members) * ITEMS, M)):
                sum_total_2 += tl.load(sum_partial_ptr_2 + tl.cast(strip * PROGRAMS * ITEMS + k, tl.int64) * C + first_c + c, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(sum_partial_ptr + tl.cast((strip * PROGRAMS + group * FAN) * ITEMS, tl.int64) * C + first_c + c, sum_total, mask=inside)
            tl.store(sum_partial_ptr_2 + tl.cast((strip * PROGRAMS + group * FAN) * ITEMS, tl.int64) * C + first_c + c, sum_total_2, mask=inside)
        if last_to_arrive(arrived_ptr + STRIPS * GROUPS + strip, GROUPS):
            for c_at in tl.range(0, C, BLOCK_C):
                first_c = tl.cast(c_at, tl.int64)
                inside = c < C - c_at
                sum_total = tl.zeros([BLOCK_C], tl.float32)
                for k in range(GROUPS):
                    sum_total += tl.load(sum_partial_ptr + tl.cast((strip * PROGRAMS + k * FAN) * ITEMS, tl.int64) * C + first_c + c, mask=inside, other=0.0, cache_modifier=".cg")
                sum_total_2 = tl.zeros([BLOCK_C], tl.float32)
                for k in range(GROUPS):
                    sum_total_2 += tl.load(sum_partial_ptr_2 + tl.cast((strip * PROGRAMS + k * FAN) * ITEMS, tl.int64) * C + first_c + c, mask=inside, other=0.0, cache_modifier=".cg")
                at_2 = d * C + first_c
                tl.store(sums_ptr + at_2 + c, sum_total, mask=inside)
                tl.store(dy_sum_ptr + at_2 + c, sum_total_2, mask=inside)
