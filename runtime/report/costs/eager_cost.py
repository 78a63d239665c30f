"""The cost of a method in eager: one launch for each operation that it calls, and the bytes that each moves."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from ....tracer.loops.node import Loop, loop_of
from ....tracer.trace import Trace
from ...values.sizes import Sizes, number

Tensor = torch.Tensor


@dataclass(frozen=True)
class AtenCall:
    """An operation of torch that runs by itself. Bytes are of device memory, each operand read once."""

    name: str
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True)
class EagerCost:
    """The launches of a method run in eager, and the bytes that they move: counted from its operations, not measured.

    An operation counts as one launch that reads each operand and writes each result once; views count as none.
    """

    launches: int
    """Operations that launch a kernel."""
    bytes: int
    """Bytes that they read and write."""
    at_least: bool = False
    """True where the method calls something that is not traceable, and so not counted."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values that json can write."""
        return {"launches": self.launches, "bytes": self.bytes, "at_least": self.at_least}


def eager_cost(trace: Trace, sizes: Sizes) -> EagerCost:
    """The cost of the operations that a trace of the user's method recorded."""
    calls = list(aten_calls(trace, sizes))
    moved = sum(c.bytes_read + c.bytes_written for c in calls)
    return EagerCost(len(calls), moved, bool(trace.opaque))


def aten_calls(trace: Trace, sizes: Sizes) -> Iterator[AtenCall]:
    """The operations of a trace in their order, without views; those of a loop in each of its steps."""
    yield from _calls(trace.graph_module.graph.nodes, sizes)


def _calls(nodes: Iterable[Any], sizes: Sizes) -> Iterator[AtenCall]:
    for node in nodes:
        if (loop := loop_of(node.target)) is not None:
            yield from _calls_of_loop(node, loop, sizes)
        schema = getattr(node.target, "_schema", None)
        results = list(tensors_of(node.meta.get("val")))
        if node.op != "call_function" or schema is None or not results or is_view(schema):
            continue
        operands = [t for n in node.all_input_nodes for t in tensors_of(n.meta.get("val"))]
        read, written = (sum(memory_bytes(t, sizes) for t in ts) for ts in (operands, results))
        yield AtenCall(str(node.target), read, written)


def _calls_of_loop(node: Any, loop: Loop, sizes: Sizes) -> Iterator[AtenCall]:
    """Every step's operations, and what stacks the values of all steps."""
    length = node.args[0].meta["val"] if hasattr(node.args[0], "meta") else node.args[0]
    steps = number(length.node.expr if isinstance(length, torch.SymInt) else length, sizes)
    for call in _calls(loop.body.graph.nodes, sizes):
        yield from itertools.repeat(call, steps)
    for stacked in list(tensors_of(node.meta.get("val")))[loop.carries :]:
        moved = memory_bytes(stacked, sizes)
        yield AtenCall("aten.stack.default", moved, moved)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors among the results of an operation."""
    for part in value if isinstance(value, tuple | list) else (value,):
        if isinstance(part, Tensor):
            yield part


def is_view(schema: Any) -> bool:
    """The operation moves nothing: its result is its operand's memory."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def memory_bytes(fake: Tensor, sizes: Sizes) -> int:
    """The bytes that a tensor's elements take, each place of memory once: an expanded axis counts as one element."""
    lengths = (n for n, stride in zip(fake.shape, fake.stride(), strict=True) if not _is_zero(stride))
    return _bytes(fake, lengths, sizes)


def fake_bytes(fake: Tensor, sizes: Sizes) -> int:
    """The bytes of a tensor of its shape that is contiguous."""
    return _bytes(fake, fake.shape, sizes)


def _is_zero(stride: Any) -> bool:
    return isinstance(stride, int) and stride == 0


def _bytes(fake: Tensor, lengths: Any, sizes: Sizes) -> int:
    total = fake.element_size()
    for size in lengths:
        total *= size_at(size, sizes)
    return total


def size_at(size: Any, sizes: Sizes) -> int:
    """A size of a fake as a number."""
    return size if isinstance(size, int) else number(size.node.expr, _sizes_assumed(size.node.expr, sizes))


def _sizes_assumed(expr: sympy.Expr, sizes: Sizes) -> Sizes:
    """The sizes; one that depends on data (of x[mask], say) counts as the largest of the others."""
    largest = max(sizes.values(), default=1)
    return sizes if expr.free_symbols <= set(sizes) else {**dict.fromkeys(expr.free_symbols, largest), **sizes}
