"""What once went wrong, each in its smallest form."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch.autograd import Function

import fusegrad
from fusegrad.tracer.sizes import solve_equations

sys.path.insert(0, str(Path(__file__).parent))
from comparing import faults, laid_out, run, wide_run

BACKENDS = pytest.mark.parametrize("backend", ["reference", "interpret"])


def same(cls: type, fast: Any, args: list[Any], layout: str = "contiguous") -> None:
    eager = run(cls.apply, args, 0, layout)  # type: ignore[attr-defined]
    wide = wide_run(cls.apply, args, eager.cotangents)  # type: ignore[attr-defined]
    found = faults(run(fast.apply, args, 0, layout), eager, wide)
    assert not found, found


def graphs(cls: type, *args: Any) -> set[str]:
    """The primitives of both directions."""
    found = fusegrad.explain(cls, *args)
    assert not any(report.reasons for report in found.directions.values())
    return {v.prim for d in found.directions for v in found.graph(d).order()}


class DividedByRoot(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g / math.sqrt(g.numel())


@BACKENDS
def test_a_size_that_one_backward_made_a_constant_is_none_for_the_next(backend: str) -> None:
    fast = fusegrad.compile(DividedByRoot, backend=backend)
    for n in (4, 3, 7):
        for layout in ("contiguous", "transposed", "expanded"):
            same(DividedByRoot, fast, [torch.randn(n, 5)], layout)


class Convolved(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return F.conv2d(x, w, padding=1, stride=2)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        gx = torch.nn.grad.conv2d_input(x.shape, w, g, stride=2, padding=1)
        return gx, torch.nn.grad.conv2d_weight(x, w.shape, g, stride=2, padding=1)


def test_a_guard_that_is_a_disjunction_admits_no_more_than_it_says() -> None:
    fast = fusegrad.compile(Convolved)
    w = torch.randn(4, 3, 3, 3)
    for n, layout in ((4, "contiguous"), (0, "contiguous"), (4, "transposed")):
        same(Convolved, fast, [laid_out(torch.randn(n, 3, 8, 8), layout), w])


class Packed(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y, torch.sort(y, 1).values * y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return g + h


def test_a_kernel_reads_the_output_of_another_in_its_own_layout() -> None:
    fast = fusegrad.compile(Packed, backend="interpret")
    same(Packed, fast, [laid_out(torch.randn(5, 4), "transposed")])


class StraightThrough(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


@BACKENDS
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "step", "row", "expanded", "offset"])
def test_a_gradient_that_is_handed_on_stays_what_it_is(backend: str, layout: str) -> None:
    same(StraightThrough, fusegrad.compile(StraightThrough, backend=backend), [torch.randn(4, 6)], layout)


class Times(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return 2 * g * ctx.saved_tensors[0]


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_are_those_of_eager_where_fakes_have_others(backend: str, dtype: torch.dtype) -> None:
    x = laid_out(torch.randn(3, 6, dtype=dtype), "transposed")
    same(Times, fusegrad.compile(Times, backend=backend), [x], "expanded")


class Index(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, t)
        return x[torch.arange(x.shape[0]), t]

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, t = ctx.saved_tensors
        p = x.exp()
        p[torch.arange(t.shape[0]), t] -= 1
        return p.scatter_add_(1, t[:, None], g[:, None]), None


@BACKENDS
def test_one_index_per_row_is_a_choice(backend: str) -> None:
    same(Index, fusegrad.compile(Index, backend=backend), [torch.randn(5, 7), torch.tensor([0, 6, 2, 2, 5])])
    assert "scatter" not in graphs(Index, torch.randn(5, 7).requires_grad_(), torch.tensor([0, 6, 2, 2, 5]))


class Masked(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.clone()
        y[x < 0] *= 0.1
        return y, x[x > 1].exp().sum()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        g = g.clone()
        g[g > 0] = g[g > 0].sqrt() * 2
        return g


@BACKENDS
def test_masked_elements_are_a_choice(backend: str) -> None:
    fast = fusegrad.compile(Masked, backend=backend)
    for n in (4, 3, 17):
        same(Masked, fast, [torch.randn(n, 5)])
    assert "aten" not in graphs(Masked, torch.randn(5, 7).requires_grad_())


class Halves(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(c)
        h = x.shape[-1] // 2
        return torch.cat([x[..., :h] * c, x[..., h:] - c, x[..., ::2] + c], -1)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        (c,) = ctx.saved_tensors
        a, b, _ = g.chunk(3, -1)
        return torch.cat([a * c, b], -1), None


@BACKENDS
def test_sizes_that_were_compared_are_one_size(backend: str) -> None:
    fast = fusegrad.compile(Halves, backend=backend)
    for n in (3, 8):
        same(Halves, fast, [torch.randn(2, 2 * n), torch.randn(2, n)])
    assert "aten" not in graphs(Halves, torch.randn(2, 6).requires_grad_(), torch.randn(2, 3))


class TableOfPairs(Function):
    """A table read by an index of pairs, as windows of an image have it: n * n places as n by n."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        n = scores.shape[-1]
        ctx.save_for_backward(table, index)
        return scores + table[index.view(-1)].view(n, n, -1).permute(2, 0, 1)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        table, index = ctx.saved_tensors
        rows = g.sum(0).permute(1, 2, 0).reshape(-1, table.shape[1])
        return g, torch.zeros_like(table).index_add(0, index.view(-1), rows), None


