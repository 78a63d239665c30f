"""Recurrent cells: gates, products with the hidden state, spikes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..recurrences import Gated
from .table import gates, loop, rand, weight

ANY = Any


loop(lambda t, n: (gates(t, 3, n), rand(t, 3, n)))(Gated)


@loop(lambda t, n: (rand(2, t, n), rand(2, t, n), rand(2, n)))
class MinGRU(Function):
    """z = sigmoid(k); h = (1 - z) * h + z * v, batch first, from a state that is given."""

    @staticmethod
    def forward(ctx: ANY, k: Tensor, v: Tensor, h0: Tensor) -> Tensor:
        h, out = h0, []
        for t in range(k.size(1)):
            z = torch.sigmoid(k[:, t])
            h = (1 - z) * h + z * v[:, t]
            out.append(h)
        hs = torch.stack(out, dim=1)
        ctx.save_for_backward(k, v, h0, hs)
        return hs

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        k, v, h0, hs = ctx.saved_tensors
        gk, gv = torch.empty_like(k), torch.empty_like(v)
        gh = torch.zeros_like(h0)
        for t in range(k.size(1) - 1, -1, -1):
            gh = gh + g[:, t]
            z = torch.sigmoid(k[:, t])
            before = hs[:, t - 1] if t > 0 else h0
            gv[:, t] = gh * z
            gk[:, t] = gh * (v[:, t] - before) * z * (1 - z)
            gh = gh * (1 - z)
        return gk, gv, gh


@loop(lambda t, n: (rand(t, 2, n), 0.8, 1.0), exact=False)
class LeakyFire(Function):
    """Leaky integrate-and-fire neurons; the derivative of a fast sigmoid in the place of the step's."""

    @staticmethod
    def forward(ctx: ANY, current: Tensor, leak: float, threshold: float) -> Tensor:
        v = torch.zeros_like(current[0])
        spikes, potentials = [], []
        for incoming in current:
            v = leak * v + incoming
            s = (v > threshold).to(v.dtype)
            spikes.append(s)
            potentials.append(v)
            v = v - s * threshold
        ctx.save_for_backward(torch.stack(potentials))
        ctx.leak, ctx.threshold = leak, threshold
        return torch.stack(spikes)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        (vs,) = ctx.saved_tensors
        gv, grads = torch.zeros_like(g[0]), []
        for t in reversed(range(g.shape[0])):
            surrogate = 1 / (1 + 10 * (vs[t] - ctx.threshold).abs()) ** 2
            gs = g[t] - ctx.threshold * gv
            gv = gv + gs * surrogate
            grads.append(gv)
            gv = ctx.leak * gv
        grads.reverse()
        return torch.stack(grads), None, None


@loop(lambda t, n: (rand(t, 3, n), weight(n, n), rand(3, n)), product=True)
class VanillaRNN(Function):
    """h = tanh(x[t] + h @ u.T); what comes in was multiplied before the loop."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, u: Tensor, h0: Tensor) -> Tensor:
        h, hs = h0, []
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + h @ u.t())
            hs.append(h)
        out = torch.stack(hs)
        ctx.save_for_backward(u, h0, out)
        return out

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        u, h0, out = ctx.saved_tensors
        gh, gx = torch.zeros_like(h0), []
        for t in reversed(range(g.shape[0])):
            gz = (gh + g[t]) * (1 - out[t] ** 2)
            gx.append(gz)
            gh = gz @ u
        gz = torch.stack(gx[::-1])
        before = torch.cat([h0[None], out[:-1]])
        return gz, torch.einsum("tbi,tbj->ij", gz, before), gh


@loop(lambda t, n: (rand(t, 3, 3 * n), weight(3 * n, n), rand(3, n)), product=True)
class GRU(Function):
    """The cell of cuDNN: gates in one product, the candidate's hidden part behind the reset gate."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, u: Tensor, h0: Tensor) -> Tensor:
        h, hs = h0, []
        for t in range(x.shape[0]):
            xr, xz, xn = x[t].chunk(3, -1)
            hr, hz, hn = (h @ u.t()).chunk(3, -1)
            r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
            n = torch.tanh(xn + r * hn)
            h = (1 - z) * n + z * h
            hs.append(h)
        out = torch.stack(hs)
        ctx.save_for_backward(x, u, h0, out)
        return out

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        x, u, h0, out = ctx.saved_tensors
        gh, gxs, gus = torch.zeros_like(h0), [], torch.zeros_like(u)
        for t in reversed(range(x.shape[0])):
            before = out[t - 1] if t > 0 else h0
            xr, xz, xn = x[t].chunk(3, -1)
            hr, hz, hn = (before @ u.t()).chunk(3, -1)
            r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
            n = torch.tanh(xn + r * hn)
            gh = gh + g[t]
            gn = gh * (1 - z) * (1 - n * n)
            gz = gh * (before - n) * z * (1 - z)
            gr = gn * hn * r * (1 - r)
            gp = torch.cat([gr, gz, gn * r], -1)
            gxs.append(torch.cat([gr, gz, gn], -1))
            gus = gus + gp.t() @ before
            gh = gh * z + gp @ u
        return torch.stack(gxs[::-1]), gus, gh


