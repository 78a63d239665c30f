"""A captured graph at known sizes, written out: memory taken, kernels launched, operations called, nothing looked up.

The steps are the plan's own (`KernelPlan.walk`), taken with names of tensors, where every size, stride and grid is a
constant. What a plan decides from the tensors at hand the text has to decide as well; where it cannot, the plan itself
is called.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ...ir import Value
from ...ir.passes.place import Place
from ...ir.types import contiguous_strides
from ...tracer.dtypes import TO_TORCH
from ...tracer.torch_private import allocator
from ..execution.aten import reference
from ..execution.aten.concat_in_place import product_into
from ..execution.aten.step_by_step import StepByStep
from ..execution.bound_group import Allocation, BoundGroup, Launch, Scratch, memory_like
from ..execution.executable import Executable
from ..execution.group import GroupRunner
from ..execution.kernel_plan import KernelPlan
from ..execution.layouts import copy_if_shared, expected_layout, own_results, same_strides
from ..execution.slabs.slab_runner import SlabRunner
from ..execution.source_writer import SourceWriter, row
from ..values.sizes import BoundSizes, numbers

Tensor = torch.Tensor
Layout = tuple[tuple[int, ...], tuple[int, ...]]


def write_run(
    text: SourceWriter,
    executable: Executable,
    inputs: Sequence[tuple[str, Any]],
    lifted: Sequence[tuple[str, Tensor]],
    sizes: BoundSizes,
) -> list[str]:
    """The results of an executable that ran before at these sizes, as names. Inputs are (name, example)."""
    names, captured = row([n for n, _ in inputs]), row([n for n, _ in lifted])
    tensors = [(n, v) for n, v in (*inputs, *lifted) if isinstance(v, Tensor)]
    plan = _plan_at(executable, tensors[0][1].device, sizes) if tensors else None
    if plan is not None and is_straight(plan, [v for _, v in tensors], sizes):
        operations = AsText(text, plan.device, sizes, tensors)
        return [result or "None" for result in plan.walk(operations, [n for n, _ in tensors])]
    if tensors and executable.replays_at(sizes, tensors[0][1].device):
        replay = executable.replay_of([v for _, v in (*inputs, *lifted)])
        results = text.let("results", f"{text.constant(replay, 'replay')}({names}{captured})")
    else:
        run, at = text.constant(executable.run, "run"), text.constant(sizes, "sizes")
        results = text.let("results", f"{run}(({names}), ({captured}), {at})")
    return [f"{results}[{i}]" for i in range(_result_count(executable))]


def _plan_at(executable: Executable, device: torch.device, sizes: BoundSizes) -> KernelPlan | None:
    """The plan that runs at these sizes, if one did."""
    plan = executable.plans.get(device)
    return None if plan is None or plan.steps is None else plan.at(sizes)


def _result_count(executable: Executable) -> int:
    """The number of results, those that are skipped included."""
    if executable.graph is not None:
        return len(executable.graph.outputs)
    (results,) = executable.trace.graph_module.graph.find_nodes(op="output")[0].args
    return len(results)


def is_straight(plan: KernelPlan, tensors: Sequence[Tensor], sizes: BoundSizes) -> bool:
    """True where every group was launched at these sizes before, and the inputs are laid out as they were captured."""
    if plan.steps is None or not all(runner.is_launched(sizes.key) for runner in plan.runners.values()):
        return False
    pairs = zip(plan.graph.inputs, tensors, strict=True)
    return all(same_strides(t.shape, t.stride(), numbers(v.params["strides"], sizes)) for v, t in pairs)


class AsText:
    """The operations of a plan as lines of a text: values are names."""

    def __init__(
        self, text: SourceWriter, device: torch.device, sizes: BoundSizes, inputs: Sequence[tuple[str, Tensor]]
    ) -> None:
        self.text, self.device, self.sizes = text, device, sizes
        self.inputs = {name for name, _ in inputs}
        self.layouts: dict[str, Layout] = {n: (tuple(t.shape), t.stride()) for n, t in inputs}
        """Of the names whose layout is known: all but what an operation returned."""
        self.fresh: set[str] = set()  # memory that was taken here
        self.empty = text.constant(allocator(device), "empty")

    # ------------------------------------------------------------------ layouts and memory
    def lay_out(self, value: str, strides: Sequence[Any]) -> str:
        """A name whose layout is known is as it should be; what an operation returned is looked at in each call."""
        layout = numbers(strides, self.sizes)
        if self._has(value, layout):
            return value
        return f"{self.text.bind(_expected, layout, hint='laid_out')}({value})"

    def _has(self, name: str, strides: tuple[int, ...]) -> bool:
        """True where the value of this name is known to be laid out so."""
        return name in self.layouts and same_strides(*self.layouts[name], strides)

    def _allocated(self, hint: str, spec: Allocation) -> str:
        parts = zip(spec, ("shape", "strides", "dtype"), strict=True)
        name = self.text.let(hint, f"{self.empty}({', '.join(self.text.constant(*part) for part in parts)})")
        self.layouts[name] = spec[:2]
        return name

    def drop(self, values: list[str], living: Collection[str]) -> None:
        if own := set(values) - self.inputs - set(living):
            self.text.add(" = ".join(sorted(own)) + " = None")

    # ------------------------------------------------------------------ operations between kernels
    def call_node(self, value: Value, operands: list[str]) -> str:
        device = None if operands else self.device
        call = self.text.bind(_called, value, self.sizes, device, hint=value.prim)
        return self.text.let(value.prim, f"{call}({row(operands)})")

    def run_loop(self, loop: StepByStep[KernelPlan], operands: list[str]) -> str:
        call = self.text.bind(_looped, loop, self.sizes, hint="loop")
        return self.text.let("loop", f"{call}({row(operands)})")

    def pick(self, results: str, index: int) -> str:
        return f"{results}[{index}]"

    def allocate_concat(self, place: Place) -> str:
        concat = place.whole
        shape, strides = (numbers(n, self.sizes) for n in (concat.shape, contiguous_strides(concat.shape)))
        name = self._allocated("whole", (shape, strides, TO_TORCH[concat.dtype]))
        self.fresh.add(name)
        return name

    def product_into(self, value: Value, place: Place, room: str, operands: list[str]) -> str:
        call = self.text.bind(product_into, value, place, self.sizes, hint="product_into")
        return self.text.let(value.prim, f"{call}({row([room, *operands])})")

    # ------------------------------------------------------------------ kernels
    def run_group(self, runner: GroupRunner | SlabRunner, inputs: list[str]) -> list[str]:
        return self._walk(runner, inputs) if isinstance(runner, SlabRunner) else self._launches(runner, inputs)

    def _walk(self, runner: SlabRunner, inputs: list[str]) -> list[str]:
        """A call of the loop over slabs; what it returns is its own, laid out as the group says."""
        call = f"{self.text.constant(runner, 'slabs')}(({row(inputs)}), {self.text.constant(self.sizes, 'at')})"
        results = self.text.let("results", call)
        names = [self.text.let("out", f"{results}[{i}]") for i in range(len(runner.group.outputs))]
        self.text.add(f"{results} = None")
        self.layouts |= {name: spec for name, spec in zip(names, runner.layouts(self.sizes), strict=True)}
        self.fresh.update(names)
        return names

    def _launches(self, runner: GroupRunner, inputs: list[str]) -> list[str]:
        bound, first = runner.bound[self.sizes.key], len(self.text.lines)
        taken = dict([pair] if (pair := runner.memory_taken(bound)) else [])
        with self.text.block("try:"):
            outputs = [self._room(inputs, taken.get(i), spec) for i, spec in enumerate(bound.outputs)]
            temporaries = [self._allocated("temp", spec) for spec in bound.temporaries]
            memory = {"input": inputs, "output": outputs, "temporary": temporaries}
            for launch in bound.launches:
                self._launch(bound, launch, memory)
            self.text.add("pass")
        _write_recovery(self.text, runner, self.sizes, inputs, outputs, self.text.assigned_names(first))
        self.fresh.update(outputs)
        return outputs

    def _room(self, inputs: list[str], taken: int | None, spec: Allocation) -> str:
        """Memory for a result: its own, or that of an input."""
        if taken is None:
            return self._allocated("out", spec)
        like, wanted = self.text.constant(memory_like, "memory_like"), self.text.constant(spec, "wanted")
        out = self.text.let("out", f"{like}({inputs[taken]}, {wanted}, {self.text.constant(self.device, 'device')})")
        self.layouts[out] = spec[:2]
        return out

    def _launch(self, bound: BoundGroup, launch: Launch, memory: dict[str, list[str]]) -> None:
        if not launch.grid:
            return
        memory = {**memory, "scratch": [self._scratch(bound, launch, i, spec) for i, spec in enumerate(launch.scratch)]}
        arguments = [
            self.text.constant(value, "number") if kind == "number" else memory[kind][value]
            for kind, value in launch.arguments
        ]
        run, grid = self.text.constant(launch.run, launch.kernel.name), self.text.constant(launch.grid, "grid")
        self.text.add(f"{run}(({row(arguments)}), {grid})")

    def _scratch(self, bound: BoundGroup, launch: Launch, index: int, spec: Scratch) -> str:
        """Room for partial results, or counters that every launch leaves at zero: always the same, one per stream."""
        shape, dtype, zeroed = spec
        if not zeroed:
            return self._allocated("space", (shape, contiguous_strides(shape), dtype))
        if self.device.type != "cuda":
            return self.text.constant(bound.scratch(launch.kernel, index, spec), "counters")
        find = self.text.bind(bound.scratch, launch.kernel, index, spec, hint="find_counters")
        return self.text.let("counters", f"{find}()")

    # ------------------------------------------------------------------ results
    def own_results(self, results: list[str], strides: Sequence[Sequence[Any]], inputs: Sequence[str]) -> list[str]:
        """Memory that was allocated here is the result's own; the rest is looked at in each call."""
        layouts = [numbers(s, self.sizes) for s in strides]
        distinct = len(set(results)) == len(results) and self.fresh.issuperset(results)
        if distinct and all(map(self._has, results, layouts)):
            return results
        call, expected = self.text.constant(own_results, "own_results"), self.text.constant(layouts, "layouts")
        owned = self.text.let("results", f"{call}(({row(results)}), {expected}, ({row(inputs)}))")
        return [f"{owned}[{i}]" for i in range(len(results))]

    def copy_if_shared(self, value: str, inputs: Sequence[str]) -> str:
        if value in self.fresh:
            return value
        return self.text.let("apart", f"{self.text.constant(copy_if_shared, 'apart_from')}({value}, ({row(inputs)}))")

    def write(self, target: str, value: str) -> None:
        self.text.add(f"{target}.copy_({value})")


def _write_recovery(
    text: SourceWriter, runner: GroupRunner, sizes: BoundSizes,
    inputs: list[str], outputs: list[str], allocated: list[str],
) -> None:  # fmt: skip
    """Kernels that were refused, or found no memory: what they took is given back, and the group runs otherwise."""
    with text.block("except Exception as error:"):
        if allocated:
            text.add(" = ".join(allocated) + " = None")
        recover = text.bind(_recovered, runner, sizes, hint="recover")
        results = f"{recover}(error, ({row(inputs)}))"
        text.add(f"{row(outputs)}= {results}" if outputs else results)


def _expected(strides: tuple[int, ...], tensor: Tensor) -> Tensor:
    return expected_layout(tensor, strides)


def _called(value: Value, sizes: BoundSizes, device: torch.device | None, *operands: Any) -> Any:
    return reference.call_node(value, operands, sizes, device)


def _looped(loop: StepByStep[KernelPlan], sizes: BoundSizes, *operands: Tensor) -> Any:
    return loop(operands, sizes)


def _recovered(runner: GroupRunner, sizes: BoundSizes, error: Exception, inputs: Sequence[Tensor]) -> list[Tensor]:
    return runner.recover(error, inputs, sizes, sizes.key)
