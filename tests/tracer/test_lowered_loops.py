"""The node of a loop, made by hand, lowered to a `scan`: what a step reads, by which index, beside the plain loop."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import sympy
import torch
from torch._higher_order_ops.scan import scan as higher_order_scan

from fusegrad.ir import Graph, TensorType, building, emit, verify
from fusegrad.ir.errors import LoweringError
from fusegrad.ir.loops.body import Body
from fusegrad.runtime.execution.aten import reference
from fusegrad.tracer.lowering.aten import lower
from fusegrad.tracer.lowering.numbers import numbers_as_tensors

from .capturing import capture, fakes_of, symbols
from .looping import Step, body_of, loop_target, looped, run_eagerly

aten = torch.ops.aten


class Case(NamedTuple):
    """`wholes(length)`; `length` of their fakes; `xs`: how many operands of the scan are read step by step."""

    step: Step
    wholes: Callable[[int], Sequence[Any]]
    xs: int
    length: Callable[..., Any] = lambda w: w[0].shape[0]


def rows(n: int, *shape: int) -> torch.Tensor:
    return torch.randn(n, *(shape or (3,)), dtype=torch.float64)


def at(x: Any, t: Any, axis: int = 0) -> Any:
    return aten.select.int(x, axis, t)


def _gated(t: Any, h: Any, w: Any) -> Any:
    new = aten.add.Tensor(aten.mul.Tensor(h[0], at(w[0], t)), at(w[1], t))
    return [new], [new]


def _from_the_end(t: Any, h: Any, w: Any) -> Any:
    new = aten.add.Tensor(aten.mul.Tensor(h[0], at(w[0], -1 - t)), at(w[1], w[2] - 1 - t))
    return [new], [new]


def _shifted(t: Any, h: Any, w: Any) -> Any:
    return [aten.sub.Tensor(at(w[1], t + 1), aten.mul.Tensor(at(w[0], t), h[0]))], [at(w[1], t)]


def _every_other(t: Any, h: Any, w: Any) -> Any:
    return [aten.add.Tensor(h[0], at(w[1], 2 * t + 1))], [aten.mul.Tensor(at(w[0], t), h[0])]


def _columns(t: Any, h: Any, w: Any) -> Any:
    new = aten.tanh.default(aten.add.Tensor(at(w[0], t, 1), aten.mm.default(h[0], w[1])))
    return [new], [aten.sum.dim_IntList(new, [1])]


def _counted(t: Any, h: Any, w: Any) -> Any:
    """The number of the step among the values: as a factor, compared with, and in a mask."""
    first = aten.eq.Scalar(aten.mul.Tensor(aten.add.Tensor(at(w[0], t), 0.0), 0.0), t)
    new = aten.add.Tensor(aten.mul.Tensor(h[0], 0.5), aten.mul.Tensor(at(w[0], t), 3 * t + 1))
    return [aten.where.self(first, at(w[0], t), new)], [new]


def _window(t: Any, h: Any, w: Any) -> Any:
    return [aten.add.Tensor(h[0], aten.sum.dim_IntList(aten.slice.Tensor(w[1], 0, t, t + 3), [0]))], [at(w[0], t)]


def _put(t: Any, h: Any, w: Any) -> Any:
    """A carried buffer that is written at t, and read where it was written before."""
    before = aten.select.int(h[0], 0, t)
    return [aten.select_scatter.default(h[0], aten.add.Tensor(before, at(w[0], t)), 0, t)], [before]


def _whole_too(t: Any, h: Any, w: Any) -> Any:
    """A whole that is read at t, and as it is."""
    return [aten.add.Tensor(aten.mul.Tensor(h[0], at(w[0], t)), aten.mean.dim(w[0], [0]))], []


def _dropout(t: Any, h: Any, w: Any) -> Any:
    return [aten.mul.Tensor(h[0], aten.rand_like.default(at(w[0], t)))], []


def _both_ends(t: Any, h: Any, w: Any) -> Any:
    return [aten.add.Tensor(h[0], at(w[0], t - 1))], []


def _squares(t: Any, h: Any, w: Any) -> Any:
    return [aten.add.Tensor(h[0], at(w[0], t * t))], []


CASES = {
    "gated": Case(_gated, lambda n: [rows(n), rows(n)], 2),
    "from the end": Case(_from_the_end, lambda n: [rows(n), rows(6), 6], 2),
    "shifted": Case(_shifted, lambda n: [rows(n), rows(n + 1)], 3),
    "every other": Case(_every_other, lambda n: [rows(n), rows(2 * n + 1)], 2),
    "columns": Case(_columns, lambda n: [rows(3, n, 3), rows(3, 3)], 1, lambda w: w[0].shape[1]),
    "counted": Case(_counted, lambda n: [rows(n)], 2),
    "window": Case(_window, lambda n: [rows(n), rows(n + 2)], 4),
    "put": Case(_put, lambda n: [rows(n)], 2),
    "whole too": Case(_whole_too, lambda n: [rows(n)], 1),
}


def carry(name: str) -> list[torch.Tensor]:
    return [rows(3, 3) if name == "columns" else rows(7, 3) if name == "put" else rows(3)]


def lowered(name: str, case: Case, length: int) -> tuple[Graph, list[torch.Tensor], list[torch.Tensor]]:
    """The graph, tensors for it, and what the plain loop makes of them."""
    torch.manual_seed(0)
    carries, wholes = carry(name), list(case.wholes(length))
    gm, fakes = looped(case.step, carries, wholes, case.length)
    graph = verify(lower(gm, fakes))
    tensors = [*carries, *(w for w in wholes if isinstance(w, torch.Tensor))]
    return graph, tensors, run_eagerly(case.step, length, carries, wholes)


@pytest.mark.parametrize("name", CASES)
def test_a_loop_is_one_scan(name: str) -> None:
    graph, tensors, expected = lowered(name, CASES[name], 5)
    (scan,) = (v for v in graph.order() if v.prim == "scan")
    assert scan.params["steps"] == CASES[name].xs and not scan.params["reverse"]
    found = reference.run(graph, tensors, symbols(graph, tensors))
    torch.testing.assert_close(found, expected)


def test_its_length_is_a_symbol() -> None:
    graph, tensors, _ = lowered("gated", CASES["gated"], 5)
    for length in (2, 3, 9):
        others = [tensors[0], rows(length), rows(length)]
        found = reference.run(graph, others, symbols(graph, others))
        torch.testing.assert_close(found, run_eagerly(_gated, length, others[:1], others[1:]))


REFUSED = {
    "random numbers": (_dropout, "draws random numbers"),
    "both ends": (_both_ends, "from both ends"),
    "squares": (_squares, "do not follow each other"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_scan_is_refused_with_its_reason(name: str) -> None:
    step, reason = REFUSED[name]
    gm, fakes = looped(step, [rows(3)], [rows(5)], lambda w: w[0].shape[0])
    with pytest.raises(LoweringError, match=reason):
        lower(gm, fakes)


def test_numbers_from_data_are_given_to_the_steps() -> None:
    """A constant of a body that is made of a number which a method read: read once, outside."""
    number = sympy.Symbol("zf0", real=True)
    body, graph = Graph("step"), Graph("loop")
    h, x = body.input(TensorType((3,), "f64"), "h"), body.input(TensorType((3,), "f64"), "x")
    with building(body):
        scaled = emit("mul", h, emit("full", value=2 * number, shape=(3,), dtype="f64"))
        body.returning([emit("add", scaled, x)])
    start, xs = graph.input(TensorType((3,), "f64"), "start"), graph.input(TensorType((4, 3), "f64"), "xs")
    with building(graph):
        params = {"body": Body(body), "carries": 1, "steps": 1, "length": 4, "reverse": False}
        graph.returning([emit("scan", start, xs, **params)])
    after = verify(numbers_as_tensors(graph))
    prims = [v.prim for v in after.order()]
    assert prims.count("call") == 1 and prims.index("call") < prims.index("scan")
    expected = first = rows(3)
    steps = rows(4)
    for step in steps:
        expected = expected * 0.5 + step
    torch.testing.assert_close(reference.run(after, [first, steps], {number: 0.25}), [expected])


INNER = loop_target(body_of(_gated, 1, 2), 1)


def _nested(t: Any, h: Any, w: Any) -> Any:
    """A loop over the rows of each step."""
    results = h[0].tracer.create_proxy("call_function", INNER, (4, (h[0],), (at(w[0], t), at(w[1], t))), {})
    return [results[0]], [aten.sum.dim_IntList(results[1], [0])]


def test_a_loop_in_a_loop() -> None:
    torch.manual_seed(0)
    tensors = [rows(3), rows(5, 4, 3), rows(5, 4, 3)]
    gm, fakes = looped(_nested, tensors[:1], tensors[1:], lambda w: w[0].shape[0])
    graph = verify(lower(gm, fakes))
    (scan,) = (v for v in graph.order() if v.prim == "scan")
    assert [v.prim for v in scan.params["body"].graph.order()].count("scan") == 1
    h, inner, found = tensors[0], [], reference.run(graph, tensors, symbols(graph, tensors))
    for a, x in zip(*tensors[1:], strict=True):
        h, each = run_eagerly(_gated, 4, [h], [a, x])
        inner.append(each.sum(0))
    torch.testing.assert_close(found, [h, torch.stack(inner)])


# ---------------------------------------------------------------------------------------------- loops of torch's own
def _scanned(h: torch.Tensor, x: torch.Tensor, a: torch.Tensor) -> Any:
    def step(carry: torch.Tensor, each: Any) -> Any:
        new = torch.tanh(carry * 0.5 + each[0]) * each[1]
        return new, new.sum(0) + carry.mean()

    return higher_order_scan(step, h, (x, a), dim=0)


def _scanned_back(h: torch.Tensor, x: torch.Tensor, a: torch.Tensor) -> Any:
    return higher_order_scan(lambda c, e: (c * e, c + e), h, x * a, dim=0, reverse=True)


@pytest.mark.parametrize("function", [_scanned, _scanned_back])
def test_the_scan_of_torch_is_a_scan(function: Any) -> None:
    tensors = [rows(3), rows(5), rows(5)]
    gm, fakes = capture(function, tensors)
    graph = verify(lower(gm, fakes))
    assert [v.prim for v in graph.order()].count("scan") == 1
    torch.testing.assert_close(reference.run(graph, tensors, symbols(graph, tensors)), list(function(*tensors)))


def _running(p: Any, q: Any, x: Any, y: Any) -> list[Any]:
    """(decay, value) pairs of a linear recurrence."""
    return [aten.mul.Tensor(p, x), aten.add.Tensor(aten.mul.Tensor(q, x), y)]


def test_an_associative_scan_begins_with_its_first_step() -> None:
    """The node as torch traces it on a GPU: on CPUs it is traced through."""
    tensors = [rows(6), rows(6)]
    fakes = fakes_of(tensors)
    owner, graph = torch.nn.Module(), torch.fx.Graph()
    owner.combine = torch.fx.symbolic_trace(_running)
    xs = [graph.placeholder(n) for n in "xy"]
    for node, fake in zip(xs, fakes, strict=True):
        node.meta["val"] = fake
    call = graph.call_function(torch.ops.higher_order.associative_scan, (graph.get_attr("combine"), xs, ()))
    call.meta["val"] = fakes
    graph.output(tuple(graph.call_function(operator.getitem, (call, i)) for i in (0, 1)))
    lowered_graph = verify(lower(torch.fx.GraphModule(owner, graph), fakes))
    assert [v.prim for v in lowered_graph.order()].count("scan") == 1
    expected = [list(t) for t in zip(*tensors, strict=True)]
    for before, after in pairwise(expected):
        after[:] = _running(*before, *after)
    found = reference.run(lowered_graph, tensors, symbols(lowered_graph, tensors))
    torch.testing.assert_close(found, [torch.stack(part) for part in zip(*expected, strict=True)])
