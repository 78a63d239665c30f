"""What a person reads: the emitted text of a few kernels. `pytest --update-golden` rewrites tests/golden."""

from __future__ import annotations

from pathlib import Path

import pytest
from bodies import BODIES
from harness import K, M, N, graph_of
from test_layout import CASES as LAYOUTS
from test_matrix_products import CASES as PRODUCTS
from test_matrix_products import B
from test_mixed_axes import CASES as MIXED

from fusegrad.codegen import TARGETS, generate, module

GOLDEN = Path(__file__).parent.parent / "golden"
KERNELS = {
    "rms_forward": {M: 4096, N: 4096},
    "rms_backward": {M: 4096, N: 4096},
    "softmax": {M: 4096, N: 4096},
    "softmax_packed": {M: 4096, N: 65536},
    "cross_entropy": {M: 8192, N: 128256},
    "lookup": {M: 32000, N: 4096, K: 8192},
    "swiglu": {M: 32},
    "rope": {M: 4096},
    "dyt_backward": {M: 16384, N: 4096},
    "group_norm_backward": {M: 32, N: 512, K: 4096},
    "rope_interleaved": {M: 4096, N: 64},
    "linear_silu": {M: 8192, N: 4096, K: 128},
    "masked_scores": {B: 64, M: 1024, N: 1024},
}
ALL = {
    **BODIES,
    "softmax_packed": BODIES["softmax"],
    "group_norm_backward": MIXED["group backward"],
    "rope_interleaved": LAYOUTS["turned"],
    "linear_silu": PRODUCTS["linear bf16"],
    "masked_scores": PRODUCTS["scores"],
}


@pytest.mark.parametrize("body", KERNELS)
def test_golden(body: str, request: pytest.FixtureRequest) -> None:
    function, inputs = ALL[body]
    sizes = {K: 8, N: 64, **KERNELS[body]}
    kernels = generate(graph_of(function, **inputs), target=TARGETS["cuda:90"], hints=sizes, name=body)
    text = module(kernels.kernels, f"{body} for cuda:90")
    path = GOLDEN / f"{body}.py"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text()