def test_a_division_that_was_compared_is_what_it_was_equal_to() -> None:
    """s0 * s1 // n == n stays known where n divides s0 * s1, too: the sum is no library call between kernels."""
    fast = fusegrad.compile(TableOfPairs, backend="reference")
    for n in (3, 5):
        same(TableOfPairs, fast, [torch.randn(4, 2, n, n), torch.randn(7, 2), torch.randint(0, 7, (n, n))])
    leaves = torch.randn(4, 2, 3, 3, requires_grad=True), torch.randn(7, 2, requires_grad=True)
    graph = fusegrad.explain(TableOfPairs, *leaves, torch.randint(0, 7, (3, 3))).graph("forward")
    assert "aten.add.Tensor" not in {v.params.get("op") for v in graph.order()}


def test_equations_are_solved_for_divisions_and_symbols() -> None:
    from torch.utils._sympy.functions import FloorDiv

    s0, s1 = sympy.symbols("s0 s1", integer=True, positive=True)
    half = FloorDiv(s1, 2)
    known = solve_equations([sympy.Eq(half, s0, evaluate=False), sympy.Eq(s1 - half, s0, evaluate=False)])
    assert known == {half: s0, s1: 2 * s0} or known == {half: s0, s0: s1 / 2}


def test_equal_products_of_sizes_are_solved_for_a_factor() -> None:
    """Heads of keys and of values, each repeated to as many as queries have: as many of both."""
    from torch.utils._sympy.functions import FloorDiv

    q, k, v = sympy.symbols("q k v", integer=True, positive=True)
    share = FloorDiv(q, k)
    known = solve_equations([sympy.Eq(k * share, q, evaluate=False), sympy.Eq(v * share, q, evaluate=False)])
    assert known == {share: q / k, v: k} or known == {share: q / v, k: v}


class InPairs(Function):
    """Rotary embedding of neighbours: as many even places as odd ones says that the width is even."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        rate = 10000 ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float32) / x.shape[-1])
        angle = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32), rate).to(x.dtype)
        cos, sin = angle.cos(), angle.sin()
        ctx.save_for_backward(cos, sin)
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        a, b = g.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos + b * sin, b * cos - a * sin), -1).flatten(-2)


class FirstHalf(Function):
    """Only backward learns that the width is even."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        half = x[..., : x.shape[-1] // 2].exp()
        ctx.save_for_backward(half)
        return half.sum(-1, keepdim=True) * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (half,) = ctx.saved_tensors
        return (g.unflatten(-1, (-1, 2)) * half[..., None]).flatten(-2)


@BACKENDS
@pytest.mark.parametrize("cls", [InPairs, FirstHalf])
def test_half_of_a_width_is_known_as_such_however_it_was_learnt(cls: type, backend: str) -> None:
    fast = fusegrad.compile(cls, backend=backend, fullgraph=True)
    for shape in ((2, 3, 6), (2, 2, 3, 4)):
        same(cls, fast, [torch.randn(shape)])


