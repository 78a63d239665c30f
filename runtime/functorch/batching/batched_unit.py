"""A unit under vmap. `WAYS` is the table of how its parent's graph gets a batch axis, in the order of preference."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....ir.errors import InternalError
from ....tracer.capture.capture import Session, capture_lock, is_capturing
from ....tracer.containers import with_replaced
from ....tracer.trace import CaptureError, Trace
from ...execution.executable import Executable
from ...settings.config import KERNEL_BACKENDS
from ..graphs import GraphCache, present
from ..unit import (
    OutDim,
    TransformableGraph,
    derivations,
    run_graph,
    run_in_ir,
    run_uncaptured,
    run_within_capture,
)
from ..vjp import Needed
from .batchable import batchable
from .ir_rules import BACKENDS, Layout, Lowered, is_written_out, over_lanes
from .lanes import first_lanes, present_under_vmap

Tensor = torch.Tensor
SIZES = 4
"""Graphs over a batch that hold for one batch size each; beyond them nothing is captured."""
NEEDS_NUMBERS = "tensor with symbolic sizes/strides"
"""torch's error where compiled code asks for the sizes of a tensor that has symbolic ones."""


class BatchedUnit(TransformableGraph):
    """A unit under vmap: its parent's captured graph with a batch axis, so that no Python of a derivative is batched.

    out_dims per output: where the batch axis goes, or "sum" over it; by default the front. Its derivatives are the
    parent's, batched: a cotangent of an input that has no batch axis is the sum over the batch.
    """

    def __init__(
        self,
        parent: TransformableGraph,
        in_dims: tuple[int | None, ...],
        randomness: str,
        out_dims: tuple[OutDim, ...] | None,
    ) -> None:
        name, graphs = f"{parent.name}_batched", _BatchedGraphs(self, parent)
        super().__init__(name, self._vmapped, parent.backend, parent.reads, graphs)
        self.parent, self.in_dims, self.randomness, self.out_dims = parent, in_dims, randomness, out_dims
        self.last_run = parent.last_run
        self.here = threading.local()  # `lane`: the parent's graph for the arguments at hand, and what it reads
        self.loops: set[int] = set()  # the parent's graphs that torch's rules cannot batch, or make a loop of
        self._in_python: dict[int, Any] = {}  # the parent's graphs, to be run under vmap
        self._in_ir: dict[Any, Lowered | None] = {}

    # ------------------------------------------------------------------ running
    def execute(self, args: Sequence[Any]) -> Sequence[Any]:
        """By the first of the ways that gives results."""
        if is_capturing():
            return run_within_capture(self, args)
        attempt = Attempt(self, args)
        prefers_ir = self.backend in KERNEL_BACKENDS or self.is_loop(args)
        return next(results for way in WAYS[prefers_ir] if (results := way(attempt)) is not None)

    def as_written(self, args: Sequence[Any]) -> Sequence[Any]:
        """torch's own vmap of the parent's body."""
        return self._mapped(self.parent.as_written, args)

    def _vmapped(self, *args: Any) -> Sequence[Any]:
        """The parent's graph under torch's vmap; its Python where it has no graph."""
        if not hasattr(self.here, "lane"):
            raise InternalError(f"{self.name} is inlined into a trace before its graph is known")
        if self.here.lane is None:
            return self._mapped(lambda lanes: self.parent.body(*lanes), args)
        trace, lifted = self.here.lane
        if id(trace) not in self._in_python:
            self._in_python[id(trace)] = batchable(trace.graph_module, inline=True)
        graph = self._in_python[id(trace)]
        return self._mapped(lambda lanes: graph(*(lanes[i] for i in present(lanes)), *lifted), args)

    def _mapped(self, fn: Callable[[list[Any]], Sequence[Any]], args: Sequence[Any]) -> list[Any]:
        live = present(args)
        dims = tuple(self.in_dims[i] for i in live)

        def one(*values: Any) -> Sequence[Any]:
            return fn(with_replaced(args, live, values))

        results = present_under_vmap(one, dims, [args[i] for i in live], self.randomness)
        outs = self.out_dims or (0,) * len(results)
        return [None if r is None else _with_batch_at(r, d) for r, d in zip(results, outs, strict=True)]

    # ------------------------------------------------------------------ graphs
    def prepare(self, args: Sequence[Any]) -> Trace:
        """Have the parent's graph at hand before this one is captured: captures do not nest. Raises CaptureError."""
        self.here.lane = None
        lanes = first_lanes(args, self.in_dims)
        if isinstance(self.parent, BatchedUnit):
            self.parent.prepare(lanes)
        executable, lifted = self.parent.captured(lanes)
        self.here.lane = executable.trace, lifted
        return executable.trace

    def captured(self, args: Sequence[Any]) -> tuple[Executable, list[Tensor]]:
        """The parent's graph as torch's rules batch it, once it is prepared."""
        trace = self.here.lane[0]
        try:
            # Which graph of the parent it is: the one over a batch does not know for what sizes that one holds.
            return self.graphs.lookup(args, further=(id(trace),))
        except CaptureError:
            self.loops.add(id(trace))
            raise

    def lowered(self, args: Sequence[Any]) -> tuple[Lowered | None, Sequence[Tensor]]:
        """The parent's graph as the rules of the IR batch it; None where one of its primitives has no rule."""
        live = present(args)
        dims, values = [self.in_dims[i] for i in live], [args[i] for i in live]
        is_empty = any(d is not None and not v.shape[d] for d, v in zip(dims, values, strict=True))
        if is_empty or self.backend not in BACKENDS:
            return None, ()
        lane, lifted = self.parent.lowered(first_lanes(args, self.in_dims))
        if lane is None:
            return None, lifted
        layout = Layout.of(lane, values, dims)
        key = (id(lane), layout)
        if key not in self._in_ir:
            with capture_lock:
                if key not in self._in_ir:
                    graph = over_lanes(lane, layout, self.out_dims, self.randomness, self.name, self.backend)
                    self._in_ir[key] = graph
        return self._in_ir[key], lifted

    def is_loop(self, args: Sequence[Any]) -> bool:
        """True if torch's rules are known to make a loop of this, or of a unit that it batches."""
        inner = self.parent if isinstance(self.parent, BatchedUnit) else None
        if not self.loops and inner is None:
            return False
        lanes = first_lanes(args, self.in_dims)
        if inner is not None and inner.is_loop(lanes):
            return True
        if not self.loops:
            return False
        if inner is not None:
            inner.prepare(lanes)
        return id(self.parent.captured(lanes)[0].trace) in self.loops

    # ------------------------------------------------------------------ derived units
    def derive(self, kind: str, *facts: Any) -> TransformableGraph:
        """A batch of this one. Its vjp and jvp are batches of its parent's."""
        if kind != "batch":
            raise InternalError(f"the {kind} of a batched unit depends on what moves: use {kind}_unit")
        return super().derive(kind, *facts)

    def vjp_unit(self, inputs: int, present_cotangents: tuple[bool, ...], needed: Needed) -> TransformableGraph:
        outs = self.out_dims or (0,) * len(present_cotangents)
        dims = [d if is_there and d != "sum" else None for is_there, d in zip(present_cotangents, outs, strict=True)]
        back: list[OutDim] = ["sum" if d is None else d for d in self.in_dims]
        parents = self.parent.vjp_unit(inputs, present_cotangents, needed)
        return parents.batch((*self.in_dims, *dims), self.randomness, back)

    def jvp_unit(self, inputs: int, moving: tuple[bool, ...]) -> TransformableGraph:
        dims = [d if moves else None for moves, d in zip(moving, self.in_dims, strict=True)]
        return self.parent.jvp_unit(inputs, moving).batch((*self.in_dims, *dims), self.randomness, self.out_dims)


