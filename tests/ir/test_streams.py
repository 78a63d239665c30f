"""Regions of products that need not be in memory: what joins them, what keeps them apart, and what the model says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sympy

from fusegrad.ir import Graph, TensorType, Value, building, emit
from fusegrad.ir.passes.fuse import Extern, Fuse, Group, Step
from fusegrad.ir.passes.products import Machine
from fusegrad.ir.passes.streaming.streams import StreamDecision, StreamEstimate, Streams, operations
from fusegrad.ir.passes.virtual import directions, virtual_values
from fusegrad.ir.prims import Arg

MACHINE = Machine(3.0e12, {"f16": 900e12, "bf16": 900e12, "f32": 60e12})
N, M = sympy.symbols("n m", integer=True, positive=True)
SIZES = {N: 4096, M: 4096}
Body = Callable[..., Sequence[Value] | Value]


def graph_of(body: Body, *shapes: tuple[Any, ...], dtype: str = "bf16") -> Graph:
    graph = Graph("body")
    with building(graph):
        made = body(*(graph.input(TensorType(s, dtype), f"x{i}") for i, s in enumerate(shapes)))
    return graph.returning(list(made) if isinstance(made, Sequence) else [made])


def decided(
    body: Body, *shapes: tuple[Any, ...], dtype: str = "bf16", **more: Any
) -> tuple[list[Step], list[StreamDecision]]:
    graph = graph_of(body, *shapes, dtype=dtype)
    return Streams(MACHINE, SIZES, **more)(graph, Fuse()(graph))


def kinds(steps: Sequence[Step]) -> list[str]:
    """S for a group with products, G for one without."""
    multiplies = lambda s: any(v.prim == "dot" for v in s.graph.order())  # noqa: E731
    return [("S" if multiplies(s) else "G") if isinstance(s, Group) else type(s).__name__.lower() for s in steps]


def scores(q: Value, k: Value) -> Value:
    return emit("dot", q, k, x_axes=(0, 2), y_axes=(1, 2), out_axes=(0, 1))


def times(p: Value, v: Value) -> Value:
    return emit("dot", p, v, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))


def spread(row: Value, like: Value, axis: int) -> Value:
    return emit("broadcast", row, shape=like.shape, axes=(axis,))


def attention(q: Value, k: Value, v: Value) -> Value:
    s = scores(q, k)
    e = emit("exp", emit("sub", s, spread(emit("amax", s, axes=(1,)), s, 0)))
    return times(emit("div", e, spread(emit("sum", e, axes=(1,)), s, 0)), v)


HEAD = (N, 64), (M, 64), (M, 64)


def test_attention_is_one_group_with_operands_and_a_result() -> None:
    steps, (decision,) = decided(attention, *HEAD)
    (group,) = steps
    assert isinstance(group, Group) and group is decision.group and decision.streamed
    assert [v.params["name"] for v in group.inputs] == ["x0", "x1", "x2"]
    assert [v.shape for v in group.outputs] == [(N, 64)]
    assert "never in memory, 67.1 MB; modelled," in str(decision)


def test_the_model_weighs_products_that_are_made_twice() -> None:
    """Forward makes two products of 64 columns; with a sum in the other direction s is made again for it."""
    both = lambda q, k, v: [attention(q, k, v), emit("amax", scores(q, k), axes=(0,))]  # noqa: E731
    for body, count in ((attention, 2), (both, 3)):
        (decision,) = decided(body, *HEAD)[1]
        assert decision.costs is not None
        assert decision.costs.operations == count * 2 * 4096 * 4096 * 64


def test_wide_heads_go_to_the_library() -> None:
    """The figures of both ways are on record."""
    steps, (decision,) = decided(attention, (N, 2048), (M, 2048), (M, 2048))
    assert kinds(steps) == ["extern", "G", "extern"]
    assert not decision.streamed and "in memory, 67.1 MB;" in str(decision) and "by the library" in str(decision)


def test_an_estimate_is_limited_by_the_slowest_of_three() -> None:
    plain = StreamEstimate(1000, 0, 0, 0, 1, library=3.0, rate=1000.0, special_rate=10.0, bandwidth=1.0)
    assert plain.own == 2.0 and plain.pays
    assert StreamEstimate(1000, 50, 0, 0, 1, 3.0, 1000.0, 10.0, 1.0).own == 5.0
    assert StreamEstimate(1000, 0, 7, 0, 1, 3.0, 1000.0, 10.0, 1.0).own == 7.0
    assert not StreamEstimate(1500, 0, 0, 0, 1, 3.0, 1000.0, 10.0, 1.0).pays, "no gain, no change"


def test_what_is_summed_by_rows_and_by_columns_is_made_for_both() -> None:
    def body(q: Value, k: Value) -> list[Value]:
        e = emit("exp", scores(q, k))
        return [emit("sum", e, axes=(1,)), emit("sum", e, axes=(0,)), emit("sum", e, axes=(0, 1))]

    graph = graph_of(body, (N, 64), (M, 64))
    found = directions(graph.order(), virtual_values(graph, SIZES))
    assert [[v.prim for v in nodes] for nodes in found] == [["dot", "exp", "sum", "sum"], ["dot", "exp", "sum"]]


def test_rows_that_the_other_direction_reads_are_a_walk_before_it() -> None:
    """Backward of a softmax that computes its rows again: for them, for dq, for dv."""

    def body(q: Value, k: Value, v: Value) -> list[Value]:
        s = scores(q, k)
        e = emit("exp", emit("sub", s, spread(emit("amax", s, axes=(1,)), s, 0)))
        p = emit("div", e, spread(emit("sum", e, axes=(1,)), s, 0))
        return [times(p, v), emit("dot", p, q, x_axes=(0, 1), y_axes=(0, 2), out_axes=(1, 2))]

    graph = graph_of(body, *HEAD)
    found = directions(graph.order(), virtual_values(graph, SIZES))
    assert [[v.prim for v in nodes if v.prim in ("dot", "amax", "sum")] for nodes in found] == [
        ["dot", "amax", "sum"], ["dot", "dot"], ["dot", "dot"],
    ]  # fmt: skip
    forward = graph_of(attention, *HEAD)
    (alone,) = directions(forward.order(), virtual_values(forward, SIZES))
    assert [v.prim for v in alone if v.prim in ("dot", "amax", "sum")] == ["dot", "amax", "sum", "dot"]


def test_directions_are_seen_through_transposes_and_heads() -> None:
    """dq sums over columns; dk and dv over rows, of what is transposed and has merged batches."""

    def body(q: Value, k: Value, g: Value) -> list[Value]:
        s = emit("dot", q, k, x_axes=(0, 1, 3), y_axes=(0, 2, 3), out_axes=(0, 1, 2))
        p = emit("reshape", emit("exp", s), shape=(2, 4, N, M))
        flat = emit("reshape", emit("permute", p, perm=(0, 1, 3, 2)), shape=(8, M, N))
        dq = emit("dot", emit("exp", s), k, x_axes=(0, 1, 2), y_axes=(0, 2, 3), out_axes=(0, 1, 3))
        dv = emit("dot", flat, g, x_axes=(0, 1, 2), y_axes=(0, 2, 3), out_axes=(0, 1, 3))
        return [dq, dv, emit("sum", p, axes=(2,))]

    graph = graph_of(body, (8, N, 64), (8, M, 64), (8, N, 64))
    found = directions(graph.order(), virtual_values(graph, SIZES))
    assert [sum(v.prim in ("dot", "sum") for v in nodes) for nodes in found] == [2, 3]


def test_of_products_of_products_the_larger_is_virtual() -> None:
    """Queries and values are larger than what they are made of; scores are larger still, and are summed."""

    def body(c: Value, w: Value, k: Value) -> Value:
        return times(emit("exp", scores(times(c, w), k)), times(emit("neg", c), w))

    graph = graph_of(body, (N, 16), (16, 32), (N, 32))
    named = {v.id: v for v in graph.order()}
    virtual = virtual_values(graph, SIZES)
    assert sorted(named[i].prim for i in virtual) == ["dot", "exp"]
    assert all(named[i].shape == (N, N) for i in virtual)


def test_it_is_so_in_each_of_several_layers() -> None:
    def body(x: Value, w: Value, u: Value) -> Value:
        for _ in range(3):
            q = times(x, w)
            x = times(times(emit("exp", scores(q, q)), q), u)
        return x

    graph = graph_of(body, (N, 16), (16, 32), (32, 16))
    virtual = virtual_values(graph, SIZES)
    assert len(virtual) == 6 and all(v.shape == (N, N) for v in graph.order() if v.id in virtual)


# ------------------------------------------------------------------ what joins
def test_copies_of_operands_and_what_finishes_results_join() -> None:
    def body(q: Value, k: Value, v: Value, bias: Value) -> Value:
        copied = emit("reshape", emit("permute", k, perm=(1, 0, 2)), shape=(M, 64))
        out = attention(q, copied, v)
        return emit("add", emit("sigmoid", out), spread(bias, out, 1))

    steps, (decision,) = decided(body, (N, 64), (8, M, 8), (M, 64), (64,))
    assert kinds(steps) == ["S"] and decision.streamed


def test_an_operand_that_others_read_stays_in_memory() -> None:
    def body(q: Value, k: Value, v: Value) -> list[Value]:
        copied = emit("reshape", emit("permute", k, perm=(1, 0, 2)), shape=(M, 64))
        return [attention(q, copied, v), copied]

    assert sorted(kinds(decided(body, (N, 64), (8, M, 8), (M, 64))[0])) == ["G", "S"]


def test_numbers_for_the_region_alone_are_drawn_in_it() -> None:
    """A random mask as large as a virtual value is not written for the groups that read it."""

    def body(q: Value, k: Value, v: Value) -> Value:
        seed, offset = (emit("full", value=n, shape=(), dtype="i64") for n in (1, 2))
        drawn = emit("random", seed, offset, shape=(N, M), dtype="f32", kind="uniform")
        keep = emit("lt", drawn, emit("full", value=0.9, shape=(N, M), dtype="f32"))
        return times(emit("mul", scores(q, k), emit("cast", keep, dtype="bf16")), v)

    steps, (decision,) = decided(body, *HEAD)
    assert kinds(steps) == ["S"] and decision.streamed


# ------------------------------------------------------------------ what keeps a region in memory
def refused(body: Body, *shapes: tuple[Any, ...], dtype: str = "bf16") -> str:
    """The reason on record, where the steps are as they were."""
    graph = graph_of(body, *shapes, dtype=dtype)
    before = Fuse()(graph)
    steps, (decision,) = Streams(MACHINE, SIZES)(graph, before)
    assert not decision.streamed and steps == before
    return decision.reason


def called(op: str, value: Value, aval: TensorType | None = None) -> Value:
    return emit("aten", value, op=op, spec=((Arg(0),), ()), avals=(aval or value.aval,))


def test_a_result_is_in_memory() -> None:
    def body(q: Value, k: Value, v: Value) -> list[Value]:
        s = emit("exp", scores(q, k))
        return [s, times(s, v)]

    assert refused(body, *HEAD) == "`exp` is returned or saved"


def test_a_transposed_result_is_in_memory() -> None:
    def body(q: Value, k: Value, v: Value) -> list[Value]:
        s = emit("exp", scores(q, k))
        return [emit("permute", s, perm=(1, 0)), times(s, v)]

    assert "is returned" in refused(body, *HEAD)


def test_what_a_call_reads_is_in_memory() -> None:
    def body(q: Value, k: Value, v: Value) -> list[Value]:
        s = scores(q, k)
        return [times(s, v), called("aten.sort.default", s, TensorType((N,), "bf16"))]

    assert refused(body, *HEAD) == "`aten.sort.default` reads it from memory"


def test_what_a_call_makes_of_a_virtual_value_is_in_memory() -> None:
    def body(q: Value, k: Value, v: Value) -> Value:
        s = scores(q, k)
        return times(emit("mul", s, called("aten.erfc.default", s)), v)

    assert refused(body, *HEAD) == "`aten.erfc.default` reads it from memory"


def test_a_call_on_what_it_sums_to_and_back_comes_between() -> None:
    def body(q: Value, k: Value, v: Value) -> Value:
        s = scores(q, k)
        row = called("aten.cumsum.default", emit("sum", s, axes=(1,)))
        return times(emit("mul", s, spread(row, s, 0)), v)

    assert refused(body, *HEAD) == "`aten.cumsum.default` comes between, and is no part of its kernels"


def test_a_group_between_is_part_of_it() -> None:
    """A sum over rows of row sums, which no kernel of the region would wait for."""

    def body(q: Value, k: Value, v: Value, w: Value) -> Value:
        s = scores(q, k)
        row = emit("sum", s, axes=(1,))
        sorted_ = emit("cumsum", row, axis=0, reverse=False)
        return times(emit("mul", s, spread(emit("mul", sorted_, w), s, 0)), v)

    steps, (decision,) = decided(body, *HEAD, (N,))
    assert kinds(steps) == ["S"] and decision.streamed


def test_float64_stays_with_the_library() -> None:
    assert refused(attention, *HEAD, dtype="f64") == "f64 is multiplied by the library"


def test_complex_numbers_stay_with_the_library() -> None:
    plain = lambda q, k, v: times(scores(q, k), v)  # noqa: E731
    assert refused(plain, *HEAD, dtype="c64") == "c64 is multiplied by the library"


def test_an_effect_stays_where_it_is() -> None:
    def body(q: Value, k: Value, v: Value) -> Value:
        s = scores(q, k)
        emit("aten_effect", q, op="aten.print", spec=((Arg(0),), ()), avals=(q.aval,))
        return times(s, v)

    reason = refused(body, *HEAD)
    assert reason == "`aten.print` runs in between"


def test_a_product_that_nothing_sums_is_not_spoken_of() -> None:
    assert decided(lambda q, k: emit("sigmoid", scores(q, k)), *HEAD[:2])[1] == []


def test_a_refusal_says_why_and_keeps_the_value() -> None:
    (decision,) = decided(attention, *HEAD)[1]
    other = decision.refused("it cannot be")
    assert (other.value, other.products, other.streamed) == (decision.value, decision.products, False)
    assert str(other).endswith("in memory, it cannot be")


# ------------------------------------------------------------------ the order of steps
def test_two_regions_are_two_groups() -> None:
    def body(q: Value, k: Value, v: Value) -> Value:
        return attention(attention(q, k, v), k, v)

    steps, decisions = decided(body, *HEAD)
    assert [d.streamed for d in decisions] == [True, True] and kinds(steps) == ["S", "S"]


def test_what_needs_a_result_comes_behind_all_of_it() -> None:
    """A call on the first product over s, which came before the second."""

    def body(q: Value, k: Value, v: Value) -> list[Value]:
        s = emit("exp", scores(q, k))
        first = called("aten.erfc.default", times(s, v))
        second = emit("dot", s, q, x_axes=(0, 1), y_axes=(0, 2), out_axes=(1, 2))
        return [first, second]

    steps, (decision,) = decided(body, *HEAD)
    assert decision.streamed and kinds(steps) == ["S", "extern"]
    assert isinstance(steps[1], Extern) and steps[1].value.prim == "aten"


@pytest.mark.parametrize("heads", [1, 3])
def test_operations_count_every_label_once(heads: int) -> None:
    def body(q: Value, k: Value) -> Value:
        return emit("dot", q, k, x_axes=(0, 1, 3), y_axes=(0, 2, 3), out_axes=(0, 1, 2))

    (dot,) = graph_of(body, (heads, 5, 7), (heads, 11, 7)).order()
    assert operations(dot) == 2 * heads * 5 * 11 * 7
