"""Kernels that a device refuses, or for which there is no memory: another version, else torch, told and on record."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

import fusegrad
from fusegrad.runtime.execution.aten import reference
from fusegrad.runtime.kernels import launch
from fusegrad.runtime.kernels.launch_errors import launch_failure

Tensor = torch.Tensor
SHAPE = 3, 9000
WARM = 12
"""Calls after which nothing is looked up any more."""


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(x, -1) * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        p = torch.softmax(x, -1)
        gp = g * w
        return p * (gp - (gp * p).sum(-1, keepdim=True)), (g * p).sum(0)


class Device:
    """Stands before every launch: raises what `refuses` gives for the number of the kernel's version, if anything."""

    def __init__(self) -> None:
        self.refuses: Callable[[int], Exception | None] = lambda version: None
        self.versions: list[tuple[Any, ...]] = []
        self.given: list[weakref.ref[Tensor]] = []
        self.launched = 0

    def launcher(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def made(kernel: Any, text: str, *rest: Any) -> Callable[..., None]:
            run = real(kernel, text, *rest)
            form = (kernel.name, kernel.source, kernel.num_warps, *kernel.constants.items())
            if form not in self.versions:
                self.versions.append(form)
            same = [v for v in self.versions if v[0] == kernel.name]

            def launched(arguments: Any, grid: int) -> None:
                self.given = [weakref.ref(a) for a in arguments if isinstance(a, Tensor) and a.is_floating_point()]
                if (error := self.refuses(same.index(form))) is not None:
                    raise error
                self.launched += 1
                run(arguments, grid)

            return launched

        return made


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    found = Device()
    monkeypatch.setattr(launch, "launcher", found.launcher(launch.launcher))
    yield found


def compiled() -> Any:
    return fusegrad.compile(type("Scaled", (Scaled,), {}), backend="interpret")


def called(function: Any) -> list[Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(*SHAPE, requires_grad=True), torch.randn(SHAPE[1], requires_grad=True)
    y = function.apply(x, w)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, w))]


def assert_right(fast: Any) -> None:
    for made, expected in zip(called(fast), called(Scaled), strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


def reasons(fast: Any) -> str:
    x, w = torch.randn(*SHAPE, requires_grad=True), torch.randn(SHAPE[1], requires_grad=True)
    return str(fusegrad.explain(fast, x, w))


def no_resources() -> Exception:
    return OutOfResources(300_000, 232_448, "shared memory")


def test_a_refused_kernel_is_followed_by_one_that_needs_less(device: Device) -> None:
    fast = compiled()
    device.refuses = lambda version: no_resources() if version == 0 else None
    assert_right(fast)
    assert device.launched and "runs with " in reasons(fast) and "shared memory" in reasons(fast)
    device.refuses = lambda version: None
    before = device.launched
    assert_right(fast)
    assert device.launched > before


def test_where_every_version_is_refused_torch_runs_the_operations(device: Device) -> None:
    fast = compiled()
    device.refuses = lambda version: no_resources()
    assert_right(fast)
    assert device.launched == 0
    assert "runs operation by operation" in reasons(fast) and "shared memory" in reasons(fast)


@pytest.mark.parametrize("calls", [0, WARM])
def test_a_call_without_memory_runs_through_torch_and_the_next_by_kernels(device: Device, calls: int) -> None:
    fast = compiled()
    for _ in range(calls):
        called(fast)
    device.refuses = lambda version: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    before = device.launched
    assert_right(fast)
    assert device.launched == before and "ran operation by operation: OutOfMemoryError" in reasons(fast)
    device.refuses = lambda version: None
    assert_right(fast)
    assert device.launched > before


@pytest.mark.parametrize("calls", [0, WARM])
def test_what_a_failed_launch_had_taken_is_free_before_torch_asks_for_more(
    device: Device, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, held = compiled(), []
    for _ in range(calls):
        called(fast)
    run = reference.run

    def watched(graph: Any, inputs: Any, sizes: Any) -> Any:
        own = {id(t) for t in inputs}
        held.append([t for ref in device.given if (t := ref()) is not None and id(t) not in own])
        return run(graph, inputs, sizes)

    monkeypatch.setattr(reference, "run", watched)
    device.refuses = lambda version: torch.OutOfMemoryError("CUDA out of memory.")
    called(fast)
    assert len(held) == 2 and not any(held)


@pytest.mark.parametrize("calls", [0, WARM])
def test_an_error_that_may_have_written_something_is_not_gone_round(device: Device, calls: int) -> None:
    fast = compiled()
    for _ in range(calls):
        called(fast)
    error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    device.refuses = lambda version: error
    with pytest.raises(RuntimeError, match="illegal memory access"):
        called(fast)


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (no_resources(), "resources"),
        (RuntimeError("Triton Error [CUDA]: too many resources requested for launch"), "resources"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "memory"),
        (RuntimeError("Triton Error [CUDA]: device-side assert triggered"), None),
        (RuntimeError("Failed to find C compiler. Please specify via CC environment variable."), "resources"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"), "memory"),
        (OSError(28, "No space left on device"), "resources"),
        (MemoryError(), "memory"),
        (ValueError("not supported"), None),
    ],
)
def test_what_an_error_lacks(error: Exception, lacks: str | None) -> None:
    found = launch_failure(error)
    assert (found.lacks if found else None) == lacks
