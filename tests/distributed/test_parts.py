"""Every way of dividing a Function's arguments that its graphs admit gives what one process gives."""

from __future__ import annotations

from typing import Any

import parts_by_hand as by_hand
import pytest
import torch
from suite.functions import CASES, Case

import fusegrad
from fusegrad.runtime.distributed.sharding_rules import rule_of
from fusegrad.tracer.trace import CaptureError

TOLERANCE = 1e-4
AS_WRITTEN = {"SegmentMean", "NestedHelper"}
"""How long a result is depends on data; another Function is called."""
each = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def arguments(case: Case, n: int = 6) -> list[Any]:
    torch.manual_seed(1)
    made = case.make(n)
    return [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in made]


@each
def test_parts_make_the_whole(case: Case) -> None:
    args, fast = arguments(case), fusegrad.compile(case.cls)
    rule = rule_of(fast._fusegrad, args)
    if case.name in AS_WRITTEN:
        assert isinstance(rule, CaptureError)
        return
    theirs, given = by_hand.whole(case.cls.apply, args)
    for way, count in by_hand.ways(rule, (2, 4)):
        mine = by_hand.divided(fast, rule, way, args, given, count)
        assert not (found := by_hand.faults(mine, theirs, TOLERANCE)), f"{way} on {count}: {found}"
    assert all(isinstance(why, str) and why for why in rule.refused.values())


EXPECTED = {
    "RmsNorm": ["(0, 'whole') -> (0,)"],
    "Softmax": ["(0,) -> (0,)"],
    "SwiGlu": ["(0, 0) -> (0,)", "(1, 1) -> (1,)"],
    "LinearRelu": ["(0, 'whole', 'whole') -> (0,)", "('whole', 0, 0) -> (1,)"],
    "MatVec": ["(0, 'whole') -> (0,)", "(1, 0) -> ('partial',)"],
    "EmbeddingScatterAdd": ["(0, 'whole') -> (0,)", "('whole', 1) -> (1,)"],
    "ChannelBias": [
        "(0, 'whole') -> (0,)", "(1, 0) -> (1,)", "(2, 'whole') -> (2,)", "(3, 'whole') -> (3,)",
    ],
    "SortRows": [],
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_what_may_be_divided(name: str) -> None:
    """By name of the class here alone: as much as a reader of it expects, and no more."""
    case = next(c for c in CASES if c.name == name)
    rule: Any = rule_of(fusegrad.compile(case.cls)._fusegrad, arguments(case))
    assert [f"{w.inputs} -> {w.outputs}" for w in rule.ways.values()] == EXPECTED[name]
