"""Versions of a group's kernels beside the scheduled one: the same meaning, emitted again with one decision leant on.

Which of them is faster only a clock can say (`runtime.tune`). They come in the order in which they are expected to
matter; one that emits what is there already is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice

from ..kernel import Kernel, Kernels, Leaning, Target

OWN = "as scheduled"
LEANINGS = {
    "more loads in flight": Leaning(stages=1),
    "tiles by descriptors": Leaning(accelerated=1),
    "tiles through pointers": Leaning(accelerated=-1),
    "wider blocks": Leaning(lanes=1),
    "narrower blocks": Leaning(lanes=-1),
    "more warps": Leaning(warps=1),
    "fewer warps": Leaning(warps=-1),
    "fewer loads in flight": Leaning(stages=-1),
}

OF_STREAMS = {
    "more loads in flight": Leaning(stages=1),
    "tiles by descriptors": Leaning(accelerated=1),
    "tiles through pointers": Leaning(accelerated=-1),
    "longer blocks of the stream": Leaning(walk=1),
    "shorter blocks of the stream": Leaning(walk=-1),
    "fewer rows and warps": Leaning(rows=-1, warps=-1),
    "more warps": Leaning(warps=1),
    "fewer warps": Leaning(warps=-1),
    "fewer rows": Leaning(rows=-1),
    "more rows": Leaning(rows=1),
    "more rows and warps": Leaning(rows=1, warps=1),
    "fewer loads in flight": Leaning(stages=-1),
}
"""The same of kernels that walk a stream; what does not fit into registers or shared memory is none."""
LEANER = {
    "fewer loads in flight": Leaning(stages=-1),
    "narrower blocks": Leaning(lanes=-1, stages=-1),
    "narrow blocks, rows in pieces": Leaning(lanes=-2, stages=-2, held=-8),
}
"""Versions that need less shared memory and fewer registers, for a device that refused the scheduled one."""


def candidates(
    own: Kernels, target: Target, emitted: Callable[[Target], Kernels], most: int,
    leanings: Mapping[str, Leaning] = LEANINGS,
) -> dict[str, Kernels]:  # fmt: skip
    """The kernels as scheduled, then neighbours that differ from them and from each other: `most` in all."""
    return {OWN: own, **dict(islice(_distinct(own, leanings, target, emitted), most - 1))}


def smaller_candidates(
    own: Kernels, target: Target, emitted: Callable[[Target], Kernels]
) -> Iterator[tuple[str, Kernels]]:
    """Versions that differ from the refused one and from each other."""
    return _distinct(own, LEANER, target, emitted)


def _distinct(
    own: Kernels, leanings: Mapping[str, Leaning], target: Target, emitted: Callable[[Target], Kernels]
) -> Iterator[tuple[str, Kernels]]:
    """Each is emitted when it is asked for."""
    signatures = {_signature(own)}
    for name, leaning in leanings.items():
        version = emitted(replace(target, leaning=leaning))
        if (signature := _signature(version)) not in signatures:
            signatures.add(signature)
            yield name, version


def _signature(kernels: Kernels) -> tuple[object, ...]:
    """All that can make two versions differ."""
    return tuple(map(_kernel_signature, kernels.kernels))


def _kernel_signature(kernel: Kernel) -> tuple[object, ...]:
    stages = kernel.num_stages if " in tl.range(" in kernel.source else None  # without a loop they mean nothing
    return kernel.source, tuple(kernel.constants.items()), kernel.grid, kernel.num_warps, stages
