"""The most memory that a call holds at a time beside its arguments: of kernels and calls, and of the method in eager.

Counted from shapes, not measured: each value takes its bytes from the step that makes it to the last one that reads it,
and a view is its operand's memory. In eager, variables of a method live longer than that: its figure is a least one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ....codegen import Buffer, Kernels
from ....codegen.proofs import may_overwrite
from ....ir import Graph, Value
from ....ir.passes.fuse import Group, Step, View
from ....ir.passes.node_kinds import is_view as is_view_of_graph
from ....ir.types import ITEMSIZE
from ....tracer.trace import Trace
from ...execution.generated import Generated
from ...values.sizes import Sizes, number
from .eager_cost import fake_bytes, is_view, tensors_of

NOTHING: Mapping[Value, Value] = {}


@dataclass(frozen=True)
class PeakMemory:
    """Bytes at a time, results and what is saved for backward included, arguments not."""

    own: int
    """Of the kernels and calls."""
    eager: int | None = None
    """Of the method as written, at least; None where it was not counted."""

    def to_dict(self) -> dict[str, int | None]:
        """The same as plain values that json can write."""
        return asdict(self)

    def __str__(self) -> str:
        eager = "" if self.eager is None else f"; eager: at least {self.eager:,}"
        return f"peak memory beside the arguments: {self.own:,} bytes{eager}"


@dataclass(frozen=True)
class _Turn:
    """What one step makes, by the memory that it is in, and what it needs for itself; whose memory is free then."""

    made: Mapping[Any, int]
    transient: int
    freed: Sequence[Any]


def _most(turns: Iterable[_Turn]) -> int:
    held: dict[Any, int] = {}
    most = 0
    for turn in turns:
        held |= turn.made
        most = max(most, sum(held.values()) + turn.transient)
        for memory in turn.freed:
            held.pop(memory, None)
    return most


# ------------------------------------------------------------------ kernels and calls
def peak_of_kernels(graph: Graph, generated: Generated, sizes: Sizes, slabs: Mapping[int, int]) -> int:
    """The steps as a plan takes them, with the temporaries of each group while its kernels run.

    slabs: the bytes that a slab holds, of steps that walk some.
    """
    return _most(_turns_of_steps(graph, generated, sizes, slabs))


def _turns_of_steps(
    graph: Graph, generated: Generated, sizes: Sizes, slabs: Mapping[int, int]
) -> Iterator[_Turn]:
    lent = _memory_taken(generated)
    readers = Counter(_memory(v, lent).id for s in generated.steps for v in _read(s))
    returned = {_memory(v).id for v in graph.results}
    for at, step in enumerate(generated.steps):
        own = [] if isinstance(step, View) else [v for v in _written(step) if v not in lent]
        made = {v.id: _bytes(v, sizes) for v in own}
        within = slabs[at] if at in slabs else _transient(generated.kernels.get(at), sizes)
        yield _Turn(made, within, _freed(step, readers, returned, lent))


def _read(step: Step) -> Sequence[Value]:
    return step.inputs if isinstance(step, Group) else step.value.args


def _written(step: Step) -> Sequence[Value]:
    return step.outputs if isinstance(step, Group) else (step.value,)


def _memory_taken(generated: Generated) -> dict[Value, Value]:
    """By the result of a group that is proved to be computed in the memory of an operand, that operand."""
    lent: dict[Value, Value] = {}
    for at, (result, operand) in generated.over.items():
        step, kernels = generated.steps[at], generated.kernels.get(at)
        if isinstance(step, Group) and kernels and may_overwrite(step.graph, kernels, operand, result):
            lent[step.outputs[result]] = step.inputs[operand]
    return lent


def _memory(value: Value, lent: Mapping[Value, Value] = NOTHING) -> Value:
    """The value whose memory a view, or one of several results, is in."""
    while value in lent or value.prim == "pick" or (value.args and is_view_of_graph(value)):
        value = lent[value] if value in lent else value.args[0]
    return value


def _freed(step: Step, readers: Counter[int], returned: set[int], lent: Mapping[Value, Value]) -> list[int]:
    """What this step read last."""
    read = Counter(_memory(v, lent).id for v in _read(step))
    readers.subtract(read)
    return [i for i in read if not readers[i] and i not in returned]


def _bytes(value: Value, sizes: Sizes) -> int:
    return sum(number(t.nbytes, sizes) for t in value.avals)


def _transient(kernels: Kernels | None, sizes: Sizes) -> int:
    """Temporaries between the kernels of a group, and their scratch."""
    if kernels is None:
        return 0
    return _room(kernels.temporaries, sizes) + max((_room(k.scratch, sizes) for k in kernels.kernels), default=0)


def _room(buffers: Iterable[Buffer], sizes: Sizes) -> int:
    total = 0
    for buffer in buffers:
        count = ITEMSIZE[buffer.dtype]
        for n in buffer.shape:
            count *= number(n, sizes)
        total += count
    return total


# ------------------------------------------------------------------ in eager
def peak_of_trace(trace: Trace, sizes: Sizes) -> int:
    """The operations of a method as they were traced; what it returns and saves stays."""
    return _most(_turns_of_trace(trace.graph_module.graph, sizes))


def _turns_of_trace(graph: torch.fx.Graph, sizes: Sizes) -> Iterator[_Turn]:
    memory: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        memory[node] = memory[node.all_input_nodes[0]] if _is_operand(node) else node
    last = {memory[a]: node for node in graph.nodes for a in node.all_input_nodes}
    ends: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for made, node in last.items():
        if node.op != "output":
            ends.setdefault(node, []).append(made)
    for node in graph.nodes:
        makes = node.op == "call_function" and memory[node] is node
        size = sum(fake_bytes(t, sizes) for t in tensors_of(node.meta.get("val"))) if makes else 0
        unread = [node] if makes and node not in last else []
        yield _Turn({node: size} if makes else {}, 0, [*ends.get(node, ()), *unread])


def _is_operand(node: torch.fx.Node) -> bool:
    """Its result is in the memory of its first operand: a view, an operation in place, one of several results."""
    if not node.all_input_nodes or node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return getattr(node.target, "__name__", "") == "getitem"
    return is_view(schema) or any(r.alias_info is not None for r in schema.returns)
