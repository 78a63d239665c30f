"""What is kept for backward: exchanged for something cheaper where nobody can tell, the user's own otherwise."""

from __future__ import annotations

import pytest
import torch
from function_samples import LayerNorm, Partial, RMSNorm, Softmax, SwiGLU, as_tuple, assert_same, leaf, run
from torch.autograd import Function

import fusegrad
from fusegrad.ir.program import ValueRef
from fusegrad.tracer.torch_private import saved_tensors_of


class Gelu(Function):
    """Keeps three tensors where one is enough."""

    @staticmethod
    def forward(ctx, x):
        t = torch.tanh(0.79788456 * (x + 0.044715 * x**3))
        d = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.79788456 * (1 + 3 * 0.044715 * x * x)
        ctx.save_for_backward(x, t, d)
        return 0.5 * x * (1 + t)

    @staticmethod
    def backward(ctx, g):
        _, t, d = ctx.saved_tensors
        return g * d + 0 * t


def args_of(cls: type) -> tuple[torch.Tensor, ...]:
    if cls is LayerNorm:
        return leaf(6, 8), leaf(8), leaf(8, seed=2)
    return (leaf(6, 8), leaf(6, 8, seed=3)) if cls is SwiGLU else (leaf(6, 8),)


def chosen(fast: type) -> list[ValueRef] | None:
    (specialization,) = [s for s in fast._fusegrad.table]
    plan = specialization.residual_plan
    return None if plan is None else [p for p in plan.places if p is not None]


def saved_bytes(y: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in saved_tensors_of(y.grad_fn) if t is not None)


@pytest.mark.parametrize("cls", [Gelu, SwiGLU])
def test_what_can_be_computed_again_is_not_kept(cls) -> None:
    fast = fusegrad.compile(cls, backend="interpret")
    mine, theirs = fast.apply(*args_of(cls)), cls.apply(*args_of(cls))
    assert all(p.kind != "hidden" for p in chosen(fast))
    assert saved_bytes(mine) < saved_bytes(theirs)
    assert_same(run(fast, *args_of(cls)), run(cls, *args_of(cls)))


@pytest.mark.parametrize("cls", [Gelu, SwiGLU, LayerNorm, Partial, Softmax])
def test_never_more_bytes_than_the_users(cls) -> None:
    for backend in ("interpret", "reference"):
        fast = fusegrad.compile(cls, backend=backend)
        assert saved_bytes(as_tuple(fast.apply(*args_of(cls)))[0]) <= saved_bytes(cls.apply(*args_of(cls)))


def test_the_reference_keeps_what_the_user_saved() -> None:
    fast = fusegrad.compile(Gelu)
    y = fast.apply(*args_of(Gelu))
    assert chosen(fast) is None and len(y.grad_fn.saved_tensors) == 3


def test_saved_inputs_and_outputs_stay_where_autograd_sees_them() -> None:
    fast = fusegrad.compile(Gelu, backend="interpret")
    x = leaf(6, 8) * 1
    y = fast.apply(x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("cls", [Gelu, SwiGLU, LayerNorm])
def test_under_hooks_nothing_is_exchanged(cls) -> None:
    fast = fusegrad.compile(cls, backend="interpret")
    fast.apply(*args_of(cls))
    packs: list[list[tuple[int, ...]]] = []
    for c in (fast, cls):
        seen: list[tuple[int, ...]] = []

        def pack(t: torch.Tensor, seen: list[tuple[int, ...]] = seen) -> torch.Tensor:
            seen.append(tuple(t.shape))
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = c.apply(*args_of(c) if c is cls else args_of(cls))
        y.sum().backward()
        packs.append(seen)
    assert packs[0] == packs[1]


@pytest.mark.parametrize("cls", [Gelu, SwiGLU, LayerNorm])
def test_double_backward_sees_the_users_residuals(cls) -> None:
    results = []
    for c in (fusegrad.compile(cls, backend="interpret"), cls):
        given = args_of(cls)
        first = torch.autograd.grad(c.apply(*given).pow(2).sum(), given, create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in first), given, allow_unused=True)
        results.append([*first, *second])
    assert_same(*results, tolerance=1e-4)


def test_another_mask_of_gradients_uses_the_same_residuals() -> None:
    class Two(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            e, s = x.exp(), x.sin()
            ctx.save_for_backward(x, e, s)
            return e * 2, s * 3

        @staticmethod
        def backward(ctx, g, h):
            x, e, s = ctx.saved_tensors
            total = 0 * x
            if g is not None:
                total = total + g * e * 2
            return total if h is None else total + h * x.cos() * 3 + 0 * s

    fast = fusegrad.compile(Two, backend="interpret")
    for used in ((0, 1), (0,), (1,)):
        grads = []
        for cls in (fast, Two):
            x = leaf(7)
            outputs = cls.apply(x)
            sum(outputs[i].sum() for i in used).backward()
            grads.append(x.grad)
        assert_same(grads[:1], grads[1:])


def test_other_sizes_use_the_same_choice() -> None:
    fast = fusegrad.compile(Gelu, backend="interpret")
    for n in (6, 9, 2):
        assert_same(run(fast, leaf(n, 8)), run(Gelu, leaf(n, 8)))


def test_an_opaque_backward_gets_its_own_residuals_back() -> None:
    class Clipped(Gelu):
        @staticmethod
        def backward(ctx, g):
            x, t, d = ctx.saved_tensors  # the output of tanh, too
            seen.append(len(seen))
            return g * d * t.sum() + 0 * x * len(seen)

    seen: list[int] = []

    with pytest.warns(fusegrad.FallbackWarning, match="Clipped.backward"):
        fast = fusegrad.compile(Clipped, backend="interpret")
        assert_same(run(fast, leaf(6, 8)), run(Clipped, leaf(6, 8)))


def test_statistics_of_a_row_are_not_recomputed() -> None:
    """rstd is a row of numbers: keeping it is cheaper than reading x once more for it."""
    fast = fusegrad.compile(RMSNorm, backend="interpret")
    y = fast.apply(leaf(6, 8), leaf(8))[0]
    assert [tuple(t.shape) for t in saved_tensors_of(y.grad_fn)] == [(6, 8), (8,), (6, 1)]
