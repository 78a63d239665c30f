"""Plain functions with loops over time, as they are written where nobody thinks of a compiler: autograd's backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Derived(NamedTuple):
    """function, its arguments by the number of steps, and the most launches of its backward."""

    function: Callable[..., Any]
    make: Callable[[int], tuple[Tensor, ...]]
    launches: int

    @property
    def name(self) -> str:
        return self.function.__name__


def rand(*shape: int) -> Tensor:
    return (torch.rand(*shape, dtype=torch.float64) - 0.5).requires_grad_()


def transposed(matrix: Tensor) -> Tensor:
    """The same numbers, column by column in memory."""
    return matrix.detach().t().contiguous().t().requires_grad_()


def scan_by_einsum(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    decay = torch.exp(torch.einsum("bld,dn->bldn", delta.sigmoid(), a))
    entering = torch.einsum("bld,bln,bld->bldn", delta, b, u)
    state, ys = decay.new_zeros(u.shape[0], u.shape[2], a.shape[1]), []
    for i in range(u.shape[1]):
        state = decay[:, i] * state + entering[:, i]
        ys.append(torch.einsum("bdn,bn->bd", state, c[:, i, :]))
    return torch.stack(ys, dim=1) + u


def advantages_in_place(rewards: Tensor, values: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    out, last = torch.zeros_like(rewards), torch.zeros_like(after)
    for t in reversed(range(len(rewards))):
        following = after if t == len(rewards) - 1 else values[t + 1]
        out[t] = last = rewards[t] + 0.99 * following - values[t] + 0.9 * last
    return out, out + values


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    state, out = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), torch.zeros_like(v)
    for t in range(q.shape[2]):
        key = k[:, :, t]
        error = (v[:, :, t] - (state * key[..., None]).sum(-2)) * beta[:, :, t, None]
        state = state + key[..., None] * error[..., None, :]
        out[:, :, t] = (state * q[:, :, t][..., None]).sum(-2)
    return out, state


def with_bonus(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """A square matrix for each head is carried, and multiplied as one of many."""
    state, out = r.new_zeros(r.shape[0], *u.shape, u.shape[1]), []
    for t in range(r.shape[1]):
        outer = k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append((r[:, t, :, None, :] @ (state + u[:, :, None] * outer)).squeeze(-2))
        state = torch.exp(-torch.exp(w[:, t]))[..., None] * state + outer
    return torch.stack(out, 1)


def gates_in_one(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A GRU whose gates are pieces of one product, beside one of all steps."""
    h, out = torch.zeros(x.shape[0], u.shape[0], dtype=x.dtype, device=x.device), []
    given = x @ w + b
    for t in range(x.shape[1]):
        r, z, n = given[:, t].chunk(3, -1)
        own_r, own_z, own_n = (h @ u).chunk(3, -1)
        r, z = torch.sigmoid(r + own_r), torch.sigmoid(z + own_z)
        h = (1 - z) * torch.tanh(n + r * own_n) + z * h
        out.append(h)
    return torch.stack(out, 1), h


