"""Memory that is read no more, taken for results: the same bits, and what is kept is not written to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

import fusegrad
from fusegrad.runtime.execution import executable as executables
from fusegrad.runtime.execution.aten.buffer_reuse import reusable_buffers
from fusegrad.runtime.execution.aten.replay import compile_fx
from fusegrad.tracer.capture.capture import Session
from fusegrad.tracer.reads.reads import scan
from fusegrad.tracer.trace import Trace

Tensor = torch.Tensor
ROWS, COLUMNS = 3, 4


class Writing(TorchDispatchMode):
    """How many operations wrote into memory that there was."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.is_mutable
        return func(*args, **(kwargs or {}))


def captured_trace(body: Callable[..., Any]) -> Trace:
    session = Session()
    given = [session.fake(torch.randn(ROWS, COLUMNS)) for _ in range(2)]
    trace = session.trace(body, given, scan(body))
    known = len(session.env.guards)
    reusable_buffers(trace.graph_module)
    assert len(session.env.guards) == known, "a trial assumed something of the sizes"
    return trace


def captured(body: Callable[..., Any]) -> torch.fx.GraphModule:
    return captured_trace(body).graph_module


def assert_same(gm: torch.fx.GraphModule, rows: int = 5) -> int:
    """Returns how many operations wrote into memory that there was."""
    given = [torch.randn(rows, COLUMNS) for _ in range(2)]
    before = [t.clone() for t in given]
    theirs = compile_fx(gm)(*given)
    with Writing() as writing:
        mine = compile_fx(gm, reusing=True)(*given)
    assert all(map(torch.equal, given, before)), "an argument was written to"
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        assert a._version == b._version
    return writing.count


def chain(x: Tensor, y: Tensor) -> Any:
    return ((torch.sigmoid(x) * x * y).tanh(),)


BODIES: dict[str, tuple[int, Callable[[Tensor, Tensor], Any]]] = {
    "a chain": (3, chain),
    "the second operand dies": (1, lambda x, y: (x - torch.exp(y),)),
    "an operand is read later": (0, lambda x, y: ((e := torch.exp(x)) * y, e.sum(0))),
    "an operand is a result": (0, lambda x, y: (e := torch.exp(x), e * y)),
    "an argument": (0, lambda x, y: (x * y,)),
    "a view is read later": (0, lambda x, y: ((t := torch.exp(x).t()).t() * y, t * 2)),
    "a view of the same memory beside it": (0, lambda x, y: ((e := torch.exp(x)) * e.view(-1)[:COLUMNS],)),
    "a broadcast operand": (0, lambda x, y: (torch.exp(x.sum(0)) * y,)),
    "another dtype": (0, lambda x, y: ((torch.exp(x) > y),)),
    "another shape of it": (0, lambda x, y: (torch.exp(x.t()).t() * y,)),
    "an odd layout": (1, lambda x, y: (torch.exp(x.t().contiguous().t()) * 3,)),
    "a dead stranger": (2, lambda x, y: (torch.exp(x).tanh().sum(0), x * 2)),
    "written by the author": (0, lambda x, y: (x.clone().mul_(y), x * 2)),
    "no such operation": (0, lambda x, y: (1 - torch.exp(x),)),
}


@pytest.mark.parametrize("name", BODIES)
def test_memory_is_taken_where_it_is_free(name: str) -> None:
    least, body = BODIES[name]
    gm = captured(body)
    written = assert_same(gm)
    authors = sum(n.op == "call_function" and n.target._schema.is_mutable for n in gm.graph.nodes)
    assert written - authors >= least
    assert (written > authors) == bool(least)


UNARY = (torch.exp, torch.sin, torch.sigmoid, lambda t: t * 2, lambda t: 1 - t, torch.square, torch.clone, torch.relu)
VIEWS = (lambda t: t.view(-1).view(t.shape), lambda t: t[:], lambda t: t.t().t(), lambda t: t.detach())
BINARY = (torch.add, torch.mul, torch.sub, torch.maximum, lambda a, b: torch.where(a > b, a, b), torch.div)
REDUCED = (lambda t: t - t.amax(-1, keepdim=True), lambda t: t * t.mean(0), lambda t: t + t.sum())
WRITTEN = (lambda t: t.clone().mul_(3), lambda t: torch.zeros_like(t).copy_(t))


def program(seed: int) -> Callable[[Tensor, Tensor], Any]:
    """A dozen operations on what was made so far; some results stay, as they are or seen another way."""

    def body(x: Tensor, y: Tensor) -> Any:
        choose, made = random.Random(seed), [x, y]
        for _ in range(12):
            ways: Sequence[Any] = choose.choice((UNARY, UNARY, VIEWS, BINARY, BINARY, REDUCED, WRITTEN))
            of = [choose.choice(made[-5:]) for _ in range(2 if ways is BINARY else 1)]
            made.append(choose.choice(ways)(*of))
        return tuple(choose.sample(made[2:], 2))

    return body


def test_of_any_program_the_bits_are_the_same() -> None:
    written = [assert_same(captured(program(seed))) for seed in range(30)]
    assert sum(n > 0 for n in written) > 15


class Gated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        s = torch.sigmoid(x)
        ctx.save_for_backward(x, s)
        return s * x * y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, s = ctx.saved_tensors
        return g * s * (1 + x * (1 - s)) * 3, g * s


@pytest.fixture
def large(monkeypatch: Any) -> None:
    """Every tensor is large."""
    monkeypatch.setattr(executables, "LARGE", 0)


def test_small_tensors_are_left_to_the_allocator() -> None:
    executable = executables.Executable(captured_trace(chain), "chain", "reference")
    small, big = torch.randn(ROWS, COLUMNS), torch.randn(1 << 14, COLUMNS)
    assert executable.replay_of([small, 3]) is executable.replay
    assert executable.replay_of([small, big]) is executable.replay_reusing_memory


@pytest.mark.usefixtures("large")
def test_what_is_saved_is_never_written_to() -> None:
    fast = fusegrad.compile(Gated)
    x, y = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    for _ in range(8):
        found, wanted = [], []
        for results, function in ((found, fast), (wanted, Gated)):
            out = function.apply(x, y)
            grads = torch.autograd.grad(out, (x, y), torch.ones_like(out), retain_graph=True)
            again = torch.autograd.grad(out, (x, y), torch.ones_like(out))
            results += [out.detach(), *grads, *again]
        assert all(map(torch.equal, found, wanted)) and found[0]._version == 0


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_without_a_node(mode: Any) -> None:
    fast, x, y = fusegrad.compile(Gated), torch.randn(4, 5), torch.randn(4, 5)
    for _ in range(6):
        with mode():
            out = fast.apply(x, y)
            assert torch.equal(out, Gated.apply(x, y)) and out.is_inference() == torch.is_inference_mode_enabled()


@pytest.mark.usefixtures("large")
def test_a_parameter_from_outside_leaves_the_result_alone() -> None:
    scale = torch.nn.Parameter(torch.full((5,), 2.0))

    class Scaled(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.exp(x) * scale

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    fast, x = fusegrad.compile(Scaled), torch.randn(3, 5)
    for _ in range(6):
        out = fast.apply(x)
        assert torch.equal(out, Scaled.apply(x)) and not out.requires_grad
