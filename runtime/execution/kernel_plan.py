"""A lowered graph as a plan: its steps, the kernels of each fused group, and when memory is let go.

What a plan does is said once, by `KernelPlan.walk`, over values of any kind. A call walks it with tensors (`OnTensors`,
below); `fast_path/plan_codegen.py` walks it with the names of tensors, and has the same steps as a text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import sympy
import torch

from ...codegen import Kernels, Target
from ...ir import Graph, Value
from ...ir.errors import InternalError
from ...ir.passes.fuse import Extern, Group, Step, View
from ...ir.passes.place import Place, Places, made_by
from ...ir.passes.streaming.slabs import Slabs
from ...ir.switches import slab_bytes, switch_state, use_switch_state
from ...ir.text.text import symbols_of
from ...ir.types import Size
from ...tracer.capture.capture import capture_lock
from ...tracer.opaque.opaque import opaque_of
from ..settings.config import KERNEL_BACKENDS
from ..values.sizes import Sizes, number, numbers, sizes_key
from . import targets
from .aten import reference
from .aten.concat_in_place import product_into, room_for
from .aten.step_by_step import STEP_BY_STEP, StepByStep, loops_among
from .graph_to_kernels import ProductsBy, Slabbing, generate
from .group import GroupRunner
from .layouts import copy_if_shared, expected_layout, own_results
from .slabs.destination import Destinations, product_at
from .slabs.slab_runner import SlabRunner

Tensor = torch.Tensor
V = TypeVar("V")


class Operations(Protocol[V]):
    """The operations that a plan's steps consist of, on values of one kind: tensors, or names of tensors in a text."""

    def lay_out(self, value: V, strides: Sequence[Any]) -> V:
        """The value in a layout, copied where it has another one."""

    def run_group(self, runner: GroupRunner | SlabRunner, inputs: list[V]) -> Sequence[V]:
        """The outputs of a fused group, or of a region in slabs."""

    def call_node(self, value: Value, operands: list[V]) -> V:
        """The result of one operation, or its list of results."""

    def run_loop(self, loop: StepByStep[KernelPlan], operands: list[V]) -> V:
        """The result of a loop, or its list of results."""

    def pick(self, results: V, index: int) -> V:
        """One of several results."""

    def allocate_concat(self, place: Place) -> V:
        """Memory for a concatenation whose parts are computed into it."""

    def product_into(self, value: Value, place: Place, room: V, operands: list[V]) -> V:
        """A product of two matrices, computed where it belongs."""

    def drop(self, values: list[V], living: Collection[V]) -> None:
        """Let go of values that no step reads any more."""

    def own_results(self, results: list[V], strides: Sequence[Sequence[Any]], inputs: Sequence[V]) -> Sequence[V]:
        """Results with memory of their own, in the layouts that eager gives them."""

    def copy_if_shared(self, value: V, inputs: Sequence[V]) -> V:
        """The value, unharmed by what is written to the inputs."""

    def write(self, target: V, value: V) -> None:
        """Write a value to an input."""


