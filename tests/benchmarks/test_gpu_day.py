"""A GPU's day with steps that fail, hang and die: none stops the rest, nothing is lost, the next slice goes on."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusegrad.benchmarks.gpu_day import __main__ as command
from fusegrad.benchmarks.gpu_day import checks, modelled, page
from fusegrad.benchmarks.gpu_day.child import Child
from fusegrad.benchmarks.gpu_day.day import Day
from fusegrad.benchmarks.gpu_day.record import Record, open_record
from fusegrad.benchmarks.gpu_day.steps import STEPS, TELLING, Step, chosen_steps
from fusegrad.benchmarks.gpu_day.tools import _sanitizer_faults
from fusegrad.benchmarks.suite import CASES
from fusegrad.examples.gallery.catalogue import CATALOGUE

VERSIONS = {"torch": "2.13.0", "triton": "3.7.1"}
H100 = {"device": "NVIDIA H100 80GB HBM3", "versions": VERSIONS, "commit": "one", "date": "2026-01-01"}


def step(*units: str, body: str = "mixed", limit: float = 60.0, **more: Any) -> Step:
    more = {"budget": 1e9, "least": 0.0, **more}
    return Step("fake", "nothing", f"fake_steps:{body}", lambda: units, limit, **more)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent), **more}


def day(record: Record, minutes: float = 2.0, **more: Any) -> Day:
    record.begin(minutes, "2026-01-01")
    more = {"kind": "cuda", "environment": environment(), "say": lambda text: None, **more}
    return Day(record, minutes=minutes, **more)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return open_record([tmp_path], H100)


def outcomes(record: Record) -> dict[str, str]:
    return {unit: found["outcome"] for _, unit, found in record.results()}


# ------------------------------------------------------------------ steps that go wrong
def test_what_fails_or_dies_stops_nothing(record: Record) -> None:
    assert day(record).run([step("ok", "raises", "dies", "wrong", "skips", "ok too")])
    assert outcomes(record) == {
        "ok": "ok", "raises": "failed", "dies": "died", "wrong": "wrong", "skips": "skipped", "ok too": "ok"
    }  # fmt: skip
    units = record.units("fake")
    assert units["raises"]["faults"] == ["ValueError: no such thing"] and "fake_steps.py" in units["raises"]["said"]
    assert units["dies"]["faults"] == ["the process ended (7)"] and "at dies" in units["dies"]["said"]
    assert units["ok"]["facts"]["process"] != units["ok too"]["facts"]["process"]  # another one after that
    assert json.loads(record.path.read_text()) == record.data


def test_results_do_not_name_the_machines_folders(record: Record) -> None:
    day(record).run([step("raises", "where")])
    text = record.path.read_text()
    assert "fake_steps.py" in text and str(Path.home()) not in text and str(Path(__file__).parents[2]) not in text


def test_what_hangs_is_ended_and_says_where(record: Record) -> None:
    day(record).run([step("hangs", "ok", limit=1.0)])
    assert outcomes(record) == {"hangs": "hung", "ok": "ok"}
    assert "in mixed" in record.units("fake")["hangs"]["said"]


def test_a_process_that_does_not_begin_is_tried_twice(record: Record) -> None:
    """The rest of its units is left for the next slice; another step is not touched by it."""
    good = Step("good", "", "fake_steps:mixed", lambda: ["ok"], 60, 1e9, 0.0)
    assert not day(record).run([step("a", "b", "c", "d", "e", "f", body="no_such_body"), good])
    assert outcomes(record)["ok"] == "ok" and outcomes(record)["a"] == "died"
    assert 0 < len(record.left(step("a", "b", "c", "d", "e", "f"))) < 6
    assert "no_such_body" in record.units("fake")["a"]["said"]


def test_every_result_is_in_the_file_at_once(record: Record) -> None:
    seen: list[list[str]] = []
    day(record, changed=lambda r: seen.append(list(json.loads(r.path.read_text())["steps"]["fake"]))).run(
        [step("ok", "raises", "wrong")]
    )
    assert seen == [["ok"], ["ok", "raises"], ["ok", "raises", "wrong"]]


def test_what_a_spoiled_device_was_asked_is_asked_of_another_process(record: Record) -> None:
    """As after an illegal access: the worker says so with its answer."""
    child = Child("cuda", "fake_steps:mixed", environment())
    processes = [child.ask("ok", 60, 60)["facts"]["process"] for _ in range(2)]
    assert len(set(processes)) == 1
    line = child._line
    child._line = lambda until: line(until).replace(b'"spoiled": false', b'"spoiled": true')  # type: ignore
    processes += [child.ask("ok", 60, 60)["facts"]["process"] for _ in range(2)]
    assert len(set(processes)) == 2 and processes[2] != processes[3]
    child.stop()


ORCHESTRATOR = """
import sys
from fusegrad.benchmarks.gpu_day.child import Child
import os
Child("cuda", "fake_steps:hangs_by_number", dict(os.environ)).ask("unit", 600, 600)
"""


def test_a_day_that_is_killed_leaves_nothing_on_the_device(tmp_path: Path) -> None:
    """Whoever lends the machine ends the command at the minute: its workers have sessions of their own."""
    number, paths = tmp_path / "number", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    told = environment(NUMBER=str(number), PYTHONPATH=paths)
    command = subprocess.Popen([sys.executable, "-c", ORCHESTRATOR], env=told)
    _until(lambda: number.exists() and number.read_text())
    command.kill()
    command.wait()
    _until(lambda: not _runs(int(number.read_text())))


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _until(holds: Callable[[], Any], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


# ------------------------------------------------------------------ slices
def test_another_slice_does_what_is_left(record: Record) -> None:
    assert not day(record, minutes=0.0).run([step("ok", least=1.0)])
    assert outcomes(record) == {}
    known = open_record([record.path.parent], H100)
    assert day(known).run([step("ok", "wrong")])
    first = known.units("fake")["ok"]
    again = open_record([record.path.parent], H100)
    assert day(again).run([step("ok", "wrong")])
    assert again.units("fake")["ok"] == first and len(again.data["slices"]) == 3


def test_a_slice_that_ends_within_a_unit(record: Record) -> None:
    """It is tried once more; a unit that fits no slice counts as one that hangs."""
    fits_none = step("hangs")
    assert not day(record, minutes=1.5 / 60).run([fits_none]) and outcomes(record) == {}
    assert day(record, minutes=1.5 / 60).run([fits_none]) and outcomes(record) == {"hangs": "hung"}


def test_a_step_has_its_budget_before_the_others_have_more(record: Record) -> None:
    order: list[str] = []
    steps = [Step(name, "", "fake_steps:mixed", lambda: ["ok", "wrong"], 60, 2.0, 0.0) for name in ("first", "second")]
    record.put("first", "ok", {"outcome": "ok", "faults": [], "facts": {}, "seconds": 5.0})
    day(record, say=lambda text: order.append(text)).run(steps)
    begun = [text.split("s  ", 1)[1].split("  (")[0] for text in order if " more)" in text]
    assert begun[0] == "second  ok" and sorted(begun[1:]) == ["first  wrong", "second  wrong"]


def test_what_failed_is_tried_again_by_another_commit_or_when_asked(record: Record, tmp_path: Path) -> None:
    corrected = environment(CORRECTED=str(tmp_path / "corrected"))
    once = [step("unit", body="first_is_missing")]
    day(record, environment=corrected).run(once)
    (tmp_path / "corrected").touch()
    day(record, environment=corrected).run(once)
    assert outcomes(record) == {"unit": "wrong"}
    later = open_record([tmp_path], {**H100, "commit": "two"})
    day(later, environment=corrected).run(once)
    assert later.units("fake")["unit"] | {"outcome": "ok", "commit": "two"} == later.units("fake")["unit"]
    (tmp_path / "corrected").unlink()
    day(later, environment=corrected, again=True).run(once)
    assert outcomes(later) == {"unit": "ok"}  # what stands is not tried again


def test_units_at_once_and_memory_for_one(record: Record) -> None:
    """Four processes share the units; what found no memory beside others is tried alone, and that is its result."""
    units = [f"ok {n}" for n in range(8)] + ["no memory"]
    assert day(record).run([step(*units, jobs=4)])
    assert outcomes(record) == {**{unit: "ok" for unit in units[:-1]}, "no memory": "failed"}
    assert len({found["facts"]["process"] for _, unit, found in record.results() if unit != "no memory"}) > 1


# ------------------------------------------------------------------ files
def test_another_device_and_other_versions_have_files_of_their_own(tmp_path: Path) -> None:
    open_record([tmp_path], H100).write()
    other = {**H100, "versions": {"torch": "2.11.0", "triton": "3.6.0"}}
    records = [open_record([tmp_path], known) for known in (H100, other, {**H100, "device": "NVIDIA H200"})]
    assert [r.path.name for r in records] == [
        "gpu-nvidia-h100-80gb-hbm3.json", "gpu-nvidia-h100-80gb-hbm3-torch-2.11.0-triton-3.6.0.json",
        "gpu-nvidia-h200.json",
    ]  # fmt: skip
    records[1].put("fake", "unit", {"outcome": "ok", "faults": [], "facts": {}, "seconds": 1.0})
    assert outcomes(open_record([tmp_path], other)) == {"unit": "ok"} and not outcomes(open_record([tmp_path], H100))


def test_results_in_another_folder_are_gone_on_from(record: Record, tmp_path: Path) -> None:
    record.put("fake", "unit", {"outcome": "ok", "faults": [], "facts": {}, "seconds": 1.0})
    moved = open_record([tmp_path / "out", tmp_path], H100)
    assert outcomes(moved) == {"unit": "ok"} and moved.path.parent == tmp_path / "out"
    assert not outcomes(open_record([tmp_path], H100, afresh=True))


# ------------------------------------------------------------------ the table
def test_the_steps_hold_every_case_and_every_function_of_the_gallery_once() -> None:
    units = {s.name: list(s.units()) for s in STEPS}
    compared = units["telling"] + units["functions"] + units["rest"]
    assert sorted(compared) == sorted(c.name for c in CASES) and units["gallery"] == [e.name for e in CATALOGUE]
    assert sorted(units["times of ten"] + units["times of functions"] + units["times of the rest"]) == sorted(compared)
    assert len(TELLING) == 10 and len(units) == len(STEPS) and all(len(set(u)) == len(u) for u in units.values())
    assert sum(s.budget for s in STEPS[:10]) <= 2000 and all(s.least <= s.limit for s in STEPS)
    with pytest.raises(ValueError, match="there is no step nonsense; there are doctor, telling"):
        chosen_steps(["nonsense"])


def test_the_page_lists_the_steps() -> None:
    text = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    lines = [line.strip("| ") for line in text.splitlines() if line.startswith("| ")]
    rows = [tuple(line.split(" | ")) for line in lines]
    assert rows[1:] == [(s.name, s.what) for s in STEPS]


# ------------------------------------------------------------------ what is told
def timed(case: str, ms: float, copy_ms: float, least: int = 1 << 30) -> dict[str, Any]:
    """A row of the benchmarks with the same times in both directions."""
    peers = {"fusegrad": ms, "fusegrad again": ms, "copy": copy_ms, "eager": 3 * ms}
    times = {p: {w: {"median": t} for w in ("device", "wall")} | {"device alone": True} for p, t in peers.items()}
    return {"case": case, "minimal": [least, least], "checks": {}, "errors": {},
            "times": {"forward": times, "backward": times}}  # fmt: skip


def test_the_model_says_a_time_and_what_it_waits_for() -> None:
    said = modelled.says("SwiGLU[4096,4096]", "h100")
    assert set(said) == {"forward", "backward"} and all(d["ms"] > 0.02 and d["bound"] for d in said.values())
    assert modelled.says("FusedLinearCrossEntropy[8192,4096x32000]", "h100") == {}  # products by the library
    known = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA L4": "l4"}
    names = {**known, "Tesla T4": "t4", "GeForce": None, "NVIDIA L40S": None}
    assert {n: modelled.model_device(n) for n in names} == names


def test_the_page_says_what_differs(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    case, ideal = "SwiGLU[8192,16384]", 0.25
    monkeypatch.setattr(modelled, "says", lambda *_: {d: {"ms": ideal, "bound": "bytes"} for d in modelled.DIRECTIONS})
    least = int(ideal * 1e-3 * 3.35e12)
    found = {"outcome": "ok", "faults": [], "seconds": 1.0}
    record.begin(1.0, "2026-01-01")
    row = timed(case, 2 * ideal, ideal / 0.9, least)
    record.put("times of ten", case, {**found, "facts": {"row": row}})
    record.put("telling", case, {**found, "facts": {"equal": [1.0, 0.75]}})
    record.put("telling", "RMSNorm[512,1024]", {**found, "facts": {}, "outcome": "wrong", "faults": ["0: off"]})
    record.put("sanitizer", "memcheck", {**found, "facts": {"skipped": "it is not there"}, "outcome": "skipped"})
    trial = {"kernel": "k", "sizes": [2], "candidates": ["own", "wider"], "milliseconds": [2.0, 1.0], "chosen": "wider"}
    record.put("tune", case, {**found, "facts": {"trials": [trial]}})
    assert "The model was not asked yet" in page.page(record, STEPS)
    command.ask_model(record)
    assert set(json.loads(record.path.read_text())["model"]) == {case}
    text = page.page(record, STEPS)
    for said in (
        "# Measured on NVIDIA H100 80GB HBM3", "**telling, RMSNorm[512,1024]**: wrong: 0: off", "it is not there",
        f"| {case} | 0.75 | 0.875 |", "k [2]: wider takes 0.50 of its time", "0.90 of the data sheet's",
        f"{case} forward: 1.80 x (bound by bytes): the model misses why", "## Goals",
        "Bound by bytes: the median of 2 takes",
    ):  # fmt: skip
        assert said in text, text
    assert "telling, RMSNorm[512,1024]: wrong: 0: off" in page.summary(record, STEPS)


def test_a_rehearsal_claims_no_time(tmp_path: Path) -> None:
    record = open_record([tmp_path], {**H100, "device": "pretended"})
    record.begin(1.0, "2026-01-01")
    row = timed("RMSNorm[512,1024]", 1.0, 1.0)
    found = {"outcome": "ok", "faults": [], "seconds": 1, "facts": {"row": row}}
    record.put("times of ten", "RMSNorm[512,1024]", found)
    text = page.page(record, STEPS)
    assert page.NOTHING in text and "## Goals" not in text and "static model" not in text
    assert page.NOTHING in page.summary(record, STEPS)


def test_one_element_in_many_is_not_passed_over(record: Record) -> None:
    """Neither by the comparison, which judges what is not equal, nor by the page."""
    eager = torch.zeros(1 << 22)
    ours = eager.clone()
    ours[-1] = 7.0
    share = checks._equal(ours, eager)
    assert checks._equal(eager, eager) == 1.0 and share < 1.0
    record.put("telling", "RMSNorm[512,1024]", {
        "outcome": "ok", "faults": [], "seconds": 1.0, "facts": {"equal": [1.0, share]}})  # fmt: skip
    text = page.page(record, STEPS)
    assert "0 of 1 are eager's bit for bit" in text and "| RMSNorm[512,1024] | 0.99999976" in text, text


def test_the_sanitizers_counts_are_read() -> None:
    answer = '{"outcome": "ok", "faults": [], "facts": {}, "seconds": 1}\n'
    clean = '{"ready": true}\n' + answer + "========= ERROR SUMMARY: 0 errors\n"
    assert _sanitizer_faults(0, clean, "") == []
    assert _sanitizer_faults(9, clean.replace("0 errors", "2 errors"), "") == ["ERROR SUMMARY: 2 errors"]
    hazards = answer + "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)"
    assert _sanitizer_faults(9, hazards, "")[0].startswith("RACECHECK SUMMARY: 3 hazards")
    assert "ended with 1" in _sanitizer_faults(1, '{"ready": true}\n', "no driver")[0]


# ------------------------------------------------------------------ the rehearsal
def test_what_the_rehearsal_asks_of_the_pretended_gpu_is_there() -> None:
    """It is played by `make pretended-gpu` alone, which a name that was changed must not wait for."""
    asked = {name for file in ("machine.py", "worker.py") for name in _asked_of_launches(GPU_DAY / file)}
    there = {name for node in ast.parse((PRETENDED / "launches.py").read_text()).body for name in _bound_by(node)}
    assert {"_on_launch", "_given"} <= asked <= there, asked - there


GPU_DAY, PRETENDED = (Path(__file__).parents[2] / p for p in ("benchmarks/gpu_day", "tests/pretended_gpu"))


def _asked_of_launches(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text())
    names = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names
             if a.name == "launches"}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            yield node.attr


def _bound_by(node: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module gives it."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (a.asname or a.name for a in node.names)
    else:
        yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


# ------------------------------------------------------------------ the command
def test_a_machine_without_a_gpu_is_told_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "surroundings", lambda kind: {"absent": "torch is built for the CPU"})
    assert command.main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "No GPU, so nothing was run: torch is built for the CPU." in said and "--device pretended" in said
    assert command.main(["--report", "--out", str(tmp_path)]) == 0 and "nothing was run yet" in capsys.readouterr().out


def test_a_report_at_any_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = step("ok", "wrong", "hangs", limit=1.0)
    monkeypatch.setattr(command, "surroundings", lambda kind: H100)
    monkeypatch.setattr(command, "chosen_steps", lambda names: [fake])
    monkeypatch.setattr(command, "environment", lambda kind: environment())
    assert command.main(["--out", str(tmp_path)]) == 1
    ran = capsys.readouterr().out
    assert command.main(["--out", str(tmp_path), "--report"]) == 0
    assert capsys.readouterr().out.strip() in ran and "fake, hangs: hung: did not end in time" in ran
    assert "# Measured on NVIDIA H100" in (tmp_path / "gpu-nvidia-h100-80gb-hbm3.md").read_text()
