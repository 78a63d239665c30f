"""Random programs within graphs that others make: a few in each run of the tests, more with `make fuzz-graphs`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from graphs import WAYS
from graphs import tested as tried
from torch.utils._pytree import tree_map

FOUND = {
    16: "torch.func.vjp within torch.compile",  # a written argument
    214: "torch.func.vmap within torch.compile",  # a rule that is derived once a graph runs
    654: "torch.compile(dynamic=True)",  # a part of a result beside the whole
    672: "torch.export",  # random numbers
    774: "torch.compile",  # a part of a result beside the whole
    2776: "torch.compile",  # an argument that is returned and marked
    3101: "torch.export(strict=True)",  # the same
    10033: "autocast within torch.compile",  # the comparison of the first run
    21275: "torch.compile(dynamic=True)",  # an argument that is written to and returned twice
    20192: "autocast within torch.compile",  # backward, which is captured with forward
}
"""Programs, and the way on which something was wrong once."""


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_wrong(seed: int) -> None:
    way = next(way for way in WAYS if way.name == FOUND[seed])
    found = tried(seed, way)
    assert not found.faults, found.faults[0]["text"]


@pytest.mark.parametrize("seed", range(30000, 30004))
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
