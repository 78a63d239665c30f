"""Random Functions that stream: a few in each run of the tests, more with `make fuzz-streams`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import stream_trials

FOUND = {
    27: "logsumexp of scores that are low: a sum of zeros times infinity",
    109: "a sum of rows ran before the kernel that makes the rows",
    2: "a depth that another sum reads as well",
    202: "a stream that begins where data says: a place of 64 bits in 32",
    355: "a row of a depth that only the stores read",
    447: "a score that is silent at the end of the stream, for one sum of two",
    454: "rows of NaN, which a condition hides, at the end of the stream",
    491: "the least float as a mask, times more than one",
    411: "a row sum of bfloat16 that was rounded between two kernels",
    823: "scores and their transpose, which the interpreter multiplied in two orders",
    832: "an unmasked block below a length from memory, of heads that lie side by side",
    1210: "rows of the least float, of which twice the maximum is taken off",
    851: "a proof that took products of many sizes apart",
    2023: "a row sum of a result, rounded to bfloat16 before it is taken off",
    100130: "whole blocks of rows that a walk before had masked out",
    110070: "a score in bfloat16 that was not rounded where its logarithms were taken apart",
    110091: "a softmax of transposed heads that is made again, for a backward that views it",
    110111: "a sum along the stream that its walk read before it was made",
    200003: "the first of several maxima, compared with what it was a block before",
    200007: "the gradient of a keyed axis that eager does not slice",
    200142: "the maximum of each column of keys, which all rows share",
    2038: "a bound that lies before the stream, beside one that begins behind its start",
}


@pytest.mark.parametrize("seed", [*range(40000, 40040), *range(140000, 140030), *range(240000, 240060)])
def test_a_program(seed: int) -> None:
    found = stream_trials.tested(seed)
    assert not found.faults, f"`make fuzz-streams SEED={seed} N=1`\n{found.faults[0]['text']}"


@pytest.mark.parametrize("seed", FOUND, ids=FOUND.get)
def test_what_was_found(seed: int) -> None:
    assert not stream_trials.tested(seed).faults
