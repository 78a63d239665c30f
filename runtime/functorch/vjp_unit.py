"""Cotangents of a unit's inputs: through eager's own autograd; of a graph with loops by the rules of the IR.

Autograd would run a loop step by step, and a trace of that has each of its steps: other ones for each length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ...ir import Graph, Value, building
from ...ir.errors import InvalidGraphError
from ...ir.loops.loop import scans_of
from ...ir.transforms.extern import NoRuleError
from ...ir.transforms.linearity import NonLinearError
from ...ir.transforms.ops import DIFFERENTIABLE, inline
from ...ir.transforms.transpose import vjp
from ...tracer.capture.capture import is_capturing
from ...tracer.capture.grad_mode import UNRECORDED
from ...tracer.torch_private import DETACHES, plain_tensors
from ...tracer.trace import CaptureError, Trace
from ..capture.guards import is_float
from ..execution.graph_to_kernels import optimize
from ..settings.config import KERNEL_BACKENDS
from .batching.ir_rules import Lowered
from .jvp_unit import CallingUnit, symbols_in_types
from .unit import TransformableGraph, derivations, run_in_ir
from .vjp import Needed, is_followed, vjp_of

Tensor = torch.Tensor


class VjpUnit(TransformableGraph):
    """(inputs, cotangents of the outputs) -> cotangents of the inputs that need one."""

    def __init__(self, parent: TransformableGraph, inputs: int, needed: Needed) -> None:
        self.parent, self.count, self.needed = parent, inputs, needed
        self.pulled: dict[Any, Lowered | None] = {}  # by the graph of the parent, and which arguments there are

        def body(*args: Any) -> Sequence[Any]:
            return vjp_of(parent.body, args[:inputs], args[inputs:], needed, is_followed(), parent.draws)

        super().__init__(f"{parent.name}_vjp", body, parent.backend, parent.reads)

    def execute(self, args: Sequence[Any]) -> Sequence[Any]:
        in_ir = None if is_capturing() else self._pulled_for(args)
        results = None if in_ir is None else run_in_ir(self, args)
        return super().execute(args) if results is None else results

    def lowered(self, args: Sequence[Any]) -> tuple[Lowered | None, Sequence[Tensor]]:
        graph = self._pulled_for(args)
        return super().lowered(args) if graph is None else graph

    def _pulled_for(self, args: Sequence[Any]) -> tuple[Lowered, Sequence[Tensor]] | None:
        """The graph of the vjp for these arguments, where the parent's has loops; None where autograd derives it."""
        if self.backend not in KERNEL_BACKENDS or isinstance(self.parent, CallingUnit) or not self.parent.may_loop:
            return None
        inputs = args[: self.count]
        try:
            with plain_tensors(), torch.no_grad():
                forward, lifted = self.parent.lowered(inputs)
        except CaptureError:
            return None
        if forward is None or not scans_of(forward.graph) or not is_differentiable_as_it_is(forward.trace):
            return None
        key = (id(forward), tuple(a is not None for a in args))
        if key not in self.pulled:
            self.pulled[key] = self._pull(forward, inputs, args[self.count :])
        graph = self.pulled[key]
        return None if graph is None else (graph, lifted)

    def _pull(self, forward: Lowered, inputs: Sequence[Any], cotangents: Sequence[Any]) -> Lowered | None:
        needs = [is_float(x) and (self.needed is None or self.needed[i]) for i, x in enumerate(inputs)]
        try:
            graph = optimize(pulled_graph(forward.graph, inputs, cotangents, needs, self.name))
        except (NoRuleError, NonLinearError, InvalidGraphError):
            return None
        if not symbols_in_types(graph) <= set(forward.sources):
            return None
        axes: list[Any] = [*forward.axes, *(None for c in cotangents if c is not None)]
        return Lowered(forward.trace, graph, axes, forward.sources, self.name, self.backend, tells=False)


def pulled_graph(
    graph: Graph, inputs: Sequence[Any], cotangents: Sequence[Any], needs: Sequence[bool], name: str
) -> Graph:
    """The graph over the tensors of (inputs, cotangents that are there), and what was taken from outside.

    Its results: one for each of `inputs`, None where no gradient is needed. Raises NoRuleError.
    """
    tensors = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    given = [i for i, c in enumerate(cotangents) if c is not None]
    moving = [i for i in given if (o := graph.outputs[i]) is not None and o.dtype in DIFFERENTIABLE]
    wrt = [at for at, i in enumerate(tensors) if needs[i]]
    pulled = vjp(graph, wrt, moving)
    # The order of the caller's values: inputs, cotangents, and behind them what was taken from outside.
    out = Graph(name)
    own = [out.input_like(v) for v in graph.inputs[: len(tensors)]]
    bars = {i: out.input(_output(graph, i).aval, f"bar{i}") for i in given}
    outside = [out.input_like(v) for v in graph.inputs[len(tensors) :]]
    with building(out):
        results = iter(inline(pulled, [*own, *outside, *(bars[i] for i in moving)]))
        return out.returning([next(results) if need else None for need in needs])


def _output(graph: Graph, index: int) -> Value:
    value = graph.outputs[index]
    if value is None:
        raise InvalidGraphError("a cotangent is given for what is no tensor", node=graph.name)
    return value


def is_differentiable_as_it_is(trace: Trace) -> bool:
    """True if autograd would see in a trace what it does: nothing is cut off, and no nested Function is inlined."""
    return not (trace.inlines or trace.opaque or any(map(_cuts_off, _graphs_in(trace.graph_module))))


def _graphs_in(gm: fx.GraphModule) -> Iterator[fx.Graph]:
    """The graph of a trace, and those of the bodies of its loops."""
    yield gm.graph
    for node in gm.graph.nodes:
        if (loop := getattr(node.target, "fusegrad_loop", None)) is not None:
            yield from _graphs_in(loop.body)


def _cuts_off(graph: fx.Graph) -> bool:
    """True if something that may have a history loses it."""
    followed: set[fx.Node] = set()
    for node in graph.nodes:
        depends = node.op == "placeholder" or bool(followed & set(node.all_input_nodes))
        if depends and (node.meta.get(UNRECORDED) or node.target in DETACHES):
            return True
        if depends and not str(node.target).endswith(NEW) and _may_be_followed(node.meta.get("val")):
            followed.add(node)
    return False


NEW = tuple(f"{name}_like.default" for name in ("zeros", "ones", "full", "empty"))
"""Operations whose results depend on no number of what they are given."""


def _may_be_followed(recorded: Any) -> bool:
    """True of floats, and of what is not known."""
    return not isinstance(recorded, Tensor) or is_float(recorded)


derivations["vjp"] = VjpUnit
