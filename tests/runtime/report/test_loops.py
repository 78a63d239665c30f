"""What is said of a loop that runs step by step: its launches, their bytes and operations, and its body in pictures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from loop_samples import N, T, loops

from fusegrad.ir import Graph, parse, show
from fusegrad.runtime.execution.graph_to_kernels import optimize
from fusegrad.runtime.execution.targets import named_target
from fusegrad.runtime.report import roofline
from fusegrad.runtime.report.directions import DirectionReport, kernels_report
from fusegrad.runtime.report.page.graph_facts import _node
from fusegrad.runtime.report.page.graph_svg import svg

SIZES = {T: 6, N: 8}


def report(number: int, dtype: str = "f32") -> tuple[Graph, DirectionReport]:
    """In float64 a step that multiplies with a matrix has no kernel of its own."""
    graph = optimize(parse(show(loops[number].graph()).replace("f64", dtype)))
    return graph, kernels_report(graph, "forward", SIZES, named_target("cuda:90", "eager"))


def test_a_loop_is_one_launch() -> None:
    _, gated = report(0)
    assert [(k.name, k.times) for k in gated.launches] == [("gated", 1)]
    assert gated.moved == gated.minimal and not gated.reasons


def test_the_launches_of_all_steps_are_counted() -> None:
    _, rnn = report(3, "f64")
    assert [(k.name, k.kind, k.times) for k in rnn.launches] == [
        ("dot", "library", 6), ("step", "triton", 6), ("stack", "library", 1),
    ]  # fmt: skip
    assert rnn.moved == 4224 + 1152 + 2304 + 1488 + 2 * 144
    assert any("step by step" in reason for reason in rnn.reasons)


def test_the_operations_of_all_steps_are_counted() -> None:
    _, rnn = report(3, "f64")
    works = [work.operations for work in roofline._works(rnn, SIZES)]
    assert works == [6 * 2 * 3 * 8 * 8, 6 * 4 * 3 * 8, 0] and len(works) == len(rnn.launches)


@pytest.mark.parametrize("number", range(len(loops)))
def test_pictures_and_facts_show_the_body(number: int) -> None:
    graph, _ = report(number)
    assert "return %" in svg(graph) and "scan" in svg(graph)
    scan = next(v for v in graph.order() if v.prim == "scan")
    names = {v.id: f"v{v.id}" for v in graph}
    facts: Any = _node(scan, names, [], set())
    assert facts["parameters"]["body"][0].startswith("graph ") and facts["operation"] == "scan"
    assert SimpleNamespace(**facts).parameters["length"] == "T"
