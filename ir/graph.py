"""The graph: a networkx MultiDiGraph behind a small class. Insertion order is a topological order, always.

    with building(graph):
        y = emit("mul", x, x)          # folds nothing; hash-conses, infers the type, records provenance
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import networkx as nx

from .errors import InvalidGraphError
from .infer import infer
from .prims import PRIMS
from .switches import is_on
from .text.printable import printable
from .types import Size, TensorType, contiguous_strides


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from: the user's name for it, the ATen op, and `file:line` with the text of the line."""

    name: str | None = None
    op: str | None = None
    where: str | None = None
    line: str | None = None

    def __post_init__(self) -> None:
        """Both are written into comments of emitted text."""
        for field in ("where", "line"):
            if not ((text := getattr(self, field)) or "").isprintable():
                object.__setattr__(self, field, printable(text))


class Value:
    """One result: a handle on a node of its graph. Equal handles mean the same node."""

    __slots__ = ("graph", "id")

    def __init__(self, graph: Graph, id: int) -> None:
        self.graph, self.id = graph, id

    @property
    def attrs(self) -> dict[str, Any]:
        return self.graph.attributes[self.id]

    @property
    def prim(self) -> str:
        return self.attrs["prim"]  # type: ignore[no-any-return]

    @property
    def params(self) -> dict[str, Any]:
        return self.attrs["params"]  # type: ignore[no-any-return]

    @property
    def args(self) -> tuple[Value, ...]:
        return tuple(Value(self.graph, i) for i in self.attrs["args"])

    @property
    def aval(self) -> TensorType:
        """The type of a single result. Nodes with several results have `avals`, and are read through `pick`."""
        (aval,) = self.attrs["avals"]
        return aval  # type: ignore[no-any-return]

    def arg(self, number: int) -> Value:
        """One of the operands, where these are many."""
        return Value(self.graph, self.attrs["args"][number])

    @property
    def avals(self) -> tuple[TensorType, ...]:
        return self.attrs["avals"]  # type: ignore[no-any-return]

    @property
    def shape(self) -> tuple[Size, ...]:
        return self.aval.shape

    @property
    def dtype(self) -> str:
        return self.aval.dtype

    @property
    def ndim(self) -> int:
        return len(self.aval.shape)

    @property
    def origin(self) -> Origin:
        return self.attrs["origin"]  # type: ignore[no-any-return]

    @property
    def users(self) -> tuple[Value, ...]:
        return tuple(Value(self.graph, i) for i in sorted(set(self.graph.nx.successors(self.id))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self.id == other.id and self.graph is other.graph

    def __hash__(self) -> int:
        return hash((id(self.graph), self.id))

    def __repr__(self) -> str:
        return f"%{self.id}"


class Graph:
    """Inputs, nodes in topological order, outputs. An output may be None (no gradient).

    `mutations` maps the index of an input to the value that must be written back into it when the graph has run.
    """

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self.nx = nx.MultiDiGraph()
        self.inputs: list[Value] = []
        self.outputs: list[Value | None] = []
        self.output_strides: list[tuple[Size, ...] | None] = []
        self.mutations: dict[int, Value] = {}
        self.attributes: dict[int, dict[str, Any]] = self.nx._node  # what the view `nx.nodes` shows, without the view
        self._interned: dict[Any, int] = {}
        self._shares = is_on("cse")
        self._next = 0

    # ------------------------------------------------------------------ building
    def input(
        self, aval: TensorType, name: str, strides: Sequence[Size] | None = None, is_top: bool = False
    ) -> Value:  # fmt: skip
        """A new input. `strides` (elements) default to row-major. is_top: the largest of each row of another graph."""
        layout = tuple(strides) if strides is not None else contiguous_strides(aval.shape)
        params = {"index": len(self.inputs), "name": name, "strides": layout} | ({"is_top": True} if is_top else {})
        value = self._add("input", (), params, (aval,), Origin(name=name))
        self.inputs.append(value)
        return value

    def input_like(self, source: Value) -> Value:
        """A new input of the type, name and strides of an input of another graph."""
        known = source.params
        return self.input(source.aval, known["name"], known["strides"], known.get("is_top", False))

    def emit(self, prim: str, args: Sequence[Value], params: dict[str, Any]) -> Value:
        """The node `prim(*args, **params)`: the one already there, or a new one with its type inferred."""
        if any(a.graph is not self for a in args):
            raise InvalidGraphError("an operand belongs to another graph", node=prim)
        key = (prim, tuple(a.id for a in args), tuple((k, exact_key(v)) for k, v in sorted(params.items())))
        pure = self._shares and not PRIMS[prim].effect
        if pure and key in self._interned:
            return Value(self, self._interned[key])
        avals = infer(prim, [a.avals for a in args], params)
        value = self._add(prim, tuple(a.id for a in args), params, avals, _origin.get())
        if pure:
            self._interned[key] = value.id
        return value

    def returning(
        self, outputs: Sequence[Value | None], strides: Sequence[tuple[Size, ...] | None] | None = None
    ) -> Graph:
        """Set the outputs; `strides` (elements) default to row-major. Returns the graph."""
        self.outputs = list(outputs)
        self.output_strides = (
            list(strides)
            if strides is not None
            else [None if o is None else contiguous_strides(o.shape) for o in outputs]
        )
        return self

    def copy(self) -> Graph:
        """The same graph apart: what is done to either is not done to the other."""
        copied = Graph(self.name)
        for node, attrs in self.attributes.items():
            copied.nx.add_node(node, **attrs)
            copied.nx.add_edges_from((arg, node, position, {}) for position, arg in enumerate(attrs["args"]))
        copied._interned, copied._next = dict(self._interned), self._next
        copied.inputs = [Value(copied, v.id) for v in self.inputs]
        copied.mutations = {i: Value(copied, v.id) for i, v in self.mutations.items()}
        return copied.returning([None if o is None else Value(copied, o.id) for o in self.outputs], self.output_strides)

    def _add(
        self, prim: str, args: tuple[int, ...], params: dict[str, Any], avals: tuple[TensorType, ...], origin: Origin
    ) -> Value:
        node = self._next
        self._next += 1
        self.nx.add_node(node, prim=prim, args=args, params=params, avals=avals, origin=origin)
        for position, arg in enumerate(args):
            self.nx.add_edge(arg, node, key=position)
        return Value(self, node)

    # ------------------------------------------------------------------ reading
    def __iter__(self) -> Iterator[Value]:
        """Every node, inputs included, operands before users."""
        return (Value(self, node) for node in self.nx)

    def __len__(self) -> int:
        return len(self.nx)

    @property
    def results(self) -> list[Value]:
        """The values that the graph must compute: outputs, then values written back."""
        return [o for o in self.outputs if o is not None] + list(self.mutations.values())

    def strides_of_output(self, value: Value) -> tuple[Size, ...] | None:
        """The strides with which a value leaves the graph; None where it is no output."""
        return next((s for o, s in zip(self.outputs, self.output_strides, strict=True) if o == value), None)

    def strides_of_outputs(self) -> dict[Value, tuple[Size, ...] | None]:
        """The same for all outputs, to ask for many."""
        ends = zip(reversed(self.outputs), reversed(self.output_strides), strict=True)
        return {o: s for o, s in ends if o is not None}

    def live(self) -> set[int]:
        """Ids of the nodes that a result, or a node with an effect, depends on."""
        todo = [v.id for v in self.results] + [i for i, a in self.attributes.items() if PRIMS[a["prim"]].effect]
        seen: set[int] = set()
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo.extend(self.attributes[node]["args"])
        return seen

    def order(self) -> list[Value]:
        """The live nodes other than inputs, operands first."""
        live = self.live()
        return [v for v in self if v.id in live and v.prim != "input"]


def exact_key(param: Any) -> Any:
    """A parameter as a key that tells 1, 1.0 and True apart, and 0.0 from -0.0; NaN equals itself."""
    return (type(param).__name__, repr(param)) if isinstance(param, (bool, int, float, complex)) else param


_building: ContextVar[Graph] = ContextVar("fusegrad_building")
_NOWHERE = Origin()
_origin: ContextVar[Origin] = ContextVar("fusegrad_origin", default=_NOWHERE)


@contextlib.contextmanager
def building(graph: Graph) -> Iterator[Graph]:
    """Within the block, `emit` adds to `graph`."""
    token = _building.set(graph)
    try:
        yield graph
    finally:
        _building.reset(token)


@contextlib.contextmanager
def provenance(origin: Origin) -> Iterator[None]:
    """Within the block, new nodes are recorded as coming from `origin`."""
    token = _origin.set(origin)
    try:
        yield
    finally:
        _origin.reset(token)


def emit(prim: str, *args: Value, **params: Any) -> Value:
    """`prim(*args, **params)` in the graph being built."""
    return _building.get().emit(prim, args, params)
