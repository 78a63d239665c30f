"""The short way to the metadata of most operations is torch's own: shapes and strides by their expressions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusegrad.tracer.capture import metadata
from fusegrad.tracer.capture.capture import Session
from fusegrad.tracer.torch_private import enable_python_dispatcher

aten = torch.ops.aten
Tensor = torch.Tensor


def four(x: Tensor, begin: int, end: int, step: int = 1) -> Tensor:
    """Columns of four, as many rows as `x` has: between two rows there is a gap, which is known."""
    return aten.slice(aten.new_zeros(x, [x.shape[0], 4]), 1, begin, end, step)  # type: ignore[no-any-return]


CALLS = {
    "clamp": lambda x, y: aten.clamp(x, -1, 2), "mul": lambda x, y: aten.mul(x, y), "gt": lambda x, y: aten.gt(x, y),
    "where": lambda x, y: aten.where(aten.gt(y, 0), x, y), "half": lambda x, y: aten.div(x, 2),
    "add": lambda x, y: aten.add(x, 1), "clone": lambda x, y: aten.clone(x),
    "sum": lambda x, y: aten.sum(x, [0]), "kept": lambda x, y: aten.mean(x, [-1], True),
    "all": lambda x, y: aten.sum(y),
    "most": lambda x, y: aten.amax(x, [1]), "softmax": lambda x, y: aten._softmax(x, 1, False),
    "running": lambda x, y: aten.cumsum(x, 1), "where most": lambda x, y: aten.argmax(x, 1),
    "product": lambda x, y: aten.mm(x, aten.t(x)), "to": lambda x, y: aten._to_copy(x, dtype=torch.float64),
    "zeros": lambda x, y: aten.zeros_like(x), "in place": lambda x, y: aten.mul_(aten.clone(x), y),
    "written": lambda x, y: aten.add_(x, 1), "unsqueeze": lambda x, y: aten.unsqueeze(y, -1),
    "transpose": lambda x, y: aten.transpose(x, 0, 1), "select": lambda x, y: aten.select(x, 0, -1),
    "permute": lambda x, y: aten.permute(x, [1, -2]), "expand": lambda x, y: aten.expand(y, [2, 5, 7]),
    "expand to": lambda x, y: aten.expand(y, [x.shape[1], -1, x.shape[1]]), "squeeze": lambda x, y: aten.squeeze(y, 0),
    "new axis": lambda x, y: aten.expand(y, [1, *y.shape]), "wrong": lambda x, y: aten.permute(x, [1, 1]),
    "too short": lambda x, y: aten.expand(x, [7]),
    "part": lambda x, y: aten.slice(aten.expand(y, [9, 5, 7]), 0, -7, 8, 3),
    "first": lambda x, y: aten.slice(x, 1, 0, 2),
    "no part": lambda x, y: aten.slice(aten.expand(y, [9, 5, 7]), 0, 8, 2),
    "gap": lambda x, y: aten.mul(four(x, 0, 3), aten.sum(y)), "last": lambda x, y: aten.exp(four(x, 3, 4)),
    "gaps": lambda x, y: aten.add(four(x, 0, 4, 2), four(x, 1, 4, 2)), "into": lambda x, y: aten.add_(four(x, 0, 3), 1),
    "gap sum": lambda x, y: aten.sum(four(x, 0, 3), [0]), "turned": lambda x, y: aten.exp(aten.t(four(x, 1, 3))),
    "step": lambda x, y: aten.exp(aten.select(aten.new_zeros(x, [x.shape[0], *x.shape]), 1, 2)),
    "step of four": lambda x, y: aten.exp(aten.select(aten.new_zeros(x, [x.shape[0], 4, x.shape[1]]), 1, 2)),
    "place": lambda x, y: aten.select_backward(y, [3, *y.shape], 0, 1),
    "far": lambda x, y: aten.mul(aten.unsqueeze(four(x, 0, 3), 0), aten.new_zeros(x, [2, 1, 3])),
}  # fmt: skip
PAIRS = {
    "same": lambda: (torch.ones(5, 7), torch.ones(5, 7)), "row": lambda: (torch.ones(5, 7), torch.ones(7)),
    "column": lambda: (torch.ones(5, 7), torch.ones(5, 1)), "number": lambda: (torch.ones(5, 7), torch.ones(())),
    "transposed": lambda: (torch.ones(7, 5).T, torch.ones(7, 5).T),
    "mixed": lambda: (torch.ones(7, 5).T, torch.ones(5, 7)),
    "half": lambda: (torch.ones(5, 7).half(), torch.ones(5, 7)), "whole": lambda: (torch.ones(5, 7), torch.arange(7)),
    "outer": lambda: (torch.ones(5, 1), torch.ones(7)), "one": lambda: (torch.ones(5, 1), torch.ones(5, 1)),
    "gapped": lambda: (torch.ones(5, 14)[:, ::2],) * 2, "expanded": lambda: (torch.ones(7).expand(5, 7),) * 2,
    "over itself": lambda: (torch.ones(50).as_strided((5, 7), (3, 2)),) * 2,
    "sliced": lambda: (torch.ones(5, 3, 7)[:, 1],) * 2,
}  # fmt: skip


def described(call: Any, pair: tuple[Tensor, Tensor]) -> Any:
    """The metadata of a call on symbolic fakes, or the kind of error."""
    session = Session()
    fakes = {id(t): session.fake(t) for t in pair}
    for a, b in zip(*(fakes[id(t)].shape[::-1] for t in pair), strict=False):
        assert a == b or 1 in (a, b)  # one size from now on
    with session.mode, torch.no_grad(), enable_python_dispatcher():
        try:
            made = call(*(fakes[id(t)] for t in pair))
        except (RuntimeError, NotImplementedError, ValueError) as error:
            return type(error)
    facts = [session.env.simplify(n.node.expr) if not isinstance(n, int) else n for n in (*made.shape, *made.stride())]
    return made.dtype, made.device, made.storage_offset(), facts


@pytest.mark.parametrize("name", CALLS)
def test_metadata_is_torchs_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {kind: described(CALLS[name], pair()) for kind, pair in PAIRS.items()}
    monkeypatch.setattr(metadata.Fakes, "_fake_result", lambda *_: None)
    assert short == {kind: described(CALLS[name], pair()) for kind, pair in PAIRS.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_elementwise_results_lie_as_they_do_on_a_device(dtype: torch.dtype) -> None:
    """torch's own fakes widen low floats first, and forget which axes are of one number."""
    rows = torch.ones(2, 3, 4, 1, 5, dtype=dtype).expand(2, 3, 4, 7, 5)
    heads = torch.ones(2, 3, 7, 4, 5, dtype=dtype).transpose(2, 3)
    session = Session()
    fakes = [session.fake(t) for t in (rows, heads)]
    for a, b in zip(*(f.shape for f in fakes), strict=True):
        assert a == b
    with session.mode, torch.no_grad(), enable_python_dispatcher():
        made = aten.mul(*fakes)
    order = sorted(range(5), key=[int(n.node.hint) if not isinstance(n, int) else n for n in made.stride()].__getitem__)
    assert order == sorted(range(5), key=(rows * heads).stride().__getitem__)


def test_the_short_way_is_taken_where_it_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    by_example = metadata.by_example

    def watched(*args: Any) -> Tensor | None:
        made = by_example(*args)
        taken.append(made is not None)
        return made

    monkeypatch.setattr(metadata, "by_example", watched)
    sure = dict.fromkeys(("same", "row", "transposed", "mixed", "outer", "gapped"), True)
    sure |= dict.fromkeys(("sliced", "over itself"), False)
    for kind in sure:
        taken.clear()
        described(CALLS["mul"], PAIRS[kind]())
        assert taken[0] is sure[kind], kind
    for call in ("gap", "last", "gaps", "into", "turned", "step", "step of four"):
        taken.clear()
        described(CALLS[call], PAIRS["same"]())
        assert taken[-1], call


def test_what_draws_or_changes_sizes_has_no_example() -> None:
    others = (aten.bernoulli.default, aten.unsqueeze_.default, aten.cat.default, aten.view.default)
    assert not any(map(metadata.is_exemplary, others))