derivations["batch"] = BatchedUnit


class _BatchedGraphs(GraphCache):
    """The graphs that torch's rules make: those that hold for one batch size alone are noted as loops."""

    def __init__(self, unit: BatchedUnit, parent: TransformableGraph) -> None:
        super().__init__(f"{parent.name}_batched", unit._vmapped, parent.backend, parent.reads, from_source=False)
        self.unit = unit

    def trace(self, args: Sequence[Any], dynamic: bool = True) -> tuple[Session, Trace]:
        """The batch at any sizes; at these alone where one of torch's batch rules reads sizes as numbers."""
        try:
            return super().trace(args, dynamic)
        except CaptureError as error:
            if NEEDS_NUMBERS not in str(error.facts["reason"]):
                raise
        self.unit.loops.add(id(self.unit.here.lane[0]))  # one graph for each batch size, as for a loop
        return super().trace(args, dynamic=False)

    def check(self, session: Session, trace: Trace, args: Sequence[Any]) -> None:
        live = present(args)
        if is_written_out(trace, [args[i] for i in live], [self.unit.in_dims[i] for i in live]):
            self.unit.loops.add(id(self.unit.here.lane[0]))


def _with_batch_at(result: Tensor, dim: OutDim) -> Tensor:
    if dim == "sum":
        return result.sum(0)
    return result.movedim(0, dim) if dim else result


