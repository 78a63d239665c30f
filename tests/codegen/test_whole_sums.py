"""Graphs that move little: one kernel that holds all that is summed, along whatever axes, and none for much."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy
from harness import INTERPRET, SMALL, Input, K, M, N, T, agree, cat, graph_of, iota, where
from loop_bodies import TIME, B, D, on_rows

from fusegrad.codegen import TARGETS, generate
from fusegrad.ir import emit
from fusegrad.ir.switches import without

X = {"x": Input("f32", (K, M, N))}
SIZES = [{K: 2, M: 5, N: 6}, {K: 1, M: 16, N: 8}, {K: 3, M: 1, N: 7}]


def log_sum(x: T, axis: int) -> T:
    top = x.amax(axis, keep=True)
    return (x - top).exp().sum(axis, keep=True).log() + top


def by_turns(x: T) -> list[T]:
    """Four times along rows and columns: each asks for all that is before it along other axes."""
    steps = []
    for _ in range(4):
        x = x - log_sum(x, 2)
        x = x - log_sum(x, 1)
        steps.append(x)
    return [*steps, x.exp().sum(0)]


def sums_within_sums(x: T) -> tuple[T, T, T]:
    """Axes of one length: what is summed inside is asked for along the one that is summed outside."""
    left, right = (T(emit("broadcast", x.v, shape=(M, M, M), axes=axes)) for axes in ((0, 1), (1, 2)))
    pairs = left * right
    first = (pairs.sum(2, keep=True) * pairs).sum(1)
    second = where(iota(M, "f32").expand((M, M)) > x, first, x).sum(1)
    return first, second, (first - second).sum(0)


def both_ways(x: T) -> tuple[T, T, T]:
    return x.sum(0), x.sum(1), cat([x.amax(2), -x.amax(2)], 1)


@pytest.mark.parametrize("target", [INTERPRET, SMALL], ids=["roomy", "small"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("body", [by_turns, both_ways])
def test_sums_along_several_axes_are_one_launch(body: object, sizes: dict[sympy.Symbol, int], target: object) -> None:
    kernels = agree(body, sizes, target, slack=12, small=True, **X)  # type: ignore[arg-type]
    if kernels.divided is not None:
        assert len(kernels.kernels) == 1 and not kernels.kernels[0].scratch


@pytest.mark.parametrize("size", [4, 7])
def test_an_inner_sum_has_an_axis_of_its_own(size: int) -> None:
    kernels = agree(sums_within_sums, {M: size}, slack=12, small=True, x=Input("f32", (M, M)))
    assert len(kernels.kernels) == 1 and kernels.divided is not None


def test_it_holds_as_long_as_the_lanes_do() -> None:
    """A shorter axis has lanes outside; a longer one is for the kernels beside it. No length is a multiple: that would
    be guarded.
    """
    hints = {K: 2, M: 13, N: 11}
    for sizes in (hints, {K: 1, M: 3, N: 9}, {K: 2, M: 16, N: 16}):
        kernels = agree(by_turns, sizes, hints=hints, slack=12, small=True, **X)
        assert kernels.divided is not None and all(g.xreplace(sizes) for g in kernels.kernels[0].guards)
    assert not all(g.xreplace({K: 2, M: 17, N: 11}) for g in kernels.kernels[0].guards)
    assert len(kernels.divided.kernels) > 1


BENT = on_rows(lambda h, a, x: [T(emit("tanh", (h * a + x).v))] * 2, "h", "a x")


def there_and_back(h: T, a: T, x: T) -> list[T]:
    """A loop, and one against time that reads what each of its steps gave."""
    _, given = BENT.results({"h": h, "a": a, "x": x})
    return replace(BENT, reverse=True).results({"h": h, "a": a, "x": given})[1:]


@pytest.mark.parametrize("steps", [1, 2])
def test_steps_of_short_loops_are_one_behind_the_other(steps: int) -> None:
    """What the first hands to the second is not in memory; for more steps there are loops."""
    kernels = agree(there_and_back, {TIME: steps, B: 3, D: 5}, slack=12, small=True, **BENT.inputs())
    (kernel,) = kernels.kernels
    assert "tl.range" not in kernel.source and kernel.pinned == {TIME: steps}
    assert agree(there_and_back, {TIME: 3, B: 3, D: 5}, slack=12, small=True, **BENT.inputs()).divided is None


def test_much_is_divided_as_ever() -> None:
    """A program that would move longer than a launch takes, or holds more than registers."""
    graph, target = graph_of(both_ways, **X), TARGETS["cuda:90"]
    for sizes in ({K: 64, M: 64, N: 64}, {K: 2, M: 4096, N: 4096}):
        assert generate(graph, target=target, hints=sizes, name="body", small=True).divided is None
    sizes = {K: 2, M: 8, N: 32}
    little = generate(graph, target=target, hints=sizes, name="body", small=True)
    assert len(little.kernels) == 1 and little.divided is not None
    with without("whole_sums"):
        assert generate(graph, target=target, hints=sizes, name="body", small=True).divided is None
