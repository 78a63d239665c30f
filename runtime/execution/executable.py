"""Executing one captured graph on one backend: what to allocate, launch and call, looked up by the sizes at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ...ir import Graph
from ...ir.errors import LoweringError
from ...ir.lazy_attribute import lazy_attribute
from ...ir.switches import should_run, switch_state, use_switch_state, watch_allows
from ...tracer.capture.capture import assumptions_of, capture_lock
from ...tracer.sizes import hint_of
from ...tracer.trace import Trace
from ..settings.config import AS_TRACED, KERNEL_BACKENDS, settings
from ..settings.counters import count
from ..settings.internal_errors import or_fall_back
from ..values.sizes import Binder, Sizes, numbers, sizes_key
from .aten import reference
from .aten.replay import compile_fx
from .graph_to_kernels import graph_of
from .group import RECORDS
from .intermediates import intermediate_bytes
from .kernel_plan import KernelPlan
from .layouts import own_results
from .slabs.by_torch import PRODUCTS, InSlabs, calls_any, is_plain_call

Tensor = torch.Tensor
LARGE = 1 << 16
"""Bytes of a tensor from which on a fresh one costs more than the further operations that write into what there is."""
Run = Callable[[Sequence[Any], Sequence[Tensor], "Sizes | None"], list[Any]]


class Executable:
    """Calls a trace on real inputs: `(tensors and ints) -> outputs`. `skip`: outputs that the caller makes itself.

    `graph`: a program to run in place of the trace's own, on a kernel backend; `why_not`: why there are no kernels.
    `sizes`: the symbols' values where the inputs alone do not tell them.
    """

    def __init__(
        self,
        trace: Trace | Callable[[], Trace],
        name: str,
        backend: str,
        skip: frozenset[int] = frozenset(),
        report: Callable[[str], None] | None = None,
        graph: Graph | None = None,
        why_not: str = "",
        plan: KernelPlan | None = None,
        binder: Binder | None = None,
    ) -> None:
        """plan, binder: made already, by another process; then `trace` makes the trace where it is asked for."""
        self._trace, self.name, self.backend, self.skip, self.why_not = trace, name, backend, skip, why_not
        self.graph, self.switches = graph, switch_state()
        self.report = report or (lambda why: None)
        self.binder = Binder(self.trace.fakes) if binder is None else binder
        self.plans: dict[torch.device, KernelPlan] = {}
        self.devices_without_plan: set[torch.device] = set()  # devices for which we failed to make a plan
        self.fallback: Run = self._replay
        if plan is None:
            self.run = self._choose()
        else:
            self.graph, self.switches, self.run = plan.graph, plan.switches, self._planned
            self.plans[plan.device] = plan

    @classmethod
    def planned(cls, plan: KernelPlan, trace: Callable[[], Trace], skip: frozenset[int], binder: Binder) -> Executable:
        """An executable whose plan is known; its trace is made where it is asked for."""
        return cls(trace, plan.name, plan.backend, skip, plan.report, plan=plan, binder=binder)

    @property
    def trace(self) -> Trace:
        """The captured operations."""
        if not isinstance(self._trace, Trace):
            self._trace = self._trace()
        return self._trace

    def __call__(self, inputs: Sequence[Any], lifted: Sequence[Tensor], sizes: Sizes | None = None) -> list[Any]:
        if (watch := self.switches.watch) is not None:
            watch.observe(self, [*inputs, *lifted], sizes)
        return self.run(inputs, lifted, sizes)

    @lazy_attribute
    def replay(self) -> Callable[..., Any]:
        """The captured operations, on whatever stands in for tensors."""
        with use_switch_state(self.switches):
            return compile_fx(self.trace.graph_module, self.name)

    @lazy_attribute
    def replay_reusing_memory(self) -> Callable[..., Any]:
        """The same on plain tensors that autograd does not follow, with no more memory than is needed at a time."""
        with use_switch_state(self.switches):
            return compile_fx(self.trace.graph_module, self.name, should_run("reuse", self.name))

    def replay_of(self, values: Sequence[Any]) -> Callable[..., Any]:
        """The quicker one of the two on plain tensors like these."""
        is_large = any(isinstance(v, Tensor) and v.nbytes >= LARGE for v in values)
        return self.replay_reusing_memory if is_large else self.replay

    def replays_at(self, sizes: Sizes, device: torch.device) -> bool:
        """True where a plain call at these sizes runs the captured operations one by one, and nothing else."""
        run = self.run
        if isinstance(run, InSlabs) and run.plan_at(device, sizes) is None:
            run = run.otherwise
        return run == self._replay

    def _choose(self) -> Run:
        if self.backend in KERNEL_BACKENDS:
            return self._kernels()
        if self.backend == AS_TRACED:
            return self._replay
        count("compiles")
        if self.backend == "inductor":
            from .inductor import compile_by_inductor

            fast = compile_by_inductor(self.trace.graph_module)
            return lambda inputs, lifted, sizes: fast(inputs, lifted)
        run: Run = self._replay
        if has_outer_product(self.trace):
            run = _contracted_where_it_helps(self.trace, self.name, self.binder, run)
        if calls_any(self.trace, PRODUCTS) and should_run("slabs", self.name):
            run = InSlabs(self.trace, self.name, self.binder, run, self.report)
        return run

    def _replay(self, inputs: Sequence[Any], lifted: Sequence[Tensor], sizes: Sizes | None) -> list[Any]:
        """The captured ATen operations as they are: bitwise what the user's method computes."""
        values = (*inputs, *lifted)
        run = self.replay_of(values) if is_plain_call(values) else self.replay
        return list(run(*values))

    def _kernels(self) -> Run:
        if self.why_not:
            self.report(f"no kernels, the traced ATen operations run one by one: {self.why_not}")
            return self._replay
        try:
            graph = self.graph or or_fall_back(partial(graph_of, self.trace, self.name), self.report)
        except LoweringError as error:
            self.report(f"no kernels, the traced ATen operations run one by one: {error}")
            return self._replay
        if graph is None:
            return self._replay
        self.fallback = self._replay if self.graph is None else through_torch(graph, self.binder)
        self.graph = graph
        graph.outputs = [None if i in self.skip else o for i, o in enumerate(graph.outputs)]
        return self._planned if watch_allows("divide", self.name) else through_torch(graph, self.binder)

    def prepare(self, sizes: Sizes, device: torch.device | None = None) -> None:
        """Fuse the program and generate its kernels for a device, once; at these sizes, where they decide.

        device: by default that of the tensors which the program was captured with.
        """
        if self.run != self._planned or (device is None and self.plans):
            return
        device = device_of(self.trace) if device is None else device
        if device not in self.plans and device not in self.devices_without_plan:
            with capture_lock:
                self._add_plan(device, sizes)

    def _planned(self, inputs: Sequence[Any], lifted: Sequence[Tensor], sizes: Sizes | None) -> list[Any]:
        """The program's kernels, by the plan of the device at hand."""
        tensors = [t for t in (*inputs, *lifted) if isinstance(t, Tensor)]
        device = tensors[0].device if tensors else device_of(self.trace)
        if device not in self.plans:  # a unit under a transform has no first call of its own
            self.prepare(self.binder(inputs) if sizes is None else sizes, device)
        if device in self.devices_without_plan:
            return self.fallback(inputs, lifted, sizes)
        return self.plans[device](tensors, self.binder(inputs) if sizes is None else sizes)

    def _add_plan(self, device: torch.device, sizes: Sizes) -> None:
        if device in self.plans or device in self.devices_without_plan:  # another thread was first
            return
        plan = or_fall_back(partial(self._plan, device, sizes), self.report)
        (self.devices_without_plan.add(device) if plan is None else self.plans.update({device: plan}))

    def _plan(self, device: torch.device, sizes: Sizes) -> KernelPlan:
        assert self.graph is not None
        with use_switch_state(self.switches):
            assumed = assumptions_of(self.trace.fakes, self.binder.sources)
            plan = KernelPlan(self.graph, self.name, self.backend, device, self.report, assumed=assumed)
            plan.cut(sizes)
        return plan


