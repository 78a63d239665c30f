"""Repetitions of lists, and functions of steps: what a loop is recognised by."""

from __future__ import annotations

import pytest

from fusegrad.tracer.loops.affine import Affine, fitted
from fusegrad.tracer.loops.alignment import Region, alignments


@pytest.mark.parametrize(
    ("short", "long", "regions"),
    [
        ("abbc", "abbbc", [Region(1, 1, 2)]),
        ("xababy", "xabababy", [Region(1, 2, 2)]),
        ("aab", "aaab", [Region(0, 1, 2)]),
        ("abab", "ababab", [Region(0, 2, 2)]),
        ("pababqcdcdr", "pabababqcdcdcdr", [Region(1, 2, 2), Region(6, 2, 2)]),
        ("uuuvuuuvw", "uuuvuuuvuuuvw", [Region(0, 4, 2)]),
        ("xababab", "xabababab", [Region(1, 2, 3)]),
        ("same", "same", []),
        ("ababa", "abababa", [Region(0, 2, 2)]),
    ],
)
def test_repetitions_are_found(short: str, long: str, regions: list[Region]) -> None:
    assert next(alignments(short, long)) == regions


def test_loops_that_do_the_same_are_told_apart() -> None:
    assert list(alignments("aaaa", "aaaaaa")) == [
        [Region(0, 1, 4, 2)], [Region(0, 2, 2)], [Region(0, 1, 2), Region(2, 1, 2)],
    ]  # fmt: skip
    assert [Region(1, 2, 2), Region(5, 2, 2)] in alignments("xababababy", "xababababababy")


@pytest.mark.parametrize(("short", "long"), [("abc", "abcd"), ("abbc", "abbd"), ("abc", "abbc"), ("ab", "ba")])
def test_other_differences_are_none(short: str, long: str) -> None:
    assert list(alignments(short, long)) == []


def test_an_affine_function_is_found_from_two_lengths() -> None:
    samples = {(t, n): 2 * t - 3 * n + 7 for n in (5, 6) for t in range(n)}
    assert fitted(samples) == Affine(2, -3, 7)
    assert fitted({**samples, (2, 5): 0}) is None


SQUARES = {(t, n): t * t for n in (5, 6) for t in (0, 1, 2)}


@pytest.mark.parametrize("samples", [{(0, 5): 1, (0, 6): 3, (0, 8): 4}, SQUARES])
def test_no_other_function_is_one(samples: dict[tuple[int, int], int]) -> None:
    assert fitted(samples) is None
