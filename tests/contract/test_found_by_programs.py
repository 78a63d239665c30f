"""What random programs found, each in a few lines: the compiled Function against eager, or against single calls."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad

both = pytest.mark.parametrize("backend", ["reference", "interpret"])


def same(target, mode, *args, backend="reference"):
    """Raises where a mode of a compiled target differs from eager on these arguments."""
    fast = fusegrad.compile(target, backend=backend)
    fusegrad.check(fast, *args, transforms=[mode], dtypes=[], layouts=[], sizes=[], quiet=True)
    return fast


def test_a_function_without_a_way_for_gradients_has_tangents_of_zeros() -> None:
    def program(x):
        return torch.atan(x.select(1, 0).double()).floor()

    fast = same(program, "jvp(vmap)", "f32[3,2]")
    x = torch.randn(3, 2)
    out, tangent = torch.func.jvp(fast, (x,), (torch.ones_like(x),))
    assert torch.equal(out, program(x)) and not tangent.any()


@pytest.mark.parametrize("mode", ["jacfwd", "dual numbers"])
def test_an_expanded_result_has_tangents(mode) -> None:
    same(lambda x: x.sin().expand(2, *x.shape), mode, "f32[1,3]")


class Summed(Function):
    """Its gradient is expanded."""

    @staticmethod
    def forward(x):
        return x.sum().square() / 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (grad * x.sum()).expand(x.shape)


@both
def test_an_expanded_gradient_has_tangents(backend) -> None:
    fast = fusegrad.compile(Summed, backend=backend)
    found = torch.func.jacfwd(torch.func.grad(fast.apply))(torch.randn(3, 2))
    torch.testing.assert_close(found, torch.ones(3, 2, 3, 2))


class Wider(Function):
    """Two floats in, of which one gradient is computed in the wider type."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x)
        return y * 2, y + 1

    @staticmethod
    def backward(ctx, g, h):
        (x,) = ctx.saved_tensors
        return h.sum() * x, h


@pytest.mark.parametrize("mode", ["jvp", "jacfwd"])
def test_the_judge_gives_a_tangent_the_dtype_of_its_output(mode) -> None:
    same(Wider, mode, "f64[4]", "f32[2]")
    same(Wider, mode, "bf16[4]", "f32[2]")


class UnusedOutput(Function):
    """It saves its output, reads it nowhere, and writes to memory of its own in backward."""

    @staticmethod
    def forward(x, y, z):
        return y * z

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output, inputs[2])

    @staticmethod
    def backward(ctx, grad):
        _output, z = ctx.saved_tensors
        return grad.clone().mul_(z), grad * z, None


def test_what_a_backward_that_writes_in_place_does_not_read_stays_without_a_gradient() -> None:
    fast = same(UnusedOutput, "double backward", "f32[3]", "f32[3]", "f32[3]")
    x, y, z = (torch.randn(3, requires_grad=True) for _ in range(3))
    first = torch.autograd.grad(fast.apply(x, y, z).sum(), (x, y), create_graph=True)
    assert all(g.requires_grad for g in first)
    second = torch.autograd.grad(sum(g.sum() for g in first), (x, y, z), allow_unused=True)
    assert second[:2] == (None, None) and second[2] is not None


def test_the_angle_of_constants() -> None:
    def angles(x):
        return torch.atan2(x.new_zeros(x.shape), x) + torch.atan2(x, -x.new_zeros(1))

    x = torch.tensor([-2.0, -0.0, 0.0, 3.0])
    torch.testing.assert_close(fusegrad.compile(angles, backend="interpret")(x), angles(x))


