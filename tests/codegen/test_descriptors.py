"""Tiles by descriptors of the tensor memory accelerator: where they are, what they read, and what is not read so."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from harness import INTERPRET, K, M, N, graph_of
from test_matrix_products import CASES, errors

import fusegrad
from fusegrad.codegen import TARGETS, generate, module
from fusegrad.codegen import kernel as kernels
from fusegrad.codegen.devices import DEVICES
from fusegrad.codegen.kernel import Leaning
from fusegrad.codegen.proofs import prove
from fusegrad.ir.switches import switched_off
from fusegrad.runtime.kernels.cross_compile.pool import compile_for
from fusegrad.runtime.kernels.machine_code.hot_loops import hot_loops
from fusegrad.runtime.kernels.machine_code.model import model_figures

sys.path.insert(0, str(Path(__file__).parents[1] / "streams"))
from beside_eager import differences

WITH, WITHOUT = Leaning(accelerated=1), Leaning(accelerated=-1)
DESCRIBED = replace(INTERPRET, units=1000, leaning=WITH)
SIZES = {M: 96, N: 80, K: 136}


# ------------------------------------------------------------------ products
@pytest.mark.parametrize("case", ["linear f16", "gated bf16", "padded rows bf16", "added bf16", "widened"])
def test_products_are_as_exact_with_descriptors(case: str) -> None:
    sizes = {**SIZES, **({K: 40} if "added" in case else {})}
    ours, library, kernel = errors(case, sizes, DESCRIBED)
    assert "_tiles.load(" in kernel.source
    assert ours <= 2 * library + (2.0**-22 if case == "widened" else 2.0**-7)


def source(case: str, target: str, sizes: dict[sympy.Symbol, int], leaning: Leaning = Leaning()) -> str:  # noqa: B008
    body, inputs = CASES[case]
    to = replace(TARGETS[target], leaning=leaning)
    graph = graph_of(body, **inputs)
    found = generate(graph, target=to, hints=sizes, name="body")
    assert all(proof.proved for proof in prove(graph, found))
    return found.kernels[0].source


LARGE = {M: 4096, N: 256, K: 512}


def test_products_of_plain_operands_have_them_on_hopper() -> None:
    text = source("linear bf16", "cuda:90", LARGE)
    assert "x_tiles = tl.make_tensor_descriptor(x_ptr, [M, K], [K, 1], [BLOCK_M, BLOCK_K])\n" in text
    assert "w = w_tiles.load([k_at, col_at])\n" in text
    for without in (source("linear bf16", "cuda:80", LARGE), source("linear bf16", "hip:gfx942", LARGE)):
        assert "descriptor" not in without
    with switched_off(("descriptors",)):
        assert "descriptor" not in source("linear bf16", "cuda:90", LARGE)


def test_what_the_accelerator_does_not_take_is_read_through_pointers() -> None:
    """Rows that begin at odd places; and what is computed before it is multiplied is in registers anyway."""
    odd = source("linear bf16", "cuda:90", {**LARGE, K: 511, N: 255}, WITH)
    assert "descriptor" not in odd
    assert source("linear bf16", "cuda:90", {**LARGE, N: 255}, WITH).count("make_tensor_descriptor") == 1
    assert "x_tiles" not in source("low prologue", "cuda:90", LARGE, WITH)
    assert "descriptor" not in source("linear f32", "cuda:90", LARGE, WITH)


def test_operands_the_other_way_round_are_transposed() -> None:
    text = source("padded rows bf16", "cuda:90", LARGE, WITH)
    assert "w = tl.trans(w_tiles.load([col_at, k_at]))" in text
    assert "x_tiles = tl.make_tensor_descriptor(x_ptr, [M, K], [x_stride, 1], [BLOCK_M, BLOCK_K])\n" in text


# ------------------------------------------------------------------ streams
class Attention(torch.autograd.Function):
    """Backward's matrices are all read along the stream, too: the queries by the kernel for keys."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, bias: Any) -> Any:
        p = torch.softmax(q @ k.mT * 0.25 + bias, -1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        q, k, v, p = ctx.saved_tensors
        dp = g @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        return ds @ k * 0.25, ds.mT @ q * 0.25, p.mT @ g, None


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("interpret", "cuda:90"):
        monkeypatch.setitem(kernels.TARGETS, name, replace(TARGETS[name], leaning=WITH))


def contiguous(x: torch.Tensor) -> torch.Tensor:
    return x


def heads_behind_rows(x: torch.Tensor) -> torch.Tensor:
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(x.requires_grad)


def rows_behind_columns(x: torch.Tensor) -> torch.Tensor:
    return x.detach().mT.contiguous().mT.requires_grad_(x.requires_grad)


@pytest.mark.parametrize("layout", [contiguous, heads_behind_rows, rows_behind_columns])
@pytest.mark.parametrize("n", [72, 40])
def test_a_stream_by_descriptors_is_eagers(layout: Callable[[Any], Any], n: int, described: None) -> None:
    random = torch.Generator().manual_seed(n)
    tensors = [torch.randn(2, 3, n, 24, generator=random).to(torch.bfloat16).requires_grad_() for _ in range(3)]
    arguments = [*map(layout, tensors), torch.randn(n, n, generator=random).to(torch.bfloat16)]
    cls = type("Described", (Attention,), {"__module__": __name__})
    assert not differences(fusegrad.compile(cls, backend="interpret").apply, Attention.apply, arguments, layout)
    text = fusegrad.explain(cls, *arguments, target="interpret").module
    assert len(re.findall(r"= (?:tl\.trans\()?[qkvg]\w*_tiles\.load\(", text)) >= 6


def heads(d: int) -> list[torch.Tensor]:
    return [torch.empty(2, 16, 4096, d, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize(("d", "target", "expected"), [(128, "cuda:90", 2), (64, "cuda:90", 0), (128, "cuda:80", 0)])
def test_a_stream_has_them_where_a_turn_copies_much(d: int, target: str, expected: int) -> None:
    bias = torch.empty(4096, dtype=torch.bfloat16, device="meta")
    found = fusegrad.explain(Attention, *heads(d), bias, target=target)
    (forward,) = (k for k in found.kernel_records if k.name.endswith("_forward"))
    assert forward.source.count("make_tensor_descriptor") == expected
    assert ("; tiles by descriptors\n" in str(found)) == (expected > 0)


# ------------------------------------------------------------------ machine code
def test_a_turn_of_a_product_issues_less_with_them() -> None:
    """The rule holds what it says; and the model of a GPU can follow loops that wait for the accelerator."""
    issued = {}
    for leaning in (WITH, WITHOUT):
        body, inputs = CASES["linear bf16"]
        target = replace(TARGETS["cuda:90"], leaning=leaning)
        found = generate(graph_of(body, **inputs), target=target, hints=LARGE, name="body")
        (kernel,) = found.kernels
        binary = compile_for([kernel], module([kernel]), ["cuda:90"])[kernel.name]["cuda:90"]
        assert (binary.workspace > 0) == kernel.has_descriptors and binary.spills == 0
        assert model_figures(kernel, binary, LARGE, DEVICES["h100"])["model"]
        issued[leaning] = sum(loop.instructions for loop in hot_loops(binary.asm["cubin"], kernel.name))
    assert issued[WITH] < 0.9 * issued[WITHOUT]
