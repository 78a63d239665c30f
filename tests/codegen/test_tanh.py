"""tanh on NVIDIA's GPUs: the device library's two formulas and a choice, as accurate as eager, without a branch."""

from __future__ import annotations

import pytest
import torch
from harness import Input, M, N, agree, graph_of, run, text_of

from fusegrad.codegen import TARGETS, generate, module
from fusegrad.codegen.emit import mathematics
from fusegrad.codegen.emit.statements import call, literal

F32 = Input("f32", (M,))
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 0.6, -0.6, 9.0109, 1e-45, -1e-40, 3e38, 88.0, 1e-8]


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels under the interpreter have it, too, with torch's powers and reciprocals."""
    monkeypatch.setitem(mathematics.rules, "tanh", lambda d, x: call("tanh", x, literal("False")))


@pytest.mark.usefixtures("formula")
def test_it_is_as_accurate_as_eager() -> None:
    """As accurate as the device library's, which eager calls there: CUDA documents 2 ulp; 1.80 of 2,400,000 numbers."""
    torch.manual_seed(0)
    x = torch.cat([torch.tensor(SPECIAL), torch.randn(40_000) * torch.exp2(torch.randint(-30, 5, (40_000,)))])
    graph = graph_of(lambda x: x.tanh(), x=F32)
    sizes = {M: x.numel()}
    kernels = generate(graph, target=TARGETS["interpret"], hints=sizes, name="body")
    (y,) = run(kernels, module(kernels.kernels), graph, [x], sizes)
    exact, step = x.double().tanh(), torch.finfo(torch.float32).eps
    size = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=2.0**-126))))
    errors, numbers = (y.double() - exact).abs() / (size * step), ~exact.isnan()
    assert errors[numbers].max() <= 2
    assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y.signbit()[numbers], exact.signbit()[numbers])
    assert y[2] == 1.0 and y[3] == -1.0 and not y[0].signbit() and y[1].signbit()


@pytest.mark.usefixtures("formula")
def test_it_serves_16_bits() -> None:
    for dtype in ("bf16", "f16"):
        agree(lambda x: x.tanh(), {M: 999}, x=Input(dtype, (M,)))
        agree(lambda x: (x.to("f32") / 30.0).tanh() * 30.0, {M: 99, N: 50}, x=Input(dtype, (M, N)))


def test_who_has_it() -> None:
    for target, name in (
        ("cuda:90", " tanh(x, True)"),
        ("hip:gfx942", "libdevice.tanh(x)"),
        ("interpret", "libdevice.tanh(x)"),
    ):
        assert name in text_of(lambda x: x.tanh(), {M: 4096}, target, x=F32), target
    assert "libdevice.tanh(" in text_of(lambda x: x.tanh(), {M: 4096}, x=Input("f64", (M,)))
