"""The shorter way to record an operation leaves the graph that torch's own leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusegrad.tracer.capture import recorder
from fusegrad.tracer.capture.capture import Session

Tensor = torch.Tensor


def in_place(x: Tensor, y: Tensor) -> Any:
    total = (x * y).sum(1)
    total.unsqueeze_(1)
    total.mul_(2).transpose_(0, 1)
    return total + x.t(), y.clone().add_(1)


def sizes(x: Tensor, y: Tensor) -> Any:
    flat = torch.cat([x, y], 1).reshape(-1)
    return flat * flat.numel(), x.new_zeros(x.shape[0], y.stride(0)), (x + y).expand(3, *x.shape).sum(0)


def several(x: Tensor, y: Tensor) -> Any:
    values, index = x.max(1)
    return values.exp(), y.gather(1, index[:, None]), torch.stack(y.unbind(1)), torch.tensor(2.0) * x


def differentiated(x: Tensor, y: Tensor) -> Any:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad((leaf.sin() * y).sum(), leaf)


def known_numbers(x: Tensor, y: Tensor) -> Any:
    two = torch.tensor(2.0)
    moved = torch.tensor([3.0]).add_(1)
    return two * x, (two + 1) * y * two, x * (two * 3).item(), moved * y, x[:1, :1] * moved.item()


def of_three_axes(x: Tensor, y: Tensor) -> Any:
    cube = x[None] * y[:, None]
    other = (cube + x).exp()
    return other.sum(1), other.transpose(0, 2) * cube.stride(0), other.new_zeros(other.stride(1))


BODIES = (in_place, sizes, several, differentiated, known_numbers, of_three_axes)


def recorded(body: Any) -> tuple[str, list[Any]]:
    """The text of a graph, and how the value of each node lies in memory."""
    session = Session()
    x, y = session.fake(torch.randn(4, 6)), session.fake(torch.randn(4, 6))
    assert x.shape == y.shape
    gm = session.trace(body, [x, y]).graph_module
    values = [n.meta.get("val") for n in gm.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    return gm.code, [(str(v.dtype), str(tuple(v.shape)), str(v.stride()), v.requires_grad) for v in values]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_the_graph_is_torchs_own(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    short = recorded(body)
    monkeypatch.setattr(recorder, "begin_recording", lambda: None)
    assert short == recorded(body)


def test_the_shorter_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    record = recorder.Recorder._record_node
    monkeypatch.setattr(recorder.Recorder, "_record_node", lambda self, *a: taken.append(a[0]) or record(self, *a))
    recorded(in_place)
    assert {torch.ops.aten.mul.Tensor, torch.ops.aten.sum.dim_IntList, torch.ops.aten.add_.Tensor} <= set(taken)
    assert torch.ops.aten.unsqueeze_.default not in taken
