"""Finding the place within a wrong step: the rule, operation, primitive or group, its source line, its values.

Both sides of the step are computed again, value by value, from what ran: the first value that differs is the place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode

from ...ir import Graph, Value
from ...ir.passes.fuse import Group
from ...ir.passes.simplify import family_of
from ...ir.rewrite import Applied, extract, name_of
from ..capture.captured_backward import BackwardEntry
from ..capture.user_methods import run_user_backward, run_user_forward
from ..check.compare import Difference, Tolerance, difference
from ..check.subject import Subject
from ..execution.aten import reference
from ..execution.aten.unboxed_ops import bind_operations
from ..execution.executable import Executable
from ..execution.group import GroupRunner
from ..execution.kernel_plan import KernelPlan, OnTensors, runner_of
from ..specialize.specialization import Specialization
from ..values.sizes import Binder, BoundSizes
from .steps import Execution, Step, Steps

Tensor = torch.Tensor
FAR = (1 << 12, 64, 4)
"""Units in the last place of the largest number from which on values differ: the clearest difference is looked for."""


@dataclass(frozen=True)
class Finding:
    """The wrong thing, its place in the user's source, its values; steps that may be left out to avoid it."""

    fact: str
    place: str = ""
    values: str = ""
    switches: tuple[str, ...] = ()


@dataclass(frozen=True)
class ComparedValue:
    """A value on both sides of a step."""

    name: str
    source: str
    ours: Any
    want: Any

    @classmethod
    def of(cls, value: Value, ours: Any, want: Any) -> ComparedValue:
        """A value of a graph, by its expression and its line."""
        return cls(_value_text(value), _source_line(value), ours, want)


def localize(step: Step, steps: Steps, subject: Subject, difference: Difference) -> Finding:
    """The place within the step; the step alone where that cannot be told (it raises, or what ran has no copy)."""
    try:
        with torch.no_grad():
            return LOCALIZERS[step.kind](step, steps, subject) or Finding(str(step))
    except Exception as error:  # what is looked at is wrong: it may do anything
        return Finding(f"{step} ({type(error).__name__} where it was looked at again)")


def _first_difference(places: Sequence[ComparedValue]) -> tuple[ComparedValue, Difference] | None:
    """The first value that differs; by much, if one does."""
    for units in FAR:
        for place in places:
            if (apart := _difference_beyond(place, units)) is not None:
                return place, apart
    return None


def _difference_beyond(place: ComparedValue, units: int) -> Difference | None:
    ours, want = place.ours, place.want
    if not isinstance(ours, Tensor) or not isinstance(want, Tensor) or not want.is_floating_point():
        return difference(place.name, ours, want, None, Tolerance(strict=False))
    finite = want.detach().double()
    finite = finite[torch.isfinite(finite)]
    scale = finite.abs().max().item() if finite.numel() else 0.0
    return difference(place.name, ours, want, None, Tolerance(units * torch.finfo(want.dtype).eps * scale, 0.0, False))


def _finding_of(fact: str, places: Sequence[ComparedValue], *switches: str) -> Finding:
    """The step with the first of these places that differs."""
    first = _first_difference(places)
    if first is None:
        return Finding(fact, switches=switches)
    place, apart = first
    return Finding(f"{fact}: {place.name}", place.source, str(apart), switches)


# ------------------------------------------------------------------ what ran
def _executions(steps: Steps, kind: type[Executable] | type[GroupRunner], name: str) -> list[Execution]:
    return [s for s in steps.executions if isinstance(s.subject, kind) and s.subject.name == name]


def _graph_runs(steps: Steps, graph: Graph) -> Iterator[tuple[list[Tensor], Any]]:
    """Inputs and sizes that a graph, or an earlier form of it, ran on."""
    for execution in _executions(steps, Executable, graph.name):
        tensors = [t for t in execution.inputs if isinstance(t, Tensor)]
        if len(tensors) == len(graph.inputs):
            yield tensors, execution.sizes or execution.subject.binder(execution.inputs)


