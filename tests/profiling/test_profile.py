"""The profile: what is measured and what is modelled stay apart; figures that can be counted by hand are right."""

from __future__ import annotations

import itertools
import json
import time
import xml.etree.ElementTree as xml
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function
from torch.utils.benchmark.utils.common import Measurement, TaskSpec

import fusegrad
from fusegrad.__main__ import main
from fusegrad.benchmarks import functions as f
from fusegrad.benchmarks.suite import CASES
from fusegrad.codegen import TARGETS, Kernel, Pointer, Ref
from fusegrad.codegen.devices import MULTIPROCESSORS
from fusegrad.ir.passes.fuse import Group
from fusegrad.runtime.execution import targets
from fusegrad.runtime.kernels import launch
from fusegrad.runtime.kernels.launch_metadata import launch_cost
from fusegrad.runtime.kernels.machine_code.model import copy_seconds
from fusegrad.runtime.profile import inductor_costs as inductor_costs_module
from fusegrad.runtime.profile import report as tables
from fusegrad.runtime.profile.devices import DEVICES, UnknownDeviceError
from fusegrad.runtime.profile.inductor_costs import inductor_costs
from fusegrad.runtime.profile.measure import Times, peak_bytes, summary, times_of
from fusegrad.runtime.profile.report import Profile, ProfileArgumentError
from fusegrad.runtime.report.roofline import _operations
from fusegrad.runtime.values.sizes import number

CPU = torch.device("cpu")
RESULTS = Path(f.__file__).parent / "results"


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
    assert found.modelled == [], "what runs in eager has no kernels to model"
    fast, slow = (times_of(lambda s=s: time.sleep(s), torch.device("cpu"), 0.0).median for s in (0.001, 0.003))
    assert slow > 2 * fast
    assert summary([float(i) for i in range(101)]) == (t := summary(list(map(float, range(100, -1, -1)))))
    assert (t.median, t.p10, t.p90, t.calls, t.iqr) == (50, 10, 90, 101, 50)


def test_interruptions_do_not_move_the_median() -> None:
    """Of calls that are timed one by one, as they would of blocks that hold an interruption each."""
    called = itertools.count(1)

    def call() -> None:
        if next(called) % 5 == 0:
            time.sleep(0.002)

    times = times_of(call, CPU, 0.1)
    assert times.median < 100 and times.p90 > 2000 and times.calls >= 50


@pytest.mark.parametrize(("spread", "noisy"), [(0.05, False), (0.15, True)])
def test_a_wide_spread_is_noise(spread: float, noisy: bool) -> None:
    """The middle half over more than a tenth of the median, as torch's Measurement has it; outliers alone are not."""
    samples = [100 * (1 + spread * (i - 50) / 50) for i in range(101)]
    times = summary(samples)
    assert times.noisy is noisy and times.iqr == pytest.approx(100 * spread)
    raw = Measurement(1, samples, TaskSpec("call()", "pass"))
    assert raw.has_warnings is noisy and raw.iqr == pytest.approx(times.iqr)
    assert not summary([100.0] * 9 + [500.0]).noisy


def test_a_gpu_is_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's do_bench, here a stub for want of a GPU: milliseconds, and again until there are ten."""
    asked: list[dict[str, Any]] = []

    def do_bench(call: Any, **how: Any) -> list[float]:
        call()
        asked.append(how)
        return [0.5, 0.25, 0.75, 0.5, 0.5]

    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    times = times_of(lambda: None, torch.device("cuda"), 0.02)
    assert asked == [{"rep": 20.0, "return_mode": "all"}] * 2
    assert times == Times(500, 250, 750, 10, 0)


def test_a_gpu_without_triton_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr("fusegrad.runtime.profile.measure.is_triton_installed", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: (waited.append(1), time.sleep(0.001)))
    times = times_of(lambda: None, torch.device("cuda"), 0.0)
    assert times.p10 >= 1000 and len(waited) == times.calls == 10


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

    profile = fusegrad.profile(Saves, torch.randn(100), seconds=0.0)
    assert profile.saved == {"fusegrad": 500, "eager": 500}  # x of 400 bytes, and the mask
    assert fusegrad.explain(Saves, "f32[100]").saved_bytes == 500


def test_the_most_that_a_call_holds() -> None:
    class Squares(Function):
        @staticmethod
        def forward(ctx, x):
            a = x * 2
            b = a * a
            del a
            return b.sum()

    x = torch.ones(1000)
    assert peak_bytes(lambda: x.clone(), CPU) == 4000
    assert 8000 <= peak_bytes(lambda: (x.clone() * 2).clone(), CPU) <= 8100
    found = fusegrad.profile(Squares, "f32[1000]", seconds=0.0).peaks
    assert {name: set(peaks) for name, peaks in found.items()} == {n: {"forward"} for n in ("fusegrad", "eager")}
    assert 8000 <= found["eager"]["forward"] <= 8300


