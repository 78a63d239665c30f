"""Functions whose backward makes scores again and asks which are the extremes that forward kept, in all compositions.

Kernels add in two orders, and no score that is made again would be the largest that was kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from beside_eager import error

Tensor = torch.Tensor
Call = Callable[..., Any]
DIGITS = 2e-5
"""As a share of the largest element; a wrong element is a share of 1."""


class Furthest(Function):
    """The furthest of each row, by a distance that is made again."""

    @staticmethod
    def distances(x, y):
        return (x * x).sum(-1)[..., :, None] + (y * y).sum(-1)[..., None, :] - 2 * x @ y.mT

    @staticmethod
    def forward(x, y, scale):
        far = Furthest.distances(x, y).amax(-1)
        return far.mean(-1) * scale, far

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, g, _):
        x, y, scale, far = ctx.saved_tensors
        d = Furthest.distances(x, y)
        hit = (d == far[..., None]).to(x.dtype) * (g * scale)[..., None, None] / x.shape[-2]
        dx = 2 * (hit.sum(-1, keepdim=True) * x - hit @ y)
        return dx, 2 * (hit.sum(-2)[..., None] * y - hit.mT @ x), g * far.mean(-1)

    @staticmethod
    def plain(x, y, scale):
        far = Furthest.distances(x, y).amax(-1)
        return far.mean(-1) * scale, far.detach()


class Pooled(Function):
    """The best score of each query, kept as it is returned: late interaction, with its mask."""

    @staticmethod
    def forward(ctx, q, k, v):
        s = q @ k.mT / 4
        best = s.amax(-1, keepdim=True)
        ctx.save_for_backward(q, k, v, best)
        return best * v

    @staticmethod
    def backward(ctx, g):
        q, k, v, best = ctx.saved_tensors
        ds = ((q @ k.mT / 4) >= best).to(q.dtype) * (g * v).sum(-1, keepdim=True) / 4
        return ds @ k, ds.mT @ q, g * best

    @staticmethod
    def plain(q, k, v):
        return (q @ k.mT / 4).amax(-1, keepdim=True) * v


class TopFew(Function):
    """Attention to the three best scores of a row: backward finds them by the third one."""

    @staticmethod
    def weights(s, least):
        return torch.softmax(s.masked_fill(s < least, float("-inf")), -1)

    @staticmethod
    def forward(ctx, q, k, v):
        s = q @ k.mT
        least = s.topk(3, dim=-1).values[..., -1:]
        ctx.save_for_backward(q, k, v, least)
        return TopFew.weights(s, least) @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v, least = ctx.saved_tensors
        p = TopFew.weights(q @ k.mT, least)
        dp = g @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        return ds @ k, ds.mT @ q, p.mT @ g

    @staticmethod
    def plain(q, k, v):
        s = q @ k.mT
        return TopFew.weights(s, s.topk(3, dim=-1).values[..., -1:]) @ v


def tensors(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(5)
    return tuple(torch.randn(s, generator=random).requires_grad_() for s in shapes)


FUNCTIONS = {
    Furthest: lambda: tensors((2, 45, 16), (2, 70, 16), (2,)),
    Pooled: lambda: tensors((2, 45, 16), (2, 70, 16), (2, 45, 8)),
    TopFew: lambda: tensors((2, 45, 16), (2, 70, 16), (2, 70, 8)),
}


# ----------------------------------------------------------------------------------------------------- compositions
def first(results: Any) -> Tensor:
    """What is differentiated of a call's results."""
    return results[0] if isinstance(results, tuple) else results


def loss(call: Call) -> Call:
    return lambda *arguments: first(call(*arguments)).square().sum()


