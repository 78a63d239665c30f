"""Transforms of Functions that stream, beside torch's own of the same in plain operations."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from beside_eager import error
from stream_functions import Textbook, named

Tensor = torch.Tensor
Call = Callable[..., Tensor]
DIGITS = 1e-4
"""As a share of the largest element; derivatives of derivatives are sums of sums."""


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[-1]), -1), v)


def double(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Any:
    first = torch.autograd.grad(call(q, k, v).square().sum(), (q, k), create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v))


def jvp(call: Call, *arguments: Tensor) -> Any:
    detached = tuple(a.detach() for a in arguments)
    return torch.func.jvp(call, detached, tuple(0.3 + a / 2 for a in detached))


def vmap(in_dims: tuple[int | None, ...]) -> Callable[..., Any]:
    """vjp of vmap, over some of the arguments."""

    def run(call: Call, *arguments: Tensor) -> Any:
        batched = [
            a.detach() if d is None else torch.stack([a, 2 * a, a - 1], d).detach()
            for a, d in zip(arguments, in_dims, strict=True)
        ]
        result, pull = torch.func.vjp(torch.func.vmap(call, in_dims), *batched)
        return result, pull(result)

    return run


def checkpointed(call: Call, *arguments: Tensor) -> Any:
    return torch.autograd.grad(checkpoint(call, *arguments, use_reentrant=False).square().sum(), arguments)


def compiled(call: Call, *arguments: Tensor) -> Any:
    whole = torch.compile(lambda q, k, v: call(q * 1.5, k, v) * 2, backend="aot_eager")
    return torch.autograd.grad(whole(*arguments).square().sum(), arguments)


COMPOSITIONS = {
    "double backward": double, "jvp": jvp, "vmap": vmap((0, 0, 0)), "vmap of queries": vmap((0, None, None)),
    "vmap of keys and values": vmap((None, 1, 0)), "checkpoint": checkpointed, "torch.compile": compiled,
}  # fmt: skip


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_composition(composition: str) -> None:
    arguments = named("Textbook").arguments(33, 8)
    fast = fusegrad.compile(Textbook, backend="interpret")
    run = COMPOSITIONS[composition]
    found = tree_leaves(run(fast.apply, *arguments))
    exact = tree_leaves(run(plain, *(a.detach().double().requires_grad_() for a in arguments)))
    assert len(found) == len(exact)
    assert all(error(f, e.detach()) < DIGITS for f, e in zip(found, exact, strict=True))
