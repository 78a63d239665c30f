"""Products in kernels, through the whole runtime: plain, batched, differentiated again, and against the clock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


class GatedMLP(Function):
    """Forward two products that share x; backward the same again, then two that are added, and those for weights."""

    @staticmethod
    def forward(ctx: Any, x: Any, wg: Any, wu: Any) -> Any:
        ctx.save_for_backward(x, wg, wu)
        return F.silu(x @ wg) * (x @ wu)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, wg, wu = ctx.saved_tensors
        gate, up = x @ wg, x @ wu
        s = torch.sigmoid(gate)
        d_gate, d_up = g * up * (s * (1 + gate * (1 - s))), g * gate * s
        rows = x.flatten(0, -2).mT
        return d_gate @ wg.mT + d_up @ wu.mT, rows @ d_gate.flatten(0, -2), rows @ d_up.flatten(0, -2)


class LoRA(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, a: Any, b: Any) -> Any:
        return x @ w + (x @ a) @ b * 2.0


class Residual(Function):
    """Bias, activation, dropout from a seed, residual; the activation is a result, too."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, b: Any, residual: Any, seed: Any) -> Any:
        h = F.gelu(F.linear(x, w, b))
        kept = fusegrad.random.uniform(h.shape, seed, like=h) > 0.25
        return torch.where(kept, h / 0.75, 0.0) + residual, h


class MLPEnd(Function):
    """gelu before the product, its derivative on the tile of the product backward."""

    @staticmethod
    def forward(ctx: Any, h: Any, w: Any) -> Any:
        ctx.save_for_backward(h, w)
        return F.gelu(h, approximate="tanh") @ w

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        h, w = ctx.saved_tensors
        made = F.gelu(h, approximate="tanh").flatten(0, -2)
        back = torch.ops.aten.gelu_backward(g @ w.mT, h, approximate="tanh")
        return back, made.mT @ g.flatten(0, -2)


class Nibbles(Function):
    """Two nibbles in a byte, a scale and a zero for 128 of them: as read from a checkpoint."""

    @staticmethod
    def forward(ctx: Any, x: Any, packed: Any, scale: Any, zero: Any) -> Any:
        w = torch.stack([packed & 15, packed >> 4], -1).view(packed.shape[0], -1, 128)
        w = (w.to(x.dtype) - zero[:, :, None]) * scale[:, :, None]
        return x @ w.view(packed.shape[0], -1).t()


class Experts(Function):
    """Tokens in blocks of one expert each, sorted before."""

    @staticmethod
    def forward(ctx: Any, x: Any, token: Any, expert: Any, gate: Any, up: Any) -> Any:
        blocks = x[token].view(expert.shape[0], -1, x.shape[1])
        return F.silu(blocks @ gate[expert]) * (blocks @ up[expert])


class Grouped(Function):
    """Tokens in blocks of one expert each, the gradient of whose weight is that of all its blocks."""

    @staticmethod
    def forward(ctx: Any, x: Any, expert: Any, w: Any) -> Any:
        ctx.save_for_backward(x, expert, w)
        return x @ w[expert]

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, expert, w = ctx.saved_tensors
        return g @ w[expert].mT, None, torch.zeros_like(w).index_add(0, expert, x.mT @ g)


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


def some(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64) * 0.5


def indices(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(0))


EXACT = {
    "gated": (GatedMLP, lambda: [some(3, 7, 40), some(50, 40).t(), some(40, 64)[:, :50]]),
    "added": (LoRA, lambda: [some(37, 40), some(40, 50), some(40, 7), some(7, 50)]),
    "dropout": (Residual, lambda: [some(3, 11, 40), some(21, 40), some(21), some(3, 11, 21), 7]),
    "end": (MLPEnd, lambda: [some(3, 5, 40), some(40, 21)]),
    "nibbles": (Nibbles, lambda: [some(5, 256), indices(256, 35, 128).byte(), some(35, 2), some(35, 2)]),
    "experts": (Experts, lambda: [some(30, 40), indices(30, 80), indices(3, 5), *some(2, 3, 40, 22)[..., 1:]]),
    "grouped": (Grouped, lambda: [some(7, 19, 40), indices(5, 7), some(5, 40, 21)]),
}