def test_what_our_launches_reached(found: Profile) -> None:
    assert list(found.achieved()) == [], "on a CPU none of our launches ran"
    rows = {"forward": [{"name": "SwiGLU_forward", "calls": 2.0, "microseconds": 8.0}, {"name": "x", "calls": 1.0}]}
    on_gpu = replace(found, operations=rows, copy_bandwidth=4e10)
    (reached,) = on_gpu.achieved()
    n = 64 * 128
    assert reached.microseconds == 4 and reached.bytes_per_second == pytest.approx(6 * n / 4e-6)
    assert reached.operations_per_second == pytest.approx(found.modelled[0].operations / 4e-6)
    assert reached.of_copy == pytest.approx(6 * n / 4e-6 / 4e10)
    text = str(replace(on_gpu, operations={"forward": rows["forward"][:1]}))
    assert "our launches, as measured" in text and "a copy moves 40 GB/s" in text and " 31" in text
    assert on_gpu.to_dict()["measured"]["launches"][0]["name"] == "SwiGLU_forward"


@pytest.mark.parametrize(
    ("target", "registers", "shared", "warps", "expected"),
    [
        ("cuda:90", 32, 0, 4, 1.0), ("cuda:90", 64, 0, 4, 0.5), ("cuda:90", 255, 0, 8, 0.125),
        ("cuda:90", 38, 32, 4, 0.75), ("cuda:80", 32, 100 << 10, 4, 4 / 64), ("cuda:90", 16, 0, 1, 0.5),
        ("hip:gfx942", 64, 0, 4, 1.0), ("hip:gfx942", 128, 0, 4, 0.5), ("hip:gfx942", 128, 40 << 10, 4, 4 / 32),
        ("cuda:90", -1, 0, 4, None), ("cuda:90", 255, 0, 32, 0.0),
    ],
)  # fmt: skip
def test_occupancy(target, registers, shared, warps, expected) -> None:
    assert MULTIPROCESSORS[target].occupancy(registers, shared, warps) == expected


def test_every_device_has_a_multiprocessor() -> None:
    assert {d.target for d in DEVICES.values()} <= set(MULTIPROCESSORS)
    found = fusegrad.profile(f.Softmax, "f32[8,64]", seconds=0.0, metrics=True)
    (facts, *_) = found.binaries.values()
    assert 0 < facts["occupancy"] <= 1 and facts["warps"] >= 1 and facts["registers"] > 0
    assert f"{100 * facts['occupancy']:.0f} %" in str(found)


def test_each_step_is_told(capsys: Any) -> None:
    fusegrad.profile(f.Softmax, "f32[4,8]", seconds=0.0, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("profile ")] == [
        f"profile Softmax {i}/4: {name} {direction}"
        for i, (name, direction) in enumerate(product(("fusegrad", "eager"), ("forward", "backward")), 1)
    ]


# ------------------------------------------------------------------ what a launch is told to move and to compute
@pytest.mark.parametrize("case", list({c.function: c for c in CASES}.values())[::5], ids=lambda c: c.function.__name__)
def test_kernels_count_what_the_graph_computes(case: Any) -> None:
    """Whatever is computed again in a second kernel is counted there; otherwise a kernel counts what its nodes do."""
    found = fusegrad.explain(case.function, *case.args)
    for report in found.directions.values():
        for step, made in zip((s for s in report.steps if isinstance(s, Group)), report.kernels, strict=True):
            nodes = sum(number(_operations(v), found.sizes) for v in step.graph.order())
            kernels = sum(number(k.operations, found.sizes) for k in made.kernels)
            assert 0.2 * nodes <= kernels <= 2.5 * nodes


