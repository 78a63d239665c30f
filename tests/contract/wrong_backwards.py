"""Functions whose backward is deliberately wrong, each with the gradient that it must therefore give.

`@wrong(gradient, *arguments)` states the wrong gradient apart from the class: from the cotangents of the float outputs
and the arguments to one gradient per float argument (None: nothing, zeros). It is plain mathematics on float64 tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Tensor = torch.Tensor
Draw = Callable[[torch.Generator], Any]


@dataclass(frozen=True)
class Wrong:
    """A class, how its arguments are drawn, and the gradient that it gives. linear: in the cotangents."""

    cls: type
    draws: tuple[Any, ...]
    gradient: Callable[..., Any]
    linear: bool = True

    def arguments(self, seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        return [d(generator) if callable(d) else d for d in self.draws]

    def gradients(self, cotangents: Any, args: Any) -> list[Tensor]:
        """One per float tensor argument."""
        stated = self.gradient(*cotangents, *args)
        stated = stated if isinstance(stated, tuple) else (stated,)
        moving = [a for a in args if is_float(a)]
        return [torch.zeros_like(a) + (0 if s is None else s) for s, a in zip(stated, moving, strict=True)]


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


WRONGS: dict[str, Wrong] = {}


def wrong(gradient: Callable[..., Any], *draws: Any, linear: bool = True) -> Callable[[type], type]:
    def register(cls: type) -> type:
        WRONGS[cls.__name__] = Wrong(cls, draws, gradient, linear)
        return cls

    return register


def F(*shape: int) -> Draw:
    """Floats of either sign, none near zero."""
    return lambda g: (torch.rand(shape, generator=g, dtype=torch.float64) + 0.25) * torch.where(
        torch.rand(shape, generator=g) < 0.5, -1.0, 1.0
    ).to(torch.float64)


def P(*shape: int) -> Draw:
    """Positive floats."""
    return lambda g: torch.rand(shape, generator=g, dtype=torch.float64) + 0.5


def Z(high: int, *shape: int) -> Draw:
    """Integers."""
    return lambda g: torch.randint(high, shape, generator=g)


# ------------------------------------------------------------------ elementwise, ctx style
@wrong(lambda g, x: 100 * g * x, F(4))
class SineTimesHundred(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 100 * g * x


@wrong(lambda g, x: -g, F(2, 3))
class Reversal(Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return -g


@wrong(lambda g, x: -g, F(2, 3))
class ReversalOfView(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.neg()


@wrong(lambda g, x: g, F(5))
class StraightThroughRound(Function):
    @staticmethod
    def forward(ctx, x):
        return x.mul(3).round()

    @staticmethod
    def backward(ctx, g):
        return g


@wrong(lambda g, x: g * (x.abs() <= 0.75), F(7))
class ClippedStraightThrough(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() <= 0.75, g, torch.zeros_like(g))


@wrong(lambda g, x: g / (1 + 10 * x.abs()) ** 2, F(6))
class SurrogateSpike(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g / (1 + 10 * x.abs()) ** 2


@wrong(lambda g, x, factor: g * factor, F(3), 7.5)
class ScaledIdentity(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None


@wrong(lambda g, x: torch.zeros_like(x), F(3))
class Stopped(Function):
    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        return torch.zeros_like(g)


@wrong(lambda g, x: None, F(3))
class GivesNone(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 4

    @staticmethod
    def backward(ctx, g):
        return None


@wrong(lambda g, x: g * x.exp() * 2, F(3, 2))
class ExpTwice(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y + g * y


@wrong(lambda g, x: g * torch.where(x > 0, 1.0, 0.3), F(8))
class LeakyBackwardOfRelu(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x > 0)
        return x.relu()

    @staticmethod
    def backward(ctx, g):
        (positive,) = ctx.saved_tensors
        return torch.where(positive, g, 0.3 * g)


@wrong(lambda g, x: g * torch.sigmoid(x), F(3, 3))
class SiluByItsGate(Function):
    @staticmethod
    def forward(ctx, x):
        gate = torch.sigmoid(x)
        ctx.gate = gate
        return x * gate

    @staticmethod
    def backward(ctx, g):
        return g * ctx.gate


@wrong(lambda g, x: g * (1 - x.tanh()), F(4))
class TanhForgetsTheSquare(Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y)


@wrong(lambda g, x: g * 0.5 * math.pi, P(5))
class ConstantSlope(Function):
    @staticmethod
    def forward(ctx, x):
        return x.sqrt().log1p()

    @staticmethod
    def backward(ctx, g):
        return g * (0.5 * math.pi)


@wrong(lambda g, x, n: n * g * x, F(4), 3)
class PowerOfOneLess(Function):
    @staticmethod
    def forward(ctx, x, n):
        ctx.save_for_backward(x)
        ctx.n = n
        return x**n

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return ctx.n * g * x, None


@wrong(lambda g, x: g.flip(0), F(5))
class Mirrored(Function):
    @staticmethod
    def forward(ctx, x):
        return x + 1

    @staticmethod
    def backward(ctx, g):
        return g.flip(0)


@wrong(lambda g, x: g * torch.arange(4.0, dtype=torch.float64), F(4))
class Ramp(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * torch.arange(g.shape[0], dtype=g.dtype, device=g.device)


@wrong(lambda g, x: g.cumsum(0), F(6))
class AccumulatedIdentity(Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.cumsum(0)


@wrong(lambda g, x: g - g.mean(), F(3, 4))
class CentredGradient(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return g - g.mean()


@wrong(lambda g, x: g.roll(1, -1), F(2, 5))
class Shifted(Function):
    @staticmethod
    def forward(ctx, x):
        return x.negative()

    @staticmethod
    def backward(ctx, g):
        return torch.cat([g[..., -1:], g[..., :-1]], -1)


# ------------------------------------------------------------------ elementwise, setup_context style
@wrong(lambda g, x: 3 * g * x, F(4))
class CubeTimesX(Function):
    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g * x


@wrong(lambda g, x, low, high: g, F(6), -0.5, 0.5)
class ClampPassesAll(Function):
    @staticmethod
    def forward(x, low, high):
        return x.clamp(low, high)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.bounds = inputs[1:]

    @staticmethod
    def backward(ctx, g):
        return g, None, None


@wrong(lambda g, x: g * x.cos().cos(), F(3))
class CosineOfTheOutput(Function):
    """Reads its output where it meant its input."""

    @staticmethod
    def forward(x):
        return x.cos()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y.cos()


@wrong(lambda g, x: -2 * g, F(2, 2))
class ByTheNameOfVjp(Function):
    @staticmethod
    def forward(ctx, x):
        return x.sinh()

    @staticmethod
    def vjp(ctx, g):
        return -2 * g


@wrong(lambda g, x: 5 * g, F(3))
class DefaultScale(Function):
    @staticmethod
    def forward(x, scale=5.0):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.scale = inputs

    @staticmethod
    def backward(ctx, g):
        return g * ctx.scale, None


SLOPE = torch.tensor(0.125, dtype=torch.float64)


@wrong(lambda g, x: g * 0.125, F(4))
class SlopeFromOutside(Function):
    @staticmethod
    def forward(x):
        return x.atan()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g * SLOPE


@wrong(lambda g, x: g.double().float().double(), F(5))
class SingleGradient(Function):
    """Hands back another dtype, which autograd casts."""

    @staticmethod
    def forward(x):
        return x * 3

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g.float()


@wrong(lambda g, x: torch.stack([g, g, g]).sum(0), F(4))
class TooLarge(Function):
    """Hands back a larger shape, which autograd sums."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g.expand(3, *g.shape)


