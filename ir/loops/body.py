"""The graph of one step as a parameter of a `scan`: frozen, hashable, and equal where its text is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from ..graph import Graph, Value, exact_key
from ..lazy_attribute import lazy_attribute
from ..prims import PRIMS
from ..types import TensorType

T = TypeVar("T")


class Body:
    """A graph (carries, one step of each x, wholes) -> (carries, one step of each y) that is not changed any more."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @property
    def input_types(self) -> tuple[TensorType, ...]:
        return tuple(v.aval for v in self.graph.inputs)

    @property
    def output_types(self) -> tuple[TensorType | None, ...]:
        return tuple(None if o is None else o.aval for o in self.graph.outputs)

    @lazy_attribute
    def has_effects(self) -> bool:
        """It writes into an input, or something in it is neither merged nor removed: no scan has such a body."""
        return bool(self.graph.mutations) or any(PRIMS[v.prim].effect for v in self.graph)

    @lazy_attribute
    def key(self) -> tuple[Any, ...]:
        """Everything that the text of the graph says."""
        graph = self.graph
        nodes = [*graph.inputs, *graph.order()]
        number = {v.id: i for i, v in enumerate(nodes)}
        outputs = tuple(None if o is None else number[o.id] for o in graph.outputs)
        written = tuple((i, number[v.id]) for i, v in sorted(graph.mutations.items()))
        return (graph.name, tuple(_node_key(v, number) for v in nodes), outputs, (*graph.output_strides, *written))

    @lazy_attribute
    def _hash(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Body) and hash(self) == hash(other) and self.key == other.key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Body({self.graph.name!r}, {len(self.graph)} nodes)"


def _node_key(value: Value, number: dict[int, int]) -> tuple[Any, ...]:
    params = tuple((k, exact_key(p)) for k, p in sorted(value.params.items()))
    return (value.prim, tuple(number[a.id] for a in value.args), params, value.avals)


class Operands(NamedTuple):
    """The operands of a scan by what they are; of its body as well."""

    carries: list[Any]
    xs: list[Any]
    wholes: list[Any]


def operands_of(params: dict[str, Any], items: Sequence[T]) -> Operands:
    """What belongs to each operand of a scan, or to each input of its body, by kind."""
    first, second = params["carries"], params["carries"] + params["steps"]
    return Operands(list(items[:first]), list(items[first:second]), list(items[second:]))


def bodies_of(params: dict[str, Any]) -> Iterator[Body]:
    """The graphs within a node."""
    return (p for p in params.values() if isinstance(p, Body))
