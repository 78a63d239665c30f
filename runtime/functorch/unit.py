"""A captured body that differentiates: functorch drives the levels, each derivative is a unit again, captured lazily.

A derivative is traced through autograd itself (so nested Functions, `detach` and custom gradients are eager's by
construction); batching is applied to flat captured graphs, never to the Python of a derivative.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.autograd.function import Function

from ...ir.errors import InternalError
from ...tracer.capture.capture import Session, capture_lock, is_capturing
from ...tracer.capture.context import ForwardContext
from ...tracer.capture.debugging import without_anomaly_mode
from ...tracer.containers import with_those
from ...tracer.function import guarded_trace
from ...tracer.methods import uses_setup_context
from ...tracer.reads.reads import Read, Reads
from ...tracer.torch_private import (
    custom_function_call,
    dual_level,
    first_of_every_batch,
    forward_mode_is_active,
    has_tangent,
    is_batched,
    is_differentiated,
    is_fake,
    memory_of,
    plain_tensors,
    transforms_active,
    unwrapped,
)
from ...tracer.trace import CaptureError, Trace
from ..capture.activity import independent_results, sources_of
from ..capture.captured import require_capture_allowed
from ..capture.captured_backward import reduce_to_argument
from ..capture.graph_mode import is_for_outer_graph
from ..capture.guards import Guard, argument_fact, global_state, is_float, is_tracked, size_guard
from ..capture.redraw import Generators, draws, end_redraw, generator_states, last_node, redraw, require_no_draw_after
from ..capture.user_methods import run_user_backward
from ..compiled.backward import OTHER_SIZES, run_backward
from ..execution.executable import Executable
from ..fallback.answer import Fault, is_fault
from ..settings import logs
from ..settings.config import KERNEL_BACKENDS
from ..settings.counters import count
from ..specialize.compiled_backward import BackwardCall, is_for_other_sizes
from ..specialize.specialization import Specialization
from ..values.gradient_layouts import canonical_layout, layout_class
from ..values.sizes import BoundSizes
from ..values.tensors import zeros
from .batching.aten_rules import give_memory_its_axis, in_lanes, room_for
from .batching.ir_rules import BACKENDS, Layout, Lowered, is_written_out, lowered, over_lanes
from .partial_second_order import warn_once

if TYPE_CHECKING:
    from ..compiled.compiled import Compiled

Tensor = torch.Tensor
VALUES = (Tensor, int, torch.SymInt)
SIZES = 4
"""Graphs over a batch that hold for one batch size each; beyond them nothing is captured."""
Body = Callable[..., Sequence[Any]]
OutDim = int | Literal["sum"] | None


def example(value: Any) -> Any:
    """A plain tensor of the logical shape behind any number of functorch wrappers; other values as they are.

    What is in it does not matter to look a graph up. `readable` puts something in, for a first call.
    """
    if not isinstance(value, Tensor):
        return value
    inner = unwrapped(value)
    if inner is value and not value.requires_grad and dual_level() < 0:
        return value
    shape, strides, differentiable = tuple(value.shape), _strides(value), is_float(value) and is_differentiated(value)
    with plain_tensors():
        plain = torch.empty_strided(shape, strides, dtype=inner.dtype, device=inner.device)
        return plain.requires_grad_(differentiable)


def readable(examples: Sequence[Any], values: Sequence[Any]) -> bool:
    """What is in the values, in their first lanes; zeros where nothing is. Whether all of it is the user's."""
    pairs = [(p, v) for p, v in zip(examples, values, strict=True) if p is not v and isinstance(p, Tensor)]
    with torch.no_grad():
        return all([_filled(plain.detach(), value) for plain, value in pairs])  # where a mode keeps gradients on, too


def _filled(plain: Tensor, value: Tensor) -> bool:
    data = None if is_fake(value) or is_batched(value) or not plain.numel() else first_of_every_batch(value)
    if data is None:
        plain.zero_()
        return not plain.numel()
    distinct = tuple(slice(0, 1) if step == 0 else slice(None) for step in plain.stride())
    plain[distinct].copy_(data[distinct])
    return True


def _strides(value: Tensor) -> tuple[int, ...]:
    """The logical strides; row-major where the wrapper has none that fit its shape."""
    return tuple(value.stride()) if value.dim() else ()


Needed = tuple[bool, ...] | None


derivations: dict[str, Callable[..., TransformableGraph]] = {}
"""Units by how they are derived of another one, beside those of this file: theirs put themselves here."""


