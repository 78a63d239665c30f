"""A batch of products added up where an index says: one kernel, which walks those of its place alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import INTERPRET, Input, K, M, N, T, agree, emit, graph_of, symbol
from test_matrix_products import B, dot

from fusegrad.codegen import TARGETS, generate
from fusegrad.codegen.emit.reductions import selection

E = symbol("e")
SIZES = {M: 19, N: 35, K: 42, B: 37, E: 5}
TILED = replace(INTERPRET, units=1000)


def by_expert(x: T, g: T, index: T) -> T:
    zeros = T(emit("full", value=0.0, shape=(E, M, N), dtype=x.v.dtype))
    return T(emit("scatter", zeros.v, dot(x, g, "bki,bkj->bij").v, index.v, axes=(0,), mode="add"))


def to_a_base(x: T, g: T, index: T, base: T) -> T:
    """Places are in the middle of what is added to; an operand is made on the way."""
    return T(emit("scatter", base.v, dot(x, g.sigmoid(), "bki,bjk->bij").v, index.v, axes=(1,), mode="add"))


def inputs(dtype: str, body: Any) -> dict[str, Input]:
    if body is by_expert:
        return {"x": Input(dtype, (B, K, M)), "g": Input(dtype, (B, K, N)), "index": Input("i64", (B,))}
    plain = {"x": Input(dtype, (B, K, M)), "g": Input(dtype, (B, N, K)), "index": Input("i64", (B,))}
    return {**plain, "base": Input(dtype, (M, E, N))}


@pytest.mark.parametrize("lanes", [1024, 16])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("body", [by_expert, to_a_base])
def test_one_kernel_agrees_with_the_library(body: Any, dtype: str, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MOST_LANES", lanes)
    index = torch.tensor([3, 0, 3, 4] * 9 + [0])  # in no order, and none for two of the places
    (kernel,) = agree(body, SIZES, TILED, slack=40.0, given={"index": index}, **inputs(dtype, body)).kernels
    assert "tl.atomic" not in kernel.source and kernel.source.count("tl.range(") == 2
    assert "device_assert" in kernel.source, "torch's own addition would say that an index is out of range"


@pytest.mark.parametrize("lengths", [{B: 1}, {K: 7}, {K: 64, B: 16}])
def test_short_and_whole_sums(lengths: dict[Any, int]) -> None:
    sizes = {**SIZES, **lengths}
    index = torch.randint(0, 5, (sizes[B],))
    agree(by_expert, sizes, TILED, slack=40.0, given={"index": index}, **inputs("f32", by_expert))


def test_what_is_not_selected_is_not_read() -> None:
    """The operands once, and an operation for each element of the products."""
    graph = graph_of(by_expert, **inputs("bf16", by_expert))
    hints = {**SIZES, K: 64, M: 64, N: 64}
    (kernel,) = generate(graph, target=TARGETS["cuda:90"], hints=hints, name="body").kernels
    assert kernel.reads["x_ptr"] == 2 * B * K * M and kernel.reads["g_ptr"] == 2 * B * K * N
    assert kernel.operations.xreplace(hints) < 2.2 * 37 * 64**3
