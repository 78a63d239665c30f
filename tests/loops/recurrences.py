"""Function classes with a loop over a size of their arguments, as users write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

ANY = Any


@dataclass(frozen=True)
class Recurrence:
    """A class and how it is called for T steps.

    least: the fewest steps that its rolled graph serves; shortest: that it makes sense for. loops: in each direction.
    """

    cls: type
    make: Callable[[int], tuple[Any, ...]]
    least: int
    shortest: int
    loops: tuple[int, int]

    @property
    def name(self) -> str:
        return self.cls.__name__


ROLLED: list[Recurrence] = []


def rolled(
    make: Callable[[int], tuple[Any, ...]], least: int = 3, shortest: int = 1, loops: tuple[int, int] = (1, 1)
) -> Any:
    def register(cls: type) -> type:
        ROLLED.append(Recurrence(cls, make, least, shortest, loops))
        return cls

    return register


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def gates(*shape: int) -> Tensor:
    return torch.rand(*shape).requires_grad_()


def two(t: int) -> tuple[Tensor, Tensor]:
    return gates(t, 3, 4), rand(t, 3, 4)


@rolled(two)
class Gated(Function):
    """h = a[t] * h + x[t], all of them stacked."""

    @staticmethod
    def forward(ctx: ANY, a: Tensor, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        hs = []
        for t in range(x.shape[0]):
            h = a[t] * h + x[t]
            hs.append(h)
        out = torch.stack(hs)
        ctx.save_for_backward(a, out)
        return out

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        a, out = ctx.saved_tensors
        gh, ga, gx = torch.zeros_like(g[0]), [], []
        for t in reversed(range(g.shape[0])):
            gh = gh + g[t]
            gx.append(gh)
            ga.append(gh * (out[t - 1] if t > 0 else torch.zeros_like(gh)))
            gh = gh * a[t]
        return torch.stack(ga[::-1]), torch.stack(gx[::-1])


@rolled(lambda t: (rand(t, 5), 0.9))
class MovingAverage(Function):
    """An exponential moving average that begins with the first value."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, beta: float) -> Tensor:
        ctx.beta = beta
        m = x[0]
        out = [m]
        for t in range(1, len(x)):
            m = beta * m + (1 - beta) * x[t]
            out.append(m)
        return torch.stack(out)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        beta, steps = ctx.beta, g.shape[0]
        carry = torch.zeros_like(g[0])
        grads = []
        for t in range(steps - 1, 0, -1):
            carry = carry + g[t]
            grads.append((1 - beta) * carry)
            carry = beta * carry
        grads.append(carry + g[0])
        grads.reverse()
        return torch.stack(grads), None


