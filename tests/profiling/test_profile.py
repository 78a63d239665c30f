"""The profile: what is measured and what is modelled stay apart; figures that can be counted by hand are right."""

from __future__ import annotations

import json
import time
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad
from fusegrad.__main__ import main
from fusegrad.benchmarks import functions as f
from fusegrad.runtime.profiling.devices import DEVICES, UnknownDeviceError
from fusegrad.runtime.profiling.measure import summary, times_of
from fusegrad.runtime.profiling.profile import Profile, ProfileArgumentError


class Slow(Function):
    """Eager sleeps, the compiled one cannot be captured and sleeps too: times that are known."""

    is_traceable = False

    @staticmethod
    def forward(ctx, x):
        time.sleep(0.004)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        time.sleep(0.008)
        return g * 2


@pytest.fixture(scope="module")
def found() -> Profile:
    return fusegrad.profile(f.SwiGLU, "bf16[64,128]", "bf16[64,128]", device="h200", seconds=0.02)


def test_both_directions_of_both_candidates_are_timed(found: Profile) -> None:
    assert [(m.candidate, m.direction) for m in found.measured] == [
        ("fusegrad", "forward"), ("fusegrad", "backward"), ("eager", "forward"), ("eager", "backward"),
    ]  # fmt: skip
    for m in found.measured:
        assert m.times is not None and 0 < m.times.p10 <= m.times.median <= m.times.p90 and m.times.calls >= 10
    assert found.backend == "reference" and found.machine.startswith("CPU")
    assert {r["name"] for r in found.operations["forward"]} & {"aten::mul", "aten::sigmoid", "aten::silu"}


def test_the_model_counts_bytes_and_operations(found: Profile) -> None:
    forward, backward = found.modelled
    n = 64 * 128
    assert (forward.bytes, backward.bytes) == (3 * 2 * n, 5 * 2 * n)
    assert forward.operations % n == 0 and 3 <= forward.operations / n <= 8
    assert forward.microseconds == pytest.approx(forward.bytes / 4.8e12 * 1e6) and forward.bound == "bytes"


def test_a_product_is_bound_by_its_operations() -> None:
    class Product(Function):
        @staticmethod
        def forward(ctx, x, y):
            return x @ y

    found = fusegrad.profile(Product, "f32[512,512]", "f32[512,512]", seconds=0.0)
    assert [(m.operations, m.bound) for m in found.modelled if m.kind == "library"] == [(2 * 512**3, "operations")]
    assert [m.error[:19] for m in found.measured] == ["", "NotImplementedError"] * 2, "it has no backward"


def test_times_are_what_the_clock_says() -> None:
    found = fusegrad.profile(Slow, "f32[4]", seconds=0.05)
    for m in found.measured:
        assert m.times is not None and m.times.p10 >= (4000 if m.direction == "forward" else 8000)
    assert found.modelled == [], "what runs as written has no kernels to model"
    fast, slow = (times_of(lambda s=s: time.sleep(s), torch.device("cpu"), 0.0).median for s in (0.001, 0.003))
    assert slow > 2 * fast
    assert summary([float(i) for i in range(101)]) == (t := summary(list(map(float, range(100, -1, -1)))))
    assert (t.median, t.p10, t.p90, t.calls) == (50, 10, 90, 101)


def test_saved_bytes_are_those_of_the_class() -> None:
    class Saves(Function):
        @staticmethod
        def forward(ctx, x):
            mask = x > 0
            ctx.save_for_backward(x, mask)
            return x * mask

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[1]

    assert fusegrad.profile(Saves, torch.randn(100), seconds=0.0).saved == {"fusegrad": 100, "eager": 100}


def test_files(found: Profile, tmp_path: Path) -> None:
    for name in ("p.json", "p.html", "p.trace.json"):
        found.write(tmp_path / name)
    known = json.loads((tmp_path / "p.json").read_text())
    assert set(known) >= {"measured", "modelled", "versions"} and known["modelled"]["device"]["target"] == "cuda:90"
    assert "modelled" not in json.dumps(known["measured"]), "measured and modelled figures are apart"
    page = (tmp_path / "p.html").read_text()
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "") and "<script" not in page
    pictures = [xml.fromstring(f"<svg{part.split('</svg>')[0]}</svg>") for part in page.split("<svg")[1:]]
    assert len(pictures) == 2 and "SwiGLU_forward" in "".join(pictures[1].itertext())
    events = json.loads((tmp_path / "p.trace.json").read_text())["traceEvents"]
    assert {e["name"] for e in events} >= {"aten::mul"}
    with pytest.raises(ProfileArgumentError, match=r"cannot be written as p\.png"):
        found.write(tmp_path / "p.png")


def test_refusals() -> None:
    with pytest.raises(UnknownDeviceError, match="one of " + ", ".join(DEVICES)):
        fusegrad.profile(f.SwiGLU, "f32[4,4]", "f32[4,4]", device="tpu")
    with pytest.raises(ProfileArgumentError, match="no baseline 'jax'"):
        fusegrad.profile(f.SwiGLU, "f32[4,4]", "f32[4,4]", baselines=("jax",))


def test_the_command(capsys: Any, tmp_path: Path) -> None:
    where = ["profile", "fusegrad.benchmarks.functions:Softmax", "f32[8,16]", "--seconds", "0"]
    assert main([*where, "--device", "mi300x", "-o", str(tmp_path / "p.json")]) == 0
    out = capsys.readouterr().out
    assert "measured on CPU" in out and "model of AMD Instinct MI300X" in out and (tmp_path / "p.json").exists()
