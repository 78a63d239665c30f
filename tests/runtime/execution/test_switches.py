"""Steps that are left out: by valid names, part of every key, with right results."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad
from fusegrad.ir import show, switches
from fusegrad.ir.switches import CALLS, GRAPHS, SWITCHES
from fusegrad.runtime.compiled import budget
from fusegrad.runtime.execution.executable import LARGE, Executable
from fusegrad.runtime.settings import config

Tensor = torch.Tensor


class Scaled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.neg(-(torch.exp(x) + torch.exp(x))) * (torch.full_like(x, 2.0) * torch.full_like(x, 3.0)) / 8

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (g.t().contiguous().t() * torch.exp(x) * 1.5).t().t()


class Outer(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x.unsqueeze(1) * w.unsqueeze(0)).sum(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


class Rms(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1)
        ctx.save_for_backward(x, y * 0.5)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, half = ctx.saved_tensors
        return g * half + x


class Two(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), x.sum(1)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Tensor:
        return g + h.unsqueeze(1)


class Around(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y = x + 1
        return (y @ y.t()) @ x + y.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x


class Chunks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.cat([x[i : i + 4] @ w for i in range(0, 16, 4)])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class Loss(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return sum((x[i : i + 4] @ w).exp().sum() for i in range(0, 16, 4))  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * x, g * w


class Picked(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.gather(1, x.argsort(1))  # loaded: one that is computed is proved by its check alone

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


class Softmax(Function):
    """Attention that saves what is larger than all its arguments."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = torch.softmax(q @ k.mT, -1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, p = ctx.saved_tensors
        dp = g @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        return ds @ k, ds.mT @ q, p.mT @ g


