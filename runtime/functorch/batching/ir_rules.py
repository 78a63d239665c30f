"""A captured graph over a batch by the rules of the IR: no capture, no loop over the lanes, any batch size.

    one lane: x [M, N], w [N] -> y [M, N]        many: x [lanes, M, N], w [N] -> y [lanes, M, N]

`Lowered` is a graph with the way to read its symbols off values; over a batch it is one again, so that vmap nests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from ....ir import Graph, building, emit
from ....ir.errors import LoweringError
from ....ir.lazy_attribute import lazy_attribute
from ....ir.transforms.batch import batch, with_batch_axis
from ....ir.transforms.extern import NO_RULES, Batched, NoRuleError
from ....ir.transforms.ops import DIFFERENTIABLE, permute
from ....ir.types import Size, contiguous_strides, elements_in_memory, product
from ....tracer.capture.capture import with_known_sizes
from ....tracer.trace import Trace
from ...execution.executable import Executable, Run, through_torch
from ...execution.graph_to_kernels import graph_of, optimize
from ...settings.config import KERNEL_BACKENDS
from ...values.sizes import Binder, BoundSizes
from .op_rules import OP_RULES

Tensor = torch.Tensor
Axes = tuple[int, ...] | None
Source = tuple[int, str, int]
BACKENDS = (*KERNEL_BACKENDS, "reference")


@dataclass
class Lowered:
    """A graph over `values` in the order of a unit's arguments, each with its axes permuted as told, on a backend.

    sources: which value (after that), "size", "stride" or "value", which axis tells a symbol. depth: how many batches.
    tells: whether its results depend on its values as those of the trace do on its inputs.
    """

    trace: Trace
    graph: Graph
    axes: list[Axes]
    sources: dict[sympy.Symbol, Source]
    name: str
    backend: str
    depth: int = 0
    tells: bool = True

    def __call__(self, values: Sequence[Any], lifted: Sequence[Tensor]) -> list[Any]:
        permuted = [v if a is None else v.permute(a) for v, a in zip(values, self.axes, strict=True)]
        return self._run(permuted, lifted, self.sizes(permuted))

    def sizes(self, permuted: Sequence[Any]) -> BoundSizes:
        """The symbols' values, for values with their axes permuted."""
        return self._binder(permuted)

    @lazy_attribute
    def _binder(self) -> Binder:
        binder = Binder(())
        binder.sources = self.sources
        return binder

    @lazy_attribute
    def _run(self) -> Run:
        executable = Executable(self.trace, self.name, self.backend, graph=self.graph)
        return executable.run if self.backend in KERNEL_BACKENDS else through_torch(self.graph, executable.binder)


def lowered(executable: Executable, name: str) -> Lowered | None:
    """The graph of a trace; None where there is none, or where it writes into its inputs."""
    trace = executable.trace
    try:
        graph = executable.graph or graph_of(trace, name)
    except LoweringError:
        return None
    axes: list[Axes] = [None] * len(trace.fakes)
    if graph.mutations:
        return None
    return Lowered(trace, graph, axes, dict(executable.binder.sources), name, executable.backend)


@dataclass(frozen=True)
class Layout:
    """Per value of a graph over a batch: where the batch axis is, its axes with that in front, whether it is row-major
    then. Nothing but the first for numbers."""

    dims: tuple[int | None, ...]
    axes: tuple[Axes, ...]
    row_major: tuple[bool | None, ...]

    @classmethod
    def of(cls, lane: Lowered, values: Sequence[Any], dims: Sequence[int | None]) -> Layout:
        axes = tuple(_batch_in_front(a, d, v) for a, d, v in zip(lane.axes, dims, values, strict=True))
        pairs = zip(values, axes, strict=True)
        return cls(tuple(dims), axes, tuple(_is_row_major(v, a) if isinstance(v, Tensor) else None for v, a in pairs))


def _is_row_major(value: Tensor, axes: Axes) -> bool:
    return (value if axes is None else value.permute(axes)).is_contiguous()


def _batch_in_front(axes: Axes, dim: int | None, value: Any) -> Axes:
    """The axes of a lane (None: in their order), and the batch axis before them."""
    if dim is None:
        return axes
    dim %= value.dim()
    behind = axes if axes is not None else range(value.dim() - 1)
    full = (dim, *(a + (a >= dim) for a in behind))
    return None if full == tuple(range(len(full))) else full


