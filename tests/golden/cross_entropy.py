# cross_entropy for cuda:90

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def pairs_from_bf16(x):
    """The same in a loop, whose loads come as vectors: the compiler is told the two instructions."""
    apart: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return tl.inline_asm_elementwise(apart, "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def larger(a, b):
    """The maximum; NaN wins, as in torch."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_max(v, axis: tl.constexpr, keep_dims: tl.constexpr = False):
    """The maximum along an axis; NaN wins."""
    return tl.reduce(v, axis, larger, keep_dims=keep_dims)


@triton.jit
def lane_of(place, first, lanes: tl.constexpr):
    """The lane at a place, in a block from `first` on: -1 for all below it, `lanes` for all above."""
    return (tl.minimum(tl.maximum(place, first - 1), first + lanes) - first).to(tl.int32)


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
def exp_below(x, ptx: tl.constexpr):
    """exp(x) where x is not positive, to the digits of the device library's; what is subnormal is zero."""
    x = tl.maximum(x, -104.0, propagate_nan=tl.PropagateNan.ALL)
    exponent = x * 1.4426950216293335
    power = near_power(exponent, ptx)
    return tl.fma(power, tl.fma(exponent, -0.6931471824645996, x), power)


@triton.jit
def share(x, total, inverse):
    """x / total as IEEE 754 says, for x of at most 1 and a total of at least 1: what the product leaves is added."""
    quotient = x * inverse
    return tl.fma(tl.fma(quotient * -1.0, total, x), inverse, quotient)


@triton.jit
def cross_entropy(x_ptr, labels_ptr, loss_ptr, count_ptr, dx_ptr, loss_partial_ptr, count_partial_ptr, arrived_ptr, N, M, PROGRAMS, ITEMS, GROUPS, BLOCK_N: tl.constexpr, FAN: tl.constexpr):
    N = N // 8 * 8  # a multiple of 8: accesses are wide
    pid = tl.program_id(0)
    col = tl.arange(0, BLOCK_N)
    count_acc = tl.full([], 0.0, tl.float32)
    loss_acc = tl.full([], 0.0, tl.float32)
    for item in tl.range(pid * ITEMS, tl.minimum((pid + 1) * ITEMS, M)):
        row = tl.cast(item, tl.int64)
        labels = tl.load(labels_ptr + row)
        top_lanes = tl.full([256], -3.4028234663852886e38, tl.float32)  # one for each thread
        total_lanes = tl.full([256], 0.0, tl.float32)
        for col_at in tl.range(0, N, BLOCK_N, num_stages=5):
            first_col = tl.cast(col_at, tl.int64)
            inside = col < N - col_at
            at = row * N + first_col
            x = pairs_from_bf16(tl.load(x_ptr + at + col, mask=inside, other=0.0, eviction_policy="evict_last"))
            value = tl.where(inside, x, float("-inf"))
            parts = tl.reshape(value, [BLOCK_N // 2048, 256, 8])
            higher = larger(top_lanes, row_max(row_max(parts, 2), 0))
            total_lanes = total_lanes * exp_below(top_lanes - higher, True) + tl.sum(tl.sum(exp_below(parts - higher[None, :, None], True), 2), 0)
            top_lanes = higher
        highest = row_max(top_lanes, 0)
        added = tl.sum(total_lanes * exp_below(top_lanes - highest, True), 0)
        top = tl.where(added == 0.0, float("-inf"), highest)
        total = tl.where(added == 0.0, float("nan"), added)
        valid = labels != -100  # body.py:3  valid = target != ignore_index
        count_acc += valid.to(tl.float32)  # body.py:6  count = valid.float().sum()
        label = tl.where(valid, labels, 0)  # body.py:4  label = torch.where(valid, target, 0)
        reciprocal = tl.div_rn(1.0, total)
        for col_at in tl.range(0, N, BLOCK_N, num_stages=5):
            first_col = tl.cast(col_at, tl.int64)
            inside = col < N - col_at
            at = row * N + first_col
            x = pairs_from_bf16(tl.load(x_ptr + at + col, mask=inside, other=0.0, eviction_policy="evict_first"))
            exp_v = libdevice.exp(x - top)
            div_v = share(exp_v, total, reciprocal)
            dx = tl.where(col == lane_of(label, first_col, BLOCK_N), div_v - 1.0, div_v)  # body.py:7  dx = torch.where(valid, torch.where(hot, p - 1, p), 0)
            tl.store(dx_ptr + at + col, tl.where(valid, dx, 0.0).to(tl.bfloat16), mask=inside)
        loss = libdevice.log(total) + top  # body.py:5  loss = total.log() + top - x.gather(1, label)
        at = row * N + label
        x = tl.load(x_ptr + at).to(tl.float32)
        loss_2 = tl.where(valid, loss - x, 0.0)
        loss_acc += loss_2
    tl.store(loss_partial_ptr + pid, loss_acc)
    tl.store(count_partial_ptr + pid, count_acc)
    group = pid // FAN
    members = tl.minimum(FAN, PROGRAMS - group * FAN)
    if last_to_arrive(arrived_ptr + group, members):
        loss_total = tl.full([], 0.0, tl.float32)
        for k in range(members):
            loss_total += tl.load(loss_partial_ptr + (group * FAN + k), cache_modifier=".cg")
        count_total = tl.full([], 0.0, tl.float32)
        for k in range(members):
            count_total += tl.load(count_partial_ptr + (group * FAN + k), cache_modifier=".cg")
        tl.store(loss_partial_ptr + group * FAN, loss_total)
        tl.store(count_partial_ptr + group * FAN, count_total)
        if last_to_arrive(arrived_ptr + GROUPS, GROUPS):
            loss_total_2 = tl.full([], 0.0, tl.float32)
            for k in range(GROUPS):
                loss_total_2 += tl.load(loss_partial_ptr + k * FAN, cache_modifier=".cg")
            count_total_2 = tl.full([], 0.0, tl.float32)
            for k in range(GROUPS):
                count_total_2 += tl.load(count_partial_ptr + k * FAN, cache_modifier=".cg")
            tl.store(loss_ptr, loss_total_2)
            tl.store(count_ptr, count_total_2)