class KernelPlan:
    """A lowered graph on a GPU or under the interpreter. It is cut into steps at the first call, for its sizes."""

    def __init__(
        self,
        graph: Graph,
        name: str,
        backend: str,
        device: torch.device,
        report: Callable[[str], None] = lambda why: None,
        products: ProductsBy | None = None,
        assumed: Sequence[sympy.Basic] = (),
        slabs: Slabbing = "walk",
    ) -> None:
        """products: who decides about them; slabs: whether regions of them may be walked in slabs."""
        self.graph, self.name, self.backend, self.device, self.report = graph, name, backend, device, report
        self.assumed = tuple(assumed)
        self.products: ProductsBy = products or _who_decides(backend)
        self.slabs: Slabbing = slabs
        self.switches, self.limit = switch_state(), slab_bytes()
        self.target = targets.target_for(backend, device)
        pairs = zip(graph.outputs, graph.output_strides, strict=True)
        self.returned = [(v, s) for v, s in pairs if v is not None and s is not None]
        self.steps: list[Step] | None = None
        self.loops: dict[int, StepByStep[KernelPlan]] = {}
        self.runners: dict[int, GroupRunner | SlabRunner] = {}
        self.held: tuple[Size, ...] = ()
        self.larger: KernelPlan | None = None
        self.last_use: dict[int, list[int]] = {}
        self.places = Places()

    def __call__(self, inputs: Sequence[Tensor], sizes: Sizes) -> list[Tensor | None]:
        if self.steps is None:
            self.cut(sizes)
        plan = self.at(sizes) if self.held else self
        return plan.walk(OnTensors(sizes, plan.device), inputs)

    def run_into(self, inputs: Sequence[Tensor], sizes: Sizes, into: Destinations) -> list[Tensor | None]:
        """The same, results computed where they belong if they can be."""
        if self.steps is None:
            self.cut(sizes)
        return self.walk(OnSlab(sizes, self.device, into), inputs)

    def at(self, sizes: Sizes) -> KernelPlan:
        """The plan at these sizes: another one where what fitted into the memory of a slab does not any more."""
        known = [n for n in self.held if symbols_of(n) <= sizes.keys()]  # not what opaque nodes are yet to bring
        if all(number(size, sizes) <= self.limit for size in known):
            return self
        if self.larger is None:
            with capture_lock, use_switch_state(self.switches):
                self.larger = self.larger or self._cut_anew(sizes)
        return self.larger.at(sizes)

    def group_runners(self) -> Iterator[GroupRunner]:
        """The runners of its groups, those within slabs and the bodies of loops among them."""
        for loop in self.loops.values():
            yield from loop.plan.group_runners()
        for runner in self.runners.values():
            if isinstance(runner, GroupRunner):
                yield runner
            elif isinstance(runner.plan, KernelPlan):
                yield from runner.plan.group_runners()

    @property
    def walks_slabs(self) -> bool:
        """Whether a region of it is walked in slabs."""
        return any(isinstance(r, SlabRunner) for r in self.runners.values())

    def _cut_anew(self, sizes: Sizes) -> KernelPlan:
        plan = KernelPlan(
            self.graph, self.name, self.backend, self.device, self.report, self.products, self.assumed, self.slabs
        )
        plan.cut(sizes)
        return plan

    def cut(self, sizes: Sizes) -> list[Step]:
        """The steps, with the kernels of each group generated for these sizes."""
        with capture_lock, use_switch_state(self.switches):
            if self.steps is not None:  # another thread was first
                return self.steps
            sizes = {**self._hints(), **sizes}
            generated = generate(self.graph, self.target, sizes, self.name, self.products, self.slabs)
            for reason in generated.reasons:
                self.report(f"an operation runs between the kernels: {reason}")
            for at, step in enumerate(generated.steps):
                if at in generated.slabs:
                    self.runners[at] = self.slab_runner(generated.slabs[at], generated.names[at])
                elif isinstance(step, Group):
                    self.runners[at] = self._runner(step, generated.names[at], generated.kernels.get(at), sizes)
            for at, value in loops_among(generated.steps):
                self.report(STEP_BY_STEP)
                self.loops[at] = self.loop_at(value, self._plan_of_body(value, at))
            for at, (result, product) in generated.over.items():
                self.runners[at].overwrites = (result, product)
            self.held = tuple(generated.held)
            self.last_use = last_uses(generated.steps)
            self.places = generated.places
            self.steps = generated.steps
        return generated.steps

    def loop_at(self, value: Value, plan: KernelPlan) -> StepByStep[KernelPlan]:
        """The loop, to be run by the plan of its body."""
        return StepByStep(value, plan, self.device)

    def _plan_of_body(self, value: Value, at: int) -> KernelPlan:
        body = value.params["body"].graph.copy()
        name = f"{self.name}_step{at}"
        return KernelPlan(body, name, self.backend, self.device, self.report, self.products, self.assumed)

    def _hints(self) -> dict[sympy.Symbol, int]:
        """The sizes that opaque nodes returned when the graph was captured."""
        return {s: n for v in self.graph if (node := opaque_of(v)) is not None for s, n in node.hints.items()}

    def _runner(self, group: Group, name: str, kernels: Kernels | None, sizes: Sizes) -> GroupRunner:
        """A group with its kernels; None: it runs operation by operation."""
        runner = runner_of(group, name, self.backend, self.target, self.device, self.report, self.assumed)
        if kernels is None:
            runner.one_by_one = True
        else:
            runner.variants.add(kernels, sizes)
        return runner

    def slab_runner(self, slabs: Slabs, name: str) -> SlabRunner:
        """The runner of a region that is walked in slabs."""
        by: ProductsBy = "torch" if self.products == "torch" else "library"
        place = (f"{name}_slab", self.backend, self.device, self.report)
        make = partial(KernelPlan, slabs.group.graph, *place, by, self.assumed, slabs="inside")
        return SlabRunner(slabs, name, self.limit, make)

    # ------------------------------------------------------------------ the steps, over values of any kind
    def walk(self, operations: Operations[V], inputs: Sequence[V]) -> list[V | None]:
        """Take all steps; the results, None where one is skipped."""
        memory = {
            value.id: operations.lay_out(operand, value.params["strides"])
            for value, operand in zip(self.graph.inputs, inputs, strict=True)
        }
        for at, step in enumerate(self.steps or ()):
            self.take_step(step, at, operations, memory)
            if at in self.last_use:
                last = [memory.pop(dead) for dead in self.last_use[at] if dead in memory]
                operations.drop(last, memory.values())
                del last
        outputs = self._outputs(operations, memory, inputs)
        if self.graph.mutations:
            self._write_back(operations, memory, inputs)
        return outputs

    def take_step(self, step: Step, at: int, operations: Operations[V], memory: dict[int, V]) -> None:
        """Take one step: its results join what is in memory, by the id of their values."""
        match step:
            case Group():
                pairs = zip(step.inputs, step.graph.inputs, strict=True)
                results = operations.run_group(
                    self.runners[at], [_group_input(operations, memory, value, own) for value, own in pairs]
                )
                memory.update({v.id: result for v, result in zip(step.outputs, results, strict=True)})
            case Extern(value=value) if (place := self.places.get(value.id)) is not None:
                room = _room_id(place)
                if room not in memory:  # the first part takes the memory of the whole
                    memory[room] = operations.allocate_concat(place)
                operands = [_value(operations, memory, a) for a in value.args]
                memory[value.id] = operations.product_into(value, place, memory[room], operands)
            case View(value=value) if _is_filled(self.places, value):
                memory[value.id] = memory.pop(_room_id(self.places[made_by(value.args[0]).id]))
            case Extern(value=value) if at in self.loops:
                operands = [_value(operations, memory, a) for a in value.args]
                memory[value.id] = operations.run_loop(self.loops[at], operands)
            case Extern(value=value) | View(value=value):
                memory[value.id] = operations.call_node(value, [_value(operations, memory, a) for a in value.args])

    def _outputs(self, operations: Operations[V], memory: dict[int, V], inputs: Sequence[V]) -> list[V | None]:
        graph = self.graph
        results, strides = [_value(operations, memory, v) for v, _ in self.returned], [s for _, s in self.returned]
        owned = operations.own_results(results, strides, inputs)
        if len(owned) == len(graph.outputs):  # none is skipped
            return list(owned)
        supply, pairs = iter(owned), zip(graph.outputs, graph.output_strides, strict=True)
        return [None if v is None or s is None else next(supply) for v, s in pairs]

    def _write_back(self, operations: Operations[V], memory: dict[int, V], inputs: Sequence[V]) -> None:
        """Values that forward wrote to its arguments; all are known before the first is written."""
        values = {i: _value(operations, memory, v) for i, v in self.graph.mutations.items()}
        unharmed = {i: operations.copy_if_shared(v, inputs) for i, v in values.items()}
        for index, value in unharmed.items():
            operations.write(inputs[index], value)


