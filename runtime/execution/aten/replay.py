"""A captured graph as one straight Python function: operations bound once, values dropped after their last use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ....ir.switches import should_run
from ....tracer.loops.node import Loop, loop_of
from ....tracer.torch_private import operation
from .buffer_reuse import ReusedBuffer, last_uses_of_memory, reusable_buffers
from .unboxed_ops import bind_operations


def compile_fx(gm: GraphModule, name: str = "", reusing: bool = False) -> Callable[..., Any]:
    """`gm` without module calls and attribute look-ups: about half the host time of a call.

    reusing: results go into memory that is read no more, which is for plain tensors that autograd does not follow.
    """
    writer = _Writer(gm, reusable_buffers(gm) if reusing else {}, should_run("binding", name))
    for node in gm.graph.nodes:
        writer.write(node)
    return writer.function()


def compiled_loop(loop: Loop) -> Callable[..., Any]:
    """The call of a loop's node, its body as one straight function."""
    return functools.partial(loop.run, compile_fx(loop.body))


def step_by_step(gm: GraphModule, *values: Any) -> Any:
    """The results of `gm`, which no text is written for: for a graph that runs once."""
    supply, values_of = iter(values), dict[Node, Any]()
    dying = last_uses_of_memory(_last_uses(gm), {})
    for node in gm.graph.nodes:
        if node.op == "output":
            return map_arg(node.args[0], values_of.__getitem__)
        values_of[node] = _result(gm, node, values_of, supply)
        for dead in dying.get(node, ()):
            del values_of[dead]


def _result(gm: GraphModule, node: Node, values_of: dict[Node, Any], supply: Iterator[Any]) -> Any:
    if node.op == "placeholder":
        return next(supply)
    if node.op == "get_attr":
        return getattr(gm, str(node.target))
    target: Any = node.target
    return target(*map_arg(node.args, values_of.__getitem__), **map_arg(node.kwargs, values_of.__getitem__))


class _Writer:
    """Writes one line per node; operations, and constants without a literal, are globals of the function."""

    def __init__(self, gm: GraphModule, buffers: dict[Node, ReusedBuffer], unboxed: bool) -> None:
        self.gm, self.buffers = gm, buffers
        self.names: dict[Node, str] = {}
        self.bound: dict[str, Any] = {}
        self.parameters: list[str] = []
        self.lines: list[str] = []
        self.dying = last_uses_of_memory(_last_uses(gm), buffers)
        calls = [n for n in gm.graph.nodes if n.op == "call_function"]
        self.calls = bind_operations(calls) if unboxed else {n: operation(n.target) for n in calls}
        self.calls |= {n: compiled_loop(loop) for n in calls if (loop := loop_of(n.target)) is not None}

    def write(self, node: Node) -> None:
        name = self.names[node] = f"v{len(self.names)}"
        if node.op == "placeholder":
            self.parameters.append(name)
        elif node.op == "get_attr":
            self.names[node] = self.constant(getattr(self.gm, str(node.target)))
        elif node.op == "call_function":
            self.lines.append(f"{name} = {self.called(node)}")
        elif node.op == "output":
            self.lines.append(f"return {self.text(node.args[0])}")
        else:
            raise ValueError(f"a traced graph has no {node.op} nodes")
        if node.op != "output" and (dead := [self.names[d] for d in self.dying.get(node, ())]):
            self.lines.append(" = ".join(dead) + " = None")

    def called(self, node: Node) -> str:
        way = self.buffers.get(node)
        if way is None:
            return f"{self.constant(self.calls[node])}({self.arguments(node)})"
        into = [] if way.in_place else [f"out={self.names[way.memory]}"]
        text = f"{self.constant(way.call)}({self.arguments(node, into)})"
        return f"{text}.data" if way.is_result else text  # a result is as if it had never been written to

    def arguments(self, node: Node, more: Sequence[str] = ()) -> str:
        keywords = (f"{key}={self.text(value)}" for key, value in node.kwargs.items())
        return ", ".join([*map(self.text, node.args), *keywords, *more])

    def text(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, list | tuple):
            inner = "".join(f"{self.text(v)}, " for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self.text(v)}" for k, v in value.items()) + "}"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        return self.constant(value)

    def constant(self, value: Any) -> str:
        name = f"c{len(self.bound)}"
        self.bound[name] = value
        return name

    def function(self) -> Callable[..., Any]:
        body = "\n    ".join(self.lines)
        exec(f"def replay({', '.join(self.parameters)}):\n    {body}\n", self.bound)  # names and literals of our own
        return self.bound["replay"]  # type: ignore[no-any-return]


def _last_uses(gm: GraphModule) -> dict[Node, list[Node]]:
    read_later: set[Node] = set()
    last: dict[Node, list[Node]] = {}
    for node in reversed(gm.graph.nodes):
        dying = [a for a in dict.fromkeys(node.all_input_nodes) if a not in read_later and a.op != "get_attr"]
        if node.op == "call_function" and not node.users and node not in read_later:
            dying.append(node)
        read_later.update(dying)
        last[node] = dying
    return last
