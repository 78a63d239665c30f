"""What is seen of slabs from outside: which are walked, and the memory that calls take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

import fusegrad
from fusegrad.runtime.execution.slabs.slab_runner import SlabRunner

Tensor = torch.Tensor


class Slab(NamedTuple):
    """A slab that ran: of which group, from which row on, and how many."""

    name: str
    start: int
    rows: int


@contextlib.contextmanager
def walked() -> Iterator[list[Slab]]:
    """The slabs that run within the block."""
    seen: list[Slab] = []
    run = SlabRunner._run

    def noted(self: SlabRunner, inputs: Any, sizes: Any, start: int, count: int, results: Any) -> None:
        seen.append(Slab(self.name, start, count))
        run(self, inputs, sizes, start, count, results)

    SlabRunner._run = noted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        SlabRunner._run = run  # type: ignore[method-assign]


def of(seen: Sequence[Slab], direction: str) -> list[Slab]:
    """Those of forward or backward."""
    return [s for s in seen if f"_{direction}" in s.name]


def small(limit: int, **more: Any) -> Any:
    """Slabs of so many bytes, and no kernels that would make them needless."""
    return fusegrad.config.patch(slab_bytes=limit, disable="streams", **more)


def both_ways(call: Callable[..., Any], arguments: Sequence[Any]) -> list[Tensor]:
    """Results and gradients."""
    results = call(*arguments)
    asked = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    return [results.detach(), *torch.autograd.grad(results, asked, torch.cos(results.detach()), allow_unused=True)]


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most memory of tensors on the CPU that a call takes at once, its results included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = call()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    taken = most = 0
    for _, change in changes:
        taken += change
        most = max(most, taken)
    del kept
    return most
