"""Rows too wide for float32 registers stay there 16 bits wide: one read of what other rows of that width read twice."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from bodies import BODIES
from harness import SMALL, Input, M, N, T, agree, graph_of, op

from fusegrad.codegen import TARGETS, Kernel, generate, module
from fusegrad.ir.switches import switched_off
from fusegrad.runtime.kernels.cross_compile.pool import compile_for

ROOM = replace(SMALL, packed=64)
"""Rows of 16 columns fit as float32, 64 in 16 bits."""
ROWS, HALF, WEIGHT, MEAN = Input("bf16", (M, N)), Input("f16", (M, N)), Input("bf16", (N,)), Input("f32", (M, 1))


def log_sum_exp(x: T) -> T:
    top = x.to("f32").amax(1, keep=True)
    return (top + (x.to("f32") - top).exp().sum(1, keep=True).log()).to("bf16")


def layer(x: T) -> tuple[T, T, T]:
    v = x.to("f32")
    mean = v.mean(1, keep=True)
    rstd = ((v - mean) * (v - mean)).mean(1, keep=True).rsqrt()
    return ((v - mean) * rstd).to("bf16"), mean, rstd


def narrow(x: T) -> T:
    """Every operation rounds."""
    e = (x - x.amax(1, keep=True)).exp()
    return e / e.sum(1, keep=True)


def norm_backward(dy: T, x: T, w: T, rstd: T) -> T:
    g, x_hat = dy.to("f32") * w.to("f32"), x.to("f32") * rstd
    return ((g - x_hat * (g * x_hat).mean(1, keep=True)) * rstd).to("bf16")


def masked(g: T, y: T, least: T) -> T:
    gf = op("max", g.to("f32"), least.expand(g.shape))
    return (y.to("f32") * (gf - (gf * y.to("f32")).sum(1, keep=True))).to("f16")


def capped(x: T) -> T:
    return BODIES["softmax"][0]((x.to("f32") / 30.0).tanh() * 30.0)


Body = tuple[Callable[..., Any], dict[str, Input]]
CASES: dict[str, tuple[Body, int]] = {
    "softmax": (BODIES["softmax"], 1),
    "log-sum-exp": ((log_sum_exp, {"x": ROWS}), 1),
    "layer": ((layer, {"x": ROWS}), 1),
    "narrow": ((narrow, {"x": ROWS}), 1),
    "narrow f16": ((narrow, {"x": HALF}), 1),
    "softmax backward": (BODIES["softmax_backward"], 2),
    "norm backward": ((norm_backward, {"dy": ROWS, "x": ROWS, "w": WEIGHT, "rstd": MEAN}), 2),
    "at least": ((masked, {"g": HALF, "y": HALF, "least": MEAN}), 2),
}
"""Body, and how many rows it streams."""
MANY_REGISTERS = {("narrow", "hip:gfx942"), ("narrow f16", "hip:gfx942")}
"""AMD rounds each operation in several instructions."""
TWICE: dict[str, tuple[Body, int]] = {
    "rows that begin anywhere": (BODIES["softmax"], 65535),
    "mostly padding": (BODIES["softmax"], 40960),
    "float32": ((BODIES["softmax"][0], {"x": Input("f32", (M, N))}), 65536),
    "two rows": (BODIES["softmax_backward"], 65536),
    "weights beside them": (BODIES["rms_forward"], 65536),
    "much beside them": ((capped, {"x": ROWS}), 65536),
}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("case", CASES)
def test_reads_rows_once(case: str, padded: bool) -> None:
    (body, inputs), streams = CASES[case]
    columns = 64 // streams - (8 if padded else 0)
    with switched_off(("tails",)):
        (kernel,) = agree(body, {M: 7, N: columns}, ROOM, slack=12, **inputs).kernels
    assert loads(kernel) == [1] * streams
    if columns == 24:
        (kernel,) = agree(body, {M: 7, N: columns}, ROOM, slack=12, **inputs).kernels
        assert loads(kernel) == [2] * streams, "16 columns, and 8"
    assert not re.search(r"\bfor\b", kernel.source)
    (chunked,) = agree(body, {M: 7, N: columns}, SMALL, slack=12, **inputs).kernels
    assert re.search(r"\bfor\b", chunked.source)


@pytest.mark.parametrize("case", CASES)
def test_hides_them_between_phases(case: str) -> None:
    (body, inputs), streams = CASES[case]
    for target, helper in (("cuda:90", "packed"), ("hip:gfx942", "packed_vector")):
        kernel = only(body, inputs, target, 65536 // streams)
        once = (case, target) not in MANY_REGISTERS
        assert (loads(kernel) == [1] * streams) == once and (f"= {helper}(" in kernel.source) == once


@pytest.mark.parametrize("case", TWICE)
def test_reads_others_in_chunks(case: str) -> None:
    (body, inputs), columns = TWICE[case]
    kernel = only(body, inputs, "cuda:90", columns)
    assert "packed(" not in kernel.source and re.search(r"\bfor\b", kernel.source)


@pytest.mark.parametrize(("body", "columns"), [("softmax", 65536), ("softmax", 60000), ("softmax_backward", 32768)])
def test_fills_registers_and_no_more(body: str, columns: int) -> None:
    """1024 threads have 64 registers each: what does not fit would be spilled to local memory."""
    function, inputs = BODIES[body]
    kernel = only(function, inputs, "cuda:90", columns)
    (binary,) = compile_for([kernel], module([kernel]), ["cuda:90"])[kernel.name].values()
    assert binary.error is None and binary.spills == 0 and 32 < binary.registers <= 64
    assert set(binary.accesses) == {16}


def only(body: Callable[..., Any], inputs: dict[str, Input], target: str, columns: int) -> Kernel:
    graph = graph_of(body, **inputs)
    (kernel,) = generate(graph, target=TARGETS[target], hints={M: 8192, N: columns}, name="body").kernels
    return kernel


def loads(kernel: Kernel) -> list[int]:
    """How often each row that is read at all is read, in the order of the arguments."""
    found = re.findall(r"tl\.load\((\w+) \+ at \+ col", kernel.source)
    return [found.count(a.name) for a in kernel.arguments if a.name in found]
