"""The text of streamed kernels: the user's names, masks where they are needed and once, distances in 32 bits."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from stream_functions import named


def texts(name: str, n: int) -> dict[str, str]:
    found = fusegrad.explain(named(name).cls, *named(name).arguments(n, 64, torch.bfloat16))
    return {k.name.removeprefix(f"{name}_"): k.source for k in found.kernels if k.walk}


def loops(text: str) -> list[str]:
    """The loops along the stream, without what is behind them."""
    bodies = text.split("for col_at in ")[1:]
    return ["\n".join(line for line in body.split("\n")[1:] if line.startswith("        ")) for body in bodies]


def test_names_of_the_users_variables() -> None:
    forward, queries, keys = texts("SavedProbabilities", 1024).values()
    assert "(q_ptr, k_ptr, v_ptr, out_ptr, out_ptr_2, s_max_ptr, e_sum_ptr, " in forward
    assert "# never in memory: s; a program has BLOCK_M rows, and walks their columns by BLOCK_N\n" in forward
    assert "# sums are relative to the maximum so far\n" in forward
    assert "s_max_ptr, e_sum_ptr, out_ptr, g_ptr, g_out_sum_ptr, grad_q_ptr, " in queries
    assert "grad_k_ptr, grad_v_ptr, " in keys
    nameless = r"\b(k_2|product|row_2|col_2|output_ptr\w*|temporary_ptr|exp2?_v|fma_v|amax_\d+\w*)\b"
    assert not any(re.search(nameless, text) for text in (forward, queries, keys))


def test_both_loops_have_the_same_names() -> None:
    whole, edge = loops(texts("CausalGQA", 1000)["forward"])
    given = [dict.fromkeys(re.findall(r"^ +(\w+) = ", body, re.M)) for body in (whole, edge)]
    assert list(given[0]) == [name for name in given[1] if name in given[0]]
    assert set(given[1]) - set(given[0]) <= {"inside_col", "inside_col_down", "s_2", "s_3"}


def test_the_end_of_the_stream_is_masked_once() -> None:
    for body in loops(texts("CausalGQA", 1000)["forward"]):
        assert body.count("tl.where(inside_col,") == ("inside_col = " in body)


def test_no_mask_for_an_end_that_blocks_divide() -> None:
    """The diagonal is asked for, the end is not: in forward and for the gradient of queries."""
    found = texts("CausalGQA", 1024)
    for text in (found["forward"], found["backward_1"]):
        whole, edge = loops(text)
        assert "lane_of(" in edge and "lane_of(" not in whole
        assert "inside_col" not in text
    assert "inside_col" in texts("CausalGQA", 1000)["forward"]


@pytest.mark.parametrize("n", [1024, 1000])
def test_distances_are_of_32_bits(n: int) -> None:
    """j - i, which eager has in 64 bits, and of which a float is made."""
    for text in texts("Alibi", n).values():
        assert len(re.findall(r"apart = (col_at|tl\.cast\(first_row, tl\.int32\)) - ", text)) == len(loops(text))
        assert not re.search(r"\(first_col \+ cols\).* - .*\.to\(tl\.float32\)", text)
