"""The Functions of the suite: one kernel each, right at awkward sizes, in one piece or in chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from bodies import BODIES, ROWS, WEIGHT
from harness import INTERPRET, MANY, SMALL, K, M, N, agree, close, graph_of, inputs_of, run

from fusegrad.codegen import TARGETS, Kernels, Target, generate, module
from fusegrad.runtime.execution.aten import reference
from fusegrad.runtime.execution.kernel_plan import KernelPlan
from fusegrad.runtime.values.sizes import BoundSizes, number

SIZES = {"odd": {M: 13, N: 50, K: 3}, "one": {M: 1, N: 1, K: 1}, "even": {M: 6, N: 64, K: 2}}
DEVICES = {"whole": INTERPRET, "chunked": SMALL, "tree": MANY}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("sizes", SIZES)
def test_agrees(body: str, sizes: str, device: str) -> None:
    function, inputs = BODIES[body]
    agree(function, SIZES[sizes], DEVICES[device], slack=12, **inputs)


@pytest.mark.parametrize("body", BODIES)
def test_is_one_kernel(body: str) -> None:
    function, inputs = BODIES[body]
    sizes = {M: 4096, N: 4096, K: 8}
    for target in ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942"):
        kernels = generate(graph_of(function, **inputs), target=TARGETS[target], hints=sizes, name=body)
        assert len(kernels.kernels) == 1, target
        assert kernels.kernels[0].name == body


@pytest.mark.parametrize("body", ["rms_backward", "softmax", "cross_entropy", "group_backward", "swiglu", "jsd"])
@pytest.mark.parametrize("device", ["whole", "chunked"])
def test_a_new_batch_size_needs_no_new_kernel(body: str, device: str) -> None:
    function, inputs = BODIES[body]
    graph = graph_of(function, **inputs)
    kernels = generate(graph, target=DEVICES[device], hints={M: 7, N: 24}, name="body")
    text = module(kernels.kernels)
    for rows in (1, 7, 32):
        sizes = {M: rows, N: 24}
        for k in kernels.kernels:
            assert M not in k.pinned and all(bool(g.xreplace(sizes)) for g in k.guards)
        values = inputs_of(graph, sizes)
        got = run(kernels, text, graph, values, sizes)
        for g, w in zip(got, reference.run(graph, values, dict(sizes)), strict=True):
            assert w is not None
            close(g, w, 12)


def _moved(body: str, sizes: dict[sympy.Symbol, int], target: Target) -> float:
    """Bytes moved over the bytes of inputs and outputs, partial sums left out."""
    function, inputs = BODIES[body]
    graph = graph_of(function, **inputs)
    kernels = generate(graph, target=target, hints=sizes, name=body).kernels
    ends = [v.aval.nbytes for v in (*graph.inputs, *graph.outputs) if v is not None]
    least = sum(int(sympy.sympify(n).subs(sizes)) for n in ends)
    moved = [n for k in kernels for side in (k.reads, k.writes) for p, n in side.items() if "partial" not in p]
    return sum(int(sympy.sympify(n).subs(sizes)) for n in moved) / least


@pytest.mark.parametrize("body", BODIES)
def test_every_byte_moves_once(body: str) -> None:
    assert _moved(body, {M: 4096, N: 4096, K: 8}, TARGETS["cuda:90"]) <= 1.03


@pytest.mark.parametrize("device", DEVICES)
def test_softmax_at_the_edges(device: str) -> None:
    inf = float("inf")
    x = torch.randn(5, 40).bfloat16()
    x[0] = -inf
    x[1, 3] = inf
    x[2, 30] = float("nan")
    x[3, :39] = -inf
    x[4, 5] = -inf
    function, inputs = BODIES["softmax"]
    agree(function, {M: 5, N: 40}, DEVICES[device], given={"x": x}, **inputs)
    agree(lambda x: x.amax(1), {M: 5, N: 40}, DEVICES[device], given={"x": x}, **inputs)


@pytest.mark.parametrize("body", ["rms_backward", "layer_backward"])
@pytest.mark.parametrize("sizes", [{M: 13, N: 64}, {M: 7, N: 50}, {M: 20, N: 37}], ids=str)
def test_strips_share_rows(body: str, sizes: dict[Any, int]) -> None:
    """One kernel for a row that does not fit; it makes no difference who finds out what is reduced along the row."""
    function, inputs = BODIES[body]
    (kernel,) = agree(function, sizes, replace(SMALL, units=20), **inputs).kernels
    graph = graph_of(function, **inputs)
    values, text = inputs_of(graph, sizes), module([kernel])
    alone = text.replace('return tl.atomic_add(pointer, 0, sem="relaxed")', "return tl.load(pointer) * 0")
    assert alone != text and "rotated(" in text
    assert number(kernel.sharing, BoundSizes(sizes)) > 1
    told, found = (run(Kernels((kernel,)), t, graph, values, sizes) for t in (text, alone))
    assert all(torch.equal(t, f) for t, f in zip(told, found, strict=True))


def moments(x: Any) -> Any:
    """Three means that zeros leave as they are, and one that they do not."""
    f = x.to("f32")
    means = [v.mean(1, keep=True) for v in (f, f * f, f * f * f, f.sigmoid())]
    return (f - means[0] - means[1] * means[2] - means[3]).to("bf16")


POINTWISE = (lambda x, b: (x + b).tanh(), {"x": ROWS, "b": WEIGHT})
SUMS = ("rms_backward", "layer_backward", "gelu_backward", "dyt_backward")
ROOMS = {"chunked": (SMALL, 37), "whole": (INTERPRET, 137), "strips": (replace(INTERPRET, units=20, shared=64), 300)}
ANYWHERE = {
    "chunked": ("softmax", "softmax_backward", "layer_forward", "biased", "rms_backward", "moments"),
    "whole": ("softmax", "softmax_backward", "layer_forward", *SUMS),
    "strips": SUMS,
}


@pytest.mark.parametrize(("room", "body"), [(room, body) for room, bodies in ANYWHERE.items() for body in bodies])
@pytest.mark.parametrize("begin", [0, 3])
def test_rows_that_begin_anywhere(room: str, body: str, begin: int) -> None:
    """Tiles begin at the boundary below a row: its neighbours are read too, and count for nothing, not even NaN."""
    function, inputs = {**BODIES, "biased": POINTWISE, "moments": (moments, {"x": ROWS})}[body]
    target, columns = ROOMS[room]
    sizes, graph = BoundSizes({M: 13, N: columns}), graph_of(function, **inputs)
    values = inputs_of(graph, sizes)
    for place, value in enumerate(values):
        if value.dim() == 2 and value.dtype == torch.bfloat16:
            if body not in SUMS:
                value[::2] = float("nan") if place == 0 else float("inf")
            memory = torch.full([begin + value.numel() + 16], float("nan"), dtype=value.dtype)
            values[place] = memory[begin : begin + value.numel()].view(value.shape).copy_(value)
    plan = KernelPlan(graph, "body", "interpret", torch.device("cpu"))
    plan.target = target
    for mine, theirs in zip(plan(values, sizes), reference.run(graph, values, sizes), strict=True):
        close(mine, theirs, 12)
    (runner,) = plan.runners.values()
    assert any("tl.multiple_of(" in v.text for v in runner.variants)
