"""What attention is timed beside computes the same, at small sizes, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from fusegrad.benchmarks import attention_peers
from fusegrad.benchmarks.correctness import results
from fusegrad.benchmarks.inputs import real, reduced
from fusegrad.benchmarks.stream_functions import STREAMS

CASES = {case.name: reduced(case) for _, case, _ in STREAMS.values() if case.shape.startswith("2,16,4096,64")}
PAIRS = [(peer, name) for peer, known in attention_peers.ATTENTION.items()
         for name, case in CASES.items() if case.function in known]  # fmt: skip


def test_each_kind_of_attention_has_a_peer() -> None:
    assert {name.partition("[")[0] for _, name in PAIRS} == {"Attention", "ALiBi", "SoftcapWindow", "LearnedBias"}


@pytest.mark.parametrize(("peer", "name"), PAIRS)
def test_a_peer_computes_the_same(peer: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_peers, "_compiled_flex", lambda: flex_attention)
    case: Any = CASES[name]
    theirs, ours = attention_peers.ATTENTION[peer][case.function], case.function.apply
    args = [a.detach().double() if isinstance(a, torch.Tensor) else a for a in real(case, 3)]
    torch.testing.assert_close(theirs(*args), ours(*args))
    if peer == "sdpa":  # the other has no backward on a CPU
        for a, b in zip(results(theirs, args, 5, wide=True), results(ours, args, 5, wide=True), strict=True):
            torch.testing.assert_close(a, b)