class HalvedTwice(Function):
    """Haar's wavelet: the half of a width is halved again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        details = []
        for _ in range(2):
            even, odd = x[..., ::2], x[..., 1::2]
            details.append(even - odd)
            x = even + odd
        return torch.cat([x, *details[::-1]], -1)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        n = g.shape[-1] // 4
        low, high, more = g[..., :n], g[..., n : 2 * n], g[..., 2 * n :]
        x = torch.stack([low + high, low - high], -1).flatten(-2)
        return torch.stack([x + more, x - more], -1).flatten(-2)


class Flattened(Function):
    """Sizes of two arguments are equal by their product alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, target)
        return (x.sigmoid().flatten(1) * target.flatten(1)).sum(1)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, target = ctx.saved_tensors
        p = x.sigmoid().flatten(1)
        return (g[:, None] * target.flatten(1) * p * (1 - p)).view_as(x), None


class FlattenedProduct(Function):
    """The same of a product, whose rows may be one: then it is a sum, and no call."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return torch.bmm(x.flatten(0, 1), y.flatten(0, 1).mT).view(*x.shape[:3], -1)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, y = (t.flatten(0, 1) for t in ctx.saved_tensors)
        dx, dy = torch.bmm(g.flatten(0, 1), y), torch.bmm(g.flatten(0, 1).mT, x)
        return dx.view_as(ctx.saved_tensors[0]), dy.view_as(ctx.saved_tensors[1])


class Heads(Function):
    """A chunk in three parts, which heads are made of: the last part is as long as the others."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.reshape(*qkv.shape[:-1], 4, -1) for part in qkv.chunk(3, -1))
        ctx.save_for_backward(qkv)
        return (q * k + v).flatten(-2)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        q, k, _ = ctx.saved_tensors[0].chunk(3, -1)
        return torch.cat([g * k, g * q, g], -1)


@BACKENDS
@pytest.mark.parametrize(
    ("cls", "shapes"),
    [
        (Heads, [[(2, 24)], [(3, 36)]]),
        (HalvedTwice, [[(3, 8)], [(2, 12)]]),
        (FlattenedProduct, [[(2, 3, 1, 5)] * 2, [(4, 3, 1, 5)] * 2, [(3, 4, 1, 6), (2, 6, 1, 6)]]),
        (Flattened, [[(2, 3, 5)] * 2, [(3, 4, 6)] * 2, [(3, 4, 6), (3, 8, 3)]]),
    ],
)
def test_sizes_that_guards_make_equal_are_one(cls: type, shapes: Any, backend: str) -> None:
    fast = fusegrad.compile(cls, backend=backend, fullgraph=True)
    for of_call in shapes:
        same(cls, fast, [torch.randn(shape) for shape in of_call])
    found = fusegrad.explain(fast, *(f"f32{list(shape)}" for shape in shapes[0]))
    assert {k.kind for k in found.kernels} == {"triton"}
    assert not found.methods["forward"].reason


class Shapes(Function):
    """backward needs sizes that none of what it reads tells."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        values, index = x.max(dim=1)
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return values

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (index,) = ctx.saved_tensors
        return g.new_zeros(ctx.shape).scatter_(1, index[:, None], g[:, None])


@BACKENDS
def test_a_shape_on_ctx_of_which_backward_knows_a_part(backend: str) -> None:
    fast = fusegrad.compile(Shapes, backend=backend, fullgraph=True)
    for n in (4, 3):
        same(Shapes, fast, [torch.randn(n, 5)])


class Power(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x**4 + 2.0**x + x**1.7

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


def test_powers_with_a_number_on_either_side() -> None:
    same(Power, fusegrad.compile(Power, backend="interpret"), [torch.rand(3, 5) + 0.5])


class Eighth(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).to(torch.float8_e4m3fn).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


def test_float8_is_rounded_by_torch() -> None:
    same(Eighth, fusegrad.compile(Eighth, backend="interpret"), [torch.randn(3, 5)])


class OneHotOfASize(Function):
    """`one_hot` makes the size that forward left on ctx a constant of that capture of backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        top, at = x.max(-1)
        ctx.save_for_backward(at)
        ctx.n = x.shape[-1]
        ctx.mark_non_differentiable(at)
        return top, at

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> torch.Tensor:
        (at,) = ctx.saved_tensors
        return torch.nn.functional.one_hot(at, ctx.n).to(g.dtype) * g.unsqueeze(-1)


