"""Lowering: what a program computes is what its graph computes; what stays an `aten` node is counted."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic

from fusegrad.ir import Graph, verify
from fusegrad.ir.errors import LoweringError
from fusegrad.ir.evaluate import evaluate
from fusegrad.runtime.execution.aten import philox
from fusegrad.runtime.execution.aten.reference import run
from fusegrad.runtime.values.sizes import number
from fusegrad.tracer.lowering.aten import lower
from fusegrad.tracer.lowering.rules import round_to_dtype

from .capturing import capture, fakes_of, symbols
from .programs import TABLE, Program

LOW = {torch.bfloat16: (1e-2, 1e-2), torch.float16: (2e-3, 2e-3)}


def flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def extern(graph: Graph) -> list[str]:
    return [v.params["op"] for v in graph.order() if v.prim in ("aten", "aten_effect")]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    rtol, atol = LOW.get(want.dtype, (2e-5, 2e-5) if want.dtype == torch.float32 else (1e-9, 1e-9))
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("program", TABLE, ids=lambda p: p.name)
def test_lowered_program_computes_what_torch_does(program: Program) -> None:
    ours, theirs = program.inputs(), program.inputs()
    graph = verify(lower(*capture(program.function, program.inputs())))
    sizes = symbols(graph, ours)
    got, want = run(graph, ours, sizes), flat(program.function(*theirs))
    assert len(got) == len(want)
    for mine, reference, strides in zip(got, want, graph.output_strides, strict=True):
        assert mine is not None and strides is not None
        close(mine, reference)
        if reference.numel():
            significant = [(number(s, sizes), n) for s, n in zip(strides, reference.shape, strict=True)]
            assert [s for s, n in significant if n > 1] == [
                s for s, n in zip(reference.stride(), reference.shape, strict=True) if n > 1
            ]
    for mine, reference in zip(ours, theirs, strict=True):
        close(mine, reference)
    assert len(extern(graph)) == program.aten, extern(graph)
    if not extern(graph):
        agrees_with_numpy(graph, program.inputs(), want)


def agrees_with_numpy(graph: Graph, inputs: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """The evaluator, in float64, is as near to torch as the output dtype allows."""
    sizes = symbols(graph, inputs)
    arrays = [t.double().numpy() if t.is_floating_point() else t.numpy() for t in inputs]
    for mine, reference in zip(evaluate(graph, arrays, sizes), want, strict=True):
        assert mine is not None
        rtol, atol = LOW.get(reference.dtype, (1e-4, 1e-4))
        tensor = torch.from_numpy(np.ascontiguousarray(mine)).to(reference.dtype)
        torch.testing.assert_close(tensor.reshape(reference.shape), reference, rtol=rtol, atol=atol, equal_nan=True)


# ---------------------------------------------------------------------------------------------- what stays outside
def lowered(function: Any, *tensors: torch.Tensor) -> Graph:
    return verify(lower(*capture(function, tensors)))


def test_a_reshape_by_a_divisor_is_exact() -> None:
    graph = lowered(lambda a: a.view(a.shape[0], 2, -1) * 2, torch.ones(4, 6))
    (size,) = [v.params["shape"][2] for v in graph.order() if v.prim == "reshape"]
    assert size == graph.inputs[0].shape[1] / 2  # a fraction: the guard says that 2 divides it


def test_random_ops_are_effects_in_order_and_never_merged() -> None:
    def draw(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.rand_like(a), torch.rand_like(a), torch.bernoulli(a), a.clone().normal_()

    graph = lowered(draw, torch.full((4, 6), 0.5))
    assert [v.prim for v in graph.order() if v.prim.startswith("aten")] == ["aten_effect"] * 4
    assert [op.split(".")[1] for op in extern(graph)] == ["rand", "rand", "bernoulli", "normal_functional"]
    a = torch.full((4, 6), 0.5)
    torch.manual_seed(0)
    want = draw(a)
    torch.manual_seed(0)
    got = run(graph, [a], symbols(graph, [a]))
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True) if g is not None)


def test_dropout_draws_as_eager_does() -> None:
    a = torch.ones(8, 8)
    drop = lambda t: torch.nn.functional.dropout(t, 0.5)  # noqa: E731
    graph = lowered(drop, a)
    torch.manual_seed(3)
    want = drop(a)
    torch.manual_seed(3)
    (got,) = run(graph, [a], symbols(graph, [a]))
    assert got is not None and torch.equal(got, want)


def test_complex_values_stay_with_torch() -> None:
    graph = lowered(lambda a: torch.fft.fft(a).abs() + 1, torch.ones(4, 8))
    assert [v.prim for v in graph.order()][-2:] == ["full", "add"]
    (got,) = run(graph, [torch.ones(4, 8)], symbols(graph, [torch.ones(4, 8)]))
    assert got is not None
    torch.testing.assert_close(got, torch.fft.fft(torch.ones(4, 8)).abs() + 1)


def test_spec_has_words_sizes_and_operands() -> None:
    graph = lowered(lambda a: torch.rand(a.shape[0], 3, device=a.device, dtype=torch.float64), torch.ones(4))
    (node,) = [v for v in graph.order() if v.prim == "aten_effect"]
    args, named = node.params["spec"]
    assert args == ((graph.inputs[0].shape[0], 3),)
    assert dict(named)["dtype"] == ("dtype", "f64") and dict(named)["device"] == ("device", "")


def test_custom_ops_are_called() -> None:
    with torch.library._scoped_library("fusegrad_test", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
        graph = lowered(lambda a: torch.ops.fusegrad_test.double(a) + 1, torch.ones(4))
        assert extern(graph) == ["fusegrad_test.double.default"]
        assert torch.equal(run(graph, [torch.ones(4)], symbols(graph, [torch.ones(4)]))[0], torch.full((4,), 3.0))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("aten.nonzero", lambda a: torch.nonzero(a)),
        ("aten.index.Tensor", lambda a: a[a > 0]),
        ("aten.masked_select", lambda a: torch.masked_select(a, a > 0)),
        ("aten._local_scalar_dense", lambda a: a * a.sum().item()),
        ("aten.as_strided", lambda a: torch.as_strided(a.t(), (2, 2), (1, 1)) * 1),
    ],
)
def test_what_is_not_about_values_is_refused_by_name(name: str, function: Any) -> None:
    gm, fakes = capture(function, [torch.ones(4, 6)])
    with pytest.raises(LoweringError, match=name):
        lower(gm, fakes)


def test_large_constants_are_refused() -> None:
    numbers = torch.arange(600.0).sin().tolist()
    with pytest.raises(LoweringError, match="constant of 600"):
        lower(*capture(lambda a: a * torch.tensor(numbers).sum(), [torch.ones(4)]))


# ---------------------------------------------------------------------------------------------- edges of the graph
def test_inputs_have_names_and_strides_and_outputs_the_strides_of_the_capture() -> None:
    gm, fakes = capture(lambda a: (a * 2, a.t(), None), [torch.ones(6, 4).t()])
    graph = lower(gm, fakes, name="scale", input_names=["x"])
    (rows, columns), x = graph.inputs[0].shape, graph.inputs[0]
    assert (graph.name, x.params["name"], x.params["strides"]) == ("scale", "x", (1, rows))
    assert graph.outputs[2] is None and graph.output_strides == [(1, rows), (rows, 1), None]
    assert str(columns) != str(rows)


def test_mutated_inputs_are_on_record() -> None:
    graph = lowered(lambda a, b: a.add_(b), torch.ones(4), torch.ones(4))
    assert graph.mutations == {0: graph.outputs[0]}


def test_origin_is_the_line_and_the_last_node_of_a_line_has_its_name() -> None:
    gm, fakes = capture(lambda a: torch.sigmoid(a * 2) + 1, [torch.ones(4)])
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    for node, origin in zip(
        nodes, [("y", "f.py:1", "y = sigmoid(a * 2)")] * 2 + [(None, "f.py:2", "return y + 1")], strict=True
    ):
        node.meta["fusegrad_origin"] = origin
    graph = lower(gm, fakes)
    named = {v.prim: (v.origin.name, v.origin.op, v.origin.where) for v in graph.order() if v.prim != "full"}
    assert named == {
        "mul": (None, "aten.mul.Tensor", "f.py:1"),
        "sigmoid": ("y", "aten.sigmoid.default", "f.py:1"),
        "add": (None, "aten.add.Tensor", "f.py:2"),
    }


def test_a_nested_function_is_one_call_node() -> None:
    def target(a: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        return a * factor, a.sum(0)

    target.fusegrad_call = "Nested"  # type: ignore[attr-defined]
    gm, fakes = capture(lambda a: (a * 3.0, a.sum(0)), [torch.ones(4, 6)])
    made = torch.fx.Graph()
    a = made.placeholder("a")
    a.meta["val"] = fakes[0]
    twice = made.call_function(torch.ops.aten.mul.Tensor, (a, 2.0))
    call = made.call_function(target, (twice, 3.0))
    call.meta["val"] = tuple(n.meta["val"] for n in gm.graph.nodes if n.op == "call_function")
    first, second = (made.call_function(operator.getitem, (call, i)) for i in (0, 1))
    first.meta["val"], second.meta["val"] = call.meta["val"]
    changed = made.call_function(torch.ops.aten.add_.Tensor, (first, 1.0))
    changed.meta["val"] = first.meta["val"]
    made.output((changed, second))
    graph = verify(lower(torch.fx.GraphModule(torch.nn.Module(), made), fakes))
    assert [v.prim for v in graph.order() if v.prim in ("call", "pick")] == ["call", "pick", "pick"]
    x = torch.ones(4, 6)
    got = run(graph, [x], symbols(graph, [x]))
    assert torch.equal(got[0], x * 6 + 1) and torch.equal(got[1], (x * 2).sum(0))


def test_philox_is_the_random_primitive() -> None:
    def draw(a: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        numbers, _ = torch.ops.rngprims.philox_rand(a.shape, seed, offset, None, a.device, torch.float32)
        return a * (numbers > 0.5)

    tensors = [torch.ones(4, 6), torch.tensor(7), torch.tensor(3)]
    graph = lowered(draw, *tensors)
    assert [v.params["kind"] for v in graph.order() if v.prim == "random"] == ["uniform"]
    (got,) = run(graph, tensors, symbols(graph, tensors))
    numbers = philox.uniform(tensors[1], tensors[2], 24).reshape(4, 6)
    assert got is not None and torch.equal(got, (numbers > 0.5).float())


def test_what_was_read_before_a_write_keeps_its_value() -> None:
    def swap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        old = a.clone()
        a.copy_(b)
        b.copy_(old)
        return old.t()

    graph = lowered(swap, torch.zeros(2, 3), torch.ones(2, 3))
    a, b = torch.zeros(2, 3), torch.ones(2, 3)
    (old,) = run(graph, [a, b], symbols(graph, [a, b]))
    assert old is not None and old.eq(0).all() and a.eq(1).all() and b.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [0.1, 1e-9, 3.14159, 65519.0, 65520.0, 1e39, -0.3, 0.0, 1.00390625, 1.01171875])
def test_constants_of_low_floats_are_rounded(number: float, dtype: torch.dtype) -> None:
    name = "bf16" if dtype == torch.bfloat16 else "f16"
    assert round_to_dtype(number, name) == torch.tensor(number, dtype=dtype).item()


def test_several_devices_are_refused() -> None:
    for function in (lambda a: a.to("meta"), lambda a: (a + 1, torch.ones(3, device="meta"))):
        with pytest.raises(LoweringError, match="works on cpu and on meta"):
            lowered(function, torch.ones(4))


def test_views_of_memory_that_stay_with_torch_do_not_see_strides() -> None:
    graph = lowered(lambda a: a.t().contiguous().view(torch.int16), torch.ones(4, 6))
    (got,) = run(graph, [torch.ones(4, 6)], symbols(graph, [torch.ones(4, 6)]))
    assert got is not None and torch.equal(got, torch.ones(6, 4).view(torch.int16))


def test_sizes_that_are_arguments_are_symbols_of_the_graph() -> None:
    fakes = fakes_of([torch.ones(4, 6)])
    env = fakes[0].fake_mode.shape_env
    count = env.create_unspecified_symint_and_symbol(3, ConstantSource("count"), DimDynamic.DYNAMIC)
    with fakes[0].fake_mode, torch.no_grad():
        gm = make_fx(lambda a, k: (a * k, a[:k], a.shape[0] * k))(*fakes, count)
    graph = verify(lower(gm, [*fakes, count]))
    assert len(graph.inputs) == 1 and graph.outputs[2] is None
    a = torch.arange(24.0).reshape(4, 6)
    scaled, cut, _ = run(graph, [a], symbols(graph, [a]) | {count.node.expr: 3})
    assert scaled is not None and cut is not None
    assert torch.equal(scaled, a * 3) and torch.equal(cut, a[:3])