class TransformableGraph:
    """A Python function of tensors, ints and Nones, captured per key, run as kernels, differentiable to any order."""

    def __init__(self, name: str, body: Body, backend: str, reads: Reads) -> None:
        self.name, self.body, self.backend, self.reads = name, body, backend, reads
        self.graphs: list[tuple[Any, Guard, Executable, list[Read], Session]] = []
        self.in_ir: dict[int, Lowered | None] = {}  # by the executable
        self.noted = threading.local()  # `captured`: what its function, or that of a batch of it, ran last
        self.refused: Callable[[CaptureError], None] | None = None  # is told of a graph that cannot be captured
        self.failed: Callable[[Fault, Sequence[Any]], None] | None = None  # is told of a mistake of ours
        self.lineage: tuple[Any, ...] = (name,)  # how it was derived, in words that every process has
        self.origin: TransformableGraph | None = None  # what it was derived from
        self._functions: dict[bool, Any] = {}
        self._derived: dict[Any, TransformableGraph] = {}

    def __call__(self, *args: Any) -> Sequence[Any]:
        if is_capturing():
            return graphed.called(self, args) if (graphed := _graphed(args)) else self.body(*args)
        try:
            return self.run(args)
        except Exception as error:
            if self.failed is None or not is_fault(error):
                raise
            fault = Fault.of(error)
        results = unrecorded(self.as_written(args), args)
        self.failed(fault, args)
        return results

    def run(self, args: Sequence[Any]) -> Sequence[Any]:
        """From captured graphs, at every level of differentiation."""
        duals = any(map(has_tangent, args))
        if not (torch.is_grad_enabled() or transforms_active() or duals):
            return self.execute(args)
        results = custom_function_call(self.function, *args)
        return self._tracked_alone(args, results) if duals and not transforms_active() else results

    def _tracked_alone(self, args: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        """Results of dual numbers: those that depend on nothing that requires grad have a tangent and no history."""
        needless = _constant_results(self.noted.captured, args, [is_tracked(a) for a in args])
        return tuple(_without_history(r) if i in needless else r for i, r in enumerate(results))

    def as_written(self, args: Sequence[Any]) -> Sequence[Any]:
        """The Python of its body, which torch differentiates and maps as it does in eager."""
        return self.body(*args)

    # ------------------------------------------------------------------ plain execution
    def execute(self, args: Sequence[Any]) -> Sequence[Any]:
        """Run on plain tensors, from the captured graph."""
        if is_capturing():
            return self.traced(args)
        try:
            executable, lifted = self.captured(args)
        except CaptureError as error:
            return self.uncaptured(args, error)
        live = [i for i, a in enumerate(args) if isinstance(a, VALUES)]
        values = [args[i] for i in live]
        batched = any(map(is_batched, values))  # no memory that a kernel could read
        results = list(executable.replay(*values, *lifted)) if batched else self.launched(executable, args, lifted)
        return ran((executable.trace, live), results)

    def traced(self, args: Sequence[Any]) -> Sequence[Any]:
        """Run while somebody traces: in a graph that is not ours, one operator."""
        return graphed.executed(self, args) if (graphed := _graphed(args)) else self.body(*args)

    def launched(self, executable: Executable, args: Sequence[Any], lifted: Sequence[Tensor]) -> Sequence[Any]:
        """The results on values in memory."""
        return executable([a for a in args if isinstance(a, VALUES)], lifted)

    def uncaptured(self, args: Sequence[Any], error: CaptureError) -> Sequence[Any]:
        """A derivative of a method that cannot be captured: through autograd, as in eager, and on record."""
        results = unrecorded(self.body(*args), args)
        if self.refused is None:
            count("fallbacks")
        else:
            self.refused(error)
        return ran(None, results)

    def captured(self, args: Sequence[Any]) -> tuple[Executable, list[Tensor]]:
        """The graph for arguments like these."""
        given = (argument_fact(a) if not isinstance(a, int) else "int" for a in args)
        facts = (*given, *global_state(), *self.reads.facts(), *self.further_facts())
        present = [a for a in args if isinstance(a, VALUES)]
        with capture_lock:
            for known, guard, executable, lifted, _ in self.graphs:
                if known == facts and guard(present):
                    return executable, [read.get() for read in lifted]
            return self._capture(args, facts)

    @property
    def draws(self) -> bool:
        """Whether a run draws random numbers, as far as is known before: it may, where nothing is captured yet."""
        if self.origin is not None:
            return self.origin.draws
        return not self.graphs or any(draws(executable.trace) for _, _, executable, _, _ in self.graphs)

    def generators(self, args: Sequence[Any]) -> Generators | None:
        """The states of torch's generators before a run that draws; None for one that does not."""
        return generator_states(args) if self.draws and not is_capturing() else None

    def further_facts(self) -> tuple[Any, ...]:
        """What else has to be equal for a graph to hold."""
        return ()

    def flat(self, args: Sequence[Any]) -> tuple[Trace, Sequence[Tensor]]:
        """The captured graph itself, for batching."""
        executable, lifted = self.captured(args)
        return executable.trace, lifted

    def lowered(self, args: Sequence[Any]) -> tuple[Lowered | None, Sequence[Tensor]]:
        """The captured graph in the IR, for batching; None where it is not of primitives alone."""
        executable, lifted = self.captured(args)
        if id(executable) not in self.in_ir:
            with capture_lock:
                self._lower(executable)
            return self.lowered(args)  # lowering may have learnt more about sizes
        return self.in_ir[id(executable)], lifted

    def run_in_ir(self, args: Sequence[Any]) -> Sequence[Any] | None:
        """The results of the graph that batching starts from; None where there is none."""
        live = [i for i, a in enumerate(args) if isinstance(a, VALUES)]
        if any(is_batched(args[i]) for i in live):
            return None  # no memory that a kernel could read
        graph, lifted = self.lowered(args)
        if graph is None:
            return None
        return ran((graph.trace, live) if graph.tells else None, graph([args[i] for i in live], lifted))

    def _lower(self, executable: Executable) -> None:
        if id(executable) in self.in_ir:  # another thread was first
            return
        at, session = next((i, s) for i, (*_, e, _, s) in enumerate(self.graphs) if e is executable)
        self.in_ir[id(executable)] = lowered(executable, self.name)
        self.graphs[at] = (self.graphs[at][0], size_guard(session, executable.trace.fakes), *self.graphs[at][2:])

    def _capture(self, args: Sequence[Any], facts: Any) -> tuple[Executable, list[Tensor]]:
        require_capture_allowed(self.name)
        count("captures")
        session = Session()
        live = [i for i, a in enumerate(args) if isinstance(a, VALUES)]
        fakes = [session.fake(a) if isinstance(a := args[i], Tensor) else session.integer(a) for i in live]

        def run(*present: Any) -> tuple[Any, ...]:
            return tuple(self.body(*with_those(args, live, present)))

        with logs.capturing(self.name, lambda: trace):
            trace = guarded_trace(session, run, fakes, self.reads, not isinstance(self, BatchedUnit))
        self.check(session, trace, args, trace.lifted)
        lifted = [read for t in trace.lifted if (read := self.reads.tensor_path(t)) is not None]
        executable = Executable(trace, self.name, self.backend)
        guard = size_guard(session, fakes)  # on integers too: sizes that no tensor here shows
        self.graphs.append((facts, guard, executable, lifted, session))
        return executable, trace.lifted

    def check(self, session: Session, trace: Trace, args: Sequence[Any], lifted: Sequence[Tensor]) -> None:
        """Raises CaptureError where a fresh capture is not what was to be captured."""

    # ------------------------------------------------------------------ derivatives
    @property
    def function(self) -> Any:
        """The Function that executes this unit and whose rules are units again."""
        pushes = forward_mode_is_active()
        if pushes not in self._functions:
            self._functions.setdefault(pushes, _function_of(self, pushes))
        return self._functions[pushes]

    def vjp(self, inputs: int, needed: Needed = None) -> TransformableGraph:
        """(inputs, cotangents of the outputs) -> cotangents of the inputs that need one (None: of all)."""
        key = ("vjp", inputs, needed)
        return self._told(
            key,
            lambda: TransformableGraph(
                f"{self.name}_vjp",
                lambda *a: vjp_of(self.body, a[:inputs], a[inputs:], needed, _is_followed(), self.draws),
                self.backend,
                self.reads,
            ),
        )

    def jvp(self, inputs: int) -> TransformableGraph:
        """(inputs, tangents) -> tangents of the outputs."""
        return self._told(("jvp", inputs), lambda: derivations["jvp"](self, inputs))

    def _told(self, key: Any, make: Callable[[], TransformableGraph]) -> TransformableGraph:
        """The derived unit of this key, one for all threads, which tells whom this one tells."""
        unit = self._derived.get(key) or self._derived.setdefault(key, make())
        unit.refused, unit.failed, unit.lineage = self.refused, self.failed, (*self.lineage, key)
        unit.origin = self
        return unit

    def pulling(self, inputs: int, given: tuple[bool, ...], needed: Needed = None) -> TransformableGraph:
        """The unit behind `pullback`, where these cotangents are given."""
        return self.vjp(inputs, needed)

    def pushing(self, inputs: int, moving: tuple[bool, ...]) -> TransformableGraph:
        """The unit behind `pushforward`, where these inputs move."""
        return self.jvp(inputs)

    def pullback(self, args: Sequence[Any], cotangents: Sequence[Any], needed: Needed = None) -> Sequence[Any]:
        """Cotangents of `args`, of those that need one."""
        if self.is_debugged():
            return vjp_of(self.body, args, cotangents, needed, _is_followed())
        given = tuple(c is not None for c in cotangents)
        return self.pulling(len(args), given, needed)(*args, *cotangents)

    def is_debugged(self) -> bool:
        """Whether torch's own autograd is to run the derivative, operation by operation."""
        return False

    def pushforward(self, args: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        """Tangents of the outputs."""
        return self.pushing(len(args), tuple(t is not None for t in tangents))(*args, *tangents)

    def batch(
        self, in_dims: Sequence[int | None], randomness: str, out_dims: Sequence[OutDim] | None = None
    ) -> BatchedUnit:
        """This unit over a batch; `out_dims` as in BatchedUnit."""
        key = ("batch", tuple(in_dims), randomness, None if out_dims is None else tuple(out_dims))
        unit = self._told(key, lambda: BatchedUnit(self, key[1], randomness, key[3]))
        assert isinstance(unit, BatchedUnit)
        return unit


class BatchedUnit(TransformableGraph):
    """A unit under vmap: its parent's captured graph with a batch axis, so that no Python of a derivative is batched.

    For kernels by the rules of the IR. On the reference backend, and where the IR has no rule, torch's are captured, so
    that results are eager's bit by bit; where they make a loop over the lanes, or are missing, the IR's serve again.
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
        super().__init__(f"{parent.name}_batched", self._vmapped, parent.backend, parent.reads)
        self.parent, self.in_dims, self.randomness, self.out_dims = parent, in_dims, randomness, out_dims
        self.noted = parent.noted
        self._here = threading.local()  # `lane`: the parent's graph for the arguments at hand, what it captured
        self._in_python: dict[int, Any] = {}  # the parent's graphs, to be run under vmap
        self._loops: set[int] = set()  # the parent's graphs that torch's rules cannot batch, or make a loop of
        self._batches: dict[Any, Lowered | None] = {}

    def _vmapped(self, *args: Any) -> Sequence[Any]:
        if not hasattr(self._here, "lane"):
            raise InternalError(f"{self.name} is inlined into a trace before its graph is known")
        present = [i for i, a in enumerate(args) if isinstance(a, VALUES)]
        dims = tuple(self.in_dims[i] for i in present)

        def one(*values: Any) -> Sequence[Any]:
            if self._here.lane is not None:
                return self._lane_in_python(*values)  # type: ignore[no-any-return]
            return self.parent.body(*with_those(args, present, values))

        results = present_under_vmap(one, dims, [args[i] for i in present], self.randomness)
        return self._all_placed(results)

    def as_written(self, args: Sequence[Any]) -> Sequence[Any]:
        """torch's own vmap of the parent's body."""
        present = [i for i, a in enumerate(args) if isinstance(a, VALUES)]

        def one(*lanes: Any) -> Sequence[Any]:
            return self.parent.as_written(with_those(args, present, lanes))

        dims = tuple(self.in_dims[i] for i in present)
        results = present_under_vmap(one, dims, [args[i] for i in present], self.randomness)
        return self._all_placed(results)

    def _all_placed(self, results: Sequence[Any]) -> list[Any]:
        outs = self.out_dims or (0,) * len(results)
        return [None if r is None else _placed(r, d) for r, d in zip(results, outs, strict=True)]

    def _lane_in_python(self, *values: Any) -> Any:
        trace, lifted = self._here.lane
        if id(trace) not in self._in_python:
            self._in_python[id(trace)] = batchable(trace.graph_module, inline=True)
        return self._in_python[id(trace)](*values, *lifted)

    def execute(self, args: Sequence[Any]) -> Sequence[Any]:
        if is_capturing():
            return self.traced(args)
        if self._prefers_ir(args) and (found := self.run_in_ir(args)) is not None:
            return found
        try:
            self._prepare(args)
        except CaptureError as error:
            self._here.lane = None  # the parent has no graph: its Python is batched
            return self.uncaptured(args, error)
        if self.loops(args) and (found := self.run_in_ir(args)) is not None:
            return found
        if self._has_many_sizes():
            return super().uncaptured(args, _one_batch_size(self.name))
        return super().execute(
            [
                a if d in (None, 0) or not isinstance(a, Tensor) else a.contiguous()
                for a, d in zip(args, self.in_dims, strict=True)
            ]
        )

    def _has_many_sizes(self) -> bool:
        """Whether torch's rules made graphs of it that hold for one batch size each, and enough of them."""
        known = id(self._here.lane[0])
        return known in self._loops and sum(known in facts for facts, *_ in self.graphs) >= SIZES

    def launched(self, executable: Executable, args: Sequence[Any], lifted: Sequence[Tensor]) -> Sequence[Any]:
        found = self.run_in_ir(args) if id(self._here.lane[0]) in self._loops else None
        return super().launched(executable, args, lifted) if found is None else found

    def uncaptured(self, args: Sequence[Any], error: CaptureError) -> Sequence[Any]:
        """torch's rules make no graph of it, or a loop."""
        found = self.run_in_ir(args)
        return super().uncaptured(args, error) if found is None else found

    # ------------------------------------------------------------------ by the rules of the IR
    def _prefers_ir(self, args: Sequence[Any]) -> bool:
        return self.backend in KERNEL_BACKENDS or self.loops(args)

    def loops(self, args: Sequence[Any]) -> bool:
        """Whether torch's rules are known to make a loop of this, or of what it batches."""
        if not self._loops and not isinstance(self.parent, BatchedUnit):
            return False
        lanes = self._lanes(args)
        inner = isinstance(self.parent, BatchedUnit) and self.parent.loops(lanes)
        return inner or bool(self._loops and id(self.parent.flat(lanes)[0]) in self._loops)

    def lowered(self, args: Sequence[Any]) -> tuple[Lowered | None, Sequence[Tensor]]:
        live = [i for i, a in enumerate(args) if isinstance(a, VALUES)]
        dims, values = [self.in_dims[i] for i in live], [args[i] for i in live]
        is_empty = any(d is not None and not v.shape[d] for d, v in zip(dims, values, strict=True))
        if is_empty or self.backend not in BACKENDS:
            return None, ()
        lane, lifted = self.parent.lowered(self._lanes(args))
        if lane is None:
            return None, lifted
        layout = Layout.of(lane, values, dims)
        key = (id(lane), layout)
        if key not in self._batches:
            with capture_lock:
                if key not in self._batches:
                    made = over_lanes(lane, layout, self.out_dims, self.randomness, self.name, self.backend)
                    self._batches[key] = made
        return self._batches[key], lifted

    def _lanes(self, args: Sequence[Any]) -> list[Any]:
        """What the parent is given, in one lane: memory of the batch, without a history of its own."""
        with plain_tensors(), torch.no_grad():
            return [self._first_lane(a, d) for a, d in zip(args, self.in_dims, strict=True)]

    def _first_lane(self, value: Any, dim: int | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        if is_batched(value):
            made = example(lane(value, dim))
            readable([made], [value])
            return made
        return lane(value.detach(), dim).detach().requires_grad_(value.requires_grad and is_float(value))

    # ------------------------------------------------------------------ by torch's
    def further_facts(self) -> tuple[Any, ...]:
        """Which graph of the parent it is: the graph over a batch does not know for what sizes that one holds."""
        return (id(self._here.lane[0]),)

    def _capture(self, args: Sequence[Any], facts: Any) -> tuple[Executable, list[Tensor]]:
        known = id(self._here.lane[0])
        try:
            executable, lifted = super()._capture(args, facts)
        except CaptureError:
            self._loops.add(known)
            raise
        live = [i for i, a in enumerate(args) if isinstance(a, VALUES)]
        if is_written_out(executable.trace, [args[i] for i in live], [self.in_dims[i] for i in live]):
            self._loops.add(known)
        return executable, lifted

    def _prepare(self, args: Sequence[Any]) -> tuple[Trace, Sequence[Tensor]]:
        """Have the parent's graph at hand before this one is captured: captures do not nest."""
        lanes = self._lanes(args)
        if isinstance(self.parent, BatchedUnit):
            self.parent._prepare(lanes)
        self._here.lane = self.parent.flat(lanes)
        return self._here.lane  # type: ignore[no-any-return]

    def pulling(self, inputs: int, given: tuple[bool, ...], needed: Needed = None) -> TransformableGraph:
        outs = self.out_dims or (0,) * len(given)
        dims = [d if there and d != "sum" else None for there, d in zip(given, outs, strict=True)]
        back: list[OutDim] = ["sum" if d is None else d for d in self.in_dims]
        return self.parent.pulling(inputs, given, needed).batch((*self.in_dims, *dims), self.randomness, back)

    def pushing(self, inputs: int, moving: tuple[bool, ...]) -> TransformableGraph:
        dims = [d if there else None for there, d in zip(moving, self.in_dims, strict=True)]
        return self.parent.pushing(inputs, moving).batch((*self.in_dims, *dims), self.randomness, self.out_dims)

    def vjp(self, inputs: int, needed: Needed = None) -> TransformableGraph:
        raise InternalError("the vjp of a batched unit depends on which cotangents there are; use pulling")

    jvp = vjp


def _one_batch_size(name: str) -> CaptureError:
    reason = f"a graph of {name} holds for one batch size; after {SIZES} sizes its operations run one by one"
    return CaptureError(reason=reason, where="unknown")


def lane(value: Any, dim: int | None) -> Any:
    if not isinstance(value, Tensor) or dim is None:
        return value
    return value.select(dim, 0) if value.shape[dim] else value.new_empty(_without(value.shape, dim))


def _without(sizes: Sequence[int], dim: int) -> list[int]:
    return [n for i, n in enumerate(sizes) if i != dim % len(sizes)]


def _placed(result: Tensor, dim: OutDim) -> Tensor:
    if dim == "sum":
        return result.sum(0)
    return result.movedim(0, dim) if dim else result


def present_under_vmap(fn: Body, dims: tuple[int | None, ...], args: Sequence[Any], randomness: str) -> Sequence[Any]:
    """vmap of a function whose outputs may be None."""
    present: list[int] = []
    total = 0

    def only_tensors(*lanes: Any) -> tuple[Any, ...]:
        nonlocal total
        outputs = tuple(fn(*lanes))
        total = len(outputs)
        present[:] = [i for i, o in enumerate(outputs) if o is not None]
        return tuple(outputs[i] for i in present)

    results = torch.vmap(only_tensors, dims, 0, randomness=randomness)(*args)
    return with_those([None] * total, present, results)


def _copied(base: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """What a write leaves of all of `base`, by operations that torch differentiates and maps, as it does not `copy`."""
    return source.to(base.device, base.dtype).expand(base.shape).clone()


_IN_PYTHON: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.copy.default: _copied,
    torch.ops.aten.new_empty_strided.default: room_for,
    torch.ops.aten.sym_size.int: lambda t, i: t.shape[i],
    torch.ops.aten.sym_stride.int: lambda t, i: t.stride(i),
    torch.ops.aten.sym_numel.default: lambda t: t.numel(),
    torch.ops.aten.sym_storage_offset.default: lambda t: t.storage_offset(),
}
for _in_python in _IN_PYTHON.values():
    _in_python.__module__ = __name__  # torch.fx prints it into the code of a graph


def batchable(gm: torch.fx.GraphModule, inline: bool = False) -> torch.fx.GraphModule:
    """The graph with sizes read in Python: the ops that read them have no batching rule.

    inline: the forward of a nested Function that has no vmap rule of its own in place of its call.
    """
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    give_memory_its_axis(graph)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    writes = any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in calls)
    for node in calls:
        _numbers_as_tensors(node)
        viewed = node.target is torch.ops.aten.view.default and not writes  # what is written to has to stay one memory
        node.target = _seen_as if viewed else _batchable_target(node.target, inline)
    return torch.fx.GraphModule(gm, graph)


def _seen_as(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A view of a lane; a copy where the lanes together lie in memory so that there is none."""
    try:
        return x.view(shape)
    except RuntimeError:
        return x.reshape(shape)


def _numbers_as_tensors(node: torch.fx.Node) -> None:
    """mean / n, n a size: vmap makes a tensor of such a number where a lane is 0-d, which no capture can follow."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return
    tensors = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)]
    for i, (argument, value) in enumerate(zip(schema.arguments, node.args, strict=False)):
        if isinstance(argument.type, torch.TensorType) and _is_size(value) and tensors:
            with node.graph.inserting_before(node):
                node.update_arg(i, node.graph.call_function(_number_as, (value, tensors[0])))


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.fx.Node) and isinstance(value.meta.get("val"), torch.SymInt)