@loop(lambda t, n: (rand(t, 2, 4 * n), weight(4 * n, n)), product=True)
class LSTM(Function):
    """Four gates in one product; backward has the gates from forward."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, u: Tensor) -> ANY:
        width = u.shape[1]
        h = x.new_zeros(x.shape[1], width)
        c, hs, cs, gates = torch.zeros_like(h), [], [], []
        for xt in x:
            i, f, o, j = (xt + h @ u.t()).split(width, dim=-1)
            i, f, o, j = i.sigmoid(), f.sigmoid(), o.sigmoid(), j.tanh()
            c = f * c + i * j
            h = o * c.tanh()
            hs.append(h)
            cs.append(c)
            gates.append(torch.cat([i, f, o, j], -1))
        out = torch.stack(hs)
        ctx.save_for_backward(u, out, torch.stack(cs), torch.stack(gates))
        return out, c

    @staticmethod
    def backward(ctx: ANY, g: Tensor, gc: Tensor) -> ANY:
        u, out, cs, gates = ctx.saved_tensors
        gh, gxs = torch.zeros_like(out[0]), []
        for t in reversed(range(g.shape[0])):
            i, f, o, j = gates[t].chunk(4, -1)
            c = cs[t]
            before = cs[t - 1] if t > 0 else torch.zeros_like(c)
            gh = gh + g[t]
            tc = c.tanh()
            gc = gc + gh * o * (1 - tc * tc)
            parts = gc * j * i * (1 - i), gc * before * f * (1 - f), gh * tc * o * (1 - o), gc * i * (1 - j * j)
            gx = torch.cat(parts, -1)
            gxs.append(gx)
            gh, gc = gx @ u, gc * f
        gx = torch.stack(gxs[::-1])
        hs = torch.cat([torch.zeros_like(out[:1]), out[:-1]])
        return gx, gx.flatten(0, 1).t() @ hs.flatten(0, 1)


@loop(
    lambda t, n: (rand(t, 3, 4), weight(3 * n, 4), weight(3 * n, n), rand(3 * n), rand(3 * n), rand(3, n)),
    product=True,
)  # fmt: skip
class TorchGRU(Function):
    """The cell of torch.nn.GRU with its weights: r * (h @ w_hn.T + b_hn); backward makes the gates again."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h0: Tensor) -> Tensor:
        h = h0
        out = torch.empty(x.shape[0], *h0.shape, dtype=x.dtype, device=x.device)
        for t in range(x.shape[0]):
            xr, xz, xn = (x[t] @ w_ih.T + b_ih).chunk(3, -1)
            hr, hz, hn = (h @ w_hh.T + b_hh).chunk(3, -1)
            r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
            n = torch.tanh(xn + r * hn)
            h = n + z * (h - n)
            out[t] = h
        ctx.save_for_backward(x, w_ih, w_hh, b_ih, b_hh, h0, out)
        return out

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        x, w_ih, w_hh, b_ih, b_hh, h0, out = ctx.saved_tensors
        before = torch.cat([h0[None], out[:-1]])
        gh, gxs, ghs = torch.zeros_like(h0), [], []
        for t in reversed(range(x.shape[0])):
            xr, xz, xn = (x[t] @ w_ih.T + b_ih).chunk(3, -1)
            hr, hz, hn = (before[t] @ w_hh.T + b_hh).chunk(3, -1)
            r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
            n = torch.tanh(xn + r * hn)
            gh = gh + g[t]
            gn = gh * (1 - z) * (1 - n * n)
            gz = gh * (before[t] - n) * z * (1 - z)
            gr = gn * hn * r * (1 - r)
            gates = torch.cat([gr, gz, gn * r], -1)
            gxs.append(torch.cat([gr, gz, gn], -1))
            ghs.append(gates)
            gh = gh * z + gates @ w_hh
        gx, gs = torch.stack(gxs[::-1]), torch.stack(ghs[::-1])
        gw_ih, gw_hh = gx.flatten(0, 1).T @ x.flatten(0, 1), gs.flatten(0, 1).T @ before.flatten(0, 1)
        return gx @ w_ih, gw_ih, gw_hh, gx.sum((0, 1)), gs.sum((0, 1)), gh


@loop(lambda t, n: (rand(t, 2, 3), weight(4 * n, 3 + n), rand(4 * n)), product=True)
class JoinedLSTM(Function):
    """Gates of what comes in and of the hidden state side by side, times one matrix; gradients added up in the loop."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        width = w.shape[1] - x.shape[2]
        h = c = x.new_zeros(x.shape[1], width)
        hs, cs, gates = [], [], []
        for t in range(x.shape[0]):
            i, f, j, o = (torch.cat([x[t], h], -1) @ w.T + b).chunk(4, -1)
            i, f, j, o = i.sigmoid(), f.sigmoid(), j.tanh(), o.sigmoid()
            c = f * c + i * j
            h = o * c.tanh()
            hs.append(h)
            cs.append(c)
            gates.append(torch.cat([i, f, j, o], -1))
        out = torch.stack(hs)
        ctx.save_for_backward(x, w, out, torch.stack(cs), torch.stack(gates))
        return out

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        x, w, out, cs, gates = ctx.saved_tensors
        given = x.shape[2]
        gh = gc = torch.zeros_like(out[0])
        gw, gb, gxs = torch.zeros_like(w), w.new_zeros(w.shape[0]), []
        for t in range(x.shape[0] - 1, -1, -1):
            i, f, j, o = gates[t].chunk(4, -1)
            zeros = torch.zeros_like(cs[t])
            c, h = (cs[t - 1], out[t - 1]) if t > 0 else (zeros, zeros)
            tc = cs[t].tanh()
            gh = gh + g[t]
            gc = gc + gh * o * (1 - tc * tc)
            parts = gc * j * i * (1 - i), gc * c * f * (1 - f), gc * i * (1 - j * j), gh * tc * o * (1 - o)
            gs = torch.cat(parts, -1)
            gw += gs.T @ torch.cat([x[t], h], -1)
            gb += gs.sum(0)
            both = gs @ w
            gxs.append(both[:, :given])
            gh, gc = both[:, given:], gc * f
        return torch.stack(gxs[::-1]), gw, gb
