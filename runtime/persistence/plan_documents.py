"""Kernels, steps and plans as plain data for JSON, and their way back. What does not come back equal is not kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from ...codegen import Buffer, Kernel, Kernels, Pointer, Ref, Scalar
from ...ir import Graph, Value
from ...ir.errors import ParseError
from ...ir.passes.fuse import Extern, Group, Step, View
from ...ir.passes.streaming.slabs import End, Slabs
from ...ir.text.document import document, graph_from, size_document, sizes_document, symbols_document, symbols_from
from ...ir.text.text import plain_sympy, show, size_from
from ..execution.group import GroupRunner
from ..execution.kernel_plan import KernelPlan, last_uses, runner_of
from ..execution.slabs.slab_runner import SlabRunner
from ..execution.variants import Variant

Symbols = Mapping[str, sympy.Symbol]


class NotKept(Exception):
    """Something has no form on disk that is certain to come back as it was (internal: it is captured each time)."""


def size_of(text: Any, symbols: Symbols) -> Any:
    """The size that `size_document` wrote."""
    return size_from(text, symbols, settled=True) if isinstance(text, str) else int(text)


def sizes_of(texts: Sequence[Any], symbols: Symbols) -> tuple[Any, ...]:
    return tuple(size_of(t, symbols) for t in texts)


# ------------------------------------------------------------------ conditions
_RELATIONS: dict[str, Any] = {
    **{r.__name__: r for r in (sympy.Eq, sympy.Ne, sympy.Gt, sympy.Ge, sympy.Lt, sympy.Le)},
    **{c.__name__: c for c in (sympy.And, sympy.Or, sympy.Not)},
}


def condition(expr: Any) -> Any:
    """s0 > 2  ->  ["StrictGreaterThan", "s0", 2]"""
    name = type(expr).__name__
    if isinstance(expr, sympy.logic.boolalg.BooleanAtom):
        return bool(expr)
    if name not in _RELATIONS:
        return size_document(expr)
    return [name, *(condition(a) for a in expr.args)]


def condition_of(data: Any, symbols: Symbols) -> Any:
    """The condition that `condition` wrote."""
    if isinstance(data, bool):
        return sympy.true if data else sympy.false
    if not isinstance(data, list):
        return size_of(data, symbols)
    name, *parts = data
    return _RELATIONS[name](*(condition_of(p, symbols) for p in parts), evaluate=False)  # s > 0, of a positive s


def _plain(expr: Any) -> Any:
    """The condition in sympy's own functions."""
    if type(expr).__name__ in _RELATIONS:
        return type(expr)(*map(_plain, expr.args), evaluate=False)
    return plain_sympy(expr) if isinstance(expr, sympy.Expr) else expr


def conditions(exprs: Sequence[Any], symbols: Symbols) -> list[Any]:
    """All of them; raises NotKept where one would come back as another."""
    documents = [condition(e) for e in exprs]
    again = [condition_of(w, symbols) for w in documents]
    if again != [_plain(e) for e in exprs] or any(isinstance(a, bool) for a in again):
        raise NotKept("a condition on sizes has no text")
    return documents


# ------------------------------------------------------------------ kernels
def _buffer(b: Buffer) -> list[Any]:
    return [b.name, b.dtype, sizes_document(b.shape), sizes_document(b.strides), b.zeroed]


def _buffer_of(data: Any, symbols: Symbols) -> Buffer:
    name, dtype, shape, strides, zeroed = data
    return Buffer(name, dtype, sizes_of(shape, symbols), sizes_of(strides, symbols), zeroed)


def _argument(a: Pointer | Scalar) -> list[Any]:
    return [a.name, size_document(a.value)] if isinstance(a, Scalar) else [a.name, *a.buffer, a.dtype]


def _argument_of(data: Any, symbols: Symbols) -> Pointer | Scalar:
    if len(data) == 2:
        return Scalar(data[0], size_of(data[1], symbols))
    name, kind, index, dtype = data
    return Pointer(name, Ref(kind, index), dtype)


def _bytes(moved: Mapping[str, Any]) -> dict[str, Any]:
    return {name: size_document(n) for name, n in moved.items()}


_FIELDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Symbols], Any]]] = {
    **dict.fromkeys(
        ("name", "source", "constants", "num_warps", "num_stages", "fast", "for_multiples", "splits", "roomy"),
        (lambda v: v, lambda d, s: d),
    ),
    **dict.fromkeys(("grid", "operations", "multiplied", "wanted", "sharing"), (size_document, size_of)),
    "arguments": (lambda v: list(map(_argument, v)), lambda d, s: tuple(_argument_of(a, s) for a in d)),
    "scratch": (lambda v: list(map(_buffer, v)), lambda d, s: tuple(_buffer_of(b, s) for b in d)),
    "pinned": (lambda v: {k.name: n for k, n in v.items()}, lambda d, s: {s[k]: n for k, n in d.items()}),
    "guards": (lambda v: list(map(condition, v)), lambda d, s: tuple(condition_of(g, s) for g in d)),
    "aligned": (list, lambda d, s: tuple(d)),
    **dict.fromkeys(("reads", "writes", "cached"), (_bytes, lambda d, s: {k: size_of(n, s) for k, n in d.items()})),
}
"""Fields of a Kernel: how each is written and read."""


def kernels(generated: Kernels) -> dict[str, Any]:
    """Kernels as plain data."""
    if generated.nothing:
        raise NotKept("there is nothing to compute at these sizes")
    each = [{name: write(getattr(k, name)) for name, (write, _) in _FIELDS.items()} for k in generated.kernels]
    return {"kernels": each, "temporaries": list(map(_buffer, generated.temporaries))}


def kernels_of(data: Any, symbols: Symbols) -> Kernels:
    """The kernels that `kernels` wrote."""
    each = [Kernel(**{name: read(k[name], symbols) for name, (_, read) in _FIELDS.items()}) for k in data["kernels"]]
    return Kernels(tuple(each), tuple(_buffer_of(b, symbols) for b in data["temporaries"]))


# ------------------------------------------------------------------ plans
def plan(kernel_plan: KernelPlan) -> dict[str, Any]:
    """A plan that ran, as plain data. Raises NotKept where it would not come back as it is."""
    if kernel_plan.steps is None or any(r.one_by_one for r in kernel_plan.group_runners()):
        raise NotKept("its kernels were refused")
    if kernel_plan.places:
        raise NotKept("a library call writes into a part of a result")
    symbols = {s.name: s for s in _symbols(kernel_plan)}
    number = {v.id: i for i, v in enumerate(_nodes(kernel_plan.graph))}
    try:
        steps = [_step(step, kernel_plan.runners.get(at), number, symbols) for at, step in enumerate(kernel_plan.steps)]
        for at, loop in kernel_plan.loops.items():
            steps[at]["body"] = plan(loop.plan)
        declared, held = symbols_document(symbols.values()), sizes_document(kernel_plan.held)
        return {"symbols": declared, "graph": _graph(kernel_plan.graph), "steps": steps, "held": held}
    except (ValueError, KeyError, StopIteration) as error:
        raise NotKept(str(error)) from error


def _symbols(kernel_plan: KernelPlan) -> set[sympy.Symbol]:
    runners = kernel_plan.runners.values()
    graphs = [kernel_plan.graph, *(r.group.graph for r in runners)]
    of_graphs = {s for g in graphs for v in g for a in v.avals for n in a.shape for s in getattr(n, "free_symbols", ())}
    stored = [k for r in runners if isinstance(r, GroupRunner) for v in r.variants for k in v.kernels.kernels]
    exprs = [e for k in stored for e in (k.grid, k.wanted, *k.pinned, *k.guards)]
    numbers = [v.params["value"] for g in graphs for v in g if v.prim == "full"]
    return of_graphs | {s for e in (*exprs, *numbers) for s in getattr(e, "free_symbols", ())}


def _nodes(graph: Graph) -> list[Value]:
    return [*graph.inputs, *graph.order()]


def _graph(graph: Graph) -> dict[str, Any]:
    data = document(graph)
    try:
        again = graph_from(data)
    except ParseError as error:
        raise NotKept(f"a graph would not come back: {error.facts['detail']}") from error
    if show(again) != show(graph) or [v.id for v in _nodes(again)] != list(range(len(again))):
        raise NotKept("a graph would come back as another")
    return data


def _step(
    step: Step, runner: GroupRunner | SlabRunner | None, number: Mapping[int, int], symbols: Symbols
) -> dict[str, Any]:
    if not isinstance(step, Group):
        return {"kind": type(step).__name__, "value": number[step.value.id]}
    assert runner is not None
    group = {
        "name": runner.name,
        "graph": _graph(step.graph),
        "inputs": [number[v.id] for v in step.inputs],
        "outputs": [number[v.id] for v in step.outputs],
        "pairs": step.pairs,
    }
    if isinstance(runner, SlabRunner):
        return {"kind": "Slabs", **group, **_slabs(runner)}
    variants = [_variant(v, symbols) for v in runner.variants]
    return {"kind": "Group", **group, "overwrites": runner.overwrites, "variants": variants}


