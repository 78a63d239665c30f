"""The reference executor: sizes, memory, single nodes, and Triton's random numbers."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import sympy
import torch

from fusegrad.ir import Graph, TensorType, building, emit
from fusegrad.ir.prims import Arg
from fusegrad.runtime.execution.aten import philox, reference
from fusegrad.runtime.execution.aten.reference import call_node, order_of, run
from fusegrad.runtime.values.sizes import evaluate

n, m = sympy.symbols("n m", integer=True, positive=True)


def test_expressions_become_ints_where_they_are_whole() -> None:
    sizes = {n: 6, m: 4}
    found = [evaluate(e, sizes) for e in (n, n * m, n / 2, sympy.floor(m / 3), n / m, sympy.sqrt(m), 5, 0.5)]
    assert found == [6, 24, 3, 1, 1.5, 2, 5, 0.5]
    assert [type(f) for f in found] == [int, int, int, int, float, int, int, float]


def test_one_size_many_values() -> None:
    assert [evaluate(n * (n + 1) / 2, {n: k}) for k in (1, 2, 3, 4)] == [1, 3, 6, 10]


def chain(length: int) -> Graph:
    graph = Graph("chain")
    with building(graph):
        value = graph.input(TensorType((n,), "f32"), "x")
        for _ in range(length):
            value = emit("sin", value)
        return graph.returning([value])


def test_values_are_freed_after_their_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def counted(node: Any, x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(r() is not None for r in made))
        made.append(weakref.ref(result := torch.sin(x)))
        return result

    monkeypatch.setitem(reference.table, "sin", counted)
    run(chain(6), [torch.ones(3)], {n: 3})
    assert alive == [0, 1, 1, 1, 1, 1]


def test_a_graph_that_grew_is_ordered_again() -> None:
    graph = chain(1)
    before = len(order_of(graph).steps)
    with building(graph):
        assert graph.outputs[0] is not None
        graph.returning([emit("cos", graph.outputs[0])])
    assert (before, len(order_of(graph).steps)) == (1, 2)


def test_low_floats_accumulate_in_float32_and_round_once() -> None:
    graph = Graph("sum")
    with building(graph):
        x = graph.input(TensorType((n,), "bf16"), "x")
        graph.returning([emit("sum", x, axes=(0,)), emit("prod", x, axes=(0,))])
    x = torch.full((300,), 1.0, dtype=torch.bfloat16)
    total, product = run(graph, [x], {n: 300})
    assert total is not None and product is not None
    assert (total.item(), product.item(), total.dtype) == (300.0, 1.0, torch.bfloat16)


def test_aten_node_with_several_results() -> None:
    graph = Graph("sort")
    avals = (TensorType((n,), "f32"), TensorType((n,), "i64"))
    with building(graph):
        x = graph.input(TensorType((n,), "f32"), "x")
        spec = ((Arg(0),), (("dim", 0), ("descending", True)))
        both = emit("aten", x, op="aten.sort.default", spec=spec, avals=avals)
        graph.returning([emit("pick", both, index=1)])
    values, indices = call_node(both, [torch.tensor([1.0, 3.0, 2.0])], {n: 3})
    assert values.tolist() == [3.0, 2.0, 1.0] and indices.tolist() == [1, 2, 0]
    (picked,) = run(graph, [torch.tensor([1.0, 3.0, 2.0])], {n: 3})
    assert picked is not None and picked.tolist() == [1, 2, 0]


def test_words_of_torch_in_a_spec() -> None:
    graph = Graph("words")
    with building(graph):
        spec = (((n, 2),), (("dtype", ("dtype", "f64")), ("device", ("device", "")), ("layout", ("layout", "strided"))))
        graph.returning([emit("aten", op="aten.ones.default", spec=spec, avals=(TensorType((n, 2), "f64"),))])
    (ones,) = run(graph, [], {n: 3})
    assert ones is not None and (ones.shape, ones.dtype, ones.device.type) == ((3, 2), torch.float64, "cpu")


def test_philox_known_answers() -> None:
    """The vectors of Random123 for philox4x32-10."""
    words = philox.philox(torch.tensor(0), torch.tensor([0]))
    assert [hex(int(w)) for w in words] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


def test_uniform_and_normal_numbers() -> None:
    at = torch.tensor(123456789012), torch.tensor(4 * 77), 10_000
    uniform, normal = philox.uniform(*at), philox.normal(*at)
    assert uniform[:9:4].tolist() == pytest.approx([0.3971, 0.8755, 0.4042], abs=1e-4)  # as tl.rand has them from 77 on
    assert 0 <= uniform.min() and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.02
    assert abs(normal.mean()) < 0.05 and abs(normal.std() - 1) < 0.05