def _values(graph: Graph, inputs: Sequence[Tensor], sizes: Any) -> dict[int, Any]:
    """Every value of a graph, by the reference executor."""
    values: dict[int, Any] = {v.id: t for v, t in zip(graph.inputs, inputs, strict=True)}
    for value in graph.order():
        device = next((t.device for t in inputs), torch.device("cpu"))
        values[value.id] = reference.call_node(value, [values[a.id] for a in value.args], sizes, device)
    return values


def _source_line(value: Value) -> str:
    """The line that a value comes from; where a rule made it, that of the nearest value which has one."""
    waiting, visited = [value], {value.id}
    for near in waiting:
        if near.origin.where:
            return _line(near)
        more = [v for v in (*near.users, *near.args) if v.id not in visited]
        waiting += more
        visited |= {v.id for v in more}
    return ""


def _line(value: Value) -> str:
    origin = value.origin
    line = f"  {origin.line.strip()}" if origin.line else ""
    return f"{origin.where}{line}"


def _value_text(value: Value) -> str:
    """`rsqrt(mean)`, by the names of the source where there are any."""
    called = ", ".join(repr(a.params["value"]) if a.prim == "full" else name_of(a) for a in value.args)
    own = f"{value.origin.name} = " if value.origin.name else ""
    return f"{own}{value.prim}({called})"


# ------------------------------------------------------------------ one rule
def _rule(step: Step, steps: Steps, subject: Subject) -> Finding:
    """Compute both sides of a rewrite."""
    applied: Applied = step.detail
    original, new = applied.value, applied.better
    family = family_of(applied.rule, original.prim)
    fact = f"{family or 'a rule'} on {step.subject}: {_value_text(original)} -> {_value_text(new)}"
    places = []
    for inputs, sizes in _graph_runs(steps, original.graph):
        pair = extract([original, new], original.graph.inputs, name=step.subject)
        want, ours = reference.run(pair, inputs, sizes)
        places.append(ComparedValue(original.prim, _source_line(original), ours, want))
    first = _first_difference(places)
    values = str(first[1]) if first is not None else ""
    return Finding(fact, _source_line(original), values, (family,) if family else ())


# ------------------------------------------------------------------ one pass
def _pass(step: Step, steps: Steps, subject: Subject) -> Finding | None:
    """The first value of the new graph that is another than the value of the same line in the old one."""
    pairs = [s.inputs for s in steps.executions if s.subject == step.kind and s.inputs[1].name == step.subject]
    before, after = pairs[-1]
    places: list[ComparedValue] = []
    for inputs, sizes in _graph_runs(steps, after):
        values_before = _by_origin(before, inputs, sizes)
        values_after = _values(after, inputs, sizes)
        for value in after.order():
            candidates = values_before.get(_key(value, values_after[value.id]), ())
            places += [ComparedValue.of(value, values_after[value.id], want) for want in candidates[:1]]
        ends = zip(after.outputs, _outputs(before, inputs, sizes), strict=True)
        places += [ComparedValue.of(v, values_after[v.id], want) for v, want in ends if v is not None]
    return _finding_of(str(step), places, step.kind.split()[0])


def _by_origin(before: Any, inputs: Sequence[Tensor], sizes: Any) -> Mapping[Any, list[Any]]:
    """The values of a graph (of the IR, or captured) by what stands in the source for them."""
    by_origin: dict[Any, list[Any]] = {}
    if isinstance(before, Graph):
        values = _values(before, inputs, sizes)
        for value in before.order():
            if (key := _key(value, values[value.id])) is not None:
                by_origin.setdefault(key, []).append(values[value.id])
        return by_origin
    recorded = _RecordingInterpreter(before)
    recorded.run(*inputs)
    for node, value in recorded.values:
        name, place, *_ = node.meta.get("fusegrad_origin") or (None, None)
        if name and place and isinstance(value, Tensor):
            by_origin.setdefault((name, place, value.shape), []).append(value)
    return by_origin


def _key(value: Value, result: Any) -> Any:
    """The key of a value that both sides have; None without a name and a line."""
    named = value.origin.name and value.origin.where and isinstance(result, Tensor)
    return (value.origin.name, value.origin.where, result.shape) if named else None


def _outputs(before: Any, inputs: Sequence[Tensor], sizes: Any) -> Sequence[Any]:
    return reference.run(before, inputs, sizes) if isinstance(before, Graph) else list(before(*inputs))


