"""Kernels of loops over time: step by step, many steps at once, with matrices and neighbours, beside the evaluator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import INTERPRET, T, graph_of, inputs_of, run
from loop_bodies import AT_ONCE, LINEAR, TIME, B, D, H, agrees, loops

from fusegrad.codegen import TARGETS, generate, module
from fusegrad.codegen.kernel import Kernel
from fusegrad.codegen.program.axes import Axis
from fusegrad.codegen.schedule.loops.registers import threads_of
from fusegrad.ir.evaluate import evaluate
from fusegrad.runtime.kernels.cross_compile.pool import compile_for

BY_STEP = INTERPRET
CASES = loops()
DELAYED = ("delayed", "delayed, reversed")
SMALL = {B: 3, D: 21, H: 20}


@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("name", CASES)
def test_step_by_step(name: str, steps: int) -> None:
    made = agrees(CASES[name], {TIME: steps, **SMALL}, BY_STEP)
    assert "associative_scan" not in made.kernels[0].source


@pytest.mark.parametrize("steps", [17, 64, 131])
@pytest.mark.parametrize("name", LINEAR)
def test_many_steps_at_once(name: str, steps: int) -> None:
    made = agrees(CASES[name], {TIME: steps, B: 2, D: 3, H: 4}, AT_ONCE)
    assert "tl.associative_scan" in made.kernels[0].source or "tl.cumsum" in made.kernels[0].source


@pytest.mark.parametrize("steps", [17, 64, 131])
@pytest.mark.parametrize("name", DELAYED)
def test_many_steps_at_once_that_keep_nothing(name: str, steps: int) -> None:
    """What is handed on to the next step is read again, and nothing is carried."""
    made = agrees(CASES[name], {TIME: steps, B: 2, D: 3}, AT_ONCE)
    assert "tl.gather" not in made.kernels[0].source and "BLOCK_T" in made.kernels[0].source


@pytest.mark.parametrize("name", [n for n in CASES if n not in LINEAR])
def test_what_is_no_recurrence_goes_step_by_step(name: str) -> None:
    made = agrees(CASES[name], {TIME: 19, B: 2, D: 3, H: 4}, AT_ONCE)
    assert "tl.associative_scan" not in made.kernels[0].source


@pytest.mark.parametrize("name", CASES)
def test_no_step(name: str) -> None:
    """What is carried is what it was at first."""
    agrees(CASES[name], {TIME: 0, **SMALL}, BY_STEP)


@pytest.mark.parametrize("name", ["gated", "derivative", "swapped", "selective", "recurrent"])
def test_bfloat16(name: str) -> None:
    agrees(loops("bf16")[name], {TIME: 4, B: 3, D: 8, H: 16}, BY_STEP)


@pytest.mark.parametrize("factor", [1e12, float("inf"), float("nan"), 0.0])
def test_factors_whose_product_is_no_number(factor: float) -> None:
    """1e12 ** 64 is none, and times zero it is zero: then the tile is walked by step."""
    loop, sizes = CASES["gated"], {TIME: 70, B: 1, D: 2}
    graph = loop.graph()
    made = generate(graph, target=AT_ONCE, hints=sizes, name="loop")
    a, x = torch.full((70, 1, 2), 0.5), torch.zeros(70, 1, 2)
    a[3:40] = factor
    x[66:] = 1.0
    found = run(made, module(made.kernels), graph, [torch.zeros(1, 2), a, x], sizes)
    h = torch.zeros(1, 2)
    for t in range(70):
        h = a[t] * h + x[t]
        torch.testing.assert_close(found[1][t], h, equal_nan=True)
    torch.testing.assert_close(found[0], h, equal_nan=True)


def test_two_loops_in_one_kernel() -> None:
    """The second reads the first step by step, in the same direction."""

    def twice(h: T, a: T, x: T) -> list[T]:
        loop = CASES["gated"]
        first = loop.results({"h": h, "a": a, "x": x})
        return loop.results({"h": h, "a": a, "x": first[1]})

    graph = graph_of(twice, **CASES["gated"].inputs())
    sizes = {TIME: 6, **SMALL}
    made = generate(graph, target=BY_STEP, hints=sizes, name="loop")
    assert len(made.kernels) == 1
    given = inputs_of(graph, sizes)
    found = run(made, module(made.kernels), graph, given, sizes)
    wanted = evaluate(graph, [v.double().numpy() for v in given], sizes)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-4, atol=1e-5)


def test_few_programs_have_all_registers() -> None:
    """With more programs the compiler decides: the fewer registers each has, the more of them run side by side."""

    def made(batch: int) -> Kernel:
        hints = {TIME: 512, B: batch, D: 64, H: 64}
        return generate(CASES["gated"].graph(), target=TARGETS["cuda:90"], hints=hints, name="loop").kernels[-1]

    few, many = made(4), made(1 << 16)
    assert few.options("cuda")["maxnreg"] == 255
    assert "maxnreg" not in few.options("hip") | many.options("cuda")


def test_threads_fill_the_last_axis_first() -> None:
    a, b, c = (Axis(n, at) for at, n in enumerate((64, 64, 8)))
    assert threads_of({a: 64, b: 64, c: 8}, 256) == {c: 8, b: 32, a: 1}
    assert threads_of({a: 64, b: 2}, 256) == {b: 2, a: 64}


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"])
@pytest.mark.parametrize("name", ["gated", "derivative", "selective", "recurrent", "neighbours"])
def test_compiles_without_spills(name: str, target: str) -> None:
    loop, sizes = CASES[name], {TIME: 512, B: 8, D: 64, H: 64}
    made = generate(loop.graph(), target=TARGETS[target], hints=sizes, name="loop")
    binaries = compile_for(made.kernels, module(made.kernels), [target])
    for kernel in made.kernels:
        binary = binaries[kernel.name][target]
        assert binary.error is None
        assert binary.spills in (0, -1)
