"""Kernels of loops over time: step by step, many steps at once, with matrices and neighbours, beside the evaluator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import sympy
import torch
from harness import INTERPRET, T, graph_of, inputs_of, run
from loop_bodies import TIME, B, D, H, Loop, loops, on_rows

from fusegrad.codegen import TARGETS, Kernels, Target, generate, module
from fusegrad.codegen.kernel import WORTH
from fusegrad.codegen.program.sizes import evaluate_size
from fusegrad.codegen.proofs import prove
from fusegrad.codegen.schedule.loops.phases import LEAST, Estimate
from fusegrad.ir import Graph
from fusegrad.ir.evaluate import evaluate
from fusegrad.runtime.kernels.cross_compile.pool import compile_for

BY_STEP = INTERPRET
AT_ONCE = replace(INTERPRET, units=1 << 20)
"""A device with more units than elements: many steps at once."""
CASES = loops()
LINEAR = ("gated", "gated, reversed", "gated, flipped, batch first", "derivative", "sum", "of numbers", "selective")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


def agrees(loop: Loop, sizes: Mapping[sympy.Symbol, int], target: Target, kernels: int = 1) -> Kernels:
    """The kernels' results are the evaluator's, and every access in them is proved."""
    graph = loop.graph()
    made = generate(graph, target=target, hints=sizes, name="loop")
    assert len(made.kernels) == kernels
    assert all(p.proved for p in prove(graph, made)), [str(f) for p in prove(graph, made) for f in p.faults]
    given = [v * 0.3 for v in inputs_of(graph, sizes)]
    found = run(made, module(made.kernels), graph, given, sizes)
    wanted = evaluate(graph, [v.double().numpy() for v in given], sizes)
    for x, y in zip(found, wanted, strict=True):
        assert y is not None
        scale = max(1.0, float(np.abs(y).max())) if y.size else 1.0
        np.testing.assert_allclose(x.double().numpy(), y, rtol=0, atol=TOLERANCE[x.dtype] * scale)
    return made


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


# ------------------------------------------------------------------ time in chunks
CHUNKED = ("gated", "gated, reversed", "gated, flipped, batch first", "derivative", "sum", "of numbers", "selective")
LONG = (1024, 1087, 4096)


def joined(made: Kernels) -> list[str]:
    return [k.name.removeprefix("loop") for k in made.kernels]


@pytest.mark.parametrize("steps", LONG)
@pytest.mark.parametrize("name", CHUNKED)
def test_long_recurrences_in_chunks_of_time(name: str, steps: int) -> None:
    made = agrees(CASES[name], {TIME: steps, B: 2, D: 3}, AT_ONCE, kernels=3)
    assert joined(made) == ["_chunks", "_joined", ""]
    assert made.kernels[0].splits in (4, 16)
    assert "chunks of time" in made.kernels[0].course


@pytest.mark.parametrize("name", ["gated", "gated, reversed", "derivative"])
@pytest.mark.parametrize("steps", [1, 2, 63, 100, 1000, 1999])
def test_one_text_for_other_lengths(name: str, steps: int) -> None:
    """Chunks behind the end change nothing: the kernels for one length are right at every other."""
    graph, sizes = CASES[name].graph(), {TIME: 2048, B: 2, D: 3}
    made = generate(graph, target=AT_ONCE, hints=sizes, name="loop")
    assert len(made.kernels) == 3
    agrees_at(graph, made, {**sizes, TIME: steps}, torch.float32)


def agrees_at(graph: Graph, made: Kernels, sizes: Mapping[sympy.Symbol, int], dtype: torch.dtype) -> None:
    given = [v * 0.3 for v in inputs_of(graph, sizes)]
    found = run(made, module(made.kernels), graph, given, sizes)
    wanted = evaluate(graph, [v.double().numpy() for v in given], sizes)
    for x, y in zip(found, wanted, strict=True):
        assert y is not None
        np.testing.assert_allclose(x.double().numpy(), y, rtol=0, atol=TOLERANCE[dtype] * max(1.0, np.abs(y).max()))


def test_chunks_in_bfloat16() -> None:
    """What is found of a chunk is float32."""
    made = agrees(loops("bf16")["gated"], {TIME: 1030, B: 2, D: 3}, AT_ONCE, kernels=3)
    assert {b.dtype for b in made.temporaries} == {"f32"}


def test_nothing_of_the_steps_is_stored() -> None:
    """Where only the end is asked for, the steps are walked once."""

    def end(h: T, a: T, x: T) -> list[T]:
        return CASES["gated"].results({"h": h, "a": a, "x": x})[:1]

    graph, sizes = graph_of(end, **CASES["gated"].inputs()), {TIME: 1100, B: 2, D: 3}
    made = generate(graph, target=AT_ONCE, hints=sizes, name="loop")
    assert joined(made) == ["_chunks", "_joined"]
    assert all(p.proved for p in prove(graph, made))
    agrees_at(graph, made, sizes, torch.float32)


BEYOND = {
    "products overflow": (1e12, 0.0, 0.0), "factors are infinite": (float("inf"), 0.0, 0.0),
    "factors are no number": (float("nan"), 0.0, 1.0), "factors are zero": (0.0, 0.0, 1.0),
    "what is carried is infinite": (0.1, float("inf"), 0.0), "and is no number": (0.5, float("nan"), 0.0),
    "what is carried overflows": (1e20, 1e20, 0.0), "the end is infinite": (1.0, 1.0, float("-inf")),
}  # fmt: skip


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [70, 1100])
@pytest.mark.parametrize("case", BEYOND)
def test_infinities_and_nans_are_eagers(case: str, steps: int, reverse: bool) -> None:
    """A product within the range of floats does not say that what is carried stays within it, nor the other way."""
    factor, start, added = BEYOND[case]
    graph = CASES["gated, reversed" if reverse else "gated"].graph()
    made = generate(graph, target=AT_ONCE, hints={TIME: steps, B: 1, D: 2}, name="loop")
    assert len(made.kernels) == (3 if steps > 1000 else 1)
    a, x, h = torch.full((steps, 1, 2), 0.9), torch.zeros(steps, 1, 2), torch.full((1, 2), start)
    a[3:40, :, 0] = factor
    a[40:60, :, 0] = 1e-20 if factor == 1e20 else 0.9
    x[66, :, 0] = added
    expected, state = torch.empty_like(x), h
    for t in range(steps)[:: -1 if reverse else 1]:
        state = expected[t] = a[t] * state + x[t]
    found = run(made, module(made.kernels), graph, [h, a, x], {TIME: steps, B: 1, D: 2})
    torch.testing.assert_close(found[1], expected, equal_nan=True, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(found[0], state, equal_nan=True, rtol=2e-5, atol=1e-6)


def test_few_or_many_elements() -> None:
    """Chunks are for what leaves most of a device idle: by programs against multiprocessors, and by length."""
    target, graph = TARGETS["cuda:90"], CASES["gated"].graph()
    counts = {
        (b, steps): len(generate(graph, target=target, hints={TIME: steps, B: b, D: 64}, name="loop").kernels)
        for b, steps in ((1, 4096), (8, 4096), (8, 512), (64, 4096))
    }
    assert counts == {(1, 4096): 3, (8, 4096): 3, (8, 512): 1, (64, 4096): 1}


def test_the_model_and_the_limits_agree() -> None:
    """Wherever the limits allow chunks, three launches are modelled to take less time."""
    for turns in range(WORTH * LEAST, 5000, 7):
        chunks = 1 << min(64, turns // LEAST).bit_length() - 1
        estimate = Estimate.of(turns, chunks)
        assert estimate.in_chunks < estimate.whole


def test_bytes_in_chunks() -> None:
    """Each input twice, each output once, and what is found of chunks: a hundredth of that."""
    sizes = {TIME: 8192, B: 4, D: 64}
    made = generate(CASES["gated"].graph(), target=TARGETS["cuda:90"], hints=sizes, name="loop")
    moved = sum(evaluate_size(n, sizes) for k in made.kernels for n in (*k.reads.values(), *k.writes.values()))
    least, of_factors = 3 * 8192 * 256 * 4, 2 * 8192 * 256 * 4
    assert made.kernels[0].splits >= 16
    assert least + of_factors < moved <= 1.10 * least + of_factors


def test_float16_and_what_is_coupled_stay_whole() -> None:
    def coupled(h: T, k: T, a: T, x: T) -> list[T]:
        h = a * h + x
        return [h, a * k + h, h]

    loop = on_rows(coupled, "h k", "a x")
    for graph, reason in (
        (loop.graph(), "carried is read"),
        (loops("f16")["gated"].graph(), "float16 overflows"),
    ):
        made = generate(graph, target=AT_ONCE, hints={TIME: 2048, B: 1, D: 2}, name="loop")
        assert len(made.kernels) == 1
        assert reason in made.kernels[0].course


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"])
@pytest.mark.parametrize("name", ["gated", "gated, reversed", "derivative", "selective"])
def test_chunks_compile_without_spills(name: str, target: str) -> None:
    made = generate(CASES[name].graph(), target=TARGETS[target], hints={TIME: 4096, B: 2, D: 16}, name="loop")
    assert len(made.kernels) == 3
    binaries = compile_for(made.kernels, module(made.kernels), [target])
    for kernel in made.kernels:
        binary = binaries[kernel.name][target]
        assert binary.error is None
        assert binary.spills in (0, -1)
