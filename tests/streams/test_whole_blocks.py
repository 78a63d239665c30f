"""Rows that walk several blocks of the stream: those at a mask's edge, and those between where no mask is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad
from fusegrad.examples.gallery.attention import Attention

sys.path.insert(0, str(Path(__file__).parent))
from beside_eager import differences, transposed_heads
from stream_functions import named

Tensor = torch.Tensor
INF = float("-inf")

LENGTH, WIDTH = 330, 16  # blocks of 128 under the interpreter: the last rows walk two without a mask, then one with it


def found(function: Any, arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result and the gradients, for the same random output gradient."""
    own = [a.detach().requires_grad_() for a in arguments]
    result = function.apply(*own, 0.7, True)
    draw = torch.Generator().manual_seed(1)
    result.backward(torch.randn(result.shape, generator=draw).to(result.dtype))
    return [result.detach(), *(a.grad for a in own if a.grad is not None)]


@pytest.mark.filterwarnings("error::fusegrad.FallbackWarning")
@pytest.mark.parametrize("largest", ["first", "last", "anywhere"])
def test_blocks_without_a_mask_follow_the_same_extreme(largest: str) -> None:
    """The maximum of a row is in its first block, in its last, or in any."""
    draw = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, 2, LENGTH, WIDTH, generator=draw) for _ in range(3))
    place = torch.arange(LENGTH)[:, None] / LENGTH
    grown = {"first": k.abs() * (2 - place), "last": k.abs() * (1 + place), "anywhere": k}[largest]
    arguments = [q if largest == "anywhere" else q.abs(), grown, v]
    exact = found(Attention.__base__, [a.double() for a in arguments])
    # without patience: other tests of the process may have filled the budget of the gallery's class
    with fusegrad.config.patch(backend="interpret", disable="patience"):
        got = found(Attention, arguments)
    for ours, theirs in zip(got, exact, strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_blocks_that_are_masked_out_are_not_walked(dtype: str) -> None:
    """Of whatever the exponentials are made: those of low floats are powers of two."""
    for causal in (True, False):
        explained = fusegrad.explain(Attention, *[f"{dtype}[4,32,4096,16]"] * 3, 0.25, causal, target="cuda:90")
        walks = [k.source for k in explained.kernels if "for col_at in" in k.source]
        assert len(walks) == 3
        assert ["tl.range(0, N, BLOCK_N" in text for text in walks] == [not causal] * 3


def below(s: Tensor, longest: int | None = None) -> Tensor:
    """Ones where a position is seen, by the widest matrix that a caller would have."""
    n = s.shape[-1]
    return torch.ones(longest or n, longest or n, device=s.device).tril()[:n, :n]


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "tril(ones) == 0": lambda s: s.masked_fill(below(s) == 0, INF),
    "1 - tril(ones)": lambda s: s.masked_fill((1 - below(s)).bool(), INF),
    "tril(ones).logical_not()": lambda s: s.masked_fill_(below(s).view(1, 1, *s.shape[-2:]).logical_not(), INF),
    "part of a larger one": lambda s: s.masked_fill(below(s, 8192) == 0, INF),
    "zeros, filled": lambda s: s + torch.zeros_like(below(s)).masked_fill(below(s) == 0, INF),
    "triu(full)": lambda s: s + torch.full(s.shape[-2:], INF, device=s.device).triu(1),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_causal_mask_is_known_however_it_is_spelled(spelling: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SPELLINGS[spelling](q @ k.mT * 0.125).softmax(-1).to(v.dtype) @ v

    fast = fusegrad.compile(attention)
    explained = fusegrad.explain(fast, *["bf16[2,4,4096,64]"] * 3, target="cuda:90")
    walks = [k.source for k in explained.kernels if "for col_at in" in k.source]
    assert len(walks) >= 3 and not any(f"tl.range(0, {n}, BLOCK_N" in text for text in walks for n in "MN")
    assert [d.launch_count for d in explained.directions.values()] == [1, 2]
    draw = torch.Generator().manual_seed(3)
    own = [torch.randn(1, 2, 37, 16, generator=draw) for _ in "qkv"]
    with fusegrad.config.patch(backend="interpret"):
        torch.testing.assert_close(fast(*own), attention(*own), rtol=1e-5, atol=1e-6)


def test_the_longest_programs_of_a_causal_mask_come_first() -> None:
    """Where the last rows see most these begin, where the first do these; rows of a window see as much."""
    for name, expected in (("Alibi", [True, True, False]), ("SoftcapWindow", [False, False, False])):
        case = named(name)
        e = fusegrad.explain(fusegrad.compile(case.cls), *case.arguments(1024, 64, torch.bfloat16), target="cuda:90")
        walks = [k.source for k in e.kernels if "for col_at in" in k.source]
        assert ["first_row = tl.cast(tl.cdiv(M, BLOCK_M) - 1 - pid % " in text for text in walks] == expected


class LaterQueries(Function):
    """Causal attention of the last positions to all of them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, m = q.shape[-2], k.shape[-2]
        behind = torch.arange(m, device=q.device) - torch.arange(n, device=q.device)[:, None] > m - n
        p = (q @ k.mT * 0.3).masked_fill(behind, INF).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (g,) = gradients
        q, k, v, p = ctx.saved_tensors
        dp = g @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * 0.3
        return ds @ k, ds.mT @ q, p.mT @ g


def test_whole_blocks_of_unlike_lengths_are_proved_in_any_layout() -> None:
    """A causal mask ends at no multiple of a block, the keys do; heads are next to each other in memory."""
    draw = torch.Generator().manual_seed(7)
    arguments = [transposed_heads(torch.randn(2, 3, n, 16, generator=draw).requires_grad_()) for n in (32, 64, 64)]
    fast = fusegrad.compile(LaterQueries, backend="interpret", fullgraph=True)
    assert not differences(fast.apply, LaterQueries.apply, arguments)