def _number_as(value: int, like: Tensor) -> Tensor:
    return torch.scalar_tensor(value, dtype=torch.result_type(like, 1), device=like.device)


def _batchable_target(target: Any, inline: bool) -> Any:
    nested = getattr(target, "fusegrad_call", None)
    if inline and isinstance(nested, type) and not _has_vmap_rule(nested):
        return forward_alone(nested, getattr(target, "fusegrad_needs", ()))
    return _IN_PYTHON.get(target) or in_lanes(target) or target


def _has_vmap_rule(cls: Any) -> bool:
    return bool(getattr(cls, "generate_vmap_rule", False)) or cls.vmap is not Function.vmap


def forward_alone(cls: Any, needs: tuple[int, ...]) -> Callable[..., Any]:
    """forward of a Function as a plain function, for a graph that is never differentiated: units derive their own."""

    def forward(*args: Any) -> Any:
        given = () if uses_setup_context(cls) else (ForwardContext(tuple(i in needs for i in range(len(args)))),)
        return cls.forward(*given, *args)

    forward.__name__ = forward.__qualname__ = f"forward_of_{cls.__name__}"
    return forward


def vjp_of(
    body: Body,
    inputs: Sequence[Any],
    cotangents: Sequence[Any],
    needed: Needed = None,
    again: bool = True,
    repeats: bool = False,
) -> list[Any]:
    """Gradients of `body` at `inputs`, through eager's own autograd, which watches only what needs one.

    again: they are to be differentiated, too. repeats: `body` draws what another run drew; its derivative does not.
    """
    if transforms_active():  # a forward mode that is captured: no tensor within it may be made to require grad
        return _vjp_within(body, inputs, cotangents, needed)
    with torch.enable_grad():
        asked = [is_float(x) and (needed is None or needed[i]) for i, x in enumerate(inputs)]
        leaves = [tracked_alias(x) if a else x for a, x in zip(asked, inputs, strict=True)]
        with without_anomaly_mode():  # torch keeps for good what it tells as the parent of a node that makes a NaN
            outputs = body(*leaves)
        if not is_capturing():
            end_redraw()
        last = last_node() if repeats and is_capturing() else None
        pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if is_tracked(o) and c is not None]
        wanted = [leaf for a, leaf in zip(asked, leaves, strict=True) if a]
        found: Sequence[Any] = [None] * len(wanted)
        if pairs and wanted:
            found = torch.autograd.grad(
                [p[0] for p in pairs], wanted, [p[1] for p in pairs], allow_unused=True, create_graph=again
            )
        if last is not None:
            require_no_draw_after(last)
    supply = iter(found)
    return [next(supply) if a else None for a in asked]


