"""Work on large graphs grows with their nodes: lines run for n steps and for 2 n, where a pass over pairs runs 4 x."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from harness import M

import fusegrad
from fusegrad.codegen import TARGETS, generate, kernel_partition
from fusegrad.ir import Graph, TensorType, Value, building, emit
from fusegrad.ir.passes.cost import minimal_bytes
from fusegrad.ir.passes.fuse import Fuse

WITHIN = tuple(str(Path(fusegrad.__file__).parent / room) for room in ("ir", "codegen"))
MOST = 2.5
"""Times the lines for twice the nodes: below 2 there are fixed costs, and above it what is sorted."""


def at(x: Value, step: int) -> Value:
    start, stop = (step, 0), (step + 1, x.shape[1])
    return emit("reshape", emit("slice", x, start=start, stop=stop, step=(1, 1)), shape=x.shape[1:])


def stacked(values: list[Value]) -> Value:
    return emit("cat", *(emit("reshape", v, shape=(1, *v.shape)) for v in values), axis=0)


def recurrence(graph: Graph, steps: int) -> list[Value]:
    """for t: h = a[t] * h + x[t]; all h, one behind the other."""
    a, x = (graph.input(TensorType((steps, M), "f32"), name) for name in "ax")
    with building(graph):
        states = [at(x, 0)]
        for t in range(1, steps):
            states.append(emit("add", emit("mul", at(a, t), states[-1]), at(x, t)))
        return [stacked(states)]


def outputs_apart(graph: Graph, count: int) -> list[Value]:
    x = graph.input(TensorType((M, 64), "f32"), "x")
    with building(graph):
        numbers = (emit("full", value=float(k), shape=x.shape, dtype="f32") for k in range(count))
        return [emit("sin", emit("mul", x, number)) for number in numbers]


def chain(graph: Graph, length: int) -> list[Value]:
    y = x = graph.input(TensorType((M, 64), "f32"), "x")
    with building(graph):
        for _ in range(4 * length):
            y = emit("tanh", emit("sub", y, x))
    return [y]


def slices_joined(graph: Graph, count: int) -> list[Value]:
    x = graph.input(TensorType((count, M), "f32"), "x")
    with building(graph):
        return [stacked([emit("exp", at(x, k)) for k in reversed(range(count))])]


def products(graph: Graph, count: int) -> list[Value]:
    """for t: h = tanh(h @ w + x[t]), which no kernel holds together."""
    x, w = graph.input(TensorType((count, M), "f32"), "x"), graph.input(TensorType((64, 64), "f32"), "w")
    h = graph.input(TensorType((M, 64), "f32"), "h")
    with building(graph):
        for t in range(count):
            product = emit("dot", h, w, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))
            h = emit("tanh", emit("add", product, emit("broadcast", at(x, t), shape=h.shape, axes=(0,))))
    return [h]


GRAPHS = {f.__name__: f for f in (recurrence, outputs_apart, chain, slices_joined, products)}


def built(grow: Callable[[Graph, int], list[Value]], size: int) -> Graph:
    graph = Graph(grow.__name__)
    return graph.returning(grow(graph, size))


def lines_run(call: Callable[[], Any]) -> int:
    """The lines of `ir` and `codegen` that a call runs."""
    count = 0

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def of_ours(frame: FrameType, event: str, arg: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(WITHIN) else None

    before = sys.gettrace()
    sys.settrace(of_ours)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def assert_linear(grow: Callable[[Graph, int], list[Value]], use: Callable[[Graph], Any], size: int) -> None:
    small, large = (built(grow, n) for n in (size, 2 * size))
    use(small)  # what is computed once for all graphs
    few, many = lines_run(lambda: use(small)), lines_run(lambda: use(large))
    assert few > 10 * size
    assert many < MOST * few, f"{grow.__name__}: {few} lines for {size}, {many} for {2 * size}"


@pytest.mark.parametrize("name", [n for n in GRAPHS if n != "products"])
def test_fuse(name: str) -> None:
    assert_linear(GRAPHS[name], lambda graph: (Fuse()(graph), minimal_bytes(graph)), 64)


@pytest.mark.parametrize("name", [n for n in GRAPHS if n != "products"])
def test_generate(name: str) -> None:
    assert_linear(GRAPHS[name], lambda graph: generate(graph, target=TARGETS["cuda:90"], hints={M: 4096}, name="g"), 60)


def test_steps_between_products_are_not_searched_for_every_pair() -> None:
    """All steps read x, and none may join another: pairs are asked for, but each is answered at once."""
    few, many = (lines_run(partial(Fuse(), built(products, n))) for n in (64, 128))
    assert many < 4 * few


def test_a_loop_is_one_kernel_per_sixty_steps() -> None:
    """Each state is computed in the stage that it belongs to, and stored there; none is chosen among all."""
    graph = built(recurrence, 128)
    kernels = generate(graph, target=TARGETS["cuda:90"], hints={M: 4096}, name="g").kernels
    assert len(kernels) == 3
    assert not any("tl.where" in k.source for k in kernels)
    read = sum(n.subs(M, 4096) for k in kernels for n in k.reads.values())
    assert read < 1.03 * 2 * 128 * 4096 * 4


def sums_of_a_chain(graph: Graph, steps: int) -> list[Value]:
    """for t: h = h - h * x[t]; sums of h * x[t], h * x[t - 1], .., each along lanes of its own."""
    x = graph.input(TensorType((steps, M), "f32"), "x")
    sums: list[Value] = []
    with building(graph):
        h = at(x, 0)
        for t in range(1, steps):
            h = emit("add", emit("mul", emit("neg", h), at(x, t)), h)
            sums += [emit("sum", emit("mul", h, at(x, t - k)), axes=(0,)) for k in range(min(t, 7))]
        return [*sums, h]


@pytest.mark.parametrize("patience", [2, 100])
def test_what_is_asked_for_too_often_is_found_at_once_in_the_end(patience: int, monkeypatch: Any) -> None:
    attempts, kernels = 0, 0
    attempt, kernel_of = kernel_partition._Group._attempt, kernel_partition.kernel_of

    def counted(group: Any) -> Any:
        nonlocal attempts
        attempts += 1
        return attempt(group)

    def emitted(*args: Any) -> Any:
        nonlocal kernels
        kernels += 1
        return kernel_of(*args)

    monkeypatch.setattr(kernel_partition, "PATIENCE", patience)
    monkeypatch.setattr(kernel_partition._Group, "_attempt", counted)
    monkeypatch.setattr(kernel_partition, "kernel_of", emitted)
    monkeypatch.setattr(kernel_partition._Group, "_with_rows_together", lambda group, made, memory: made)
    made = generate(built(sums_of_a_chain, 14), target=TARGETS["cuda:90"], hints={M: 4096}, name="g").kernels
    assert (attempts <= 4) == (patience == 2)
    assert kernels == len(made) >= 7, "each kernel is emitted once"
