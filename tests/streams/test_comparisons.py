"""Functions whose backward makes scores again and asks which are the extremes that forward kept, in all compositions.

Kernels add in two orders, and no score that is made again would be the largest that was kept.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


class OtherSpelling(Function):
    """Scores that backward spells otherwise, in operations of the same bits."""

    @staticmethod
    def forward(ctx, q, k, v):
        best = (torch.einsum("bqd,bkd->bqk", q, k) / 4).max(-1, keepdim=True).values
        ctx.save_for_backward(q, k, v, best)
        return best * v

    @staticmethod
    def backward(ctx, g):
        q, k, v, best = ctx.saved_tensors
        hit = torch.bmm(q, k.transpose(1, 2)).div(4) == best
        ds = hit.to(q.dtype) * (g * v).sum(-1, keepdim=True) / 4
        return ds @ k, ds.mT @ q, g * best

    plain = Pooled.plain


class KeptScores(Function):
    """The scores themselves are kept, though they could be made again for less."""

    @staticmethod
    def forward(ctx, q, k, v):
        s = q @ k.mT / 4
        best = s.amax(-1, keepdim=True)
        ctx.save_for_backward(q, k, v, s, best)
        return best * v + torch.exp(s - best).sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx, g):
        q, k, v, s, best = ctx.saved_tensors
        hit, p = (s == best).to(q.dtype), torch.exp(s - best)
        rest = g.sum(-1, keepdim=True)
        ds = (hit * ((g * v).sum(-1, keepdim=True) - p.sum(-1, keepdim=True) * rest) + p * rest) / 4
        return ds @ k, ds.mT @ q, g * best

    @staticmethod
    def plain(q, k, v):
        s = q @ k.mT / 4
        best = s.amax(-1, keepdim=True)
        return best * v + torch.exp(s - best).sum(-1, keepdim=True)


class ByItsOwnJvp(Function):
    """backward has the place of the best score, the class's own jvp asks for it."""

    @staticmethod
    def forward(q, k, v):
        s = q @ k.mT / 4
        best = s.amax(-1, keepdim=True)
        return best * v, best, s.argmax(-1, keepdim=True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.save_for_forward(*inputs, output[1])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx, g, *_):
        q, k, v, best, place = ctx.saved_tensors
        ds = torch.zeros_like(q @ k.mT).scatter(-1, place, (g * v).sum(-1, keepdim=True) / 4)
        return ds @ k, ds.mT @ q, g * best

    @staticmethod
    def jvp(ctx, tq, tk, tv):
        q, k, v, best = ctx.saved_tensors
        hit = (q @ k.mT / 4 == best).to(q.dtype)
        return (hit * (tq @ k.mT + q @ tk.mT) / 4).sum(-1, keepdim=True) * v + best * tv, None, None

    plain = Pooled.plain


