"""Tables and goals from results, and the command line."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

from fusegrad.benchmarks import __main__ as command
from fusegrad.benchmarks import report
from fusegrad.benchmarks.goals import GOALS
from fusegrad.benchmarks.kernels import TARGETS
from fusegrad.benchmarks.streams import share, widths
from fusegrad.benchmarks.suite import CASES, chosen

STREAMS = {"streams": {"load": {"16": 8}, "store": {"16": 4}}}


def needs(**other: Any) -> dict[str, Any]:
    return {"registers": 40, "spills": 0, "shared": 512, "accesses": {}, "errors": [], **STREAMS, **other}


def results(**other: Any) -> dict[str, Any]:
    moved = {"bytes": [102, 150], "minimal": [100, 100], "saved": 10, "asked": 10}
    plan = {"case": "A[64,64]", "launches": [1, 2], **moved}
    kernels = {"case": "A[64,64]", "targets": {t: [needs(), needs(**other)] for t in TARGETS}}
    parts = {"plans": [plan], "inductor": [{"case": "A[64,64]", "error": "no"}], "kernels": [kernels]}
    return {name: {"date": "2026-01-01", "rows": rows} for name, rows in parts.items()}


def modelled(share: float, over_copy: float, **other: Any) -> dict[str, Any]:
    figures = {"per_32": 40.0, "elements": 1 << 20, "budget": 40.0, "share": share, "microseconds": 1.0, "copy": 1.0,
               "over_copy": over_copy, "programs": 132, "resident": 2, "occupancy": 0.5, "waves": 0.5, "idle": 0.0,
               "flight": 50_000, "bound": "bytes", "data_dependent": False}  # fmt: skip
    fast = {"forward": 30.0, "backward": None}
    return {"case": "A[4096,4096]", "forward": {**figures, **other}, "backward": None, "fast": fast}


def model_results(peer: float | None, **figures: Any) -> dict[str, Any]:
    counted = {"forward": peer, "backward": peer}
    peers = [{"case": "A[4096,4096]", "inductor": {"error": "no"}, "liger": counted}] if peer else []
    return {"instructions": {"rows": [modelled(**figures)]}, "peers": {"rows": peers}}


ISSUE = "model: instructions over the budget, or over 1.05 of a peer's"


def test_instructions_are_within_the_budget_or_near_the_best_peer() -> None:
    assert verdicts(model_results(None, share=0.9, over_copy=1.0))[ISSUE] == "met"
    assert verdicts(model_results(None, share=1.1, over_copy=1.0))[ISSUE] == "missed by 1 of 1"
    as_many = 40.0 * (1 << 20) / 32
    assert verdicts(model_results(as_many, share=1.1, over_copy=1.0))[ISSUE] == "met"
    assert verdicts(model_results(0.9 * as_many, share=1.1, over_copy=1.0))[ISSUE] == "missed by 1 of 1"


def test_the_model_misses_goals_of_time_idleness_and_bytes_on_their_way() -> None:
    met = verdicts(model_results(None, share=0.9, over_copy=1.1))
    assert {v for n, v in met.items() if n.startswith("model")} == {"met"}
    worse = verdicts(model_results(None, share=0.9, over_copy=1.11, idle=0.1, flight=40_000))
    assert sum(v == "missed by 1 of 1" for v in worse.values()) == 3


def test_the_table_of_the_model_has_peers_beside_and_says_what_it_is() -> None:
    found = {
        **model_results(2.0 * (1 << 20) / 32, share=0.9, over_copy=1.0),
        "machine": {"processor": "A", "cores": 1, "versions": {}},
    }
    (row,) = report.model_rows(found)
    assert row[:8] == ["A[4096,4096]", "forward", "40.0", "40.0", "0.90", "30.0", "-", "2.0"]
    assert "not a measurement" in report.document(found, None)


def test_shapes_that_miss_the_goals_are_named_by_function() -> None:
    met = report.kept_rows(model_results(None, share=0.9, over_copy=1.1))
    assert met == [["all", "forward", "1 of 1", "", "1 of 1", ""], ["all", "backward", "0 of 0", "", "0 of 0", ""],
                   ["A", "forward", "1 of 1", "-", "1 of 1", "-"]]  # fmt: skip
    found = model_results(None, share=1.5, over_copy=1.3)
    assert report.kept_rows(found)[2] == [
        "A", "forward", "0 of 1", "[4096,4096] 1.30 bytes", "0 of 1", "[4096,4096] 1.50, 0.75"
    ]  # fmt: skip
    assert report.model_rows(found)[0][-1] == "time, instructions"


def test_misses_are_counted_by_what_they_have_in_common() -> None:
    assert report.cause_rows(model_results(None, share=0.9, over_copy=1.1)) == []
    assert report.cause_rows(model_results(None, share=1.5, over_copy=1.3)) == [
        ["others", "1", "1.30 to 1.30", "1", "1.50 to 1.50"]
    ]
    late = report.cause_rows(model_results(None, share=0.9, over_copy=1.3))
    assert late == [["others", "1", "1.30 to 1.30", "-", "-"]]


def test_what_is_issued_is_shown_where_it_is_too_much() -> None:
    pipes = {"float": 30.0, "integer": 8.0, "special": 2.0}
    assert report.issued_rows(model_results(None, share=0.9, over_copy=1.1, pipes=pipes)) == []
    assert report.issued_rows(model_results(None, share=1.5, over_copy=1.3)) == [], "a result of an older run"
    (row,) = report.issued_rows(model_results(None, share=1.5, over_copy=1.3, pipes=pipes))
    assert row == ["A[4096,4096]", "forward", "1.30", "40.0", "40.0", "30.0", "8.0", "0.0", "0.0", "0.0", "2.0", "16.0"]
    assert len(row) == len(report.ISSUED_HEAD)


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {row[0]: row[-1] for row in report.goal_rows(found)}


def test_a_goal_is_met_or_missed_with_the_worst_case() -> None:
    found = {row[0]: row for row in report.goal_rows(results())}
    moved = found["bytes moved, forward, over the minimum traffic, from 4096x4096"]
    assert moved[1:] == ["<= 1.03", "1.02", "A[64,64]", "met"]
    missed = found["bytes moved, backward, over the minimum traffic, from 4096x4096"]
    assert missed[1:] == ["<= 1.03", "1.5", "A[64,64]", "missed by 1 of 1"]
    assert found["launches, backward"][-1] == "missed by 1 of 1"
    assert set(found) == {g.name for g in GOALS if g.part in ("plans", "kernels")}


@pytest.mark.parametrize(
    "worse, goal",
    [
        ({"spills": 4}, "spilled bytes, gfx942, to 64K columns"),
        ({"errors": ["x"]}, "kernels without a binary"),
        ({"streams": {"load": {"2": 8, "16": 1}, "store": {}}}, "16-byte loads of what is streamed, share, NVIDIA"),
    ],
    ids=lambda p: p if isinstance(p, str) else "",
)
def test_what_a_kernel_needs_decides_goals(worse: dict[str, Any], goal: str) -> None:
    assert verdicts(results())[goal] == "met"
    assert verdicts(results(**worse))[goal].startswith("missed")


def test_tables_have_a_row_per_case_whatever_was_run() -> None:
    every = results()
    (row,) = report.case_rows(every)
    assert row[:5] == ["A[64,64]", "1 + 2", "error", "1.02  1.50", "error"] and len(row) == len(report.CASES_HEAD)
    (row,) = report.case_rows({"kernels": every["kernels"]})
    assert row[1] == "-" and len(row) == len(report.CASES_HEAD)
    assert report.markdown(("a", "b"), [("1", "2")]).splitlines() == ["| a | b |", "| --- | ---: |", "| 1 | 2 |"]
    assert report.aligned(("a", "b"), [("1", "200")]).splitlines() == ["a    b", "-  ---", "1  200"]


TEXT = """def kernel(x_ptr, w_ptr, y_ptr):
    x = tl.load(x_ptr + at + lane)
    w = tl.load(w_ptr + row)
    tl.store(y_ptr + at + lane, called(x))
