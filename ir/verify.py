"""Legal graphs, as a table of checks. Runs after every transform and pass in tests and under `config.debug`."""

from __future__ import annotations

from collections.abc import Callable

from .errors import InvalidGraphError, TypeRuleError
from .graph import Graph, Value
from .infer import infer
from .loops.body import bodies_of
from .prims import PRIMS


def verify(graph: Graph) -> Graph:
    """The graph itself; raises InvalidGraphError naming the first node that breaks a rule."""
    for value in graph:
        for check in node_checks:
            if (fault := check(graph, value)) is not None:
                raise InvalidGraphError(fault, node=f"{value!r} = {value.prim}{value.args} {value.params}")
    _check_edges(graph)
    return graph


def _prim_exists(graph: Graph, value: Value) -> str | None:
    return None if value.prim in PRIMS else "no such primitive"


def _operands_first(graph: Graph, value: Value) -> str | None:
    return None if all(a.id < value.id for a in value.args) else "an operand comes after its user"


def _edges(graph: Graph, value: Value) -> str | None:
    edges = sorted((key, source) for source, _, key in graph.nx.in_edges(value.id, keys=True))
    return None if edges == list(enumerate(a.id for a in value.args)) else "edges and operands disagree"


def _type_holds(graph: Graph, value: Value) -> str | None:
    if value.prim == "input":
        return None
    try:
        avals = infer(value.prim, [a.avals for a in value.args], value.params)
    except TypeRuleError as error:
        return str(error)
    return None if avals == value.avals else f"the type rule says {avals}, the node {value.avals}"


def _hashable(graph: Graph, value: Value) -> str | None:
    try:
        hash(tuple(value.params.values()))
    except TypeError as error:
        return f"a parameter is not hashable: {error}"
    return None


def _body_holds(graph: Graph, value: Value) -> str | None:
    """A body is a legal graph, too."""
    for body in bodies_of(value.params):
        try:
            verify(body.graph)
        except InvalidGraphError as error:
            return f"in {body}: {error}"
    return None


node_checks: tuple[Callable[[Graph, Value], str | None], ...] = (
    _prim_exists, _operands_first, _edges, _body_holds, _hashable, _type_holds,
)  # fmt: skip


def _check_edges(graph: Graph) -> None:
    if [v.params["index"] for v in graph.inputs] != list(range(len(graph.inputs))):
        raise InvalidGraphError("inputs are not numbered in order", node="inputs")
    if len(graph.outputs) != len(graph.output_strides):
        raise InvalidGraphError("outputs and their strides differ in number", node="outputs")
    for index, value in graph.mutations.items():
        if graph.inputs[index].aval != value.aval:
            raise InvalidGraphError(f"input {index} is written with another type", node=repr(value))
