"""The node of a loop: `loop(length, carries, wholes) -> (*last carries, *stacked)`, and what it is to Python.

    body(t, *carries, *wholes) -> (*carries, *one step of each stacked)

Whatever calls it (a transform, an export, another tracer) runs the loop step by step, as it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.node import map_aggregate


@dataclass(frozen=True, eq=False)
class Loop:
    """A body, and how many values it carries from step to step; what else it returns is stacked."""

    body: fx.GraphModule
    carries: int

    def run(self, body: Callable[..., Any], length: int, carries: Sequence[Any], wholes: Sequence[Any]) -> Any:
        """All steps in order. body: its own, or one that does the same."""
        steps: list[Sequence[Any]] = []
        for t in range(length):
            results = body(t, *carries, *wholes)
            carries = results[: self.carries]
            steps.append(results[self.carries :])
        return (*carries, *map(_stacked, zip(*steps, strict=True)))


def _stacked(values: Sequence[Any]) -> Any:
    return torch.stack(values)  # type: ignore[arg-type]


def loop_function(body: fx.GraphModule, carries: int) -> Callable[..., Any]:
    """The target of a loop's node."""
    loop = Loop(body, carries)

    def call(length: int, carries: Sequence[Any], wholes: Sequence[Any]) -> Any:
        return loop.run(body, length, carries, wholes)

    call.__name__ = call.__qualname__ = "loop"
    call.fusegrad_loop = loop  # type: ignore[attr-defined]
    return call


def loop_of(target: Any) -> Loop | None:
    """The loop that a node's target is; None for all else."""
    return getattr(target, "fusegrad_loop", None)


def has_loop(gm: fx.GraphModule) -> bool:
    """True if a graph has the node of a loop."""
    return any(loop_of(node.target) is not None for node in gm.graph.nodes)


def operations(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """These nodes, each loop followed by the nodes of its body."""
    for node in nodes:
        yield node
        if (loop := loop_of(node.target)) is not None:
            yield from operations(loop.body.graph.nodes)


# ---------------------------------------------------------------------------------------------- on fakes
def applied(target: Any, args: Any, kwargs: Any) -> Any:
    """What a call gives on fakes; of a loop, the results of its first step as those of all."""
    loop = loop_of(target)
    return target(*args, **kwargs) if loop is None else fake_results(loop, *args)


def fx_results(graph: fx.Graph) -> Sequence[fx.Node]:
    """What a body returns."""
    return graph.output_node().args[0]  # type: ignore[return-value]


def values_of(graph: fx.Graph, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    """The values of all nodes of a body on fakes."""
    values = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = applied(node.target, args, kwargs)
    return values


def fake_results(loop: Loop, length: Any, carries: Sequence[Any], wholes: Sequence[Any]) -> tuple[Any, ...]:
    """Fakes of what a loop returns."""
    with disable_proxy_modes_tracing():
        values = values_of(loop.body.graph, [0, *carries, *wholes])
        outputs = [values[n] for n in fx_results(loop.body.graph)]
        last = [like(v) for v in outputs[: loop.carries]]
        return (*last, *(like(v, length) for v in outputs[loop.carries :]))


def like(fake: torch.Tensor, *sizes: Any) -> torch.Tensor:
    """Another of the same layout; with sizes in front, row-major."""
    if sizes:
        return torch.empty((*sizes, *fake.shape), dtype=fake.dtype, device=fake.device)
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


# ---------------------------------------------------------------------------------------------- as a step of a trace
class InnerLoop:
    """A loop as a step of a trace in which loops are looked for: every whole number in its body is an operand.

    operands: the length, what it carries, what its steps read, and those numbers, in order. key: equal for loops that
    do the same with theirs.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.key: Hashable = _key(loop)
        self.tags = {tag for node in _nodes(loop) for tag in getattr(node.target, "tags", ())}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InnerLoop) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return f"loop({', '.join(str(node.target) for node in _nodes(self.loop))})"

    def operands(self, args: Sequence[Any]) -> list[Any]:
        """Of the arguments of its node."""
        length, carries, wholes = args
        return [length, *carries, *wholes, *_numbers(self.loop)]

    def bound(self, operands: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
        """The target and the arguments of a node with these operands: numbers that are none yet are read as wholes."""
        length, *rest = operands
        wholes_at = self.loop.carries
        numbers_at = len(self.loop.body.graph.find_nodes(op="placeholder")) - 1
        loop, more = _with_numbers(self.loop, iter(rest[numbers_at:]))
        wholes = (*rest[wholes_at:numbers_at], *more)
        return loop_function(loop.body, loop.carries), (length, tuple(rest[:wholes_at]), wholes)


def _nodes(loop: Loop) -> Iterator[fx.Node]:
    """The calls of a body, those of the loops in it, too."""
    for node in loop.body.graph.nodes:
        if node.op == "call_function":
            inner = loop_of(node.target)
            yield from (node,) if inner is None else _nodes(inner)


def _is_number(value: Any) -> bool:
    return type(value) is int


def _numbers(loop: Loop) -> Iterator[int]:
    for node in loop.body.graph.nodes:
        if node.op == "call_function":
            if (inner := loop_of(node.target)) is not None:
                yield from _numbers(inner)
            yield from filter(_is_number, _leaves((node.args, node.kwargs)))


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    map_aggregate(value, lambda leaf: found.append(leaf) or leaf)  # type: ignore[func-returns-value]
    return found


def _key(loop: Loop) -> Hashable:
    index = {node: i for i, node in enumerate(loop.body.graph.nodes)}

    def word(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return "node", index[leaf]
        return "number" if _is_number(leaf) else (type(leaf).__name__, repr(leaf))

    def called(node: fx.Node) -> Hashable:
        inner = loop_of(node.target)
        arguments = repr(map_aggregate((node.args, node.kwargs), word))
        return node.op, node.target if inner is None else _key(inner), arguments, str(node.meta.get("fusegrad_origin"))

    return loop.carries, tuple(called(n) if n.op != "placeholder" else n.op for n in loop.body.graph.nodes)


def _with_numbers(loop: Loop, numbers: Iterator[Any]) -> tuple[Loop, list[Any]]:
    """The loop with other numbers in its body; those that are no plain ones as further wholes."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    more: list[Any] = []

    def given(value: Any) -> Any:
        if _is_number(value):
            return value
        more.append(value)
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            return graph.placeholder(f"number_{len(more) - 1}")

    def leaf(value: Any) -> Any:
        return env[value] if isinstance(value, fx.Node) else given(next(numbers)) if _is_number(value) else value

    for node in loop.body.graph.nodes:
        if node.op != "call_function":
            env[node] = graph.node_copy(node, env.__getitem__)
            continue
        target, further = node.target, list[Any]()
        if (inner := loop_of(target)) is not None:
            filled, values = _with_numbers(inner, numbers)
            target, further = loop_function(filled.body, filled.carries), [given(v) for v in values]
        args, kwargs = map_aggregate((node.args, node.kwargs), leaf)
        args = (*args[:-1], (*args[-1], *further)) if further else args
        env[node] = graph.call_function(target, args, kwargs)
        env[node].meta.update(node.meta)
    return Loop(fx.GraphModule({}, graph, "Loop"), loop.carries), more
