"""The compiled graphs as plain facts. Sizes are texts such as "1024*M"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy

from ....ir import Graph, Value, show
from ....ir.loops.body import Body
from ....ir.passes.fuse import Group, Step
from ...cache.entry_files import versions
from ..directions import DirectionReport
from ..size_names import renamed
from .explained import Explained
from .graph_svg import members

SCHEMA = 1
HIDDEN = ("strides", "avals", "index", "name")


def facts(explanation: Explained) -> dict[str, Any]:
    """Both directions: nodes in an order that runs, each with its operands, type, step, and line of the user's source.

    residuals: where backward's first inputs come from. steps: what runs, in order; a node that several kernels compute
    again for themselves has several steps. sizes: those that may vary, by their names, at the explained arguments.
    """
    names = explanation.size_names
    return {
        "schema": SCHEMA,
        "fusegrad": versions()["fusegrad"],
        "function": explanation.name,
        "target": explanation.target,
        "residuals": [{"kind": p.kind, "index": p.index} for p in explanation.residuals],
        "saved_bytes": explanation.saved_bytes,
        "sizes": {names.get(symbol, str(symbol)): size for symbol, size in explanation.sizes.items()},
        "directions": {name: _direction(report, explanation, name) for name, report in explanation.directions.items()},
        "methods": {
            m: {"status": r.status, "reason": r.reason, "where": r.where} for m, r in explanation.methods.items()
        },
    }


def _direction(report: DirectionReport, explanation: Explained, name: str) -> dict[str, Any]:
    graph, steps = report.graph, _members(report.steps)
    names = _names(graph)
    residuals = _residual_ids(graph, explanation, name)
    return {
        "inputs": [names[v.id] for v in graph.inputs],
        "outputs": [None if o is None else names[o.id] for o in graph.outputs],
        "nodes": [_with_size_names(_node(v, names, steps, residuals), explanation.size_names) for v in _nodes(graph)],
        "steps": [_step(report, at, names) for at in range(len(report.steps))],
        "minimal_bytes": report.minimal,
        "launches": [
            {"name": k.name, "kind": k.kind, "bytes_read": k.bytes_read, "bytes_written": k.bytes_written}
            for k in report.launches
        ],
    }


def _residual_ids(graph: Graph, explanation: Explained, name: str) -> set[int]:
    """The values that go from forward to backward."""
    if name == "backward":
        return {v.id for v in graph.inputs[: len(explanation.residuals)]}
    outputs = graph.outputs
    places: dict[str, Sequence[Value | None]] = {
        "input": graph.inputs, "output": outputs, "hidden": outputs[explanation.user_outputs :],
    }  # fmt: skip
    values = [places[p.kind][p.index] for p in explanation.residuals if p.index < len(places[p.kind])]
    return {v.id for v in values if v is not None}


def _members(steps: Iterable[Step]) -> list[set[int]]:
    """The ids of the nodes that each step computes."""
    return [{v.id for v in members(s)} if isinstance(s, Group) else {s.value.id} for s in steps]


def _nodes(graph: Graph) -> list[Value]:
    """The inputs, then what is computed."""
    return [*graph.inputs, *(v for v in graph.order() if v.prim != "input")]


def _names(graph: Graph) -> dict[int, str]:
    """The user's names, numbered where two values share one."""
    names: dict[int, str] = {}
    assigned: set[str] = set()
    for value in _nodes(graph):
        wish = value.params["name"] if value.prim == "input" else value.origin.name or f"v{value.id}"
        name = wish if wish not in assigned else f"{wish}_{value.id}"
        assigned.add(name)
        names[value.id] = name
    return names


def _node(value: Value, names: dict[int, str], steps: list[set[int]], residuals: set[int]) -> dict[str, Any]:
    origin = value.origin
    return {
        "name": names[value.id],
        "operation": value.params["op"] if value.prim == "aten" else value.prim,
        "operands": [names[a.id] for a in value.args],
        "type": ", ".join(map(str, value.avals)),
        "parameters": {k: _plain_data(v) for k, v in value.params.items() if k not in HIDDEN and k != "op"},
        "steps": [at for at, ids in enumerate(steps) if value.id in ids],
        "residual": value.id in residuals,
        "where": origin.where,
        "line": origin.line,
    }


def _with_size_names(node: dict[str, Any], names: Mapping[sympy.Symbol, str]) -> dict[str, Any]:
    """Its type, and those of its parameters that are texts of sizes."""
    parameters = {k: _renamed(v, names) for k, v in node["parameters"].items()}
    return {**node, "type": renamed(node["type"], names), "parameters": parameters}


def _renamed(value: Any, names: Mapping[sympy.Symbol, str]) -> Any:
    if isinstance(value, list):
        return [_renamed(v, names) for v in value]
    return renamed(value, names) if isinstance(value, str) else value


def _plain_data(value: Any) -> Any:
    if isinstance(value, Body):
        return show(value.graph).splitlines()
    if isinstance(value, bool | int | float | str | type(None)):
        return value
    return [_plain_data(v) for v in value] if isinstance(value, tuple | list) else str(value)


def _step(report: DirectionReport, at: int, names: dict[int, str]) -> dict[str, Any]:
    step = report.steps[at]
    if not isinstance(step, Group):
        return {"kind": type(step).__name__.lower(), "name": str(step.value.params.get("op", step.value.prim))}
    groups = [i for i, s in enumerate(report.steps) if isinstance(s, Group)]
    kernels = [k.name for k in report.kernels[groups.index(at)].kernels]
    return {
        "kind": "kernels",
        "name": _common_prefix(kernels),
        "kernels": kernels,
        "reads": [names[v.id] for v in step.inputs],
        "writes": [names[v.id] for v in step.outputs],
    }


def _common_prefix(names: list[str]) -> str:
    """One name for the kernels of a step."""
    return names[0] if len(names) == 1 else f"{names[0].rsplit('_', 1)[0]} ({len(names)} kernels)"


# ------------------------------------------------------------------ formats