class Shaken(Function):
    @staticmethod
    def forward(x):
        return x * torch.rand_like(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y / x


def test_no_derivative_of_forward_draws_other_random_numbers() -> None:
    x = torch.rand(4) + 1
    y, tangent = torch.func.jvp(fusegrad.compile(Shaken).apply, (x,), (torch.ones(4),))
    torch.testing.assert_close(tangent, y / x)
    fast = fusegrad.compile(Shaken, derive_jvp="forward")
    with pytest.warns(fusegrad.FallbackWarning, match="draws random numbers"):
        with pytest.raises(NotImplementedError, match="jvp"):
            torch.func.jvp(fast.apply, (x,), (torch.ones(4),))
    assert fast._fusegrad.ledger.records["torch.func"].code == "FG025"


# ------------------------------------------------------------------ what autograd sees of a plain function
def flags(result):
    return torch.utils._pytree.tree_map(lambda t: t.requires_grad, result)


@both
def test_an_argument_that_a_plain_function_returns_is_that_object(backend) -> None:
    fast = fusegrad.compile(lambda x, y: (x * 2, y.flatten(), x), backend=backend)
    for grad in (True, False):
        x, y = torch.randn(3, requires_grad=grad), torch.randn(3)
        for _ in range(5):
            made, second, third = fast(x, y)
            assert second is y and third is x and made is not x
    again = torch.func.grad(lambda x: (fast(x, y)[0] * fast(x, y)[2]).sum())(x)
    torch.testing.assert_close(again, 4 * x)
    itself = fusegrad.compile(lambda x: x, backend=backend)
    assert itself(x) is x


def constant_parts(x):
    with torch.no_grad():
        scale = x.abs().amax()
    return x / scale, scale, x.detach() * 2, (x > 0).float(), x.round()


@both
def test_a_result_without_a_way_back_needs_no_gradient(backend) -> None:
    fast = fusegrad.compile(constant_parts, backend=backend)
    x = torch.randn(3, requires_grad=True)
    assert flags(fast(x)) == flags(constant_parts(x)) == (True, False, False, False, True)
    same(constant_parts, "backward", "f32[3]", backend=backend)


@both
def test_forward_mode_does_not_heed_no_grad(backend) -> None:
    fast = same(constant_parts, "dual numbers", "f32[3]", backend=backend)
    x = torch.tensor([1.0, 2.0, 3.0])
    with pytest.warns(fusegrad.FallbackWarning, match="FG016"):
        _, tangents = torch.func.jvp(fast, (x,), (x,))
    assert tangents[0].tolist() == [0.0] * 3 and tangents[1].item() == 3.0


WEIGHT = torch.nn.Parameter(torch.ones(3))
UNSEEN = {
    "given in a list": (lambda xs: xs[0] * 2, lambda x: ([x],), "it is given requires grad"),
    "returned in a dict": (lambda x: {"y": x * 2}, lambda x: (x,), "it returns requires grad"),
    "a parameter": (lambda x: x * WEIGHT, lambda x: (x,), "from outside requires grad"),
    "written to a buffer": (lambda x, b: b.copy_(x) * 2, lambda x: (x, torch.zeros(3)), "it writes what requires"),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_autograd_would_not_see_of_a_plain_function_runs_as_written(name) -> None:
    function, arguments, why = UNSEEN[name]
    fast, x = fusegrad.compile(function), torch.randn(3, requires_grad=True)
    with pytest.warns(fusegrad.FallbackWarning, match=why):
        found = fast(*arguments(x))
    assert flags(found) == flags(function(*arguments(x))) and fast._fusegrad.ledger.records["forward"].code == "FG039"
    found = fast(*arguments(x))
    (found["y"] if isinstance(found, dict) else found).sum().backward()
    assert x.grad is not None


def test_a_leaf_that_a_plain_function_writes_to_is_refused_as_in_eager() -> None:
    fast = fusegrad.compile(lambda x: x.mul_(2))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        fast(torch.ones(3, requires_grad=True))
    x = torch.ones(3)
    assert fast(x) is x and x.tolist() == [2.0] * 3


def test_a_first_call_within_a_checkpoint() -> None:
    same(lambda x, y: (x * y).sin(), "checkpoint", "f32[3]", "f32[3]")


class Swish(torch.autograd.Function):
    """Its operation is decomposed by code of torch's that calls `torch.sigmoid`; the class does not."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * torch.where(x > 0, 1.0, x)


@pytest.mark.parametrize("other", [lambda x: x * 2, torch.tanh])
def test_a_function_that_is_put_into_torch_is_not_what_operations_are_made_of(
    other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "sigmoid", other)
    fast, x = fusegrad.compile(type("Swish", (Swish,), {}), backend="interpret"), torch.randn(5, requires_grad=True)
    with pytest.warns(fusegrad.FallbackWarning, match=r"`torch\.sigmoid` was replaced"):
        torch.testing.assert_close(fast.apply(x), Swish.apply(x))
    assert "`torch.sigmoid` was replaced" in str(fusegrad.explain(fast, x))


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x.exp()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


@pytest.mark.parametrize("name", ["load", "einsum", "Tensor.backward", "Tensor.sigmoid", "a_name_of_its_own"])
def test_a_function_that_is_put_into_torch_and_not_called_matters_to_nobody(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _, attribute = name.rpartition(".")
    place = torch.Tensor if owner else torch
    own = getattr(place, attribute, None)
    monkeypatch.setattr(place, attribute, lambda *args, **kwargs: own(*args, **kwargs), raising=False)
    fast, x = fusegrad.compile(type("Doubles", (Doubles,), {}), backend="interpret"), torch.randn(5, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fast.apply(x), Doubles.apply(x))
    assert fusegrad.explain(fast, x).methods["forward"].reason is None


@both
@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning", "ignore:Use of")
def test_a_write_to_an_expanded_tensor_is_eagers(backend) -> None:
    """A graph without writes would add what is written to each of the places that are one."""

    def program(x, where):
        total = x.sum().expand(3)
        total[where] = 0.1
        return x * total

    fast, x = fusegrad.compile(program, backend=backend), torch.randn(3)
    where = torch.tensor([True, True, True])
    torch.testing.assert_close(fast(x, where), program(x, where))
    assert "FG043" in str(fusegrad.explain(fast))