"""
PTX = """
    .loc 1 2 20 // kernel.py:2:20
    ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    .loc 1 3 20 // kernel.py:3:20
    ld.global.b32 { %r5 }, [ %rd2 + 0 ];
    .loc 1 99 4 // kernel.py:99:4 @[ kernel.py:4:8 ]
    st.global.b16 [ %rd3 + 0 ], { %rs1 };
"""


def test_widths_are_those_of_the_pointers_asked_for() -> None:
    assert widths(TEXT, PTX, {"x_ptr", "y_ptr"}) == {"load": {16: 1}, "store": {2: 1}, "end": {}}
    assert widths(TEXT, PTX, {"w_ptr"}) == {"load": {4: 1}, "store": {}, "end": {}}
    ends = TEXT.replace("called(x))", "called(x), mask=inside & ~whole)")
    assert ends != TEXT and widths(ends, PTX, {"y_ptr"}) == {"load": {}, "store": {}, "end": {2: 1}}
    assert share({"16": 1, "8": 2}) == 0.5
    assert share({16: 3}) == 1 and share({}) is None


def test_parts_and_cases_by_name() -> None:
    assert command._parts("latency,host") == ["host", "latency"]
    with pytest.raises(ArgumentTypeError, match="there is no part hots"):
        command._parts("hots")
    assert len(chosen("", one_per_function=True)) == len({c.function for c in CASES}) == 22
    assert [c.name for c in chosen("RMSNorm[4096,4096]", one_per_function=True)] == [
        "RMSNorm[4096,4096]", "AddRMSNorm[4096,4096]",
    ]  # fmt: skip


def test_what_is_written_about_the_machine_names_no_machine() -> None:
    found = command.machine()
    assert set(found) == {"processor", "cores", "versions"}
    assert "torch" in found["versions"]


def test_rows_of_another_run_stay_where_no_new_one_takes_their_place() -> None:
    old, new = [{"case": "A", "n": 1}, {"case": "B", "n": 1}], [{"case": "B", "n": 2}, {"case": "C", "n": 2}]
    assert command.merged(old, new) == [{"case": "A", "n": 1}, {"case": "B", "n": 2}, {"case": "C", "n": 2}]


HERE, THERE = ({"processor": p, "cores": 2, "versions": {"torch": v}} for p, v in (("EPYC", "2.13"), ("Xeon", "2.12")))


def measuring(monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], date: str) -> None:
    monkeypatch.setattr(command, "PARTS", {"plans": lambda cases, options: ({"case": c.name, **PLAN} for c in cases)})
    monkeypatch.setattr(command, "machine", lambda: machine)
    monkeypatch.setattr(command, "today", lambda: date)


PLAN = {"launches": [1, 1], "bytes": [1, 1], "minimal": [1, 1], "saved": 1, "asked": 1}


def test_a_partial_run_relabels_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measuring(monkeypatch, HERE, "2026-01-01")
    assert command.main(["--only", "plans", "--match", "SwiGLU[", "-o", str(tmp_path)]) == 0
    measuring(monkeypatch, THERE, "2026-02-02")
    assert command.main(["--only", "plans", "--match", "SwiGLU[4096,4096]", "-o", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "cpu.json").read_text())
    old = [row for row in found["plans"]["rows"] if row.get("measured") == {"date": "2026-01-01", "machine": HERE}]
    (new,) = (row for row in found["plans"]["rows"] if "measured" not in row)
    assert len(old) == 7 and new["case"] == "SwiGLU[4096,4096]" and found["plans"]["machine"] == THERE
    document = report.document(found, None)
    assert "EPYC, 2 cores, torch 2.13, 2026-01-01: plans (7 rows)" in document
    assert "Xeon, 2 cores, torch 2.12, 2026-02-02: plans (1 row)" in document


def test_tracked_files_are_written_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measuring(monkeypatch, HERE, "2026-01-01")
    built, committed, page = (tmp_path / name for name in ("build", "results", "benchmarks.md"))
    for name, place in (("BUILT", built), ("OUT", committed), ("DOCUMENT", page), ("ROOT", tmp_path)):
        monkeypatch.setattr(command, name, place)
    monkeypatch.setattr(command.limits, "PATH", tmp_path / "limits.json")
    monkeypatch.setattr(command.limits, "write", lambda new, path: path.touch())
    monkeypatch.setattr(command, "each", lambda *_: iter(()))
    for words in (["--only", "plans"], ["limits"], ["show"]):
        assert command.main(words) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["build"] and (built / "limits.json").exists()
    for words in (["--only", "plans", "--write-docs"], ["limits", "--write-docs"]):
        assert command.main(words) == 0
    assert (committed / "cpu.json").exists() and page.exists() and (tmp_path / "limits.json").exists()


def test_results_are_written_a_row_a_line() -> None:
    found = {"machine": {"cores": 2}, **results()}
    text = command.written(found)
    assert json.loads(text) == found
    assert sum('"case": "A[64,64]"' in line for line in text.splitlines()) == 3