def _is_followed() -> bool:
    """Whether gradients are to be differentiated again: by autograd, or by whoever captures them."""
    return is_capturing() or torch.is_grad_enabled()


def _vjp_within(body: Body, inputs: Sequence[Any], cotangents: Sequence[Any], needed: Needed) -> list[Any]:
    """The same by torch.func; zeros for what no output depends on."""
    at = [i for i, x in enumerate(inputs) if is_float(x) and (needed is None or needed[i])]

    def of_asked(*given: Tensor) -> tuple[Tensor, ...]:
        outputs = body(*with_those(inputs, at, given))
        return tuple(o for o, c in zip(outputs, cotangents, strict=True) if c is not None and is_float(o))

    full: list[Any] = [None] * len(inputs)
    if not at:
        return full
    pulled: Any = torch.func.vjp(of_asked, *(inputs[i] for i in at))
    outputs, pull = pulled
    for i, g in zip(at, pull(tuple(c for c in cotangents if c is not None)) if outputs else (), strict=False):
        full[i] = g
    return full


def tracked_alias(value: Any) -> Any:
    if not is_float(value):
        return value
    return value.view_as(value) if value.requires_grad else value.detach().requires_grad_()


class Operators(Protocol):
    """What makes operators of units, for graphs that somebody else makes."""

    def called(self, unit: TransformableGraph, args: Sequence[Any]) -> Sequence[Any]:
        """The unit as one operator of that graph."""

    def executed(self, unit: TransformableGraph, args: Sequence[Any]) -> Sequence[Any]:
        """The same, of its results alone."""


