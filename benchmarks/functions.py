"""The suite's 22 Functions, written as a user writes them: plain PyTorch, saving what the mathematics needs.

Statistics are in float32 whatever the tensors' dtype, as training code keeps them. Nothing in the compiler knows these.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

import fusegrad


# ------------------------------------------------------------------ activations
class SwiGLU(Function):
    """silu(gate) * up"""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = (t.float() for t in ctx.saved_tensors)
        grad = grad.float()
        s = torch.sigmoid(gate)
        return grad * up * s * (1 + gate * (1 - s)), grad * gate * s


class GeGLU(Function):
    """gelu(gate, tanh) * up"""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.gelu(gate, approximate="tanh") * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = (t.float() for t in ctx.saved_tensors)
        grad, k = grad.float(), math.sqrt(2 / math.pi)
        t = torch.tanh(k * (gate + 0.044715 * gate**3))
        slope = 0.5 * (1 + t) + 0.5 * gate * (1 - t * t) * k * (1 + 3 * 0.044715 * gate**2)
        return grad * up * slope, grad * 0.5 * gate * (1 + t)


class SquaredReLU(Function):
    """relu(x)^2"""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.relu(x).square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * torch.relu(x) * grad


class BiasGELU(Function):
    """gelu(x + bias)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        return F.gelu(x + bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, bias = ctx.saved_tensors
        z = (x + bias).float()
        slope = 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        dx = grad.float() * slope
        return dx, dx.sum(0)


class DropoutBiasResidual(Function):
    """residual + dropout(x + bias), the mask drawn again in backward"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.p = p
        keep = fusegrad.random.uniform(x.shape, seed, 0, like=x) >= p
        return residual + torch.where(keep, (x + bias) / (1 - p), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (seed,) = ctx.saved_tensors
        keep = fusegrad.random.uniform(grad.shape, seed, 0, like=grad) >= ctx.p
        dx = torch.where(keep, grad / (1 - ctx.p), 0)
        return dx, dx.float().sum(0), grad, None, None


# ------------------------------------------------------------------ norms
class RMSNorm(Function):
    """x / rms(x) * weight"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        xf = x.float()
        rstd = torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (xf * rstd * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        return *_rms_backward(x.float(), weight.float(), rstd, grad.float()), None


def _rms_backward(x: Tensor, weight: Tensor, rstd: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    xhat, scaled = x * rstd, grad * weight
    dx = rstd * (scaled - xhat * (scaled * xhat).mean(-1, keepdim=True))
    return dx, (grad * xhat).sum(0)


class AddRMSNorm(Function):
    """(rmsnorm(x + residual), x + residual)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
        h = x + residual
        hf = h.float()
        rstd = torch.rsqrt(hf.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(h, weight, rstd)
        return (hf * rstd * weight.float()).to(x.dtype), h

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_h: Tensor) -> Any:
        h, weight, rstd = ctx.saved_tensors
        dx, dw = _rms_backward(h.float(), weight.float(), rstd, grad.float())
        dh = dx + grad_h.float()
        return dh, dh, dw, None


class LayerNorm(Function):
    """(x - mean) / std * weight + bias"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        xf = x.float()
        var, mean = torch.var_mean(xf, -1, correction=0, keepdim=True)
        rstd = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return ((xf - mean) * rstd * weight.float() + bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        grad = grad.float()
        xhat, scaled = (x.float() - mean) * rstd, grad * weight.float()
        dx = rstd * (scaled - scaled.mean(-1, keepdim=True) - xhat * (scaled * xhat).mean(-1, keepdim=True))
        return dx, (grad * xhat).sum(0), grad.sum(0), None


class DyT(Function):
    """tanh(alpha * x) * gamma + beta"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        ctx.save_for_backward(x, alpha, gamma)
        return (torch.tanh(alpha.float() * x.float()) * gamma.float() + beta.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, alpha, gamma = (t.float() for t in ctx.saved_tensors)
        grad = grad.float()
        t = torch.tanh(alpha * x)
        inner = grad * gamma * (1 - t * t)
        return inner * alpha, (inner * x).sum().reshape(alpha.shape), (grad * t).sum(0), grad.sum(0)


class GroupNorm(Function):
    """Over groups of channels of an image batch [n, c, h, w]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        n, c, h, w = x.shape
        xg = x.float().reshape(n, groups, c // groups, h, w)
        var, mean = torch.var_mean(xg, (2, 3, 4), correction=0, keepdim=True)
        rstd = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.groups = groups
        xhat = ((xg - mean) * rstd).reshape(x.shape)
        return (xhat * weight.float()[:, None, None] + bias.float()[:, None, None]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        n, c, h, w = x.shape
        split = (n, ctx.groups, c // ctx.groups, h, w)
        grad = grad.float()
        xhat = (x.float().reshape(split) - mean) * rstd
        scaled = (grad * weight.float()[:, None, None]).reshape(split)
        inner = scaled - scaled.mean((2, 3, 4), keepdim=True) - xhat * (scaled * xhat).mean((2, 3, 4), keepdim=True)
        dx = (rstd * inner).reshape(x.shape)
        return dx, (grad * xhat.reshape(x.shape)).sum((0, 2, 3)), grad.sum((0, 2, 3)), None, None


class RMSNormFP8(Function):
    """rmsnorm, then a scale per row and a cast to float8; backward passes straight through the cast"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Any:
        xf = x.float()
        rstd = torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)
        y = xf * rstd * weight.float()
        scale = y.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448.0
        q = (y / scale).to(torch.float8_e4m3fn)
        ctx.save_for_backward(x, weight, rstd)
        ctx.mark_non_differentiable(q, scale)
        return y.to(x.dtype), q, scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        return *_rms_backward(x.float(), weight.float(), rstd, grad.float()), None


class PolyNorm(Function):
    """w0 * norm(x^3) + w1 * norm(x^2) + w2 * norm(x) + bias, norm by root mean square"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        xf, w = x.float(), weight.float()
        total = bias.float()
        for power, wi in zip((3, 2, 1), w.unbind(0), strict=True):
            p = xf**power
            total = total + wi * p * torch.rsqrt(p.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = (t.float() for t in ctx.saved_tensors)
        grad = grad.float()
        dx, dw = torch.zeros_like(x), []
        for power, wi in zip((3, 2, 1), weight.unbind(0), strict=True):
            p = x**power
            rstd = torch.rsqrt(p.square().mean(-1, keepdim=True) + ctx.eps)
            phat = p * rstd
            dw.append((grad * phat).sum())
            dp = wi * rstd * (grad - phat * (grad * phat).mean(-1, keepdim=True))
            dx = dx + dp * power * x ** (power - 1)
        return dx, torch.stack(dw), grad.sum().reshape(1), None


# ------------------------------------------------------------------ softmax
class Softmax(Function):
    """Along the last axis"""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        e = torch.exp(x.float() - x.float().amax(-1, keepdim=True))
        y = (e / e.sum(-1, keepdim=True)).to(x.dtype)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _softmax_backward(ctx.saved_tensors[0].float(), grad.float(), -1)


def _softmax_backward(y: Tensor, grad: Tensor, dim: int) -> Tensor:
    return y * (grad - (grad * y).sum(dim, keepdim=True))


class CausalSoftmax(Function):
    """Along the last axis, position j seen by row i where j <= i"""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows, columns = torch.arange(x.shape[-2], device=x.device), torch.arange(x.shape[-1], device=x.device)
        seen = columns[None, :] <= rows[:, None]
        y = torch.softmax(torch.where(seen, x.float(), -math.inf), -1).to(x.dtype)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _softmax_backward(ctx.saved_tensors[0].float(), grad.float(), -1)


class ColumnSoftmax(Function):
    """Along the first axis"""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.softmax(x.float(), 0).to(x.dtype)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _softmax_backward(ctx.saved_tensors[0].float(), grad.float(), 0)


# ------------------------------------------------------------------ losses
class CrossEntropy(Function):
    """Mean over the rows whose target is not ignore_index; the gradient is made from the log-sum-exp"""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
        x = logits.float()
        lse = torch.logsumexp(x, -1)
        valid = target != ignore_index
        safe = torch.where(valid, target, 0)
        nll = lse - x.gather(-1, safe[:, None])[:, 0]
        count = valid.sum()
        ctx.save_for_backward(logits, safe, valid, lse, count)
        return torch.where(valid, nll, 0).sum() / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, safe, valid, lse, count = ctx.saved_tensors
        p = torch.exp(logits.float() - lse[:, None])
        hot = safe[:, None] == torch.arange(logits.shape[-1], device=logits.device)
        return (p - hot.float()) * (valid / count * grad)[:, None], None, None


class SmoothedCrossEntropy(Function):
    """With label smoothing, z-loss and a soft cap on the logits"""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, smoothing: float, z: float, cap: float) -> Tensor:
        x = cap * torch.tanh(logits.float() / cap)
        lse = torch.logsumexp(x, -1)
        nll = lse - (1 - smoothing) * x.gather(-1, target[:, None])[:, 0] - smoothing * x.mean(-1)
        ctx.save_for_backward(logits, target, lse)
        ctx.smoothing, ctx.z, ctx.cap = smoothing, z, cap
        return (nll + z * lse.square()).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, target, lse = ctx.saved_tensors
        rows, columns = logits.shape
        t = torch.tanh(logits.float() / ctx.cap)
        p = torch.exp(ctx.cap * t - lse[:, None])
        hot = target[:, None] == torch.arange(columns, device=logits.device)
        dx = p * (1 + 2 * ctx.z * lse[:, None]) - (1 - ctx.smoothing) * hot.float() - ctx.smoothing / columns
        return dx * (1 - t * t) * (grad / rows), None, None, None, None


class KLDivergence(Function):
    """sum(target * (log target - x)) / rows, x being log-probabilities"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(target)
        return (torch.xlogy(target, target) - target * x).sum() / x.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (target,) = ctx.saved_tensors
        return -target * (grad / target.shape[0]), None


class JSDivergence(Function):
    """Between exp(x) and exp(y), both log-probabilities, weighted by beta"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, beta: float) -> Tensor:
        q, p = x.exp(), y.exp()
        log_m = torch.log(beta * p + (1 - beta) * q)
        ctx.save_for_backward(x, y)
        ctx.beta = beta
        return (beta * p * (y - log_m) + (1 - beta) * q * (x - log_m)).sum() / x.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        q = x.exp()
        log_m = torch.log(ctx.beta * y.exp() + (1 - ctx.beta) * q)
        return (1 - ctx.beta) * q * (x - log_m) * (grad / x.shape[0]), None, None


class TotalVariation(Function):
    """0.5 * sum |p - q| / rows"""

    @staticmethod
    def forward(ctx: Any, p: Tensor, q: Tensor) -> Tensor:
        ctx.save_for_backward(p, q)
        return 0.5 * (p - q).abs().sum() / p.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        p, q = ctx.saved_tensors
        dp = 0.5 * torch.sign(p - q) * (grad / p.shape[0])
        return dp, -dp


class FusedLinearCrossEntropy(Function):
    """Cross-entropy of x @ weight.T in chunks of rows, the gradients made in forward: logits are never kept whole"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, chunk: int) -> Tensor:
        rows = x.shape[0]
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        dx, dw = [], torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, rows, chunk):
            part, labels = x[start : start + chunk], target[start : start + chunk]
            logits = (part @ weight.t()).float()
            lse = torch.logsumexp(logits, -1)
            loss = loss + (lse - logits.gather(-1, labels[:, None])[:, 0]).sum()
            hot = labels[:, None] == torch.arange(logits.shape[-1], device=x.device)
            dlogits = ((torch.exp(logits - lse[:, None]) - hot.float()) / rows).to(x.dtype)
            dx.append(dlogits @ weight)
            dw = dw + dlogits.t() @ part
        ctx.save_for_backward(torch.cat(dx), dw.to(weight.dtype))
        return loss / rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dx, dw = ctx.saved_tensors
        return dx * grad.to(dx.dtype), dw * grad.to(dw.dtype), None, None


# ------------------------------------------------------------------ positions
class RoPE(Function):
    """Rotary positions on [batch, time, heads, width], halves of the width paired"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * c - second * s, second * c + first * s), -1)
