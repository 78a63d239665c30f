"""vmap over a new axis is as good as the Function on the flattened batch: as many kernels, as many bytes, no copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compose.functions import CASES
from torch.func import vmap

import fusegrad
from fusegrad.runtime.execution.group import GroupRunner
from fusegrad.runtime.kernels import interpreter as interpret
from fusegrad.runtime.values.sizes import number

LANES, ROWS, COLUMNS = 4, 3, 8
WORK = ("copy_", "fill_", "zero_", "add", "sum", "mul", "where", "cat")
BY_NAME = {c.name: c for c in CASES}
ROWWISE: dict[str, tuple[str, ...]] = {
    "RMSNorm": ("x", "w", "eps"),
    "LayerNorm": ("x", "w", "w"),
    "Softmax": ("x",),
    "CrossEntropy": ("x", "t"),
}


def argument(kind: str, *lead: int) -> Any:
    made = {"x": torch.ones(*lead, COLUMNS), "w": torch.ones(COLUMNS), "t": torch.ones(lead, dtype=torch.int64)}
    return 1e-6 if kind == "eps" else made[kind].requires_grad_(kind != "t")


def fresh(name: str) -> Any:
    """Compiled anew: a call that came often runs past what `Traffic` watches."""
    return fusegrad.compile(BY_NAME[name].cls, backend="interpret").apply


class Traffic:
    """What runs within a call: (kernel, bytes read, bytes written), and the operations of torch that touch memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, partial: bool = True) -> None:
        self.kernels: list[tuple[str, int, int]] = []
        self.partial = partial  # whether partial sums count: how many a schedule makes is its own choice
        launched = GroupRunner.__call__

        def noted(runner: Any, inputs: Any, sizes: Any, key: Any) -> Any:
            results = launched(runner, inputs, sizes, key)
            for k in runner.bound[key].kernels.kernels:
                read, written = (
                    sum(number(b, sizes) for name, b in side.items() if self.partial or "partial" not in name)
                    for side in (k.reads, k.writes)
                )
                self.kernels.append((k.name.replace("_batched", ""), read, written))
            return results

        monkeypatch.setattr(GroupRunner, "__call__", noted)
        monkeypatch.setattr(interpret, "run", lambda *call: None)  # what a kernel computes is tested elsewhere

    def of(self, run: Any, *args: Any) -> tuple[list[tuple[str, int, int]], list[str]]:
        """Of the second call, forward and backward."""
        floats = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
        torch.autograd.grad(made := run(*args), floats, g := torch.ones_like(made))
        self.kernels.clear()
        with torch.autograd.profiler.profile() as ran:
            torch.autograd.grad(run(*args), floats, g)
        return list(self.kernels), [e.name for e in ran.function_events if e.name.removeprefix("aten::") in WORK]


@pytest.mark.parametrize("dim", [0, 1, "view"])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "Softmax"])
def test_a_new_axis_costs_nothing(name, dim, monkeypatch) -> None:
    fast, traffic = fresh(name), Traffic(monkeypatch)
    flat, _ = traffic.of(fast, *(argument(k, LANES * ROWS) for k in ROWWISE[name]))
    shape = (ROWS, LANES) if dim == 1 else (LANES, ROWS)
    given = [argument(k, *shape) for k in ROWWISE[name]]
    in_dims = tuple((0 if dim == 0 else 1) if k == "x" else None for k in ROWWISE[name])
    turned = [a.transpose(0, 1) if d == 1 and dim == "view" else a for a, d in zip(given, in_dims, strict=True)]
    kernels, operations = traffic.of(vmap(fast, in_dims), *turned)
    assert len(flat) == 2
    assert kernels == flat
    assert operations == []


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_weights_of_their_own_cost_their_own_bytes(name, monkeypatch) -> None:
    fast, traffic = fresh(name), Traffic(monkeypatch, partial=False)
    flat, _ = traffic.of(fast, *(argument(k, LANES * ROWS) for k in ROWWISE[name]))
    given = [argument(k, LANES, ROWS) for k in ROWWISE[name]]
    given = [a.detach().repeat(LANES, 1).requires_grad_() if k == "w" else a
             for k, a in zip(ROWWISE[name], given, strict=True)]  # fmt: skip
    kernels, operations = traffic.of(vmap(fast, tuple(None if k == "eps" else 0 for k in ROWWISE[name])), *given)
    weights = ROWWISE[name].count("w")
    more = 4 * COLUMNS * (LANES - 1)
    assert [k for k, _, _ in kernels] == [k for k, _, _ in flat]
    assert [a - b for (_, a, _), (_, b, _) in zip(kernels, flat, strict=True)] == [weights * more, more]
    assert [a - b for (_, _, a), (_, _, b) in zip(kernels, flat, strict=True)] == [0, weights * more]
    assert operations == []


@pytest.mark.parametrize("dim", [0, 1])
def test_a_loss_per_lane_costs_its_scalars(dim, monkeypatch) -> None:
    fast, traffic = fresh("CrossEntropy"), Traffic(monkeypatch)
    flat, _ = traffic.of(fast, *(argument(k, LANES * ROWS) for k in ROWWISE["CrossEntropy"]))
    shape = (ROWS, LANES) if dim else (LANES, ROWS)
    kernels, operations = traffic.of(vmap(fast, dim), *(argument(k, *shape) for k in ROWWISE["CrossEntropy"]))
    scalars = 4 * (LANES - 1)
    assert [k for k, _, _ in kernels] == [k for k, _, _ in flat]
    assert all(0 <= r - s + w - v <= 4 * scalars for (_, r, w), (_, s, v) in zip(kernels, flat, strict=True))
    assert operations == []