_operators: list[Operators] = []


def make_operators_by(operators: Operators) -> None:
    """runtime/dynamo does, when it is imported: units know nobody above them."""
    _operators[:] = [operators]


def _graphed(args: Sequence[Any]) -> Operators | None:
    """What makes operators of units, where somebody else makes a graph; None where we do."""
    return _operators[0] if is_for_outer_graph(args) else None


def _is_one_of(output: Any, args: Sequence[Any]) -> bool:
    return isinstance(output, Tensor) and any(output is a for a in args)


_ran = threading.local()
"""`captured`: of what this thread executed last, the graph and which arguments are its inputs, by number; or None."""


def ran(captured: tuple[Trace, list[int]] | None, results: Sequence[Any]) -> Sequence[Any]:
    """The results of an execution, with a note of what it executed."""
    _ran.captured = captured
    return results


def _constant_results(
    captured: Any, args: Sequence[Any], needs: Sequence[bool], tangents: bool = False
) -> list[int]:
    """The results of a noted execution on these arguments that depend on none that needs a gradient.

    tangents: or that moves, by what forward mode goes through.
    """
    if captured is None:
        return []
    trace, live = captured
    return independent_results(trace, [n for n, i in enumerate(live) if needs[i] and is_float(args[i])], tangents)


def _moved(needs: Sequence[bool], args: Sequence[Any]) -> list[bool]:
    """Which arguments a derivative is taken in: those that need a gradient, and dual numbers."""
    return [need or has_tangent(a) for need, a in zip(needs, args, strict=True)]


