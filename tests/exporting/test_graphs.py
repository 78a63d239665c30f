"""The exported graphs: every format holds the same nodes, in the readers that it is meant for."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as xml
from typing import Any

import networkx as nx
import pytest

import fusegrad
from fusegrad.__main__ import main
from fusegrad.benchmarks import functions as f
from fusegrad.runtime.report.page.listing import lanes

CASE: tuple[Any, ...] = (f.LayerNorm, "bf16[64,128]", "bf16[128]", "bf16[128]", 1e-5)


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return json.loads(fusegrad.export(*CASE, format="json"))  # type: ignore[no-any-return]


def names(known: dict[str, Any]) -> set[str]:
    return {f"{d}/{n['name']}" for d, part in known["directions"].items() for n in part["nodes"]}


def test_json_is_a_graph_in_an_order_that_runs(known: dict[str, Any]) -> None:
    assert known["schema"] == 1 and set(known["directions"]) == {"forward", "backward"}
    for part in known["directions"].values():
        seen: set[str] = set()
        for node in part["nodes"]:
            assert set(node["operands"]) <= seen and node["name"] not in seen
            seen.add(node["name"])
            assert node["operation"] == "input" or node["steps"], "each computed node belongs to a step"
        assert {o for o in part["outputs"] if o} <= seen
    residuals = [n for n in known["directions"]["backward"]["nodes"] if n["residual"]]
    assert len(residuals) == len(known["residuals"])
    assert any("benchmarks/functions.py" in (n["where"] or "") for n in known["directions"]["forward"]["nodes"])


def test_graphml_is_read_back_by_networkx(known: dict[str, Any]) -> None:
    graph = nx.read_graphml(io.BytesIO(fusegrad.export(*CASE, format="graphml").encode()), force_multigraph=True)
    assert set(graph.nodes) == names(known)
    assert nx.is_directed_acyclic_graph(graph)
    carried = [e for e in graph.edges(data=True) if e[2]["kind"] == "residual"]
    assert len(carried) == len(known["residuals"])
    assert all(a.startswith("forward/") and b.startswith("backward/") for a, b, _ in carried)


def test_dot_names_every_node_once(known: dict[str, Any]) -> None:
    text = fusegrad.export(*CASE, format="dot")
    assert text.count("{") == text.count("}")
    assert all(text.count(f'"{name}" [label=') == 1 for name in names(known))


def test_pictures_are_whole_and_ask_for_nothing(known: dict[str, Any]) -> None:
    page = fusegrad.export(*CASE, format="html")
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "") and "<script" not in page
    pictures = [f"<svg{part.split('</svg>')[0]}</svg>" for part in page.split("<svg")[1:]]
    assert len(pictures) == 3  # the roofline, the boxes, the listing
    shown = ["".join(xml.fromstring(p).itertext()) for p in pictures]
    assert all(node["name"] in shown[-1] for part in known["directions"].values() for node in part["nodes"])
    xml.fromstring(fusegrad.export(*CASE, format="svg"))


def test_lanes_of_values_that_live_at_once_are_apart() -> None:
    nodes = [{"name": str(i), "operands": [str(j) for j in range(max(0, i - 3), i)]} for i in range(40)]
    found = lanes(nodes)
    spans = {n: (lane.row, lane.read[-1], lane.column) for n, lane in found.items()}
    for a, (first, last, column) in spans.items():
        for b, (start, end, other) in spans.items():
            assert a == b or column != other or last <= start or end <= first


def test_the_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    where = "fusegrad.benchmarks.functions:SwiGLU"
    assert main(["export", where, "bf16[8,16]", "bf16[8,16]", "-o", str(tmp_path / "graph.dot")]) == 0
    assert (tmp_path / "graph.dot").read_text().startswith('digraph "SwiGLU"')
    assert main(["export", where, "bf16[8,16]", "bf16[8,16]"]) == 0
    assert "@triton.jit" in capsys.readouterr().out
    assert main(["export", where, "bf16[8,16]", "bf16[8,16]", "-o", str(tmp_path / "graph.png")]) == 1
    assert "there is no format 'png'" in capsys.readouterr().err
