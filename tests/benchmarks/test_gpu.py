"""The harness that times on a GPU, without one: what it takes together, what it finds wrong, and one dry run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fusegrad.benchmarks import functions, gpu, gpu_report
from fusegrad.benchmarks.inputs import reduced
from fusegrad.benchmarks.peers import AGAIN, LIGER, OURS
from fusegrad.benchmarks.suite import CASES

RMS = next(c for c in CASES if c.function is functions.RMSNorm)


def test_parts_are_all_cases_and_about_equal() -> None:
    parts = [gpu.part_of(CASES, part, 8) for part in range(1, 9)]
    assert sorted(c.name for part in parts for c in part) == sorted(c.name for c in CASES)
    loads = [sum(map(gpu.cost, part)) for part in parts]
    assert max(loads) - min(loads) <= max(map(gpu.cost, CASES))
    assert gpu.part_of(CASES, 1, 1) == CASES


def test_cases_with_a_result_are_left_out() -> None:
    known = {"rows": [{"case": CASES[0].name}]}
    assert gpu.left_over(CASES, known, quick=False) == CASES[1:]
    assert gpu.left_over(CASES, {"rows": [{"case": reduced(CASES[0]).name}]}, quick=True)[0].function is not CASES[0]


def test_inputs_go_through_three_times_the_cache_as_far_as_memory_goes() -> None:
    assert gpu.sets_needed(1 << 20, 50 << 20, 80 << 30) * (1 << 20) > 3 * (50 << 20)
    assert gpu.sets_needed(1 << 30, 50 << 20, 80 << 30) == 2
    assert gpu.sets_needed(20 << 30, 50 << 20, 80 << 30) == 1
    assert gpu.sets_needed(16, 50 << 20, 80 << 30) == gpu.MOST_SETS


def test_a_place_that_a_peer_leaves_out_is_found() -> None:
    """As is a wrong number; eager itself is right."""

    def leaves_out(*args: Any) -> torch.Tensor:
        whole, made = functions.RMSNorm.apply(*args), torch.empty_like(args[0])
        return torch.cat([whole[:-1], made.detach()[-1:]])

    case = reduced(RMS)
    assert not gpu.check(case, functions.RMSNorm.apply, "cpu", 1, fill=True)["faults"]
    assert gpu.check(case, leaves_out, "cpu", 1, fill=True)["faults"]
    assert gpu.check(case, lambda *a: functions.RMSNorm.apply(*a) * 1.02, "cpu", 1, fill=True)["faults"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_liger_is_asked_for_cases_of_the_suite() -> None:
    assert set(LIGER) <= {c.function for c in CASES}


def test_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--device", "cpu", "--backend", "reference", "--quick", "--match", "ColumnSoftmax[4096,4096]"]
    command += ["--rounds", "2", "--peers", f"{OURS},{AGAIN},eager", "--out", str(tmp_path)]
    assert gpu.main(command) == 0
    assert "mean nothing" in capsys.readouterr().out
    (file,) = tmp_path.glob("*.json")
    (row, *_) = rows = json.loads(file.read_text())["rows"]
    assert set(row["times"]["backward"]) == {OURS, AGAIN, "eager", "copy"} and not row["errors"]
    assert all(not f["faults"] and f["judge"] == "float64" for checks in row["checks"].values() for f in checks)
    assert gpu.main(command) == 0  # nothing is left to time
    assert json.loads(file.read_text())["rows"] == rows


def test_goals_are_decided_by_medians() -> None:
    def timed(ours: float, **peers: float) -> dict[str, Any]:
        each = {OURS: ours, **{p.replace("_", "-"): t for p, t in peers.items()}}
        return {p: {w: {"median": t} for w in ("device", "wall")} | {"device alone": True} for p, t in each.items()}

    fast = {"forward": timed(1.0, copy=0.96, max_autotune=1.5), "backward": timed(2.0, copy=1.7, max_autotune=2.4)}
    row = {"case": "RMSNorm[512,1024]", "minimal": [1 << 30, 1 << 30], "times": fast, "checks": {}, "errors": {}}
    verdicts = {name: verdict for name, *_, verdict in gpu_report.goal_rows([row])}
    assert verdicts["share of the copy's bandwidth, forward, 64 MB or more"] == "met"
    assert verdicts["share of the copy's bandwidth, backward, 64 MB or more"] == "missed (1 of 1 below)"
    assert verdicts["max-autotune's device time over ours, geometric mean"] == "met"  # 3.9 / 3.0
    assert verdicts["max-autotune's wall time over ours, 512x1024, least"].startswith("missed")
    assert not any("Liger" in name for name in verdicts)
    assert not gpu_report.wrong(row)
    assert gpu_report.wrong({**row, "checks": {OURS: [{"faults": ["0: worst error"]}]}})
    assert gpu_report.wrong({**row, "errors": {OURS: "KernelCompileError"}})