def _without_history(result: Any) -> Any:
    """A dual number without what led to it: of a Function with tangents every result is differentiable."""
    if not is_tracked(result):
        return result
    if not has_tangent(result):
        return result.detach()
    pair: Any = unpack_dual(result)  # type: ignore[no-untyped-call]
    return make_dual(pair.primal.detach(), pair.tangent)  # type: ignore[no-untyped-call]


def unrecorded(results: Sequence[Any], args: Sequence[Any]) -> Sequence[Any]:
    """What torch's autograd computed of a body, without the graph that it made for that where none is asked for."""
    if torch.is_grad_enabled() or transforms_active():
        return results
    return tuple(r if _is_one_of(r, args) or not is_tracked(r) else _without_history(r) for r in results)


def _as_it_is(value: Any) -> Any:
    return value


def own_memory(result: Any) -> Any:
    """A value that repeats elements (the same in every lane, expanded), in full: no tangent fits its layout."""
    if not isinstance(result, Tensor):
        return result
    repeats = any(step == 0 and n > 1 for step, n in zip(result.stride(), result.shape, strict=True))
    return result.contiguous() if repeats else result


def as_made(results: Sequence[Any], args: Sequence[Any]) -> Sequence[Any]:
    """The results; a part of memory that nothing else shows as itself: autograd lets no view of a Function be written
    to, and what eager's own operations made of that memory can be."""
    tensors = [t for t in (*results, *args) if isinstance(t, Tensor)]
    views = [r for r in results if isinstance(r, Tensor) and r._is_view()]
    if not views or is_capturing() or any(t.layout is not torch.strided or is_batched(t) for t in tensors):
        return results
    shown = Counter(memory_of(unwrapped(t)) for t in tensors)
    alone = {id(v) for v in views if shown[memory_of(unwrapped(v))] == 1}
    return tuple(r.detach() if id(r) in alone else r for r in results)


