"""A gradient that is deliberately wrong stays wrong, in every composition, and is never replaced by the true one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from wrong_backwards import WRONGS, Wrong, is_float

import fusegrad
from fusegrad.runtime.specialize.linearity import NonLinearBackward
from fusegrad.tracer.capture.context import ForwardContext
from fusegrad.tracer.methods import uses_setup_context

Tensor = torch.Tensor
Apply = Callable[..., Any]
LANES = 3
ON_KERNELS = tuple(WRONGS)[::6]
IN_TORCH_COMPILE = ("SineTimesHundred", "ClippedStraightThrough", "CubeTimesX", "SwappedProduct", "Crossed", "SumTwice")

pytestmark = pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")


@functools.cache
def fast(name: str, backend: str) -> Apply:
    return fusegrad.compile(WRONGS[name].cls, backend=backend).apply  # type: ignore[no-any-return,attr-defined]


# ------------------------------------------------------------------ one call
class Call:
    """Arguments, the places of the outputs that have a gradient, and cotangents for them."""

    def __init__(self, wrong: Wrong, seed: int) -> None:
        self.args = wrong.arguments(seed)
        self.moving = [i for i, a in enumerate(self.args) if is_float(a)]
        outputs = as_tuple(wrong.cls.apply(*self.leaves()))  # type: ignore[attr-defined]
        self.places = [i for i, o in enumerate(outputs) if isinstance(o, Tensor) and o.requires_grad]
        generator = torch.Generator().manual_seed(seed + 1000)
        self.cotangents = [
            torch.randn(outputs[i].shape, generator=generator, dtype=outputs[i].dtype) for i in self.places
        ]
        self.expected = wrong.gradients(self.cotangents, self.args)

    def leaves(self) -> list[Any]:
        return [a.detach().clone().requires_grad_() if is_float(a) else a for a in self.args]

    def with_moving(self, moving: Sequence[Any]) -> list[Any]:
        full = list(self.args)
        for i, value in zip(self.moving, moving, strict=True):
            full[i] = value
        return full

    def loss(self, apply: Apply) -> Callable[..., Tensor]:
        def of_moving(*moving: Tensor) -> Tensor:
            outputs = as_tuple(apply(*self.with_moving(moving)))
            return sum((outputs[i] * c).sum() for i, c in zip(self.places, self.cotangents, strict=True))  # type: ignore[return-value]

        return of_moving

    def primals(self) -> list[Tensor]:
        return [self.args[i].detach() for i in self.moving]


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def by_autograd(call: Call, apply: Apply) -> list[Tensor]:
    leaves = call.leaves()
    outputs = as_tuple(apply(*leaves))
    wanted = [leaves[i] for i in call.moving]
    found = torch.autograd.grad([outputs[i] for i in call.places], wanted, call.cotangents, allow_unused=True)
    return or_zeros(found, wanted)


def or_zeros(found: Sequence[Any], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, like, strict=True)]


def close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    torch.testing.assert_close(list(found), list(expected), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ the compositions
def eager(call: Call, apply: Apply, wrong: Wrong) -> None:
    close(by_autograd(call, apply), call.expected)


def checkpointed(call: Call, apply: Apply, wrong: Wrong) -> None:
    close(by_autograd(call, lambda *a: checkpoint(apply, *a, use_reentrant=False)), call.expected)


def func_grad(call: Call, apply: Apply, wrong: Wrong) -> None:
    numbers = tuple(range(len(call.moving)))
    close(torch.func.grad(call.loss(apply), numbers)(*call.primals()), call.expected)


def vmap_grad(call: Call, apply: Apply, wrong: Wrong) -> None:
    calls = [Call(wrong, seed) for seed in range(LANES)]
    slots = [i for i, a in enumerate(call.args) if isinstance(a, Tensor)]

    def gradient(tensors: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Any:
        lane = Call.__new__(Call)
        lane.args, lane.moving, lane.places = list(call.args), call.moving, call.places
        for i, t in zip(slots, tensors, strict=True):
            lane.args[i] = t
        lane.cotangents = list(cotangents)
        primals = [lane.args[i] for i in lane.moving]
        return torch.func.grad(lane.loss(apply), tuple(range(len(lane.moving))))(*primals)

    stacked = [torch.stack([c.args[i] for c in calls]) for i in slots]
    cotangents = [torch.stack(c) for c in zip(*(c.cotangents for c in calls), strict=True)]
    expected = [torch.stack(e) for e in zip(*(c.expected for c in calls), strict=True)]
    close(torch.vmap(gradient)(stacked, cotangents), expected)


def derived_jvp(call: Call, apply: Apply, wrong: Wrong) -> None:
    """<jvp(t), g> == <t, backward(g)>, by the stated gradient."""
    tangents = [torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(7)) for p in call.primals()]

    def f(*moving: Tensor) -> tuple[Tensor, ...]:
        outputs = as_tuple(apply(*call.with_moving(moving)))
        return tuple(outputs[i] for i in call.places)

    def push() -> Any:
        return torch.func.jvp(f, tuple(call.primals()), tuple(tangents))[1]

    if not wrong.linear:
        with pytest.raises(NonLinearBackward, match=rf"(?s){wrong.cls.__name__}.*wrong_backwards\.py:\d+"):
            push()
        return
    left = sum((t * c).sum() for t, c in zip(push(), call.cotangents, strict=True))
    right = sum((t * g).sum() for t, g in zip(tangents, call.expected, strict=True))
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


COMPOSITIONS = {f.__name__: f for f in (eager, checkpointed, func_grad, vmap_grad, derived_jvp)}


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("name", WRONGS)
def test_wrong_stays_wrong(name, composition) -> None:
    wrong = WRONGS[name]
    COMPOSITIONS[composition](Call(wrong, 0), fast(name, "reference"), wrong)


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("name", ON_KERNELS)
def test_so_with_kernels(name, composition) -> None:
    wrong = WRONGS[name]
    COMPOSITIONS[composition](Call(wrong, 0), fast(name, "interpret"), wrong)


# ------------------------------------------------------------------ what is stated is eager's, and is wrong
def true_gradient(wrong: Wrong, call: Call) -> list[Tensor]:
    """The derivative of what forward computes, by autograd through its body."""
    leaves = call.leaves()
    ctx = () if uses_setup_context(wrong.cls) else (ForwardContext((True,) * len(leaves)),)
    outputs = as_tuple(wrong.cls.forward(*ctx, *leaves))  # type: ignore[attr-defined]
    wanted = [leaves[i] for i in call.moving]
    live = [(outputs[i], c) for i, c in zip(call.places, call.cotangents, strict=True) if outputs[i].requires_grad]
    if not live:
        return or_zeros([None] * len(wanted), wanted)
    found = torch.autograd.grad([o for o, _ in live], wanted, [c for _, c in live], allow_unused=True)
    return or_zeros(found, wanted)


@pytest.mark.parametrize("name", WRONGS)
def test_the_statement_is_eagers_and_wrong(name) -> None:
    wrong = WRONGS[name]
    call = Call(wrong, 0)
    close(by_autograd(call, wrong.cls.apply), call.expected)  # type: ignore[attr-defined]
    true = true_gradient(wrong, call)
    assert any(not torch.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in zip(true, call.expected, strict=True))


def test_there_are_enough_of_them_and_they_differ() -> None:
    assert sum(w.linear for w in WRONGS.values()) >= 60
    graphs = {(w.cls.forward.__code__.co_code, w.cls.forward.__code__.co_consts, w.cls.forward.__code__.co_names,
               backward_code(w.cls)) for w in WRONGS.values()}  # fmt: skip
    assert len(graphs) == len(WRONGS)


def backward_code(cls: Any) -> Any:
    method = cls.backward if "backward" in vars(cls) else cls.vjp
    code = getattr(method, "__wrapped__", method).__code__
    return code.co_code, code.co_consts, code.co_names


def test_they_are_compiled() -> None:
    """Wrong gradients of what runs as written would prove nothing."""
    for name in WRONGS:
        by_autograd(Call(WRONGS[name], 0), fast(name, "reference"))
        records = fast(name, "reference").__self__._fusegrad.ledger.records  # type: ignore[attr-defined]
        assert {r.status for r in records.values()} == {"compiled"}, (name, records)


# ------------------------------------------------------------------ inside torch.compile
@pytest.mark.parametrize("name", IN_TORCH_COMPILE)
def test_inside_torch_compile(name) -> None:
    """A sample: forward in the compiled region, backward outside of it."""
    torch._dynamo.reset()
    call, apply = Call(WRONGS[name], 0), fast(name, "reference")
    close(by_autograd(call, torch.compile(lambda *a: apply(*a), backend="aot_eager")), call.expected)


@pytest.mark.parametrize("name", IN_TORCH_COMPILE[:4])
def test_inside_torch_compile_under_func_grad(name) -> None:
    torch._dynamo.reset()
    call, apply = Call(WRONGS[name], 0), fast(name, "reference")
    gradient = torch.compile(torch.func.grad(call.loss(apply), tuple(range(len(call.moving)))), backend="aot_eager")
    close(gradient(*call.primals()), call.expected)
