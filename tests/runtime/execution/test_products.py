"""Products in kernels, through the whole runtime: plain, batched, differentiated again, and against the clock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from function_samples import leaf
from test_tune import Clock
from torch.autograd import Function

import fusegrad
from fusegrad.codegen import TARGETS
from fusegrad.ir.errors import Unfusible
from fusegrad.ir.passes.fuse import View
from fusegrad.runtime.execution import targets
from fusegrad.runtime.execution.group import GroupRunner
from fusegrad.runtime.execution.variants import Variants
from fusegrad.runtime.kernels import autotune as tune
from fusegrad.runtime.kernels import launch


class Scores(Function):
    """Memory decides at every size that is met here, in half precision."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, mask: Any) -> Any:
        ctx.save_for_backward(q, k)
        return torch.bmm(q, k.mT) * 0.125 + mask

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        q, k = ctx.saved_tensors
        g = g * 0.125
        return torch.bmm(g, k), torch.bmm(g.mT, q), None


SPECS = ("bf16[64,1024,64]", "bf16[64,1024,64]", "bf16[1024,1024]")


def test_the_plan_moves_what_has_to_move() -> None:
    found = fusegrad.explain(Scores, *SPECS).to_dict()
    moved = found["bytes"]
    assert found["launches"] == {"forward": 1, "backward": 2}
    assert moved["forward"] == moved["minimal_forward"]
    assert moved["backward"] == 2 * 2 * (64 * 1024 * 1024 + 2 * 64 * 1024 * 64), "each gradient reads g once"
    assert all("in a kernel" in line for lines in found["products"].values() for line in lines)


def test_forward_and_backward_and_a_batch_agree_with_eager() -> None:
    fast = fusegrad.compile(Scores, backend="interpret")
    given = [leaf(3, 20, 16), leaf(3, 33, 16), leaf(20, 33)]
    for cut in (slice(None), slice(1, 2)):
        mine, theirs = ([t.detach()[cut].half().requires_grad_() if t.dim() == 3 else t.detach().half() for t in given]
                        for _ in range(2))  # fmt: skip
        ours, eager = fast.apply(*mine), Scores.apply(*theirs)
        torch.testing.assert_close(ours, eager, rtol=4e-3, atol=4e-3)
        for out in (ours, eager):
            out.backward(torch.ones_like(out))
        for one, other in zip(mine[:2], theirs[:2], strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=4e-3, atol=4e-3)
    batch = [torch.stack([t.detach().half()] * 2) for t in given]
    batched = torch.vmap(fast.apply)(*batch)
    eager = torch.stack([Scores.apply(*(b[i] for b in batch)) for i in range(2)])
    torch.testing.assert_close(batched, eager, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(("times", "launched"), [((1.0, 2.0, 3.0), 1), ((3.0, 2.0, 1.0), 2)])
def test_the_clock_may_prefer_the_library(
    times: Any, launched: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The library's product stands beside our kernel; whichever is faster serves."""
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path))
    seen: list[str] = []
    stub = lambda kernel, *rest: lambda arguments, grid: seen.append(kernel.name)  # noqa: E731
    monkeypatch.setattr(launch, "launcher", stub)
    monkeypatch.setattr(targets, "target_for", lambda backend, device: TARGETS["cuda:90"])
    monkeypatch.setattr(tune, "time_by_events", Clock(*times))
    given = [torch.ones(2, 32, 64), torch.ones(2, 32, 64), torch.ones(32, 32)]
    fast: Any = fusegrad.compile(Scores, backend="triton")
    with fusegrad.config.patch(tune=True, check=False), tune.record_trials() as trials:
        for _ in range(4):
            fast.apply(*given)
    (first,) = [t for t in trials if t.kernel == "Scores_forward"]
    assert first.candidates[-1] == "the library's product" and len(first.candidates) == 3
    assert (first.chosen == "the library's product") is (launched == 2)
    assert seen[-1] == ("Scores_forward_apart" if launched == 2 else "Scores_forward")


def test_tf32_is_what_torch_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusegrad.codegen import Kernel

    asked: list[Any] = []
    monkeypatch.setattr(
        launch, "_on_device", lambda kernel, *rest: lambda *call: asked.append(kernel.constants["PRECISION"])
    )
    run = launch.launcher(Kernel("k", "", (), {"PRECISION": "ieee"}, 1, 4), "", "triton", "cuda")
    known = torch.get_float32_matmul_precision()
    try:
        for setting in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(setting)
            run((), 1)
    finally:
        torch.set_float32_matmul_precision(known)
    assert asked == ["ieee", "tf32", "ieee"]


def refusing(ask: Any) -> Any:
    """A question to the kernels of a group that is refused where the group has a product."""

    def asked(variants: Variants, *more: Any) -> Any:
        if any(v.prim == "dot" for v in variants.group.graph.order()):
            raise Unfusible(value=None, reason="nothing fits")
        return ask(variants, *more)

    return asked


def runner_of(fast: Any) -> GroupRunner:
    """The one fused group of a compiled class's forward."""
    (spec,) = fast._fusegrad.table
    (plan,) = (p for e in spec.executables.values() for p in e.plans.values())
    (runner,) = plan.runners.values()
    return runner  # type: ignore[no-any-return]


def test_at_sizes_that_are_refused_the_library_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its product between kernels, not operation by operation: nothing is on record, and kernels run at other sizes."""
    fast = fusegrad.compile(Scores, backend="interpret", fullgraph=True)
    given = [torch.randn(3, 20, 16).half(), torch.randn(3, 33, 16).half(), torch.randn(20, 33).half()]
    fast.apply(*given)
    larger = [torch.randn(5, 21, 16).half(), torch.randn(5, 34, 16).half(), torch.randn(21, 34).half()]
    monkeypatch.setattr(Variants, "admitting", refusing(Variants.admitting))
    for _ in range(2):
        torch.testing.assert_close(fast.apply(*larger), Scores.apply(*larger), rtol=4e-3, atol=4e-3)
    runner = runner_of(fast)
    assert list(runner.called.values()) == ["cannot generate code for None: nothing fits"] and not runner.one_by_one
    plan = runner.through_library
    assert [type(s).__name__ for s in plan.steps if not isinstance(s, View)] == ["Extern", "Group"]
    torch.testing.assert_close(fast.apply(*given), Scores.apply(*given), rtol=4e-3, atol=4e-3)


def test_a_counterpart_that_is_refused_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = fusegrad.compile(Scores, backend="interpret", fullgraph=True)
    given = [torch.randn(3, 20, 16).half(), torch.randn(3, 33, 16).half(), torch.randn(20, 33).half()]
    monkeypatch.setattr(Variants, "generate_kernels", refusing(Variants.generate_kernels))
    torch.testing.assert_close(fast.apply(*given), Scores.apply(*given), rtol=4e-3, atol=4e-3)
    assert len(runner_of(fast).variants.ordered) == 1
