"""Functions whose products need not be in memory, in streamed kernels on the interpreter, beside eager."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fusegrad
from fusegrad.codegen.emit.statements import call, name
from fusegrad.codegen.emit.streams.bounds import StreamBounds
from fusegrad.codegen.emit.streams.passes import StreamPass
from fusegrad.codegen.schedule.streams import masks

sys.path.insert(0, str(Path(__file__).parent))
import stream_functions
from beside_eager import differences, expanded, transposed_heads
from stream_functions import CASES, Case, named

SIZES = ((37, 16), (65, 24), (130, 64))
DTYPES = (torch.float32, torch.bfloat16)
LAUNCHES = {
    # forward and backward; what backward makes of rows alone is made where dq is
    "SavedProbabilities": (1, 2), "SavedLogSumExp": (1, 2), "Textbook": (1, 2), "CausalGQA": (1, 3), "Alibi": (1, 2),
    "SoftcapWindow": (1, 2), "LearnedBias": (1, 3), "AddedMask": (1, 2), "CrossAttention": (1, 2),
    "SinkDocuments": (1, 3), "LogSoftmaxDropout": (1, 2), "SigmoidAttention": (1, 2), "DecayingAttention": (1, 3),
    "LinearCrossEntropy": (2, 2), "InfoNCE": (4, 2), "SigLIP": (2, 2), "Distances": (2, 3),
}  # fmt: skip
"""The most launches of each class."""
each = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def compiled(cls: Any) -> Any:
    """The class on the interpreter; an error where something would be run by torch."""
    return fusegrad.compile(cls, backend="interpret", fullgraph=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "d"), SIZES)
@each
def test_beside_eager(case: Case, n: int, d: int, dtype: torch.dtype) -> None:
    assert not differences(compiled(case.cls).apply, case.cls.apply, case.arguments(n, d, dtype))


@each
def test_float64_is_left_to_the_library(case: Case) -> None:
    assert not differences(compiled(case.cls).apply, case.cls.apply, case.arguments(37, 16, torch.float64))


@pytest.mark.parametrize("of_gradients", [None, transposed_heads, expanded], ids=["contiguous", "heads", "expanded"])
@each
def test_layouts(case: Case, of_gradients: Any) -> None:
    """Heads as [b, n, h, d].transpose(1, 2) gives them."""
    arguments = [transposed_heads(a) for a in case.arguments(37, 16)]
    assert not differences(compiled(case.cls).apply, case.cls.apply, arguments, of_gradients)


@each
def test_few_launches_and_nothing_by_torch(case: Case) -> None:
    explanation = fusegrad.explain(fusegrad.compile(case.cls), *case.arguments(37, 16))
    for direction, most in zip(("forward", "backward"), LAUNCHES[case.name], strict=True):
        report = explanation.directions[direction]
        assert {launch.kind for launch in report.launches} == {"triton"} and not report.reasons
        assert len(report.launches) <= most
        assert any(": never in memory" in line for line in report.products)


@pytest.mark.parametrize("name", ["Textbook", "Alibi", "SinkDocuments"])
def test_sizes_that_change(name: str) -> None:
    """One class, called with five lengths: the kernels of the first serve most."""
    case, calls = named(name), (37, 45, 64, 81, 33)
    fast = compiled(case.cls)
    for n in calls:
        assert not differences(fast.apply, case.cls.apply, case.arguments(n, 16)), n


# -------------------------------------------------------------------------------------------------- faults are noticed
def _unscaled(_: Any) -> Any:
    """What was summed before stays as it was when the maximum moves."""

    def ratio(self: StreamPass, accumulator: Any, scope: Any) -> Any:
        ones = call("tl.exp2", call("tl.zeros_like", name(self.labels[next(iter(accumulator.running))])))
        return self.context.let(scope, "ratio", ones)

    return ratio


def _a_block_more(bounds: Any) -> Any:
    """A block in which some places are masked is taken to be whole."""

    def moved(condition: Any, roles: Any) -> Any:
        return [replace(b, offset=b.offset + 31) for b in bounds(condition, roles)]

    return moved


def _a_block_less(parts: Any) -> Any:
    def fewer(self: StreamBounds, host: Any) -> Any:
        return parts(self, host)[:1]

    return fewer


FAULTS = {
    "unscaled": (StreamPass, "_ratio", _unscaled),
    "a block more without a mask": (masks, "bounds_of", _a_block_more),
    "the last blocks left out": (StreamBounds, "parts", _a_block_less),
}


@pytest.fixture
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    owner, attribute, fault = FAULTS[request.param]
    monkeypatch.setattr(owner, attribute, fault(getattr(owner, attribute)))
    yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("planted", FAULTS, indirect=True)
def test_a_planted_fault_is_noticed(planted: None, dtype: torch.dtype) -> None:
    case = named("Alibi")
    assert differences(compiled(case.cls).apply, case.cls.apply, case.arguments(37, 16, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_off_by_one_is_noticed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tolerances are tight enough."""
    case, right = named("Alibi"), stream_functions.positions

    def shifted(*arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(stream_functions, "positions", lambda s: (right(s)[0] + 1, right(s)[1]))
            return case.cls.apply(*arguments)

    assert differences(compiled(case.cls).apply, shifted, case.arguments(65, 16, dtype))
