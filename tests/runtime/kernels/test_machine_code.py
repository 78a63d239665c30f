"""The model of a launch: instructions of listings and kernels whose counts are known by hand, and what times follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusegrad import explain
from fusegrad.benchmarks.functions import SquaredReLU
from fusegrad.codegen.devices import DEVICES
from fusegrad.codegen.kernel import Kernel, Pointer, Ref, Scalar
from fusegrad.runtime.kernels.cross_compile.pool import compile_for
from fusegrad.runtime.kernels.machine_code import counts, hot_loops, sass
from fusegrad.runtime.kernels.machine_code.flow import Flow
from fusegrad.runtime.kernels.machine_code.lane import Lane, deciding
from fusegrad.runtime.kernels.machine_code.model import copy_seconds, model_launch, model_of
from fusegrad.runtime.kernels.machine_code.operands import Values, registers_read

H100 = DEVICES["h100"]
MASK = 0xFFFFFFFF

LOOP = """
        /*0000*/                   MOV R0, RZ ;
        /*0010*/                   LDC R1, c[0x0][0x210] ;
.L_x_0:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   FADD R8, R4, R5 ;
        /*0040*/                   FSETP.GT.AND P0, PT, R8, RZ, PT ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
        /*0060*/                   MUFU.EX2 R8, R8 ;
        /*0070*/                   BRA `(.L_x_2) ;
.L_x_1:
        /*0080*/                   MUFU.LG2 R8, R8 ;
.L_x_2:
        /*0090*/                   FCHK P1, R8, R9 ;
        /*00a0*/              @!P1 BRA `(.L_x_3) ;
        /*00b0*/                   CALL.REL.NOINC `($slow) ;
.L_x_3:
        /*00c0*/                   IADD3 R0, R0, 0x1, RZ ;
        /*00d0*/                   ISETP.GE.AND P2, PT, R0, R1, PT ;
        /*00e0*/              @!P2 BRA `(.L_x_0) ;
        /*00f0*/                   EXIT ;
$slow:
        /*0100*/                   MUFU.RCP R8, R8 ;
        /*0110*/                   RET.REL.NODEC R20 `(kernel) ;
"""


def followed(text: str, *numbers: int) -> tuple[Lane, dict[str, int]]:
    """The lane that has run a listing, and how often each operation was issued."""
    flow = Flow(sass.parse(text))
    lane = Lane(flow, deciding(flow), Values({0x210 + 4 * i: n for i, n in enumerate(numbers)}, {}))
    lane.run(lambda block: None)
    issued: dict[str, int] = {}
    for at, times in lane.visits.items():
        for i in flow.blocks[at].instructions:
            issued[i.op] = issued.get(i.op, 0) + times
    return lane, issued


@pytest.mark.parametrize("turns", [1, 7, 1000])
def test_a_counted_loop_runs_its_turns(turns: int) -> None:
    lane, issued = followed(LOOP, turns)
    assert issued["LDG.E.128"] == issued["IADD3"] == turns and issued["EXIT"] == 1
    assert not lane.data_dependent


def test_both_sides_of_a_branch_on_data_are_issued_and_no_slow_path() -> None:
    _, issued = followed(LOOP, 5)
    assert issued["MUFU.EX2"] == issued["MUFU.LG2"] == 5
    assert "MUFU.RCP" not in issued and "CALL.REL.NOINC" not in issued


PRODUCTS = """
.L_x_4:
        /*0000*/                   MOV R0, RZ ;
.L_x_0:
        /*0010*/                   FADD R8, R4, R5 ;
.L_x_1:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R6 ;
        /*0030*/              @!P0 BRA `(.L_x_1) ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0050*/                   NOP ;
        /*0060*/               @P1 BRA `(.L_x_2) ;
        /*0070*/                   MUFU.EX2 R8, R8 ;
.L_x_2:
        /*0080*/                   HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR8], R24 ;
        /*0090*/                   IADD3 R0, R0, 0x1, RZ ;
        /*00a0*/              @!P2 BRA `(.L_x_0) ;
.L_x_3:
        /*00b0*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*00c0*/               @P3 BRA `(.L_x_3) ;
        /*00d0*/               @P4 BRA `(.L_x_4) ;
        /*00e0*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*00f0*/                   EXIT ;
