"""Random programs within graphs that others make: a few in each run of the tests, more with `make fuzz-graphs`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from graphs import WAYS
from graphs import tested as tried
from torch.utils._pytree import tree_map

SEEDS = (3, 16, 214, 654, 672, 774)
"""A written argument under vjp, and what was wrong: rules derived within a graph, parts of results, random numbers."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_in_a_graph(seed: int) -> None:
    found = tried(seed)
    assert not found.faults, f"`make fuzz-graphs SEED={seed} N=1`\n{found.faults[0]['text']}"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_way_compares(way: Any) -> None:
    """The harness itself: of a graph whose results are doubled no way keeps quiet."""
    assert tried(3, way).result == "ok"

    def doubled(*args: Any, **options: Any) -> Any:
        made = way.make(*args, **options)
        return lambda *xs: tree_map(lambda t: t * 2, made(*xs))

    assert tried(3, replace(way, make=doubled)).faults
