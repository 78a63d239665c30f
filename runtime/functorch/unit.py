"""A captured function closed under vjp, jvp and vmap: functorch drives the levels, and each rule is a unit again.

A derivative is traced through autograd itself (so nested Functions, `detach` and custom gradients are eager's by
construction); batching is applied to flat captured graphs, never to the Python of a derivative.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch.autograd.function import Function

from ...tracer.capture.capture import is_capturing
from ...tracer.reads.reads import Reads
from ...tracer.torch_private import (
    custom_function_call,
    forward_mode_is_active,
    has_tangent,
    is_batched,
    transforms_active,
)
from ...tracer.trace import CaptureError
from ..capture.graph_mode import is_for_outer_graph
from ..capture.guards import is_float, is_tracked
from ..capture.redraw import Generators, generator_states, redraw
from ..execution.executable import Executable
from ..fallback.answer import UNDER_FUNC, Fault, is_fault, put_on_record
from ..settings.counters import count
from ..values.tensors import zeros
from .batching.ir_rules import Lowered
from .graphs import Body, GraphCache, present
from .results import (
    as_made,
    constant_results,
    is_among,
    last_execution,
    needing_derivatives,
    own_memory,
    ran,
    unrecorded,
    without_history,
)
from .vjp import Needed, is_followed, vjp_of

Tensor = torch.Tensor
OutDim = int | Literal["sum"] | None

derivations: dict[str, Callable[..., TransformableGraph]] = {}
"""Units by how they are derived of another one: "vjp", "jvp", "batch". The files that derive them fill it."""


class TransformableGraph:
    """A Python function of tensors, ints and Nones, captured per key, run as kernels, differentiable to any order."""

    def __init__(self, name: str, body: Body, backend: str, reads: Reads, graphs: GraphCache | None = None) -> None:
        self.name, self.body, self.backend, self.reads = name, body, backend, reads
        self.graphs = GraphCache(name, body, backend, reads) if graphs is None else graphs
        self.last_run = threading.local()  # `graph`: what its Function, or that of a batch of it, executed last
        self.refused: Callable[[CaptureError], None] | None = None  # is told of a graph that cannot be captured
        self.failed: Callable[[Fault, Sequence[Any]], None] | None = None  # is told of a mistake of ours
        self.lineage: tuple[Any, ...] = (name,)  # how it was derived, in words that every process has
        self.origin: TransformableGraph | None = None  # what it was derived from
        self.functions: dict[bool, Any] = {}
        self.derived: dict[Any, TransformableGraph] = {}

    # ------------------------------------------------------------------ running
    def __call__(self, *args: Any) -> Sequence[Any]:
        if is_capturing():
            return operators.called(self, args) if (operators := _operators_for(args)) else self.body(*args)
        try:
            return _run(self, args)
        except Exception as error:
            if self.failed is None or not is_fault(error):
                raise
            fault = Fault.of(error)
        results = unrecorded(self.as_written(args), args)
        self.failed(fault, args)
        return results

    def as_written(self, args: Sequence[Any]) -> Sequence[Any]:
        """The Python of its body, which torch differentiates and maps as it does in eager."""
        return self.body(*args)

    def execute(self, args: Sequence[Any]) -> Sequence[Any]:
        """Run at the bottom, below every level of differentiation, from the captured graph."""
        if is_capturing():
            return run_within_capture(self, args)
        try:
            executable, lifted = self.captured(args)
        except CaptureError as error:
            return run_uncaptured(self, args, error)
        return run_graph(executable, lifted, args)

    # ------------------------------------------------------------------ graphs
    def captured(self, args: Sequence[Any]) -> tuple[Executable, list[Tensor]]:
        """The graph for arguments like these, and what it reads from outside. Raises CaptureError."""
        return self.graphs.lookup(args)

    def lowered(self, args: Sequence[Any]) -> tuple[Lowered | None, Sequence[Tensor]]:
        """The captured graph in the IR, for batching; None where it is not of primitives alone."""
        executable, lifted = self.captured(args)
        if id(executable) not in self.graphs.in_ir:
            self.graphs.lower(executable)
            return self.lowered(args)  # lowering may have learnt more about sizes
        return self.graphs.in_ir[id(executable)], lifted

    @property
    def may_loop(self) -> bool:
        """True if a graph of it has a loop, as far as is known; a graph is asked for itself where it may."""
        return self.origin.may_loop if self.origin is not None else self.graphs.may_loop

    @property
    def draws(self) -> bool:
        """True if a run draws random numbers, as far as is known before."""
        return self.graphs.draws if self.origin is None else self.origin.draws

    # ------------------------------------------------------------------ derived units
    def derive(self, kind: str, *facts: Any) -> TransformableGraph:
        """The unit that is derived so, one for all threads, which reports to those to whom this one reports."""
        key = (kind, *facts)
        unit = self.derived.get(key) or self.derived.setdefault(key, derivations[kind](self, *facts))
        unit.refused, unit.failed, unit.lineage = self.refused, self.failed, (*self.lineage, key)
        unit.origin = self
        return unit

    def vjp(self, inputs: int, needed: Needed = None) -> TransformableGraph:
        """(inputs, cotangents of the outputs) -> cotangents of the inputs that need one (None: of all)."""
        return self.derive("vjp", inputs, needed)

    def jvp(self, inputs: int) -> TransformableGraph:
        """(inputs, tangents) -> tangents of the outputs."""
        return self.derive("jvp", inputs)

    def batch(
        self, in_dims: Sequence[int | None], randomness: str, out_dims: Sequence[OutDim] | None = None
    ) -> TransformableGraph:
        """This unit over a batch; `out_dims` as in BatchedUnit."""
        return self.derive("batch", tuple(in_dims), randomness, None if out_dims is None else tuple(out_dims))

    def vjp_unit(self, inputs: int, present_cotangents: tuple[bool, ...], needed: Needed) -> TransformableGraph:
        """The unit behind `pullback`, where these cotangents are given."""
        return self.vjp(inputs, needed)

    def jvp_unit(self, inputs: int, moving: tuple[bool, ...]) -> TransformableGraph:
        """The unit behind `pushforward`, where these inputs move."""
        return self.jvp(inputs)

    def pullback(self, args: Sequence[Any], cotangents: Sequence[Any], needed: Needed = None) -> Sequence[Any]:
        """Cotangents of `args`, of those that need one."""
        present_cotangents = tuple(c is not None for c in cotangents)
        return self.vjp_unit(len(args), present_cotangents, needed)(*args, *cotangents)

    def pushforward(self, args: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        """Tangents of the outputs."""
        return self.jvp_unit(len(args), tuple(t is not None for t in tangents))(*args, *tangents)


# ------------------------------------------------------------------ running
def _run(unit: TransformableGraph, args: Sequence[Any]) -> Sequence[Any]:
    """From captured graphs, at every level of differentiation."""
    duals = any(map(has_tangent, args))
    if not (torch.is_grad_enabled() or transforms_active() or duals):
        return unit.execute(args)
    results = custom_function_call(function_of(unit), *args)
    if not duals or transforms_active():
        return results  # type: ignore[no-any-return]
    # Results of dual numbers that depend on nothing that requires grad have a tangent and no history.
    needless = constant_results(unit.last_run.graph, args, [is_tracked(a) for a in args])
    return tuple(without_history(r) if i in needless else r for i, r in enumerate(results))


def run_graph(executable: Executable, lifted: Sequence[Tensor], args: Sequence[Any]) -> Sequence[Any]:
    """A captured graph on the arguments that it takes."""
    live = present(args)
    values = [args[i] for i in live]
    batched = any(map(is_batched, values))  # no memory that a kernel could read
    results = list(executable.replay(*values, *lifted)) if batched else executable(values, lifted)
    return ran((executable.trace, live), results)


def run_in_ir(unit: TransformableGraph, args: Sequence[Any]) -> Sequence[Any] | None:
    """The results of the graph in the IR, from which batching starts; None where there is no such graph."""
    live = present(args)
    if any(is_batched(args[i]) for i in live):
        return None  # no memory that a kernel could read
    graph, lifted = unit.lowered(args)
    if graph is None:
        return None
    return ran((graph.trace, live) if graph.tells else None, graph([args[i] for i in live], lifted))


def report_to(compiler: Any, unit: TransformableGraph) -> None:
    """Let a unit, and all that is derived of it, put on a class's record what was not captured, and faults of ours."""
    unit.refused, unit.failed = compiler.ledger.refuse_derivative, partial(put_on_record, compiler, UNDER_FUNC)


