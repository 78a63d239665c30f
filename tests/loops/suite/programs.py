"""Dynamic programs in log space, and fixed iterations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .table import fixed, loop, rand, weight

ANY = Any
NEVER = -1e30


def labelled(t: int, n: int) -> tuple[Tensor, ...]:
    """Log-probabilities of n + 1 classes; labels of two sequences, two each, with blanks between."""
    log_p = torch.randn(t, 2, n + 1).log_softmax(-1).requires_grad_()
    labels = torch.zeros(2, 5, dtype=torch.long)
    labels[:, 1::2] = torch.tensor([[1, 2], [2, 1]])
    return log_p, labels


def three(a: Tensor, skips: Tensor) -> Tensor:
    """The log of the sum of what arrives from here, one before, and two before where that is allowed."""
    one = F.pad(a, (1, 0), value=NEVER)[:, :-1]
    two = torch.where(skips, F.pad(a, (2, 0), value=NEVER)[:, :-2], NEVER)
    return torch.logsumexp(torch.stack([a, one, two]), 0)


def later(b: Tensor, skips: Tensor) -> Tensor:
    """The same towards the end."""
    one = F.pad(b, (0, 1), value=NEVER)[:, 1:]
    two = F.pad(torch.where(skips, b, NEVER), (0, 2), value=NEVER)[:, 2:]
    return torch.logsumexp(torch.stack([b, one, two]), 0)


def may_skip(labels: Tensor) -> Tensor:
    """Where a path may come from two labels before: from another label, over a blank."""
    return (labels != 0) & (labels != F.pad(labels, (2, 0), value=-1)[:, :-2])


@loop(labelled, shortest=3)
class CTC(Function):
    """Connectionist temporal classification, forward-backward, for labels with blanks (0) between."""

    @staticmethod
    def forward(ctx: ANY, log_p: Tensor, labels: Tensor) -> Tensor:
        steps, skips = log_p.shape[0], may_skip(labels)
        emitted = log_p.gather(2, labels.expand(steps, -1, -1))
        at = torch.arange(labels.shape[1], device=labels.device)
        a = torch.where(at < 2, emitted[0], NEVER)
        alphas = [a]
        for t in range(1, steps):
            a = three(a, skips) + emitted[t]
            alphas.append(a)
        total = torch.logaddexp(a[:, -1], a[:, -2])
        ctx.save_for_backward(log_p, labels, emitted, torch.stack(alphas), total)
        return -total

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        log_p, labels, emitted, alphas, total = ctx.saved_tensors
        skips, steps = may_skip(labels), log_p.shape[0]
        at = torch.arange(labels.shape[1], device=labels.device)
        b = torch.where(at >= labels.shape[1] - 2, 0.0, NEVER).expand_as(alphas[0]).to(log_p.dtype)
        betas = [b]
        for t in range(steps - 2, -1, -1):
            b = later(b + emitted[t + 1], skips)
            betas.append(b)
        posterior = torch.exp(alphas + torch.stack(betas[::-1]) - total[:, None])
        grad = -g[:, None] * posterior
        return torch.zeros_like(log_p).scatter_add(2, labels.expand(steps, -1, -1), grad), None


@loop(lambda t, n: (rand(2, t, n), rand(n, n), rand(n)))
class CRF(Function):
    """The log partition function of a chain: alpha[j] = logsumexp over i of (alpha[i] + trans[i, j]) + emit[j]."""

    @staticmethod
    def forward(ctx: ANY, emit: Tensor, trans: Tensor, start: Tensor) -> Tensor:
        alpha = start + emit[:, 0]
        alphas = [alpha]
        for t in range(1, emit.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + trans, dim=1) + emit[:, t]
            alphas.append(alpha)
        total = torch.logsumexp(alpha, dim=1)
        ctx.save_for_backward(emit, trans, torch.stack(alphas, 1), total)
        return total

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        emit, trans, alphas, total = ctx.saved_tensors
        beta, gtrans = torch.zeros_like(emit[:, 0]), torch.zeros_like(trans)
        gemit = [torch.exp(alphas[:, -1] - total[:, None]) * g[:, None]]
        for t in range(emit.shape[1] - 1, 0, -1):
            ahead = trans + (emit[:, t] + beta)[:, None, :]
            pairs = torch.exp(alphas[:, t - 1, :, None] + ahead - total[:, None, None]) * g[:, None, None]
            gtrans = gtrans + pairs.sum(0)
            gemit.append(pairs.sum(2))
            beta = torch.logsumexp(ahead, dim=2)
        grad = torch.stack(gemit[::-1], 1)
        return grad, gtrans, grad[:, 0].sum(0)


@loop(lambda t, n: (rand(2, t, n), rand(n, n)))
class Viterbi(Function):
    """The score of the best path through a chain; its gradient is the path."""

    @staticmethod
    def forward(ctx: ANY, emit: Tensor, trans: Tensor) -> Tensor:
        best, chosen = emit[:, 0], []
        for t in range(1, emit.shape[1]):
            scores = best[:, :, None] + trans
            best = scores.amax(1) + emit[:, t]
            chosen.append(scores.argmax(1))
        ctx.save_for_backward(emit, trans, best, *([torch.stack(chosen)] if chosen else []))
        return best.amax(1)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        emit, trans, best, *chosen = ctx.saved_tensors
        states = torch.arange(trans.shape[0], device=emit.device)
        here = (states == best.argmax(1)[:, None]).to(g.dtype) * g[:, None]
        gemit, gtrans = [here], torch.zeros_like(trans)
        for t in range(emit.shape[1] - 2, -1, -1):
            pairs = (states[None, :, None] == chosen[0][t][:, None, :]).to(g.dtype) * here[:, None, :]
            gtrans = gtrans + pairs.sum(0)
            here = pairs.sum(2)
            gemit.append(here)
        return torch.stack(gemit[::-1], 1), gtrans


def slanted(d: Tensor, fill: float) -> Tensor:
    """[batch, n, n] -> [batch, n, 2 n - 1]: along the last axis the antidiagonals."""
    batch, n, _ = d.shape
    return F.pad(d, (0, n), value=fill).reshape(batch, -1)[:, : n * (2 * n - 1)].reshape(batch, n, 2 * n - 1)


def upright(s: Tensor) -> Tensor:
    """The way back."""
    batch, n, _ = s.shape
    return F.pad(s.reshape(batch, -1), (0, n)).reshape(batch, n, 2 * n)[:, :, :n]


@loop(lambda t, n: ((rand(2, t, t).detach() ** 2).requires_grad_(), 0.5))
class SoftDTW(Function):
    """Soft dynamic time warping of two series of one length, an antidiagonal of the distances at a time."""

    @staticmethod
    def forward(ctx: ANY, distance: Tensor, gamma: float) -> Tensor:
        d = slanted(distance, 1e8)
        _, n, diagonals = d.shape
        first = torch.full_like(d[:, :, 0], 1e8)
        one, two = first, torch.where(torch.arange(n, device=d.device) == -1, 0.0, first)
        rows = []
        corner = torch.arange(n, device=d.device) == 0
        for p in range(diagonals):
            up = F.pad(one, (1, 0), value=1e8)[:, :-1]
            both = F.pad(two, (1, 0), value=1e8)[:, :-1]
            start = torch.where(corner, 0.0, 1e8) if p == 0 else both
            z = torch.stack([one, up, start.expand_as(one)]) / -gamma
            row = d[:, :, p] - gamma * torch.logsumexp(z, 0)
            rows.append(row)
            one, two = row, one
        r = torch.stack(rows, 2)
        ctx.save_for_backward(d, r)
        ctx.gamma = gamma
        return r[:, -1, -1]

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        d, r = ctx.saved_tensors
        gamma = ctx.gamma
        _, n, diagonals = d.shape
        e = torch.where(torch.arange(n, device=d.device) == n - 1, g[:, None], 0.0)
        zero = torch.zeros_like(e)
        far, grads = zero, [e]
        far_r = torch.full_like(e, -1e8)
        near, near_d, far_d = r[:, :, -1], d[:, :, -1], zero
        for p in range(diagonals - 2, -1, -1):
            here = r[:, :, p]
            right = torch.exp((near - here - near_d) / gamma) * e
            down = F.pad(torch.exp((near[:, 1:] - here[:, :-1] - near_d[:, 1:]) / gamma) * e[:, 1:], (0, 1))
            both = F.pad(torch.exp((far_r[:, 1:] - here[:, :-1] - far_d[:, 1:]) / gamma) * far[:, 1:], (0, 1))
            e, far = right + down + both, e
            far_r, far_d = near, near_d
            near, near_d = here, d[:, :, p]
            grads.append(e)
        return upright(torch.stack(grads[::-1], 2)), None


@loop(lambda t, n: (rand(2, n, n + 1), t), shortest=1)
class Sinkhorn(Function):
    """A plan of transport in log space by a fixed number of iterations, rows and columns by turns."""

    @staticmethod
    def forward(ctx: ANY, scores: Tensor, iterations: int) -> Tensor:
        ctx.iterations = iterations
        z, steps = scores, []
        for _ in range(iterations):
            z = z - torch.logsumexp(z, 2, keepdim=True)
            steps.append(z)
            z = z - torch.logsumexp(z, 1, keepdim=True)
            steps.append(z)
        ctx.save_for_backward(torch.stack(steps))
        return z.exp()

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        (steps,) = ctx.saved_tensors
        g = g * steps[-1].exp()
        for i in reversed(range(ctx.iterations)):
            g = g - steps[2 * i + 1].exp() * g.sum(1, keepdim=True)
            g = g - steps[2 * i].exp() * g.sum(2, keepdim=True)
        return g, None


@loop(lambda t, n: (rand(3, n), fixed(t), rand(n), 0.05))
class RungeKutta(Function):
    """A damped pendulum with a force, by steps of RK4: q'' = force(t) - damping * q' - sin(q); all positions."""

    @staticmethod
    def forward(ctx: ANY, q: Tensor, force: Tensor, damping: Tensor, dt: float) -> Tensor:
        v = torch.zeros_like(q)
        ctx.dt = dt
        out, qs, vs = [], [], []
        for t in range(force.shape[0]):
            qs.append(q)
            vs.append(v)
            a1 = force[t] - damping * v - torch.sin(q)
            v2 = v + 0.5 * dt * a1
            a2 = force[t] - damping * v2 - torch.sin(q + 0.5 * dt * v)
            v3 = v + 0.5 * dt * a2
            a3 = force[t] - damping * v3 - torch.sin(q + 0.5 * dt * v2)
            v4 = v + dt * a3
            a4 = force[t] - damping * v4 - torch.sin(q + dt * v3)
            q = q + dt / 6 * (v + 2 * v2 + 2 * v3 + v4)
            v = v + dt / 6 * (a1 + 2 * a2 + 2 * a3 + a4)
            out.append(q)
        ctx.save_for_backward(force, damping, torch.stack(qs), torch.stack(vs))
        return torch.stack(out)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        force, damping, qs, vs = ctx.saved_tensors
        dt = ctx.dt
        gq, gv = torch.zeros_like(qs[0]), torch.zeros_like(qs[0])
        gdamping = torch.zeros_like(qs[0])
        for t in reversed(range(force.shape[0])):
            q, v = qs[t], vs[t]
            a1 = force[t] - damping * v - torch.sin(q)
            v2 = v + 0.5 * dt * a1
            q2 = q + 0.5 * dt * v
            a2 = force[t] - damping * v2 - torch.sin(q2)
            v3 = v + 0.5 * dt * a2
            q3 = q + 0.5 * dt * v2
            a3 = force[t] - damping * v3 - torch.sin(q3)
            v4 = v + dt * a3
            q4 = q + dt * v3
            gq = gq + g[t]
            ga4, gv4 = dt / 6 * gv, dt / 6 * gq
            gv4 = gv4 - ga4 * damping
            gq4 = -ga4 * torch.cos(q4)
            ga3, gv3 = dt / 3 * gv + dt * gv4, dt / 3 * gq + dt * gq4
            gv3 = gv3 - ga3 * damping
            gq3 = -ga3 * torch.cos(q3)
            ga2, gv2 = dt / 3 * gv + 0.5 * dt * gv3, dt / 3 * gq + 0.5 * dt * gq3
            gv2 = gv2 - ga2 * damping
            gq2 = -ga2 * torch.cos(q2)
            ga1 = dt / 6 * gv + 0.5 * dt * gv2
            gdamping = gdamping - (ga1 * v + ga2 * v2 + ga3 * v3 + ga4 * v4)
            gv = gv + gv4 + gv3 + gv2 + dt / 6 * gq + 0.5 * dt * gq2 - ga1 * damping
            gq = gq + gq4 + gq3 + gq2 - ga1 * torch.cos(q)
        return gq, None, gdamping.sum(0), None


