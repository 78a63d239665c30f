"""Results written into memory that nothing reads any more: on large tensors a fresh result costs more than its numbers.

    s = sigmoid(g); t = g * s; y = t * u      ->      s = sigmoid(g); mul(g, s, out=s); s.mul_(u)

Told from the captured graph alone: memory is taken only from a value that one of the graph's own operations made, of
the same shape, strides and dtype, once neither it nor anything that may look at the same memory is read again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .unboxed_ops import Operation, writing_overloads

Tensor = torch.Tensor
POINTWISE, RANDOM = torch.Tag.pointwise, torch.Tag.nondeterministic_seeded
APART = frozenset(
    "sum mean prod var std var_mean std_mean amax amin max min argmax argmin any all logsumexp cumsum cumprod norm "
    "linalg_vector_norm _softmax _log_softmax softmax log_softmax _to_copy mm bmm addmm baddbmm dot mv gather "
    "index_select index embedding cat stack full full_like zeros zeros_like ones ones_like empty empty_like arange "
    "scalar_tensor tril triu constant_pad_nd sort topk scatter scatter_add index_add index_put flip native_layer_norm "
    "new_zeros new_ones new_full new_empty where eq ne lt le gt ge".split()
)
"""ATen operations besides the pointwise ones whose results never share memory with an argument."""


@dataclass(frozen=True)
class ReusedBuffer:
    """The memory that a node's result is written to: whose it is, and how to call the operation for that.

    in_place: as a method of that memory, which is the first argument; else with `out=`. is_result: a result of
    the graph looks at it.
    """

    memory: Node
    call: Operation
    in_place: bool
    is_result: bool


def reusable_buffers(gm: GraphModule) -> dict[Node, ReusedBuffer]:
    """The nodes that need no memory of their own."""
    lives = _Lives(gm)
    targets = dict(_reusable_memory(lives))
    ways = writing_overloads([*targets.items()])
    return {n: ReusedBuffer(targets[n], *way, lives.is_kept(n)) for n, way in ways.items()}


class _Lives:
    """The memory that each node may look at, and the last reading of it."""

    def __init__(self, gm: GraphModule) -> None:
        self.nodes = list(gm.graph.nodes)
        self.shared: dict[Node, Node] = {}
        self.last: dict[Node, int] = {}
        self.escaping: set[Node] = set()
        for node in self.nodes:
            self._add(node)
        for at, node in enumerate(self.nodes):
            for argument in (*node.all_input_nodes, node):
                self.last[self.root(argument)] = at
            if node.op in ("output", "placeholder", "get_attr") or _may_hold_on(node):
                self.escaping.update(map(self.root, (*node.all_input_nodes, node)))

    def _add(self, node: Node) -> None:
        self.shared[node] = node
        if node.op == "call_function" and not _owns_memory(node):
            for argument in node.all_input_nodes:
                self.shared[self.root(argument)] = self.root(node)

    def root(self, node: Node) -> Node:
        while self.shared[node] is not node:
            node = self.shared[node]
        return node

    def is_kept(self, node: Node) -> bool:
        """True where code outside the graph may see this memory, before or after it ran."""
        return self.root(node) in self.escaping

    def ends(self, node: Node) -> int:
        """The place of the node that is the last to read this memory."""
        return self.last[self.root(node)]

    def only(self, memory: Node, reader: Node) -> bool:
        """True where the reader sees that memory, if at all, through its own node alone."""
        return all(a is memory or self.root(a) is not self.root(memory) for a in reader.all_input_nodes)


def _reusable_memory(lives: _Lives) -> Iterator[tuple[Node, Node]]:
    """(node, the node whose memory it may take), each memory given away once: an operand's own first."""
    free: list[Node] = []
    for at, node in enumerate(lives.nodes):
        if not _is_pointwise(node):
            continue
        fitting = [m for m in free if lives.ends(m) <= at and _layout(m) == _layout(node) and lives.only(m, node)]
        fitting.sort(key=lambda m: (m not in node.args[:1], m not in node.all_input_nodes))
        if fitting:
            free.remove(fitting[0])
            yield node, fitting[0]
        if not lives.is_kept(node):
            free.append(node)


def _is_aten(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims")


def _writes_or_views(node: Node) -> bool:
    schema: Any = node.target._schema  # type: ignore[union-attr]
    return any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))


def _owns_memory(node: Node) -> bool:
    """True where the result of a node shares memory with none of its arguments."""
    if not _is_aten(node) or _writes_or_views(node):
        return False
    target: Any = node.target
    return POINTWISE in target.tags or target._schema.name.removeprefix("aten::") in APART


def _may_hold_on(node: Node) -> bool:
    """True where a call may keep its arguments, as anything but torch's own operations may."""
    return node.op == "call_function" and not _is_aten(node) and node.target is not operator.getitem


def _is_pointwise(node: Node) -> bool:
    """True where a node makes one tensor, element by element, and no random numbers."""
    if node.op != "call_function" or not _owns_memory(node) or not isinstance(node.meta.get("val"), Tensor):
        return False
    tags = node.target.tags  # type: ignore[union-attr]
    return POINTWISE in tags and RANDOM not in tags


def _layout(node: Node) -> tuple[Any, ...]:
    """The facts that must be equal; sizes by their expressions, so that nothing is assumed of them."""
    fake = node.meta["val"]
    return (fake.dtype, fake.device, _expressions(fake.shape), _expressions(fake.stride()))


def _expressions(sizes: Sequence[Any]) -> tuple[str, ...]:
    return tuple(str(n.node.expr) if isinstance(n, torch.SymInt) else str(n) for n in sizes)


def last_uses_of_memory(
    dying: Mapping[Node, list[Node]], buffers: Mapping[Node, ReusedBuffer]
) -> dict[Node, list[Node]]:
    """The names to let go after each node: memory that is to be taken stays until then."""
    until = {way.memory: node for node, way in buffers.items()}
    later = {at: [n for n in dead if n not in until] for at, dead in dying.items()}
    for memory, node in until.items():
        later.setdefault(node, []).append(memory)
    return later
