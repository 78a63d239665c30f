"""Long columns that a team of programs reduces together: who reduces a piece makes no difference, not even in bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from harness import INTERPRET, Input, K, M, N, T, agree, evaluated, graph_of, inputs_of, op, run, text_of

from fusegrad.codegen import TARGETS, Kernels, generate, module
from fusegrad.codegen.proofs import prove_kernel
from fusegrad.ir.switches import switched_off
from fusegrad.runtime.kernels import interpreter

FEW = replace(INTERPRET, shared=16)
CROWD = replace(INTERPRET, shared=16, units=12)
X = {"x": Input("f32", (M, N))}


def softmax(x: T) -> T:
    e = (x - x.amax(0, keep=True)).exp()
    return e / e.sum(0, keep=True)


def softmax_backward(y: T, dy: T) -> T:
    return y * (dy - (dy * y).sum(0, keep=True))


def normalised(x: T) -> T:
    """Two passes that reduce, one after the other."""
    centered = x - x.mean(0, keep=True)
    return centered * (op("mul", centered, centered).mean(0, keep=True) + 1e-5).rsqrt()


def softmax_of_batches(x: T) -> T:
    e = (x - x.amax(1, keep=True)).exp()
    return e / e.sum(1, keep=True)


def with_sums(x: T) -> tuple[T, T]:
    """A result without rows, stored by all that share them."""
    total = x.sum(0)
    return x - total, total


def planes(x: T) -> T:
    """Rows as long as two sizes together, read in chunks that divide them."""
    return normalised_rows(x.reshape(K, M * N)).reshape(K, M, N)


def normalised_rows(x: T) -> T:
    return x / (op("mul", x, x).sum(1, keep=True) + 1e-5).sqrt()


def channels(x: T) -> T:
    """Rows of two axes, of which the inner one is side by side in memory."""
    centered = x - x.mean(0, 2, keep=True)
    return centered * (op("mul", centered, centered).mean(0, 2, keep=True) + 1e-5).rsqrt()


def counts(x: T) -> T:
    """What stands at a maximum, as often as it does."""
    top = x.amax(0, keep=True)
    return x * op("eq", x, top.expand(x.shape)).to("i64").sum(0, keep=True).to("f32")


BODIES: dict[str, tuple[Callable[..., Any], dict[str, Input]]] = {
    "softmax": (softmax, X),
    "softmax of bf16": (lambda x: softmax(x.to("f32")).to("bf16"), {"x": Input("bf16", (M, N))}),
    "softmax of f64": (softmax, {"x": Input("f64", (M, N))}),
    "backward": (softmax_backward, {"y": Input("f32", (M, N)), "dy": Input("f32", (M, N))}),
    "two passes": (normalised, X),
    "sums": (with_sums, X),
    "integers": (lambda x: x - x.sum(0, keep=True), {"x": Input("i32", (M, N))}),
    "sums of bf16": (lambda x: x - x.sum(0, keep=True), {"x": Input("bf16", (M, N))}),
    "long rows": (normalised_rows, {"x": Input("f32", (N, M))}),
    "channels": (channels, {"x": Input("f32", (M, K, N))}),
    "planes": (planes, {"x": Input("f32", (K, M, N))}),
    "counts": (counts, X),
    "all of it": (lambda x: x / (op("mul", x, x).sum(0, 1, keep=True) + 1e-5).sqrt(), X),
    "channels of bf16": (channels, {"x": Input("bf16", (M, K, N))}),
    "largest": (lambda x: x - x.amax(0, keep=True), X),
    "batches": (softmax_of_batches, {"x": Input("f32", (K, M, N))}),
}


def are_divided(kernels: Kernels) -> bool:
    return any("PIECES" in k.constants for k in kernels.kernels)


@pytest.mark.parametrize("target", [FEW, CROWD], ids=["few", "crowd"])
@pytest.mark.parametrize("sizes", [{M: 97, N: 7}, {M: 64, N: 1}, {M: 133, N: 40}], ids=str)
@pytest.mark.parametrize("body", BODIES)
def test_agrees(body: str, sizes: dict[sympy.Symbol, int], target: Any) -> None:
    function, inputs = BODIES[body]
    agree(function, {K: 2, **sizes}, target, 8, **inputs)


@pytest.mark.parametrize("body", BODIES)
def test_these_columns_are_divided_and_need_not_be(body: str) -> None:
    function, inputs = BODIES[body]
    sizes = {K: 4, M: 300, N: 70} if body.startswith("channels") else {K: 2, M: 300, N: 3}
    assert are_divided(agree(function, sizes, CROWD, 8, **inputs))
    with switched_off(("pieces",)):
        assert not are_divided(agree(function, sizes, CROWD, 8, **inputs))


@pytest.mark.parametrize("now", [{M: 17, N: 3}, {M: 1, N: 3}, {M: 1000, N: 50}], ids=str)
@pytest.mark.parametrize("body", ["softmax", "two passes"])
def test_the_same_kernel_at_other_sizes(body: str, now: dict[sympy.Symbol, int]) -> None:
    """Fewer rows than pieces, more strips than programs."""
    function, inputs = BODIES[body]
    assert are_divided(agree(function, {K: 2, **now}, CROWD, 8, hints={K: 2, M: 301, N: 3}, **inputs))


@pytest.mark.parametrize("body", ["softmax", "backward", "two passes"])
def test_in_any_order_of_programs_the_same_bits(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, inputs = BODIES[body]
    sizes = {M: 300, N: 3}
    graph = graph_of(function, **inputs)
    kernels = generate(graph, target=CROWD, hints=sizes, name="body")
    text, values = module(kernels.kernels), inputs_of(graph, sizes)
    in_order = run(kernels, text, graph, values, sizes)
    programs = list(range(evaluated(kernels.kernels[0].grid, sizes)))
    for seed in range(3):
        random.Random(seed).shuffle(programs)
        monkeypatch.setattr(interpreter, "range", lambda n, p=tuple(programs): p if n == len(p) else range(n), False)
        assert all(map(torch.equal, in_order, run(kernels, text, graph, values, sizes)))


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"])
@pytest.mark.parametrize("sizes", [{M: 16384, N: 4096}, {M: 65536, N: 256}, {M: 8192, N: 8192}], ids=str)
@pytest.mark.parametrize("body", ["softmax", "backward"])
def test_the_device_is_filled(body: str, sizes: dict[sympy.Symbol, int], target: str) -> None:
    function, inputs = BODIES[body]
    (kernel,) = generate(graph_of(function, **inputs), target=TARGETS[target], hints=sizes, name="body").kernels
    assert evaluated(kernel.grid, sizes) >= 0.7 * TARGETS[target].units


@pytest.mark.parametrize(("rows", "divided"), [(512, False), (4096, True)])
def test_short_columns_are_not_worth_waiting_for_others(rows: int, divided: bool) -> None:
    graph = graph_of(softmax_backward, y=Input("f32", (M, N)), dy=Input("f32", (M, N)))
    hints = {M: rows, N: 1024}
    assert are_divided(generate(graph, target=TARGETS["cuda:90"], hints=hints, name="body")) == divided


def test_all_pieces_are_read_after_all_are_stored() -> None:
    text = text_of(softmax, {M: 16384, N: 4096}, **X)
    order = [text.index(t) for t in ("tl.store(total_partial_ptr", "missing = are_missing(", "_of_pieces =")]
    assert order == sorted(order)
    assert all('cache_modifier=".cg"' in line for line in text.splitlines() if "tl.load(top_partial_ptr" in line)


@pytest.mark.parametrize(
    "body", "softmax,backward,two passes,sums,sums of bf16,channels,planes,counts,all of it".split(",")
)
def test_accesses_are_proved_for_all_sizes_and_who_stores_a_piece_stores_the_same(body: str) -> None:
    function, inputs = BODIES[body]
    graph = graph_of(function, **inputs)
    kernels = generate(graph, target=TARGETS["cuda:90"], hints={K: 40, M: 16384, N: 4096}, name="body")
    assert are_divided(kernels)
    assert all(prove_kernel(k, graph, kernels, apart=True).proved for k in kernels.kernels)


def test_programs_that_wait_for_one_another_share_the_registers() -> None:
    """Two on each multiprocessor, by 256 threads: 128 registers for each, and not 64 of which some are spilled."""
    function, inputs = BODIES["softmax of bf16"]
    graph, hints = graph_of(function, **inputs), {M: 16384, N: 4096}
    (kernel,) = generate(graph, target=TARGETS["cuda:90"], hints=hints, name="body").kernels
    assert kernel.roomy == 2 and kernel.options("cuda")["maxnreg"] == 65536 // 2 // (32 * kernel.num_warps)
    (kernel,) = generate(graph, target=TARGETS["cuda:90"], hints={M: 64, N: 4096}, name="body").kernels
    assert kernel.roomy == 0 and "maxnreg" not in kernel.options("cuda")


@pytest.mark.parametrize("told", ["+ pid", "* tl.load(x_ptr + own).to(tl.int64)"])
def test_a_count_that_is_not_everybodys_is_found(told: str) -> None:
    graph = graph_of(counts, **X)
    kernels = generate(graph, target=TARGETS["cuda:90"], hints={M: 16384, N: 4096}, name="body")
    (kernel,) = kernels.kernels
    old = ", total_piece)"
    assert kernel.source.count(old) == 1
    wrong = replace(kernel, source=kernel.source.replace(old, f", total_piece {told})"))
    assert {f.kind for f in prove_kernel(wrong, graph, kernels, apart=True).faults} == {"overlap"}