def run_uncaptured(unit: TransformableGraph, args: Sequence[Any], error: CaptureError) -> Sequence[Any]:
    """A derivative of a method that cannot be captured: through autograd, as in eager, and on record."""
    results = unrecorded(unit.body(*args), args)
    if unit.refused is None:
        count("fallbacks")
    else:
        unit.refused(error)
    return ran(None, results)


def run_within_capture(unit: TransformableGraph, args: Sequence[Any]) -> Sequence[Any]:
    """Run while a graph is made: one operator in a graph that is not ours, else the operations of its body."""
    return operators.executed(unit, args) if (operators := _operators_for(args)) else unit.body(*args)


class Operators(Protocol):
    """Makes operators of units, for graphs that torch.compile, torch.export or make_fx make."""

    def called(self, unit: TransformableGraph, args: Sequence[Any]) -> Sequence[Any]:
        """The unit as one operator of that graph."""

    def executed(self, unit: TransformableGraph, args: Sequence[Any]) -> Sequence[Any]:
        """The same, of its results alone."""


_operators: list[Operators] = []


def make_operators_by(operators: Operators) -> None:
    """Set the maker of operators: runtime/dynamo does, when it is imported, since units import no room above them."""
    _operators[:] = [operators]


def _operators_for(args: Sequence[Any]) -> Operators | None:
    """The maker of operators, where another tracer makes the graph; None where we do."""
    return _operators[0] if is_for_outer_graph(args) else None


