"""z3 is asked for a counterexample to what was proved of each kernel that the tests know, and finds none.

It reads the kernels' text by rules of its own (`z3_reading.py`), so that it judges the reader of the proofs as well.
`test_counterexamples.py` plants faults, which it finds; `make counterexamples` asks of all small sizes at once, too.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("z3", reason="z3-solver is not installed: the proofs have no second judge")

import proofs
from counterexamples import QUICK, at_once, in_numbers
from functions import CASES
from proofs import Subject


def assert_upheld(subject: Subject, count: int) -> None:
    proof = proofs.prove(subject)
    if proof.proved and subject.kernel.grid != 0:
        told = in_numbers(subject, proof, count, QUICK, meeting=bool(proof.apart))
        if not told.sizes:
            told = at_once(subject, proof, QUICK)
        assert not told.found and not told.unseen
        assert told.answered + told.unknown >= len([c for c in proof.claims if c.answer != "data"])


@pytest.mark.parametrize("target", proofs.ON)
@pytest.mark.parametrize("size", proofs.SIZES)
@pytest.mark.parametrize("name", proofs.bodies())
def test_what_is_proved_has_no_counterexample(name: str, size: str, target: str) -> None:
    function, inputs = proofs.bodies()[name]
    for subject in proofs.of_body(name, function, inputs, proofs.SIZES[size], target):
        assert_upheld(subject, 4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_of_the_suite_have_no_counterexample(case) -> None:
    torch.manual_seed(0)
    for subject in proofs.once(proofs.generated_by(case.name, lambda: proofs.compiled(case))):
        assert_upheld(subject, 2)
