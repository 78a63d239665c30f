"""Few long recurrences in chunks of time, which look back: beside the evaluator; when, how many chunks, and why not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import sympy
import torch
from harness import INTERPRET, T, graph_of, inputs_of, run
from loop_bodies import AT_ONCE, LINEAR, TIME, TOLERANCE, B, D, agrees, loops, on_rows

from fusegrad.codegen import TARGETS, Kernels, generate, module
from fusegrad.codegen.kernel import WORTH
from fusegrad.codegen.program.sizes import evaluate_size
from fusegrad.codegen.proofs import prove
from fusegrad.codegen.schedule.loops.look_back import LEAST, LEAST_OF_TWO, Estimate
from fusegrad.ir import Graph
from fusegrad.ir.evaluate import evaluate
from fusegrad.runtime.kernels.cross_compile.pool import compile_for

CASES = loops()
LONG = (1024, 1087, 4096)


@pytest.mark.parametrize("steps", LONG)
@pytest.mark.parametrize("name", LINEAR)
def test_long_recurrences_in_chunks_of_time(name: str, steps: int) -> None:
    made = agrees(CASES[name], {TIME: steps, B: 2, D: 3}, AT_ONCE, kernels=1)
    assert made.kernels[0].splits in (4, 8, 32)
    course = made.kernels[0].course
    assert course is not None
    assert course.chunks == made.kernels[0].splits


@pytest.mark.parametrize("name", ["gated", "gated, reversed", "derivative"])
@pytest.mark.parametrize("steps", [0, 1, 63, 511, 512, 513, 1999])
def test_one_text_for_other_lengths(name: str, steps: int) -> None:
    """Chunks behind the end change nothing: the kernels for one length are right at every other."""
    graph, sizes = CASES[name].graph(), {TIME: 2048, B: 2, D: 3}
    made = generate(graph, target=AT_ONCE, hints=sizes, name="loop")
    assert [k.splits for k in made.kernels] == [16]
    agrees_at(graph, made, {**sizes, TIME: steps}, torch.float32)


def agrees_at(graph: Graph, made: Kernels, sizes: Mapping[sympy.Symbol, int], dtype: torch.dtype) -> None:
    given = [v * 0.3 for v in inputs_of(graph, sizes)]
    found = run(made, module(made.kernels), graph, given, sizes)
    wanted = evaluate(graph, [v.double().numpy() for v in given], sizes)
    for x, y in zip(found, wanted, strict=True):
        assert y is not None
        scale = max(1.0, float(np.abs(y).max())) if y.size else 1.0
        np.testing.assert_allclose(x.double().numpy(), y, rtol=0, atol=TOLERANCE[dtype] * scale)


def test_chunks_in_bfloat16() -> None:
    """What is found of a chunk is float32."""
    made = agrees(loops("bf16")["gated"], {TIME: 1030, B: 2, D: 3}, AT_ONCE, kernels=1)
    assert {b.dtype for b in made.kernels[0].scratch} == {"f32", "i32"}


def test_nothing_of_the_steps_is_stored() -> None:
    """Where only the end is asked for, the last chunk alone walks its steps again."""

    def end(h: T, a: T, x: T) -> list[T]:
        return CASES["gated"].results({"h": h, "a": a, "x": x})[:1]

    graph, sizes = graph_of(end, **CASES["gated"].inputs()), {TIME: 1100, B: 2, D: 3}
    made = generate(graph, target=AT_ONCE, hints=sizes, name="loop")
    assert [k.splits > 1 for k in made.kernels] == [True]
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
def test_infinities_and_nans_are_those_of_steps(case: str, steps: int, reverse: bool) -> None:
    """A product within the range of floats does not say that what is carried stays within it, nor the other way."""
    factor, start, added = BEYOND[case]
    graph = CASES["gated, reversed" if reverse else "gated"].graph()
    made = generate(graph, target=AT_ONCE, hints={TIME: steps, B: 1, D: 2}, name="loop")
    assert [k.splits > 1 for k in made.kernels] == [steps > 1000]
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
        (b, steps): splits(generate(graph, target=target, hints={TIME: steps, B: b, D: 64}, name="loop"))
        for b, steps in ((1, 4096), (8, 4096), (8, 384), (64, 4096))
    }
    assert counts == {(1, 4096): [32], (8, 4096): [16], (8, 384): [1], (64, 4096): [1]}
    assert splits(generate(graph, target=INTERPRET, hints={TIME: 1024, B: 1, D: 3}, name="loop")) == [8]


def splits(made: Kernels) -> list[int]:
    return [k.splits for k in made.kernels]


def test_the_model_and_the_limits_agree() -> None:
    """Wherever the limits allow chunks, they are modelled to take no more time, beside what adds up as well."""
    for turns in range(WORTH * LEAST, 5000, 7):
        chunks = 1 << min(64, turns // LEAST).bit_length() - 1
        estimate = Estimate.of(turns, chunks, 1, 2)
        assert estimate.in_chunks <= estimate.whole
    for turns in range(WORTH + LEAST_OF_TWO, 5000, 7):
        chunks = 1 << min(64, turns // LEAST, turns - LEAST_OF_TWO).bit_length() - 1
        estimate = Estimate.of(turns, chunks, 2, 2)
        assert estimate.in_chunks <= estimate.whole


def test_bytes_in_chunks() -> None:
    """Each input and each output once, and what is found of chunks, a hundredth of that; each input twice where L2 does
    not hold all of them."""
    for steps, times in ((4096, 1), (16384, 2)):
        sizes = {TIME: steps, B: 4, D: 64}
        made = generate(CASES["gated"].graph(), target=TARGETS["cuda:90"], hints=sizes, name="loop")
        moved = sum(evaluate_size(n, sizes) for k in made.kernels for n in (*k.reads.values(), *k.writes.values()))
        least = (1 + 2 * times) * steps * 256 * 4
        assert made.kernels[0].splits >= 16
        assert least < moved <= 1.02 * least


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
        course = made.kernels[0].course
        assert course is not None
        assert reason in course.whole


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"])
@pytest.mark.parametrize("name", ["gated", "gated, reversed", "derivative", "selective"])
def test_chunks_compile_without_spills(name: str, target: str) -> None:
    made = generate(CASES[name].graph(), target=TARGETS[target], hints={TIME: 4096, B: 2, D: 16}, name="loop")
    assert splits(made) == [32]
    binaries = compile_for(made.kernels, module(made.kernels), [target])
    for kernel in made.kernels:
        binary = binaries[kernel.name][target]
        assert binary.error is None
        assert binary.spills in (0, -1)
