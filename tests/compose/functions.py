"""Functions as their authors write them, each with the same mathematics in plain torch, for every composition.

`plain` is the oracle: its derivatives, of any order up to `order`, are what the class's own backward (or jvp) says.
Where that is not the derivative of forward (straight-through, wrong on purpose), it is built with `routed`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

import fusegrad

Tensor = torch.Tensor


class Numbers:
    """A seeded source of arguments in float64."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(1000 + seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) + 0.5

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def complex(self, *shape: int) -> Tensor:
        return torch.complex(self(*shape), self(*shape))


@dataclass(frozen=True)
class Case:
    """A class, how to call it, and what is known about it."""

    cls: Any
    make: Callable[[Numbers], tuple[Any, ...]]
    plain: Callable[..., Any] | None = None
    order: int = 3
    """Up to which order the derivatives of `plain` are those of the class."""
    true: bool = True
    """Whether the rules are the derivatives of forward, so that finite differences find them."""
    deterministic: bool = True
    fails: dict[str, str] = field(default_factory=dict)
    """Compositions that are known not to work, with the reason."""

    @property
    def name(self) -> str:
        return self.cls.__name__  # type: ignore[no-any-return]

    @property
    def wrote(self) -> set[str]:
        """The rules that the author wrote."""
        rules = ("setup_context", "backward", "jvp", "vmap")
        return {r for r in rules if getattr(self.cls, r) is not getattr(Function, r)}


CASES: list[Case] = []


def case(make: Callable[[Numbers], tuple[Any, ...]], plain: Callable[..., Any] | None = None, **facts: Any) -> Any:
    """Put the class into the table."""

    def add(cls: Any) -> Any:
        CASES.append(Case(cls, make, plain, **facts))
        return cls

    return add


def routed(value: Tensor, route: Tensor) -> Tensor:
    """The value, with the derivatives of `route`."""
    return value.detach() + route - route.detach()


# ------------------------------------------------------------------------------------------------ activations
@case(lambda r: (r(2, 3),), lambda x: F.gelu(x, approximate="tanh"))
class GeluTanh(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        t = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
        return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner)


