"""What the text of a node computes is what the reference executor computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusegrad.ir import Graph
from fusegrad.ir.prims import Arg
from fusegrad.ir.types import TensorType
from fusegrad.runtime.execution.aten import reference
from fusegrad.runtime.export.python.calls import call_text
from fusegrad.runtime.export.text.expressions import Expressions

INDEX = ("i64", (2,))
ROWS, COLUMNS = TensorType((3, 5), "f32"), TensorType((2, 3, 4), "f32")
CASES: list[tuple[str, dict[str, Any], list[tuple[str, tuple[int, ...]]]]] = [
    ("scatter", {"axes": (0,), "mode": "add"}, [("f32", (5, 3)), ("f32", (2, 3)), INDEX]),
    ("scatter", {"axes": (1,), "mode": "add"}, [("f32", (3, 5)), ("f32", (2, 3)), INDEX]),
    ("scatter", {"axes": (2,), "mode": "set"}, [("f32", (3, 4, 5)), ("f32", (2, 3, 4)), INDEX]),
    ("gather", {"axes": (1,)}, [("f32", (3, 5)), INDEX]),
    ("pad", {"lo": (1, 0), "hi": (2, 3), "inner": (0, 0)}, [("f32", (3, 5))]),
    ("argmax", {"axis": 1}, [("f32", (3, 5))]),
    ("argmin", {"axis": 0}, [("f32", (3, 5))]),
    *(
        (
            "aten",
            {"op": "aten.cumsum.default", "spec": ((("axes", (Arg(0), axes)), 0), ()), "avals": (like,)},
            [("f32", like.shape)],
        )
        for like, axes in ((ROWS, (0, 1)), (ROWS, (1, 0)), (COLUMNS, (2, 0, 1)))
    ),
]


@pytest.mark.parametrize(("prim", "params", "types"), CASES)
def test_text_is_the_node(prim: str, params: dict[str, Any], types: list[tuple[str, tuple[int, ...]]]) -> None:
    torch.manual_seed(0)
    graph = Graph("one")
    inputs = [graph.input(TensorType(shape, dtype), f"x{i}") for i, (dtype, shape) in enumerate(types)]
    node = graph.emit(prim, inputs, params)
    graph.returning([node])
    values = [torch.randn(s) if d == "f32" else torch.tensor([4, 1]) for d, s in types]
    text = call_text(node, [f"x{i}" for i in range(len(types))], Expressions({}), "x0.device")
    assert text is not None
    found = eval(text, {"torch": torch, **{f"x{i}": v for i, v in enumerate(values)}})
    wanted = reference.run(graph, values, {})[0]
    assert wanted is not None
    assert torch.equal(found, wanted) and found.stride() == wanted.stride()
