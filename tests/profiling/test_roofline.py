"""The least time of launches that multiply: each operation at the rate of the unit that does it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fusegrad
from fusegrad.codegen.devices import DEVICES
from fusegrad.examples.gallery.attention import Attention
from fusegrad.runtime.profile.report import MODEL, _model_rows
from fusegrad.runtime.report.page.charts import roofline
from fusegrad.runtime.report.roofline import Modelled, model_launches

H100 = DEVICES["h100"]
HEADS, ROWS, WIDTH = 16, 4096, 128
SCORES = HEADS * ROWS * ROWS


def attention(causal: bool, dtype: str = "bf16") -> list[Modelled]:
    shape = f"{dtype}[1,{HEADS},{ROWS},{WIDTH}]"
    found = fusegrad.explain(Attention, shape, shape, shape, WIDTH**-0.5, causal, target="h100")
    return model_launches(found, H100, found.sizes)


def test_products_are_for_tensor_cores_and_exponentials_for_their_unit() -> None:
    forward, queries, keys = attention(causal=False)
    assert forward.products == 2 * 2 * SCORES * WIDTH and forward.exponentials == SCORES
    assert (queries.products, keys.products) == (3 * 2 * SCORES * WIDTH, 4 * 2 * SCORES * WIDTH)
    for launch in (forward, queries, keys):
        assert launch.bound == "tensor cores"
        assert launch.microseconds == pytest.approx(launch.products / H100.products * 1e6)
        assert 0 < launch.operations - launch.products < 20 * SCORES


def test_blocks_that_are_skipped_cost_nothing() -> None:
    """Of a causal mask half is left, and the blocks on the diagonal."""
    for whole, half in zip(attention(causal=False), attention(causal=True), strict=True):
        if whole.products:
            assert 0.5 < half.products / whole.products < 0.53
            assert half.exponentials / whole.exponentials == pytest.approx(half.products / whole.products)
        assert half.bytes == pytest.approx(whole.bytes, rel=0.01)


def test_float32_is_multiplied_without_tensor_cores() -> None:
    multiplying = [m for m in attention(causal=True, dtype="f32") if m.bound != "bytes"]
    assert multiplying and all(m.products == 0 and m.bound == "operations" for m in multiplying)


class BiasGate(torch.autograd.Function):
    """A product that has what is made of it in its kernel."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, b: Any) -> Any:
        return torch.sigmoid(x @ w + b)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        raise NotImplementedError


def test_a_product_with_an_epilogue_is_for_tensor_cores_too() -> None:
    found = fusegrad.explain(BiasGate, "bf16[8192,256]", "bf16[256,128]", "bf16[128]", target="h100")
    (launch,) = model_launches(found, H100, found.sizes)
    assert found.kernels[0].kind == "triton" and launch.bound == "bytes"
    assert launch.products == 2 * 8192 * 256 * 128 < launch.operations


def test_tables_and_the_picture_have_them() -> None:
    launches = attention(causal=True)
    (first, *_) = _model_rows(launches)
    cells: dict[str, Any] = dict(zip(MODEL, first, strict=True))
    assert cells["in tensor cores"] == f"{launches[0].products:,}" and cells["bound by"] == "tensor cores"
    assert cells["exponentials"] == f"{launches[0].exponentials:,}"
    assert "stroke-dasharray" in roofline(H100, launches)  # the roof of products, above that of other operations
    assert "stroke-dasharray" not in roofline(H100, [replace(launches[0], products=0)])