"""


def test_hot_loops_are_the_innermost_ones_with_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of a loop has its branches, and the wait for a barrier once; a warp's share of a product of four."""
    monkeypatch.setattr(counts, "disassemble", lambda cubin, kernel: sass.parse(PRODUCTS))
    first, second = hot_loops.hot_loops(b"products", "a listing")
    assert (first.at, first.instructions, first.multiplied) == (0x10, 9, (64 * 64 * 16 + 64 * 128 * 16) / 4)
    assert (second.at, second.instructions, second.multiplied) == (0xB0, 2, 16 * 8 * 16)


LEFT_OVER = """
        /*0000*/                   MOV R0, RZ ;
        /*0010*/                   LDC R1, c[0x0][0x210] ;
        /*0020*/                   MOV R6, 0x1 ;
.L_x_0:
        /*0030*/                   ISETP.EQ.AND P0, PT, R6, RZ, PT ;
        /*0040*/               @P0 BRA `(.L_x_1) ;
        /*0050*/                   MUFU.EX2 R8, R8 ;
        /*0060*/                   LDG.E R6, desc[UR4][R2.64] ;
.L_x_1:
        /*0070*/                   IADD3 R0, R0, 0x1, RZ ;
        /*0080*/                   ISETP.GE.AND P2, PT, R0, R1, PT ;
        /*0090*/              @!P2 BRA `(.L_x_0) ;
        /*00a0*/                   EXIT ;
"""


def test_what_only_the_first_turn_runs_for_certain_is_counted_once() -> None:
    """A team reduces what others have not: the piece of its own, and for late ones what data says."""
    lane, issued = followed(LEFT_OVER, 4)
    assert issued["MUFU.EX2"] == 1 and issued["IADD3"] == 4
    assert lane.data_dependent == {0x30}


LAST = """
        /*0000*/                   LDC.64 R2, c[0x0][0x210] ;
        /*0008*/                   ATOMG.E.ADD.STRONG.GPU PT, R5, desc[UR4][R2.64], R6 ;
        /*0010*/                   UMOV UR6, 0x400 ;
        /*0020*/                   STS [UR6], R5 ;
        /*0030*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0040*/                   LDS R4, [UR6] ;
        /*0050*/                   ISETP.NE.U32.AND P0, PT, R4, 0x7, PT ;
        /*0060*/               @P0 EXIT ;
        /*0070*/                   MUFU.EX2 R8, R8 ;
        /*0080*/                   EXIT ;
"""


def test_the_finish_is_left_to_the_last_program_though_it_is_told_by_shared_memory() -> None:
    """One thread asks, and tells the others: what it stores there is what they load."""
    assert "MUFU.EX2" not in followed(LAST, 64, 0)[1]
    assert "MUFU.EX2" in followed(LAST.replace("0x7, PT", "RZ, PT"), 64, 0)[1]


ASKED = LAST.replace("ATOMG.E.ADD.STRONG.GPU PT, R5, desc[UR4][R2.64], R6", "LDG.E.STRONG.GPU R5, desc[UR4][R2.64]")
SHARED = ASKED.replace("0x7, PT", "RZ, PT")