def _function_of(unit: TransformableGraph, pushes: bool) -> Any:
    """pushes: its results are to have tangents."""
    noted = unit.noted  # other units run between forward and the setup_context of a level further out
    kept = own_memory if pushes else _as_it_is

    def forward(*args: Any) -> Any:
        _ran.captured = None
        noted.generators = unit.generators(args)
        results = as_made(unit.execute(args), args)
        noted.captured = _ran.captured
        return tuple(o.view_as(o) if _is_one_of(o, args) else kept(o) for o in results)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        tensors = [a if isinstance(a, Tensor) else None for a in inputs]
        ctx.others = [None if isinstance(a, Tensor) else a for a in inputs]
        ctx.likes = [(o.shape, o.dtype, o.device) if is_float(o) else None for o in output]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.generators = getattr(noted, "generators", None)
        needs = [True] * len(inputs) if transforms_active() else _moved(ctx.needs_input_grad, inputs)
        fixed = _constant_results(getattr(noted, "captured", None), inputs, needs, pushes)
        ctx.constant = frozenset(i for i in fixed if is_float(output[i]))
        if ctx.constant:
            ctx.mark_non_differentiable(*(output[i] for i in ctx.constant))

    def arguments(ctx: Any) -> list[Any]:
        return [t if t is not None else o for t, o in zip(ctx.saved_tensors, ctx.others, strict=True)]

    def backward(ctx: Any, *gradients: Any) -> Any:
        args = arguments(ctx)
        try:
            with redraw(ctx.generators):
                return tuple(unit.pullback(args, gradients, ctx.needs_input_grad))
        except Exception as error:
            if unit.failed is None or not is_fault(error):
                raise
            fault = Fault.of(error)
        with redraw(ctx.generators):
            results = vjp_of(lambda *a: unit.as_written(a), args, gradients, ctx.needs_input_grad, _is_followed())
        unit.failed(fault, args)
        return tuple(results)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        args = arguments(ctx)
        with redraw(ctx.generators):
            pushed = enumerate(zip(unit.pushforward(args, tangents), ctx.likes, strict=True))
        full = ((i, zeros(s) if t is None and s is not None else t) for i, (t, s) in pushed)
        return tuple(None if i in ctx.constant else t for i, t in full)

    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        outputs = tuple(map(kept, unit.batch(in_dims, info.randomness)(*args)))
        return outputs, tuple(None if o is None else 0 for o in outputs)

    rules = {"forward": forward, "setup_context": setup_context, "backward": backward, "jvp": jvp, "vmap": vmap}
    return type(unit.name, (Function,), {name: staticmethod(rule) for name, rule in rules.items()})


