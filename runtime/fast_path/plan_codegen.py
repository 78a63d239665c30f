"""A captured graph at known sizes, written out: memory taken, kernels launched, operations called, nothing looked up.

The same steps that `KernelPlan` takes, in its order, with every size, stride and grid a constant. What such a plan
decides from the tensors at hand it has to decide in the text as well; where it cannot, the plan itself is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ...ir import Value
from ...ir.passes.fuse import Group
from ...ir.passes.place import Place
from ...ir.types import contiguous_strides
from ...tracer.dtypes import TO_TORCH
from ...tracer.torch_private import allocator, memory_of
from ..execution.aten import reference
from ..execution.aten.concat_in_place import product_into
from ..execution.executable import (
    BoundSizes,
    Executable,
    GroupRunner,
    KernelPlan,
    expected_layout,
    is_filled,
    numbers,
    own_memory,
    same_strides,
)
from .source_writer import Straight, row

Tensor = torch.Tensor


def write_run(
    text: Straight,
    executable: Executable,
    inputs: Sequence[tuple[str, Any]],
    lifted: Sequence[tuple[str, Tensor]],
    sizes: BoundSizes,
) -> list[str]:
    """The results of an executable that ran before at these sizes, as names. Inputs are (name, example)."""
    names, captured = row([n for n, _ in inputs]), row([n for n, _ in lifted])
    device = next((v.device for _, v in (*inputs, *lifted) if isinstance(v, Tensor)), None)
    plan = executable.plans.get(device) if device is not None else None
    if plan is not None and (written := _Steps(text, plan, sizes).write([*inputs, *lifted])) is not None:
        return written
    if executable.replays:
        replay = executable.replay_of([v for _, v in (*inputs, *lifted)])
        results = text.let("results", f"{text.constant(replay, 'replay')}({names}{captured})")
    else:
        run, at = text.constant(executable.run, "run"), text.constant(sizes, "sizes")
        results = text.let("results", f"{run}(({names}), ({captured}), {at})")
    return [f"{results}[{i}]" for i in range(executable.results)]


class _Steps:
    """Writes the steps of one plan."""

    def __init__(self, text: Straight, plan: KernelPlan, sizes: BoundSizes) -> None:
        self.text, self.plan, self.sizes = text, plan, sizes
        self.memory: dict[int, str] = {}
        self.layouts: dict[str, Layout] = {}  # of the names whose layout is known: all but what an operation returned
        self.given: set[str] = set()
        self.fresh: set[str] = set()
        self.rooms: dict[int, str] = {}  # of concatenations whose parts are written in place
        self.empty = text.constant(allocator(plan.device), "empty")

    def write(self, inputs: Sequence[tuple[str, Any]]) -> list[str] | None:
        """The names of the results; None where the plan has to be called."""
        tensors = [(n, v) for n, v in inputs if isinstance(v, Tensor)]
        if self.plan.steps is None or not self._ready():
            return None
        self.given = {n for n, _ in tensors}
        for value, (name, tensor) in zip(self.plan.graph.inputs, tensors, strict=True):
            self.memory[value.id], self.layouts[name] = name, (tuple(tensor.shape), tensor.stride())
            if not self._has(name, value.params["strides"]):
                return None
        for at, step in enumerate(self.plan.steps):
            self._step(at, step)
        results = self._outputs([n for n, _ in tensors])
        self._write_back([n for n, _ in tensors])
        return results

    def _write_back(self, inputs: Sequence[str]) -> None:
        """What is written to arguments, all of it known before the first is."""
        values = {i: self._of(v) for i, v in self.plan.graph.mutations.items()}
        for i, name in values.items():
            if name not in self.fresh:
                values[i] = self.text.let("apart", f"{self.text.constant(_apart, 'apart')}({name}, ({row(inputs)}))")
        for i, name in values.items():
            self.text.add(f"{inputs[i]}.copy_({name})")

    def _ready(self) -> bool:
        """Whether every group was launched at these sizes before."""
        return all(runner.is_launched(self.sizes.key) for runner in self.plan.runners.values())

    def _has(self, name: str, strides: Any) -> bool:
        """Whether what has this name is known to be laid out so."""
        return name in self.layouts and same_strides(*self.layouts[name], numbers(strides, self.sizes))

    def _step(self, at: int, step: Any) -> None:
        if isinstance(step, Group):
            self._group(step, self.plan.runners[at])
        elif (place := self.plan.places.get(step.value.id)) is not None:
            self._part(step.value, place)
        elif is_filled(self.plan.places, step.value):
            self.memory[step.value.id] = self.rooms[step.value.id]
            self.fresh.add(self.rooms[step.value.id])
        else:
            value = step.value
            call = self.text.constant(partial(_called, value, self.sizes), value.prim)
            self.memory[value.id] = self.text.let(value.prim, f"{call}({row([self._of(a) for a in value.args])})")
        dead = [self.memory.pop(v) for v in self.plan.last_use.get(at, ()) if v in self.memory]
        if own := set(dead) - self.given - set(self.memory.values()):
            self.text.add(" = ".join(sorted(own)) + " = None")

    def _part(self, value: Value, place: Place) -> None:
        """A product that goes into its slice of a concatenation."""
        whole, strides = place.whole, contiguous_strides(place.whole.shape)
        if whole.id not in self.rooms:
            spec = numbers(whole.shape, self.sizes), numbers(strides, self.sizes), TO_TORCH[whole.dtype]
            self.rooms[whole.id] = self._memory("whole", spec)
        call = self.text.constant(partial(product_into, value, place, self.sizes), "product_into")
        operands = row([self.rooms[whole.id], *(self._of(a) for a in value.args)])
        self.memory[value.id] = self.text.let(value.prim, f"{call}({operands})")

    def _of(self, value: Value) -> str:
        """The name of a value, or of its place among several results."""
        if value.id in self.memory or value.prim != "pick":
            return self.memory[value.id]
        return f"{self._of(value.args[0])}[{value.params['index']}]"

    def _group(self, step: Group, runner: GroupRunner) -> None:
        ready = runner.prepared[self.sizes.key]
        inputs = [self._fitting(v, own) for v, own in zip(step.inputs, step.graph.inputs, strict=True)]
        first = len(self.text.lines)
        with self.text.block("try:"):
            outputs = [self._memory("out", spec) for spec in ready.outputs]
            temporaries = [self._memory("temp", spec) for spec in ready.temporaries]
            memory = {"input": inputs, "output": outputs, "temporary": temporaries}
            for launch in ready.launches:
                self._launch(runner, launch, memory)
            self.text.add("pass")
        self._recovered(runner, inputs, outputs, self.text.assigned(first))
        self.memory.update({v.id: name for v, name in zip(step.outputs, outputs, strict=True)})
        self.fresh.update(outputs)

    def _recovered(
        self, runner: GroupRunner, inputs: Sequence[str], outputs: Sequence[str], taken: Sequence[str]
    ) -> None:
        """Kernels that were refused, or found no memory: what they took is given back, and the group runs otherwise."""
        recovered = partial(_recover, runner, self.sizes)
        with self.text.block("except Exception as error:"):
            if taken:
                self.text.add(" = ".join(taken) + " = None")
            results = f"{self.text.constant(recovered, 'recovered')}(error, ({row(inputs)}))"
            self.text.add(f"{row(outputs)}= {results}" if outputs else results)

    def _fitting(self, value: Value, own: Value) -> str:
        """A kernel's input in the layout that it was generated for: what an operation returned is looked at."""
        name = self._of(value)
        if value.prim == "input" or self._has(name, own.params["strides"]):
            return name
        return f"{self.text.constant(partial(_fitted, own, self.sizes), 'fitted')}({name})"

    def _memory(self, hint: str, spec: tuple[Any, Any, torch.dtype]) -> str:
        parts = zip(spec, ("shape", "strides", "dtype"), strict=True)
        name = self.text.let(hint, f"{self.empty}({', '.join(self.text.constant(*part) for part in parts)})")
        self.layouts[name] = spec[:2]
        return name

    def _launch(self, runner: GroupRunner, launch: Any, memory: dict[str, list[str]]) -> None:
        kernel, run, arguments, grid, scratch = launch
        if not grid:
            return
        memory = {**memory, "scratch": [self._scratch(runner, kernel, i, spec) for i, spec in enumerate(scratch)]}
        given = [self.text.constant(v, "number") if kind == "number" else memory[kind][v] for kind, v in arguments]
        self.text.add(f"{self.text.constant(run, kernel.name)}(({row(given)}), {self.text.constant(grid, 'grid')})")

    def _scratch(self, runner: GroupRunner, kernel: Any, index: int, spec: Any) -> str:
        """Room for partial results, or counters that every launch leaves at zero: always the same, one per stream."""
        shape, dtype, zeroed = spec
        if not zeroed:
            return self._memory("space", (shape, contiguous_strides(shape), dtype))
        if self.plan.device.type != "cuda":
            return self.text.constant(runner.scratch(kernel, index, spec), "counters")
        find = self.text.constant(partial(runner.scratch, kernel, index, spec), "find_counters")
        return self.text.let("counters", f"{find}()")

    def _outputs(self, inputs: Sequence[str]) -> list[str]:
        pairs = list(zip(self.plan.graph.outputs, self.plan.graph.output_strides, strict=True))
        kept = [(self._of(v), s) for v, s in pairs if v is not None and s is not None]
        names = [name for name, _ in kept]
        if len(set(names)) < len(names) or not self.fresh.issuperset(names) or not all(self._has(*k) for k in kept):
            owned = self.text.constant(partial(_owned, [numbers(s, self.sizes) for _, s in kept]), "owned")
            results = self.text.let("results", f"{owned}(({row(names)}), ({row(inputs)}))")
            names = [f"{results}[{i}]" for i in range(len(kept))]
        supply = iter(names)
        return ["None" if v is None or s is None else next(supply) for v, s in pairs]


Layout = tuple[tuple[int, ...], tuple[int, ...]]


def _called(value: Value, sizes: BoundSizes, *operands: Any) -> Any:
    return reference.call_node(value, operands, sizes)


def _recover(runner: GroupRunner, sizes: BoundSizes, error: Exception, inputs: Sequence[Tensor]) -> list[Tensor]:
    return runner.recovered(error, inputs, sizes, sizes.key)


def _fitted(own: Value, sizes: BoundSizes, tensor: Tensor) -> Tensor:
    return expected_layout(tensor, own, sizes)


def _apart(value: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """A value that writing to the inputs does not change."""
    return value.clone() if memory_of(value) in {memory_of(t) for t in inputs} else value


def _owned(strides: Sequence[tuple[int, ...]], results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results with memory of their own, as `KernelPlan` hands them out."""
    taken, owned = {memory_of(t) for t in inputs}, list[Tensor]()
    for result, layout in zip(results, strides, strict=True):
        owned.append(own_memory(result, layout, taken))
        taken.add(memory_of(owned[-1]))
    return owned
