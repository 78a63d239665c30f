"""Lowering: what a program computes is what its graph computes; what stays an `aten` node is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusegrad.ir import Graph, verify
from fusegrad.ir.errors import LoweringError
from fusegrad.runtime.reference import number, run
from fusegrad.tracer.aten import lower

from .capturing import capture, symbols
from .programs import TABLE, Program

LOW = {torch.bfloat16: (1e-2, 1e-2), torch.float16: (2e-3, 2e-3)}


def flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def extern(graph: Graph) -> list[str]:
    return [v.params["op"] for v in graph.order() if v.prim in ("aten", "aten_effect")]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    rtol, atol = LOW.get(want.dtype, (2e-5, 2e-5) if want.dtype == torch.float32 else (1e-9, 1e-9))
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("program", TABLE, ids=lambda p: p.name)
def test_lowered_program_computes_what_torch_does(program: Program) -> None:
    ours, theirs = program.inputs(), program.inputs()
    graph = verify(lower(*capture(program.function, program.inputs())))
    sizes = symbols(graph, ours)
    got, want = run(graph, ours, sizes), flat(program.function(*theirs))
    assert len(got) == len(want)
    for mine, reference, strides in zip(got, want, graph.output_strides, strict=True):
        assert mine is not None and strides is not None
        close(mine, reference)
        if reference.numel():
            significant = [(number(s, sizes), n) for s, n in zip(strides, reference.shape, strict=True)]
            assert [s for s, n in significant if n > 1] == [s for s, n in zip(reference.stride(), reference.shape, strict=True) if n > 1]
    for mine, reference in zip(ours, theirs, strict=True):
        close(mine, reference)
    assert len(extern(graph)) == program.aten, extern(graph)
