"""Loops over time at their sizes: kernels that are proved and that fit their device; their table."""

from __future__ import annotations

import pytest

from fusegrad import explain
from fusegrad.benchmarks import __main__ as command
from fusegrad.benchmarks import loop_report
from fusegrad.benchmarks.kernels import TARGETS
from fusegrad.benchmarks.loop_functions import LOOPS, RNN, GatedRecurrence


@pytest.mark.parametrize("steps", [300, 2048])
def test_steps_that_are_no_multiple_of_a_block_are_proved(steps: int) -> None:
    """Backward walks one less, from the end, many at once: where it begins is known in numbers as well."""
    found = explain(GatedRecurrence, *(f"f32[{steps},16384]",) * 2, target="cuda:90")
    assert found.to_dict()["launches"] == {"forward": 1, "backward": 1}
    assert {k.kind for k in found.kernels} == {"triton"}


def test_loads_in_flight_leave_room_for_the_matrix() -> None:
    args = LOOPS["RNN[2048,64,128]"][1].args
    found = explain(RNN, *args, target="cuda:90")
    assert not [binary.error for of in found.binaries("cuda:90").values() for binary in of.values() if binary.error]


def test_the_compiler_may_not_spill_for_a_fourth_program() -> None:
    """More programs than a multiprocessor holds, each of which scans steps in most registers of its threads."""
    found = explain(GatedRecurrence, *("f32[2048,32768]",) * 2, target="cuda:90")
    assert [k.roomy for k in found.kernel_records] == [3, 3]
    assert all(k.options("cuda")["maxnreg"] == 65536 // (3 * 128) for k in found.kernel_records)


def test_every_loop_is_committed_for_every_target() -> None:
    rows = command.read(command.OUT)["loops"]["rows"]
    assert {row["case"]: set(row["targets"]) for row in rows} == {name: set(TARGETS) for name in LOOPS}


def test_a_row_has_the_most_of_its_kernels() -> None:
    def need(registers: int, spills: int = 0, error: str | None = None) -> dict[str, object]:
        return {"registers": registers, "spills": spills, "shared": 0, "error": error}

    by_target = ({"a": need(8), "b": need(4, 16)}, {"a": need(32)}, {"a": need(1, error="no")}, {})
    row = {"case": "A", "what": "words", "launches": [1, 2], "library": [0, 1], "bytes": [10, 30], "minimal": [10, 20],
           "eager": [20, None], "saved": 10**6, "asked": 2 * 10**6,
           "targets": dict(zip(TARGETS, by_target, strict=True))}  # fmt: skip
    assert loop_report.loop_rows({"loops": {"rows": [row]}}) == [
        ["A", "words", "1 + 2", "0 + 1", "1.00  1.50", "2.00  -", "1.0", "2.0", "8 32 error -", "16 0 error -"]
    ]