def test_triton_s_profiler_is_told_bytes_and_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the hook that Triton calls; the launch itself is a stub, for want of a GPU."""
    from triton.compiler.compiler import LazyDict
    from triton.profiler.hooks.launch import LaunchHook

    told: list[dict[str, Any]] = []

    def on_device(kernel: Kernel, text: str, device: Any) -> Any:
        function = launch._on_device(kernel, text, torch.device("cuda")).function

        def run(arguments: Any, grid: int) -> None:
            by_name = dict(zip((a.name for a in kernel.arguments), arguments, strict=True)) | kernel.constants
            lazy = LazyDict({"name": kernel.name})
            lazy.add(function.launch_metadata, ((grid, 1, 1), None, by_name))
            told.append(lazy.get())

        return run

    monkeypatch.setattr(launch, "launcher", lambda kernel, text, backend, device=None: on_device(kernel, text, device))
    monkeypatch.setattr(targets, "target_for", lambda backend, device: TARGETS["cuda:90"])
    fast: Any = fusegrad.compile(f.RMSNorm, backend="triton")
    with torch.no_grad():
        for rows in (64, 100, 64):
            fast.apply(torch.randn(rows, 256), torch.ones(256), 1e-6)
        fast.apply(torch.randn(64, 512), torch.ones(512), 1e-6)  # the same text and grid, another constant
    names = getattr(LaunchHook, "metrics", None)  # from Triton 3.8 on, whatever a launch says
    metrics = [{n: t[n] for n in names if n in t} if names else LaunchHook._extract_metrics(t) for t in told]
    assert [t["name"] for t in told] == ["RMSNorm_forward"] * 4
    expected = [4 * (2 * r * n + n) for r, n in ((64, 256), (100, 256), (64, 256), (64, 512))]
    # without a gradient rstd is written, too: backward may be asked for later
    assert [m["bytes"] - e for m, e in zip(metrics, expected, strict=True)] == [4 * r for r in (64, 100, 64, 64)]
    assert all(m["flops"] == m["flops32"] > 3 * m["bytes"] / 8 for m in metrics)
    assert metrics[0] == metrics[2] != metrics[3]


@pytest.mark.parametrize(
    ("source", "dtype", "width"),
    [("x * y", "bf16", 32), ("acc += tl.dot(x, y)", "bf16", 16), ("tl.dot(x, y)", "f32", 32), ("x * y", "f64", 64)],
)
def test_operations_are_told_by_the_width_of_their_floats(source, dtype, width) -> None:
    kernel = Kernel("k", source, (Pointer("x_ptr", Ref("input", 0), dtype),), {}, 1, 4, operations=7)
    assert launch_cost(kernel, {}) == {"bytes": 0, "flops": 7, f"flops{width}": 7}


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


def test_inductor_is_counted_beside_eager(tmp_path: Path) -> None:
    """The same counts as the table of the benchmarks, from the traces of a class instead of the class."""
    case = next(c for c in CASES if c.name == "RMSNorm[512,1024]")
    explanation = fusegrad.explain(case.function, *case.args, target="h100")
    counted = inductor_costs(explanation, DEVICES["h100"])
    rows = json.loads((RESULTS / "cpu.json").read_text())["inductor"]["rows"]
    known = next(row for row in rows if row["case"] == case.name)
    assert not counted.why_not
    assert [s.launches for s in counted.sums] == known["launches"] and [s.bytes for s in counted.sums] == known["bytes"]


def test_inductor_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_costs_module, "PROGRAM", "no_such_program")
    cube = "f32[64,64]"
    found = fusegrad.profile(f.SquaredReLU, cube, baselines=("torch.compile",), seconds=0.01)
    assert "no_such_program" in found.not_counted and found.not_counted in str(found)
    assert {s.candidate for s in found.sums} == {"fusegrad", "eager"}


def test_a_compiled_profile_models_its_launches_by_their_instructions() -> None:
    found = fusegrad.profile(f.SwiGLU, "bf16[512,1024]", "bf16[512,1024]", seconds=0.0, metrics=True, device="h200")
    model = found.binaries["SwiGLU_forward"]["model"]
    assert model["copy"] == pytest.approx(copy_seconds(6 * 512 * 1024, DEVICES["h200"]) * 1e6)
    assert model["per_32"] > 5 and model["microseconds"] >= model["copy"]
    assert "by machine instructions, not measured" in str(found)
    rows = {"forward": [{"name": "SwiGLU_forward", "calls": 1.0, "microseconds": 8.0}]}
    (reached,) = replace(found, operations=rows).achieved()
    assert reached.modelled == model["microseconds"] and reached.microseconds == 8


def test_a_profile_without_machine_code_to_read_says_so() -> None:
    found = fusegrad.profile(f.SquaredReLU, "bf16[64,64]", seconds=0.0, metrics=True, device="mi300x")
    assert all(facts["model"] is None and "not read" in facts["not_modelled"] for facts in found.binaries.values())
    assert "not read" in str(found)


def test_times_have_three_digits_and_a_unit() -> None:
    texts = [tables.duration(t) for t in (0.4, 7.25, 64.25, 802.0, 64_013.4, 1_200_000.0)]
    assert texts == ["0.40 us", "7.25 us", "64.2 us", "802 us", "64.0 ms", "1.20 s"]


def test_times_that_spread_are_told() -> None:
    found = fusegrad.profile(f.SwiGLU, "f32[4,8]", "f32[4,8]", seconds=0)
    found.measured = [tables.Measured("eager", "forward", Times(100.0, 90.0, 110.0, 10))]
    assert tables.noise(found) == [] and "noisy" not in str(found)
    found.measured.append(tables.Measured("fusegrad", "forward", Times(64_013.4, 802.0, 106_523.0, 10)))
    (line,) = tables.noise(found)
    assert "1 of 2" in line and "fusegrad forward, 802 us to 107 ms" in line and line in str(found)
    assert "noisy" in tables.as_html(found)
