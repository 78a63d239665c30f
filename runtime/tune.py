"""Which of at most three configurations of a kernel is the fastest on this GPU: timed once per size, the answer stored.

Off unless asked for (`config.patch(tune=True)`, FUSEGRAD_TUNE=1): a timing costs two more compilations per kernel. The
candidates are the schedule's own choice and its neighbours in warps: the same text, memory and launches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..codegen import Kernel, Target
from . import cache

Launch = Callable[[], None]
Clock = Callable[[Sequence[Launch]], list[float]]
"""Milliseconds of each; all are correct, so that it does not matter how often each runs, or which runs last."""

WARPS = 1024
"""Threads of the largest program."""
ROUNDS = 12


def configurations(kernel: Kernel, target: Target) -> tuple[Kernel, ...]:
    """The kernel as scheduled, then with half and with twice its warps."""
    others = (kernel.num_warps // 2, kernel.num_warps * 2)
    return (kernel, *(replace(kernel, num_warps=n) for n in others if 1 <= n <= WARPS // target.warp))


def bucket(numbers: Sequence[int]) -> tuple[int, ...]:
    """Sizes that share an answer: those of the same powers of two."""
    return tuple(max(n, 0).bit_length() for n in numbers)


def fastest(
    device: str,
    kernels: Sequence[Kernel],
    text: str,
    numbers: Sequence[int],
    launches: Callable[[Kernel], Launch],
    clock: Clock | None = None,
) -> Kernel:
    """One of these kernels, as stored for the device, the text and the sizes' bucket; else as the clock says, stored.

    launches: how to launch one of them on the arguments at hand.
    """
    key = cache.key_of("tuned", *cache.versions().items(), device, kernels[0].name, text, bucket(numbers))
    known = (cache.get(key) or {}).get("warps.json")
    found = next((k for k in kernels if known is not None and k.num_warps == json.loads(known)), None)
    if found is None:
        times = (clock or events)([launches(k) for k in kernels])
        found = kernels[min(range(len(kernels)), key=times.__getitem__)]
        cache.put(key, {"warps.json": json.dumps(found.num_warps).encode()})
    return found


def events(launches: Sequence[Launch]) -> list[float]:
    """The least milliseconds of each by events of the current stream, taken in turns; infinite where one is refused."""
    taken = {i: launch for i, launch in enumerate(launches) if i == 0 or _runs(launch)}
    times = [[_once(launch) for launch in taken.values()] for _ in range(ROUNDS)][1:]  # the first round compiles
    best = dict(zip(taken, map(min, zip(*times, strict=True)), strict=True))
    return [best.get(i, float("inf")) for i in range(len(launches))]


def _runs(launch: Launch) -> bool:
    """Whether Triton takes a neighbour at all: it may need more registers or shared memory than there are."""
    try:
        launch()
    except Exception as error:
        if not type(error).__module__.startswith("triton."):
            raise
        return False
    return True


def _once(launch: Launch) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