def tensors(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(5)
    return tuple(torch.randn(s, generator=random).requires_grad_() for s in shapes)


def queries_and_keys() -> tuple[Tensor, ...]:
    return tensors((2, 45, 16), (2, 70, 16), (2, 45, 8))


FUNCTIONS = {
    Furthest: lambda: tensors((2, 45, 16), (2, 70, 16), (2,)),
    TopFew: lambda: tensors((2, 45, 16), (2, 70, 16), (2, 70, 8)),
    **dict.fromkeys((Pooled, OtherSpelling, KeptScores, ByItsOwnJvp), queries_and_keys),
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


PARTIAL = {(KeptScores, "double backward")}
"""Where a class keeps an intermediate: plain autograd does not differentiate along it, in eager either."""


def off(call: Call, fast: Any, composition: Call, make: Call) -> float:
    """The error of a compiled class beside a call in float64."""
    found = tree_leaves(composition(fast.apply, *make()))
    exact = tree_leaves(composition(call, *(a.detach().double().requires_grad_() for a in make())))
    assert len(found) == len(exact)
    return max(error(f, e.detach()) for f, e in zip(found, exact, strict=True))


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("cls", FUNCTIONS, ids=lambda c: c.__name__)
def test_beside_eager(cls: Any, composition: str) -> None:
    fast = fusegrad.compile(cls, backend="interpret")
    exact = cls.apply if (cls, composition) in PARTIAL else cls.plain
    assert off(exact, fast, COMPOSITIONS[composition], FUNCTIONS[cls]) < DIGITS


# ------------------------------------------------------------------------------------------------- what is reported
AS_TRACED = r"its operations run as they were traced, with eager's bits: "


def products(cls: Any, direction: str) -> list[str]:
    with torch.device("meta"):
        arguments = [torch.randn(s).requires_grad_() for s in ((4, 4096, 64), (4, 4096, 64), (4, 4096, 64))]
    return fusegrad.explain(fusegrad.compile(cls), *arguments, target="cuda:90").directions[direction].products


def test_what_is_compared_is_handed_over_and_reported() -> None:
    (line,) = [line for line in products(Pooled, "backward") if line.startswith("compared ")]
    assert line.startswith("compared s: with best, bit for bit, and handed over")


def test_what_was_kept_to_be_compared_is_not_made_again() -> None:
    lines = [*products(KeptScores, "forward"), *products(KeptScores, "backward")]
    assert any("in memory, `s` is returned or saved" in line for line in lines)
    assert not any("never in memory" in line for line in lines)


@pytest.mark.parametrize("composition", ["grad", "vmap of grad", "torch.compile", "hooks"])
def test_what_is_compiled_apart_is_reported(composition: str) -> None:
    fast = fusegrad.compile(Pooled, backend="interpret")
    with pytest.warns(fusegrad.FallbackWarning, match=AS_TRACED + "backward makes `s` again and compares it"):
        COMPOSITIONS[composition](fast.apply, *queries_and_keys())
    assert AS_TRACED in str(fusegrad.explain(fast, *queries_and_keys()))


# ------------------------------------------------------------------------------------- where one method is not traced
class OpaqueBackward(Function):
    forward = Pooled.forward

    @staticmethod
    def backward(ctx, g):
        assert g.numpy().size
        return Pooled.backward(ctx, g)


def test_backward_that_falls_back_to_eager_compares_eagers_bits() -> None:
    fast = fusegrad.compile(OpaqueBackward, backend="interpret", traceable={"backward": False})
    assert off(Pooled.plain, fast, plain_autograd, queries_and_keys) < DIGITS


@pytest.mark.parametrize("composition", ["plain", "double backward", "checkpoint"])
def test_forward_that_falls_back_to_eager_hands_over_eagers_bits(composition: str) -> None:
    fast = fusegrad.compile(Pooled, backend="interpret", traceable={"forward": False})
    with pytest.warns(fusegrad.FallbackWarning, match=AS_TRACED):
        assert off(Pooled.plain, fast, COMPOSITIONS[composition], queries_and_keys) < DIGITS


class Gated(Function):
    """Its backward asks where a sum is positive, of which there are no bits to hand over."""

    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w, b)
        return torch.relu(x @ w.mT + b[:, None, :1])

    @staticmethod
    def backward(ctx, g):
        x, w, b = ctx.saved_tensors
        ds = torch.where(x @ w.mT + b[:, None, :1] > 0, g, 0.0)
        return ds @ w, ds.mT @ x, F.pad(ds.sum((1, 2))[:, None], (0, b.shape[1] - 1))


@pytest.mark.parametrize("traceable", [None, {"forward": False}], ids=["traced", "opaque forward"])
def test_what_only_jumps_elsewhere_stays_in_kernels(traceable: Any) -> None:
    fast = fusegrad.compile(Gated, backend="interpret", **({} if traceable is None else {"traceable": traceable}))
    arguments = tensors((2, 45, 16), (2, 70, 16), (2, 3))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", AS_TRACED)
        found = torch.autograd.grad(fast.apply(*arguments).sum(), arguments)
    exact = torch.autograd.grad(Gated.apply(*arguments).sum(), arguments)
    assert all(error(f, e.double()) < DIGITS for f, e in zip(found, exact, strict=True))
