"""Kernels with matmuls inside: none spills on an H100; their figures, tables and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusegrad import explain
from fusegrad.benchmarks import __main__ as command
from fusegrad.benchmarks import report, stream_kernels, stream_report
from fusegrad.benchmarks.flex_kernels import FLEXED
from fusegrad.benchmarks.kernels import TARGETS
from fusegrad.benchmarks.plans import TARGET
from fusegrad.benchmarks.stream_functions import STREAMS
from fusegrad.benchmarks.stream_kernels import peers, products
from fusegrad.runtime.kernels.machine_code.counts import SPREAD, Counts, Launch, spread


@pytest.mark.parametrize("name", STREAMS)
def test_no_kernel_spills(name: str) -> None:
    _, case, _ = STREAMS[name]
    found = explain(case.function, *case.args, target=TARGET)
    binaries = {kernel: by_target[TARGET] for kernel, by_target in found.binaries().items()}
    assert {kernel: binary.error or binary.spills for kernel, binary in binaries.items()} == dict.fromkeys(binaries, 0)
    assert {"forward", "backward"} <= {k.direction for k in found.kernels if products(binaries[k.name].asm)}


def test_every_case_is_committed_for_every_target() -> None:
    rows = command.read(command.OUT)["streams"]["rows"]
    found = {row["case"]: row["targets"] for row in rows if "launches" in row}
    assert set(found) == set(STREAMS) and all(set(targets) == set(TARGETS) for targets in found.values())
    assert not [n for targets in found.values() for needs in targets.values() for n in needs.values() if n["error"]]


def test_attention_is_committed_beside_that_of_others() -> None:
    rows = {row["case"]: row for row in command.read(command.OUT)["streams"]["rows"] if "beside" in row}
    for name in FLEXED:
        for whose in (f"FlexAttention: {name}", f'{name}, numerics="fast"'):
            assert rows[whose]["targets"][TARGET] and "error" not in rows[whose]
    whose = {row[1].partition("'s")[0] for row in stream_report.peer_rows(command.read(command.OUT))}
    assert whose == {"", "fusegrad", 'numerics="fast"', "FlexAttention", "the tutorial"}


# ------------------------------------------------------------------ counts
PTX = """
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, 1;
    wgmma.wait_group.sync.aligned 0;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r2 };
    @%p1 tcgen05.mma.cta_group::1.kind::f16 [%r3];
"""
AMDGCN = """
    v_mfma_f32_32x32x8_bf16_1k v[0:15], v[16:17], v[18:19], v[0:15]
    v_add_f32_e32 v0, v1, v2
"""


def test_instructions_for_tensor_cores_are_counted_of_each_architecture() -> None:
    assert products({"ptx": PTX}) == 3 and products({"amdgcn": AMDGCN}) == 1
    assert products({}) == 0


PEER = """
import triton
import triton.language as tl

from fusegrad.benchmarks.stream_kernels import PeerKernel