def test_a_size_that_one_backward_made_a_constant_is_none_in_the_next() -> None:
    fast = fusegrad.compile(OneHotOfASize)
    for n in (4, 2, 7, 4):
        same(OneHotOfASize, fast, [torch.randn(5, n)])


class MaskOfTheOutput(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.relu()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return (y > 0).to(g.dtype) * g


def test_a_second_gradient_that_eager_does_not_have_is_none() -> None:
    for function in (MaskOfTheOutput, fusegrad.compile(MaskOfTheOutput)):
        x, w = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        (first,) = torch.autograd.grad(function.apply(x), x, w, create_graph=True)
        second = torch.autograd.grad(first.sum(), (x, w), allow_unused=True)
        assert second[0] is None and second[1] is not None


class OuterProductInHalf(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x.unsqueeze(-1) * x.unsqueeze(-2)).sum(-1)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return (g.unsqueeze(-1) * x.unsqueeze(-2)).sum(-1)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_axis_that_one_operand_alone_has_is_summed_in_low_floats_too(backend: str, dtype: torch.dtype) -> None:
    same(OuterProductInHalf, fusegrad.compile(OuterProductInHalf, backend=backend), [torch.randn(3, 5).to(dtype)])


@BACKENDS
def test_what_a_derived_backward_takes_over_is_a_value_of_forward(backend: str) -> None:
    """The constant that backward fills with made the numbers of nodes differ between two graphs."""

    def clamped(x: torch.Tensor) -> torch.Tensor:
        return x.clamp_min(0.25).flatten()

    def summed(x: torch.Tensor) -> torch.Tensor:
        return F.softshrink(x).cummax(-1)[0].logcumsumexp(-1)

    for function, shape in ((clamped, ()), (clamped, (3,)), (summed, (17,)), (summed, (1,))):
        x = torch.randn(shape, requires_grad=True)
        fast = fusegrad.compile(function, backend=backend)
        (ours,) = torch.autograd.grad(fast(x).sum(), x)
        (theirs,) = torch.autograd.grad(function(x).sum(), x)
        torch.testing.assert_close(ours, theirs)


def test_a_gradient_of_zeros_through_library_calls_is_linear() -> None:
    @fusegrad.compile
    class Floored(Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x.select(1, 0).floor()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.shape = inputs[0].shape

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.select_backward(torch.zeros_like(g), ctx.shape, 1, 0)

    x = torch.randn(3, 4, 2)
    _, tangent = torch.func.jvp(torch.func.vmap(Floored.apply), (x,), (torch.ones_like(x),))
    assert not tangent.any()


class DifferentiatesAgain(Function):
    """Its backward is that of autograd, which returns gradients without a history."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(leaf.exp() * 2, leaf, g)[0]


class Detaches(DifferentiatesAgain):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return (g * x).detach()


@BACKENDS
@pytest.mark.parametrize("cls", [DifferentiatesAgain, Detaches])
def test_a_gradient_without_a_history_has_none(cls: type, backend: str) -> None:
    fast = fusegrad.compile(cls, backend=backend)
    x, g = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    (first,) = torch.autograd.grad(fast.apply(x), x, g, create_graph=True)
    assert not first.requires_grad
    _, tangent = torch.func.jvp(fast.apply, (x.detach(),), (g.detach(),))
    torch.testing.assert_close(tangent, cls.apply(x) * 0 + (2 * x.exp() if cls is DifferentiatesAgain else x) * g)  # type: ignore[attr-defined]


class Bagged(Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, index)
        return F.embedding_bag(index, weight, mode="sum") * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        weight, index = ctx.saved_tensors
        return torch.zeros_like(weight).index_add(0, index.flatten(), 2 * g.repeat_interleave(index.shape[1], 0)), None


def test_how_many_bags_torch_counts_is_a_size_like_others() -> None:
    """arange(0, n * m, n) has (n * m + n - 1) // n numbers, of which no proof knew that they are m."""
    fast, weight = fusegrad.compile(Bagged, backend="interpret"), torch.randn(6, 5, requires_grad=True)
    for bags in (3, 4, 1):
        index = torch.randint(0, 6, (bags, 4))
        torch.testing.assert_close(fast.apply(weight, index), Bagged.apply(weight, index))
    assert not fusegrad.explain(fast, weight, index).opaque
    assert "FG105" not in str(fusegrad.explain(fast, weight, index))