def detached(arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(a.detach() for a in arguments)


def stacked(arguments: tuple[Tensor, ...], in_dims: tuple[int | None, ...]) -> list[Tensor]:
    pairs = zip(detached(arguments), in_dims, strict=True)
    return [a if d is None else torch.stack([a, 1.5 * a, a - 1], d) for a, d in pairs]


def plain_autograd(call: Call, *arguments: Tensor) -> Any:
    return torch.autograd.grad(loss(call)(*arguments), arguments)


def grad(call: Call, *arguments: Tensor) -> Any:
    return torch.func.grad(loss(call), (0, 1, 2))(*detached(arguments))


def vjp(call: Call, *arguments: Tensor) -> Any:
    result, pull = torch.func.vjp(lambda *a: first(call(*a)), *detached(arguments))
    return result, pull(result)


def jvp(call: Call, *arguments: Tensor) -> Any:
    values = detached(arguments)
    return torch.func.jvp(lambda *a: first(call(*a)), values, tuple(0.3 + a / 2 for a in values))


def jacrev(call: Call, *arguments: Tensor) -> Any:
    return torch.func.jacrev(lambda *a: first(call(*a)).flatten()[:7], (0, 1, 2))(*detached(arguments))


def vmap(*in_dims: int | None) -> Call:
    """vjp of vmap over some of the arguments."""

    def run(call: Call, *arguments: Tensor) -> Any:
        batched = torch.func.vmap(lambda *a: first(call(*a)), in_dims)
        result, pull = torch.func.vjp(batched, *stacked(arguments, in_dims))
        return result, pull(result)

    return run


def vmap_of_grad(*in_dims: int | None) -> Call:
    def run(call: Call, *arguments: Tensor) -> Any:
        return torch.func.vmap(torch.func.grad(loss(call), (0, 1, 2)), in_dims)(*stacked(arguments, in_dims))

    return run


def checkpointed(use_reentrant: bool) -> Call:
    def run(call: Call, *arguments: Tensor) -> Any:
        result = checkpoint(lambda *a: first(call(*a)), *arguments, use_reentrant=use_reentrant)
        result.square().sum().backward()
        return [a.grad for a in arguments]

    return run


def saved_by_hooks(call: Call, *arguments: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return plain_autograd(call, *arguments)


def double(call: Call, *arguments: Tensor) -> Any:
    found = torch.autograd.grad(loss(call)(*arguments), arguments[:2], create_graph=True)
    return *found, torch.autograd.grad(sum(g.square().sum() for g in found), arguments)


def grad_of_grad(call: Call, *arguments: Tensor) -> Any:
    def norm(*a: Tensor) -> Tensor:
        return sum(g.square().sum() for g in torch.func.grad(loss(call), (0, 1))(*a))

    return torch.func.grad(norm, (0, 1, 2))(*detached(arguments))


def by_torch_compile(call: Call, *arguments: Tensor) -> Any:
    whole = torch.compile(lambda x, *rest: first(call(x * 1.5, *rest)) * 2, backend="aot_eager")
    return torch.autograd.grad(whole(*arguments).square().sum(), arguments)


COMPOSITIONS = {
    "plain": plain_autograd, "grad": grad, "vjp": vjp, "jvp": jvp, "jacrev": jacrev,
    "vmap": vmap(0, 0, 0), "vmap of the first": vmap(0, None, None), "vmap of the others": vmap(None, 1, 0),
    "vmap of grad": vmap_of_grad(0, 0, 0), "vmap of grad of one": vmap_of_grad(None, 0, None),
    "checkpoint": checkpointed(False), "reentrant checkpoint": checkpointed(True), "hooks": saved_by_hooks,
    "double backward": double, "grad of grad": grad_of_grad, "torch.compile": by_torch_compile,
}  # fmt: skip


def off(cls: Any, fast: Any, composition: Call, make: Call) -> float:
    found = tree_leaves(composition(fast.apply, *make()))
    exact = tree_leaves(composition(cls.plain, *(a.detach().double().requires_grad_() for a in make())))
    assert len(found) == len(exact)
    return max(error(f, e.detach()) for f, e in zip(found, exact, strict=True))


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("cls", FUNCTIONS, ids=lambda c: c.__name__)
def test_beside_eager(cls: Any, composition: str) -> None:
    fast = fusegrad.compile(cls, backend="interpret")
    assert off(cls, fast, COMPOSITIONS[composition], FUNCTIONS[cls]) < DIGITS
