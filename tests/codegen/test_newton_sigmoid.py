"""sigmoid on NVIDIA's GPUs: the IEEE reciprocal by a step of Newton's, without the branch of a general quotient."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from harness import Input, M, agree, graph_of, run, text_of

from fusegrad.codegen import TARGETS, generate, module
from fusegrad.codegen.emit import mathematics
from fusegrad.codegen.emit.statements import call, literal

F32 = Input("f32", (M,))
SPECIAL = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1e-45,
    -1e-45,
    17.0,
    -87.0,
    -88.0,
    -88.5,
    -88.72,
    -89.0,
    -104.0,
    3e38,
]


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels under the interpreter have it, too, with torch's powers and reciprocals."""
    monkeypatch.setitem(mathematics.rules, "sigmoid", lambda d, x: call("newton_sigmoid", x, literal("False")))


@pytest.mark.usefixtures("formula")
def test_it_has_the_bits_of_the_quotient() -> None:
    """Where the result is subnormal it is rounded twice: the last of its few bits may be another."""
    x = torch.cat([torch.tensor(SPECIAL), torch.randn(40_000) * 4, torch.linspace(-90.0, 90.0, 9_000)])
    graph, sizes = graph_of(lambda x: x.sigmoid(), x=F32), {M: x.numel()}
    kernels = generate(graph, target=TARGETS["interpret"], hints=sizes, name="body")
    (y,) = run(kernels, module(kernels.kernels), graph, [x], sizes)
    quotient = 1 / (1 + torch.exp(-x))
    far = (y.view(torch.int32) - quotient.view(torch.int32)).abs()
    is_normal, numbers = quotient >= 2.0**-126, ~x.isnan()
    assert not far[is_normal & numbers].any() and far[~is_normal & numbers].max() <= 1
    assert torch.equal(y.isnan(), x.isnan()) and y[2] == 1.0 and y[3] == 0.0 and (~is_normal[:15]).sum() > 4


@pytest.mark.usefixtures("formula")
def test_it_serves_16_bits() -> None:
    for dtype in ("bf16", "f16"):
        agree(lambda x: x.sigmoid(), {M: 999}, x=Input(dtype, (M,)))


def test_who_has_it() -> None:
    body = lambda x: x.sigmoid()  # noqa: E731
    for target, name in (
        ("cuda:90", " newton_sigmoid(x, True)"),
        ("hip:gfx942", " sigmoid(x)"),
        ("interpret", " sigmoid(x)"),
    ):
        assert name in text_of(body, {M: 4096}, target, x=F32), target
    assert " sigmoid(x)" in text_of(body, {M: 4096}, x=Input("f64", (M,)))
    fast = replace(TARGETS["cuda:90"], fast=True)
    assert "tl.sigmoid(x)" in module(generate(graph_of(body, x=F32), target=fast, hints={M: 4096}, name="body").kernels)
