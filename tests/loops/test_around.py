"""Around a compiled class with a loop: graphs of other compilers, checkpoints, autocast, threads, a cache on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops.recurrences import Gated
from loops.turning import TURN, TURNING, BackwardTurns, ForwardTurns
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import fusegrad
from fusegrad.runtime.settings import config

ANY = Any
LENGTHS = (12, 1, 15, 40, 20)
"""Some with step 30, and some without."""


def made(cls: type, steps: int) -> list[Tensor]:
    torch.manual_seed(steps)
    return [torch.rand(steps, 3, requires_grad=True) for _ in range(2 if cls is Gated else 1)]


def outcome(function: Callable[..., Tensor], args: list[Tensor]) -> list[Tensor]:
    out = function(*args)
    return [out, *torch.autograd.grad(out.sin().sum(), args)]


def same(function: Callable[..., Tensor], cls: ANY, steps: int) -> bool:
    args = made(cls, steps)
    return all(map(torch.equal, outcome(function, args), outcome(cls.apply, args)))


# ------------------------------------------------------------------ graphs of others
@pytest.fixture
def fresh() -> None:
    torch._dynamo.reset()


def compiled(cls: ANY) -> Callable[..., Tensor]:
    fast = fusegrad.compile(cls)
    return torch.compile(lambda *args: fast.apply(*args), backend="aot_eager", dynamic=True)


@pytest.mark.parametrize("cls", [Gated, BackwardTurns], ids=lambda c: c.__name__)
def test_torch_compile(cls: ANY, fresh: None) -> None:
    function = compiled(cls)
    assert all(same(function, cls, steps) for steps in LENGTHS)


def exported(cls: ANY) -> Callable[..., Tensor]:
    """A program of torch.export in which the length is a symbol."""
    fast = fusegrad.compile(cls)

    class Module(torch.nn.Module):
        def forward(self, *args: Tensor) -> Tensor:
            return fast.apply(*args)

    args = [a.detach() for a in made(cls, LENGTHS[0])]
    dynamic = (tuple({0: torch.export.Dim.AUTO} for _ in args),)
    return torch.export.export(Module(), tuple(args), dynamic_shapes=dynamic).module()


def test_torch_export(fresh: None) -> None:
    program = exported(Gated)
    for steps in LENGTHS:
        args = made(Gated, steps)
        assert torch.equal(program(*args), Gated.apply(*args))


@pytest.mark.parametrize("made_by", [compiled, exported], ids=lambda f: f.__name__)
def test_a_graph_of_another_compiler_refuses_a_loop_that_is_another_one(made_by: ANY, fresh: None) -> None:
    """It cannot run the method instead, and says so."""
    function = made_by(ForwardTurns)
    for steps in LENGTHS:
        args = made(ForwardTurns, steps)
        if steps > TURN:
            with pytest.raises(fusegrad.FusegradError, match="differs in content"):
                function(*args)
        else:
            assert torch.equal(function(*args), ForwardTurns.apply(*args))


# ------------------------------------------------------------------ training code
@pytest.mark.parametrize("is_reentrant", [True, False])
def test_checkpoint(is_reentrant: bool) -> None:
    fast = fusegrad.compile(Gated)
    for steps in LENGTHS:
        grads = []
        for cls in (Gated, fast):
            args = made(Gated, steps)
            checkpoint(cls.apply, *args, use_reentrant=is_reentrant).sin().sum().backward()
            grads.append([a.grad for a in args])
        assert all(map(torch.equal, *grads))


class Cell(Function):
    """A cell with a matrix product, which autocast rounds."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, w: Tensor) -> Tensor:
        h, hs = torch.zeros_like(x[0]), []
        for xt in x:
            h = torch.tanh(xt + h @ w)
            hs.append(h)
        out = torch.stack(hs)
        ctx.save_for_backward(w, out)
        return out

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        w, out = ctx.saved_tensors
        gh, gxs = torch.zeros_like(g[0]), []
        for t in reversed(range(len(g))):
            gz = (gh + g[t]) * (1 - out[t] ** 2)
            gxs.append(gz)
            gh = gz @ w.t()
        return torch.stack(gxs[::-1]), None


class Autocast(Cell):
    forward = staticmethod(torch.amp.custom_fwd(Cell.forward, device_type="cpu", cast_inputs=torch.bfloat16))
    backward = staticmethod(torch.amp.custom_bwd(Cell.backward, device_type="cpu"))


@pytest.mark.parametrize("cls", [Cell, Autocast], ids=lambda c: c.__name__)
def test_autocast(cls: ANY) -> None:
    fast = fusegrad.compile(cls)
    for enabled in (True, False):
        for steps in (12, 15, 2):
            torch.manual_seed(steps)
            x, w, found = torch.randn(steps, 2, 4, requires_grad=True), torch.randn(4, 4), []
            for apply in (cls.apply, fast.apply):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                    out = apply(x, w)
                found.append([out, *torch.autograd.grad(out.float().sum(), x)])
            assert found[0][0].dtype == found[1][0].dtype and all(map(torch.equal, *found))


@pytest.mark.parametrize("cls", [Gated, *TURNING], ids=lambda c: c.__name__)
def test_threads_of_different_lengths(cls: ANY) -> None:
    """As replicas of DataParallel call it, each with a part of its own."""
    fast, wrong = fusegrad.compile(cls), list[int]()

    def replica(first: int) -> None:
        for steps in (first, 15, 40 + first, 20):
            args = [torch.rand(steps, 3, requires_grad=True) for _ in made(cls, 1)]
            if not all(map(torch.equal, outcome(fast.apply, args), outcome(cls.apply, args))):
                wrong.append(steps)

    threads = [threading.Thread(target=replica, args=(12 + i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ------------------------------------------------------------------ comparisons
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cls", TURNING, ids=lambda c: c.__name__)
def test_a_comparison_on_few_elements_has_all_steps(cls: ANY) -> None:
    """Where the whole would fill memory: of other axes a few elements are enough."""
    with fusegrad.config.patch(check_bytes=1):
        fast = fusegrad.compile(cls)
        assert all(same(fast.apply, cls, steps) for steps in LENGTHS)


# ------------------------------------------------------------------ captures on disk
def from_disk(cls: ANY, lengths: tuple[int, ...]) -> int:
    """Compiles a class anew, as another process would; the captures that were found on disk, right at all lengths."""
    before, fast = fusegrad.stats()["from_disk"], fusegrad.compile(cls)
    for steps in lengths:
        args = made(cls, steps)
        for mine, users in zip(outcome(fast.apply, args), outcome(cls.apply, args), strict=True):
            torch.testing.assert_close(mine, users, rtol=1e-5, atol=1e-5)
    return int(fusegrad.stats()["from_disk"] - before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cls", TURNING, ids=lambda c: c.__name__)
def test_captures_from_disk_are_compared_at_longer_loops(
    cls: ANY, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path))
    with config.patch(store=True, backend="interpret"):
        assert [from_disk(cls, lengths) for lengths in ((12,), (12, 40), (40,))] == [0, 1, 1]