def _slabs(runner: SlabRunner) -> dict[str, Any]:
    """How a group is walked, and the plan of a slab."""
    slabs, of_slab = runner.slabs, runner.plan
    assert isinstance(of_slab, KernelPlan)
    ends = [[[e.axis, size_document(e.unit)] for e in side] for side in (slabs.inputs, slabs.outputs)]
    named = [None if s is None else s.name for s in (slabs.symbol, slabs.count, slabs.first)]
    return {"walked": named, "ends": ends, "held": sizes_document(slabs.held), "plan": plan(of_slab)}


def _slabs_of(data: Any, group: Group, symbols: Symbols) -> Slabs:
    """The walk that `_slabs` wrote."""
    symbol, count, first = (None if name is None else symbols[name] for name in data["walked"])
    inputs, outputs = (tuple(End(axis, size_of(unit, symbols)) for axis, unit in side) for side in data["ends"])
    assert symbol is not None
    return Slabs(group, symbol, count, first, inputs, outputs, sizes_of(data["held"], symbols))


def _variant(variant: Variant, symbols: Symbols) -> dict[str, Any]:
    data = kernels(variant.kernels)
    if kernels_of(data, symbols) != variant.kernels:
        raise NotKept("a kernel would come back as another")
    return {**data, "proved": variant.proved is True and not variant.assumed}


def _variant_of(data: Any, runner: GroupRunner, symbols: Symbols) -> Variant:
    variant = runner.variants.with_launchers(kernels_of(data, symbols))
    variant.proved = True if data.get("proved") is True else None  # what was left open is asked again
    return variant


def plan_of(
    data: Any, name: str, backend: str, device: torch.device, report: Callable[[str], None]
) -> KernelPlan:
    """The plan that `plan` wrote: cut into steps, with its kernels."""
    return _filled(KernelPlan(graph_from(data["graph"]), name, backend, device, report), data)


def _filled(kernel_plan: KernelPlan, data: Any) -> KernelPlan:
    """The plan with the steps and kernels that were written."""
    symbols = symbols_from(data["symbols"], "symbols")
    nodes = _nodes(kernel_plan.graph)
    kernel_plan.steps, kernel_plan.held = [], sizes_of(data["held"], symbols)
    for at, step in enumerate(data["steps"]):
        kernel_plan.steps.append(_step_of(step, nodes))
        if step["kind"] == "Slabs":
            kernel_plan.runners[at] = _slab_runner_of(step, kernel_plan, kernel_plan.steps[-1], symbols)
        elif step["kind"] == "Group":
            kernel_plan.runners[at] = _runner_of(step, kernel_plan, kernel_plan.steps[-1], symbols)
        if "body" in step:
            own = (kernel_plan.backend, kernel_plan.device, kernel_plan.report)
            body = plan_of(step["body"], f"{kernel_plan.name}_step{at}", *own)
            kernel_plan.loops[at] = kernel_plan.loop_at(nodes[step["value"]], body)
    kernel_plan.last_use = last_uses(kernel_plan.steps)
    return kernel_plan


def _step_of(data: Any, nodes: Sequence[Value]) -> Step:
    if data["kind"] not in ("Group", "Slabs"):
        value = nodes[data["value"]]
        return Extern(value) if data["kind"] == "Extern" else View(value)
    inputs, outputs = (tuple(nodes[i] for i in data[end]) for end in ("inputs", "outputs"))
    return Group(graph_from(data["graph"]), inputs, outputs, data.get("pairs") is True)


def _runner_of(data: Any, kernel_plan: KernelPlan, step: Any, symbols: Symbols) -> GroupRunner:
    place = (kernel_plan.backend, kernel_plan.target, kernel_plan.device)
    runner = runner_of(step, data["name"], *place, kernel_plan.report)
    runner.variants.ordered = [_variant_of(v, runner, symbols) for v in data["variants"]]
    runner.overwrites = None if data["overwrites"] is None else (data["overwrites"][0], data["overwrites"][1])
    return runner


def _slab_runner_of(data: Any, kernel_plan: KernelPlan, step: Any, symbols: Symbols) -> SlabRunner:
    runner = kernel_plan.slab_runner(_slabs_of(data, step, symbols), data["name"])
    assert isinstance(runner.plan, KernelPlan)
    _filled(runner.plan, data["plan"])
    return runner
