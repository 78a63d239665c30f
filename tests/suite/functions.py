"""Function classes as users write them, in plain PyTorch: what compiled classes are compared with eager on.

`CASES` lists every class with its arguments: `make(n)` gives arguments whose sizes follow from n.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

Tensor = torch.Tensor


@dataclass(frozen=True)
class Case:
    """A class and how it is called. `floats`: the dtypes that it makes sense in."""

    cls: type
    make: Callable[[int], tuple[Any, ...]]
    floats: tuple[torch.dtype, ...]
    group: str
    library: bool  # some of it is a library call: sort, matmul, convolution

    @property
    def name(self) -> str:
        return self.cls.__name__


CASES: list[Case] = []
ALL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WIDE = (torch.float32, torch.float64)
_group = ["activations"]


def case(make: Callable[[int], tuple[Any, ...]], floats: tuple[torch.dtype, ...] = ALL, library: bool = False) -> Any:
    def register(cls: type) -> type:
        CASES.append(Case(cls, make, floats, _group[0], library))
        return cls

    return register


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


def positive(*shape: int) -> Tensor:
    return torch.rand(*shape) + 0.5


def classes(n: int, *shape: int) -> Tensor:
    return torch.randint(0, max(n, 1), shape)


# ------------------------------------------------------------------------------------------------ activations
@case(lambda n: (rand(n, n + 3),))
class GeluExact(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        cdf = 0.5 * (1 + torch.erf(x * 0.7071067811865476))
        return g * (cdf + x * torch.exp(-0.5 * x * x) * 0.3989422804014327)


@case(lambda n: (rand(n, n + 3),))
class GeluTanh(Function):
    @staticmethod
    def forward(x):
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        k = math.sqrt(2 / math.pi)
        t = torch.tanh(k * (x + 0.044715 * x**3))
        return g * (0.5 * (1 + t) + 0.5 * x * (1 - t**2) * k * (1 + 3 * 0.044715 * x**2))


@case(lambda n: (rand(2, n, 3),))
class Silu(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0]
        s = x.sigmoid()
        return g * s * (1 + x * (1 - s))


@case(lambda n: (rand(n, 5),))
class Mish(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.mul(torch.tanh(F.softplus(x)))

    @staticmethod
    def backward(ctx, grad_output):
        x = ctx.saved_tensors[0]
        sig = torch.sigmoid(x)
        tsp = torch.tanh(F.softplus(x))
        return grad_output.mul(tsp + x * sig * (1 - tsp * tsp))


@case(lambda n: (rand(n), 2.0, 20.0))
class Softplus(Function):
    @staticmethod
    def forward(ctx, x, beta, threshold):
        ctx.save_for_backward(x)
        ctx.beta, ctx.threshold = beta, threshold
        return torch.where(x * beta > threshold, x, torch.log1p(torch.exp(x * beta)) / beta)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.where(x * ctx.beta > ctx.threshold, g, g * torch.sigmoid(ctx.beta * x)), None, None


@case(lambda n: (rand(3, n), 1.3))
class Elu(Function):
    @staticmethod
    def forward(ctx, x, alpha):
        y = torch.where(x > 0, x, alpha * torch.expm1(x))
        ctx.save_for_backward(y)
        ctx.alpha = alpha
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return torch.where(y > 0, g, g * (y + ctx.alpha)), None


@case(lambda n: (rand(3, n),))
class Selu(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.selu(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        scale, alpha = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
        return g * scale * torch.where(x > 0, torch.ones_like(x), alpha * x.exp())


@case(lambda n: (rand(3, n) * 3,))
class HardSwish(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * F.relu6(x + 3) / 6

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        slope = torch.where(x < -3, torch.zeros_like(x), torch.where(x <= 3, x / 3 + 0.5, torch.ones_like(x)))
        return g * slope


@case(lambda n: (rand(3, n) * 3,))
class HardSwishLibrary(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.hardswish(x) + F.hardsigmoid(x) + F.hardtanh(x, -0.5, 0.7) + F.leaky_relu(x, 0.2)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ((x > -0.5) & (x < 0.7)).to(g.dtype) + F.relu(x) - F.logsigmoid(x)


@case(lambda n: (rand(n, 2),))
class SquaredRelu(Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.relu(x)
        ctx.save_for_backward(y)
        return y.square()

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return 2 * g * y


@case(lambda n: (rand(2, 3, n), positive(3, 1)))
class Snake(Function):
    @staticmethod
    def forward(ctx, x, a):
        ctx.save_for_backward(x, a)
        return x + (1.0 / (a + 1e-6)) * torch.sin(a * x).pow(2)

    @staticmethod
    def backward(ctx, g):
        x, a = ctx.saved_tensors
        s2 = torch.sin(2 * a * x)
        inv = 1.0 / (a + 1e-6)
        gx = g * (1 + a * inv * s2)
        ga = (g * (x * inv * s2 - inv * inv * torch.sin(a * x) ** 2)).sum((0, 2)).unsqueeze(-1)
        return gx, ga


@case(lambda n: (rand(4, n), rand(n)))
class PRelu(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.where(x >= 0, x, w * x)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return torch.where(x >= 0, g, w * g), torch.where(x >= 0, torch.zeros_like(g), x * g).sum(0)


@case(lambda n: (rand(n, 4) * 2,))
class ClampedIdentity(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward((x >= -1) & (x <= 1))
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, g):
        (mask,) = ctx.saved_tensors
        return g * mask


@case(lambda n: (rand(n, 6),))
class InPlaceInside(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        y.mul_(2).add_(1)
        y[:, 0] = 0
        y[:, 1:3] += x[:, 3:5]
        y.clamp_(min=-3)
        ctx.save_for_backward(y)
        return y * x

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        out = torch.empty_like(g)
        out.copy_(g)
        out[:, ::2] *= y[:, ::2]
        out.masked_fill_(y > 1, 0.5)
        return out


@case(lambda n: (rand(n, 3),))
class ManyMath(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = torch.atan(x) + torch.sinh(x * 0.1) + torch.cosh(x * 0.1) + torch.asinh(x) + torch.erf(x)
        y = y + torch.log1p(x.abs()) + torch.exp2(x) + torch.rsqrt(x * x + 1) + torch.atan2(x, x + 5)
        return y + torch.sign(x) + torch.floor(x) + torch.round(x) + torch.trunc(x) + torch.frac(x) + x.reciprocal()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.tan(x * 0.1) + torch.fmod(x, 0.7) + torch.remainder(x, 0.7) + torch.hypot(x, g) + torch.sinc(x)


@case(lambda n: (rand(n, 3), rand(3), torch.tensor(0.7)))
class LearnedGate(Function):
    @staticmethod
    def forward(ctx, x, w, t):
        gate = torch.sigmoid(w * t)
        ctx.save_for_backward(x, w, t, gate)
        return torch.lerp(x, x.abs(), gate)

    @staticmethod
    def backward(ctx, g):
        x, w, t, gate = ctx.saved_tensors
        dgate = (g * (x.abs() - x)).sum(0) * gate * (1 - gate)
        return g * (1 - gate + gate * x.sign()), dgate * t, (dgate * w).sum()


_group[0] = "losses"


# ------------------------------------------------------------------------------------------------ losses
@case(lambda n: (rand(n, 11), classes(11, n)), WIDE)
class CrossEntropy(Function):
    """ignore_index, label smoothing, z-loss, softcap."""

    @staticmethod
    def forward(ctx, logits, target, ignore_index=3, smoothing=0.1, z=1e-3, cap=5.0):
        raw = logits
        logits = cap * torch.tanh(logits / cap)
        lse = torch.logsumexp(logits, dim=-1)
        valid = target != ignore_index
        safe = target.masked_fill(~valid, 0)
        nll = lse - logits.gather(1, safe[:, None]).squeeze(1)
        smooth = lse - logits.mean(-1)
        per = (1 - smoothing) * nll + smoothing * smooth + z * lse * lse
        count = valid.sum().clamp(min=1)
        ctx.save_for_backward(raw, lse, safe, valid, count)
        ctx.options = (smoothing, z, cap)
        return torch.where(valid, per, 0.0).sum() / count

    @staticmethod
    def backward(ctx, g):
        raw, lse, safe, valid, count = ctx.saved_tensors
        smoothing, z, cap = ctx.options
        t = torch.tanh(raw / cap)
        p = torch.exp(cap * t - lse[:, None])
        d = p * (1 + 2 * z * lse[:, None]) - smoothing / raw.shape[1]
        d.scatter_add_(1, safe[:, None], torch.full_like(lse, -(1 - smoothing))[:, None])
        d = d * (1 - t * t) * valid[:, None]
        return d * (g / count), None, None, None, None, None


@case(lambda n: (rand(n, 7), classes(7, n)), library=True)
class CrossEntropyOneHot(Function):
    @staticmethod
    def forward(logits, target):
        logp = torch.log_softmax(logits, -1)
        onehot = F.one_hot(target, logits.size(-1)).to(logits.dtype)
        return -(logp * onehot).sum(-1).mean(), logp

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[1], output[1])

    @staticmethod
    def backward(ctx, g, _):
        target, logp = ctx.saved_tensors
        grad = logp.exp()
        grad[torch.arange(target.shape[0]), target] -= 1
        return grad * (g / target.shape[0]), None


@case(lambda n: (rand(n, 9), classes(9, n)), WIDE)
class LibraryCrossEntropy(Function):
    @staticmethod
    def forward(ctx, x, target):
        ctx.save_for_backward(x, target)
        return F.cross_entropy(x, target, reduction="none", ignore_index=2, label_smoothing=0.0)

    @staticmethod
    def backward(ctx, g):
        x, target = ctx.saved_tensors
        p = F.softmax(x, dim=1)
        onehot = torch.zeros_like(p).scatter_(1, target.unsqueeze(1), 1.0)
        return (p - onehot) * g.unsqueeze(1) * (target != 2).unsqueeze(1), None


@case(lambda n: (rand(n, 7).log_softmax(-1), rand(n, 7).softmax(-1)))
class KlDiv(Function):
    @staticmethod
    def forward(ctx, logq, p):
        ctx.save_for_backward(p)
        return torch.where(p > 0, p * (p.log() - logq), torch.zeros_like(p)).sum() / p.shape[0]

    @staticmethod
    def backward(ctx, g):
        (p,) = ctx.saved_tensors
        return -p * g / p.shape[0], None


@case(lambda n: (rand(n, 7).log_softmax(-1), rand(n, 7).log_softmax(-1), 0.3))
class Jsd(Function):
    @staticmethod
    def forward(ctx, x, y, beta):
        p, q = y.exp(), x.exp()
        m = beta * p + (1 - beta) * q
        logm = m.log()
        loss = beta * (p * (y - logm)) + (1 - beta) * (q * (x - logm))
        ctx.save_for_backward(x - logm, q)
        ctx.beta = beta
        return loss.sum(dim=-1)

    @staticmethod
    def backward(ctx, g):
        diff, q = ctx.saved_tensors
        return g.unsqueeze(-1) * (1 - ctx.beta) * q * diff, None, None


@case(lambda n: (rand(n, 6).softmax(-1), rand(n, 6).softmax(-1)))
class Tvd(Function):
    @staticmethod
    def forward(ctx, p, q):
        ctx.save_for_backward(p, q)
        return 0.5 * (p - q).abs().sum(-1).mean()

    @staticmethod
    def backward(ctx, g):
        p, q = ctx.saved_tensors
        s = 0.5 * torch.sign(p - q) / p.size(0)
        return g * s, -g * s


@case(lambda n: (rand(n, 3) * 2, rand(n, 3), 1.0))
class Huber(Function):
    @staticmethod
    def forward(ctx, x, y, delta):
        d = x - y
        ctx.save_for_backward(d)
        ctx.delta = delta
        a = d.abs()
        return torch.where(a <= delta, 0.5 * d * d, delta * (a - 0.5 * delta)).mean()

    @staticmethod
    def backward(ctx, g):
        (d,) = ctx.saved_tensors
        gx = d.clamp(-ctx.delta, ctx.delta) * (g / d.numel())
        return gx, -gx, None


@case(lambda n: (rand(n, 3), (rand(n, 3) > 0).float()))
class Focal(Function):
    @staticmethod
    def forward(ctx, x, y, alpha=0.25, gamma=2.0):
        p = torch.sigmoid(x)
        ce = F.binary_cross_entropy_with_logits(x, y, reduction="none")
        pt = p * y + (1 - p) * (1 - y)
        a = alpha * y + (1 - alpha) * (1 - y)
        ctx.save_for_backward(p, y, ce, pt, a)
        ctx.gamma = gamma
        return a * (1 - pt) ** gamma * ce

    @staticmethod
    def backward(ctx, g):
        p, y, ce, pt, a = ctx.saved_tensors
        s = 2 * y - 1
        d = a * ((1 - pt) ** ctx.gamma * (p - y) - ctx.gamma * (1 - pt) ** (ctx.gamma - 1) * s * p * (1 - p) * ce)
        return g * d, None, None, None


@case(lambda n: (rand(n), (rand(n) > 0).float(), positive(1)))
class BceWithLogits(Function):
    @staticmethod
    def forward(ctx, x, y, w):
        ctx.save_for_backward(x, y, w)
        return (w * (x.clamp(min=0) - x * y + torch.log1p(torch.exp(-x.abs())))).sum()

    @staticmethod
    def backward(ctx, g):
        x, y, w = ctx.saved_tensors
        return g * w * (x.sigmoid() - y), None, None


@case(lambda n: (rand(n, 5), rand(n, 5)))
class CosineLoss(Function):
    @staticmethod
    def forward(ctx, a, b):
        na = a.norm(dim=1, keepdim=True).clamp_min(1e-6)
        nb = b.norm(dim=1, keepdim=True).clamp_min(1e-6)
        cos = (a * b).sum(1, keepdim=True) / (na * nb)
        ctx.save_for_backward(a, b, na, nb, cos)
        return 1 - cos.squeeze(1)

    @staticmethod
    def backward(ctx, g):
        a, b, na, nb, cos = ctx.saved_tensors
        g = g[:, None]
        return -g * (b / (na * nb) - cos * a / na**2), -g * (a / (na * nb) - cos * b / nb**2)


@case(lambda n: (rand(n, 4), rand(5, 4), rand(5), classes(5, n)), WIDE, library=True)
class LinearCrossEntropy(Function):
    """Logits a few rows at a time, gradients in forward."""

    @staticmethod
    def forward(ctx, x, w, b, target):
        rows = x.shape[0]
        dx, dw, db = torch.empty_like(x), torch.zeros_like(w), torch.zeros_like(b)
        loss = x.new_zeros(())
        for part in range(2):
            lo, hi = part * rows // 2, (part + 1) * rows // 2
            logits = x[lo:hi] @ w.t() + b
            logp = logits.log_softmax(-1)
            t = target[lo:hi]
            loss = loss - logp.gather(1, t[:, None]).sum()
            d = logp.exp() - F.one_hot(t, w.shape[0])
            dx[lo:hi] = d @ w
            dw += d.t() @ x[lo:hi]
            db += d.sum(0)
        ctx.save_for_backward(dx, dw, db)
        return loss

    @staticmethod
    def backward(ctx, g):
        dx, dw, db = ctx.saved_tensors
        return dx * g, dw * g, db * g, None


_group[0] = "norms"


# ------------------------------------------------------------------------------------------------ norms
@case(lambda n: (rand(n, 12), positive(12), 1e-6))
class RmsNorm(Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        xf = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        rstd = torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, w, rstd)
        return (xf * rstd).to(x.dtype) * w

    @staticmethod
    def backward(ctx, g):
        x, w, rstd = ctx.saved_tensors
        xf, gw = x.to(rstd.dtype), (g * w).to(rstd.dtype)
        xhat = xf * rstd
        dx = rstd * (gw - xhat * (gw * xhat).mean(-1, keepdim=True))
        return dx.to(x.dtype), (g.to(rstd.dtype) * xhat).sum(0).to(w.dtype), None


@case(lambda n: (rand(2, n, 10), rand(10), rand(10), 1e-5))
class LayerNorm(Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        mu = x.mean(-1, keepdim=True)
        var = x.var(-1, keepdim=True, unbiased=False)
        xhat = (x - mu) / torch.sqrt(var + eps)
        ctx.save_for_backward(xhat, var, w)
        ctx.eps = eps
        return xhat * w + b

    @staticmethod
    def backward(ctx, g):
        xhat, var, w = ctx.saved_tensors
        gx = g * w
        n = gx.shape[-1]
        dx = gx - gx.mean(-1, keepdim=True) - xhat * (gx * xhat).sum(-1, keepdim=True) / n
        return dx / torch.sqrt(var + ctx.eps), (g * xhat).sum((0, 1)), g.sum((0, 1)), None


@case(lambda n: (rand(n, 6), rand(6), rand(6)))
class LayerNormLibrary(Function):
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w, b)
        return F.layer_norm(x, (6,), w, b)

    @staticmethod
    def backward(ctx, g):
        x, w, b = ctx.saved_tensors
        mean, rstd = x.mean(1, keepdim=True), (x.var(1, keepdim=True, correction=0) + 1e-5).rsqrt()
        return torch.ops.aten.native_layer_norm_backward(g, x, [6], mean, rstd, w, b, [True, True, True])


@case(lambda n: (rand(2, 6, n, 3), rand(6), rand(6), 3))
class GroupNorm(Function):
    @staticmethod
    def forward(ctx, x, w, b, groups):
        n, c, h, wd = x.shape
        y = x.reshape(n, groups, -1)
        mean = y.mean(-1, keepdim=True)
        rstd = (y.var(-1, keepdim=True, unbiased=False) + 1e-5).rsqrt()
        xhat = ((y - mean) * rstd).reshape(n, c, h, wd)
        ctx.save_for_backward(xhat, w, rstd)
        ctx.groups = groups
        return xhat * w[None, :, None, None] + b[None, :, None, None]

    @staticmethod
    def backward(ctx, g):
        xhat, w, rstd = ctx.saved_tensors
        n = g.shape[0]
        dw, db = (g * xhat).sum((0, 2, 3)), g.sum((0, 2, 3))
        gw = (g * w.view(1, -1, 1, 1)).reshape(n, ctx.groups, -1)
        xh = xhat.reshape(n, ctx.groups, -1)
        dx = rstd * (gw - gw.mean(-1, keepdim=True) - xh * (gw * xh).mean(-1, keepdim=True))
        return dx.reshape(g.shape), dw, db, None


@case(lambda n: (rand(n, 8), torch.tensor([0.8]), rand(8), rand(8)))
class DynamicTanh(Function):
    @staticmethod
    def forward(ctx, x, alpha, gamma, beta):
        t = torch.tanh(alpha * x)
        ctx.save_for_backward(x, alpha, gamma, t)
        return gamma * t + beta

    @staticmethod
    def backward(ctx, g):
        x, alpha, gamma, t = ctx.saved_tensors
        d = g * gamma * (1 - t * t)
        return d * alpha, (d * x).sum().reshape(1), (g * t).sum(0), g.sum(0)


@case(lambda n: (rand(n, 8), rand(3), rand(1)))
class PolyNorm(Function):
    @staticmethod
    def forward(ctx, x, w, b):
        norms = [x**k * torch.rsqrt((x ** (2 * k)).mean(-1, keepdim=True) + 1e-6) for k in (1, 2, 3)]
        ctx.save_for_backward(x, w)
        return w[0] * norms[2] + w[1] * norms[1] + w[2] * norms[0] + b

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        dx, dw = torch.zeros_like(x), torch.zeros_like(w)
        for i, k in ((2, 1), (1, 2), (0, 3)):
            p = x**k
            r = torch.rsqrt((p * p).mean(-1, keepdim=True) + 1e-6)
            gp = g * w[i]
            dp = r * gp - p * r**3 * (gp * p).mean(-1, keepdim=True)
            dx += dp * k * x ** (k - 1)
            dw[i] = (g * p * r).sum()
        return dx, dw, g.sum().reshape(1)


@case(lambda n: (rand(n, 8),))
class L2Normalize(Function):
    @staticmethod
    def forward(ctx, x):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-12)
        y = x / norm
        ctx.save_for_backward(y, norm)
        return y

    @staticmethod
    def backward(ctx, g):
        y, norm = ctx.saved_tensors
        return (g - y * (y * g).sum(-1, keepdim=True)) / norm


@case(lambda n: (rand(6, n), positive(6, 1)))
class WeightNorm(Function):
    @staticmethod
    def forward(v, g):
        norm = v.norm(2, dim=1, keepdim=True)
        return v * (g / norm), norm

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx, gw, _):
        v, g, norm = ctx.saved_tensors
        dot = (gw * v).sum(1, keepdim=True)
        return g / norm * gw - g * dot / norm**3 * v, dot / norm


@case(lambda n: (rand(n, 4, 3), rand(4), rand(4)))
class BatchNormTraining(Function):
    @staticmethod
    def forward(ctx, x, w, b):
        mean = x.mean((0, 2), keepdim=True)
        var = x.var((0, 2), keepdim=True, correction=0)
        rstd = 1 / (var + 1e-5).sqrt()
        xhat = (x - mean) * rstd
        ctx.save_for_backward(xhat, rstd, w)
        return xhat * w.view(1, -1, 1) + b.view(1, -1, 1)

    @staticmethod
    def backward(ctx, g):
        xhat, rstd, w = ctx.saved_tensors
        m = g.shape[0] * g.shape[2]
        dw, db = (g * xhat).sum((0, 2)), g.sum(dim=(0, 2))
        dx = (w * rstd.flatten() / m)[None, :, None] * (m * g - db[None, :, None] - xhat * dw[None, :, None])
        return dx, dw, db


@case(lambda n: (rand(n, 10), rand(n, 10), positive(10)))
class AddRmsNorm(Function):
    @staticmethod
    def forward(ctx, x, residual, w):
        s = x + residual
        rstd = (s.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt().to(s.dtype)
        ctx.save_for_backward(s, rstd, w)
        return s * rstd * w, s

    @staticmethod
    def backward(ctx, gy, gs):
        s, rstd, w = ctx.saved_tensors
        gw = gy * w
        dx = rstd * gw - s * rstd**3 * (gw * s).mean(-1, keepdim=True) + gs
        return dx, dx, (gy * s * rstd).sum(0)


@case(lambda n: (rand(n, 9) * 2,))
class StdStandardize(Function):
    @staticmethod
    def forward(ctx, x):
        std, mean = torch.std_mean(x, dim=1, keepdim=True)
        y = (x - mean) / (std + 1e-5)
        ctx.save_for_backward(y, std)
        return y

    @staticmethod
    def backward(ctx, g):
        y, std = ctx.saved_tensors
        n = y.shape[1]
        inner = (g * y).sum(1, keepdim=True)
        return (g - g.mean(1, keepdim=True)) / (std + 1e-5) - y * inner / ((n - 1) * std)


_group[0] = "softmaxes"


# -------------------------------------------------------------------------------------- softmaxes and attention
@case(lambda n: (rand(3, n + 1),))
class Softmax(Function):
    @staticmethod
    def forward(ctx, x):
        e = torch.exp(x - x.max(dim=-1, keepdim=True).values)
        y = e / e.sum(dim=-1, keepdim=True)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return y * (g - (g * y).sum(-1, keepdim=True))


@case(lambda n: (rand(5, n), 0))
class SoftmaxColumns(Function):
    @staticmethod
    def forward(x, dim):
        return torch.softmax(x, dim)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.dim = inputs[1]

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return y * (g - torch.sum(g * y, ctx.dim, keepdim=True)), None


@case(lambda n: (rand(2, n, n), 0.5))
class CausalSoftmax(Function):
    @staticmethod
    def forward(ctx, scores, scale):
        n = scores.shape[-1]
        mask = torch.ones(n, n, dtype=torch.bool, device=scores.device).triu(1)
        p = torch.softmax((scores * scale).masked_fill(mask, float("-inf")), dim=-1)
        ctx.save_for_backward(p)
        ctx.scale = scale
        return p

    @staticmethod
    def backward(ctx, g):
        (p,) = ctx.saved_tensors
        return (p * g - p * (p * g).sum(-1, keepdim=True)) * ctx.scale, None


@case(lambda n: (rand(2, 3, n, n + 1), rand(3, 1, 1), rand(2, 1, 1, n + 1) > -0.5))
class BiasedMaskedSoftmax(Function):
    @staticmethod
    def forward(ctx, s, bias, mask):
        s = torch.where(mask, s + bias, torch.finfo(s.dtype).min)
        p = s.softmax(-1)
        ctx.save_for_backward(p, mask)
        return p

    @staticmethod
    def backward(ctx, g):
        p, mask = ctx.saved_tensors
        ds = torch.where(mask, p * (g - (p * g).sum(-1, True)), 0)
        return ds, ds.sum((0, 2, 3)).view(3, 1, 1), None


@case(lambda n: (rand(n, 7),))
class LogSoftmax(Function):
    @staticmethod
    def forward(ctx, x):
        y = x - x.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g - y.exp() * g.sum(-1, keepdim=True)


@case(lambda n: (rand(n, 7),), WIDE, library=True)
class Sparsemax(Function):
    @staticmethod
    def forward(ctx, x):
        z, _ = torch.sort(x, dim=-1, descending=True)
        k = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
        csum = z.cumsum(-1)
        support = 1 + k * z > csum
        count = support.sum(-1, keepdim=True)
        tau = (csum.gather(-1, count - 1) - 1) / count.to(x.dtype)
        y = torch.clamp(x - tau, min=0)
        ctx.save_for_backward(y > 0)
        return y

    @staticmethod
    def backward(ctx, g):
        (on,) = ctx.saved_tensors
        mean = (g * on).sum(-1, keepdim=True) / on.sum(-1, keepdim=True)
        return torch.where(on, g - mean, torch.zeros_like(g))


@case(lambda n: (rand(2, n, 6), rand(n, 3), rand(n, 3)))
class RopeSlices(Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        h = x.shape[-1] // 2
        a, b = x[..., :h], x[..., h:]
        ctx.save_for_backward(cos, sin)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    @staticmethod
    def backward(ctx, g):
        cos, sin = ctx.saved_tensors
        a, b = g.chunk(2, dim=-1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin), -1), None, None


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


@case(lambda n: (rand(2, 3, n, 8), rand(2, 1, n, 8), rand(n, 8), rand(n, 8)))
class RopeRotateHalf(Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        cos, sin = cos[None, None], sin[None, None]
        ctx.save_for_backward(cos, sin)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors

        def back(d):
            return d * cos - rotate_half(d * sin)

        return back(dq), back(dk), None, None


@case(lambda n: (rand(2, n, 6), rand(n, 3), rand(n, 3)))
class RopeInterleaved(Function):
    @staticmethod
    def forward(x, cos, sin):
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1], inputs[2])

    @staticmethod
    def backward(ctx, g):
        cos, sin = ctx.saved_tensors
        even, odd = g.unflatten(-1, (-1, 2)).unbind(-1)
        out = torch.empty_like(g)
        out[..., 0::2] = even * cos + odd * sin
        out[..., 1::2] = odd * cos - even * sin
        return out, None, None


@case(lambda n: (rand(2, 2, n, 4), rand(2, 2, n, 4), rand(2, 2, n, 4)), WIDE, library=True)
class Attention(Function):
    @staticmethod
    def forward(ctx, q, k, v):
        scale = q.shape[-1] ** -0.5
        s = (q @ k.transpose(-2, -1)) * scale
        i = torch.arange(s.shape[-1], device=s.device)
        s = s.masked_fill(i[None, :] > i[:, None], float("-inf"))
        lse = torch.logsumexp(s, -1, keepdim=True)
        p = torch.exp(s - lse)
        o = p @ v
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        i = torch.arange(k.shape[-2], device=q.device)
        s = (q @ k.mT * scale).masked_fill(i[None, :] > i[:, None], float("-inf"))
        p = (s - lse).exp()
        dp = do @ v.mT
        ds = p * (dp - (do * o).sum(-1, keepdim=True)) * scale
        return ds @ k, ds.mT @ q, p.mT @ do


_group[0] = "indexing"


# ------------------------------------------------------------------------------------------------ indexing
@case(lambda n: (classes(7, n, 2), rand(7, 5)), library=True)
class Embedding(Function):
    @staticmethod
    def forward(ctx, ids, table):
        ctx.save_for_backward(ids)
        ctx.rows = table.shape[0]
        return table[ids]

    @staticmethod
    def backward(ctx, g):
        (ids,) = ctx.saved_tensors
        out = g.new_zeros(ctx.rows, g.shape[-1])
        out.index_add_(0, ids.reshape(-1), g.reshape(-1, g.shape[-1]))
        return None, out


@case(lambda n: (classes(7, n), rand(7, 3)), library=True)
class EmbeddingScatterAdd(Function):
    @staticmethod
    def forward(ctx, ids, table):
        ctx.save_for_backward(ids, table)
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx, g):
        ids, table = ctx.saved_tensors
        return None, torch.zeros_like(table).scatter_add(0, ids[:, None].expand_as(g), g)


@case(lambda n: (rand(n, 6), classes(6, n, 2)), library=True)
class GatherTake(Function):
    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return torch.gather(x, 1, index) + torch.take_along_dim(x, index.flip(1), dim=1)

    @staticmethod
    def backward(ctx, g):
        (index,) = ctx.saved_tensors
        out = torch.zeros(ctx.shape, dtype=g.dtype, device=g.device)
        return out.scatter_add_(1, index, g).scatter_add_(1, index.flip(1), g), None


@case(lambda n: (rand(n, 8), 3), library=True)
class TopK(Function):
    @staticmethod
    def forward(ctx, x, k):
        values, index = torch.topk(x, k, dim=-1)
        ctx.save_for_backward(index)
        ctx.mark_non_differentiable(index)
        ctx.shape = x.shape
        return values.softmax(-1), index

    @staticmethod
    def backward(ctx, g, _):
        (index,) = ctx.saved_tensors
        return torch.zeros(ctx.shape, dtype=g.dtype).scatter(1, index, g), None


@case(lambda n: (rand(n, 8),), library=True)
class SortRows(Function):
    @staticmethod
    def forward(ctx, x):
        values, order = x.sort(dim=1)
        ctx.save_for_backward(order)
        return values

    @staticmethod
    def backward(ctx, g):
        (order,) = ctx.saved_tensors
        return torch.empty_like(g).scatter_(1, order, g)


@case(lambda n: (rand(3, n),))
class CumSum(Function):
    @staticmethod
    def forward(ctx, x):
        return x.cumsum(-1)

    @staticmethod
    def backward(ctx, g):
        return g.flip(-1).cumsum(-1).flip(-1)


@case(lambda n: (positive(n, 5),), library=True)
class CumProd(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.cumprod(1)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        w = g * y
        return (w.sum(1, keepdim=True) - w.cumsum(1) + w) / x


@case(lambda n: (rand(n, 5),))
class MaxWithIndex(Function):
    @staticmethod
    def forward(ctx, x):
        values, index = x.max(dim=1)
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        ctx.mark_non_differentiable(index)
        return values, index

    @staticmethod
    def backward(ctx, g, _):
        (index,) = ctx.saved_tensors
        gx = g.new_zeros(ctx.shape)
        gx.scatter_(1, index.unsqueeze(1), g.unsqueeze(1))
        return gx


@case(lambda n: (rand(4, n + 1),))
class ArgExtremes(Function):
    @staticmethod
    def forward(ctx, x):
        hi, lo = x.argmax(-1), x.argmin(dim=-1, keepdim=True)
        ctx.save_for_backward(hi, lo)
        ctx.mark_non_differentiable(hi, lo)
        ctx.n = x.size(1)
        return x.amax(-1) - x.amin(-1), hi, lo

    @staticmethod
    def backward(ctx, g, _hi, _lo):
        hi, lo = ctx.saved_tensors
        i = torch.arange(ctx.n)
        return g[:, None] * ((i == hi[:, None]).to(g.dtype) - (i == lo).to(g.dtype))


@case(lambda n: (rand(n, 4), classes(3, n)), library=True)
class SegmentMean(Function):
    @staticmethod
    def forward(ctx, x, segment):
        total = x.new_zeros(3, x.shape[1]).index_add(0, segment, x)
        count = torch.bincount(segment, minlength=3).clamp(min=1).to(x.dtype)
        ctx.save_for_backward(segment, count)
        return total / count[:, None]

    @staticmethod
    def backward(ctx, g):
        segment, count = ctx.saved_tensors
        return (g / count[:, None])[segment], None


@case(lambda n: (rand(4, n, 3), torch.tensor([2, 0, 0, 3])))
class IndexSelect(Function):
    @staticmethod
    def forward(ctx, x, order):
        ctx.save_for_backward(order)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, g):
        (order,) = ctx.saved_tensors
        return torch.zeros_like(g).index_add_(0, order, g), None


@case(lambda n: (rand(n, 4), rand(n, 4) > 0))
class MaskedAssign(Function):
    @staticmethod
    def forward(ctx, x, mask):
        ctx.save_for_backward(mask)
        y = x.clone()
        y[mask] = -1.0
        return y

    @staticmethod
    def backward(ctx, g):
        (mask,) = ctx.saved_tensors
        return g.masked_fill(mask, 0), None


_group[0] = "quantisers"


# ------------------------------------------------------------------------------------------------ quantisers, masks
@case(lambda n: (rand(n, 6), torch.tensor([0.1]), -8, 7))
class LearnedStepQuantizer(Function):
    @staticmethod
    def forward(ctx, x, scale, lo, hi):
        q = x / scale
        ctx.save_for_backward(q, scale)
        ctx.range = lo, hi
        return q.round().clamp(lo, hi) * scale

    @staticmethod
    def backward(ctx, g):
        q, _scale = ctx.saved_tensors
        lo, hi = ctx.range
        small, big = (q < lo).to(g.dtype), (q > hi).to(g.dtype)
        middle = 1.0 - small - big
        gs = (small * lo + big * hi + middle * (q.round() - q)) * g / math.sqrt(g.numel() * hi or 1)
        return g * middle, gs.sum().unsqueeze(0), None, None


@case(lambda n: (rand(n, 6),))
class Int8Rows(Function):
    @staticmethod
    def forward(ctx, x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
        q = torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8)
        ctx.mark_non_differentiable(q)
        return q, scale

    @staticmethod
    def backward(ctx, _, gscale):
        return gscale.expand(gscale.shape[0], 6) / 127


@case(lambda n: (rand(n, 6),))
class SignStraightThrough(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x.abs() <= 1)


@case(lambda n: (rand(n, 6), torch.rand(n, 6) < 0.8, 0.2))
class MaskedDropout(Function):
    @staticmethod
    def forward(ctx, x, keep, p):
        ctx.save_for_backward(keep)
        ctx.scale = 1 / (1 - p)
        return x * keep * ctx.scale

    @staticmethod
    def backward(ctx, g):
        (keep,) = ctx.saved_tensors
        return g * keep * ctx.scale, None, None


@case(lambda n: (rand(n, 3), 0.5))
class GradientReversal(Function):
    @staticmethod
    def forward(ctx, x, lam):
        ctx.lam = lam
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.neg() * ctx.lam, None


@case(lambda n: (rand(n, 3),))
class NanGuard(Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.where(x > 1, torch.full_like(x, float("nan")), x)
        bad = torch.isnan(y) | torch.isinf(x)
        ctx.save_for_backward(~bad)
        return torch.nan_to_num(y, nan=0.0, posinf=1.0, neginf=-1.0), bad

    @staticmethod
    def backward(ctx, g, _):
        (ok,) = ctx.saved_tensors
        norm = g.norm()
        return torch.where(ok, g * torch.clamp(1.0 / (norm + 1e-6), max=1.0), 0.0)


_group[0] = "gates"


# ------------------------------------------------------------------------------------------------ gates and matmuls
@case(lambda n: (rand(n, 6), rand(6)))
class BiasGelu(Function):
    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias)
        z = x + bias
        return z * 0.5 * (1.0 + torch.tanh(0.79788456 * z * (1 + 0.044715 * z * z)))

    @staticmethod
    def backward(ctx, g):
        x, bias = ctx.saved_tensors
        z = bias + x
        t = torch.tanh(0.79788456 * z * (1 + 0.044715 * z * z))
        d = 0.5 * z * ((1 - t * t) * (0.79788456 + 0.1070322243 * z * z)) + 0.5 * (1 + t)
        dz = d * g
        return dz, dz.sum(0)


@case(lambda n: (rand(n, 5), rand(n, 5)))
class SwiGlu(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return F.silu(a) * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        silu = a * s
        return g * b * (s + silu * (1 - s)), g * silu


@case(lambda n: (rand(2, n, 10),))
class SwiGluPacked(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        s = gate.sigmoid()
        out = torch.empty_like(x)
        h = x.shape[-1] // 2
        out[..., :h] = g * up * s * (1 + gate * (1 - s))
        out[..., h:] = g * gate * s
        return out


@case(lambda n: (rand(n, 10),))
class GeGluPacked(Function):
    @staticmethod
    def forward(x):
        a, b = torch.split(x, x.size(-1) // 2, dim=-1)
        return F.gelu(a) * b

    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors[0].split(g.size(-1), -1)
        cdf = 0.5 * (1 + torch.erf(a / 2**0.5))
        return torch.cat([g * b * (cdf + a * torch.exp(-a * a / 2) / math.sqrt(2 * math.pi)), g * a * cdf], -1)


@case(lambda n: (rand(n, 5), rand(4, 5), rand(4)), WIDE, library=True)
class LinearRelu(Function):
    @staticmethod
    def forward(ctx, x, w, b):
        y = torch.relu(F.linear(x, w, b))
        ctx.save_for_backward(x, w, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, w, y = ctx.saved_tensors
        g = g * (y > 0)
        return g.mm(w), g.t().mm(x), g.sum(0)


@case(lambda n: (rand(n, 2, 3), rand(3, 4)), WIDE, library=True)
class Einsum(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.einsum("bij,jk->bik", x, w)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return torch.einsum("bik,jk->bij", g, w), torch.einsum("bij,bik->jk", x, g)


@case(lambda n: (rand(2, 3, n + 3), rand(4, 3, 3), rand(4)), WIDE, library=True)
class Conv1d(Function):
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return F.conv1d(x, w, b, padding=1)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        gx = torch.nn.grad.conv1d_input(x.shape, w, g, padding=1)
        gw = torch.nn.grad.conv1d_weight(x, w.shape, g, padding=1)
        return gx, gw, g.sum((0, 2))


@case(lambda n: (rand(n), rand(n + 2)))
class OuterDifference(Function):
    @staticmethod
    def forward(ctx, a, b):
        d = a[:, None] - b[None, :]
        ctx.save_for_backward(d)
        return (d * d).sum(1).sqrt() + 1e-3

    @staticmethod
    def backward(ctx, g):
        (d,) = ctx.saved_tensors
        r = g[:, None] * d / (d * d).sum(1, keepdim=True).sqrt()
        return r.sum(1), -r.sum(0)


@case(lambda n: (rand(n, 4), rand(3, 4)), WIDE, library=True)
class PairwiseDistances(Function):
    @staticmethod
    def forward(ctx, x, y):
        d = (x[:, None, :] - y[None]).pow(2).sum(-1)
        k = torch.exp(-0.5 * d)
        ctx.save_for_backward(x, y, k)
        return k

    @staticmethod
    def backward(ctx, g):
        x, y, k = ctx.saved_tensors
        w = g * k
        return w @ y - w.sum(1, keepdim=True) * x, w.t() @ x - w.sum(0)[:, None] * y


@case(lambda n: (rand(n, 5), rand(5, 2), rand(4, 2)), WIDE, library=True)
class LowRank(Function):
    @staticmethod
    def forward(ctx, x, a, b):
        h = x @ a
        ctx.save_for_backward(x, a, b, h)
        return (h @ b.T) * 0.5

    @staticmethod
    def backward(ctx, g):
        x, a, b, h = ctx.saved_tensors
        g = g * 0.5
        gh = g @ b
        return gh @ a.T, x.T @ gh, g.T @ h


_group[0] = "layouts"


# ------------------------------------------------------------------------------------------------ layouts
@case(lambda n: (rand(n, 3, 4),))
class PadFlipRoll(Function):
    @staticmethod
    def forward(ctx, x):
        return F.pad(x, (1, 2, 0, 1), value=0.5) + F.pad(x.flip(0).roll(1, 2), (2, 1, 1, 0))

    @staticmethod
    def backward(ctx, g):
        return g[:, :-1, 1:-2] + g[:, 1:, 2:-1].roll(-1, 2).flip(0)


@case(lambda n: (rand(n, 4), rand(n, 4)))
class StackUnbind(Function):
    @staticmethod
    def forward(ctx, a, b):
        s = torch.stack([a, b, a * b], dim=1)
        ctx.save_for_backward(a, b)
        return s.permute(2, 1, 0)

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        ga, gb, gp = g.permute(2, 1, 0).unbind(1)
        return ga + gp * b, gb + gp * a


@case(lambda n: (rand(2, n + 4),))
class Unfold(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.n = x.shape[1]
        return x.unfold(1, 3, 1).mean(-1)

    @staticmethod
    def backward(ctx, g):
        p = F.pad(g, (2, 2))
        return (p[:, :-2] + p[:, 1:-1] + p[:, 2:]) / 3


@case(lambda n: (rand(n, 4, 5),))
class MixedAxes(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum((0, 2)), x.mean(), x.prod(1), x.transpose(0, 2).contiguous()

    @staticmethod
    def backward(ctx, gs, gm, gp, gt):
        (x,) = ctx.saved_tensors
        n = x.numel()
        return gs[None, :, None] + gm / max(n, 1) + gp.unsqueeze(1) * x.prod(1, keepdim=True) / x + gt.transpose(0, 2)


@case(lambda n: (rand(n), rand(3, 1), rand(2, 1, 1), torch.tensor(1.5)))
class BroadcastProducts(Function):
    @staticmethod
    def forward(ctx, a, b, c, d):
        ctx.save_for_backward(a, b, c, d)
        return a * b * c * d

    @staticmethod
    def backward(ctx, g):
        a, b, c, d = ctx.saved_tensors
        return (
            (g * b * c * d).sum((0, 1)),
            (g * a * c * d).sum((0, 2)).unsqueeze(1),
            (g * a * b * d).sum((1, 2), keepdim=True),
            (g * a * b * c).sum(),
        )


@case(lambda n: (rand(2, 1, n, 1, 3), rand(3)))
class FiveDims(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x * w).expand(2, 2, -1, 2, 3)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        s = g.sum((1, 3), keepdim=True)
        return s * w, (s * x).sum((0, 1, 2, 3))


@case(lambda n: (torch.tensor(1.5), torch.tensor(-0.5)))
class Scalars(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b, a.exp() + 1

    @staticmethod
    def backward(ctx, g, h):
        a, b = ctx.saved_tensors
        return g * b + h * a.exp(), g * a


@case(lambda n: (rand(n, 4, 2, 3),))
class PixelShuffle(Function):
    @staticmethod
    def forward(ctx, x):
        n, c, h, w = x.shape
        return x.reshape(n, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // 4, h * 2, w * 2)

    @staticmethod
    def backward(ctx, g):
        n, c, h, w = g.shape
        return g.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(n, c * 4, h // 2, w // 2)


@case(lambda n: (rand(n, 4, 3, 2), rand(4)))
class ChannelBias(Function):
    @staticmethod
    def forward(ctx, x, b):
        return (x + b.reshape(1, -1, 1, 1)).contiguous(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx, g):
        return g.clone(), g.sum([0, 2, 3])


@case(lambda n: (rand(n, 5), rand(n, 5).double(), classes(9, n, 1)), (torch.float32,))
class MixedDtypes(Function):
    @staticmethod
    def forward(ctx, x, d, i):
        ctx.save_for_backward(x, d, i)
        return x * d, x.to(torch.bfloat16) * i, i * 2 + 1, (x > 0) ^ (d > 0), i // 2

    @staticmethod
    def backward(ctx, g, gb, _i, _m, _q):
        x, d, i = ctx.saved_tensors
        return (g * d).float() + gb.float() * i, g * x, None


@case(lambda n: (rand(n, 3), rand(n, 3)), (torch.float32, torch.float64), library=True)
class ComplexProduct(Function):
    @staticmethod
    def forward(ctx, re, im):
        z = torch.complex(re, im)
        ctx.save_for_backward(z)
        return (z * z.conj()).real, z * z

    @staticmethod
    def backward(ctx, g, gz):
        (z,) = ctx.saved_tensors
        d = 2 * g * z + 2 * gz * z.conj()
        return d.real, d.imag


@case(lambda n: (rand(n, 4),), WIDE, library=True)
class Fft(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.n = x.shape[-1]
        return torch.fft.rfft(x, dim=-1).abs()

    @staticmethod
    def backward(ctx, g):
        return F.pad(g, (0, ctx.n - g.shape[-1]))


@case(lambda n: (rand(n, 4),))
class BoolOutputs(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, (x > 0).any(-1), (x > -2).all(), (x != 0).sum(1), x.to(torch.int32)

    @staticmethod
    def backward(ctx, g, *_):
        return None if g is None else g * 2


@case(lambda n: (rand(3, n), rand(3, n)))
class TwoShapes(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.mean(0), (a * b).sum(1, keepdim=True), torch.maximum(a, b), torch.minimum(a, b).t()

    @staticmethod
    def backward(ctx, g0, g1, g2, g3):
        a, b = ctx.saved_tensors
        w = (a >= b).to(a.dtype)
        ga = g0 / 3 + g1 * b + g2 * w + g3.t() * (1 - w)
        return ga, g1 * a + g2 * (1 - w) + g3.t() * w


@case(lambda n: (rand(n, 3), [0.5, 2.0], {"shift": 1.0}))
class PythonContainers(Function):
    @staticmethod
    def forward(ctx, x, scales, options):
        ctx.scales, ctx.shift = scales, options["shift"]
        y = x
        for s in scales:
            y = y * s + ctx.shift
        return y

    @staticmethod
    def backward(ctx, g):
        for s in reversed(ctx.scales):
            g = g * s
        return g, None, None


@case(lambda n: (rand(n, 5), None, rand(5)))
class OptionalArguments(Function):
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w, b)
        y = x if w is None else x * w
        return y + b if b is not None else y

    @staticmethod
    def backward(ctx, g):
        x, w, b = ctx.saved_tensors
        gx = g if w is None else g * w
        gw = (g * x).sum(0) if ctx.needs_input_grad[1] and w is not None else None
        gb = g.sum(0) if ctx.needs_input_grad[2] and b is not None else None
        return gx, gw, gb


@case(lambda n: (rand(2, n, 4),))
class TriangularRepeat(Function):
    @staticmethod
    def forward(ctx, x):
        return torch.tril(x.repeat(1, 1, 2), 1) + x.repeat_interleave(2, -1) + torch.triu(x, -1).tile(2)

    @staticmethod
    def backward(ctx, g):
        t = torch.tril(g, 1)
        tiled = g[..., :4] + g[..., 4:]
        return t[..., :4] + t[..., 4:] + g.reshape(*g.shape[:2], 4, 2).sum(-1) + torch.triu(tiled, -1)


@case(lambda n: (rand(2, n, 3), rand(2, n, 3), 2.0))
class SelectiveDecay(Function):
    """A recurrence that is written as a cumulative sum of logarithms."""

    @staticmethod
    def forward(ctx, x, a, k):
        decay = torch.cumsum(F.logsigmoid(a) / k, dim=1)
        y = decay.exp() * torch.cumsum(x * torch.exp(-decay), dim=1)
        ctx.save_for_backward(decay)
        return y

    @staticmethod
    def backward(ctx, g):
        (decay,) = ctx.saved_tensors
        acc = (g * decay.exp()).flip(1).cumsum(1).flip(1)
        return acc * (-decay).exp(), None, None


@case(lambda n: (rand(n, 8), rand(8)))
class GatedHeads(Function):
    @staticmethod
    def forward(ctx, x, w):
        heads = x.view(x.shape[0], 2, 4)
        norm = heads.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        y = (heads * norm).reshape(x.shape) * w
        ctx.save_for_backward(x, norm, w)
        return y

    @staticmethod
    def backward(ctx, g):
        x, norm, w = ctx.saved_tensors
        heads, gh = x.unflatten(1, (2, 4)), (g * w).unflatten(1, (2, 4))
        dx = norm * gh - heads * norm.pow(3) * (gh * heads).mean(-1, keepdim=True)
        return dx.flatten(1), (g * (heads * norm).flatten(1)).sum(0)


@case(lambda n: (rand(n, 3, 5),))
class LastDimStats(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.cat([x.mean(-1), x.amax(-1), x.logsumexp(-1), x.norm(dim=-1), x.std(-1)], dim=1)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        a, b, c, d, e = g.unsqueeze(-1).split(3, dim=1)
        out = a / 5 + b * (x == x.amax(-1, keepdim=True)) + c * x.softmax(-1) + d * x / x.norm(dim=-1, keepdim=True)
        return out + e * (x - x.mean(-1, keepdim=True)) / (4 * x.std(-1, keepdim=True))


_group[0] = "varied"


# ------------------------------------------------------------------------------------------------ varied
@case(lambda n: (rand(n, 5), rand(5)))
class Wide1000(Function):
    @staticmethod
    def forward(ctx, x, w):
        x = x.repeat(1, 301)  # 1505 columns
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, r, w)
        return (x * r)[:, :5] * w

    @staticmethod
    def backward(ctx, g):
        x, r, w = ctx.saved_tensors
        return g * w * r, (g * (x * r)[:, :5]).sum(0)


@case(lambda n: (rand(n, 1030), positive(1030)))
class RmsNormWide(Function):
    @staticmethod
    def forward(ctx, x, w):
        r = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
        ctx.save_for_backward(x, r, w)
        return x * r * w

    @staticmethod
    def backward(ctx, g):
        x, r, w = ctx.saved_tensors
        gw = g * w
        return r * gw - x * r**3 * (gw * x).mean(-1, keepdim=True), (g * x * r).sum(0)


@case(lambda n: (rand(n, 2049),))
class SoftmaxWide(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return y * (g - (y * g).sum(-1, keepdim=True))


@case(lambda n: (rand(2, 2049),))
class CumsumWide(Function):
    @staticmethod
    def forward(ctx, x):
        return x.cumsum(1)

    @staticmethod
    def backward(ctx, g):
        return g.flip(1).cumsum(1).flip(1)


@case(lambda n: (rand(n, 3000), classes(3000, n)), WIDE)
class CEWide(Function):
    @staticmethod
    def forward(ctx, x, t):
        m = x.max(1).values
        lse = m + (x - m[:, None]).exp().sum(1).log()
        ctx.save_for_backward(x, t, lse)
        return (lse - x[torch.arange(x.shape[0]), t]).mean()

    @staticmethod
    def backward(ctx, g):
        x, t, lse = ctx.saved_tensors
        p = (x - lse.unsqueeze(1)).exp()
        p[torch.arange(x.shape[0]), t] -= 1
        return p * (g / x.shape[0]), None


@case(lambda n: (rand(n, 4),))
class ListReturn(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return tuple(x[:, i] * i for i in range(4))

    @staticmethod
    def backward(ctx, *gs):
        return torch.stack([g * i for i, g in enumerate(gs)], 1)


@case(lambda n: (rand(n, 4), rand(n, 4)))
class AddcOps(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return (
            torch.addcmul(a, a, b, value=0.5)
            + torch.addcdiv(a, b, a.abs() + 1, value=2)
            - torch.sub(a, b, alpha=3)
            + torch.rsub(a, b)
        )

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return torch.add(g, b, alpha=2) * a.sigmoid(), g / 2


@case(lambda n: (rand(n, 4),), library=True)
class FillDiag(Function):
    @staticmethod
    def forward(ctx, x):
        y = x @ x.t()
        y.fill_diagonal_(0)
        ctx.save_for_backward(x)
        return y.sum()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * g * (x.sum(0, keepdim=True) - x)


@case(lambda n: (rand(n, 4),))
class DiagTrace(Function):
    @staticmethod
    def forward(ctx, x):
        d = torch.diag_embed(x)
        ctx.save_for_backward(x)
        return d, torch.diagonal(d, dim1=1, dim2=2) * 2

    @staticmethod
    def backward(ctx, g, h):
        return g.diagonal(dim1=-2, dim2=-1) + 2 * h


@case(lambda n: (rand(n, 6),))
class WhereChain(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        y[x < 0] *= 0.1
        y[x > 1] = 1
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        g = g.clone()
        g[x < 0] *= 0.1
        g[x > 1] = 0
        return g


@case(lambda n: (rand(n, 6),))
class NonzeroDependent(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x[x > 0].sum()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x > 0)


@case(lambda n: (rand(2, 3, n, n),))
class AvgPool(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return F.adaptive_avg_pool2d(x, 1).flatten(1)

    @staticmethod
    def backward(ctx, g):
        n, c, h, w = ctx.shape
        return (g / (h * w)).view(n, c, 1, 1).expand(n, c, h, w)


@case(lambda n: (rand(2, 3, 2 * n, 4),), WIDE, library=True)
class PoolUpsample(Function):
    @staticmethod
    def forward(ctx, x):
        return F.avg_pool2d(x, 2) + F.max_pool2d(x, 2)

    @staticmethod
    def backward(ctx, g):
        return F.interpolate(g, scale_factor=2, mode="nearest") / 4


@case(lambda n: (rand(n, 8),))
class FloorDivShift(Function):
    @staticmethod
    def forward(ctx, x):
        q = (x * 16).to(torch.int32)
        a = (q >> 2) & 3
        b = (q << 1) | 1
        c = q % 5
        d = q // 3
        e = torch.bitwise_xor(q, 7)
        f = ~q
        ctx.mark_non_differentiable(a, b, c, d, e, f)
        return x * 2, a, b, c, d, e, f

    @staticmethod
    def backward(ctx, g, *_):
        return g * 2


@case(lambda n: (rand(n, 8),), library=True)
class PackInt4(Function):
    @staticmethod
    def forward(ctx, x):
        s = x.abs().amax(1, keepdim=True) / 7 + 1e-6
        q = (x / s).round().clamp(-8, 7).to(torch.int8)
        lo, hi = q[:, 0::2], q[:, 1::2]
        packed = ((hi << 4) | (lo & 0xF)).to(torch.uint8)
        deq = torch.stack(((packed & 0xF).to(torch.int8) << 4 >> 4, packed.view(torch.int8) >> 4), -1).flatten(1)
        ctx.mark_non_differentiable(packed)
        return deq * s, packed

    @staticmethod
    def backward(ctx, g, _):
        return g


@case(lambda n: (rand(n, 8),), library=True)
class Fp8Cast(Function):
    @staticmethod
    def forward(ctx, x):
        s = 448.0 / x.abs().max().clamp(min=1e-6)
        return (x * s).to(torch.float8_e4m3fn).to(x.dtype) / s

    @staticmethod
    def backward(ctx, g):
        return g


@case(lambda n: (rand(n, 5), rand(n, 5)))
class MinMaxOps(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return torch.fmax(a, b) + torch.fmin(a, b) + a.clamp(min=b) + torch.min(a, dim=0).values + torch.amax(b, (0, 1))

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * (a > b) + g * torch.logical_and(a > 0, b > 0), g * torch.logical_not(a > b)


@case(lambda n: (rand(n, 3, 4),))
class MovedAxes(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.movedim(0, -1).swapaxes(0, 1)
        return y.flatten(0, 1), torch.einsum("abc->cab", x), x.mT.contiguous()

    @staticmethod
    def backward(ctx, g, h, k):
        return g.unflatten(0, (4, 3)).swapaxes(0, 1).movedim(-1, 0) + h.permute(1, 2, 0) + k.mT


@case(lambda n: (rand(n, 7),))
class OddChunks(Function):
    @staticmethod
    def forward(ctx, x):
        a, b, c = x.chunk(3, 1)
        p, q = x.split([2, 5], 1)
        r = torch.tensor_split(x, 2, dim=1)
        return a * 2, b.exp(), c + 1, p.sum(), q.neg(), r[0] * r[0]

    @staticmethod
    def backward(ctx, ga, gb, gc, gp, gq, gr):
        out = torch.cat([ga * 2, gb, gc], 1)
        out[:, :2] += gp
        out[:, 2:] -= gq
        return out + F.pad(gr, (0, 3))


@case(lambda n: (rand(n, 4), 0.5, True, "mean"))
class StringOptions(Function):
    @staticmethod
    def forward(ctx, x, a, flag, reduction="sum"):
        ctx.k = (a, flag, reduction)
        ctx.numel = x.numel()
        y = x * a if flag else x
        return y.mean() if reduction == "mean" else y.sum()

    @staticmethod
    def backward(ctx, g):
        a, flag, r = ctx.k
        g = g * (a if flag else 1)
        g = g / ctx.numel if r == "mean" else g
        return g.expand(ctx.numel // 4, 4), None, None, None


@case(lambda n: (rand(n, 4),))
class ExpandedGrad(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx, g):
        return g.expand(ctx.shape)


@case(lambda n: (rand(n, 4),))
class OnesGrad(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.norm()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x / x.norm()


@case(lambda n: (rand(n, 4), rand(n, 4)))
class GradShapes(Function):
    """gradients broadcast down by autograd"""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x + y.mean(0)

    @staticmethod
    def backward(ctx, g):
        return g, (g.sum(0) / g.shape[0]).expand_as(g)


@case(lambda n: (rand(n, 4), rand(1, 4), rand(4), rand(1)))
class AutoReduce(Function):
    @staticmethod
    def forward(ctx, x, a, b, c):
        ctx.save_for_backward(x, a, b, c)
        return x * a + b * c

    @staticmethod
    def backward(ctx, g):
        x, a, b, c = ctx.saved_tensors
        return g * a, g * x, g * c, g * b


@case(lambda n: (rand(n, 4),))
class DtypeOfGrad(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.dtype = x.dtype
        return x.double().sin()

    @staticmethod
    def backward(ctx, g):
        return g.float() * 2


@case(lambda n: (rand(n, 3), rand(n, 3)))
class SaveMany(Function):
    @staticmethod
    def forward(ctx, a, b):
        s = torch.sigmoid(a)
        t = torch.tanh(b)
        u = s * t
        ctx.save_for_backward(s, t, u)
        ctx.extra = u.sum()
        return u

    @staticmethod
    def backward(ctx, g):
        s, t, u = ctx.saved_tensors
        return g * u * (1 - s) + 0 * ctx.extra, g * s * (1 - t * t)


@case(lambda n: (rand(3, n, 4), rand(3, 4, 5)), WIDE, library=True)
class BmmBias(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return torch.baddbmm(torch.ones(3, 1, 5, dtype=a.dtype), a, b, beta=0.5)

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return torch.bmm(g, b.transpose(1, 2)), torch.matmul(a.transpose(1, 2), g)


@case(lambda n: (rand(4, n), rand(n)), WIDE, library=True)
class MatVec(Function):
    @staticmethod
    def forward(ctx, a, v):
        ctx.save_for_backward(a, v)
        return torch.mv(a, v) + torch.dot(v, v)

    @staticmethod
    def backward(ctx, g):
        a, v = ctx.saved_tensors
        return torch.outer(g, v), a.t() @ g + 2 * v * g.sum()


@case(lambda n: (rand(n, 3, 8, 8), rand(4, 3, 3, 3)), WIDE, library=True)
class Conv2dRelu(Function):
    @staticmethod
    def forward(ctx, x, w):
        y = F.conv2d(x, w, padding=1, stride=2).relu_()
        ctx.save_for_backward(x, w, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, w, y = ctx.saved_tensors
        g = g * (y > 0)
        return torch.nn.grad.conv2d_input(x.shape, w, g, stride=2, padding=1), torch.nn.grad.conv2d_weight(
            x, w.shape, g, stride=2, padding=1
        )


@case(lambda n: (rand(n, 6),), library=True)
class RunningStats(Function):
    @staticmethod
    def forward(ctx, x):
        mn, mx = torch.aminmax(x, dim=1, keepdim=True)
        v, m = torch.var_mean(x, dim=0)
        ctx.save_for_backward(mx - mn)
        return (x - mn) / (mx - mn + 1e-3), v, m, x.amax(dim=1)

    @staticmethod
    def backward(ctx, g, *_):
        return g / (ctx.saved_tensors[0] + 1e-3)


@case(lambda n: (rand(n, 4), torch.arange(4.0)))
class LinspaceEye(Function):
    @staticmethod
    def forward(ctx, x, w):
        pos = torch.arange(x.shape[0], dtype=x.dtype, device=x.device) / max(x.shape[0], 1)
        eye = torch.eye(4, dtype=x.dtype)
        lin = torch.linspace(0, 1, 4, dtype=x.dtype)
        inv = 1.0 / (10000 ** (torch.arange(0, 4, 2, dtype=x.dtype) / 4))
        ang = torch.outer(pos, inv)
        emb = torch.cat([ang.sin(), ang.cos()], -1)
        return x + eye.sum(0) * lin * w + emb

    @staticmethod
    def backward(ctx, g):
        return g, (g * torch.linspace(0, 1, 4, dtype=g.dtype)).sum(0)


@case(lambda n: (rand(n, 4), rand(n, 4)), library=True)
class Comparisons(Function):
    @staticmethod
    def forward(ctx, a, b):
        m = (a > b) & (a > 0) | ~(b < 0)
        n_ = torch.isclose(a, b, atol=0.5)
        k = torch.isfinite(a)
        s = torch.signbit(a)
        c = torch.copysign(a, b)
        h = torch.heaviside(a, b)
        ctx.save_for_backward(m)
        return torch.where(m, a, b) + c + h, n_, k ^ s, a.argsort(1)

    @staticmethod
    def backward(ctx, g, *_):
        (m,) = ctx.saved_tensors
        return torch.where(m, g, 0), torch.where(m, 0, g)


@case(lambda n: (rand(n, 5),))
class GumbelHard(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.softmax(-1)
        idx = y.max(-1, keepdim=True)[1]
        hard = torch.zeros_like(x).scatter_(-1, idx, 1.0)
        ctx.save_for_backward(y)
        return hard - y + y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return y * (g - (g * y).sum(-1, keepdim=True))


@case(lambda n: (rand(n, 16),), library=True)
class GroupedQuant(Function):
    @staticmethod
    def forward(ctx, x):
        b = x.view(-1, 4)
        s = b.abs().amax(-1, keepdim=True).clamp_min(1e-6)
        q = torch.round(b / s * 7)
        return (q * s / 7).view_as(x), s.squeeze(-1)

    @staticmethod
    def backward(ctx, g, gs):
        return g + gs.repeat_interleave(4).view_as(g)


@case(lambda n: (rand(n, 3, 4, 5), rand(4)))
class NormChannels(Function):
    @staticmethod
    def forward(ctx, x, w):
        m = x.mean(dim=2, keepdim=True)
        v = ((x - m) ** 2).mean(dim=2, keepdim=True)
        xh = (x - m) * torch.rsqrt(v + 1e-6)
        ctx.save_for_backward(xh, v, w)
        return xh * w[:, None]

    @staticmethod
    def backward(ctx, g):
        xh, v, w = ctx.saved_tensors
        gw = g * w.view(1, 1, -1, 1)
        dx = (gw - gw.mean(2, keepdim=True) - xh * (gw * xh).mean(2, keepdim=True)) * torch.rsqrt(v + 1e-6)
        return dx, (g * xh).sum((0, 1, 3))


@case(lambda n: (rand(n, 12), rand(12), rand(12)))
class InstanceRms(Function):
    @staticmethod
    def forward(ctx, x, w, b):
        h = x.view(x.shape[0], 3, 4)
        r = (h * h).mean(-1, keepdim=True).add(1e-5).rsqrt()
        ctx.save_for_backward(x, w, r)
        return torch.addcmul(b, (h * r).view(x.shape[0], 12), w)

    @staticmethod
    def backward(ctx, g):
        x, w, r = ctx.saved_tensors
        n = x.shape[0]
        h = x.view(n, 3, 4)
        gw = (g * w).view(n, 3, 4)
        dx = r * gw - h * r.pow(3) * (gw * h).mean(-1, keepdim=True)
        return dx.view(n, 12), (g * (h * r).view(n, 12)).sum(0), g.sum(0)


@case(lambda n: (rand(n, 3),), library=True)
class NestedHelper(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Silu.apply(x) + x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            z = y * y.sigmoid() + y
        return torch.autograd.grad(z, y, g)[0]


@case(lambda n: (rand(n, 3),))
class NoSaved(Function):
    @staticmethod
    def forward(ctx, x):
        return torch.zeros_like(x), torch.ones(3, dtype=x.dtype), torch.full((2,), 7)

    @staticmethod
    def backward(ctx, g, h, _):
        return g + h


@case(lambda n: (rand(n, 4), rand(n, 4)))
class Dirty(Function):
    @staticmethod
    def forward(ctx, x, y):
        z = x.clone()
        z.add_(y)
        ctx.save_for_backward(z)
        return z

    @staticmethod
    def backward(ctx, g):
        (z,) = ctx.saved_tensors
        return g * z.cos(), g.clone().mul_(2)


@case(lambda n: (rand(n, 4),))
class MultiReturnSame(Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        return y, y.t(), y[:, :2]

    @staticmethod
    def backward(ctx, a, b, c):
        return 2 * (a + b.t() + F.pad(c, (0, 2)))


@case(lambda n: (rand(n, 4),))
class IntMath(Function):
    @staticmethod
    def forward(ctx, x):
        i = torch.arange(x.shape[0]).unsqueeze(1) * 4 + torch.arange(4)
        j = i**2 % 7
        ctx.save_for_backward(j)
        return x * j, j.sum(), j.float().mean(), i.max()

    @staticmethod
    def backward(ctx, g, a, b, c):
        (j,) = ctx.saved_tensors
        return g * j


@case(lambda n: (rand(n, 4).to(torch.float32),), library=True)
class LogSumExpPairs(Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.logaddexp(x[:, None, :], x[None, :, :])
        ctx.save_for_backward(x)
        return y.sum((0, 1)), torch.logcumsumexp(x, 0), torch.cummax(x, 1).values

    @staticmethod
    def backward(ctx, g, h, k):
        (x,) = ctx.saved_tensors
        return g.expand_as(x) + h * x + k


@case(lambda n: (positive(n, 4),), library=True)
class SpecialFns(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (
            torch.lgamma(x)
            + torch.special.expit(x)
            + torch.xlogy(x, x)
            + torch.special.entr(x)
            + x.exp().log10()
            + torch.erfc(x)
        )

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (
            torch.digamma(x)
            + torch.special.erfinv(torch.tanh(x * 0.1))
            + torch.pow(2.0, x)
            + x**1.7
            + x**-1.5
            + x**4
            + torch.erfc(x)
            + torch.special.log_ndtr(x)
            + torch.i0(x)
        )
