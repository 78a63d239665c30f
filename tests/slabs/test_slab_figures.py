"""The figures of slabs at real sizes: launches, bytes beside the floor, memory beside eager's. Nothing runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import fusegrad
from fusegrad.runtime.report.explanation import Explanation

sys.path.insert(0, str(Path(__file__).parents[1] / "streams"))
sys.path.insert(0, str(Path(__file__).parent))
from losses import LOSSES

T, H, V, B = 8192, 4096, 128256, 2
MB = 1 << 20
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "LinearCrossEntropy": (f"i64[{T}]",),
    "IgnoreIndex": (f"i64[{T}]",),
    "InForward": (f"i64[{T}]",),
    "Bias": (f"bf16[{V}]", f"i64[{T}]"),
    "Smoothed": (f"i64[{T}]", 0.1, 1e-4),
    "Softcapped": (f"i64[{T}]", 30.0),
}
OVER_THE_FLOOR = 1.2
each = pytest.mark.parametrize("name", ARGUMENTS)


def explained(name: str, slab_bytes: int | None = None) -> Explanation:
    cls = next(c.cls for c in LOSSES if c.name == name)
    fast = fusegrad.compile(cls, slab_bytes=slab_bytes)
    return fusegrad.explain(fast, f"bf16[{T},{H}]", f"bf16[{V},{H}]", *ARGUMENTS[name])


@each
def test_bytes_are_near_the_floor_and_memory_is_bounded(name: str) -> None:
    found = explained(name)
    walked = [s for report in found.directions.values() for s in report.slabs.values()]
    assert len(walked) == (1 if name == "InForward" else 2)
    for slabs in walked:
        assert slabs.bytes <= OVER_THE_FLOOR * slabs.least
        assert slabs.held <= slabs.limit == 256 * MB < slabs.at_once


@each
def test_memory_beside_eager(name: str) -> None:
    """Besides arguments a call takes its results and a slab; eager takes the logits several times."""
    logits, gradients = T * V * B, (T + V) * H * B
    for report in explained(name).directions.values():
        if report.slabs:
            assert report.memory is not None and report.memory.eager is not None
            assert report.memory.eager >= logits and report.memory.own <= gradients + 257 * MB
            assert f"beside the arguments: {report.memory.own:,} bytes; eager: at least" in str(report.memory)


def test_the_floor_of_forward() -> None:
    """x once, w once a slab, logits written and read; rows are small."""
    (slabs,) = explained("IgnoreIndex").directions["forward"].slabs.values()
    assert slabs.least == pytest.approx(B * (T * H + slabs.slabs * V * H + 2 * T * V), rel=1e-3)
    assert slabs.slabs == -(-T * V * B // (256 * MB)) and slabs.dim == "x.shape[0]"


def test_the_floor_of_backward_along_classes() -> None:
    """Where forward keeps the sums of rows: w and dw once, x and dx once a slab."""
    (slabs,) = explained("IgnoreIndex").directions["backward"].slabs.values()
    k = slabs.slabs
    operands, gradients = 2 * V * H + 2 * k * T * H, V * H + (2 * k - 1) * T * H
    assert slabs.least == pytest.approx(B * (operands + gradients + 5 * T * V), rel=1e-3)
    assert slabs.dim == "w.shape[0]"


def test_the_floor_of_backward_along_tokens() -> None:
    """Where forward keeps nothing of use: x and dx once, w and dw once a slab."""
    (slabs,) = explained("LinearCrossEntropy").directions["backward"].slabs.values()
    k = slabs.slabs
    operands, gradients = 2 * T * H + 2 * k * V * H, T * H + (2 * k - 1) * V * H
    assert slabs.least == pytest.approx(B * (operands + gradients + 5 * T * V), rel=1e-3)
    assert slabs.dim == "x.shape[0]"


def test_gradients_in_forward_take_one_walk() -> None:
    """Three products of logits' size in all, where others make the logits twice."""
    products = {
        name: sum(k.times for k in explained(name).kernels if k.name == "dot") / 8 for name in ("InForward", "Bias")
    }
    assert products == {"InForward": 3, "Bias": 4}


def test_launches_are_those_of_all_slabs() -> None:
    found = explained("IgnoreIndex")
    report = found.directions["forward"]
    (slabs,) = report.slabs.values()
    times = [k.times for k in report.launches]
    assert times.count(slabs.slabs) == slabs.launches == 2 and report.launch_count == sum(times)
    facts = json.loads(json.dumps(found.to_dict()))
    assert facts["launches"]["forward"] == report.launch_count
    assert report.memory is not None and facts["peak_memory"]["forward"]["own"] == report.memory.own
    assert facts["slabs"]["forward"][0]["rows"] == slabs.rows


def test_a_larger_bound_is_fewer_slabs() -> None:
    counts, moved = [], []
    for bound in (128 * MB, 512 * MB, 4096 * MB):
        report = explained("IgnoreIndex", bound).directions["forward"]
        counts.append(next((s.slabs for s in report.slabs.values()), 1))
        moved.append(report.moved)
    assert counts == [16, 4, 1] and moved == sorted(moved, reverse=True)


def test_the_report_says_so() -> None:
    text = str(explained("IgnoreIndex"))
    assert "slabs of x.shape[0]: 8 of 1,024 rows, 2 launches each; " in text
    assert "(slab_bytes 268,435,456)" in text and "x the least of this form" in text
    assert ": in slabs, 8 of 1024 rows, " in text and "[FG121]" in text


def test_kernels_of_a_slab_are_proved() -> None:
    assert all(proof.proved for proof in explained("IgnoreIndex").proofs)