@pytest.mark.parametrize(("sharing", "computed"), [(1, 8), (2, 4), (8, 1)])
def test_what_strips_share_is_counted_once(sharing: int, computed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 programs one in `sharing` finds zero, and computes; without sharing the word is data, and both ways run."""
    monkeypatch.setattr(counts, "disassemble", lambda cubin, kernel: sass.parse(SHARED))
    counts._count.cache_clear(), counts._flow.cache_clear()
    found = counts.count(b"", counts.Launch("cuda:90", (8, 1, 1), 1, counts.parameters([None]), sharing=sharing))
    counts._count.cache_clear(), counts._flow.cache_clear()
    assert found.pipes["special"] == pytest.approx(computed) and found.flight == 4


SPILLED = (
    LOOP.replace("IADD3 R0, R0, 0x1, RZ ;", "LDL R0, [R1+0x8] ;\n        /*00c8*/     IADD3 R0, R0, 0x1, RZ ;\n"
                 "        /*00cc*/     STL [R1+0x8], R0 ;")
    .replace("MOV R0, RZ ;", "MOV R0, RZ ;\n        /*0004*/     STL [R1+0x8], R0 ;")
    .replace("LDC R1,", "LDC R3,").replace("R0, R1, PT", "R0, R3, PT")
)  # fmt: skip


@pytest.mark.parametrize("turns", [1, 7])
def test_a_counter_may_be_spilled_meanwhile(turns: int) -> None:
    lane, issued = followed(SPILLED, turns)
    assert issued["LDL"] == issued["MUFU.EX2"] == turns and not lane.data_dependent


BRANCHED = LOOP.replace("MOV R0, RZ ;", "FSETP.GT.AND P4, PT, R9, RZ, PT ;\n        /*0008*/     MOV R0, RZ ;\n"
                        "        /*000c*/     @P4 BRA `(.L_x_9) ;").replace(
    "        /*00f0*/", ".L_x_9:\n        /*00f0*/")  # fmt: skip


def test_a_side_that_divides_on_its_way_is_no_slow_path() -> None:
    """What a team reduces where data says so; the slow paths of its divisions are not taken."""
    _, issued = followed(BRANCHED, 5)
    assert issued["MUFU.EX2"] == 5 and "MUFU.RCP" not in issued


ASSERTED = LOOP.replace("CALL.REL.NOINC `($slow)", "CALL.ABS.NOINC R2").replace("RET.REL.NODEC R20 `(kernel)", "EXIT")


def test_an_assertion_of_data_is_no_way_to_the_end() -> None:
    lane, issued = followed(ASSERTED, 5)
    assert issued["LDG.E.128"] == 5 and "CALL.ABS.NOINC" not in issued and not lane.data_dependent


def test_a_loop_whose_end_is_data_is_counted_once_and_said_to_be() -> None:
    lane, issued = followed(LOOP.replace("ISETP.GE.AND P2, PT, R0, R1, PT", "ISETP.GE.AND P2, PT, R0, R4, PT"), 5)
    assert issued["LDG.E.128"] == 1 and lane.data_dependent == {0xC0}


WORDS = """
        /*0000*/                   LDC R0, c[0x0][0x210] ;
        /*0010*/                   LDC R1, c[0x0][0x214] ;
        /*0020*/                   {rule} ;
        /*0030*/                   ISETP.NE.AND P0, PT, R2, {expected}, PT ;
        /*0040*/               @P0 EXIT ;
        /*0050*/                   STG.E desc[UR4][R4.64], R2 ;
        /*0060*/                   EXIT ;
"""
RULES = [
    ("IADD3 R2, R0, -R1, RZ", 100, 7, 93), ("IMAD R2, R0, R1, 0x5", 100, 7, 705), ("LEA R2, R0, R1, 0x4", 3, 7, 55),
    ("IMAD.WIDE R2, R0, R1, RZ", -3 & MASK, 7, -21 & MASK), ("SHF.R.S32.HI R2, RZ, 0x1f, R0", 1 << 31, 0, MASK),
    ("SHF.R.U32.HI R2, RZ, 0x5, R0", 100, 0, 3), ("LOP3.LUT R2, R0, 0xf, R1, 0xf8, !PT", 0x1230, 0x103, 0x1233),
    ("VIADDMNMX R2, R0, R1, 0x10, PT", 100, 7, 16), ("SEL R2, R0, R1, PT", 100, 7, 100),
    ("VIMNMX R2, R0, R1, !PT", 3, 7, 7), ("PRMT R2, R0, 0x7632, R1", 0xAAAA1111, 0xBBBB2222, 0xBBBBAAAA),
    ("HFMA2.MMA R2, -RZ, RZ, 0, 1", 0, 0, 0x3C00), ("LEA.HI R2, R0, R1, RZ, 0x4", 0xF0000000, 7, 22),
    ("IABS R2, R0", -5 & MASK, 0, 5), ("SHF.L.U32 R2, R0, 0x4, RZ", 0xF0000001, 0, 0x10),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "a", "b", "expected"), RULES, ids=[r[0] for r in RULES])
def test_integer_instructions(rule: str, a: int, b: int, expected: int) -> None:
    right = WORDS.format(rule=rule, expected=hex(expected))
    assert "STG.E" in followed(right, a, b)[1]
    assert "STG.E" not in followed(WORDS.format(rule=rule, expected=hex(expected ^ 1)), a, b)[1]


# ------------------------------------------------------------------ kernels
COPY = """@triton.jit
def copy(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    for at in tl.range(tl.program_id(0) * N * BLOCK, (tl.program_id(0) + 1) * N * BLOCK, BLOCK):
        tl.store(out_ptr + at + col, tl.load(x_ptr + at + col))
"""


def copy_of(turns: int, programs: int) -> tuple[Kernel, str]:
    """16 bytes for each lane and turn, there and back."""
    moved = {"reads": {"x_ptr": 2048 * turns * programs}, "writes": {"out_ptr": 2048 * turns * programs}}
    arguments = (
        Pointer("x_ptr", Ref("input", 0), "bf16"),
        Pointer("out_ptr", Ref("output", 0), "bf16"),
        Scalar("N", turns),
    )
    return Kernel(
        "copy", COPY, arguments, {"BLOCK": 1024}, programs, 4, **moved
    ), f"import triton\nimport triton.language as tl\n{COPY}"


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100"])
def test_a_copy_issues_a_load_and_a_store_for_each_turn(target: str) -> None:
    device = next(d for d in DEVICES.values() if d.target == target)
    kernel, module = copy_of(turns=100, programs=1056)
    found = model_of(kernel, compile_for([kernel], module, [target])["copy"][target], {}, device)
    assert not found.data_dependent
    accesses = found.pipes["memory"] * found.bytes / 4 / 32
    assert accesses == pytest.approx(1056 * 4 * 100 * 2, rel=0.06)
    assert found.bytes == 2 * 2048 * 100 * 1056 and found.copy == pytest.approx(found.bytes / device.bandwidth * 1e6)
    assert found.share < 0.5 and found.programs == 1056


COUNTS = counts.Counts({"float": 1e6}, 64)
LAUNCH = counts.Launch("cuda:90", (1056, 1, 1), 8, ())
MOVED = 100_000_000


def modelled(programs: int = 1056, instructions: float = 1e6, flight: int = 64, registers: int = 32):
    found, launch = counts.Counts({"float": instructions}, flight), replace(LAUNCH, grid=(programs, 1, 1))
    return model_launch(found, launch, MOVED, MOVED // 4, (registers, 0), H100)


def test_a_full_wave_takes_the_longer_of_bytes_and_issue() -> None:
    assert modelled().bound == "bytes" and modelled().over_copy == pytest.approx(1)
    twice = 2 * H100.budget * MOVED
    assert modelled(instructions=twice).over_copy == pytest.approx(2) and modelled(
        instructions=twice
    ).share == pytest.approx(2)


def test_a_last_wave_of_few_programs_costs_a_turn_of_all() -> None:
    heavy = H100.budget * MOVED
    full, more = modelled(1056, heavy), modelled(1057, heavy)
    assert full.over_copy == pytest.approx(1) and full.waves == 1
    assert more.over_copy == pytest.approx(1 + 1 / 8, rel=0.01)


def test_idle_multiprocessors_and_few_bytes_on_their_way_cost_time() -> None:
    heavy = H100.budget * MOVED
    assert modelled(66, heavy, 256).idle == 0.5 and modelled(66, heavy, 256).over_copy == pytest.approx(2)
    few = modelled(132, flight=16)
    assert few.bound == "flight" and few.over_copy == pytest.approx(H100.needed_flight / few.flight)


def test_a_copy_of_few_bytes_keeps_memory_waiting_as_well() -> None:
    enough = int(2 * H100.needed_flight * H100.multiprocessors)
    assert copy_seconds(10 * enough, H100) == pytest.approx(10 * enough / H100.bandwidth)
    assert copy_seconds(enough // 4, H100) == pytest.approx(2 * H100.latency) and copy_seconds(0, H100) == 0.0


def test_without_tools_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "tools", lambda: None)
    with pytest.raises(sass.NoListingError, match="ships no nvdisasm"):
        sass.disassemble(b"not even one")
    with pytest.raises(sass.NoListingError, match="hip:gfx942"):
        counts.count(b"", replace(LAUNCH, target="hip:gfx942"))


def test_metrics_of_an_explanation_have_the_model_or_the_reason() -> None:
    found = explain(SquaredReLU, "bf16[4096,4096]", target="cuda:90")
    model = found.metrics()["SquaredReLU_forward"]["model"]
    assert model["budget"] == pytest.approx(H100.budget * 4 * 32) and model["bytes"] == 4 * 4096**2
    assert 5 < model["per_32"] < 10 and model["bound"] == "bytes" and model["over_copy"] < 1.05
    amd = found.metrics("hip:gfx942")["SquaredReLU_forward"]
    assert amd["model"] is None and "not read" in amd["not_modelled"]


def test_the_address_of_a_load_is_a_pair_of_registers() -> None:
    """Not four: a load behind another would seem to wait for what that one loads."""
    second = sass.Instruction(0, "", "LDG.E.128", ("R8", "desc[UR6][R2.64+0x1000]"), None)
    assert registers_read(second) == {"R2", "R3", "UR6", "UR7"}
    store = sass.Instruction(0, "@P0", "STG.E.128", ("desc[UR6][R2.64]", "R8"), None)
    assert registers_read(store) == {"P0", "R2", "R3", "UR6", "UR7", "R8", "R9", "R10", "R11"}
