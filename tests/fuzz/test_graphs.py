"""Random programs within graphs that others make: a few in each run of the tests, more with `make fuzz-graphs`."""

from __future__ import annotations

import itertools
from typing import Any

import graphs
import pytest
from graphs import WAYS, several
from graphs import tested as tried

SEEDS = (3, 16, 214, 654, 672, 774)
"""A written argument under vjp, and what was wrong: rules derived within a graph, parts of results, random numbers."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_in_a_graph(seed: int) -> None:
    found = tried(seed)
    assert not found.faults, f"`make fuzz-graphs SEED={seed} N=1`\n{found.faults[0]['text']}"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_way_compares(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself: of a program whose results are doubled no way keeps quiet."""
    assert tried(3, way).result == "ok"
    original, turns = graphs.call_of, itertools.cycle((True, False))

    def doubled(p: Any, apply: Any) -> Any:
        call = original(p, apply)
        return (lambda *xs: tuple(o * 2 for o in several(call(*xs)))) if next(turns) else call

    monkeypatch.setattr(graphs, "call_of", doubled)
    assert tried(3, way).faults
