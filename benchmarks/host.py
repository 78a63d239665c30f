"""Host time per call on tiny CPU tensors, launches stubbed and counted: a null Function, eager, torch.compile, ours.

All peers in one run, interleaved, the least processor time of several rounds: other processes only ever add to it.

    python -m fusegrad.benchmarks.host
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.autograd import Function

import fusegrad
from fusegrad.codegen import TARGETS
from fusegrad.runtime.execution import targets
from fusegrad.runtime.kernels import launch
from fusegrad.tracer.torch_private import direct_apply, empty_on_cpu

from . import functions

Tensor = torch.Tensor
Call = Callable[[], Any]
TARGET = "cuda:90"
PEERS = ("null", "null apply", "eager", "compile", "triton", "reference")


class Null(Function):
    """One allocation, nothing saved: what autograd itself takes for an RMSNorm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return empty_on_cpu((8, 16), (16, 1), torch.float32)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, _WEIGHT, None


_WEIGHT = torch.randn(16)


@dataclass
class Recorder:
    """Stands in for Triton's launches: (kernel, grid) of each, while `recording`."""

    launches: list[tuple[str, int]] = field(default_factory=list)
    recording: bool = False

    def launcher(self, kernel: Any, module_text: str, backend: str, device: Any = None) -> launch.Launch:
        """In place of `launch.launcher`: nothing is compiled, nothing runs."""

        def record(arguments: Sequence[Any], grid: int) -> None:
            if self.recording:
                self.launches.append((kernel.name, grid))

        return record


@contextmanager
def stubbed(target: str = TARGET) -> Iterator[Recorder]:
    """Within the block `backend="triton"` takes CPU tensors: plans are those of `target`, launches are recorded."""
    recorder = Recorder()
    with (
        mock.patch.object(launch, "launcher", recorder.launcher),
        mock.patch.object(targets, "target_for", lambda backend, device: TARGETS[target]),
    ):
        yield recorder


@dataclass(frozen=True)
class Times:
    """Microseconds per call: forward, forward and `torch.autograd.grad`, forward on tensors without grad."""

    forward: float
    both: float
    no_grad: float


def _example() -> tuple[Tensor, Tensor, Tensor]:
    x, weight = torch.randn(8, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    return x, weight, torch.randn(8, 16)


def _calls(function: Callable[..., Tensor]) -> tuple[Call, Call, Call]:
    x, weight, grad = _example()
    plain, plain_weight = x.detach(), weight.detach()

    def both() -> Any:
        return torch.autograd.grad(function(x, weight, 1e-6), (x, weight), grad)

    return lambda: function(x, weight, 1e-6), both, lambda: function(plain, plain_weight, 1e-6)


def _peer(name: str) -> Callable[..., Tensor]:
    match name:
        case "null":
            return direct_apply(Null)
        case "null apply":
            return Null.apply  # type: ignore[no-any-return]
        case "eager":
            return functions.RMSNorm.apply  # type: ignore[no-any-return]
        case "compile":
            return torch.compile(functions.RMSNorm.apply)
    return fusegrad.compile(functions.RMSNorm, backend=name).apply  # type: ignore[attr-defined,no-any-return]


def python_calls(call: Call) -> int:
    """How many Python functions one call enters: a measure of host work that no busy machine disturbs."""
    entered = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered - 1


def interleaved(calls: dict[Any, Call], repeats: int = 200, rounds: int = 30) -> dict[Any, float]:
    """Per call the least microseconds of processor time in several rounds, in each of which every call has its turn."""
    best = dict.fromkeys(calls, float("inf"))
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for key, call in calls.items():
                start = time.thread_time()
                for _ in range(repeats):
                    call()
                best[key] = min(best[key], (time.thread_time() - start) / repeats * 1e6)
    finally:
        gc.enable()
    return best


def host_times(peers: Sequence[str] = PEERS, repeats: int = 200, rounds: int = 30) -> dict[str, Times]:
    """Per peer the host time of an RMSNorm on 8x16 elements, one thread, launches stubbed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with stubbed():
            calls = {(p, i): call for p in peers for i, call in enumerate(_calls(_peer(p)))}
            for call in calls.values():
                for _ in range(20):
                    call()
            best = interleaved(calls, repeats, rounds)
    finally:
        torch.set_num_threads(threads)
    return {p: Times(*(best[p, i] for i in range(3))) for p in peers}


def entered() -> dict[str, tuple[int, ...]]:
    """Python functions entered per call, of what is compiled."""
    with stubbed():
        found = {}
        for peer in ("triton", "reference"):
            calls = _calls(_peer(peer))
            for call in calls * 5:
                call()
            found[peer] = tuple(map(python_calls, calls))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    times = host_times(options.peers.split(","), rounds=options.rounds)
    if options.json:
        print(json.dumps({name: vars(t) for name, t in times.items()}))
        return
    floor = times.get("null")
    print(f"{'':12s} {'forward':>9s} {'fwd+bwd':>9s} {'no grad':>9s}   over null")
    for name, t in times.items():
        over = f"{t.forward / floor.forward:9.2f} {t.both / floor.both:6.2f}" if floor else ""
        print(f"{name:12s} {t.forward:9.2f} {t.both:9.2f} {t.no_grad:9.2f} {over}")
    for name, counts in entered().items():
        print(f"{name}: Python functions entered by forward, forward+backward, forward without grad: {counts}")


if __name__ == "__main__":
    main()