def in_dtype(given: list[Any], dtype: torch.dtype) -> list[Any]:
    """The arguments with their floats in this dtype."""
    return [t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in given]


def results(apply: Any, given: list[Any], differs: bool) -> list[torch.Tensor]:
    """What a call returns, and the gradients."""
    floats = [t.requires_grad_() for t in given if differs and t.is_floating_point()]
    found = apply(*given)
    found = list(found) if isinstance(found, tuple) else [found]
    gradients = torch.autograd.grad(found[0].sum(), floats) if differs else ()
    return [t.detach().double() for t in (*found, *gradients)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", EXACT)
def test_they_are_right_beside_eager(case: str, dtype: torch.dtype) -> None:
    cls, made = EXACT[case]
    fast: Any = fusegrad.compile(cls, backend="interpret", fullgraph=True)
    given = in_dtype(made(), dtype)
    calls = (fast.apply, given), (cls.apply, given), (cls.apply, in_dtype(given, torch.float64))
    ours, eager, exact = (results(*call, "backward" in vars(cls)) for call in calls)
    for mine, theirs, true in zip(ours, eager, exact, strict=True):
        errors = [(t - true).abs().max() / true.abs().max() for t in (mine, theirs)]
        assert errors[0] <= 2 * errors[1] + 2 * torch.finfo(dtype).eps
    launched = fusegrad.explain(cls, *in_dtype(given, dtype)).to_dict()["launches"]
    assert launched["forward"] == (2 if case == "added" else 1)


@pytest.mark.parametrize(
    ("cls", "specs", "launches"),
    [(GatedMLP, ("bf16[16,4096]", "bf16[4096,11008]", "bf16[4096,11008]"), (1, 4)),
     (GatedMLP, ("bf16[8192,4096]", "bf16[4096,11008]", "bf16[4096,11008]"), (3, 8)),
     (LoRA, ("bf16[8192,128]", "bf16[128,4096]", "bf16[128,16]", "bf16[16,4096]"), (2, 0)),
     (Nibbles, ("bf16[16,4096]", "u8[4096,2048]", "bf16[4096,32]", "bf16[4096,32]"), (1, 0)),
     (Experts, ("bf16[8192,128]", "i64[4096]", "i64[64]", "bf16[8,128,512]", "bf16[8,128,512]"), (1, 0)),
     (Grouped, ("bf16[256,128,1024]", "i64[256]", "bf16[8,1024,2048]"), (1, 2))],
)  # fmt: skip
def test_the_model_of_the_device_decides(cls: Any, specs: tuple[str, ...], launches: tuple[int, int]) -> None:
    with fusegrad.config.patch(disable="slabs"):  # which have a bound of their own: tests/slabs
        found = fusegrad.explain(cls, *specs, target="cuda:90")
    assert tuple(found.to_dict()["launches"].values()) == launches
    assert all(proof.proved for proof in found.proofs)
    assert not any(m["spills"] for m in found.metrics().values())


def test_weights_of_few_bits_move_few_bytes() -> None:
    moved = fusegrad.explain(Nibbles, "bf16[16,4096]", "u8[4096,2048]", *["bf16[4096,32]"] * 2).to_dict()["bytes"]
    assert moved["forward"] == moved["minimal_forward"] == 2 * 16 * 4096 * 2 + 4096 * 2048 + 2 * 4096 * 32 * 2


def test_of_products_that_no_tile_holds_together_the_last_is_called() -> None:
    def both(x: Any, w: Any, v: Any) -> Any:
        return torch.sigmoid(x @ w) + (x @ v)[:, :512]

    found = fusegrad.explain(both, "bf16[8192,64]", "bf16[64,512]", "bf16[64,1024]", target="cuda:90").to_dict()
    first, second = found["products"]["forward"]
    assert found["launches"]["forward"] == 2 and "in a kernel" in first
    assert "by the library, a product is left to the library: a tile of it does not hold" in second


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
