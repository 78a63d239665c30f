"""What `explain` says beside kernels: groups, a reason for every cut, what is kept, variants and their differences."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from function_samples import Linear, RMSNorm, Softmax, leaf
from test_traceable import AssignsData, Branch, Declared
from torch.autograd import Function

import fusegrad
from fusegrad.benchmarks.suite import CASES
from fusegrad.ir.codes import BY_CODE
from fusegrad.runtime.compiled.variants import nearest
from fusegrad.runtime.report.residuals import AGAIN

FIRST = list({case.function: case for case in CASES}.values())


@pytest.mark.parametrize("case", FIRST[1::3], ids=lambda c: c.function.__name__)
def test_every_cut_of_the_suite_has_a_reason(case) -> None:
    found = fusegrad.explain(case.function, *case.args)
    facts = found.to_dict()
    for direction, report in found.directions.items():
        assert len(report.cuts) == max(len(report.launches) - 1, 0)
        assert sum(len(g.kernels) for g in report.groups) == sum(k.kind == "triton" for k in report.launches)
        for cut in facts["cuts"][direction]:
            assert BY_CODE[cut["code"]].code.startswith("FG1") and cut["reason"] in str(found)
    assert sum(k.bytes for k in found.kept if k.how != AGAIN) == found.saved_bytes
    json.dumps(facts)


class Sorted(Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 2).sort(-1)[0].exp()


class Inner(Function):
    is_traceable = False

    @staticmethod
    def forward(ctx, x):
        return x + 1

    @staticmethod
    def backward(ctx, g):
        return g


class Outer(Function):
    @staticmethod
    def forward(ctx, x):
        return Inner.apply(x * 2).exp()

    @staticmethod
    def backward(ctx, g):
        return g


class TwoSpaces(Function):
    @staticmethod
    def forward(ctx, x, y):
        return x.exp(), y.sin().sum(0)


class Columns(Function):
    @staticmethod
    def forward(ctx, x):
        return x - (x.sum(0) * x).sum(1, keepdim=True)


class Projected(Function):
    @staticmethod
    def forward(ctx, x, w, b):
        return torch.softmax(x, -1) @ w + b


CUTS = [
    (Linear, ("f32[640,1280]", "f32[320,1280]", "f32[320]"), ["FG110"], None),
    (Sorted, ("f32[64,128]",), ["FG111", "FG111"], "test_boundaries.py:"),
    (TwoSpaces, ("f32[64,128]", "f32[3,5,7]"), ["FG116"], None),
    (Columns, ("f32[4096,4096]",), ["FG117", "FG117"], None),
    (Projected, ("f32[64,128]", "f32[128,32]", "f32[32]"), ["FG118"], "test_boundaries.py:"),
]


@pytest.mark.parametrize(("cls", "args", "codes", "place"), CUTS, ids=lambda c: getattr(c, "__name__", ""))
def test_reasons(cls, args, codes, place) -> None:
    cuts = fusegrad.explain(cls, *args).directions["forward"].cuts
    assert [c.code for c in cuts] == codes
    assert all(place is None or place in str(c) for c in cuts)


def test_an_opaque_call_is_a_cut() -> None:
    fast = fusegrad.compile(Outer)
    fast.apply(leaf(3, 4)).sum().backward()
    found = fusegrad.explain(fast, leaf(3, 4))
    cuts = found.directions["forward"].cuts
    assert [c.code for c in cuts] == ["FG112", "FG112"] and "`Inner` runs in eager" in cuts[0].reason
    assert found.to_dict()["opaque"][0]["code"] == "FG040"


class Product(Function):
    @staticmethod
    def forward(ctx, x):
        h = torch.sigmoid(x)
        ctx.save_for_backward(x, h)
        return x * h

    @staticmethod
    def backward(ctx, g):
        x, h = ctx.saved_tensors
        return g * (h + x * h * (1 - h))


def test_what_is_computed_again_is_named_with_its_bytes() -> None:
    found = fusegrad.explain(Product, "f32[64,128]")
    assert [(k.name, k.bytes, k.how) for k in found.kept] == [
        ("x", 4 * 64 * 128, "saved as written"), ("h", 4 * 64 * 128, AGAIN),
    ]  # fmt: skip
    assert "computed again" in str(found) and found.saved_bytes == 4 * 64 * 128


def test_a_derived_backward_is_handed_what_it_would_compute_again() -> None:
    @fusegrad.compile
    def gated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.sigmoid(x @ w)
        return h * h

    found = fusegrad.explain(gated, "bf16[64,128]", "bf16[128,32]")
    assert ("h", "bf16[64,32]", 2 * 64 * 32, "saved besides") in [(k.name, k.type, k.bytes, k.how) for k in found.kept]
    assert sum(k.bytes for k in found.kept) == found.saved_bytes and "<string>" not in str(found)


# ------------------------------------------------------------------ methods
def test_what_is_not_compiled_has_code_place_and_fix() -> None:
    for cls, code in ((AssignsData, "FG021"), (Declared, "FG001")):
        found = fusegrad.explain(cls, "f32[3]")
        forward = found.to_dict()["methods"]["forward"]
        assert forward["code"] == code and forward["fix"] == BY_CODE[code].fix and forward["where"]
        assert f"[{code}]" in str(found) and f"fix: {forward['fix']}" in str(found)
    with pytest.warns(fusegrad.FallbackWarning, match=r"\[FG021\]$"):
        fusegrad.compile(AssignsData).apply(leaf(3))
    with pytest.raises(fusegrad.NotTraceableError, match=r"depends on the data of a tensor \[FG010\]") as raised:
        fusegrad.compile(Branch, fullgraph=True).apply(leaf(3))
    assert raised.value.code == "FG010"


# ------------------------------------------------------------------ variants
SCALE = 2.0


class Scaled(Function):
    @staticmethod
    def forward(ctx, x, k):
        return x * k * SCALE

    @staticmethod
    def backward(ctx, g):
        return g, None


def differences(fast: Any) -> list[str]:
    return [v.difference for v in fusegrad.explain(fast, "f32[3,4]", 1.0).variants]


def test_variants_and_what_tells_them_apart(monkeypatch) -> None:
    fast: Any = fusegrad.compile(Scaled)
    assert differences(fast) == []
    fast.apply(torch.ones(3, 4), 1.0)
    fast.apply(torch.ones(3, 4), 2.0)
    fast.apply(torch.ones(3, 4, dtype=torch.bfloat16), 2.0)
    fast.apply(leaf(3, 4), 2.0)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    fast.apply(leaf(3, 4), 2.0)
    assert differences(fast) == [
        "", "k: 1.0 -> 2.0", "x: float32 -> bfloat16", "x: nothing -> requires grad", "global SCALE: 2.0 -> 3.0",
    ]  # fmt: skip
    text = str(fusegrad.explain(fast, "f32[3,4]", 1.0))
    assert "traced for 5 specializations" in text and "1. x: float32, 2 axes, cpu; k: 1.0" in text


def test_variants_by_size_and_their_kernels() -> None:
    fast: Any = fusegrad.compile(RMSNorm, backend="interpret")
    fast.apply(leaf(8, 16), leaf(16))
    fast.apply(leaf(1, 16), leaf(16))
    first, second = fusegrad.explain(fast, "f32[8,16]", "f32[16]").variants
    names = list(first.facts)[:2]
    assert f"2 <= {names[0]}.shape[0]" in first.conditions
    assert f"{names[0]}.shape[0] == 1" in second.difference
    assert any(f"{names[0]}.shape[1] = 16" in k for k in first.kernels)


def test_the_nearest_has_the_fewest_differences() -> None:
    assert nearest({"a": "1", "b": "2"}, [{"a": "1", "b": "3"}, {"a": "0", "b": "0"}]) == 0
    assert nearest({"a": "1"}, []) is None


# ------------------------------------------------------------------ notebooks
def test_html_is_one_fragment_that_is_whole() -> None:
    fast: Any = fusegrad.compile(Softmax)
    fast.apply(leaf(3, 4))
    page = fusegrad.explain(fast, "f32[3,4]")._repr_html_()
    assert page.lstrip().startswith('<div class="fusegrad">') and page.rstrip().endswith("</div>")
    assert all(page.count(f"<{tag}") == page.count(f"</{tag}>") for tag in ("div", "table", "details", "svg"))
    assert "<script" not in page and not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert "Softmax_forward" in page and "Specializations" in page and "@triton" in page
    assert "prefers-color-scheme: dark" in page
    opaque = fusegrad.explain(AssignsData, "f32[3]")._repr_html_()
    assert "FG021" in opaque and BY_CODE["FG021"].fix[:20] in opaque
