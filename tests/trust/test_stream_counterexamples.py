"""z3 reads kernels that stream by rules of its own: it upholds what was proved of them, and finds what was planted."""

from __future__ import annotations

import pytest

pytest.importorskip("z3", reason="z3-solver is not installed: the proofs have no second judge")

import proofs
from counterexamples import PATIENT, QUICK, At, Verdict, at_once, in_numbers, symbols_of
from proofs import Subject
from proofs_of_streams import FAULTS, STREAMS, Stream, faulty

READ = [name for name in STREAMS if "head of" not in name]
OTHERS = 3
"""The sizes beside those at which a fault is to be seen."""


def subject_of(name: str, stream: Stream) -> Subject:
    graph, kernels = stream.kernels()
    return Subject(name, graph, kernels, kernels.kernels[0])


@pytest.mark.parametrize("name", READ)
def test_what_is_proved_of_a_stream_has_no_counterexample(name: str) -> None:
    subject = subject_of(name, STREAMS[name])
    proof = proofs.prove(subject)
    assert proof.proved
    told = in_numbers(subject, proof, 2, QUICK)
    assert told.sizes == 2 and not told.found and not told.unseen
    assert told.answered + told.unknown >= 2 * len(proof.claims) and told.answered > told.unknown


def judged(subject: Subject, at) -> Verdict:
    """At the sizes where it goes wrong; else at a few, and at all small ones if nothing is found there."""
    proof = proofs.prove(subject)
    if at:
        return At(subject, proof, {s: at.get(s, OTHERS) for s in symbols_of(subject)}, []).verdict(True, PATIENT)
    told = in_numbers(subject, proof, 8, PATIENT)
    return told if told.found else at_once(subject, proof, PATIENT)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_stream_has_a_counterexample(fault: str) -> None:
    told = judged(subject_of(fault, faulty(fault)), FAULTS[fault].at)
    assert FAULTS[fault].kind in told.kinds
