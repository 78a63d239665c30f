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


def report(number: int) -> tuple[Graph, DirectionReport]:
    graph = optimize(parse(show(loops[number].graph()).replace("f64", "f32")))
    return graph, kernels_report(graph, "forward", SIZES, named_target("cuda:90", "eager"))


def test_the_launches_of_all_steps_are_counted() -> None:
    _, gated = report(0)
    assert [k.name for k in gated.launches] == ["step"] * 6 + ["stack"]
    row, whole = 3 * 8 * 4, 6 * 3 * 8 * 4
    assert gated.moved == 6 * 4 * row + 2 * whole  # a step reads h, a and x, and writes h
    assert gated.minimal == row + 3 * whole + row
    assert any("step by step" in reason for reason in gated.reasons)


def test_a_product_in_each_step_is_a_call_in_each_step() -> None:
    _, rnn = report(3)
    kinds = [k.kind for k in rnn.launches]
    assert kinds.count("library") == 6 + 1 and kinds.count("triton") == 6


def test_the_operations_of_all_steps_are_counted() -> None:
    _, gated = report(0)
    works = roofline._works(gated, SIZES)
    assert len(works) == len(gated.launches)
    assert works[:6] == [2 * 3 * 8] * 6 and works[6:] == [0]


@pytest.mark.parametrize("number", range(len(loops)))
def test_pictures_and_facts_show_the_body(number: int) -> None:
    graph, _ = report(number)
    assert "return %" in svg(graph) and "scan" in svg(graph)
    scan = next(v for v in graph.order() if v.prim == "scan")
    names = {v.id: f"v{v.id}" for v in graph}
    facts: Any = _node(scan, names, [], set())
    assert facts["parameters"]["body"][0].startswith("graph ") and facts["operation"] == "scan"
    assert SimpleNamespace(**facts).parameters["length"] == "T"
