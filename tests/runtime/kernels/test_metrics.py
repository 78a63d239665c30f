"""Metrics from machine code: widths of every kind of access, and a kernel that spills."""

from __future__ import annotations

from pathlib import Path

import pytest

import fusegrad
from fusegrad.benchmarks import functions
from fusegrad.ir.errors import UnsupportedBackendError
from fusegrad.runtime.kernels.cross_compile import metrics
from fusegrad.runtime.kernels.cross_compile.metrics import Metrics, measure

PTX = """
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.L1::evict_last.v2.b64 { %rd1, %rd2 }, [ %rd3 + 0 ];
    @!%p3 ld.acquire.gpu.global.b32 %r9, [ %rd4 ];
    ld.param.b64 %rd1, [kernel_param_0];
    ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];
    st.global.b16 [ %rd5 + 0 ], { %rs1 };
    st.global.b8 [ %rd5 ], %rs2;
    st.shared.b32 [%r1], %r2;
    cp.async.cg.shared.global [ %r30 + 0 ], [ %rd9 + 0 ], 0x10, %r31;
    cp.async.ca.shared.global [ %r30 + 0 ], [ %rd9 + 0 ], 4;
"""

AMDGCN = """
    buffer_load_dwordx4 v[12:15], v1, s[16:19], 0 offen
    global_load_dword v1, v2, s[0:1]
    global_load_lds_dword v[0:1], off
    global_load_ushort v1, v2, s[0:1]
    global_load_short_d16_hi v1, v2, s[0:1]
    global_store_byte v1, v2, s[0:1]
    global_store_b64 v1, v2, s[0:1]
    scratch_store_dword off, v1, s0
    ds_read_b128 v[0:3], v4
  - .agpr_count:     0
    .vgpr_count:     40
    .vgpr_spill_count: 3
"""


def test_ptx_widths() -> None:
    assert measure({"ptx": PTX, "cubin": b""}, "cuda:90").accesses == {1: 1, 2: 1, 4: 2, 16: 3}


def test_amd_widths_registers_and_spills() -> None:
    assert measure({"amdgcn": AMDGCN}, "hip:gfx942", shared=512) == Metrics(
        40, 12, 512, {1: 1, 2: 2, 4: 2, 8: 1, 16: 1}
    )


def test_what_an_assertion_of_amd_prints_is_no_access_of_the_kernel() -> None:
    helper = "__ockl_fprintf_stderr_begin:\n\tglobal_load_dwordx4 v[0:3], v[4:5], off\n.Lfunc_end0:\n"
    kernel = "k:\n\tglobal_load_dwordx2 v[0:1], v[4:5], off\n\ts_trap 2\n.Lfunc_end1:\n\t.vgpr_count:     9\n"
    found = measure({"amdgcn": helper + kernel}, "hip:gfx942")
    assert found.accesses == {8: 1} and found.registers == 9


def test_tables_that_the_text_asks_for_are_no_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sine of a large number reads digits of 2 / pi from one, and leaves 50 registers free."""
    table = "\t.local .align 4 .b8 \t__local_depot0[28];"
    monkeypatch.setattr(metrics, "_of_cubin", lambda cubin, tools: (54, 40))
    assert measure({"ptx": table, "cubin": b""}, "cuda:90").spills == 8
    assert measure({"ptx": "", "cubin": b""}, "cuda:90").spills == 40
    monkeypatch.setattr(metrics, "_of_cubin", lambda cubin, tools: (-1, -1))
    assert measure({"ptx": table, "cubin": b""}, "cuda:90").spills == -1


@pytest.mark.parametrize("tools", [None, Path("/nowhere")])
def test_without_tools_registers_are_unknown(tools: Path | None) -> None:
    assert measure({"ptx": "", "cubin": b"x"}, "cuda:90", 7, tools) == Metrics(-1, -1, 7, {})


def test_text_with_assembly_is_compiled_for_its_vendor_alone() -> None:
    found = fusegrad.explain(functions.SwiGLU, "bf16[64,128]", "bf16[64,128]")
    assert "inline_asm" in found.module
    with pytest.raises(UnsupportedBackendError, match=r"generated for cuda:90 .*(.|\n)*target='hip:gfx942'"):
        found.binaries("cuda:90", "hip:gfx942")
    amd = fusegrad.explain(functions.SwiGLU, "bf16[64,128]", "bf16[64,128]", target="hip:gfx942")
    assert not [b.error for by in amd.binaries().values() for b in by.values() if b.error]
