"""A traced graph by torch alone, where its products would fill memory: those in slabs, the rest as it is lowered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ....ir.errors import LoweringError
from ....ir.switches import slab_bytes, switch_state, use_switch_state
from ....tracer.capture.capture import capture_lock
from ....tracer.torch_private import dispatch_modes, function_modes, is_batched, transforms_active
from ....tracer.trace import Trace
from ...settings.internal_errors import or_fall_back
from ...values.sizes import Binder, Sizes, sizes_key
from ..graph_to_kernels import graph_of
from ..intermediates import intermediate_bytes
from ..kernel_plan import KernelPlan

Tensor = torch.Tensor
Run = Callable[[Sequence[Any], Sequence[Tensor], "Sizes | None"], list[Any]]
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
MOST = 64
"""Sizes of which it is remembered what runs."""


class InSlabs:
    """Runs a trace at sizes at which all of its results together fit into the memory of a slab `otherwise`."""

    def __init__(self, trace: Trace, name: str, binder: Binder, otherwise: Run, report: Callable[[str], None]) -> None:
        self.trace, self.name, self.binder, self.otherwise, self.report = trace, name, binder, otherwise, report
        self.limit, self.switches = slab_bytes(), switch_state()
        self.graph_plans: dict[torch.device, KernelPlan | None] = {}
        self.plans: dict[Any, KernelPlan | None] = {}

    def __call__(self, inputs: Sequence[Any], lifted: Sequence[Tensor], sizes: Sizes | None) -> list[Any]:
        values = (*inputs, *lifted)
        if not is_plain_call(values):
            return self.otherwise(inputs, lifted, sizes)
        bound = self.binder(inputs) if sizes is None else sizes
        tensors = [t for t in values if isinstance(t, Tensor)]
        plan = self.plan_at(tensors[0].device, bound) if tensors else None
        return self.otherwise(inputs, lifted, bound) if plan is None else plan(tensors, bound)

    def plan_at(self, device: torch.device, sizes: Sizes) -> KernelPlan | None:
        """The plan at these sizes; None where none of it is in slabs."""
        key = (device, sizes_key(sizes))
        if key not in self.plans:
            with capture_lock, use_switch_state(self.switches):
                if len(self.plans) >= MOST:
                    self.plans.clear()
                self.plans[key] = self._newly_at(device, sizes)
        return self.plans[key]

    def _newly_at(self, device: torch.device, sizes: Sizes) -> KernelPlan | None:
        if intermediate_bytes(self.trace.graph_module, sizes) <= self.limit:
            return None
        if device not in self.graph_plans:
            self.graph_plans[device] = or_fall_back(partial(self._made, device, sizes), self.report)
        made = self.graph_plans[device]
        plan = None if made is None else made.at(sizes)
        return plan if plan is not None and plan.walks_slabs else None

    def _made(self, device: torch.device, sizes: Sizes) -> KernelPlan | None:
        try:
            plan = KernelPlan(graph_of(self.trace, self.name), self.name, "reference", device, self.report)
        except LoweringError:
            return None
        plan.cut(sizes)
        return plan


def calls_any(trace: Trace, operations: Sequence[str]) -> bool:
    """True where a graph calls one of these operations."""
    schemas = (getattr(node.target, "_schema", None) for node in trace.graph_module.graph.nodes)
    return any(schema is not None and schema.name in operations for schema in schemas)


def is_plain_call(values: Sequence[Any]) -> bool:
    """True where values are plain memory: no transform, mode or recording stands before them."""
    if transforms_active() or dispatch_modes() or function_modes():
        return False
    tensors = [v for v in values if isinstance(v, Tensor)]
    followed = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return not followed and not any(map(is_batched, tensors))