class _RecordingInterpreter(Interpreter):
    """Runs a captured graph operation by operation, and keeps what each made."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        super().__init__(gm)
        self.values: list[tuple[Node, Any]] = []
        self.by_node: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        result = self.by_node[n] = super().run_node(n)
        if n.op == "call_function":
            self.values.append((n, result))
        return result


# ------------------------------------------------------------------ the division, the kernels
def _division(step: Step, steps: Steps, subject: Subject) -> Finding | None:
    """The first step of the plan that makes another value than the undivided graph has."""
    places: list[ComparedValue] = []
    for execution in _executions(steps, Executable, step.subject):
        for plan in execution.subject.plans.values():
            tensors = [t for t in execution.inputs if isinstance(t, Tensor)]
            places += _of_plan(plan, tensors, execution.sizes or execution.subject.binder(execution.inputs))
    return _finding_of(str(step), places, *(("fuse",) if step.kind == "divide" else (step.kind,)))


def _of_plan(plan: KernelPlan, inputs: Sequence[Tensor], sizes: Any) -> Iterator[ComparedValue]:
    want, memory = _values(plan.graph, inputs, sizes), dict[int, Any]()
    operations = OnTensors(sizes, plan.device)
    memory.update({v.id: t for v, t in zip(plan.graph.inputs, inputs, strict=True)})
    for at, step in enumerate(plan.steps or ()):
        plan.take_step(step, at, operations, memory)
        for value in step.outputs if isinstance(step, Group) else (step.value,):
            own = f"{plan.runners[at].name}, " if at in plan.runners else ""
            if value.id in memory:
                yield ComparedValue(f"{own}{_value_text(value)}", _source_line(value), memory[value.id], want[value.id])


def _kernels(step: Step, steps: Steps, subject: Subject) -> Finding | None:
    """The first primitive whose own kernel is wrong on these inputs, else the first output of the group that is."""
    for execution in _executions(steps, GroupRunner, step.subject):
        runner, key = execution.subject, tuple(execution.sizes.values())
        graph, inputs = runner.group.graph, execution.inputs
        ours, want = runner(inputs, execution.sizes, key), _values(graph, inputs, execution.sizes)
        ends = [o for o in graph.outputs if o is not None]
        wrong = [ComparedValue.of(o, g, want[o.id]) for o, g in zip(ends, ours, strict=True)]
        if (first := _first_difference(wrong)) is None:
            continue
        names = ", ".join(k.name for v in runner.variants.ordered[:1] for k in v.kernels.kernels)
        fact = f"{step} (kernel {names})"
        primitive = _first_difference([*_primitives_alone(runner, inputs, execution.sizes, want)])
        return _finding_of(fact, [primitive[0] if primitive is not None else first[0]])
    return None


MOST = 200
"""Primitives of a group that get a kernel of their own."""


def _primitives_alone(
    runner: GroupRunner, inputs: Sequence[Tensor], sizes: Any, want: Mapping[int, Any]
) -> Iterator[ComparedValue]:
    """Every primitive as the one output of a kernel."""
    graph = runner.group.graph
    layouts = {v.id: v.params["strides"] for v in graph.inputs}
    for value in graph.order()[:MOST]:
        cut = extract([value], graph.inputs, name="alone", layouts=layouts)
        group = Group(cut, tuple(graph.inputs), (value,))
        own = runner_of(group, "alone", runner.backend, runner.variants.target, runner.device, lambda why: None)
        (result,) = own(inputs, sizes, tuple(sizes.values()))
        yield ComparedValue.of(value, result, want[value.id])


# ------------------------------------------------------------------ captured operations
def _capture(step: Step, steps: Steps, subject: Subject) -> Finding | None:
    """The first captured operation that is not what the user's method did, by what it gives."""
    for execution in (s for s in steps.executions if isinstance(s.subject, Executable)):
        users = _users_method(subject, execution)
        if users is None or step.subject != users[0]:
            continue
        recording = _RecordingMode()
        with recording:
            theirs = list(users[1]())
        recorded = _RecordingInterpreter(execution.subject.trace.graph_module)
        mine = recorded.run(*execution.inputs)
        places = [
            *_aligned(recorded.values, recording.calls),
            *_compared_results(execution.subject.trace.graph_module, mine, theirs),
        ]
        return _finding_of(str(step), places)
    return None


