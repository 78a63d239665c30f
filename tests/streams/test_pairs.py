"""Sums over pairs that are no matmuls are made tile by tile, and never in memory: values, and what is decided."""

from __future__ import annotations

import math

import pytest
import torch

import fusegrad

from .pair_functions import Additive, Chamfer, Chebyshev, Density, Laplacian, Returned

LOW = {torch.float32: 3e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}
LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
}


def arguments(shapes, dtype=torch.float32, layout="rows"):
    gen = torch.Generator().manual_seed(3)
    made = (torch.randn(s, generator=gen, dtype=torch.float64).to(dtype) for s in shapes)
    return [LAYOUTS[layout](x).detach().requires_grad_() for x in made]


def results(function, args):
    made = function.apply(*args)
    made = made if isinstance(made, tuple) else (made,)
    outs = [o for o in made if o.requires_grad]
    given = [torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).reshape(o.shape) for o in outs]
    return [*made, *torch.autograd.grad(outs, args, given, allow_unused=True)]


def compare(function, args, tolerance):
    """Beside float64, and the places that eager finds."""
    fast = fusegrad.compile(function, backend="interpret")
    ours, eager = results(fast, args), results(function, args)
    exact = results(function, [a.detach().double().requires_grad_() for a in args])
    for own, other, right in zip(ours, eager, exact, strict=True):
        assert (own is None) == (right is None)
        if own is None:
            continue
        if not own.is_floating_point():
            assert torch.equal(own, other)
        else:
            scale = right.abs().max().clamp(min=1e-6)
            assert ((own.double() - right).abs().max() / scale).item() < tolerance
    return fast


def streamed(fast, args, method="forward", **more):
    lines = fusegrad.explain(fast, *args, **more).directions[method].products
    return [line for line in lines if line.startswith("stream ") and ": never in memory, " in line]


CASES = {
    "chamfer": (Chamfer, [(37, 3), (53, 3)]),
    "density": (Density, [(37, 2), (53, 2)]),
    "laplacian": (Laplacian, [(37, 8), (53, 8)]),
    "additive": (Additive, [(2, 19, 8), (2, 37, 8), (8,), (2, 37, 5)]),
    "chebyshev": (Chebyshev, [(2, 37, 5), (2, 19, 5)]),
    "deep": (Laplacian, [(21, 20), (37, 20)]),
}


IN_LAYOUTS = [*((case, "rows") for case in CASES), *(("laplacian", layout) for layout in LAYOUTS if layout != "rows")]


@pytest.mark.parametrize(("case", "layout"), IN_LAYOUTS)
def test_beside_float64_in_float32(case: str, layout: str) -> None:
    function, shapes = CASES[case]
    args = arguments(shapes, layout=layout)
    assert streamed(compare(function, args, LOW[torch.float32]), args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["chamfer", "additive"])
def test_beside_float64_in_low_floats(case: str, dtype: torch.dtype) -> None:
    """Each step is rounded as in eager: the places of extremes are eager's."""
    function, shapes = CASES[case]
    compare(function, arguments(shapes, dtype), LOW[dtype])


@pytest.mark.parametrize("sizes", [(1, 5), (17, 150)])
def test_other_sizes_of_one_class(sizes: tuple[int, int]) -> None:
    compare(Chamfer, arguments([(n, 3) for n in sizes]), LOW[torch.float32])


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_the_place_of_an_extreme_beside_what_is_special(special: float) -> None:
    """One walk finds the extreme and its place, which begins again where the extreme moves."""
    a, b = arguments([(37, 3), (53, 3)])
    with torch.no_grad():
        a[5, 1] = b[33, 0] = b[40, 2] = special
    fast = fusegrad.compile(Chamfer, backend="interpret")
    for ours, eager in zip(fast.apply(a, b)[1:], Chamfer.apply(a, b)[1:], strict=True):
        assert torch.equal(ours, eager)


def test_of_equal_distances_the_first_is_the_nearest() -> None:
    a, b = (torch.randint(0, 2, (n, 3)).float().requires_grad_() for n in (37, 200))
    fast = fusegrad.compile(Chamfer, backend="interpret")
    for ours, eager in zip(fast.apply(a, b), Chamfer.apply(a, b), strict=True):
        assert torch.equal(ours, eager)


# ------------------------------------------------------------------------------------------------ what is decided
def described(*shapes):
    return [torch.empty(s, dtype=torch.bfloat16, device="meta", requires_grad=True) for s in shapes]


def test_both_directions_are_one_walk_each() -> None:
    args = described((4096, 3), (5000, 3))
    found = fusegrad.explain(fusegrad.compile(Chamfer), *args, target="cuda:90")
    walks = [k.walk for k in found.kernels if k.walk]
    assert len(walks) == 2 and not any("times" in walk for walk in walks) and not found.directions["forward"].reasons
    assert ": never in memory, " in str(found)


def test_sums_that_row_kernels_make_as_they_come_stay_as_they_are() -> None:
    class Nearest(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            return ((a[:, None] - b[None]) ** 2).sum(-1).amin(1)

        @staticmethod
        def backward(ctx, g):
            return None, None

    args = described((4096, 3), (5000, 3))
    (line,) = fusegrad.explain(fusegrad.compile(Nearest), *args, target="cuda:90").directions["forward"].products
    assert ": as it is, " in line and "row kernels" in line


def test_what_is_returned_is_in_memory_and_says_so() -> None:
    args = arguments([(37, 3), (53, 3)])
    fast = compare(Returned, args, LOW[torch.float32])
    (line,) = fusegrad.explain(fast, *args).directions["forward"].products
    assert ": in memory, it is a sum over pairs, not a matmul, " in line and "returned or saved" in line


def test_they_are_left_out_without_streams() -> None:
    args = arguments([(37, 3), (53, 3)])
    with fusegrad.config.patch(disable="streams"):
        assert not streamed(fusegrad.compile(Density, backend="interpret"), args)


class NormalisedDecay(torch.autograd.Function):
    """Weights by distance, divided by a root of their sum: what places alone are summed to."""

    @staticmethod
    def weights(q, gamma):
        i = torch.arange(q.shape[-2], device=q.device)
        d = i[:, None] - i
        w = torch.where(d >= 0, gamma[:, None, None] ** d.clamp(min=0), 0.0)
        return w / w.sum(-1, keepdim=True).sqrt()

    @staticmethod
    def forward(ctx, q, k, v, gamma):
        w = NormalisedDecay.weights(q, gamma)
        ctx.save_for_backward(q, k, v, gamma)
        return (q @ k.mT * w) @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v, gamma = ctx.saved_tensors
        w = NormalisedDecay.weights(q, gamma)
        a, da = q @ k.mT * w, g @ v.mT * w
        return da @ k, da.mT @ q, a.mT @ g, None


def test_a_sum_of_places_alone_is_a_row_s() -> None:
    q, k, v = arguments([(2, 3, 41, 16)] * 3)
    gamma = torch.tensor([0.5, 0.9, 0.97])
    fast = fusegrad.compile(NormalisedDecay, backend="interpret", fullgraph=True)
    ours, eager = (torch.autograd.grad(c.apply(q, k, v, gamma).sin().sum(), (q, k, v)) for c in (fast, NormalisedDecay))
    for mine, theirs in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    heads = torch.empty(2, 16, 2048, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    decays = torch.empty(16, dtype=torch.bfloat16, device="meta")
    found = fusegrad.explain(NormalisedDecay, heads, heads, heads, decays, target="cuda:90")
    lines = [line for d in found.directions.values() for line in d.products]
    assert lines and all("never in memory" in line for line in lines)
