"""Random programs computed in parts: a few in each run of the tests, more with `make fuzz-parts`."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import divisions
import parts_by_hand as by_hand
import pytest


@pytest.mark.parametrize("seed", range(30000, 30024))
def test_a_program_in_parts(seed: int) -> None:
    found = divisions.tested(seed)
    assert not found.faults, f"`make fuzz-parts SEED={seed} N=1`\n{found.faults[0]['text']}"


def _as_if_whole(way: Any) -> Any:
    """Sums over the ranks taken for what every rank has."""
    return replace(way, outputs=tuple("whole" if s == "partial" else s for s in way.outputs))


def _unscaled(way: Any) -> Any:
    """Means over a part taken for its part of the mean."""
    return replace(way, scales=(Fraction(0),) * len(way.scales), gradients=(Fraction(0),) * len(way.gradients))


@pytest.mark.parametrize("wrong", [_as_if_whole, _unscaled], ids=lambda f: f.__name__)
def test_a_wrong_rule_is_noticed(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself: among a few programs some tells of a rule that is wrong."""
    ways = by_hand.ways
    monkeypatch.setattr(by_hand, "ways", lambda rule, counts: ((wrong(w), n) for w, n in ways(rule, counts)))
    assert any(divisions.tested(seed).faults for seed in range(150))
