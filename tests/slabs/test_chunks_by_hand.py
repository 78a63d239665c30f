"""A user's own loop over chunks of rows: what each chunk multiplies to is in memory alone, and is added up in place."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad

sys.path.insert(0, str(Path(__file__).parents[1] / "streams"))
sys.path.insert(0, str(Path(__file__).parent))
from beside_eager import differences
from losses import labels, one_hot, rand
from watching_slabs import both_ways


class Slices(Function):
    """Gradients in forward, as Liger's classes have them; all are summed in the dtype of the weight."""

    chunk = 24

    @staticmethod
    def forward(ctx, x, w, target):
        dx, dw, loss = torch.empty_like(x), torch.zeros_like(w), torch.zeros((), device=x.device)
        for low in range(0, x.shape[0], Slices.chunk):
            rows, places = x[low : low + Slices.chunk], target[low : low + Slices.chunk]
            z = (rows @ w.mT).to(torch.promote_types(x.dtype, torch.float32))
            lse = torch.logsumexp(z, -1, keepdim=True)
            loss = loss + (lse - z.gather(1, places[:, None])).sum()
            dz = ((torch.exp(z - lse) - one_hot(places, w.shape[0]).to(z.dtype)) / x.shape[0]).to(x.dtype)
            dx[low : low + Slices.chunk] = dz @ w
            dw += dz.mT @ rows
        ctx.save_for_backward(dx, dw)
        return loss / x.shape[0]

    @staticmethod
    def backward(ctx, g):
        dx, dw = ctx.saved_tensors
        return dx * g.to(dx.dtype), dw * g.to(dw.dtype), None


class Chunks(Function):
    """The same by `chunk` and `cat`; the gradient of the weight is summed in more digits."""

    @staticmethod
    def forward(ctx, x, w, target):
        wide = torch.promote_types(x.dtype, torch.float32)
        loss, dxs, dw = 0.0, [], torch.zeros_like(w, dtype=wide)
        for rows, places in zip(x.chunk(3), target.chunk(3), strict=True):
            p = torch.log_softmax((rows @ w.mT).to(wide), -1)
            loss = loss - p.gather(1, places[:, None]).sum()
            dz = ((torch.exp(p) - one_hot(places, w.shape[0]).to(wide)) / x.shape[0]).to(x.dtype)
            dxs.append(dz @ w)
            dw = dw + (dz.mT @ rows).to(wide)
        ctx.save_for_backward(torch.cat(dxs), dw.to(w.dtype))
        return loss / x.shape[0]

    backward = Slices.backward


CLASSES = {"slices": Slices, "chunks": Chunks}


def arguments(rows: int, dtype: torch.dtype) -> tuple[Any, ...]:
    x, w = (t.to(dtype).requires_grad_() for t in (rand(rows, 12), rand(150, 12)))
    return x, w, labels(rows, 150)


@pytest.mark.parametrize(("name", "dtype"), [("slices", torch.float32), ("chunks", torch.bfloat16)], ids=str)
def test_beside_eager(name: str, dtype: torch.dtype) -> None:
    fast: Any = fusegrad.compile(CLASSES[name], backend="interpret", fullgraph=True)
    with fusegrad.config.patch(slab_bytes=1000):
        assert not differences(fast.apply, CLASSES[name].apply, arguments(53, dtype))


@pytest.mark.parametrize(("name", "most"), [("slices", 0.95), ("chunks", 1.0)])
def test_the_peak_is_no_higher_than_eagers(name: str, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch for each product, one for the rows, and one that adds; of eager the least that it can be."""
    monkeypatch.setattr(Slices, "chunk", 1024)
    found = fusegrad.explain(CLASSES[name], "bf16[3072,4096]", "bf16[128256,4096]", "i64[3072]", target="cuda:90")
    memory = found.to_dict()["peak_memory"]["forward"]
    assert memory["own"] <= most * memory["eager"] and found.to_dict()["launches"]["forward"] <= 5 * 3 + 1


def test_calls_that_came_often_add_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusegrad.runtime.fast_path import plan_codegen

    taken: list[bool] = []
    memory_like = plan_codegen.memory_like

    def noted(tensor: Any, *spec: Any) -> Any:
        memory = memory_like(tensor, *spec)
        taken.append(memory is tensor)
        return memory

    monkeypatch.setattr(plan_codegen, "memory_like", noted)
    fast: Any = fusegrad.compile(Slices, backend="interpret", fullgraph=True)
    given = arguments(53, torch.float32)
    with fusegrad.config.patch(slab_bytes=1000):
        calls = [both_ways(fast.apply, given) for _ in range(6)]
    assert taken and all(taken)
    for mine, theirs in zip(calls[-1], both_ways(Slices.apply, given), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_memory_that_is_read_later_is_left_alone() -> None:
    """A sum is saved as it was before the next one is added to it, and so is what is returned."""

    def totals(x: Any, a: Any, b: Any, c: Any) -> Any:
        first, second = x + a @ b, a @ c
        return first, first + second, (first + second).t() @ second

    fast: Any = fusegrad.compile(totals, backend="interpret", fullgraph=True)
    given = [torch.randn(40, 40, dtype=torch.float64) for _ in range(4)]
    with fusegrad.config.patch(slab_bytes=1000):
        for mine, theirs in zip(fast(*given), totals(*given), strict=True):
            torch.testing.assert_close(mine, theirs)
