"""The node of a loop made by hand: a body written in ATen operations, and a graph that is this node alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from .capturing import fakes_of

Tensor = torch.Tensor
Step = Callable[..., tuple[Sequence[Any], Sequence[Any]]]
"""step(t, carries, wholes) -> (carries, one step of each stacked), in operations of torch.ops."""


def run_eagerly(step: Step, length: int, carries: Sequence[Tensor], wholes: Sequence[Any]) -> list[Tensor]:
    """The loop, step by step."""
    given: list[Sequence[Tensor]] = []
    for t in range(length):
        carries, results = step(t, carries, wholes)
        given.append(results)
    return [*carries, *map(torch.stack, zip(*given, strict=True))]  # type: ignore[arg-type]


def body_of(step: Step, carries: int, wholes: int) -> fx.GraphModule:
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    names = ["t", *(f"carry_{i}" for i in range(carries)), *(f"whole_{i}" for i in range(wholes))]
    t, *rest = (fx.Proxy(graph.placeholder(n), tracer) for n in names)
    kept, results = step(t, rest[:carries], rest[carries:])
    graph.output(tuple(p.node for p in (*kept, *results)))
    return fx.GraphModule({}, graph)


class _Recording(fx.Interpreter):
    """Leaves the fakes of the first step in the nodes."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        n.meta["val"] = result
        return result


def looped(
    step: Step, carries: Sequence[Tensor], wholes: Sequence[Any], length: Callable[..., Any]
) -> tuple[fx.GraphModule, list[Any]]:
    """A graph of (carries, wholes) -> the results of the loop, and its fakes. length: of the fakes of wholes."""
    tensors = [w for w in wholes if isinstance(w, Tensor)]
    supply = iter(fakes_of([*carries, *tensors]))
    carried = [next(supply) for _ in carries]
    fakes = [next(supply) if isinstance(w, Tensor) else w for w in wholes]
    mode = (carried + [f for f in fakes if isinstance(f, Tensor)])[0].fake_mode
    with mode, torch.no_grad(), enable_python_dispatcher():
        body = body_of(step, len(carries), len(wholes))
        outputs = _Recording(body).run(0, *carried, *fakes)
        count = length(fakes)
        stacked = [torch.empty((count, *o.shape), dtype=o.dtype) for o in outputs[len(carries) :]]
        results = (*outputs[: len(carries)], *stacked)
    return _graph(body, count, [carried, fakes], results), [*carried, *(f for f in fakes if isinstance(f, Tensor))]


def loop_target(body: fx.GraphModule, carries: int) -> Callable[..., Any]:
    """What the node of a loop calls."""

    def loop(length: Any, init: Sequence[Tensor], wholes: Sequence[Any]) -> list[Tensor]:
        def step(t: Any, h: Any, w: Any) -> Any:
            results = body(t, *h, *w)
            return results[:carries], results[carries:]

        return run_eagerly(step, length, init, wholes)

    loop.fusegrad_loop = SimpleNamespace(body=body, carries=carries)  # type: ignore[attr-defined]
    return loop


def _graph(
    body: fx.GraphModule, count: Any, operands: Sequence[Sequence[Any]], results: Sequence[Any]
) -> fx.GraphModule:
    graph = fx.Graph()
    names: list[list[Any]] = []
    for kind, part in zip(("carry", "whole"), operands, strict=True):
        names.append([graph.placeholder(f"{kind}{i}") if isinstance(f, Tensor) else f for i, f in enumerate(part)])
        for node, fake in zip(names[-1], part, strict=True):
            if isinstance(node, fx.Node):
                node.meta["val"] = fake
    node = graph.call_function(loop_target(body, len(operands[0])), (count, tuple(names[0]), tuple(names[1])))
    node.meta["val"] = tuple(results)
    outputs = []
    for i, result in enumerate(results):
        outputs.append(graph.call_function(operator.getitem, (node, i)))
        outputs[-1].meta["val"] = result
    graph.output(tuple(outputs))
    return fx.GraphModule({}, graph)