class BackwardUnit(TransformableGraph):
    """The user's backward as a unit of (residuals, symbol values, gradients); its first order runs the kernels."""

    def __init__(self, compiler: Compiled, specialization: Specialization, backend: str) -> None:
        captured = specialization.captured
        self.compiler, self.specialization = compiler, specialization
        self.symbols = sorted(captured.symbols, key=str)
        self.split = len(captured.residual_places)
        super().__init__(f"{captured.name}_backward", self._python, backend, captured.reads)
        self.refused, self.failed = compiler.derivative_refused, compiler.derivative_failed

    @classmethod
    def of(cls, compiler: Compiled, specialization: Specialization, backend: str) -> BackwardUnit:
        """The one unit of this specialisation on this backend."""
        key = (backend, "backward")
        if key not in specialization.nodes:
            specialization.nodes.setdefault(key, cls(compiler, specialization, backend))
        return specialization.nodes[key]  # type: ignore[no-any-return]

    def differentiable(self, residuals: Sequence[Any], sizes: BoundSizes, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Gradients that can be differentiated again, along what they depend on."""
        args = [*residuals, *(sizes[s] for s in self.symbols), *gradients]
        if is_capturing() or transforms_active():
            return tuple(self(*args))
        kinds = tuple(layout_class(canonical_layout(g)) for g in gradients)
        if is_for_other_sizes(self.specialization.backward, kinds, sizes):
            self.compiler.report_once("backward", OTHER_SIZES)
            return tuple(self.as_written(args))
        results = list(self(*without_idle(self._captured_for(args, sizes, gradients), args)))
        for result, gradient in self._passed(sizes, gradients).items():
            results[result] = gradients[gradient]  # itself, and no view of it
        return tuple(results)

    def _passed(self, sizes: BoundSizes, gradients: Sequence[Any]) -> dict[int, int]:
        """The results that are a gradient as it came, and its number."""
        try:
            kinds = tuple(layout_class(canonical_layout(g)) for g in gradients)
            found = self.specialization.backward.entry_at(kinds, sizes)
        except CaptureError:
            return {}
        return {} if found is None else found[1].passed_gradients

    def _parts(self, args: Sequence[Any]) -> tuple[Sequence[Any], BoundSizes, Sequence[Any]]:
        middle = self.split + len(self.symbols)
        sizes = BoundSizes(zip(self.symbols, args[self.split : middle], strict=True))
        return args[: self.split], sizes, args[middle:]

    def _apart(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments, copies of those that backward writes to: a derivative needs them as they are, too."""
        entries = [e for e in self.specialization.backward.entries.values() if not isinstance(e, CaptureError)]
        written = {i for entry in entries for i in entry.written_inputs}
        return [a.clone() if i in written and isinstance(a, Tensor) else a for i, a in enumerate(args)]

    def _python(self, *args: Any) -> Sequence[Any]:
        residuals, sizes, gradients = self._parts(self._apart(args))
        results = run_user_backward(self.specialization.captured, residuals, sizes, gradients)
        return [reduce_to_argument(self.specialization.captured, i, g, sizes) for i, g in enumerate(results)]

    def execute(self, args: Sequence[Any]) -> Sequence[Any]:
        if is_capturing():
            return self.traced(args)
        residuals, sizes, gradients = self._parts(self._apart(args))
        call = BackwardCall(self.backend, residuals, sizes, gradients)
        results = run_backward(self.compiler, self.specialization, call)
        return ran(self._captured_for(args, sizes, gradients), results)

    def is_debugged(self) -> bool:
        return self.compiler.is_debugged()

    def pullback(self, args: Sequence[Any], cotangents: Sequence[Any], needed: Needed = None) -> Sequence[Any]:
        if needed is not None and not transforms_active() and not is_capturing():
            _, sizes, gradients = self._parts(args)
            trace, live = self._captured_for(args, sizes, gradients) or (None, [])
            used = frozenset().union(*sources_of(trace)) if trace is not None else ()
            warn_once(self.specialization, args, needed, {live[n] for n in used if n < len(live)})
        return super().pullback(args, cotangents, needed)

    @property
    def draws(self) -> bool:
        entries = list(self.specialization.backward.entries.values())
        return not entries or any(isinstance(e, CaptureError) or draws(e.trace) for e in entries)

    def _captured_for(
        self, args: Sequence[Any], sizes: BoundSizes, gradients: Sequence[Any]
    ) -> tuple[Trace, list[int]] | None:
        """The graph of a backward that runs, and which arguments are its inputs; None where no graph is known."""
        kinds = tuple(layout_class(canonical_layout(g)) for g in gradients)
        try:
            found = self.specialization.backward.entry_at(kinds, sizes)
        except CaptureError:
            return None
        if found is None or (found[0].captured.backward_symbols and not self.symbols):
            return None
        whose, entry = found
        size = [self.split] * len(whose.captured.backward_symbols)  # one for all: none of them has a gradient
        given = [i for i in range(len(args)) if not self.split <= i < len(args) - len(gradients)]
        places = [i for i in given if args[i] is not None]
        first = sum(i < self.split for i in places)
        return entry.trace, [*places[:first], *size, *places[first:]]


def without_idle(captured: tuple[Trace, list[int]] | None, args: Sequence[Any]) -> list[Any]:
    """The arguments, detached where no result depends on them: in eager nothing leads back there (by a mask, say).

    A tangent goes on where the grad mode is off.
    """
    if captured is None:
        return list(args)
    trace, live = captured
    used, moving = ({live[n] for n in frozenset().union(*sources_of(trace, t)) if n < len(live)} for t in (False, True))

    def kept(i: int, value: Any) -> Any:
        if i in used or not is_tracked(value):
            return value
        return _without_history(value) if i in moving else value.detach()

    return [kept(i, a) for i, a in enumerate(args)]