@case(lambda r: (r(3),), F.mish)
class Mish(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * torch.tanh(F.softplus(x))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        t = torch.tanh(F.softplus(x))
        return g * (t + x * (1 - t * t) * torch.sigmoid(x))


@case(lambda r: (r(3), 2.0, 20.0), F.softplus)
class Softplus(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, beta, threshold):
        return torch.where(x * beta > threshold, x, torch.log1p(torch.exp(x * beta)) / beta)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.beta, ctx.threshold = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.where(x * ctx.beta > ctx.threshold, g, g * torch.sigmoid(x * ctx.beta)), None, None


@case(lambda r: (r(2, 3), r.positive(3)), lambda x, a: x + torch.sin(a * x) ** 2 / a)
class Snake(Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.save_for_backward(x, alpha)
        return x + torch.sin(alpha * x) ** 2 / alpha

    @staticmethod
    def backward(ctx, g):
        x, alpha = ctx.saved_tensors
        s, c = torch.sin(alpha * x), torch.cos(alpha * x)
        grad_alpha = g * (2 * s * c * x / alpha - s**2 / alpha**2)
        return g * (1 + 2 * s * c), grad_alpha.sum(0)


@case(lambda r: (r(4),), lambda x: x.relu() ** 2)
class SquaredRelu(Function):
    @staticmethod
    def forward(ctx, x):
        kept = x.clamp_min(0)
        ctx.save_for_backward(kept)
        return kept * kept

    @staticmethod
    def backward(ctx, g):
        (kept,) = ctx.saved_tensors
        return 2 * g * kept


@case(lambda r: (3 * r(4),), F.hardswish)
class HardSwish(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * (x + 3).clamp(0, 6) / 6

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        inside = torch.where(x.abs() < 3, (2 * x + 3) / 6, torch.zeros_like(x))
        return g * torch.where(x >= 3, torch.ones_like(x), inside)


# ------------------------------------------------------------------------------------------------ losses
@case(lambda r: (r(2, 4), r.integers(4, 2)), F.cross_entropy)
class CrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, target):
        shifted = logits - logits.amax(-1, keepdim=True)
        logp = shifted - shifted.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(logp, target)
        return -logp.gather(1, target.unsqueeze(1)).mean()

    @staticmethod
    def backward(ctx, g):
        logp, target = ctx.saved_tensors
        hot = torch.arange(logp.shape[1], device=logp.device) == target.unsqueeze(1)
        return (logp.exp() - hot.to(logp.dtype)) * (g / logp.shape[0]), None


def _huber(x, y, delta):
    """In the operations of the definition: the derivative of torch's own loss has no forward mode."""
    e = (x - y).abs()
    return torch.where(e <= delta, 0.5 * e.square(), delta * (e - 0.5 * delta)).mean()


@case(lambda r: (2 * r(4), r(4), 1.0), _huber)
class Huber(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, y, delta):
        e = x - y
        small = e.abs() <= delta
        return torch.where(small, 0.5 * e * e, delta * (e.abs() - 0.5 * delta)).mean()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, y, ctx.delta = inputs
        ctx.save_for_backward(x, y)

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        step = g * (x - y).clamp(-ctx.delta, ctx.delta) / x.numel()
        return step, -step, None


@case(lambda r: (r(2, 4), r(2, 4)), lambda p, q: F.kl_div(p, q, reduction="batchmean", log_target=True))
class KlDiv(Function):
    @staticmethod
    def forward(logp, logq):
        return (logq.exp() * (logq - logp)).sum() / logp.shape[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        logp, logq = ctx.saved_tensors
        q = logq.exp() * (g / logp.shape[0])
        return -q, q * (logq - logp + 1)


@case(lambda r: (r(2, 3), r(2, 3)), lambda a, b: (1 - F.cosine_similarity(a, b, -1, 0.0)).sum())
class CosineLoss(Function):
    @staticmethod
    def forward(ctx, a, b):
        na, nb = a.norm(dim=-1, keepdim=True), b.norm(dim=-1, keepdim=True)
        ua, ub = a / na, b / nb
        ctx.save_for_backward(ua, ub, na, nb)
        return (1 - (ua * ub).sum(-1)).sum()

    @staticmethod
    def backward(ctx, g):
        ua, ub, na, nb = ctx.saved_tensors
        cos = (ua * ub).sum(-1, keepdim=True)
        return -g * (ub - cos * ua) / na, -g * (ua - cos * ub) / nb


@case(lambda r: (r(4), r.positive(4) / 2), F.binary_cross_entropy_with_logits)
class BceWithLogits(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return (x.clamp_min(0) - x * y + torch.log1p(torch.exp(-x.abs()))).mean()

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * (torch.sigmoid(x) - y) / x.numel(), -g * x / x.numel()


# ------------------------------------------------------------------------------------------------ norms
def _rms(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """Not F.rms_norm: torch's linearize of that gives something else at every call."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w


@case(lambda r: (r(2, 4), r(4), 1e-6), _rms)
class RMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    def backward(ctx, g):
        x, weight, rstd = ctx.saved_tensors
        x_hat = x * rstd
        scaled = g * weight
        grad_x = rstd * (scaled - x_hat * (scaled * x_hat).mean(-1, keepdim=True))
        return grad_x, (g * x_hat).sum(0), None


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Not F.layer_norm, whose second derivative by weight and then x is wrong in torch 2.13."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w + b


@case(lambda r: (r(2, 4), r(4), r(4)), _layer_norm)
class LayerNorm(Function):
    @staticmethod
    def forward(ctx, x, w, b):
        centred = x - x.mean(-1, keepdim=True)
        rstd = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
        x_hat = centred * rstd
        ctx.save_for_backward(x_hat, rstd, w)
        return x_hat * w + b

    @staticmethod
    def backward(ctx, g):
        x_hat, rstd, w = ctx.saved_tensors
        gw = g * w
        along, mean = (gw * x_hat).mean(-1, keepdim=True), gw.mean(-1, keepdim=True)
        return (gw - x_hat * along - mean) * rstd, (g * x_hat).sum(0), g.sum(0)


def _rms_with_scale(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return _rms(x, w), (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt().detach()


@case(lambda r: (r(2, 4), r(4)), _rms_with_scale, order=1, true=False)
class RmsNormWithScale(Function):
    """Hands out rstd, marked non-differentiable: it does not move, and a second order through it is cut."""

    @staticmethod
    def forward(x, w, eps=1e-6):
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return x * rstd * w, rstd

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], inputs[1], output[1])

    @staticmethod
    def backward(ctx, g, _):
        x, w, rstd = ctx.saved_tensors
        x_hat, gw = x * rstd, g * w
        return (gw - x_hat * (gw * x_hat).mean(-1, keepdim=True)) * rstd, (g * x_hat).sum(0), None


@case(lambda r: (r(2, 3),), lambda x: x / x.norm(dim=-1, keepdim=True))
class L2Normalize(Function):
    @staticmethod
    def forward(ctx, x):
        norm = x.pow(2).sum(-1, keepdim=True).sqrt()
        y = x / norm
        ctx.save_for_backward(y, norm)
        return y

    @staticmethod
    def backward(ctx, g):
        y, norm = ctx.saved_tensors
        return (g - y * (g * y).sum(-1, keepdim=True)) / norm


@case(lambda r: (r(3, 2), r(3, 1)), lambda v, s: v * s / v.norm(dim=1, keepdim=True))
class WeightNorm(Function):
    @staticmethod
    def forward(ctx, v, s):
        ctx.save_for_backward(v, s)
        return v * (s / v.norm(dim=1, keepdim=True))

    @staticmethod
    def backward(ctx, g):
        v, s = ctx.saved_tensors
        norm = v.norm(dim=1, keepdim=True)
        grad_s = (g * v).sum(1, keepdim=True) / norm
        return s / norm * (g - v * grad_s / norm), grad_s


# ------------------------------------------------------------------------------------------------ straight through
@case(lambda r: (2 * r(4),), lambda x: routed(x.round(), x), true=False)
class RoundThrough(Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


@case(lambda r: (r(5),), lambda x: routed(x.sign(), F.hardtanh(x)), true=False)
class SignThrough(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() <= 1, g, torch.zeros_like(g))


def _lsq(x: Tensor, step: Tensor, low: int, high: int) -> Tensor:
    scale = 1 / math.sqrt(x.numel() * high)
    step = routed(step, step * scale)
    v = (x / step).clamp(low, high)
    return routed(v.round(), v) * step


@case(lambda r: (r(6), r.positive() / 2, -2, 1), _lsq, order=1, true=False)
class LearnedStep(Function):
    """LSQ (Esser et al. 2020): rounding is straight-through, the gradient of the step is scaled."""

    @staticmethod
    def forward(ctx, x, step, low, high):
        q = x / step
        ctx.save_for_backward(q)
        ctx.range = low, high
        return q.round().clamp(low, high) * step

    @staticmethod
    def backward(ctx, g):
        (q,) = ctx.saved_tensors
        low, high = ctx.range
        inside = (q > low) & (q < high)
        by_step = torch.where(inside, q.round() - q, q.clamp(low, high))
        scale = 1 / math.sqrt(q.numel() * high)
        return g * inside, (g * by_step).sum() * scale, None, None


@case(lambda r: (r(2, 4),), lambda x: routed(_fake_int8(x), x), true=False)
class FakeInt8(Function):
    @staticmethod
    def forward(x):
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round().clamp(-128, 127) * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g.clone()


def _fake_int8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-128, 127) * scale


@case(lambda r: (r(4), 0.5), lambda x, k: routed(x, -k * x), true=False)
class GradientReversal(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, strength):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.strength = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return -ctx.strength * g, None


@case(
    lambda r: (r(5), 0.3),
    lambda v, theta: routed((v > theta).to(v.dtype), torch.atan(math.pi * (v - theta)) / math.pi),
    true=False,
)
class Spike(Function):
    """A spiking neuron with the arctangent surrogate."""

    @staticmethod
    def forward(ctx, v, threshold):
        ctx.save_for_backward(v - threshold)
        return (v > threshold).to(v.dtype)

    @staticmethod
    def backward(ctx, g):
        (u,) = ctx.saved_tensors
        return g / (1 + (math.pi * u) ** 2), None


# ------------------------------------------------------------------------------------------------ gather, scatter
@case(lambda r: (r.integers(5, 3), r(5, 2)), lambda i, w: w[i])
class Embedding(Function):
    @staticmethod
    def forward(ctx, index, weight):
        ctx.save_for_backward(index)
        ctx.rows = weight.shape[0]
        return weight[index]

    @staticmethod
    def backward(ctx, g):
        (index,) = ctx.saved_tensors
        return None, g.new_zeros(ctx.rows, g.shape[-1]).index_add(0, index, g)


@case(lambda r: (r(2, 5), r.integers(5, 2, 3)), lambda x, i: x.gather(1, i))
class GatherColumns(Function):
    @staticmethod
    def forward(x, index):
        return x.gather(1, index)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])
        ctx.columns = inputs[0].shape[1]

    @staticmethod
    def backward(ctx, g):
        (index,) = ctx.saved_tensors
        return g.new_zeros(g.shape[0], ctx.columns).scatter_add(1, index, g), None


@case(lambda r: (r(4, 2), r.integers(3, 4)), lambda x, i: x.new_zeros(3, 2).index_add(0, i, x))
class SegmentSum(Function):
    @staticmethod
    def forward(ctx, x, segment):
        ctx.save_for_backward(segment)
        return x.new_zeros(3, x.shape[1]).index_add(0, segment, x)

    @staticmethod
    def backward(ctx, g):
        (segment,) = ctx.saved_tensors
        return g.index_select(0, segment), None


@case(lambda r: (r(2, 3), r(2, 3) > 0, -1.0), lambda x, m, v: x.masked_fill(m, v))
class MaskedFill(Function):
    @staticmethod
    def forward(ctx, x, mask, value):
        ctx.save_for_backward(mask)
        return x.masked_fill(mask, value)

    @staticmethod
    def backward(ctx, g):
        (mask,) = ctx.saved_tensors
        return g.masked_fill(mask, 0.0), None, None


# ------------------------------------------------------------------------------------------------ cumulative
@case(lambda r: (r(2, 4),), lambda x: x.cumsum(-1))
class CumSum(Function):
    @staticmethod
    def forward(ctx, x):
        return x.cumsum(-1)

    @staticmethod
    def backward(ctx, g):
        return g.flip(-1).cumsum(-1).flip(-1)


@case(lambda r: (r.positive(4),), lambda x: x.cumprod(-1))
class CumProd(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.cumprod(-1)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return (g * y).flip(-1).cumsum(-1).flip(-1) / x


@case(lambda r: (r(2, 4),), lambda x: x.exp().cumsum(-1).log())
class LogCumSumExp(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp().cumsum(-1).log()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return (g * torch.exp(-y)).flip(-1).cumsum(-1).flip(-1) * x.exp()


# ------------------------------------------------------------------------------------------------ attention
@case(lambda r: (r(2, 3),), lambda x: x.softmax(-1))
class Softmax(Function):
    @staticmethod
    def forward(ctx, x):
        e = torch.exp(x - x.amax(-1, keepdim=True))
        y = e / e.sum(-1, keepdim=True)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return y * (g - (g * y).sum(-1, keepdim=True))


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


@case(lambda r: (r(2, 3), r(3, 3), r(3, 2)), _attention)
class Attention(Function):
    @staticmethod
    def forward(ctx, q, k, v):
        p = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v, p = ctx.saved_tensors
        gp = g @ v.mT
        gs = p * (gp - (gp * p).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        return gs @ k, gs.mT @ q, p.mT @ g


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    late = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.mT).masked_fill(late, float("-inf")).softmax(-1) @ v


@case(lambda r: (r(3, 2), r(3, 2), r(3, 2)), _causal)
class CausalAttention(Function):
    """Keeps the output and the log of the sum, and computes the probabilities again."""

    @staticmethod
    def forward(ctx, q, k, v):
        i = torch.arange(q.shape[-2], device=q.device)
        s = (q @ k.mT).masked_fill(i[None, :] > i[:, None], float("-inf"))
        lse = torch.logsumexp(s, -1, keepdim=True)
        o = torch.exp(s - lse) @ v
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, g):
        q, k, v, o, lse = ctx.saved_tensors
        i = torch.arange(q.shape[-2], device=q.device)
        p = torch.exp((q @ k.mT - lse).masked_fill(i[None, :] > i[:, None], float("-inf")))
        ds = p * (g @ v.mT - (g * o).sum(-1, keepdim=True))
        return ds @ k, ds.mT @ q, p.mT @ g


# ------------------------------------------------------------------------------------------------ sort, top-k
@case(lambda r: (r(2, 4),), lambda x: x.sort(-1)[0])
class SortRows(Function):
    @staticmethod
    def forward(ctx, x):
        y, order = x.sort(-1)
        ctx.save_for_backward(order)
        return y

    @staticmethod
    def backward(ctx, g):
        (order,) = ctx.saved_tensors
        return torch.zeros_like(g).scatter(-1, order, g)


@case(lambda r: (r(2, 5), 2), lambda x, k: x.topk(k, -1))
class TopK(Function):
    @staticmethod
    def forward(ctx, x, k):
        values, index = x.topk(k, -1)
        ctx.save_for_backward(index)
        ctx.columns = x.shape[-1]
        ctx.mark_non_differentiable(index)
        return values, index

    @staticmethod
    def backward(ctx, g, _):
        (index,) = ctx.saved_tensors
        return g.new_zeros(*g.shape[:-1], ctx.columns).scatter(-1, index, g), None


@case(lambda r: (r(2, 4),), lambda x: x.max(-1))
class MaxAlong(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        values, index = x.max(-1)
        return values, index

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[1])
        ctx.columns = inputs[0].shape[-1]

    @staticmethod
    def backward(ctx, g, _):
        (index,) = ctx.saved_tensors
        hot = torch.arange(ctx.columns, device=g.device) == index.unsqueeze(-1)
        return g.unsqueeze(-1) * hot


# ------------------------------------------------------------------------------------------------ complex
@case(lambda r: (r.complex(3),), lambda z: z.real**2 + z.imag**2)
class AbsSquared(Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return (z * z.conj()).real

    @staticmethod
    def backward(ctx, g):
        (z,) = ctx.saved_tensors
        return 2 * g * z


@case(lambda r: (r.complex(3), r.complex(3)), lambda a, b: a * b)
class ComplexProduct(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b.conj(), g * a.conj()


@case(lambda r: (r.complex(3), r(3)), lambda z, t: z * torch.complex(t.cos(), t.sin()))
class Phase(Function):
    """A rotation by real angles: a complex and a real gradient."""

    @staticmethod
    def forward(ctx, z, angle):
        turn = torch.complex(angle.cos(), angle.sin())
        ctx.save_for_backward(z, turn)
        return z * turn

    @staticmethod
    def backward(ctx, g):
        z, turn = ctx.saved_tensors
        return g * turn.conj(), (g.conj() * 1j * z * turn).real


# ------------------------------------------------------------------------------------------------ random
@case(lambda r: (r(4), 0.5), deterministic=False, true=False)
class Dropout(Function):
    """torch's own generator: the mask is saved."""

    @staticmethod
    def forward(ctx, x, p):
        mask = (torch.rand_like(x) >= p) / (1 - p)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, g):
        (mask,) = ctx.saved_tensors
        return g * mask, None


@case(lambda r: (r(4),), deterministic=False, true=False)
class Jitter(Function):
    """Noise beside the gradient's way."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x + torch.randn_like(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * g * x


def _seeded_mask(x: Tensor, seed: Tensor, p: float) -> Tensor:
    return (fusegrad.random.uniform(x.shape, seed, like=x) >= p).to(x.dtype) / (1 - p)


@case(lambda r: (r(2, 4), torch.tensor(7), 0.25), lambda x, s, p: x * _seeded_mask(x, s, p), true=False)
class SeededDropout(Function):
    """The mask is drawn again in backward."""

    @staticmethod
    def forward(ctx, x, seed, p):
        ctx.save_for_backward(seed)
        ctx.p = p
        keep = fusegrad.random.uniform(x.shape, seed, like=x) >= p
        return x * keep / (1 - p)

    @staticmethod
    def backward(ctx, g):
        (seed,) = ctx.saved_tensors
        keep = fusegrad.random.uniform(g.shape, seed, like=g) >= ctx.p
        return g * keep / (1 - ctx.p), None, None


@case(
    lambda r: (3 * r(4), 3),
    lambda x, seed: routed((x + fusegrad.random.uniform(x.shape, seed, like=x)).floor(), x),
    true=False,
)
class StochasticRound(Function):
    @staticmethod
    def forward(x, seed):
        return torch.floor(x + fusegrad.random.uniform(x.shape, seed, like=x))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g * 1, None


# ------------------------------------------------------------------------------------------------ matrix products
@case(lambda r: (r(2, 3), r(4, 3), r(4)), lambda x, w, b: F.linear(x, w, b).relu())
class LinearRelu(Function):
    @staticmethod
    def forward(ctx, x, w, b):
        y = torch.relu(x @ w.t() + b)
        ctx.save_for_backward(x, w, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, w, y = ctx.saved_tensors
        g = g * (y > 0)
        return g @ w, g.t() @ x, g.sum(0)


@case(lambda r: (r(3), r(3, 2), r(2)), lambda a, w, b: a @ w @ b)
class Bilinear(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a, w, b):
        return a @ w @ b

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        a, w, b = ctx.saved_tensors
        return g * (w @ b), g * torch.outer(a, b), g * (a @ w)


@case(lambda r: (r(2, 3), r(3, 2), r(2, 3), 0.5), lambda x, a, b, k: x + k * (x @ a @ b))
class LowRank(Function):
    @staticmethod
    def forward(ctx, x, a, b, scale):
        h = x @ a
        ctx.save_for_backward(x, a, b, h)
        ctx.scale = scale
        return x + scale * (h @ b)

    @staticmethod
    def backward(ctx, g):
        x, a, b, h = ctx.saved_tensors
        gs = ctx.scale * g
        gh = gs @ b.t()
        return g + gh @ a.t(), x.t() @ gh, h.t() @ gs, None


# ------------------------------------------------------------------------------------------------ some rules only
@case(lambda r: (r(3), r(3)), lambda x, y: x.sin() * y)
class ForwardOnly(Function):
    @staticmethod
    def forward(ctx, x, y):
        return x.sin() * y


@case(lambda r: (r(2, 3), r(3)), lambda x, w: ((x * w).tanh(), (x * w).sum(-1)))
class ForwardOnlyTwoOutputs(Function):
    @staticmethod
    def forward(x, w):
        y = x * w
        return torch.tanh(y), y.sum(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


@case(lambda r: (r(3),), lambda x: x**3)
class JvpOnly(Function):
    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * t


@case(
    lambda r: (r(3), r(3)),
    lambda x, y: routed(torch.maximum(x, y), torch.logaddexp(x, y)),
    true=False,
)
class JvpOnlyMaximum(Function):
    """A smoothed tangent: not the derivative of forward."""

    @staticmethod
    def forward(x, y):
        return torch.maximum(x, y)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx, tx, ty):
        x, y = ctx.saved_tensors
        share = torch.sigmoid(x - y)
        return share * tx + (1 - share) * ty


# ------------------------------------------------------------------------------------------------ all rules
@case(lambda r: (r(3),), torch.sinh)
class AllRules(Function):
    @staticmethod
    def forward(x):
        return torch.sinh(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.cosh(x)

    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * torch.cosh(x)

    @staticmethod
    def vmap(info, in_dims, x):
        return AllRules.apply(x.movedim(in_dims[0], 0)), 0


@case(lambda r: (r(2, 3), r(3)), lambda x, w: (x * w).exp())
class BackwardAndJvp(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return torch.exp(x * w)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx, g):
        x, w, y = ctx.saved_tensors
        return g * y * w, (g * y * x).sum(0)

    @staticmethod
    def jvp(ctx, tx, tw):
        x, w, y = ctx.saved_tensors
        return y * (tx * w + x * tw)


# ------------------------------------------------------------------------------------------------ several outputs
@case(lambda r: (r(3),), lambda x: (x.sin(), x.cos()))
class SinCos(Function):
    @staticmethod
    def forward(ctx, x):
        s, c = x.sin(), x.cos()
        ctx.save_for_backward(s, c)
        return s, c

    @staticmethod
    def backward(ctx, gs, gc):
        s, c = ctx.saved_tensors
        return gs * c - gc * s


@case(lambda r: (r(3),), lambda x: (x**3, 3 * x**2))
class Cube(Function):
    """The documentation's MyCube."""

    @staticmethod
    def forward(x):
        return x**3, 3 * x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx, g, g_dx):
        x, dx = ctx.saved_tensors
        return g * dx + g_dx * 6 * x


@case(lambda r: (r(2, 4), "mean"), lambda x, how: (x.mean(-1), x.var(-1, correction=0)))
class Moments(Function):
    @staticmethod
    def forward(ctx, x, how):
        total = x.mean(-1, keepdim=True) if how == "mean" else x.sum(-1, keepdim=True)
        centred = x - total
        ctx.save_for_backward(centred)
        ctx.n = x.shape[-1]
        return total.squeeze(-1), (centred * centred).mean(-1)

    @staticmethod
    def backward(ctx, g_mean, g_var):
        (centred,) = ctx.saved_tensors
        return (g_mean.unsqueeze(-1) + 2 * centred * g_var.unsqueeze(-1)) / ctx.n, None


@case(lambda r: (r(3), None, 2), lambda x, shift, n: x**n)
class OptionalShift(Function):
    @staticmethod
    def forward(ctx, x, shift, power):
        ctx.save_for_backward(x, shift)
        ctx.power = power
        return (x if shift is None else x + shift) ** power

    @staticmethod
    def backward(ctx, g):
        x, shift = ctx.saved_tensors
        base = x if shift is None else x + shift
        step = g * ctx.power * base ** (ctx.power - 1)
        return step, None if shift is None else step, None


# ------------------------------------------------------------------------------------------------ nested
@case(lambda r: (r(2, 3), r(2, 3)), lambda a, b: (a * b).softmax(-1).sin())
class NestedForward(Function):
    """Calls another Function in forward, and its formula in backward."""

    @staticmethod
    def forward(ctx, a, b):
        y = Softmax.apply(a * b)
        ctx.save_for_backward(a, b, y)
        return y.sin()

    @staticmethod
    def backward(ctx, g):
        a, b, y = ctx.saved_tensors
        h = g * y.cos()
        h = y * (h - (h * y).sum(-1, keepdim=True))
        return h * b, h * a


@case(lambda r: (r(3),), lambda x: x.sin())
class NestedBackward(Function):
    """Its gradient is a Function whose own derivative matters at second order."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return Cosine.apply(x) * g


class Cosine(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return -g * x.sin()


# ------------------------------------------------------------------------------------------------ wrong on purpose
@case(lambda r: (r(3),), lambda x: routed(x.sin(), 50 * x * x), true=False)
class Wrong(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 100 * g * x


@case(lambda r: (r(3), r(3)), lambda x, y: routed(x * y, 3 * x + 5 * y * y), true=False)
class WrongTwice(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, y):
        return x * y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return 3 * g, 10 * g * y
