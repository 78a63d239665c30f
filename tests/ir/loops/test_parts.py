"""Products, sums and results of steps in parts: what leaves the loop; and where concatenations divide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sympy
from loop_samples import T, f64
from test_random_loops import close, numbers, sizes
from test_tidy import add, graph, loop, mul

from fusegrad.ir import Graph, Value, building, emit, verify
from fusegrad.ir.evaluate import evaluate
from fusegrad.ir.loops.motion import Motion
from fusegrad.ir.loops.parts import CarriedPieces
from fusegrad.ir.loops.pieces import cuts
from fusegrad.ir.passes.simplify import Simplify
from fusegrad.ir.transforms.batch import batch

N = sympy.Symbol("n", integer=True, positive=True)


def dot(x: Value, y: Value) -> Value:
    return emit("dot", x, y, x_axes=(0, 2), y_axes=(2, 1), out_axes=(0, 1))


def cat(*xs: Value) -> Value:
    return emit("cat", *xs, axis=1)


def columns(x: Value, start: int, stop: int) -> Value:
    return emit("slice", x, start=(0, start), stop=(x.shape[0], stop), step=(1, 1))


def of_what_is_known(h: Value, x: Value, w: Value) -> list[Value]:
    return [emit("tanh", dot(cat(x, h), w))]


def of_what_goes_nowhere(h: Value, x: Value, w: Value) -> list[Value]:
    both = dot(add(h, x), w)
    return [columns(both, 2, 6), columns(both, 0, 2)]


def that_is_given_whole(h: Value, x: Value, w: Value) -> list[Value]:
    both = dot(add(h, x), w)
    return [columns(both, 2, 6), both]


def that_is_added_up(h: Value, b: Value, x: Value) -> list[Value]:
    h = mul(h, x)
    return [h, add(b, cat(h, mul(h, h)))]


def that_is_turned_as_well(h: Value, x: Value) -> list[Value]:
    h = mul(h, x)
    return [h, cat(h, x), emit("permute", cat(h, x), perm=(1, 0))]


def that_is_turned_and_added_up(h: Value, w: Value, x: Value) -> list[Value]:
    """As autograd adds up the gradient of a matrix that is transposed in memory."""
    after = mul(h, x)
    return [after, add(w, emit("permute", dot(emit("permute", after, perm=(1, 0)), h), perm=(1, 0)))]


def whose_sums_are_added_up_in_another_shape(h: Value, b: Value, x: Value) -> list[Value]:
    after = mul(h, x)
    return [after, add(b, emit("reshape", emit("sum", after, axes=(0,)), shape=(1, 4)))]


CASES: dict[str, tuple[Callable[..., Sequence[Value]], int, Sequence[Any], dict[str, int], int]] = {
    "a product of what is known and what is carried": (
        of_what_is_known, 1, ((2, 4), (T, 2, 3), (7, 4)), {"dot": 1, "cat": 0}, 1,
    ),
    "columns that go into no other step": (
        of_what_goes_nowhere, 1, ((2, 4), (T, 2, 4), (4, 6)), {"dot": 1}, 1,
    ),
    "a product that is given, of which columns are carried": (
        that_is_given_whole, 1, ((2, 4), (T, 2, 4), (4, 6)), {"dot": 1}, 1,
    ),
    "a concatenation that is added up": (
        that_is_added_up, 2, ((2, 4), (2, 8), (T, 2, 4)), {"cat": 0, "add": 2}, 0,
    ),
    "a product that is turned and added up": (
        that_is_turned_and_added_up, 2, ((2, 4), (4, 4), (T, 2, 4)), {"dot": 0, "permute": 0}, 1,
    ),
    "sums that are added up in another shape": (
        whose_sums_are_added_up_in_another_shape, 2, ((2, 4), (1, 4), (T, 2, 4)), {"sum": 0, "reshape": 0}, 0,
    ),
    "a result that is turned as well": (that_is_turned_as_well, 1, ((2, 4), (T, 2, 4)), {"permute": 0}, 0),
}  # fmt: skip
"""A step, its carries, its operands, what is left in it, and the products outside."""


@pytest.mark.parametrize("name", CASES)
def test_what_need_not_be_done_step_by_step_leaves_the_loop(name: str) -> None:
    step, carries, shapes, within, outside = CASES[name]
    before = verify(graph(lambda *xs: loop(step, carries, *xs), *shapes))
    after = verify(Simplify()(Motion(batch)(Simplify()(before))))
    (scan,) = (v for v in after.order() if v.prim == "scan")
    prims = [v.prim for v in scan.params["body"].graph.order()]
    assert {prim: prims.count(prim) for prim in within} == within
    assert [v.prim for v in after.order()].count("dot") == outside
    for length in (0, 1, 4):
        inputs = numbers(before, length, length)
        close(evaluate(after, inputs, sizes(length)), evaluate(before, inputs, sizes(length)))


def test_what_is_given_twice_is_stored_once() -> None:
    """As products that leave the loop read it: as it is, and turned."""
    before = verify(graph(lambda *xs: loop(lambda h, x: [mul(h, x), add(h, x), add(h, x)], 1, *xs), (2, 4), (T, 2, 4)))
    after = verify(Motion(batch)(before))
    (scan,) = (v for v in after.order() if v.prim == "scan")
    assert len(scan.avals) == 2
    inputs = numbers(before, 4, 4)
    close(evaluate(after, inputs, sizes(4)), evaluate(before, inputs, sizes(4)))


def test_sums_that_are_carried_later_go_in_pieces_too() -> None:
    before = verify(graph(lambda *xs: loop(that_is_added_up, 2, *xs), (2, 4), (2, 8), (T, 2, 4)))
    after = verify(CarriedPieces()(before))
    (scan,) = (v for v in after.order() if v.prim == "scan")
    assert scan.params["carries"] == 3
    inputs = numbers(before, 4, 4)
    close(evaluate(after, inputs, sizes(4)), evaluate(before, inputs, sizes(4)))


def test_columns_that_overlap_stay_one_product() -> None:
    def step(h: Value, x: Value, w: Value) -> list[Value]:
        both = dot(add(h, x), w)
        return [columns(both, 1, 5), columns(both, 0, 2)]

    after = Motion(batch)(graph(lambda *xs: loop(step, 1, *xs), (2, 4), (T, 2, 4), (4, 6)))
    (scan,) = (v for v in after.order() if v.prim == "scan")
    assert [v.prim for v in scan.params["body"].graph.order()].count("dot") == 1
    assert "dot" not in [v.prim for v in after.order()]


LAYOUTS: dict[str, tuple[Callable[[Value, Value], Value], int, list[Any]]] = {
    "a concatenation": (lambda x, y: cat(x, y, x), 1, [N, N + 3]),
    "within another": (lambda x, y: cat(cat(x, y), x), 1, [N, N + 3]),
    "of what is computed": (lambda x, y: mul(cat(x, y), cat(x, y)), 1, [N]),
    "turned": (lambda x, y: emit("permute", cat(x, y), perm=(1, 0)), 0, [N]),
    "along another dim": (lambda x, y: emit("cat", x, x, axis=0), 1, []),
    "stacked and joined": (
        lambda x, y: emit("reshape", cat(*(emit("reshape", v, shape=(2, 1, N)) for v in (x, x))), shape=(2, 2 * N)),
        1, [N],
    ),
    "put among zeros": (lambda x, y: emit("pad", y, lo=(0, N), hi=(0, 2), inner=(0, 0)), 1, [N, N + 3]),
    "that is not": (lambda x, y: x, 1, []),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_places_at_which_a_concatenation_divides_are_found(name: str) -> None:
    build, dim, expected = LAYOUTS[name]
    made = Graph("layout")
    inputs = [made.input(f64(2, N), "x"), made.input(f64(2, 3), "y")]
    with building(made):
        assert cuts(build(*inputs), dim) == expected
