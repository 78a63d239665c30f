"""Fuse: what runs together, what is stored, what is a view, in an order that computes the same."""

import random

import pytest
import sympy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusegrad.ir import Graph, TensorType, Value, building, emit, provenance, show, verify
from fusegrad.ir.graph import Origin
from fusegrad.ir.passes.cost import bytes_read, estimate, minimal_bytes
from fusegrad.ir.passes.fuse import Extern, Fuse, Group, Step
from fusegrad.ir.passes.simplify import Simplify
from fusegrad.ir.prims import Arg

M = sympy.Symbol("M", integer=True, positive=True)
WIDE = TensorType((M, 64), "f32")
LOW = TensorType((M, 64), "bf16")


@example(1662)  # a view that is called apart, with a view of it among the results
@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_steps_of_random_graphs_compute_the_same(grow, same_steps, seed: int) -> None:
    """With any nodes called apart, so that groups have to be cut around them."""
    graph = Simplify()(grow(seed, 40))
    nodes = [v.id for v in graph.order()]
    apart = frozenset(random.Random(seed).sample(nodes, len(nodes) // 4))
    steps = Fuse(apart)(graph)
    for step in steps:
        assert not isinstance(step, Group) or verify(step.graph)
    same_steps(graph, steps, seed)
    assert {s.value.id for s in steps if isinstance(s, Extern)} == set(nodes) & apart


def groups(steps: list[Step]) -> list[Group]:
    return [s for s in steps if isinstance(s, Group)]


def shape_of(steps: list[Step]) -> str:
    return " ".join(type(s).__name__ if isinstance(s, Group) else f"{type(s).__name__}:{s.value.prim}" for s in steps)


def start(*types: TensorType) -> tuple[Graph, list[Value]]:
    graph = Graph("g")
    return graph, [graph.input(t, f"x{i}") for i, t in enumerate(types)]


def rows(x: Value) -> Value:
    return emit("broadcast", emit("sum", x, axes=(1,)), shape=x.shape, axes=(0,))


def matmul(x: Value, w: Value) -> Value:
    return emit("dot", x, w, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))


def test_connected_nodes_are_one_group() -> None:
    graph, (x, w) = start(WIDE, TensorType((64,), "f32"))
    with building(graph):
        y = emit("mul", x, rows(emit("exp", x)))
        w_bar = emit("sum", emit("mul", y, emit("broadcast", w, shape=x.shape, axes=(1,))), axes=(0,))
        graph.returning([y, w_bar])
    (group,) = Fuse()(graph)
    assert isinstance(group, Group)
    assert (group.inputs, group.outputs) == ((x, w), (y, w_bar))
    assert group.graph.name == "g"


def test_outputs_that_read_the_same_inputs_are_one_group() -> None:
    graph, (x, g) = start(WIDE, WIDE)
    with building(graph):
        graph.returning([emit("mul", g, emit("exp", x)), emit("sum", g, axes=(0,)), emit("sum", x, axes=(1,))])
    assert shape_of(Fuse()(graph)) == "Group"


def test_a_view_of_the_same_input_is_the_same_space() -> None:
    graph, (x,) = start(TensorType((M, 8, 8), "f32"))
    with building(graph):
        flat = emit("reshape", x, shape=(8 * M, 8))
        graph.returning([emit("exp", x), emit("sum", flat, axes=(0,))])
    assert shape_of(Fuse()(graph)) == "Group"


@pytest.mark.parametrize("shared", [True, False])
def test_unrelated_outputs_are_two_groups(shared: bool) -> None:
    graph, (x, y, w) = start(WIDE, TensorType((M, 32), "f32"), TensorType((), "f32"))
    with building(graph):
        factors = [emit("broadcast", w, shape=v.shape, axes=()) for v in (x, y)] if shared else [x, y]
        graph.returning([emit("mul", v, f) for v, f in zip((x, y), factors, strict=True)])
    assert shape_of(Fuse()(graph)) == "Group Group"


def test_a_call_cuts() -> None:
    graph, (x, w) = start(WIDE, TensorType((64, 64), "f32"))
    with building(graph):
        h = emit("exp", x)
        y = matmul(h, w)
        graph.returning([emit("add", y, rows(y))])
    steps = Fuse()(graph)
    assert shape_of(steps) == "Group Extern:dot Group"
    assert groups(steps)[0].outputs == (h,)
    assert [g.graph.name for g in groups(steps)] == ["g_1", "g_2"]


def test_no_group_both_feeds_a_call_and_needs_it() -> None:
    """exp(x) feeds the product and is added to its result: legal only as two groups."""
    graph, (x, w) = start(WIDE, TensorType((64, 64), "f32"))
    with building(graph):
        h = emit("exp", rows(x))
        graph.returning([emit("add", matmul(h, w), h)])
    steps = Fuse()(graph)
    assert shape_of(steps) == "Group Extern:dot Group"
    assert [v.prim for v in groups(steps)[1].inputs] == ["exp", "dot"]


def test_siblings_stay_apart_where_one_waits_for_a_call_of_the_other() -> None:
    """exp(x) and what is added to it afterwards are one group; tanh(x), which feeds the call, comes before both."""
    graph, (x, w) = start(WIDE, TensorType((64, 64), "f32"))
    with building(graph):
        s = emit("sum", emit("exp", x), axes=(1,))
        q = emit("tanh", x)
        late = emit("add", emit("broadcast", s, shape=x.shape, axes=(0,)), matmul(q, w))
        graph.returning([late, s, emit("sum", emit("exp", x), axes=(0,))])
    steps = Fuse()(graph)
    made: set[Value] = set(graph.inputs)
    for step in steps:
        assert not isinstance(step, Group) or set(step.inputs) <= made
        made |= set(step.outputs) if isinstance(step, Group) else {step.value}
    assert set(graph.results) <= made


def test_what_does_not_need_the_call_joins_the_group_before_it() -> None:
    graph, (x, w) = start(WIDE, TensorType((64, 64), "f32"))
    with building(graph):
        h = emit("exp", x)
        graph.returning([emit("neg", matmul(h, w)), emit("sum", h, axes=(0,))])
    first, second = groups(Fuse()(graph))
    assert [v.prim for v in first.outputs] == ["exp", "sum"]
    assert [v.prim for v in second.outputs] == ["neg"]


def test_cheap_values_are_computed_again_and_reductions_are_stored() -> None:
    graph, (x, w) = start(LOW, TensorType((64, 64), "f32"))
    with building(graph):
        wide = emit("cast", x, dtype="f32")
        total = emit("sum", wide, axes=(1,))
        y = matmul(emit("exp", wide), w)
        spread = emit("broadcast", total, shape=x.shape, axes=(0,))
        graph.returning([emit("add", emit("mul", y, wide), spread)])
    first, second = groups(Fuse()(graph))
    assert [v.prim for v in first.outputs] == ["sum", "exp"]
    assert [v.prim for v in second.inputs] == ["input", "sum", "dot"]
    assert "cast" in show(second.graph)


def test_a_value_that_is_dearer_to_read_again_is_stored() -> None:
    """a + b + c + d costs four reads; to write and read the sum once costs two."""
    graph, (*xs, w) = start(WIDE, WIDE, WIDE, WIDE, TensorType((64, 64), "f32"))
    with building(graph):
        h = emit("add", emit("add", xs[0], xs[1]), emit("add", xs[2], xs[3]))
        graph.returning([emit("mul", matmul(emit("exp", h), w), h)])
    assert groups(Fuse()(graph))[1].inputs[0] == h


def test_views_cost_no_kernel() -> None:
    graph, (x, w) = start(WIDE, TensorType((64, 64), "f32"))
    with building(graph):
        y = matmul(x, emit("permute", w, perm=(1, 0)))
        graph.returning(
            [emit("reshape", y, shape=(64 * M,)), x, emit("slice", x, start=(0, 0), stop=(M, 8), step=(1, 2))]
        )
    assert shape_of(Fuse()(graph)) == "View:permute Extern:dot View:reshape View:slice"


def test_layout_that_moves_memory_is_a_kernel() -> None:
    graph, (x,) = start(WIDE)
    with building(graph):
        flat = emit("reshape", emit("permute", x, perm=(1, 0)), shape=(64 * M,))
        graph.returning([flat, emit("flip", x, axes=(0,))])
    assert [v.prim for g in groups(Fuse()(graph)) for v in g.outputs] == ["reshape", "flip"]


def test_a_reshape_of_a_strided_input_is_a_kernel() -> None:
    graph = Graph("g")
    x = graph.input(WIDE, "x", (1, M))
    with building(graph):
        graph.returning([emit("reshape", x, shape=(64 * M,))])
    assert shape_of(Fuse()(graph)) == "Group"


def test_a_view_of_a_computed_output_is_stored_by_its_group() -> None:
    graph, (x,) = start(WIDE)
    with building(graph):
        total = emit("sum", x, axes=(1,))
        kept = emit("reshape", total, shape=(M, 1))
        graph.returning([kept])
    (group,) = groups(Fuse()(graph))
    assert group.outputs == (kept,)


def test_constants_alone_need_no_kernel() -> None:
    graph, (x,) = start(WIDE)
    with building(graph):
        graph.returning([emit("full", value=0.0, shape=(M,), dtype="f32"), emit("exp", x), None])
    assert shape_of(Fuse()(graph)) == "Group View:full"


def test_a_scatter_ends_its_group() -> None:
    graph, (x, base) = start(WIDE, TensorType((100, 64), "f32"))
    index = graph.input(TensorType((M,), "i64"), "index")
    with building(graph):
        spread = emit("scatter", base, emit("exp", x), index, axes=(0,), mode="add")
        graph.returning([emit("neg", spread)])
    first, second = groups(Fuse()(graph))
    assert [v.prim for v in first.outputs] == ["scatter"]
    assert [v.prim for v in second.inputs] == ["scatter"]


def test_what_a_scatter_and_its_user_share_does_not_join_them() -> None:
    graph, (x, base) = start(WIDE, WIDE)
    index = graph.input(TensorType((M,), "i64"), "index")
    with building(graph):
        h = emit("exp", rows(x))
        spread = emit("scatter", base, h, index, axes=(0,), mode="add")
        graph.returning([emit("add", spread, h)])
    assert shape_of(Fuse()(graph)) == "Group Group"


def test_results_of_a_call_are_read_through_picks() -> None:
    graph, (x,) = start(WIDE)
    with building(graph):
        avals = (WIDE, TensorType((M, 64), "i64"))
        sort = emit("aten", x, op="aten.sort.default", spec=((Arg(0),), ()), avals=avals)
        values = emit("pick", sort, index=0)
        graph.returning([emit("exp", values), emit("pick", sort, index=1)])
    steps = Fuse()(graph)
    assert shape_of(steps) == "Extern:aten Group"
    assert groups(steps)[0].inputs == (values,)


def test_complex_numbers_are_left_to_torch() -> None:
    graph, (x,) = start(WIDE)
    with building(graph):
        graph.returning([emit("exp", emit("cast", x, dtype="c64"))])
    assert shape_of(Fuse()(graph)) == "Extern:cast Extern:exp"


def test_effects_keep_their_order() -> None:
    """exp and add may not join: the second call would then come before the first."""
    graph, (x,) = start(WIDE)
    with building(graph):
        h = emit("exp", rows(x))
        emit("aten_effect", h, op="aten.first", spec=(), avals=())
        later = emit("aten_effect", x, op="aten.second", spec=(), avals=(WIDE,))
        graph.returning([emit("add", h, later)])
    steps = Fuse()(graph)
    assert [s.value.params["op"] for s in steps if isinstance(s, Extern)] == ["aten.first", "aten.second"]
    assert len(groups(steps)) == 2


def test_an_output_that_looks_at_what_a_call_reads_is_a_view() -> None:
    graph, (x, w) = start(WIDE, TensorType((64, 64), "f32"))
    with building(graph):
        h = emit("exp", x)
        graph.returning([emit("reshape", h, shape=(64 * M,)), matmul(h, w)])
    assert shape_of(Fuse()(graph)) == "Group Extern:dot View:reshape"


def test_a_chunk_is_done_with_before_the_next_one_is_computed() -> None:
    """One group of all chunks would hold every chunk's product at once."""
    graph, (x, w) = start(TensorType((4096, 64), "f32"), TensorType((64, 8192), "f32"))
    with building(graph):
        total = emit("full", value=0.0, shape=(), dtype="f32")
        for first in range(0, 4096, 1024):
            part = emit("slice", x, start=(first, 0), stop=(first + 1024, 64), step=(1, 1))
            total = emit("add", total, emit("sum", emit("exp", matmul(part, w)), axes=(0, 1)))
        graph.returning([total])
    chunk = "View:slice Extern:dot Group"
    assert shape_of(Fuse()(graph)) == " ".join([chunk] * 4)


def test_what_saves_more_bytes_than_it_holds_is_one_group() -> None:
    """The sums of small products need not go through memory as large as the product of all."""
    graph, (x, w) = start(TensorType((64, 4096), "f32"), TensorType((4096, 64), "f32"))
    with building(graph):
        small = [emit("exp", matmul(x, w)), emit("neg", matmul(x, w))]
        wide = emit("broadcast", small[0], shape=(64, 64, 4096), axes=(0, 1))
        graph.returning([emit("add", emit("exp", wide), emit("broadcast", small[1], shape=wide.shape, axes=(0, 1)))])
    assert len(groups(Fuse()(graph))) == 1


def test_a_value_written_back_is_an_output_of_its_group() -> None:
    graph, (x,) = start(WIDE)
    with building(graph):
        graph.mutations[0] = emit("exp", x)
    graph.returning([])
    (group,) = Fuse()(graph)
    assert group.outputs == (graph.mutations[0],)


def test_layouts_and_names_reach_the_groups() -> None:
    graph = Graph("g")
    x = graph.input(WIDE, "x", (1, M))
    w = graph.input(TensorType((64, 64), "f32"), "w")
    with building(graph), provenance(Origin("hidden")):
        h = emit("exp", rows(x))
    with building(graph):
        y = emit("neg", matmul(h, w))
        graph.returning([h, emit("add", y, h)], [(1, M), (64, 1)])
    first, second = groups(Fuse()(graph))
    assert first.graph.inputs[0].params["strides"] == (1, M)
    assert first.graph.output_strides[0] == (1, M)
    assert second.graph.inputs[0].params["name"] == "hidden"
    assert second.graph.inputs[0].params["strides"] == (1, M)


def test_minimal_bytes() -> None:
    graph, (x, _) = start(LOW, WIDE)
    expanded = graph.input(WIDE, "g", (0, 1))
    table = graph.input(TensorType((50000, 64), "f32"), "table")
    index = graph.input(TensorType((M,), "i64"), "index")
    with building(graph):
        taken = emit("gather", table, index, axes=(0,))
        wide = emit("add", emit("cast", x, dtype="f32"), expanded)
        graph.returning([emit("add", wide, taken), emit("sum", wide, axes=(0,)), x])
    gathered = 4 * sympy.Min(64 * M, 64 * 50000)  # a table that more is gathered from than it has is read once
    reads = 2 * 64 * M + 4 * 64 + gathered + 8 * M
    writes = 4 * 64 * M + 4 * 64
    assert sympy.expand(minimal_bytes(graph) - reads - writes) == 0
    assert sympy.expand(bytes_read(table) - gathered) == 0
    assert estimate(minimal_bytes(graph), {M: 2}) == int((reads + writes).xreplace({M: 2}))