# ------------------------------------------------------------------ the Function of a unit
def function_of(unit: TransformableGraph) -> Any:
    """The Function that executes a unit and whose rules are units again."""
    pushes = forward_mode_is_active()
    if pushes not in unit.functions:
        unit.functions.setdefault(pushes, _make_function(unit, pushes))
    return unit.functions[pushes]


def _make_function(unit: TransformableGraph, pushes: bool) -> Any:
    """pushes: its results are to have tangents."""
    last_run = unit.last_run  # other units run between forward and the setup_context of a level further out

    settled = own_memory if pushes else _unchanged

    def forward(*args: Any) -> Any:
        last_execution.graph = None
        last_run.generators = _generators(unit, args)
        results = as_made(unit.execute(args), args)
        last_run.graph = last_execution.graph
        return tuple(o.view_as(o) if is_among(o, args) else settled(o) for o in results)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        tensors = [a if isinstance(a, Tensor) else None for a in inputs]
        ctx.others = [None if isinstance(a, Tensor) else a for a in inputs]
        ctx.likes = [(o.shape, o.dtype, o.device) if is_float(o) else None for o in output]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.generators = getattr(last_run, "generators", None)
        needs = [True] * len(inputs) if transforms_active() else needing_derivatives(ctx.needs_input_grad, inputs)
        constant = constant_results(getattr(last_run, "graph", None), inputs, needs, pushes)
        ctx.constant = frozenset(i for i in constant if is_float(output[i]))
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
            results = vjp_of(lambda *a: unit.as_written(a), args, gradients, ctx.needs_input_grad, is_followed())
        unit.failed(fault, args)
        return tuple(results)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        args = arguments(ctx)
        with redraw(ctx.generators):
            pushed = enumerate(zip(unit.pushforward(args, tangents), ctx.likes, strict=True))
        full = ((i, zeros(s) if t is None and s is not None else t) for i, (t, s) in pushed)
        return tuple(None if i in ctx.constant else t for i, t in full)

    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        outputs = tuple(map(settled, unit.batch(in_dims, info.randomness)(*args)))
        return outputs, tuple(None if o is None else 0 for o in outputs)

    rules = {"forward": forward, "setup_context": setup_context, "backward": backward, "jvp": jvp, "vmap": vmap}
    return type(unit.name, (Function,), {name: staticmethod(rule) for name, rule in rules.items()})


def _unchanged(result: Any) -> Any:
    return result


def _generators(unit: TransformableGraph, args: Sequence[Any]) -> Generators | None:
    """The states of torch's generators before a run that draws; None for one that does not."""
    return generator_states(args) if unit.draws and not is_capturing() else None
