"""A captured graph over a batch by the rules of the IR, where torch's own batching rule calls an operation once a lane.

torch writes such a loop out while it captures: the batch size is a constant of what it captured. The rules of the IR
keep it a symbol, so that one graph serves every size. `index_add(z, i, g)  ->  one scatter, the lane one more index`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from ..ir import Graph, Value, building, emit
from ..ir.errors import LoweringError
from ..ir.prims import PRIMS
from ..ir.transforms.batch import batch, lead
from ..ir.transforms.extern import Batched, NoRuleError
from ..ir.transforms.ops import DIFFERENTIABLE, permute
from ..tracer.capture import Trace, settled
from .compile import cheaper, graph_of
from .config import KERNEL_BACKENDS
from .plan import BoundSizes, Executable, Run

Tensor = torch.Tensor
LANES = sympy.Symbol("lanes", integer=True, positive=True)
BACKENDS = (*KERNEL_BACKENDS, "reference")


def is_written_out(trace: Trace, values: Sequence[Any], dims: Sequence[int | None]) -> bool:
    """Whether a capture holds for these values' batch size alone, although nothing made it a constant beforehand."""
    pairs = zip(trace.fakes, values, dims, strict=True)
    return any(d is not None and v.shape[d] > 1 and _is_constant(f.shape[d]) for f, v, d in pairs)


def _is_constant(size: Any) -> bool:
    return isinstance(settled([size])[0], int)


class LoopFree:
    """A lane's graph over any number of lanes."""

    def __init__(self, trace: Trace, dims: Sequence[int | None], graph: Graph, name: str, backend: str) -> None:
        self.trace, self.dims = trace, dims
        self.executable = Executable(trace, name, backend, graph=graph)
        self.run: Run = self.executable.run if backend in KERNEL_BACKENDS else self.executable.through_torch(graph)

    def __call__(self, values: Sequence[Any], lanes: Sequence[Any], lifted: Sequence[Tensor]) -> list[Any]:
        """values: with the batch axis, and `lanes`: one lane of each, which tells the sizes of the lane's graph."""
        in_front = [v if d is None else v.movedim(d, 0) for v, d in zip(values, self.dims, strict=True)]
        size = next(v.shape[0] for v, d in zip(in_front, self.dims, strict=True) if d is not None)
        return self.run(in_front, lifted, BoundSizes({**self.executable.binder(lanes), LANES: size}))


def loop_free(
    trace: Trace, dims: Sequence[int | None], outs: Sequence[Any] | None, name: str, backend: str
) -> LoopFree | None:
    """The graph of one lane over a batch; None where it is not of primitives alone, or a primitive has no rule."""
    if backend not in BACKENDS:
        return None
    try:
        graph = graph_of(trace, name)
        if not _is_pure(graph):
            return None
        given = [d for f, d in zip(trace.fakes, dims, strict=True) if isinstance(f, Tensor)]
        mapped = [*(d is not None for d in given), *[False] * len(trace.lifted)]
        batched = batch(graph, mapped, LANES)
    except (LoweringError, NoRuleError):
        return None
    placed = _placed(batched, outs or [0] * len(graph.outputs))
    return None if placed is None else LoopFree(trace, dims, cheaper(placed), name, backend)


def _is_pure(graph: Graph) -> bool:
    return not graph.mutations and all(PRIMS[v.prim].family not in ("extern", "pick") for v in graph.order())


def _placed(batched: Batched, outs: Sequence[Any]) -> Graph | None:
    """The outputs with the batch axis where it goes, or summed over it: a sum of integers is left to torch."""
    graph = batched.graph
    triples = list(zip(graph.outputs, batched.mapped, outs, strict=True))
    if any(o is not None and d == "sum" and o.dtype not in DIFFERENTIABLE for o, _, d in triples):
        return None
    with building(graph):
        return graph.returning([None if o is None else _at(lead(LANES, o, m), d) for o, m, d in triples])


def _at(x: Value, dim: Any) -> Value:
    if dim == "sum":
        return emit("sum", x, axes=(0,))
    behind = list(range(1, x.ndim))
    behind.insert((dim or 0) % x.ndim, 0)
    return permute(x, tuple(behind))