def may_differ_from_eager(trace: Trace) -> bool:
    """True where torch may add in another order than eager at some sizes: by matmuls that save memory."""
    return has_outer_product(trace) or calls_any(trace, PRODUCTS)


def through_torch(graph: Graph, binder: Binder) -> Run:
    """A program in place of the trace's own, operation by operation; it writes to no input."""

    def run(inputs: Sequence[Any], lifted: Sequence[Tensor], sizes: Sizes | None) -> list[Any]:
        tensors = [t for t in (*inputs, *lifted) if isinstance(t, Tensor)]
        bound = binder(inputs) if sizes is None else sizes
        pairs = list(zip(reference.run(graph, tensors, bound), graph.output_strides, strict=True))
        returned = [(r, numbers(s, bound)) for r, s in pairs if r is not None and s is not None]
        owned = iter(own_results([r for r, _ in returned], [s for _, s in returned], tensors))
        return [None if r is None or s is None else next(owned) for r, s in pairs]

    return run


def _contracted_where_it_helps(trace: Trace, name: str, binder: Binder, replay: Run) -> Run:
    """The lowered graph through torch, where a broadcast product would otherwise fill memory."""
    try:
        graph = graph_of(trace, name)
    except LoweringError:
        return replay
    helps = any(v.prim == "dot" for v in graph.order()) and not graph.mutations
    return _where_it_fills_memory(trace, binder, through_torch(graph, binder), replay) if helps else replay


def _where_it_fills_memory(trace: Trace, binder: Binder, contracted: Run, replay: Run) -> Run:
    """The captured operations, which have eager's bits, at sizes at which their results are small enough."""
    fills: dict[tuple[int, ...], bool] = {}

    def run(inputs: Sequence[Any], lifted: Sequence[Tensor], sizes: Sizes | None) -> list[Any]:
        bound = binder(inputs) if sizes is None else sizes
        key = sizes_key(bound)
        if key not in fills:
            if len(fills) >= RECORDS:
                fills.clear()
            fills[key] = fills_memory(trace, bound)
        return (contracted if fills[key] else replay)(inputs, lifted, bound)

    return run


def device_of(trace: Trace) -> torch.device:
    """The device of the first tensor among the arguments of a program, or of its results."""
    graph = trace.graph_module.graph
    (results,) = graph.find_nodes(op="output")[0].args
    nodes = [n for n in (*graph.find_nodes(op="placeholder"), *results) if isinstance(n, torch.fx.Node)]
    values = [n.meta.get("val") for n in nodes]
    return next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))


def fills_memory(trace: Trace, sizes: Sizes) -> bool:
    """True where the results of a trace's operations take more memory than the settings allow to compare with."""
    return intermediate_bytes(trace.graph_module, sizes) > settings().check_bytes


def has_outer_product(trace: Trace) -> bool:
    """A product larger than both its operands, somewhere in the graph: the only case in which `contract` can help."""
    for node in trace.graph_module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.name != "aten::mul":
            continue
        operands = [a.meta["val"] for a in node.args if isinstance(a, torch.fx.Node) and "val" in a.meta]
        operands = [v for v in operands if isinstance(v, Tensor)]
        if len(operands) == 2 and all(_hint(node.meta["val"].numel()) > _hint(v.numel()) for v in operands):
            return True
    return False


def _hint(size: Any) -> int:
    return int(hint_of(size) or 0)
