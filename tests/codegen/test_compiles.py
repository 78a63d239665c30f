"""The text compiles for every device without one: no spills, wide accesses, the same bytes every time."""

from __future__ import annotations

from typing import Any

import pytest
from bodies import BODIES
from harness import K, M, N, evaluated, graph_of

from fusegrad.codegen import TARGETS, Pointer, generate, module
from fusegrad.codegen.emit.prelude import HELPERS
from fusegrad.runtime.kernels.triton_module import TRITON_DTYPE, load

SIZES = {M: 4096, N: 4096, K: 8}


def compiled(body: str, target: str, sizes: dict[Any, int] = SIZES) -> Any:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, inputs = BODIES[body]
    device = TARGETS[target]
    (kernel,) = generate(graph_of(function, **inputs), target=device, hints=sizes, name=body).kernels
    jit = getattr(load(module([kernel])), kernel.name)
    signature = {a.name: "*" + TRITON_DTYPE[a.dtype] if isinstance(a, Pointer) else "i32" for a in kernel.arguments}
    signature |= dict.fromkeys(kernel.constants, "constexpr")
    attrs = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arguments) if isinstance(a, Pointer)}
    places = {(jit.arg_names.index(c),): v for c, v in kernel.constants.items()}
    arch = int(device.arch) if device.arch.isdigit() else device.arch
    source = ASTSource(fn=jit, signature=signature, constexprs=places, attrs=attrs)
    options = kernel.options(device.kind)
    return triton.compile(source, target=GPUTarget(device.kind, arch, device.warp), options=options)


@pytest.mark.parametrize("body", ["rms_backward", "softmax", "cross_entropy", "swiglu", "dyt_backward", "jsd"])
def test_accesses_are_wide(body: str) -> None:
    lines = [line.split() for line in compiled(body, "cuda:90").asm["ptx"].splitlines()]
    operations = [w for words in lines for w in words[:3] if w.startswith(("ld.global", "st.global", "cp.async.cg"))]
    assert any(".v4" in w or "cp.async" in w for w in operations)
    assert not any(w.endswith((".b16", ".u16")) and ".v" not in w for w in operations if body not in ("cross_entropy",))


@pytest.mark.parametrize("body", ["softmax", "cross_entropy"])
def test_reads_of_long_odd_rows_are_wide(body: str) -> None:
    """Rows of 50257 begin anywhere; what is read is still 16 bytes at a time, and so are stores but at a row's ends."""
    ptx = compiled(body, "cuda:90", {M: 8192, N: 50257}).asm["ptx"]
    words = [w for line in ptx.splitlines() for w in line.split()[:3]]
    assert (
        not any(w.startswith("ld.global") and w.endswith(".b16") and ".v" not in w for w in words) or body != "softmax"
    )
    assert any("cp.async" in w for w in words) and any(w.startswith("st.global") and ".v4" in w for w in words)


@pytest.mark.parametrize("target", ["cuda:80", "cuda:100", "hip:gfx942"])
@pytest.mark.parametrize("body", ["rms_backward", "cross_entropy_full", "rope"])
def test_compiles_everywhere(body: str, target: str) -> None:
    assert compiled(body, target).asm


def test_the_same_text_every_time() -> None:
    for body in ("group_backward", "cross_entropy", "jsd"):
        function, inputs = BODIES[body]
        texts = {
            module(
                generate(graph_of(function, **inputs), target=TARGETS["cuda:90"], hints=SIZES, name=body).kernels, "x"
            )
            for _ in range(3)
        }
        assert len(texts) == 1


def test_a_module_includes_what_it_uses() -> None:
    function, inputs = BODIES["dyt_backward"]
    graph = graph_of(function, **inputs)
    texts = {t: module(generate(graph, target=TARGETS[t], hints=SIZES, name="dyt").kernels) for t in TARGETS}
    included = {t: {n for n in HELPERS if f"def {n}(" in text} for t, text in texts.items()}
    of_nvidia = {"pairs_from_bf16", "tanh", "near_power", "near_reciprocal"}
    assert included["cuda:90"] == {"last_to_arrive", *of_nvidia} and "libdevice" not in texts["cuda:90"]
    assert included["hip:gfx942"] == {"last_to_arrive"} and "libdevice.tanh(" in texts["hip:gfx942"]
    assert "from triton.language.extra import libdevice\n" in texts["hip:gfx942"]


def test_grids_and_scratch_follow_the_sizes() -> None:
    function, inputs = BODIES["rms_backward"]
    (kernel,) = generate(graph_of(function, **inputs), target=TARGETS["cuda:90"], hints=SIZES, name="rms").kernels
    assert [evaluated(kernel.grid, {M: m}) for m in (1, 100, 4096, 100000)] == [1, 9, 128, 132]
    assert kernel.pinned == {N: 4096}
    assert {b.name: b.zeroed for b in kernel.scratch} == {"dw_partial": False, "arrived": True}


def test_an_index_is_asserted_once_per_program() -> None:
    """One assertion, none of Triton's own of overflow; the row behind the index is read 16 bytes at a time."""
    sizes = {M: 32000, N: 4096, K: 8192}
    ptx = compiled("lookup", "cuda:90", sizes).asm["ptx"]
    assert ptx.count("call.uni") == ptx.count("call.uni __assertfail") == 1
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
    assert "s_trap" in compiled("lookup", "hip:gfx942", sizes).asm["amdgcn"]