def _who_decides(backend: str) -> ProductsBy:
    if backend not in KERNEL_BACKENDS:
        return "torch"
    return "clock" if targets.is_tuned(backend) else "model"


def runner_of(
    group: Group, name: str, backend: str, target: Target, device: torch.device,
    report: Callable[[str], None], assumed: Sequence[sympy.Basic] = (),
) -> GroupRunner:  # fmt: skip
    """The runner of a group, without kernels yet."""
    library = partial(KernelPlan, group.graph, f"{name}_apart", backend, device, report, "library", tuple(assumed))
    return GroupRunner(group, name, backend, target, device, report, assumed, library)


def _value(operations: Operations[V], memory: Mapping[int, V], value: Value) -> V:
    if value.id in memory:
        return memory[value.id]
    if value.prim == "pick":
        return operations.pick(_value(operations, memory, value.args[0]), value.params["index"])
    raise InternalError(f"no step computes {value!r} = {value.prim}")


def _group_input(operations: Operations[V], memory: Mapping[int, V], value: Value, own: Value) -> V:
    """The value that a kernel reads as its input `own`: graph inputs are laid out already, others are here."""
    operand = _value(operations, memory, value)
    return operand if value.prim == "input" else operations.lay_out(operand, own.params["strides"])


def _room_id(place: Place) -> int:
    """Under which number the memory of a concatenation is known while its parts are computed."""
    return -1 - place.whole.id


