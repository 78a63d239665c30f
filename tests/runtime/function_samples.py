"""Functions as users write them, and the comparison of a compiled class with the class itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad

Tensor = torch.Tensor
BACKENDS = ("reference", "interpret")


def widened(t):
    return t.to(torch.promote_types(t.dtype, torch.float32))


class RMSNorm(Function):
    """Saves rstd, an output that needs no gradient; has a default argument."""

    @staticmethod
    def forward(x, w, eps=1e-6):
        wide = widened(x)
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (wide * rstd * widened(w)).to(x.dtype), rstd

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, w, output[1])

    @staticmethod
    def backward(ctx, dy, _):
        x, w, rstd = ctx.saved_tensors
        x_hat = widened(x) * rstd
        wide = widened(dy)
        gw = wide * widened(w)
        mean = (gw * x_hat).mean(-1, keepdim=True)
        return ((gw - x_hat * mean) * rstd).to(x.dtype), (wide * x_hat).sum(0).to(w.dtype), None


class Linear(Function):
    """FunctionalLinear: broadcast products, a bias that may be None, once_differentiable."""

    @staticmethod
    def forward(ctx, input, weight, bias):
        output = (weight.unsqueeze(0) * input.unsqueeze(1)).sum(dim=-1)
        if bias is not None:
            output = output + bias.unsqueeze(0)
        ctx.save_for_backward(input, weight, bias)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        input, weight, bias = ctx.saved_tensors
        grad_weight = (grad_output.unsqueeze(-1) * input.unsqueeze(-2)).sum(dim=0)
        grad_bias = grad_output.sum(dim=0) if bias is not None else None
        grad_input = (grad_output.unsqueeze(-1) * weight.unsqueeze(0)).sum(dim=1)
        return grad_input, grad_weight, grad_bias


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


class LayerNorm(Function):
    """Saves x_hat, an intermediate."""

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


class SwiGLU(Function):
    @staticmethod
    def forward(ctx, a, b):
        sig = torch.sigmoid(a)
        ctx.save_for_backward(a, b, sig)
        return a * sig * b

    @staticmethod
    def backward(ctx, g):
        a, b, sig = ctx.saved_tensors
        return g * b * sig * (1 + a * (1 - sig)), g * a * sig


class CrossEntropy(Function):
    """Mean over rows; the target is an integer tensor."""

    @staticmethod
    def forward(ctx, logits, target):
        shifted = logits - logits.amax(-1, keepdim=True)
        total = shifted.exp().sum(-1, keepdim=True).log()
        logp = shifted - total
        ctx.save_for_backward(logp, target)
        return -logp.gather(1, target.unsqueeze(1)).mean()

    @staticmethod
    def backward(ctx, g):
        logp, target = ctx.saved_tensors
        hot = torch.arange(logp.shape[1], device=logp.device) == target.unsqueeze(1)
        return (logp.exp() - hot.to(logp.dtype)) * (g / logp.shape[0]), None


class Cube(Function):
    """The documentation's MyCube: dx is an output, so that second order is whole."""

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


class Wrong(Function):
    """A backward that is deliberately not the derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 100 * g * x


class Partial(Function):
    """A saved intermediate: eager's double backward loses its second-order contribution."""

    @staticmethod
    def forward(ctx, x):
        e = x.exp() + 1
        ctx.save_for_backward(e)
        return e * e

    @staticmethod
    def backward(ctx, g):
        (e,) = ctx.saved_tensors
        return 2 * g * e * (e - 1)


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@fusegrad.compile
class Decorated(Function):
    """Doubles."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 17 * len(shape))).to(dtype)
    return made.requires_grad_()


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def run(cls: Any, *args: Any, gradient: Callable[[Tensor], Tensor] = torch.ones_like) -> list[Any]:
    """The outputs and the gradients of every floating argument, on fresh leaves."""
    fresh = [_fresh(a) for a in args]
    outputs = as_tuple(cls.apply(*fresh))
    wanted = [a for a in fresh if isinstance(a, Tensor) and a.requires_grad]
    live = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
    gradients = torch.autograd.grad(live, wanted, [gradient(o) for o in live], allow_unused=True) if live else ()
    return [*(o.detach() if isinstance(o, Tensor) else o for o in outputs), *gradients]


def _fresh(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value.detach())
    return fresh.requires_grad_(value.requires_grad)


def assert_same(
    mine: Sequence[Any], theirs: Sequence[Any], *, bitwise: bool = False, tolerance: float | None = None
) -> None:
    """Equal values, dtypes, shapes and strides; what is no tensor is equal with its type."""
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        if not isinstance(b, Tensor):
            assert type(a) is type(b) and a == b
            continue
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        assert a.stride() == b.stride() or b.numel() <= 1
        exact = bitwise or not b.is_floating_point()
        error = 0.0 if exact else tolerance
        torch.testing.assert_close(a, b, rtol=error, atol=error, equal_nan=True)


def agree(cls: Any, backend: str, *args: Any, **kwargs: Any) -> Any:
    """The compiled class gives what the class gives, first call and second; returns it."""
    fast = fusegrad.compile(cls, backend=backend)
    exact = backend == "reference" and cls is not Linear  # whose products become matmuls: another order of sums
    for _ in range(2):
        assert_same(run(fast, *args, **kwargs), run(cls, *args, **kwargs), bitwise=exact)
    return fast


def status(fast: Any, method: str = "forward") -> str:
    found = fast._fusegrad.ledger.records.get(method)
    return found.status if found is not None else "unknown"


def raised(call: Callable[[], Any]) -> tuple[type, str]:
    """The type and the text of what a call raises."""
    with pytest.raises(Exception) as found:
        call()
    return found.type, str(found.value)
