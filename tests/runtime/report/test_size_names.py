"""Sizes in reports are called as in the kernels and the exported file: M and N, never torch's s25."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import sympy
import torch

import fusegrad
from fusegrad.runtime.report.size_names import renamed


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, row):
        ctx.save_for_backward(row)
        return x * row

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


@pytest.mark.parametrize("suffix", ["json", "html", "svg", "dot", "graphml"])
def test_what_is_exported_names_sizes(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"scaled.{suffix}"
    fusegrad.export(Scaled, "f32[64,100]", "f32[100]", path=path)
    text = path.read_text()
    assert not re.search(r"\bs\d\d\b", text)  # torch numbers them so; `.s1` is of a style
    assert "f32[M, N]" in text


def test_sizes_stand_beside_their_names(tmp_path: Path) -> None:
    path = tmp_path / "scaled.json"
    fusegrad.export(Scaled, "f32[3,64,100]", "f32[100]", path=path)
    assert set(json.loads(path.read_text())["sizes"].values()) == {3, 64, 100}
    explanation = fusegrad.explain(Scaled, "f32[3,64,100]", "f32[100]")
    assert len(set(explanation.size_names.values())) == 3


def test_only_symbols_of_the_trace_are_renamed() -> None:
    names = {sympy.Symbol("s25"): "M"}
    assert renamed("f32[s25, 2*s25] of s2 and xs25", names) == "f32[M, 2*M] of s2 and xs25"