class Deep(Function):
    """What is larger than its arguments, and takes longer to make again than to move."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.logsumexp(x @ w.mT / 16, -1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        dz = torch.softmax(x @ w.mT / 16, -1) * g[:, None] / 16
        return dz @ w, dz.mT @ x


class Recurrent(Function):
    """A product that no step waits for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        h, hs = torch.zeros_like(x[0]), []
        for xt in x:
            h = torch.tanh(xt @ w) + 0.5 * h
            hs.append(h)
        ctx.save_for_backward(x, w)
        return torch.stack(hs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * x, w * g.sum()


class Ends(Function):
    """Something is made of all states of a loop that runs backwards, of their sum, of the first, and of neighbours."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        h = x[-1]
        hs = [h]
        for t in range(x.shape[0] - 2, -1, -1):
            h = torch.sin(0.5 * h + x[t])
            hs.append(2 * h)
        out = torch.stack(hs[::-1])
        return out.exp(), out[0] * 2, out.sum(0), out[1:] - out[:-1]

    @staticmethod
    def backward(ctx: Any, g: Tensor, first: Tensor, total: Tensor, further: Tensor) -> Tensor:
        return g + first + total + further.mean(0)


class InTheMiddle(Function):
    """A loop whose steps end in the middle of one of those that are written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        d, hs = x.exp(), list[Tensor]()
        for t in range(x.shape[0]):
            z = torch.zeros_like(x[0]) if t == 0 else torch.stack([hs[-1].sin(), hs[-1].cos()]).amax(0)
            hs.append(d[t] - torch.exp(z))
        return d, torch.stack(hs)

    @staticmethod
    def backward(ctx: Any, g: Tensor, steps: Tensor) -> Tensor:
        return g + steps


class BothWays(Function):
    """A loop whose steps are read by one that runs the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        h, there, back = torch.zeros_like(x[0]), [], []
        for t in range(x.shape[0]):
            h = torch.tanh(h + x[t])
            there.append((h, h * x[t].exp()))
        hs, ys = (torch.stack(part) for part in zip(*there, strict=True))
        for t in reversed(range(x.shape[0])):
            h = torch.sin(h * x[t]) + hs[t] * ys[t]
            back.append(h)
        return torch.stack(back)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


class Written(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clone()
        out[1:] += x[:-1]
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        out = g.clone()
        out[:-1] += g[1:]
        return out


class Classes(Function):
    """`one_hot` asserts that no class is out of range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        hot = torch.nn.functional.one_hot(x.argmax(1), x.shape[1]).to(x.dtype)
        ctx.save_for_backward(hot)
        return hot * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


def product(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(x @ w)


SQUARE, TALL = ((6, 6),), ((16, 8), (8, 48))
HEADS = ((2, 40, 16),) * 3
WITNESSES: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    **dict.fromkeys(("cse", "constants", "algebra", "numbers", "layout", "fuse"), (Scaled, SQUARE)),
    "regions": (Written, SQUARE),
    "contract": (Outer, ((5, 4), (3, 4))),
    "motion": (Recurrent, ((12, 3, 4), (4, 4))),
    "handover": (BothWays, ((12, 4),)),
    **dict.fromkeys(("pieces_of_loops", "neighbours", "picked_steps", "summed_steps"), (Ends, ((12, 4),))),
    "longer_loops": (InTheMiddle, ((12, 4),)),
    "recompute": (Rms, SQUARE),
    "overlap": (product, TALL),
    "siblings": (Two, SQUARE),
    "duplicate": (Around, SQUARE),
    "lifetimes": (Loss, ((16, 8), (8, 8))),
    "streams": (Softmax, HEADS),
    "slabs": (Deep, ((300, 256), (400, 256))),
    "exchange": (Softmax, HEADS),
    "products": (product, TALL),
    "index_checks": (Picked, SQUARE),
    "assertions": (Classes, SQUARE),
    "place": (Chunks, ((16, 8), (8, 8))),
}


def called(target: Any, shapes: tuple[tuple[int, ...], ...], apply: Callable[..., Any]) -> list[Tensor]:
    """Outputs and gradients."""
    torch.manual_seed(0)
    xs = [torch.randn(s, requires_grad=True) for s in shapes]
    made = apply(*xs)
    outputs = made if isinstance(made, tuple) else (made,)
    return [*outputs, *torch.autograd.grad(outputs, xs, [torch.cos(o.detach()) for o in outputs])]


def compiled(target: Any, shapes: tuple[tuple[int, ...], ...], backend: str = "interpret") -> tuple[Any, str]:
    """(the compiled class or function, what it has become as text), once its results were compared."""
    fast = fusegrad.compile(target, backend=backend, fullgraph=True, slab_bytes=100_000 if target is Deep else None)
    users, apply = (f.apply if isinstance(f, type) else f for f in (target, fast))
    for got, want in zip(called(target, shapes, apply), called(target, shapes, users), strict=True):
        torch.testing.assert_close(got, want)
    return fast, "\n".join(_picture(e) for e in executables(fast))


def executables(fast: Any) -> list[Executable]:
    """What forward and backward run."""
    specs = [s for s in compiler_of(fast).table]
    entries = [e for s in specs for e in s.backward.entries.values()]
    return [x for made in (*specs, *entries) for x in made.executables.values()]


def compiler_of(fast: Any) -> Any:
    return fusegrad.runtime.report.explain.compiler_of(fast)


def _picture(executable: Executable) -> str:
    plans = executable.plans.values()
    steps = [f"{type(s).__name__} {p.places.keys()}" for p in plans for s in p.steps or ()]
    texts = [v.text for p in plans for r in p.group_runners() for v in r.variants]
    return "\n".join([show(executable.graph) if executable.graph is not None else "", *steps, *texts])


def test_every_switch_has_a_witness() -> None:
    assert set(WITNESSES) == set(GRAPHS)


@pytest.mark.parametrize("switch", GRAPHS)
def test_other_graphs_and_the_same_numbers(switch: str) -> None:
    on = compiled(*WITNESSES[switch])[1]
    with config.patch(disable=switch, debug=True):
        assert compiled(*WITNESSES[switch])[1] != on


@pytest.mark.parametrize("target", [Scaled, Rms, Two, Around])
def test_without_any_of_them(target: Any) -> None:
    with config.patch(disable=SWITCHES, debug=True):
        fast, _ = compiled(target, SQUARE)
        plans = [p for e in executables(fast) for p in e.plans.values()]
        assert plans, "kernels all the same"
        compiled(target, SQUARE, "reference")


# ------------------------------------------------------------------ calls
def _globals(function: Callable[..., Any]) -> list[Any]:
    return [v for name, v in function.__globals__.items() if name.startswith("c")]


def test_operations_are_called_through_torch_ops() -> None:
    def boxed() -> bool:
        (first, *_) = executables(compiled(Scaled, SQUARE, "reference")[0])
        return all(type(v).__name__ != "method_descriptor" for v in _globals(first.replay))

    assert not boxed()
    with config.patch(disable="binding"):
        assert boxed()


def test_results_have_memory_of_their_own() -> None:
    def written() -> bool:
        n = LARGE // 256
        (first, *_) = executables(compiled(Scaled, ((n, n),), "reference")[0])
        return any(str(getattr(v, "__name__", "")).endswith("_") for v in _globals(first.replay_reusing_memory))

    assert written()
    with config.patch(disable="reuse"):
        assert not written()


def test_no_capture_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "WORK", 1)
    left_out, fast = fusegrad.compile(Scaled), fusegrad.compile(Scaled)
    for dtype in (torch.float32, torch.float64):
        fast.apply(torch.ones(3, 3, dtype=dtype))
        with config.patch(disable="patience"):
            left_out.apply(torch.ones(3, 3, dtype=dtype))
    assert len(compiler_of(fast).table.by_facts) == 1
    assert len(compiler_of(left_out).table.by_facts) == 2


