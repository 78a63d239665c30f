"""What `explain` says of matrices that are never in memory, and how much memory a call takes: linear in their rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fusegrad
from fusegrad.codegen.kernel import Walk
from fusegrad.examples.gallery.attention import Attention
from fusegrad.ir.passes.streaming import streams
from fusegrad.runtime.profile.measure import peak_bytes
from fusegrad.runtime.report.explanation import Explanation
from fusegrad.runtime.report.walks import made_again, walk_text

sys.path.insert(0, str(Path(__file__).parent))
from stream_functions import named


def explained(name: str, n: int = 1024) -> Explanation:
    return fusegrad.explain(named(name).cls, *named(name).arguments(n, 64, torch.bfloat16))


def walks(found: Explanation) -> dict[str, str]:
    return {k.name: k.walk for k in found.kernels if k.walk}


# ------------------------------------------------------------------ what it says
def test_rows_what_is_walked_and_by_what_sums_are_rescaled() -> None:
    found = walks(explained("CausalGQA"))
    assert list(found) == ["CausalGQA_forward", "CausalGQA_backward_1", "CausalGQA_backward_2"]
    forward, queries, keys = found.values()
    assert forward == (
        "rows M = 1,024 by 64, walks N = 1,024 by 32; rescaled as the maximum moves; skips blocks above the diagonal"
    )
    assert "rescaled" not in queries and queries.endswith("; skips blocks above the diagonal")
    assert "sums over 2 besides" in keys and keys.endswith("; skips blocks above the diagonal")


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("SoftcapWindow", "; skips blocks outside the window"),
        ("CrossAttention", "; skips blocks past `length`"),
        ("SavedProbabilities", "; rescaled as the maximum moves"),
    ],
)
def test_blocks_that_are_skipped(name: str, end: str) -> None:
    assert walks(explained(name))[f"{name}_forward"].endswith(end)


def test_the_matrices_go_by_the_names_in_the_source() -> None:
    found = explained("SavedProbabilities")
    forward, backward = found.directions.values()
    assert forward.products[0].startswith("stream s, e, p (stream_functions.py:")
    assert ": never in memory, 25.2 MB; modelled, " in forward.products[0]
    assert backward.products[0].startswith("stream s, e, p, dp, ds (stream_functions.py:")
    parts = "SavedProbabilities_backward_1 and SavedProbabilities_backward_2"
    assert found.made_again("forward") == []
    assert found.made_again("backward") == [
        f"s: computed again in {parts}, not saved", "dp: computed again in SavedProbabilities_backward_2, not saved"
    ]  # fmt: skip


def test_kernels_of_two_directions_wait_for_none_of_the_other() -> None:
    """The second reads the row sums that the first one makes before it walks."""
    (keys,) = explained("SavedProbabilities").directions["backward"].cuts
    assert keys.code == "FG122" and keys.reason.startswith("a kernel for each direction in which")


def test_a_region_that_stays_with_the_library_says_by_which_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SHARE", 1e-3)
    line, *_ = explained("SavedLogSumExp").directions["forward"].products
    assert "in memory, 25.2 MB; modelled, " in line and "never" not in line
    assert line.endswith("by the library and kernels between: the products stay with the library")


def test_the_page_and_the_dictionary_say_the_same() -> None:
    found = explained("CausalGQA")
    page, facts = found.to_html(), found.to_dict()
    for line in (*walks(found).values(), *found.made_again("backward"), *found.directions["backward"].products):
        assert line.replace("`", "&#96;") in page or line in page
    assert facts["made_again"]["backward"] == found.made_again("backward")
    assert facts["peak_memory"]["forward"] == found.directions["forward"].memory.to_dict()


def test_words_of_a_walk() -> None:
    walk = Walk(1000, 40, 40_000, (128, 64), ("M", "N"), (2, 3), passes=2, relative_to=("the maximum", "the minimum"))
    assert walk_text(walk, {}) == (
        "rows M = 1,000 by 128, walks N = 40 by 64; sums over 2 x 3 besides; walks them 2 times; "
        "rescaled as the maximum and the minimum move"
    )
    first = Walk(1000, 40, 40_000, (128, 64), ("M", "N"), prologue=("a", "b"))
    assert walk_text(first, {}) == "rows M = 1,000 by 128, walks N = 40 by 64; makes a and b of them first"
    kept = Walk(1000, 40, 40_000, (128, 64), ("M", "N"), (2,), keeps_stream=True)
    assert walk_text(kept, {}) == "tiles of M = 1,000 by 128 and N = 40 by 64; sums over 2 besides"
    pair = [("a", Walk(1, 1, 1, (1, 1), ("M", "N"), products=("s",))), ("b", Walk(1, 1, 1, (1, 1), ("M", "N")))]
    assert list(made_again([], pair)) == []
    assert list(made_again(pair, pair)) == ["s: computed again in a, not saved"]


# ------------------------------------------------------------------ how much memory a call takes
HEADS, WIDTH = 32, 128


def peaks(n: int) -> dict[str, tuple[int, int]]:
    shape = f"bf16[1,{HEADS},{n},{WIDTH}]"
    found = fusegrad.explain(Attention, shape, shape, shape, WIDTH**-0.5, True)
    memory = {d: report.memory for d, report in found.directions.items()}
    written = sum(row.bytes for row in found.kept if row.how in ("saved as written", "computed again"))
    own = {d: (m.own, m.eager) for d, m in memory.items() if m is not None and m.eager is not None}
    return {**own, "saved": (found.saved_bytes, written)}


def test_memory_is_linear_in_the_rows_by_explain() -> None:
    once, twice = peaks(8192), peaks(16384)
    for part, (own, eager) in twice.items():
        assert own <= 2.01 * once[part][0], part
        assert eager >= 3.8 * once[part][1], part
    rows = HEADS * 16384
    assert twice["forward"][0] == rows * (2 * WIDTH * 2 + 2 * 4)  # the result, what is saved of it, two sums
    assert twice["backward"][0] <= rows * (3 * WIDTH * 2 + 4)  # three gradients, and the sums of g * out
    assert twice["forward"][1] >= rows * 16384 * 2


def measured(cls: Any, n: int) -> tuple[int, int]:
    q, k, v = (torch.randn(1, 1, n, 16).requires_grad_() for _ in range(3))
    device = torch.device("cpu")
    cls.apply(q, k, v, 0.25, True).sum().backward()  # the first call is compared with eager
    forward = peak_bytes(lambda: cls.apply(q, k, v, 0.25, True), device)
    out = cls.apply(q, k, v, 0.25, True)
    return forward, peak_bytes(lambda: torch.autograd.grad(out, (q, k, v), out.detach(), retain_graph=True), device)


def test_memory_is_linear_in_the_rows_by_measurement() -> None:
    """By torch's allocator, of kernels that the interpreter runs, at sizes where the matrices are most of eager's."""
    own = fusegrad.compile(Attention._fusegrad.user.original, backend="interpret")
    plain = Attention._fusegrad.user.original
    for ours, again, eager, more in zip(*(measured(c, n) for c in (own, plain) for n in (192, 384)), strict=True):
        assert again <= 2.2 * ours and more >= 3.5 * eager
        assert again < more / 4
