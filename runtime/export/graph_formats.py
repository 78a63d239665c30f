"""The compiled graphs for programs: JSON, and networkx for GraphML and DOT."""

from __future__ import annotations

import io
import json
from typing import Any

import networkx as nx

from ..report.explanation import Explanation
from ..report.page.graph_facts import SCHEMA, facts


def as_json(explanation: Explanation) -> str:
    """JSON, indented."""
    return json.dumps(facts(explanation), indent=1) + "\n"


def as_networkx(explanation: Explanation) -> nx.MultiDiGraph:
    """One graph: nodes "forward/x" and "backward/grad", edges from operand to result, residuals from one to the other.

    Attributes are strings, numbers and booleans, as GraphML wants them.
    """
    document = facts(explanation)
    graph = nx.MultiDiGraph(name=document["function"], target=document["target"], schema=SCHEMA)
    for direction, part in document["directions"].items():
        for node in part["nodes"]:
            label = f"{direction}/{node['name']}"
            graph.add_node(label, direction=direction, **{k: _flat(v) for k, v in node.items()})
            for place, operand in enumerate(node["operands"]):
                graph.add_edge(f"{direction}/{operand}", label, kind="operand", place=place)
    for source, target in _carried(document):
        graph.add_edge(f"forward/{source}", f"backward/{target}", kind="residual", place=0)
    return graph


def _flat(value: Any) -> Any:
    if isinstance(value, list | dict):
        return json.dumps(value)
    return "" if value is None else value


def _carried(document: dict[str, Any]) -> list[tuple[str, str]]:
    """(the value in forward, the input of backward) of each residual."""
    both = document["directions"]
    if set(both) != {"forward", "backward"}:
        return []
    forward = both["forward"]
    users = len(forward["outputs"]) - len({p["index"] for p in document["residuals"] if p["kind"] == "hidden"})
    outputs = forward["outputs"]
    at: dict[str, list[Any]] = {"input": forward["inputs"], "output": outputs, "hidden": outputs[users:]}
    pairs = zip(document["residuals"], both["backward"]["inputs"], strict=False)
    return [(name, target) for p, target in pairs if (name := at[p["kind"]][p["index"]]) is not None]


def as_graphml(explanation: Explanation) -> str:
    """GraphML, which networkx, yEd and Gephi read."""
    out = io.BytesIO()
    nx.write_graphml(as_networkx(explanation), out)
    return out.getvalue().decode()


def as_dot(explanation: Explanation) -> str:
    """The text that Graphviz draws: a cluster per kernel, residuals dashed."""
    document = facts(explanation)
    lines = [f"digraph {_quoted(document['function'])} {{", '  node [shape=box, fontname="monospace", fontsize=10];']
    for direction, part in document["directions"].items():
        lines += [f"  subgraph {_quoted('cluster_' + direction)} {{", f"    label={_quoted(direction)};"]
        for at, step in enumerate(part["steps"]):
            inside = [n for n in part["nodes"] if n["steps"][:1] == [at]]
            if inside:
                lines += [f"    subgraph {_quoted(f'cluster_{direction}_{at}')} {{"]
                lines += [f"      label={_quoted(step['name'])};"]
                lines += [f"      {_dot_node(direction, n)}" for n in inside]
                lines += ["    }"]
        lines += [f"    {_dot_node(direction, n)}" for n in part["nodes"] if not n["steps"]]
        lines += ["  }"]
        lines += [
            f"  {_quoted(f'{direction}/{o}')} -> {_quoted(direction + '/' + n['name'])};"
            for n in part["nodes"] for o in n["operands"]
        ]  # fmt: skip
    lines += [
        f"  {_quoted('forward/' + a)} -> {_quoted('backward/' + b)} [style=dashed];" for a, b in _carried(document)
    ]
    return "\n".join([*lines, "}"]) + "\n"


def _dot_node(direction: str, node: dict[str, Any]) -> str:
    label = f"{node['name']} = {node['operation']}\n{node['type']}"
    return f"{_quoted(direction + '/' + node['name'])} [label={_quoted(label)}];"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