def test_loops_are_traced_step_by_step() -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[0])
        for t in range(x.shape[0]):
            h = torch.sin(h) + x[t]
        return h

    def captures(lengths: tuple[int, ...]) -> int:
        fast, before = fusegrad.compile(total), fusegrad.stats()["captures"]
        for n in lengths:
            fast(torch.ones(n, 3))
        return fusegrad.stats()["captures"] - before

    assert captures((12, 13, 14)) == captures((12,)) > 0
    with config.patch(disable="loops"):
        assert captures((12, 13, 14)) == 3 * captures((12,))


def test_no_call_is_written_out() -> None:
    def written(fast: Any) -> int:
        for _ in range(5):
            called(Rms, SQUARE, fast.apply)
        return int(compiler_of(fast).inline_cache.written_count)

    assert written(fusegrad.compile(Rms)) > 0
    with config.patch(disable="ready"):
        assert written(fusegrad.compile(Rms)) == 0
    assert set(CALLS) == {"binding", "reuse", "ready", "patience", "loops"}, "each has a test above"


# ------------------------------------------------------------------ never stale
def test_one_class_under_both() -> None:
    """Each call is served by what was compiled under its own settings, however often it came."""
    fast = fusegrad.compile(Scaled, backend="interpret")
    for _ in range(4):
        called(Scaled, SQUARE, fast.apply)
        with config.patch(disable=("fuse", "siblings")):
            called(Scaled, SQUARE, fast.apply)
    (whole, apart) = (s for s in compiler_of(fast).table)
    steps = [[len(p.steps or ()) for e in s.executables.values() for p in e.plans.values()] for s in (whole, apart)]
    assert max(steps[0]) < max(steps[1])


def test_backward_outside_of_the_block_is_that_of_its_forward() -> None:
    fast: Any = fusegrad.compile(Scaled, backend="interpret")
    x = torch.randn(6, 6, requires_grad=True)
    with config.patch(disable="algebra"):
        y = fast.apply(x)
    y.sum().backward()
    (spec,) = (s for s in compiler_of(fast).table)
    (entry,) = spec.backward.entries.values()
    made = [*spec.executables.values(), *entry.executables.values()]
    assert [set(e.switches.off) for e in made] == [{"algebra"}] * len(made)
    assert all(set(p.switches.off) == {"algebra"} for e in made for p in e.plans.values())


# ------------------------------------------------------------------ names
def test_names_are_checked_and_meant_ones_suggested() -> None:
    with pytest.raises(config.ConfigError, match="did you mean algebra"), config.patch(disable="algbra"):
        raise AssertionError
    with config.patch(disable="fuse, cse") as inner:
        assert inner.disable == ("cse", "fuse") and switches.switch_state().off == {"cse", "fuse"}
        with config.patch(disable=()):
            assert switches.is_on("fuse")
        assert not switches.is_on("fuse")
    assert not switches.switch_state()


def test_the_environment_leaves_out_for_the_process() -> None:
    code = (
        "from fusegrad.ir import switches; from fusegrad.runtime.settings import config; "
        "print(config.settings().disable, sorted(switches.switch_state().off))"
    )
    found = _python(code, "cse,fuse")
    assert found.stdout.strip() == "('cse', 'fuse') ['cse', 'fuse']", found.stderr
    wrong = _python(code, "cze")
    assert wrong.returncode and "did you mean cse" in wrong.stderr


def _python(code: str, disable: str) -> subprocess.CompletedProcess[str]:
    import os

    environment = {**os.environ, "FUSEGRAD_DISABLE": disable}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
