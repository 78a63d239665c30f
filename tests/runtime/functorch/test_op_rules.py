"""Rules of single operations out of torch.func, beside torch's transforms, at sizes that they were not traced at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch

from fusegrad.ir import Graph, building, emit, verify
from fusegrad.ir.prims import Arg
from fusegrad.ir.transforms.batch import batch
from fusegrad.ir.transforms.extern import NoRuleError
from fusegrad.ir.transforms.linearize import linearize
from fusegrad.ir.transforms.transpose import vjp
from fusegrad.ir.types import TensorType
from fusegrad.runtime.execution.aten import reference
from fusegrad.runtime.functorch.batching.op_rules import OP_RULES
from fusegrad.runtime.values.sizes import number

M, N, B = (sympy.Symbol(n, integer=True, positive=True) for n in "mnb")
X = TensorType((M, N), "f64")
AT = [{M: 3, N: 5, B: 4}, {M: 6, N: 2, B: 7}]
Build = Callable[..., Any]


def op(name: str, types: tuple[TensorType, ...], *spec: Any, count: int = 1, **named: Any) -> Graph:
    """A graph of one operation: `spec` are its arguments, Arg(i) for operand i."""
    graph = Graph("g")
    xs = [graph.input(t, f"x{i}") for i, t in enumerate(types[:-count])]
    with building(graph):
        call = (tuple(spec), tuple(named.items()))
        node = emit("aten", *xs, op=f"aten.{name}", spec=call, avals=types[-count:])
        results = [node] if count == 1 else [emit("pick", node, index=i) for i in range(count)]
    return graph.returning(results)


INTEGERS = TensorType((M, N), "i64")
SQUARE, COLUMN = TensorType((4, 4), "f64"), TensorType((4, N), "f64")
OPS: dict[str, Graph] = {
    "sort": op("sort.default", (X, X, INTEGERS), Arg(0), 1, False, count=2),
    "logcumsumexp": op("logcumsumexp.default", (X, X), Arg(0), 1),
    "cumprod": op("cumprod.default", (X, X), Arg(0), 0),
    "solve": op("linalg_solve_triangular.default", (SQUARE, COLUMN, COLUMN), Arg(0), Arg(1), upper=True),
    "inverse": op("linalg_inv_ex.default", (SQUARE, SQUARE, TensorType((), "i32")), Arg(0), count=2),
}
RENORM = op("renorm.default", (X, X), Arg(0), 2.0, 0, 1.0)


def drawn(graph: Graph, sizes: dict[Any, int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for value in graph.inputs:
        shape = [number(n, sizes) for n in value.shape]
        x = torch.randn(shape, dtype=torch.float64, generator=generator)
        found.append(x + 4 * torch.eye(4, dtype=x.dtype) if shape[-2:] == [4, 4] else x)
    return found


def run(graph: Graph, values: list[torch.Tensor], sizes: dict[Any, int]) -> list[Any]:
    return list(reference.run(graph, values, sizes))


def as_function(graph: Graph, sizes: dict[Any, int]) -> Build:
    """The graph through torch, node by node, under whatever transform there is."""

    def call(*xs: torch.Tensor) -> tuple[Any, ...]:
        known: dict[int, Any] = {v.id: x for v, x in zip(graph.inputs, xs, strict=True)}
        for value in graph.order():
            if value.prim != "input":
                known[value.id] = reference.call_node(value, [known[a.id] for a in value.args], sizes)
        return tuple(known[o.id] for o in graph.outputs if o is not None)

    return call


@pytest.mark.parametrize("sizes", AT, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_batch(name: str, sizes: dict[Any, int]) -> None:
    graph = OPS[name]
    mapped = (True, *[False] * (len(graph.inputs) - 1))
    found = batch(graph, mapped, B, OP_RULES)
    verify(found.graph)
    values = drawn(graph, sizes)
    many = [drawn(graph, sizes, seed)[0] for seed in range(sizes[B])]
    got = run(found.graph, [torch.stack(many), *values[1:]], sizes)
    for i in range(len(graph.outputs)):
        lanes = torch.stack([run(graph, [x, *values[1:]], sizes)[i] for x in many])
        torch.testing.assert_close(got[i] if found.mapped[i] else got[i].expand(lanes.shape), lanes)


@pytest.mark.parametrize("sizes", AT, ids=str)
@pytest.mark.parametrize("name", ["sort", "logcumsumexp", "solve"])
def test_derivatives(name: str, sizes: dict[Any, int]) -> None:
    graph = OPS[name]
    wrt = tuple(range(len(graph.inputs)))
    values = drawn(graph, sizes)
    if name == "solve":
        values[0] = values[0].triu()
    tangents, f = drawn(graph, sizes, 9), as_function(graph, sizes)
    outputs, moved = torch.func.jvp(f, tuple(values), tuple(tangents))
    pushed = linearize(graph, wrt, OP_RULES)
    got = run(verify(pushed), [*values, *tangents], sizes)
    floats = [i for i, o in enumerate(outputs) if o.is_floating_point()]
    for i in floats:
        torch.testing.assert_close(got[i], moved[i])
    weights = [torch.randn_like(outputs[i]) for i in floats]
    expected = torch.func.vjp(lambda *xs: tuple(f(*xs)[i] for i in floats), *values)[1](tuple(weights))
    pulled = vjp(graph, wrt, tuple(floats), OP_RULES)
    for mine, theirs in zip(run(verify(pulled), [*values, *weights], sizes), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_rule_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batch(OPS["cumprod"], (True,), B, OP_RULES)
    monkeypatch.setattr("fusegrad.runtime.functorch.batching.op_rules._traced", None)
    batch(OPS["cumprod"], (True,), B, OP_RULES)


@pytest.mark.parametrize("derive", [
    lambda: batch(RENORM, (True,), B, OP_RULES),  # torch's rule is a loop over the lanes that there are
    lambda: vjp(OPS["cumprod"], (0,), (0,), OP_RULES),
], ids=["batch", "vjp"])  # fmt: skip
def test_a_rule_that_holds_for_one_size_is_none(derive: Callable[[], Any]) -> None:
    with pytest.raises(NoRuleError, match="has a rule that holds for some sizes alone"):
        derive()


@pytest.mark.parametrize("effect", ["aten_effect", "call"])
def test_what_is_no_pure_operation_is_refused_by_name(effect: str) -> None:
    graph = Graph("g")
    x = graph.input(X, "x")
    with building(graph):
        named = {"op": "aten.bernoulli.default"} if effect == "aten_effect" else {"target": "nested"}
        graph.returning([emit(effect, x, **named, spec=((Arg(0),), ()), avals=(X,))])
    with pytest.raises(NoRuleError, match="is no pure operation"):
        batch(graph, (True,), B, OP_RULES)