def of_input_and_state(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """An LSTM with one matrix, for what comes in and the state together."""
    h, out = x.new_zeros(x.shape[0], w.shape[1] // 4), []
    c = torch.zeros_like(h)
    for step in x.unbind(1):
        i, f, g, o = (torch.cat([step, h], 1) @ w + b).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        out.append(h)
    return torch.stack(out, 1)


def window_by_taps(x: Tensor, w: Tensor) -> Tensor:
    """A loop over taps in each step, of which the first steps have fewer."""
    out = []
    for t in range(x.shape[1]):
        total = torch.zeros_like(x[:, 0])
        for tap in range(w.shape[1]):
            if t >= tap:
                total = total + x[:, t - tap] * w[:, tap]
        out.append(torch.tanh(total))
    return torch.stack(out, 1)


def filtered(z: Tensor, q: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    mean, variance, likelihood, means = torch.zeros_like(z[:, 0]), torch.ones_like(z[:, 0]), z.new_zeros(()), []
    for t in range(z.shape[1]):
        variance = variance + q.exp()
        total = variance + r.exp()
        error, gain = z[:, t] - mean, variance / total
        likelihood = likelihood - 0.5 * (torch.log(total) + error * error / total)
        mean, variance = mean + gain * error, (1 - gain) * variance
        means.append(mean)
    return torch.stack(means, -1), likelihood


def masked_cell(x: Tensor, mask: Tensor, w: Tensor, u: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    h, hs = x.new_zeros(x.shape[1], w.shape[0]), []
    for step, kept in zip(x, mask, strict=True):
        h = torch.where(kept[:, None] > 0, torch.tanh(F.linear(step, w, bias) + F.linear(h, u)), h)
        hs.append(h)
    return torch.stack(hs), h


def both_ways(x: Tensor, w: Tensor) -> Tensor:
    forth = back = x.new_zeros(x.shape[0], x.shape[2])
    ahead, behind = [], []
    for t in range(x.shape[1]):
        forth = torch.tanh(x[:, t] + forth @ w)
        ahead.append(forth)
    for t in range(x.shape[1] - 1, -1, -1):
        back = torch.tanh(x[:, t] + back @ w)
        behind.append(back)
    return torch.cat([torch.stack(ahead, 1), torch.stack(behind[::-1], 1)], -1)


def matrix_states(r: Tensor, k: Tensor, v: Tensor, w: Tensor, first: Tensor) -> Tensor:
    state, out = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), torch.zeros_like(v)
    for i in range(r.shape[2]):
        entering = k[:, :, i, :, None] * v[:, :, i, None, :]
        out[:, :, i] = (r[:, :, i, :, None] * (first[None, :, :, None] * entering + state)).sum(-2)
        state = state * w[:, :, i, :, None] + entering
    return out


def first_row_in_each_step(x: Tensor, tables: Tensor) -> Tensor:
    h, hs = x.new_zeros(x.shape[1:]), []
    for t in range(len(x)):
        h = torch.tanh(h * tables[0] + x[t : t + 1].squeeze(0)) * tables[1]
        hs.append(h)
    return torch.stack(hs) + x


def gated_attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    state, out = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), []
    for t in range(q.shape[2]):
        state = decay[:, :, t, :, None] * state + k[:, :, t, :, None] * v[:, :, t, None, :]
        out.append((q[:, :, t, :, None] * state).sum(-2))
    return torch.stack(out, 2)


def power_iteration(v: Tensor, w: Tensor, shifts: Tensor) -> Tensor:
    """Of a matrix that is transposed in memory: its gradient is added up turned."""
    for shift in shifts:
        v = v @ w + shift
        v = v / (v.norm(dim=-1, keepdim=True) + 1e-6)
    return v


def log_partition(emit: Tensor, trans: Tensor) -> Tensor:
    alpha = emit[:, 0]
    for t in range(1, emit.shape[1]):
        alpha = torch.logsumexp(alpha[:, :, None] + trans, 1) + emit[:, t]
    return torch.logsumexp(alpha, 1)


def normalised_cell(x: Tensor, h: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """Its matrix is multiplied by a number: autograd adds up what it sends back to it a step late."""
    hs = []
    for t in range(x.shape[0]):
        z = x[t] + h @ w * 0.2
        z = (z - z.mean(-1, keepdim=True)) * torch.rsqrt(z.var(-1, keepdim=True, unbiased=False) + 1e-5)
        h = torch.tanh(z * scale)
        hs.append(h)
    return torch.stack(hs)


DERIVED = (
    Derived(scan_by_einsum, lambda t: (rand(2, t, 4), rand(2, t, 4), rand(4, 3), rand(2, t, 3), rand(2, t, 3)), 14),
    Derived(advantages_in_place, lambda t: (rand(t, 5), rand(t, 5), rand(5)), 3),
    Derived(filtered, lambda t: (rand(3, t), rand(3), rand(3)), 4),
    Derived(delta_rule, lambda t: (*(rand(2, 2, t, 3) for _ in range(3)), rand(2, 2, t)), 6),
    Derived(masked_cell, lambda t: (rand(t, 3, 4), torch.rand(t, 3).round(), rand(4, 4), rand(4, 4), rand(4)), 18),
    Derived(both_ways, lambda t: (rand(2, t, 4), rand(4, 4)), 14),
    Derived(first_row_in_each_step, lambda t: (rand(t, 3, 4), rand(2, 3, 4)), 4),
    Derived(matrix_states, lambda t: (*(rand(2, 2, t, 3) for _ in range(4)), rand(2, 3)), 3),
    Derived(with_bonus, lambda t: (*(rand(2, t, 2, 3) for _ in range(4)), rand(2, 3)), 10),
    Derived(gates_in_one, lambda t: (rand(2, t, 3), rand(3, 12), rand(4, 12), rand(12)), 12),
    Derived(of_input_and_state, lambda t: (rand(2, t, 3), rand(7, 16), rand(16)), 14),
    Derived(gated_attention, lambda t: tuple(rand(2, 2, t, n) for n in (3, 3, 5, 3)), 2),
    Derived(log_partition, lambda t: (rand(2, t, 5), rand(5, 5)), 3),
    Derived(normalised_cell, lambda t: (rand(t, 3, 4), rand(3, 4), rand(4, 4), rand(4)), 14),
    Derived(power_iteration, lambda t: (rand(4, 3), transposed(rand(3, 3)), rand(t, 4, 3)), 10),
    Derived(window_by_taps, lambda t: (rand(2, t, 3), rand(3, 3)), 4),
)
