"""Plain functions that stream: their derived backward is given rows instead of matrices, as a written one is."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from beside_eager import differences, error
from test_stream_compositions import COMPOSITIONS, DIGITS

Tensor = torch.Tensor
Call = Callable[..., Any]
FIRST = (37, 16)
"""Rows, and how deep each is."""


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT) * 0.25
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(later, -torch.inf), -1, dtype=torch.float32).to(q.dtype) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = 5 * torch.tanh(q @ k.mT / 5)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores.float(), -1)


def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(q @ k.mT - 2.0) @ v


def contrastive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT / 0.1
    return torch.logsumexp(logits, -1).mean() - logits.diagonal(dim1=-2, dim2=-1).mean() + (v * 0).sum()


def neighbours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is on the diagonal does not count: it is read and written as such."""
    near = torch.exp(q @ k.mT)
    near = near - torch.diag_embed(near.diagonal(dim1=-2, dim2=-1))
    return (near @ v) / near.sum(-1, keepdim=True)


def queue(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One column of positives before all negatives, whose gradient goes elsewhere."""
    logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ v.mT], -1) / 0.5
    return -torch.log_softmax(logits.float(), -1)[..., 0]


def flat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Over all pairs that count, as one row of them; half of the gradient goes past it."""
    s = q @ k.mT
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    chosen = (s * F.relu(s.detach() + 0.25)).masked_fill(later, -torch.inf)[0, 0]
    return F.softplus(torch.logsumexp(chosen.flatten(), 0) / 9) + (v * 0).sum()


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two parts of the keys, each with its own maximum, put together as where they come one after the other."""
    parts = [k.tensor_split((k.shape[-2] // 3,), -2), v.tensor_split((k.shape[-2] // 3,), -2)]
    scores = [q @ some.mT * 0.25 for some in parts[0]]
    sums = [s.logsumexp(-1, keepdim=True) for s in scores]
    both = torch.logaddexp(*sums)
    outs = (s.softmax(-1) @ some * torch.exp(own - both) for s, some, own in zip(scores, parts[1], sums, strict=True))
    return sum(outs, torch.zeros_like(q))


def skewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Distances: the scores of a second product are moved along their rows, where no tile has them."""
    b = F.pad(q @ v.mT, (1, 0))
    moved = b.reshape(*b.shape[:-2], b.shape[-1], b.shape[-2])[..., 1:, :].reshape(*b.shape[:-1], b.shape[-2])
    return torch.softmax((q @ k.mT + moved) * 0.25, -1) @ v


EVERY = (attention, causal, capped, sigmoid, contrastive, neighbours, queue, flat, merged, skewed)
PLAIN = {f.__name__: f for f in EVERY}
LAUNCHES = {
    "attention": (1, 2), "causal": (1, 2), "capped": (1, 2),
    "sigmoid": (1, 2), "neighbours": (2, 4), "queue": (2, 4), "merged": (3, 7),
}
"""The most launches, forward and backward."""
each = pytest.mark.parametrize("name", PLAIN)


def heads(n: int, d: int, dtype: torch.dtype = torch.float32, asked: Sequence[bool] = (True,) * 3) -> list[Tensor]:
    random = torch.Generator().manual_seed(n + d)
    return [torch.randn(2, 3, n, d, generator=random).to(dtype).requires_grad_(a) for a in asked]


def compiled(name: str) -> Call:
    return fusegrad.compile(PLAIN[name], backend="interpret", fullgraph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each
def test_beside_eager(name: str, dtype: torch.dtype) -> None:
    assert not differences(compiled(name), PLAIN[name], heads(*FIRST, dtype))


@pytest.mark.parametrize("asked", [(True, False, False), (False, True, True)], ids=str)
@each
def test_gradients_of_some_arguments(name: str, asked: Sequence[bool]) -> None:
    """The residuals are chosen for those that the first call asks for, and serve the others as well."""
    fast = compiled(name)
    for now in (asked, (True, True, True)):
        assert not differences(fast, PLAIN[name], heads(*FIRST, asked=now))


@each
def test_a_gradient_that_is_one_number(name: str) -> None:
    """That of a sum: a product with it has an operand without columns."""
    arguments = heads(*FIRST)
    assert not differences(compiled(name), PLAIN[name], arguments, layout=lambda g: g.mean().expand(g.shape))


@pytest.mark.parametrize("name", LAUNCHES)
def test_no_matrix_is_in_memory(name: str) -> None:
    found = fusegrad.explain(fusegrad.compile(PLAIN[name]), *["bf16[2,8,1024,64]"] * 3)
    matrix = 2 * 8 * 1024 * 1024 * 2
    for direction, most in zip(("forward", "backward"), LAUNCHES[name], strict=True):
        report = found.directions[direction]
        assert len(report.launches) <= most and {launch.kind for launch in report.launches} == {"triton"}
    assert found.saved_bytes < matrix


@pytest.mark.parametrize("composition", [c for c in COMPOSITIONS if c != "torch.compile"])
def test_composition(composition: str) -> None:
    arguments = [a.detach()[0].requires_grad_() for a in heads(33, 8)]
    run = COMPOSITIONS[composition]
    found = tree_leaves(run(compiled("attention"), *arguments))
    exact = tree_leaves(run(attention, *(a.detach().double().requires_grad_() for a in arguments)))
    assert len(found) == len(exact)
    assert all(error(f, e.detach()) < DIGITS for f, e in zip(found, exact, strict=True))


def labelled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mean over the rows that count: how many do is a sum over all rows, of places alone."""
    s, own = v[0, 0].exp() * q @ k.mT, torch.arange(q.shape[-2], device=q.device)
    return F.cross_entropy(s, own) + F.cross_entropy(s.mT, own)


def test_sums_over_rows_are_complete_before_their_blocks() -> None:
    """Where the graph is kept, backward makes the count again."""
    arguments = [a.detach()[0, 0].requires_grad_() for a in heads(*FIRST)]
    fast = fusegrad.compile(labelled, backend="interpret", fullgraph=True)
    found = torch.autograd.grad(fast(*arguments), arguments, create_graph=True)
    exact = [a.detach().double().requires_grad_() for a in arguments]
    for f, e in zip(found, torch.autograd.grad(labelled(*exact), exact), strict=True):
        assert error(f, e) < 1e-5


def clip(x: Tensor, y: Tensor, log_scale: Tensor) -> Tensor:
    """Each row's label is its own place: none is ignored, and its gradient is one number of the row."""
    scores, labels = x @ y.T * log_scale.exp(), torch.arange(x.shape[0], device=x.device)
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


def test_labels_that_are_places() -> None:
    found = fusegrad.explain(fusegrad.compile(clip), "bf16[4096,128]", "bf16[4096,128]", "f32[]", target="cuda:90")
    assert [d.launch_count for d in found.directions.values()] == [3, 5] and "!= -100" not in found.module
    assert "skips blocks outside the window" in found.directions["forward"].launches[0].walk
    draw = torch.Generator().manual_seed(3)
    given = [F.normalize(torch.randn(37, 24, generator=draw), dim=-1).requires_grad_() for _ in "xy"]
    fast = fusegrad.compile(clip, backend="interpret", fullgraph=True)
    assert not differences(fast, clip, [*given, torch.tensor(1.5).requires_grad_()])
