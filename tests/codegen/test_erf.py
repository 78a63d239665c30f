"""erf on NVIDIA's GPUs: the device library's two formulas and a choice of results, not of each coefficient."""

from __future__ import annotations

import math
import re

import pytest
import torch
from harness import Input, M, agree, graph_of, run, text_of

from fusegrad.codegen import TARGETS, generate, module
from fusegrad.codegen.emit import mathematics
from fusegrad.codegen.emit.statements import call, literal
from fusegrad.runtime.kernels.cross_compile import worker
from fusegrad.runtime.kernels.cross_compile.pool import job_of

F32 = Input("f32", (M,))
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.00296, 1.0029599, -1.00296, 4.1, 1e-45, -1e-40, 3e38, 88.0]


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels under the interpreter have it, too, with torch's powers."""
    monkeypatch.setitem(mathematics.rules, "erf", lambda d, x: call("erf", x, literal("False")))


@pytest.mark.usefixtures("formula")
def test_it_is_as_accurate_as_eager() -> None:
    x = torch.cat([torch.tensor(SPECIAL), torch.randn(40_000) * torch.exp2(torch.randint(-30, 4, (40_000,)))])
    graph, sizes = graph_of(lambda x: x.erf(), x=F32), {M: x.numel()}
    kernels = generate(graph, target=TARGETS["interpret"], hints=sizes, name="body")
    (y,) = run(kernels, module(kernels.kernels), graph, [x], sizes)
    exact, step = x.double().erf(), torch.finfo(torch.float32).eps
    size = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=2.0**-126))))
    errors, eager = ((v.double() - exact).abs() / (size * step) for v in (y, x.erf()))
    numbers = ~exact.isnan()
    assert errors[numbers].max() <= 1.5 * eager[numbers].max() + 1
    assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y.signbit()[numbers], exact.signbit()[numbers])
    assert y[2] == 1.0 and y[3] == -1.0


@pytest.mark.usefixtures("formula")
def test_it_serves_16_bits() -> None:
    for dtype in ("bf16", "f16"):
        agree(lambda x: x.erf(), {M: 999}, x=Input(dtype, (M,)))


def test_who_has_it() -> None:
    for target, name in (
        ("cuda:90", " erf(x, True)"),
        ("hip:gfx942", "libdevice.erf(x)"),
        ("interpret", "libdevice.erf(x)"),
    ):
        assert name in text_of(lambda x: x.erf(), {M: 4096}, target, x=F32), target
    assert "libdevice.erf(" in text_of(lambda x: x.erf(), {M: 4096}, x=Input("f64", (M,)))


def test_its_coefficients_are_the_library_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that sm_90 gets for either: seven for each formula, where they meet, and one."""

    def constants() -> set[str]:
        kernels = generate(graph_of(lambda x: x.erf(), x=F32), target=TARGETS["cuda:90"], hints={M: 4096}, name="body")
        job = job_of(kernels.kernels[0], module(kernels.kernels), "cuda:90")
        return set(re.findall(r"0f[0-9A-F]{8}", str(worker._compile(job).asm["ptx"])))

    ours = constants()
    monkeypatch.delitem(mathematics.ptx_rules, "erf")
    library = constants()
    assert len(library) >= 16 and library <= ours, (library - ours, ours - library)
