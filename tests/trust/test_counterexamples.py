"""z3 finds a counterexample to each fault that is planted into a kernel's text: so it would find one that is there."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import sympy

z3 = pytest.importorskip("z3", reason="z3-solver is not installed: the proofs have no second judge")

import counterexamples  # noqa: E402
import proofs  # noqa: E402
import test_proofs as planted  # noqa: E402
from counterexamples import PATIENT, At, Verdict, at_once, in_numbers  # noqa: E402
from proofs import Subject, prove  # noqa: E402
from z3_terms import quotient, term_of  # noqa: E402

from fusegrad.codegen.proofs import Proof  # noqa: E402

EQUIVALENT = {
    "a remainder that is not known": "the guard says that the size is a multiple, of which this is one way to write it",
    "items of all groups in 32 bits": "where rows are so long there is one program",
}
"""Planted faults that are not proved to be none, and at which nothing goes wrong."""


def found(subject: Subject, proof: Proof) -> Verdict:
    """At a few sizes, and at all small ones if nothing is found there."""
    told = in_numbers(subject, proof, 8, PATIENT)
    if not told.found:
        told.add(at_once(subject, proof, PATIENT))
    return told


# ------------------------------------------------------------------ what must be found
@pytest.mark.parametrize("fault", planted.MUTANTS)
def test_a_planted_fault_has_a_counterexample(fault: str) -> None:
    *where, kind = planted.MUTANTS[fault]
    subject = planted.mutant(*where)
    told = found(subject, prove(subject))
    assert told.sizes > 1
    assert not told.found if fault in EQUIVALENT else kind in told.kinds, EQUIVALENT.get(fault)


@pytest.mark.parametrize("fault", planted.GRIDS)
def test_a_wrong_grid_has_a_counterexample(fault: str) -> None:
    name, sizes, grid = planted.GRIDS[fault]
    subject = planted.the(name, sizes)
    wrong = replace(subject, kernel=replace(subject.kernel, grid=grid(subject.kernel.grid)))
    assert "range" in found(wrong, prove(subject)).kinds


@pytest.mark.parametrize("fault", [None, *planted.WITHOUT_PROOF])
def test_an_index_is_what_the_text_asserts(fault: str | None) -> None:
    """Without a look at the proof, which calls some of these a condition."""
    subject = planted.the("body lookup", {**planted.WIDE, proofs.N: 24}, "interpret")
    source = subject.kernel.source
    if fault is not None:
        source = source.replace(*planted.WITHOUT_PROOF[fault])
    if fault == "behind the access":
        source += f"    {planted.ASSERTION}\n"
    told = found(replace(subject, kernel=replace(subject.kernel, source=source)), Proof("k"))
    assert told.sizes >= 8 and told.kinds == (set() if fault is None else {"range"})


@pytest.mark.parametrize("name", planted.SAMPLE)
def test_every_access_is_reached(name: str) -> None:
    """By some program, turn and lane at some of the sizes: of what nothing reaches, anything would be true."""
    for subject in proofs.of_body(name, *proofs.bodies()[name], planted.ODD, "cuda:90"):
        reached, missed = set(), set()
        for sizes in counterexamples.admitted(subject, 8):
            at = At(subject, Proof("k"), sizes, [])
            solver = z3.Solver()
            solver.add(*at.domain)
            for access in at.reading.accesses:
                (reached if solver.check(access.active) == z3.sat else missed).add((access.line, access.text))
        assert reached and not missed - reached


# ------------------------------------------------------------------ terms
@pytest.mark.parametrize("name", ["body rms_backward", "mixed_axes group backward", "layout cat"])
def test_sizes_are_what_sympy_says(name: str) -> None:
    subject = planted.the(name, planted.ODD)
    sizes = [subject.kernel.grid, *(a.value for a in subject.kernel.arguments if hasattr(a, "value"))]
    for chosen in counterexamples.admitted(subject, 12):
        exact = {**chosen, **subject.kernel.pinned}
        numbers = {s: sympy.Integer(n) for s, n in exact.items()}
        assert [term_of(n, exact) for n in sizes] == [planted.number(n, numbers) for n in sizes]
        opened = {s: z3.IntVal(n) for s, n in exact.items()}
        terms = [z3.simplify(z3.IntVal(0) + term_of(n, opened)).as_long() for n in sizes]
        assert terms == [planted.number(n, numbers) for n in sizes]


def test_quotients_are_a_device_s() -> None:
    draw = random.Random(0)
    for _ in range(50):
        x, d = draw.randint(-40, 40), draw.choice((-7, -2, -1, 1, 2, 7))
        towards_zero = int(x / d)
        assert quotient(x, d) == towards_zero
        assert z3.simplify(quotient(z3.IntVal(x), z3.IntVal(d))).as_long() == towards_zero
