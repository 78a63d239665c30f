"""Folding lines changes what a reader sees, and nothing else."""

from __future__ import annotations

import ast

import pytest

from fusegrad.runtime.export.python.line_folding import WIDTH, tidy

LONG = [
    "def f(" + ", ".join(f"argument_{i}" for i in range(20)) + "):\n    pass",
    "if x:\n    total += tl.load(pointer + (row * N + column), mask=inside_row & inside_column, other=float('-inf'), "
    "eviction_policy='evict_first').to(tl.float32)  # place.py:3  y = x.sum()",
    "out = (" + " + ".join(f"value_{i}" for i in range(9)) + ") * (" + " - ".join(f"v_{i}" for i in range(12)) + ")",
    "tl.store(pointer + offset, (rounded(x * cosine, tl.bfloat16) - rounded(y * sine, tl.bfloat16)).to(tl.bfloat16), "
    "mask=inside_row & inside_column)",
    "y = f(x)  # <string>:1",
]


@pytest.mark.parametrize("text", LONG)
def test_the_program_stays(text: str) -> None:
    found = tidy(text)
    assert ast.dump(ast.parse(found)) == ast.dump(ast.parse(text))
    assert max(map(len, found.splitlines())) <= WIDTH and "<string>" not in found
    assert ("place.py:3  y = x.sum()" in found) == ("place.py" in text)
    assert tidy(found) == found


def test_what_cannot_be_folded_stays_as_it_is() -> None:
    text = "y = " + "x" * 130
    assert ast.dump(ast.parse(tidy(text))) == ast.dump(ast.parse(text))
