"""A mistake of ours in a pass or in the generator: the captured operations run, with a warning and on record."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad
from fusegrad.ir.errors import FusegradError, UnsupportedBackendError
from fusegrad.runtime.execution import graph_to_kernels as pipeline
from fusegrad.runtime.execution import kernel_plan
from fusegrad.runtime.specialize import residuals

Tensor = torch.Tensor


class Gated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        gate = torch.sigmoid(x * w)
        ctx.save_for_backward(x, w, gate, gate * x)
        return gate * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w, gate, y = ctx.saved_tensors
        inner = g * y * (1 - gate)
        return g * gate + inner * w, (inner * x).sum(0)


def tanhs(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).tanh().exp().clamp_min(0.25)


def broken(*_: Any, **__: Any) -> Any:
    raise ValueError("tuple.index(x): x not in tuple")


PLACES: dict[str, tuple[Any, str]] = {
    "a pass": (pipeline, "optimize"),
    "the generator": (kernel_plan, "generate"),
    "the choice of residuals": (residuals, "_chosen"),
    "a backward on other residuals": (residuals, "optimize"),
    "a derived backward on them": (residuals.DerivedResidualPlan, "backward_graph"),
}


@pytest.mark.filterwarnings("default::fusegrad.FallbackWarning")
@pytest.mark.parametrize("target", [Gated, tanhs], ids=["class", "function"])
@pytest.mark.parametrize(("owner", "name"), PLACES.values(), ids=PLACES)
def test_results_are_eagers_and_the_reason_is_told(
    target: Any, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    fast = fusegrad.compile(target, backend="interpret")
    call, theirs = (fast.apply, target.apply) if isinstance(target, type) else (fast, target)
    x, w = torch.randn(5, 7, requires_grad=True), torch.randn(7, requires_grad=True)
    eager = theirs(x, w)
    g = torch.randn_like(eager)
    for _ in range(3):
        ours = call(x, w)
        torch.testing.assert_close(ours, eager)
        for mine, their in zip(
            torch.autograd.grad(ours, (x, w), g), torch.autograd.grad(eager, (x, w), g, retain_graph=True), strict=True
        ):
            torch.testing.assert_close(mine, their)


@pytest.mark.filterwarnings("default::fusegrad.FallbackWarning")
def test_it_is_told_once_and_is_on_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_plan, "generate", broken)
    fast = fusegrad.compile(Gated, backend="interpret")
    args = torch.randn(5, 7), torch.randn(7)
    with pytest.warns(fusegrad.FallbackWarning, match="Gated.forward: .*ValueError: tuple.index") as seen:
        for _ in range(3):
            fast.apply(*args)
    assert sum(issubclass(w.category, fusegrad.FallbackWarning) for w in seen) == 1
    assert "internal error: ValueError" in fast._fusegrad.ledger.records["forward"].reason


def test_debug_raises_the_mistake_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_plan, "generate", broken)
    fast = fusegrad.compile(Gated, backend="interpret")
    with fusegrad.config.patch(debug=True), pytest.raises(ValueError, match="not in tuple"):
        fast.apply(torch.randn(5, 7), torch.randn(7))


def test_what_is_said_to_the_user_is_no_mistake_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise UnsupportedBackendError(backend="triton", what="it", reason="no", fix="none")

    monkeypatch.setattr(kernel_plan, "generate", refused)
    with pytest.raises(FusegradError, match="no"):
        fusegrad.compile(Gated, backend="interpret").apply(torch.randn(5, 7), torch.randn(7))


@pytest.mark.parametrize("place", ["copy_tensor", "has_same_content", "tensors_in", "_fault"])
def test_a_nested_call_runs_once_where_its_record_fails(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The method is under way, and what it calls may have happened: the call is finished, and nothing is captured."""
    from fusegrad.tracer.opaque import call_interception, opaque

    calls: list[float] = []

    class Told(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            calls.append(float(x.sum()))
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * 2

    class Around(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return Told.apply(x.sin()).cos()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * 3

    def fails(*args: Any, **kwargs: Any) -> None:
        raise KeyError("injected")

    fast, x = fusegrad.compile(Around, backend="reference"), torch.ones(3, requires_grad=True)
    with monkeypatch.context() as patch, pytest.warns(fusegrad.FallbackWarning, match="FG071"):
        for module in (call_interception, opaque):
            if hasattr(module, place):
                patch.setattr(module, place, fails)
        assert torch.equal(fast.apply(x), Around.apply(x))
    assert len(calls) == 2
    for _ in range(3):
        assert torch.equal(fast.apply(x), Around.apply(x))
    assert len(calls) == 8