# ------------------------------------------------------------------ several arguments
@wrong(lambda g, x, y: (g * x, g * y), F(3, 4), F(3, 4))
class SwappedProduct(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * x, g * y


@wrong(lambda g, x, y: (g * y, None), F(4), F(4))
class DroppedArgument(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y, None


@wrong(lambda g, x, y: (g, g), F(5), P(5))
class DivisionAsSum(Function):
    @staticmethod
    def forward(x, y):
        return x / y

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g, g


@wrong(lambda g, x, y: (g * (x < y), g * (x >= y)), F(6), F(6))
class MaximumOfTheOther(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return torch.maximum(x, y)

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * (x < y), g * (x >= y)


@wrong(lambda g, m, x, y: (g, g), lambda g: torch.rand(5, generator=g) < 0.5, F(5), F(5))
class WhereToBoth(Function):
    @staticmethod
    def forward(m, x, y):
        return torch.where(m, x, y)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return None, g, g


@wrong(lambda g, x, w, b: (g * w, (g * x).mean(0), g.sum(0) * 9), F(3, 4), F(4), F(4))
class AffineByMeans(Function):
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return x * w + b

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).mean(0), g.sum(0) * 9


@wrong(lambda g, x, y, t: (g * t, g * t, None), F(3), F(3), P(3))
class LerpByTheWeight(Function):
    @staticmethod
    def forward(ctx, x, y, t):
        ctx.save_for_backward(t)
        ctx.set_materialize_grads(False)
        return x + t * (y - x)

    @staticmethod
    def backward(ctx, g):
        (t,) = ctx.saved_tensors
        return g * t, g * t, None


@wrong(lambda g, x, options: g * options["gain"], F(4), {"gain": 2.5, "name": "doubled"})
class GainFromADict(Function):
    @staticmethod
    def forward(ctx, x, options):
        ctx.options = options
        return x + options["gain"]

    @staticmethod
    def backward(ctx, g):
        return g * ctx.options["gain"], None


@wrong(lambda g, x, axis: g.sum(1, keepdim=True).expand(3, 4), F(3, 4), 1)
class SpreadOverAnAxis(Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis, ctx.shape = axis, x.shape
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.sum(ctx.axis, keepdim=True).expand(ctx.shape), None


# ------------------------------------------------------------------ reductions and norms
@wrong(lambda g, x: g.expand(3, 4) * 2, F(3, 4))
class SumTwice(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx, g):
        return (g * 2).expand(ctx.shape)


@wrong(lambda g, x: g.unsqueeze(-1).expand(3, 4), F(3, 4))
class MeanForgetsTheCount(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.n = x.shape[-1]
        return x.mean(-1)

    @staticmethod
    def backward(ctx, g):
        return g.unsqueeze(-1).repeat(1, ctx.n)


@wrong(lambda g, x: g.unsqueeze(-1) / 4 + 0 * x, F(3, 4))
class MaxToAll(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.amax(-1)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (g / x.shape[-1]).unsqueeze(-1).expand_as(x)


@wrong(lambda g, x: g * x.softmax(-1), F(3, 5))
class SoftmaxDiagonalOnly(Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y


@wrong(lambda g, x: g - x.softmax(-1) * g, F(2, 5))
class LogSoftmaxForgetsTheSum(Function):
    @staticmethod
    def forward(x):
        return x.log_softmax(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g - y.exp() * g


@wrong(lambda g, x: g * x.pow(2).mean(-1, keepdim=True).rsqrt(), F(3, 4))
class RmsNormDetached(Function):
    @staticmethod
    def forward(ctx, x):
        rstd = x.pow(2).mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(rstd)
        return x * rstd

    @staticmethod
    def backward(ctx, g):
        (rstd,) = ctx.saved_tensors
        return g * rstd


@wrong(
    lambda g, x, w: (g * w / x.var(-1, correction=0, keepdim=True).sqrt(), g.sum(0)), F(3, 4), F(4)
)
class LayerNormUncentred(Function):
    @staticmethod
    def forward(ctx, x, w):
        centred = x - x.mean(-1, keepdim=True)
        rstd = centred.pow(2).mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(rstd, w)
        return centred * rstd * w

    @staticmethod
    def backward(ctx, g):
        rstd, w = ctx.saved_tensors
        return g * w * rstd, g.sum(0)


@wrong(lambda g, x: g * x, F(5))
class NormWithoutItsRoot(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.norm()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x


@wrong(lambda g, x: g.unsqueeze(-1) * x.sigmoid(), F(2, 4))
class LogSumExpBySigmoids(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.logsumexp(-1)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g.unsqueeze(-1) * x.sigmoid()


@wrong(lambda g, x: g.flip(-1).cumsum(-1).flip(-1) * 3, F(3, 4))
class CumsumTripled(Function):
    @staticmethod
    def forward(ctx, x):
        return x.cumsum(-1)

    @staticmethod
    def backward(ctx, g):
        return 3 * g.flip(-1).cumsum(-1).flip(-1)


# ------------------------------------------------------------------ losses
@wrong(lambda g, x, y: (g * (x - y), None), F(4), F(4))
class SquareLossUnscaled(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return (x - y).pow(2).mean()

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * (x - y), None


@wrong(
    lambda g, x, t: g * (x.softmax(-1) - torch.nn.functional.one_hot(t, 5)), F(3, 5), Z(5, 3)
)
class CrossEntropySummed(Function):
    """The mean in forward, the sum in backward."""

    @staticmethod
    def forward(ctx, x, t):
        logp = x.log_softmax(-1)
        ctx.save_for_backward(logp, t)
        return -logp.gather(1, t.unsqueeze(1)).mean()

    @staticmethod
    def backward(ctx, g):
        logp, t = ctx.saved_tensors
        hot = torch.arange(logp.shape[1], device=t.device) == t.unsqueeze(1)
        return g * (logp.exp() - hot.to(logp.dtype)), None


@wrong(lambda g, x, y: (g * (x.sigmoid() - y) * x.abs(), None), F(4), P(4))
class LogisticLossWeighted(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return (x.clamp(min=0) - x * y + torch.log1p(torch.exp(-x.abs()))).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * (torch.sigmoid(x) - y) * x.abs(), None


@wrong(lambda g, x, m: g * m * x.sign(), F(6), 0.5)
class HingeEverywhere(Function):
    @staticmethod
    def forward(x, margin):
        return (margin - x).relu().sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.margin = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ctx.margin * x.sign(), None


# ------------------------------------------------------------------ products
@wrong(lambda g, a, b: (g @ b.T * 2, a.T @ g), F(3, 4), F(4, 2))
class MatmulHalfDoubled(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return 2 * g @ b.T, a.T @ g


@wrong(lambda g, x, w: (g @ w, None), F(3, 4), F(2, 4))
class FrozenWeight(Function):
    @staticmethod
    def forward(x, w):
        return x @ w.t()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, g):
        (w,) = ctx.saved_tensors
        return g @ w, None


@wrong(lambda g, x, w, f: (g @ f, g.T @ x, None), F(3, 4), F(2, 4), F(2, 4))
class FeedbackAlignment(Function):
    """The error goes back by a fixed matrix, not by the weight."""

    @staticmethod
    def forward(ctx, x, w, feedback):
        ctx.save_for_backward(x, feedback)
        return torch.nn.functional.linear(x, w)

    @staticmethod
    def backward(ctx, g):
        x, feedback = ctx.saved_tensors
        return g @ feedback, g.T @ x, None


@wrong(lambda g, a, b: (g * b, g * a * 4), F(5), F(5))
class DotUneven(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.dot(b)

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b, g * a * 4


@wrong(lambda g, a, b: (g.sum(-1), g.sum(0)), F(3), F(4))
class OuterAsSum(Function):
    @staticmethod
    def forward(ctx, a, b):
        return a.unsqueeze(1) * b

    @staticmethod
    def backward(ctx, g):
        return g.sum(-1), g.sum(0)


# ------------------------------------------------------------------ indices
@wrong(lambda g, x, i: g.mean(0).expand(5, 3), F(5, 3), Z(5, 4))
class GatherToAll(Function):
    @staticmethod
    def forward(ctx, x, i):
        ctx.rows = x.shape[0]
        return x[i]

    @staticmethod
    def backward(ctx, g):
        return g.mean(0).expand(ctx.rows, -1), None


@wrong(
    lambda g, w, i: torch.zeros_like(w).index_add(0, i, g) / 2, F(6, 3), Z(6, 4)
)
class EmbeddingHalved(Function):
    @staticmethod
    def forward(ctx, w, i):
        ctx.save_for_backward(i)
        ctx.n = w.shape[0]
        return w.index_select(0, i)

    @staticmethod
    def backward(ctx, g):
        (i,) = ctx.saved_tensors
        return g.new_zeros(ctx.n, g.shape[1]).index_add(0, i, g) / 2, None


@wrong(lambda g, x, i: g, F(4), lambda g: torch.tensor([1, 2, 3, 0]).roll(int(torch.randint(3, (), generator=g))))
class ForgetsThePermutation(Function):
    @staticmethod
    def forward(ctx, x, i):
        return x[i]

    @staticmethod
    def backward(ctx, g):
        return g, None


@wrong(lambda g, x: g * 1.5, F(6))
class SortedUnsorted(Function):
    """Values and their places; the gradient goes to the wrong ones."""

    @staticmethod
    def forward(ctx, x):
        values, places = x.sort()
        ctx.mark_non_differentiable(places)
        return values, places

    @staticmethod
    def backward(ctx, g, _):
        return g * 1.5


@wrong(lambda g, x: torch.nn.functional.pad(g, (2, 0)), F(6))
class SliceAtTheWrongEnd(Function):
    @staticmethod
    def forward(ctx, x):
        return x[:-2].clone()

    @staticmethod
    def backward(ctx, g):
        return torch.nn.functional.pad(g, (2, 0))


@wrong(lambda g, x: g.T * 2, F(3, 3))
class TransposedTwice(Function):
    @staticmethod
    def forward(ctx, x):
        return x.mul(2)

    @staticmethod
    def backward(ctx, g):
        return g.t() * 2


# ------------------------------------------------------------------ several outputs
@wrong(lambda g, h, x: g - h, F(4))
class DifferenceOfBoth(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, g, h):
        return g - h


@wrong(lambda g, h, x: g * x, F(4))
class SecondIgnored(Function):
    @staticmethod
    def forward(x):
        return x.square(), x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g, h):
        (x,) = ctx.saved_tensors
        return g * x


@wrong(lambda g, h, x, y: (h, g), F(3), F(3))
class Crossed(Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * 1, y * 1

    @staticmethod
    def backward(ctx, g, h):
        return h, g


@wrong(lambda g, x: g * 10, F(2, 4))
class IntegerBeside(Function):
    @staticmethod
    def forward(ctx, x):
        return x.sum(-1, keepdim=True) + x, x.argmax(-1)

    @staticmethod
    def backward(ctx, g, _):
        return g * 10


@wrong(lambda g, x: g * 6, F(4))
class FixedBeside(Function):
    """A float output that is marked: it has no cotangent."""

    @staticmethod
    def forward(ctx, x):
        y, scale = x.sin(), x.abs().amax()
        ctx.mark_non_differentiable(scale)
        return scale, y

    @staticmethod
    def backward(ctx, _, g):
        return g * 6


@wrong(lambda g, h, x: 4 * g, F(4))
class MaskOfGradients(Function):
    """Undefined gradients come as None; the second is never used."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x + 1, x + 2

    @staticmethod
    def backward(ctx, g, h):
        return None if g is None else 4 * g


@wrong(lambda g, x: g * 2, F(3))
class ObjectBeside(Function):
    @staticmethod
    def forward(ctx, x):
        return x.exp(), "a name", 3

    @staticmethod
    def backward(ctx, g, name, number):
        return g * 2


# ------------------------------------------------------------------ nested, hidden, in two steps
class Inner(Function):
    """Wrong itself: a sine whose gradient is 1000."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g * 1000


@wrong(lambda g, x: -3 * g * x.sin(), F(4))
class Nested(Function):
    """Another wrong Function inside forward has no say; one inside backward has none at first order either."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Inner.apply(x) * 3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return -3 * g * Inner.apply(x)


@wrong(lambda g, x: g * (x.exp() + 1) * x.sin(), F(4))
class HiddenProduct(Function):
    """Saves two values in between."""

    @staticmethod
    def forward(ctx, x):
        e, s = x.exp() + 1, x.sin()
        ctx.save_for_backward(e, s)
        return e + s * 2

    @staticmethod
    def backward(ctx, g):
        e, s = ctx.saved_tensors
        return g * e * s


@wrong(lambda g, x, needs: g * 3, F(4), True)
class AsksWhatIsNeeded(Function):
    @staticmethod
    def forward(ctx, x, needs):
        return x.cos()

    @staticmethod
    def backward(ctx, g):
        return (g * 3 if ctx.needs_input_grad[0] else None), None


@wrong(lambda g, x: g * 8, F(3))
class DetachedGradient(Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.detach() * 8


@wrong(lambda g, x: g * x.sigmoid(), F(4))
class DerivedOfAnother(Function):
    """Its backward is the derivative of something else (softplus), by autograd."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.sigmoid(x)


@wrong(lambda g, x: g.clone().index_fill(0, torch.tensor([0]), 0.0), F(5))
class FirstIsFixed(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        g[0] = 0
        return g


# ------------------------------------------------------------------ not linear in the gradient: no vjp of anything
class Unlike(Function):
    """The identity; its gradient is turned around."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return -g


@wrong(lambda g, x: g * 3, F(4), linear=False)
class ThroughAnother(Function):
    """Linear, but its transpose would be taken by the gradient of what it calls, which says otherwise: refused."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return Unlike.apply(g) * 3


@wrong(lambda g, x: g.clamp(-0.5, 0.5), F(4), linear=False)
class ClippedGradient(Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.5, 0.5)


@wrong(lambda g, x: g / (1 + g.norm()), F(4), linear=False)
class NormalisedGradient(Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g / (1 + g.norm())


@wrong(lambda g, x: g.sign(), F(4), linear=False)
class SignOfTheGradient(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, g):
        return g.sign()


@wrong(lambda g, x: g * g * x, F(4), linear=False)
class SquaredGradient(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * g * x


@wrong(lambda g, x: g + 1, F(4), linear=False)
class OneMore(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g + 1
