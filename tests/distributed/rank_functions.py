"""Function classes as a model that is trained on many devices has them; the backward of some is wrong on purpose."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


class Norm(Function):
    """RMSNorm over the last dim."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normal, moved = x * scale, g * weight
        dx = scale * (moved - normal * (moved * normal).mean(-1, keepdim=True))
        return dx, (g * normal).reshape(-1, x.shape[-1]).sum(0), None


class Gated(Function):
    """silu(gate) * up, whose gradient for `up` is three times what it should be."""

    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return gate * torch.sigmoid(gate) * up

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        s = torch.sigmoid(gate)
        return g * up * s * (1 + gate * (1 - s)), 3 * g * gate * s


class Softmax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (g - (g * y).sum(-1, keepdim=True))


class Linear(Function):
    """relu(x @ weight.T + bias)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = torch.relu(x @ weight.T + bias)
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, y = ctx.saved_tensors
        g = g * (y > 0)
        return g @ weight, g.T @ x, g.sum(0)


class Product(Function):
    """x @ weight.T, of which a contracted dim may be divided."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g @ weight, g.T @ x


class Rows(Function):
    """Rows of a table, and their gradient added up where they came from."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = table.shape[0]
        return table[index]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        (index,) = ctx.saved_tensors
        return None, torch.zeros(ctx.count, g.shape[-1], dtype=g.dtype, device=g.device).index_add(0, index, g)


class Picked(Function):
    """Per row, minus the log-probability of its class."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        logs = torch.log_softmax(logits, -1)
        ctx.save_for_backward(logs, target)
        return -logs.gather(-1, target[:, None]).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        logs, target = ctx.saved_tensors
        hit = torch.nn.functional.one_hot(target, logs.shape[-1]).to(logs.dtype)
        return (logs.exp() - hit) * g[:, None], None


class Rounded(Function):
    """Straight through, but clipped: the gradient is none of the mathematics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(x, step)
        return torch.round(x / step) * step

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, step = ctx.saved_tensors
        return g * (x.abs() < 1), (g * torch.sign(x)).sum().reshape(step.shape) / math.sqrt(x.shape[-1])


class Cube(Function):
    """Its own backward is differentiable, and twice too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * x * x * weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 6 * g * x * x * weight, (g * x * x * x).sum(0)


class Spread(Function):
    """Two results, one of which is a sum over the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return torch.exp(x), (x * x).sum(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None) -> Tensor:
        (x,) = ctx.saved_tensors
        first = 0.0 if g is None else g * torch.exp(x)
        second = 0.0 if h is None else 2 * x * h
        return first + second


class SquaredError(Function):
    """A mean over everything, whose gradient for the second argument is twice what it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(x, target)
        return (x - target).square().mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, target = ctx.saved_tensors
        dx = g * 2 * (x - target) / x.numel()
        return dx, -2 * dx


class Stepped(Rounded):
    """The same forward; the gradient of the step is scaled by the number of elements, as LSQ does."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, step = ctx.saved_tensors
        return g, (g * (torch.round(x / step) - x / step)).sum() * x.numel() ** -0.5 * torch.ones_like(step)


class MeanOfRows(Function):
    """The mean is saved and scaled; the gradient of the weight is whole where every rank has all of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        mean = x.mean(0)
        ctx.save_for_backward(mean, weight)
        ctx.rows = x.shape[0]
        return mean * weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        mean, weight = ctx.saved_tensors
        return (g * weight / ctx.rows).expand(ctx.rows, -1), g * mean


class Dropped(Function):
    """Draws random numbers: whatever is divided, ranks have to agree on them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = (torch.rand_like(x) > 0.5).to(x.dtype)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return g * mask


class Asks(Function):
    """Its control flow depends on data."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.flip = bool(x.full_tensor().sum() > 0) if hasattr(x, "full_tensor") else bool(x.sum() > 0)
        return -x if ctx.flip else x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g if ctx.flip else g * 2


class SumOfRanks(Function):
    """A collective that writes to a value in between; the group is an argument, and on ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        y = x * 2
        dist.all_reduce(y, group=group)
        return y.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        h = g * dist.get_world_size(ctx.group)
        dist.all_reduce(h, group=ctx.group)
        return h * 2, None


class GatheredRanks(Function):
    """Collectives that fill memory which nobody wrote to before."""

    @staticmethod
    def forward(ctx: Any, group: Any, x: Tensor) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x * 2, group=group)
        return torch.cat(parts).exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        given = (g * 2).contiguous()
        exchanged = torch.empty_like(given)
        dist.all_to_all_single(exchanged, given, group=ctx.group)
        return None, exchanged.chunk(dist.get_world_size(ctx.group))[0] * 3