@triton.jit
def square(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    tile = tl.load(x + at * BLOCK + tl.arange(0, BLOCK)[None, :], mask=at < n, other=0.0)
    tl.store(y + at * BLOCK + tl.arange(0, BLOCK)[None, :], tl.dot(tile, tile), mask=at < n)


TYPES = {"x": "*bf16", "y": "*fp32", "n": "i32"}
KERNELS = [PeerKernel("a peer", square, TYPES, {"BLOCK": 64}, {"num_warps": 4}, (2, 1, 1), 2 * 64 * 64, {"n": 128})]
"""


def test_kernels_of_a_file_from_outside_are_compiled_beside(tmp_path: Path) -> None:
    file = tmp_path / "peer.py"
    file.write_text(PEER)
    (row,) = peers(file)
    need = row["targets"][TARGET]["square"]
    assert row["case"] == "a peer" and need["products"] > 0 and need["registers"] > 0 and need["spills"] == 0
    assert need["per_32"] > 0 and not need["loops_once"] and "beside" not in row


def test_a_program_that_comes_past_no_product_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    asm, launch = {"ptx": PTX, "cubin": b""}, Launch(TARGET, (64, 1, 1), 4, ())
    for pipes, found in (({"alu": 64.0}, {}), ({"alu": 60.0, "matrix": 4.0}, {"per_32": 2.0, "loops_once": False})):
        monkeypatch.setattr(stream_kernels, "count", lambda cubin, at, name, pipes=pipes: Counts(pipes, 0))
        assert stream_kernels.issued(asm, launch, 1024, "a kernel") == found


# ------------------------------------------------------------------ tables and files
def need(**other: Any) -> dict[str, Any]:
    return {"registers": 100, "spills": 0, "shared": 2048, "error": None, "products": 8, **other}


def results() -> dict[str, Any]:
    counted = {"a": need(per_32=15.52, loops_once=False), "b": need(per_32=2.0, loops_once=True)}
    others = {TARGETS[0]: {"a": need(products=0)}, TARGETS[2]: {"a": need(registers=99), "b": need()}}
    targets = {**others, TARGET: counted, TARGETS[3]: {"a": need(error="no"), "b": need(spills=4)}}
    moved = {"bytes": [100, 300], "minimal": [100, 200], "eager": [1000, None], "saved": 1_000_000, "asked": 9_000_000}
    plan = {"what": "words", "scores": 1_000_000, "launches": [1, 2], "library": [0, 1], **moved}
    by_hand = {"case": "by hand", "scores": 1, "targets": {TARGET: {"c": need(spills=8)}}}
    ours = {"case": "A", "width": 64, **plan, "targets": targets}
    return {"streams": {"date": "2026-01-01", "rows": [ours, by_hand]}}


def beside() -> dict[str, Any]:
    """The same with kernels of others, one of which is not there."""
    found = results()
    a, by_hand = found["streams"]["rows"]
    counted = {"a": need(hot=[[100, 6400.0], [150, 6400.0]]), "b": need(hot=[])}
    theirs = [
        {"case": "theirs: A, 64x64", "beside": "A", "scores": 1, "targets": {TARGET: {"d": need(hot=[[50, 6400.0]])}}},
        {"case": "others: A", "beside": "A", "scores": 1, "targets": {}, "error": "ValueError: no"},
    ]
    found["streams"]["rows"] = [{**a, "targets": {TARGET: counted}}, by_hand, *theirs]
    return found


def test_a_case_is_a_row_and_a_kernel_is_a_row() -> None:
    assert stream_report.plan_rows(results()) == [
        ["A", "words", "1 + 2", "0 + 1", "1.00  1.50", "10.00  -", "2.0", "1.0", "9.0"]
    ]
    assert stream_report.kernel_rows(results()) == [
        ["A", "a", "- 100 99 error", "- 0 0 error", "- 2 2 error", "- 8 8 error", "15.5"],
        ["A", "b", "- 100 100 100", "- 0 0 4", "- 2 2 2", "- 8 8 8", "2.0+"],
        ["A", "a", "100 - - -", "0 - - -", "2 - - -", "0 - - -", "-"],
        ["by hand", "c", "- 100 - -", "- 8 - -", "- 2 - -", "- 8 - -", "-"],
    ]


def test_kernels_of_others_stand_beside_ours() -> None:
    assert stream_report.peer_rows(beside()) == [
        ["A", "fusegrad", "a", "100", "0", "2", "8", "32.0 48.0"],
        ["A", "theirs, 64x64", "d", "100", "0", "2", "8", "16.0"],
        ["A", "others", "-", "-", "-", "-", "-", "ValueError: no"],
    ]
    assert [row[1] for row in stream_report.kernel_rows(beside())] == ["a", "b", "c"]
    assert stream_report.peer_rows(results()) == []


def test_the_document_says_that_nothing_was_timed() -> None:
    document = report.document(results(), None)
    assert "Nothing was run or timed" in document and "| A | words | 1 + 2 |" in document


def test_the_part_has_a_file_of_its_own(tmp_path: Path) -> None:
    found = {**results(), "plans": {"date": "2026-01-01", "rows": []}}
    command.write(found, tmp_path)
    assert set(json.loads((tmp_path / "streams.json").read_text())) == {"streams"}
    assert set(json.loads((tmp_path / "cpu.json").read_text())) == {"plans"}
    assert command.read(tmp_path) == found


@pytest.mark.parametrize("blocks", [16, 32, 64, 128])
def test_programs_that_are_counted_are_of_all_places_of_a_row(blocks: int) -> None:
    """Under a causal mask the mean of their places is the mean of the work."""
    followed = spread(32 * blocks)
    assert len(followed) == SPREAD and sum(p % blocks for p in followed) / SPREAD == (blocks - 1) / 2
    assert spread(1) == (0,)