# ------------------------------------------------------------------ ways of batching
@dataclass
class Attempt:
    """A call of a batched unit, and why torch's rules gave no graph for it."""

    unit: BatchedUnit
    args: Sequence[Any]
    error: CaptureError | None = None


def _by_ir_rules(attempt: Attempt) -> Sequence[Any] | None:
    """The graph in the IR with a batch axis, in kernels, for any batch size."""
    return run_in_ir(attempt.unit, attempt.args)


def _by_aten_rules(attempt: Attempt) -> Sequence[Any] | None:
    """The ATen graph under torch's vmap, traced: eager's results bit by bit; None where that makes a loop."""
    return _traced(attempt, loops=False)


def _by_aten_rules_in_a_loop(attempt: Attempt) -> Sequence[Any] | None:
    """The same where it is a loop over the lanes, for a few batch sizes."""
    return None if attempt.error is not None else _traced(attempt, loops=True)


def _one_by_one(attempt: Attempt) -> Sequence[Any]:
    """torch's vmap of each operation as it comes, and on record."""
    assert attempt.error is not None
    return run_uncaptured(attempt.unit, attempt.args, attempt.error)


WAYS: dict[bool, tuple[Callable[[Attempt], Sequence[Any] | None], ...]] = {
    True: (_by_ir_rules, _by_aten_rules_in_a_loop, _one_by_one),
    False: (_by_aten_rules, _by_ir_rules, _by_aten_rules_in_a_loop, _one_by_one),
}
"""The ways of batching, the best first. True: for kernels, and where torch's rules are known to make a loop."""


def _traced(attempt: Attempt, loops: bool) -> Sequence[Any] | None:
    unit, args = attempt.unit, attempt.args
    try:
        lane = id(unit.prepare(args))
        if not loops and unit.is_loop(args):
            return None
        if lane in unit.loops and sum(lane in entry.facts for entry in unit.graphs.entries) >= SIZES:
            attempt.error = _one_batch_size(unit.name)
            return None
        attempt.args = [
            a if d in (None, 0) or not isinstance(a, Tensor) else a.contiguous()
            for a, d in zip(args, unit.in_dims, strict=True)
        ]
        executable, lifted = unit.captured(attempt.args)
    except CaptureError as error:
        attempt.error = error
        return None
    return None if lane in unit.loops and not loops else run_graph(executable, lifted, attempt.args)


def _one_batch_size(name: str) -> CaptureError:
    reason = f"a graph of {name} holds for one batch size; after {SIZES} sizes its operations run one by one"
    return CaptureError(reason=reason, where="unknown")
