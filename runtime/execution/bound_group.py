"""A fused group at one tuple of sizes: what its launch allocates and hands to kernels, as plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch

from ...codegen import Buffer, Kernel, Kernels, Pointer, Ref, Scalar
from ...ir import Graph
from ...ir.errors import Unfusible
from ...tracer.dtypes import TO_TORCH
from ..kernels.arrival_counters import ArrivalCounters
from ..kernels.launch_metadata import remember_launch
from ..values.sizes import Sizes, number, numbers

Tensor = torch.Tensor
MOST_PROGRAMS = (1 << 31) - 1
ALIGNED = 16
"""Bytes: where allocated memory begins, at least."""

Allocation = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor to be allocated."""
Scratch = tuple[tuple[int, ...], torch.dtype, bool]
"""Shape and dtype of memory that a kernel needs besides its results, and whether it finds zeros there."""


class Launch(NamedTuple):
    """One kernel with what it is handed: ("number", value), or where to find a pointer's tensor: ("input", index)."""

    kernel: Kernel
    run: Callable[..., None]
    arguments: list[tuple[str, int]]
    grid: int
    scratch: list[Scratch]

    @property
    def numbers(self) -> list[int]:
        """The arguments that are no pointers."""
        return [value for kind, value in self.arguments if kind == "number"]


@dataclass
class BoundGroup:
    """The launches of a group's kernels, and the memory that they write to."""

    kernels: Kernels
    launches: list[Launch]
    outputs: list[Allocation]
    temporaries: list[Allocation]
    device: torch.device
    counters: ArrivalCounters
    settled: bool = False  # whether it is what its sizes keep: nothing is left to be timed
    uses_library: bool = False  # whether the library's product between kernels was faster than a kernel of products

    def __call__(self, inputs: Sequence[Tensor], into: Sequence[Tensor | None] = ()) -> list[Tensor]:
        """The outputs; into: memory for some of them, taken where a kernel may write there."""
        memory = self.memory(inputs, into)
        self.launch(memory)
        return memory["output"]

    def memory(self, inputs: Sequence[Tensor], into: Sequence[Tensor | None] = ()) -> dict[str, list[Tensor]]:
        """The tensors that launches find by kind and index."""
        given = into or [None] * len(self.outputs)
        outputs = [memory_like(t, o, self.device) for t, o in zip(given, self.outputs, strict=True)]
        temporaries = [self._allocated(t) for t in self.temporaries]
        return {"input": list(inputs), "output": outputs, "temporary": temporaries}

    def _allocated(self, spec: Allocation) -> Tensor:
        shape, strides, dtype = spec
        return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)

    def launch(self, memory: dict[str, list[Tensor]]) -> None:
        """Run the kernels one after the other."""
        for kernel, run, arguments, grid, scratch in self.launches:
            if grid:
                memory["scratch"] = [self.scratch(kernel, i, s) for i, s in enumerate(scratch)]
                run([value if kind == "number" else memory[kind][value] for kind, value in arguments], grid)

    def scratch(self, kernel: Kernel, index: int, spec: Scratch) -> Tensor:
        """Memory that a kernel needs besides its results."""
        shape, dtype, zeroed = spec
        if not zeroed:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return self.counters((kernel.name, index), shape, dtype)


def memory_like(tensor: Tensor | None, spec: Allocation, device: torch.device) -> Tensor:
    """The tensor, where it is laid out as what is wanted; else new memory."""
    if _fits(tensor, spec):
        return tensor
    shape, strides, dtype = spec
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _fits(tensor: Tensor | None, spec: Allocation) -> TypeGuard[Tensor]:
    """True for memory laid out as what would be allocated, that begins where that would."""
    if tensor is None or tensor.data_ptr() % ALIGNED:
        return False
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype) == spec


def bind_group(
    graph: Graph, kernels: Kernels, launchers: Sequence[Callable[..., None]], sizes: Sizes,
    device: torch.device, counters: ArrivalCounters,
) -> BoundGroup:  # fmt: skip
    """The launches of these kernels at these sizes."""
    results = zip(graph.outputs, graph.output_strides, strict=True)
    return BoundGroup(
        kernels=kernels,
        launches=[_launch(k, run, sizes) for k, run in zip(kernels.kernels, launchers, strict=True)],
        outputs=[_allocation(o, s, sizes) for o, s in results if o is not None and s is not None],
        temporaries=[_allocation(b, b.strides, sizes) for b in kernels.temporaries],
        device=device,
        counters=counters,
    )


def _allocation(described: Any, strides: Any, sizes: Sizes) -> Allocation:
    return numbers(described.shape, sizes), numbers(strides, sizes), TO_TORCH[described.dtype]


def _launch(kernel: Kernel, run: Callable[..., None], sizes: Sizes) -> Launch:
    scratch, grid = [_scratch(b, sizes) for b in kernel.scratch], number(kernel.grid, sizes)
    if grid > MOST_PROGRAMS:
        raise Unfusible(kernel.name, f"a launch of {grid} programs")
    launch = Launch(kernel, run, [_argument(a, sizes) for a in kernel.arguments], grid, scratch)
    remember_launch(kernel, launch.numbers, grid, sizes)
    return launch


def _argument(argument: Pointer | Scalar, sizes: Sizes) -> tuple[str, int]:
    match argument:
        case Pointer(buffer=Ref(kind=kind, index=index)):
            return kind, index
        case Scalar(value=value):
            return "number", number(value, sizes)


def _scratch(buffer: Buffer, sizes: Sizes) -> Scratch:
    return numbers(buffer.shape, sizes), TO_TORCH[buffer.dtype], buffer.zeroed