@rolled(lambda t: (rand(t, 6), rand(t + 1, 6), 0.99, 0.95))
class Advantages(Function):
    """Generalised advantage estimation: backwards in time, values one longer than rewards."""

    @staticmethod
    def forward(ctx: ANY, rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
        ctx.gamma, ctx.lam = gamma, lam
        steps = rewards.shape[0]
        last = torch.zeros_like(rewards[0])
        found: list[Any] = []
        for t in reversed(range(steps)):
            delta = rewards[t] + gamma * values[t + 1] - values[t]
            last = delta + gamma * lam * last
            found.insert(0, last)
        return torch.stack(found)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        gamma, lam = ctx.gamma, ctx.lam
        carry = torch.zeros_like(g[0])
        deltas = []
        for gt in g:
            carry = gt + gamma * lam * carry
            deltas.append(carry)
        d = torch.stack(deltas)
        zero = torch.zeros_like(d[:1])
        return d, torch.cat([zero, gamma * d]) - torch.cat([d, zero]), None, None


@rolled(lambda t: (rand(t, 2, 5), 0.8, 1.0), loops=(1, 1))
class Spiking(Function):
    """Leaky integrate-and-fire neurons with a surrogate gradient; two results of each step."""

    @staticmethod
    def forward(ctx: ANY, current: Tensor, leak: float, threshold: float) -> ANY:
        v = torch.zeros_like(current[0])
        spikes, potentials = [], []
        for i in current.unbind(0):
            v = leak * v + i
            s = (v > threshold).to(v.dtype)
            potentials.append(v)
            spikes.append(s)
            v = v - s * threshold
        out, vs = torch.stack(spikes), torch.stack(potentials)
        ctx.save_for_backward(vs)
        ctx.leak, ctx.threshold = leak, threshold
        return out, v

    @staticmethod
    def backward(ctx: ANY, g: Tensor, gv: Tensor) -> ANY:
        (vs,) = ctx.saved_tensors
        grads = []
        for gt, v in zip(reversed(g.unbind(0)), reversed(vs.unbind(0)), strict=True):
            surrogate = 1 / (1 + (v - ctx.threshold).abs()) ** 2
            gs = gt - gv * ctx.threshold
            gv = gv + gs * surrogate
            grads.append(gv)
            gv = gv * ctx.leak
        return torch.stack(grads[::-1]), None, None


@rolled(two)
class Written(Function):
    """The gated recurrence, its results written into a buffer."""

    @staticmethod
    def forward(ctx: ANY, a: Tensor, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        h = torch.zeros_like(x[0])
        for t in range(x.shape[0]):
            h = a[t] * h + x[t]
            out[t] = h
        ctx.save_for_backward(a, out)
        return out

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        a, out = ctx.saved_tensors
        ga, gx = torch.zeros_like(a), torch.zeros_like(g)
        gh = torch.zeros_like(g[0])
        for t in range(g.shape[0] - 1, -1, -1):
            gh = gh + g[t]
            gx[t] = gh
            if t > 0:
                ga[t] = gh * out[t - 1]
            gh = gh * a[t]
        return ga, gx


@rolled(lambda t: (rand(t, 2, 3), rand(4, 3), rand(4, 4), rand(2, 4)))
class Elman(Function):
    """A vanilla cell with its matrix products; the weights' gradients are summed over time."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, w: Tensor, u: Tensor, h: Tensor) -> ANY:
        h0, hs = h, []
        for xt in x:
            h = torch.tanh(xt @ w.t() + h @ u.t())
            hs.append(h)
        out = torch.stack(hs, dim=1)
        ctx.save_for_backward(x, w, u, h0, out)
        return out, h

    @staticmethod
    def backward(ctx: ANY, g: Tensor, gh: Tensor) -> ANY:
        x, w, u, h0, out = ctx.saved_tensors
        gw, gu, gx = torch.zeros_like(w), torch.zeros_like(u), []
        for t in reversed(range(x.shape[0])):
            before = out[:, t - 1] if t > 0 else h0
            gz = (gh + g[:, t]) * (1 - out[:, t] ** 2)
            gw = gw + gz.t() @ x[t]
            gu = gu + gz.t() @ before
            gx.append(gz @ w)
            gh = gz @ u
        return torch.stack(gx[::-1]), gw, gu, gh


@rolled(lambda t: (rand(3, t), torch.rand(3, t) > 0.8), loops=(1, 1))
class ResettingMaximum(Function):
    """A cumulative maximum along the last axis that starts again where it is told."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, reset: Tensor) -> Tensor:
        m = x[:, 0]
        out, at = [m], [torch.zeros_like(m, dtype=torch.long)]
        for t in range(1, x.size(1)):
            new = reset[:, t] | (x[:, t] > m)
            m = torch.where(new, x[:, t], m)
            at.append(torch.where(new, t, at[-1]))
            out.append(m)
        ctx.save_for_backward(torch.stack(at, -1))
        ctx.shape = x.shape
        return torch.stack(out, -1)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        (at,) = ctx.saved_tensors
        gx = g.new_zeros(ctx.shape)
        for t in range(g.shape[1]):
            gx = gx.scatter_add(1, at[:, t : t + 1], g[:, t : t + 1])
        return gx, None


@rolled(lambda t: (rand(t, 4), rand(t, 4)), least=3, loops=(2, 2))
class TwoLoops(Function):
    """Forwards and then backwards over what came out."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, y: Tensor) -> Tensor:
        h, hs = torch.zeros_like(x[0]), []
        for t in range(x.shape[0]):
            h = torch.sin(h) + x[t]
            hs.append(h)
        k, ks = torch.zeros_like(h), []
        for t in range(x.shape[0] - 1, -1, -1):
            k = 0.5 * k + hs[t] * y[t]
            ks.append(k)
        ctx.save_for_backward(torch.stack(hs), y)
        return torch.stack(ks)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        hs, y = ctx.saved_tensors
        gk, gys, ghs = torch.zeros_like(g[0]), [], []
        steps = g.shape[0]
        for t in range(steps):
            gk = gk + g[steps - 1 - t]
            ghs.append(gk * y[t])
            gys.append(gk * hs[t])
            gk = 0.5 * gk
        gh, gx = torch.zeros_like(g[0]), []
        for t in reversed(range(steps)):
            gh = gh + ghs[t]
            gx.append(gh)
            gh = gh * torch.cos(hs[t - 1]) if t > 0 else gh
        return torch.stack(gx[::-1]), torch.stack(gys)


@rolled(lambda t: (rand(t, 4),), least=9, shortest=2)
class SecondOrder(Function):
    """A recurrence with two steps of memory: x[t - 2] and h of two steps before."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor) -> Tensor:
        hs = [x[0], x[1]]
        for t in range(2, x.shape[0]):
            hs.append(0.5 * hs[t - 1] - 0.25 * hs[t - 2] + x[t - 2])
        return torch.stack(hs)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        steps = g.shape[0]
        one, two = torch.zeros_like(g[0]), torch.zeros_like(g[0])
        grads = []
        for t in range(steps - 1, -1, -1):
            mine = g[t] + 0.5 * one - 0.25 * two
            later = two if t + 2 < steps else torch.zeros_like(one)
            grads.append(later if t > 1 else mine + later)
            two, one = one, mine
        return torch.stack(grads[::-1])


@rolled(lambda t: (rand(2, t, 3), rand(3)), loops=(1, 1))
class LastOnly(Function):
    """Only the last state is returned; the first step has a rule of its own."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, w: Tensor) -> Tensor:
        h, hs = None, []
        for t in range(x.shape[1]):
            h = x[:, t] * w if h is None else torch.tanh(h * w + x[:, t])
            hs.append(h)
        ctx.save_for_backward(x, w, torch.stack(hs))
        return h

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        x, w, hs = ctx.saved_tensors
        gx, gw = [], torch.zeros_like(w)
        for t in range(x.shape[1] - 1, 0, -1):
            gz = g * (1 - hs[t] * hs[t])
            gx.append(gz)
            gw = gw + (gz * hs[t - 1]).sum(0)
            g = gz * w
        gx.append(g * w)
        gw = gw + (g * x[:, 0]).sum(0)
        return torch.stack(gx[::-1], dim=1), gw


@rolled(lambda t: (rand(t, 4), rand(t, 4), rand(t, 4)), loops=(1, 2))
class Zipped(Function):
    """zip, enumerate and cat; a number that follows the step."""

    @staticmethod
    def forward(ctx: ANY, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = torch.zeros(q.shape[1], q.shape[1], dtype=q.dtype)
        rows = []
        for i, (qt, kt, vt) in enumerate(zip(q, k, v, strict=True)):
            state = state + torch.outer(kt, vt)
            rows.append((qt @ state).unsqueeze(0) * (i + 1))
        ctx.save_for_backward(q, k, v)
        return torch.cat(rows)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        q, k, v = ctx.saved_tensors
        state = torch.zeros(q.shape[1], q.shape[1], dtype=q.dtype)
        gq = []
        for t in range(q.shape[0]):
            state = state + torch.outer(k[t], v[t])
            gq.append(state @ (g[t] * (t + 1)))
        gs, gk, gv = torch.zeros_like(state), [], []
        for t in reversed(range(q.shape[0])):
            gs = gs + torch.outer(q[t], g[t] * (t + 1))
            gk.append(gs @ v[t])
            gv.append(k[t] @ gs)
        return torch.stack(gq), torch.stack(gk[::-1]), torch.stack(gv[::-1])


@rolled(lambda t: (rand(t, 3, 2),))
class Kept(Function):
    """The number of steps is on ctx; backward divides by it."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor) -> Tensor:
        ctx.steps = len(x)
        total = torch.zeros_like(x[0])
        for xt in x:
            total = total + xt * xt
        ctx.save_for_backward(x)
        return total / x.shape[0]

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        (x,) = ctx.saved_tensors
        return torch.stack([2 * x[t] * g / x.shape[0] for t in range(ctx.steps)])


@rolled(lambda t: (rand(t, 3),))
class Powers(Function):
    """A float that is another one in each step."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor) -> Tensor:
        ctx.steps = x.shape[0]
        total = torch.zeros_like(x[0])
        for t in range(x.shape[0]):
            total = total + x[t] * 0.9**t
        return total

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        return torch.stack([g * 0.9**t for t in range(ctx.steps)])
