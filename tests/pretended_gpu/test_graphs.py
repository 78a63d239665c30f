"""CUDA graphs on the pretended GPU: recorded once, replayed with other numbers, in the memory of then."""

from __future__ import annotations

from typing import Any

import pytest


def test_a_graph_outlives_its_class(play: Any) -> None:
    assert play("replayed_without_its_class")


def test_graphs_of_a_loop(play: Any) -> None:
    assert play("loop_replayed")


@pytest.mark.parametrize("how", ["cudagraphs", "reduce-overhead"])
def test_graph_trees(how: str, play: Any) -> None:
    assert play("graph_trees", how=how)