def over_lanes(
    lane: Lowered, layout: Layout, outs: Sequence[Any] | None, randomness: Any, name: str, backend: str
) -> Lowered | None:
    """The graph of one lane over a batch laid out so; None where a primitive has no rule for it."""
    size = sympy.Symbol(f"lanes{lane.depth or ''}", integer=True, positive=True)
    dims, lifted = layout.dims, [False] * len(lane.trace.lifted)
    tensors = [i for i, is_row_major in enumerate(layout.row_major) if is_row_major is not None]
    steps = {i: _step(lane, i) for i in tensors if dims[i] is not None and not layout.row_major[i]}
    sources = {s: (i, kind, at + (dims[i] is not None)) for s, (i, kind, at) in lane.sources.items()}
    sources[size] = (next(i for i, d in enumerate(dims) if d is not None), "size", 0)
    sources |= {step: (i, "stride", 0) for i, step in steps.items()}
    try:
        mapped = [*(dims[i] is not None for i in tensors), *lifted]
        apart = [*map(steps.get, tensors), *[None] * len(lifted)]
        rules = OP_RULES if backend in KERNEL_BACKENDS else NO_RULES  # the reference repeats what torch does
        batched = batch(lane.graph, mapped, size, rules, randomness=randomness, steps=apart)
    except NoRuleError:
        return None
    graph = _placed(batched, size, outs or [0] * len(lane.graph.outputs))
    if graph is None:
        return None
    axes = list(layout.axes)
    return Lowered(lane.trace, optimize(graph), axes, sources, name, backend, lane.depth + 1, lane.tells)


def _step(lane: Lowered, value: int) -> sympy.Symbol:
    """The distance between the lanes of a value in memory."""
    return sympy.Symbol(f"step{lane.depth or ''}_{value}", integer=True, nonnegative=True)


def _placed(batched: Batched, size: Size, outs: Sequence[Any]) -> Graph | None:
    """The outputs with the batch axis where it goes, or summed over it: a sum of integers is left to torch."""
    graph = batched.graph
    results = list(zip(graph.outputs, graph.output_strides, batched.mapped, outs, strict=True))
    if any(o is not None and d == "sum" and o.dtype not in DIFFERENTIABLE for o, _, _, d in results):
        return None
    with building(graph):
        values = [None if o is None else _at(with_batch_axis(size, o, m), d) for o, _, m, d in results]
    pairs = zip(values, results, strict=True)
    strides = [None if v is None or s is None else _strides(v.shape, s, m, d) for v, (_, s, m, d) in pairs]
    return graph.returning(values, strides)


def _at(x: Any, dim: Any) -> Any:
    if dim == "sum":
        return emit("sum", x, axes=(0,))
    behind = list(range(1, x.ndim))
    behind.insert((dim or 0) % x.ndim, 0)
    return permute(x, tuple(behind))


def _strides(shape: Sequence[Size], strides: Sequence[Size], mapped: bool, dim: Any) -> tuple[Size, ...]:
    """Each lane laid out as one alone is, the same memory in all lanes where it is one for all; else row-major.

    strides: of a lane, behind that of the batch where it is mapped.
    """
    own, behind = list(strides[1:] if mapped else strides), list(shape)
    if dim == "sum":
        return tuple(own) if _has_no_gaps(behind, own) else contiguous_strides(shape)
    at = (dim or 0) % len(shape)
    del behind[at]
    if not _has_no_gaps(behind, own):
        return contiguous_strides(shape)
    own.insert(at, elements_in_memory(behind, own) if mapped else 0)
    return tuple(own)


def _has_no_gaps(shape: Sequence[Size], strides: Sequence[Size]) -> bool:
    """True if strides are those of memory that is filled, some axes possibly standing still."""
    remaining = [(n, step) for n, step in zip(shape, strides, strict=True) if n != 1 and step != 0]
    filled: Size = 1
    while remaining:
        inner = next((axis for axis in remaining if axis[1] == filled), None)
        if inner is None:
            return False
        remaining.remove(inner)
        filled = product([filled, inner[0]])
    return True


# ------------------------------------------------------------------ where torch's own rules make a loop
def is_written_out(trace: Trace, values: Sequence[Any], dims: Sequence[int | None]) -> bool:
    """True if a capture holds for these values' batch size alone, although nothing made it a constant beforehand."""
    pairs = zip(trace.fakes, values, dims, strict=True)
    return any(d is not None and v.shape[d] > 1 and _is_constant(f.shape[d]) for f, v, d in pairs)


def _is_constant(size: Any) -> bool:
    return isinstance(with_known_sizes([size])[0], int)