class _RecordingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what each operation gave."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, result.clone() if isinstance(result, Tensor) else result))
        return result


def _aligned(captured: Sequence[tuple[Node, Any]], calls: Sequence[tuple[Any, Any]]) -> Iterator[ComparedValue]:
    """Captured operations beside those that ran, as long as they are the same ones in the same order."""
    for (node, ours), (func, want) in zip(captured, calls, strict=False):
        same = node.target is func
        yield ComparedValue(
            str(node.target) if same else f"{node.target} in place of {func}", _origin(node), ours, want
        )
        if not same:
            return


def _compared_results(gm: torch.fx.GraphModule, mine: Sequence[Any], theirs: Sequence[Any]) -> Iterator[ComparedValue]:
    (nodes,) = gm.graph.find_nodes(op="output")[0].args
    for node, ours, want in zip(nodes, mine, theirs, strict=False):
        if isinstance(node, Node):
            yield ComparedValue(f"result {node.target}", _origin(node), ours, want)


def _origin(node: Node) -> str:
    origin = node.meta.get("fusegrad_origin") or (None, None, None)
    line = origin[2] if len(origin) > 2 else None
    return f"{origin[1]}  {line.strip()}" if origin[1] and line else str(origin[1] or "")


def _users_method(subject: Subject, execution: Execution) -> tuple[str, Callable[[], Sequence[Any]]] | None:
    """(what it is called, the user's own method on what the executable was given)."""
    for spec in subject.compiler.table:
        if spec.captured.forward.trace is execution.subject.trace:
            args = spec.captured.with_tensors(list(execution.inputs)[: len(spec.captured.slots)])
            return f"{spec.captured.name}.forward", partial(partial(run_user_forward, spec.captured), args)
        for key, entry in spec.backward.entries.items():
            if isinstance(entry, BackwardEntry) and entry.trace is execution.subject.trace:
                return f"{spec.captured.name}.backward", partial(_users_backward, spec, key[0], execution)
    return None


def _users_backward(spec: Specialization, kinds: Sequence[Any], execution: Execution) -> Sequence[Any]:
    """The user's backward on the residuals, sizes and gradients that its capture was given."""
    captured = spec.captured
    places, supply = captured.residual_places, iter(execution.inputs)
    residuals = [None if p is None else next(supply) for p in places]
    symbols = {s: next(supply) for s in captured.backward_symbols}
    gradients = [None if k is None else next(supply) for k in kinds]
    pairs = [(r, captured.forward.fake_at(p)) for r, p in zip(residuals, places, strict=True) if p is not None]
    sizes = BoundSizes({**symbols, **Binder([f for _, f in pairs])([r for r, _ in pairs])})
    return run_user_backward(captured, residuals, sizes, gradients)


def _binding(step: Step, steps: Steps, subject: Subject) -> Finding | None:
    """The first operation that is another one when it is called past torch's boxing."""
    places: list[ComparedValue] = []
    for execution in _executions(steps, Executable, step.subject):
        gm = execution.subject.trace.graph_module
        calls = bind_operations([n for n in gm.graph.nodes if n.op == "call_function"])
        recorded = _RecordingInterpreter(gm)
        recorded.run(*execution.inputs)
        for node, want in recorded.values:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), recorded.by_node.get)
            places.append(ComparedValue(str(node.target), _origin(node), calls[node](*args, **kwargs), want))
    return _finding_of(str(step), places, step.kind)


def _step_alone(step: Step, steps: Steps, subject: Subject) -> Finding:
    return Finding(str(step), switches=(step.kind,))


LOCALIZERS: dict[str, Callable[[Step, Steps, Subject], Finding | None]] = {
    "capture": _capture, "lower": _pass, "rule": _rule, "simplify": _pass, "contract": _pass, "simplify again": _pass,
    "recompute": _step_alone, "overlap": _step_alone, "divide": _division, "products": _division, "place": _division,
    "kernels": _kernels, "binding": _binding, "reuse": _step_alone, "ready": _step_alone,
}  # fmt: skip
