"""Sizes that a reshape divides: what a trace knows to be whole is written without quotients of quotients."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Max, Mod

import fusegrad
from fusegrad.tracer.capture.capture import Session
from fusegrad.tracer.sizes import multiples_in, with_whole_parts

B, C, H = sympy.symbols("B C H", integer=True, positive=True)
N = sympy.Symbol("N", integer=True, nonnegative=True)
KNOWN = ((C, 4), (H, 6))
PART = FloorDiv(C, 4)

WHOLE = [
    (4 * B * PART, B * C),
    (12 * PART + 1, 3 * C + 1),
    (2 * PART, 2 * PART),
    (6 * FloorDiv(H, 3), 2 * H),
    (FloorDiv(4 * B * PART, C), B),
    (FloorDiv(C, PART), sympy.Integer(4)),
    (4 * FloorDiv(B, 4), 4 * FloorDiv(B, 4)),
    (FloorDiv(B * PART, C), FloorDiv(B * PART, C)),
    (Max(1, 4 * PART), Max(1, C)),
]


@pytest.mark.parametrize(("expr", "expected"), WHOLE, ids=[str(e) for e, _ in WHOLE])
def test_quotients_of_multiples_are_written_without(expr: sympy.Expr, expected: sympy.Expr) -> None:
    found = with_whole_parts(expr, KNOWN)
    assert found == expected
    values = {B: 5, C: 28, H: 18}
    assert found.xreplace(values) == expr.xreplace(values)


TOLD = [
    (sympy.Eq(Mod(C, 4), 0), True, {C: 4}),
    (sympy.Ne(Mod(C, 4), 0), False, {C: 4}),
    (sympy.Eq(Mod(C, 4), 0), False, {}),
    (sympy.Eq(B * C * H, 24 * B * PART * FloorDiv(H, 6)), True, {C: 4, H: 6}),
    (sympy.Eq(B * C * H, 24 * B * PART * FloorDiv(H, 6)), False, {}),
    (sympy.Eq(B * C, 8 * B * PART), True, {}),  # as many as half of C has: C may be 1
    (sympy.Eq(N * C, 4 * N * PART), True, {}),  # where N is 0 it is so of every C
]


@pytest.mark.parametrize(("question", "answer", "expected"), TOLD, ids=range(len(TOLD)))
def test_an_answer_says_what_divides(question: sympy.Basic, answer: bool, expected: dict[sympy.Basic, int]) -> None:
    assert multiples_in(question, answer) == expected


def windows(x: torch.Tensor) -> torch.Tensor:
    b, h, w, c = x.shape
    return x.view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)


def test_sizes_after_a_division_are_in_the_sizes_before() -> None:
    session = Session()
    fake = session.fake(torch.empty(2, 16, 32, 24))
    with session.mode:
        made = windows(fake)
    quotients = [n.node.expr.atoms(FloorDiv) for n in made.shape if isinstance(n, torch.SymInt)]
    assert all(isinstance(q.args[0], sympy.Symbol) for of_size in quotients for q in of_size)
    assert {str(g.expr) for g in session.env.guards} >= {f"Eq(Mod({s}, 4), 0)" for s in map(str, fake.shape[1:3])}


def test_other_sizes_than_multiples_are_traced_again() -> None:
    def halves(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        return x.view(len(x), 2, n // 2).sum(1) if n % 2 == 0 else x[:, 1:]

    fast = fusegrad.compile(halves, backend="reference")
    for n in (8, 6, 7, 2, 9):
        x = torch.randn(3, n)
        torch.testing.assert_close(fast(x), halves(x), rtol=0, atol=0)