@loop(lambda t, n: (rand(n), (torch.rand(t, n) + 0.5), fixed(t, n), 0.1, 0.9))
class MomentumDescent(Function):
    """Unrolled descent with momentum on quadratic losses, one for each step: gradient = c[t] * (w - m[t])."""

    @staticmethod
    def forward(ctx: ANY, w: Tensor, c: Tensor, m: Tensor, lr: float, momentum: float) -> Tensor:
        ctx.lr, ctx.momentum = lr, momentum
        ctx.save_for_backward(c)
        velocity = torch.zeros_like(w)
        for ct, mt in zip(c.unbind(0), m.unbind(0), strict=True):
            velocity = momentum * velocity + ct * (w - mt)
            w = w - lr * velocity
        return w

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        (c,) = ctx.saved_tensors
        gv = torch.zeros_like(g)
        for t in reversed(range(c.shape[0])):
            gv = gv - ctx.lr * g
            g = g + c[t] * gv
            gv = ctx.momentum * gv
        return g, None, None, None, None


@loop(lambda t, n: (rand(t, n), weight(n, n)), product=True)
class EchoState(Function):
    """A reservoir without a batch: a matrix times a vector in each step."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, w: Tensor) -> Tensor:
        h, hs = torch.zeros_like(x[0]), []
        for t in range(x.shape[0]):
            h = 0.7 * h + 0.3 * torch.tanh(w @ h + x[t])
            hs.append(h)
        out = torch.stack(hs)
        ctx.save_for_backward(x, w, out)
        return out

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        x, w, out = ctx.saved_tensors
        gh, gw, gx = torch.zeros_like(g[0]), torch.zeros_like(w), []
        for t in reversed(range(x.shape[0])):
            before = out[t - 1] if t > 0 else torch.zeros_like(gh)
            gh = gh + g[t]
            n = torch.tanh(w @ before + x[t])
            gz = 0.3 * gh * (1 - n * n)
            gx.append(gz)
            gw = gw + torch.outer(gz, before)
            gh = 0.7 * gh + w.t() @ gz
        return torch.stack(gx[::-1]), gw