def _is_filled(places: Places, value: Value) -> bool:
    """True for a concatenation whose parts were written where they belong."""
    place = places.get(made_by(value.args[0]).id) if value.prim == "cat" else None
    return place is not None and place.whole == value


def is_opaque(step: Step) -> bool:
    """True for a step that runs the user's own body of a nested call."""
    return isinstance(step, Extern) and opaque_of(step.value) is not None


# ------------------------------------------------------------------ values that are tensors
class OnTensors:
    """The operations of a call: on tensors, at its sizes."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device

    def lay_out(self, value: Tensor, strides: Sequence[Any]) -> Tensor:
        return expected_layout(value, numbers(strides, self.sizes))

    def run_group(self, runner: GroupRunner | SlabRunner, inputs: list[Tensor]) -> list[Tensor]:
        return runner(inputs, self.sizes, sizes_key(self.sizes))

    def call_node(self, value: Value, operands: list[Tensor]) -> Any:
        return reference.call_node(value, operands, self.sizes, None if operands else self.device)

    def run_loop(self, loop: StepByStep[KernelPlan], operands: list[Tensor]) -> Any:
        return loop(operands, self.sizes)

    def pick(self, results: Any, index: int) -> Any:
        return results[index]

    def allocate_concat(self, place: Place) -> Tensor:
        return room_for(place, self.sizes, self.device)

    def product_into(self, value: Value, place: Place, room: Tensor, operands: list[Tensor]) -> Tensor:
        return product_into(value, place, self.sizes, room, *operands)

    def drop(self, values: list[Tensor], living: Collection[Tensor]) -> None:
        """Nothing to do: `memory` held them, and does not any more."""

    def own_results(
        self, results: list[Tensor], strides: Sequence[Sequence[Any]], inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        return own_results(results, [numbers(s, self.sizes) for s in strides], inputs)

    def copy_if_shared(self, value: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        return copy_if_shared(value, inputs)

    def write(self, target: Tensor, value: Tensor) -> None:
        target.copy_(value)


class OnSlab(OnTensors):
    """The same for a slab of a region, whose results have a place."""

    def __init__(self, sizes: Sizes, device: torch.device, into: Destinations) -> None:
        super().__init__(sizes, device)
        self.into = into

    def run_group(self, runner: GroupRunner | SlabRunner, inputs: list[Tensor]) -> list[Tensor]:
        assert isinstance(runner, GroupRunner)
        places = [self.into.get(v.id) for v in runner.group.outputs]
        into = [None if p is None or p.adds else p.tensor for p in places]
        return runner(inputs, self.sizes, sizes_key(self.sizes), into)

    def call_node(self, value: Value, operands: list[Tensor]) -> Any:
        made = product_at(value, self.into, operands)
        return super().call_node(value, operands) if made is None else made

    def own_results(
        self, results: list[Tensor], strides: Sequence[Sequence[Any]], inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """They are taken from here at once."""
        return results


# ------------------------------------------------------------------ lifetimes
def last_uses(steps: Sequence[Step]) -> dict[int, list[int]]:
    """The values that nothing reads after each step: their memory is free for what comes next. Results stay."""
    last: dict[int, int] = {}
    for at, step in enumerate(steps):
        for value in step.inputs if isinstance(step, Group) else step.value.args:
            last[_source(value).id] = at
    results = _results(steps)
    freed: dict[int, list[int]] = {}
    for value_id, at in last.items():
        if value_id not in results:
            freed.setdefault(at, []).append(value_id)
    return freed


def _results(steps: Sequence[Step]) -> set[int]:
    """The values that the graph of these steps returns or writes to inputs."""
    values = ((*s.inputs, *s.outputs) if isinstance(s, Group) else (s.value,) for s in steps)
    graphs = (value.graph for several in values for value in several)
    graph = next(graphs, None)
    return set() if graph is None else {_source(value).id for value in graph.results}


def _source(value: Value) -> Value:
    """The value that a step computes, of which this may be one of several results."""
    while value.prim == "pick":
        value = value.args[0]
    return value
