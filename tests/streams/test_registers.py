"""No streamed kernel spills registers: tiles that would are not taken, and what has none stays with the library."""

from __future__ import annotations

import pytest

from fusegrad import explain
from fusegrad.benchmarks.kernels import TARGETS
from fusegrad.benchmarks.stream_functions import STREAMS, ALiBi
from fusegrad.runtime.report.explanation import Explanation

DEEP = (320, 512)
MASKED = [name for name in STREAMS if name.startswith(("ALiBi", "SoftcapWindow")) or name.endswith("causal]")]


def of_attention(target: str, depth: int, dtype: str) -> Explanation:
    """Masked attention of 16 heads, 4096 places long."""
    heads = f"{dtype}[2,16,4096,{depth}]"
    return explain(ALiBi, heads, heads, heads, f"{dtype}[16]", depth**-0.5, target=target)


def spilled(found: Explanation, target: str) -> dict[str, int | str]:
    """Of each kernel that walks a stream: the bytes of a thread, or why it is not compiled."""
    binaries = found.binaries()
    compiled = {k.name: binaries[k.name][target] for k in found.kernels if k.walk}
    return {name: binary.error or binary.spills for name, binary in compiled.items()}


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("depth", DEEP)
@pytest.mark.parametrize("target", TARGETS)
def test_deep_heads_are_not_spilled(target: str, depth: int, dtype: str) -> None:
    found = of_attention(target, depth, dtype)
    spills = spilled(found, target)
    assert spills == dict.fromkeys(spills, 0)
    assert spills or f"no tile of it fits into the registers, with rows of {depth}" in str(found)


@pytest.mark.parametrize("target", ["cuda:90", "cuda:100"])
def test_exact_float32_is_not_spilled(target: str) -> None:
    """No tensor core multiplies it: a thread reads both sides of its elements from end to end."""
    spills = spilled(of_attention(target, 64, "f32"), target)
    assert len(spills) == 3 and spills == dict.fromkeys(spills, 0)


def test_exact_float32_of_longer_rows_stays_with_the_library() -> None:
    found = of_attention("cuda:90", 128, "f32")
    assert not spilled(found, "cuda:90") and "no tile of it fits into the registers, with rows of 128" in str(found)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", MASKED)
def test_masked_tiles_are_not_spilled(case: str, target: str) -> None:
    """Loops with masks are beside those without, around which there may be one over heads that share their keys; eight
    warps of 64 lanes have half of the registers that four have.
    """
    _, found, _ = STREAMS[case]
    spills = spilled(explain(found.function, *found.args, target=target), target)
    assert len(spills) == 3 and spills == dict.fromkeys(spills, 0)


def test_loops_around_loops_keep_nothing_of_them() -> None:
    _, case, _ = STREAMS["Attention[2,16,4096,128,causal]"]
    found = explain(case.function, *case.args, target="cuda:100")
    (around,) = [k for k in found.kernel_records if "for e_at in" in k.source]
    assert "for e_at in tl.range(0, 4, disable_licm=True):" in around.source


@pytest.mark.parametrize(("target", "roomy"), [("cuda:90", 0), ("cuda:100", 1)])
def test_masked_walks_are_not_spilled_for_a_second_program(target: str, roomy: int) -> None:
    kernels = of_attention(target, 128, "bf16").kernel_records
    assert [k.roomy for k in kernels] == [roomy] * 3
