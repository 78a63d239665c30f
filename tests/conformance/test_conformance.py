"""torch's own `autograd_function_db`, compiled, under every composition: nothing is worse than eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cells import CLASSES, NOTHING, OPINFOS, RAISES, RIGHT, WRONG, difference, expected, ours, outcome
from compositions import COMPOSITIONS

import fusegrad

Tensor = torch.Tensor
ON_KERNELS = ("CubeGenVmap", "MulGenVmap", "SelectGenVmap", "ScaleGradGenVmap")
WORSE = {(RIGHT, RAISES), (RIGHT, WRONG), (RAISES, WRONG), (WRONG, WRONG)}
"""(eager, ours) that may not be: what eager does right is right, and nothing is silently wrong."""

pytestmark = pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")


def judged(name: str, composition: str, backend: str) -> tuple[Any, Any]:
    wanted = expected(name, composition)
    return outcome(name, composition, wanted, CLASSES), ours(name, composition, wanted, backend)[0]


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("name", OPINFOS)
def test_nothing_is_worse_than_eager(name, composition) -> None:
    eager, fast = judged(name, composition, "reference")
    assert (eager.status, fast.status) not in WORSE, f"{eager} -> {fast}"


@pytest.mark.parametrize("composition", ["jvp", "vmap 1", "grad vmap"])
@pytest.mark.parametrize("name", ON_KERNELS)
def test_so_with_kernels(name, composition) -> None:
    eager, fast = judged(name, composition, "interpret")
    assert (eager.status, fast.status, fast.how != "as written") == (RIGHT, RIGHT, True), f"{eager} -> {fast}"


def test_what_can_be_captured_is() -> None:
    """numpy is what keeps a class of the list from being compiled, and nothing else."""
    found = {name: ours(name, "func.grad", expected(name, "func.grad"), "reference")[0].how for name in OPINFOS}
    assert found == {name: "as written" if name.startswith("Numpy") else "compiled" for name in OPINFOS}


# ------------------------------------------------------------------ the judge itself
class Lying(torch.autograd.Function):
    """Another gradient than CubeGenVmap's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3, 3 * x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g, _):
        return g * ctx.saved_tensors[0]


@pytest.mark.parametrize("composition", ["backward", "func.grad", "vmap grad", "grad vmap", "jacrev"])
def test_a_wrong_gradient_is_noticed(composition) -> None:
    wanted = expected("CubeGenVmap", composition)
    found = outcome("CubeGenVmap", composition, wanted, CLASSES | {"CubeGenVmap": Lying})
    assert found.status == WRONG


def test_a_result_where_nothing_is_defined_is_noticed() -> None:
    wanted = expected("NumpyCubeNotComposable", "jvp")
    assert wanted.status == RAISES
    assert outcome("ScaleGradGenVmap", "forward", wanted, CLASSES).status == WRONG
    assert expected("NumpyCubeNotComposable", "vmap mixed").status == NOTHING


def test_differences_are_told() -> None:
    x = torch.ones(2)
    assert difference((x, 3), (x, 3)) is None
    assert "off by 1" in difference((x + 1,), (x,))
    assert "float64" in difference((x.double(),), (x,))
    assert "NoneType" in difference((None, 1), (x, 1)) or "results" in difference((None, 1), (x, 1))


# ------------------------------------------------------------------ what the table brought to light
class Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, g * x


class Constant(torch.autograd.Function):
    """Its gradient depends on nothing."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return torch.zeros_like(g)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_a_recorded_gradient_requires_grad_where_eagers_does(backend) -> None:
    """`g * w` with neither tracked requires none, and `autograd.grad` of it raises, as in eager."""
    for cls in (Weighted, fusegrad.compile(Weighted, backend=backend)):
        x, w = torch.randn(3, requires_grad=True), torch.randn(3)
        (g,) = torch.autograd.grad(cls.apply(x, w).sum(), x, create_graph=True)
        assert not g.requires_grad
        (g,) = torch.autograd.grad(cls.apply(x, w).pow(2).sum(), x, create_graph=True)
        assert g.requires_grad
        w.requires_grad_()
        found = torch.autograd.grad(cls.apply(x, w).sum(), (x, w), create_graph=True)
        assert [g.requires_grad for g in found] == [True, True]
    for cls in (Constant, fusegrad.compile(Constant, backend=backend)):
        x = torch.randn(3, requires_grad=True)
        (g,) = torch.autograd.grad(cls.apply(x).sin().sum(), x, create_graph=True)
        assert not g.requires_grad and not g.any()


@pytest.mark.parametrize("first", [(3, 4), (2, 5)])
def test_sizes_that_no_tensor_shows_are_guarded(first) -> None:
    """A too large gradient that is made of sizes alone, under vmap, at one size and then at others."""
    fast = fusegrad.compile(CLASSES["ZeroGradientsGenVmap"], backend="reference")
    for n, m in (first, (3, 4), (1, 1), (6, 2)):
        x, y = torch.randn(m), torch.randn(n, m)
        rows = torch.func.jacrev(fast.apply, (0, 1))(x, y)
        assert [[tuple(j.shape) for j in row] for row in rows] == [[(m, m), (m, n, m)], [(n, m, m), (n, m, n, m)]]
        assert not any(j.any() for row in rows for j in row)
