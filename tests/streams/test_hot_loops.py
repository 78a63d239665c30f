"""What a turn of a streamed kernel does not pay for: subnormal powers, quotients of rows, roundings one by one."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from beside_eager import differences
from stream_functions import named
from test_text import loops


def texts(cls: Any, *args: Any, target: str = "cuda:90") -> dict[str, str]:
    """The kernels that walk a stream, by their directions."""
    found = fusegrad.explain(cls, *args, target=target)
    return {k.name.partition("_")[2]: k.source for k in found.kernels if k.walk}


def attention(dtype: torch.dtype, name: str = "SavedProbabilities", **target: str) -> dict[str, str]:
    return texts(named(name).cls, *named(name).arguments(1024, 64, dtype), **target)


class Kernels(Function):
    """exp(x @ y - r) of a row that is given: no maximum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
        p = torch.exp(x @ y.mT - r[:, None])
        ctx.save_for_backward(x, y, r)
        return p.sum(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y, r = ctx.saved_tensors
        dp = torch.exp(x @ y.mT - r[:, None]) * g[:, None]
        return dp @ y, dp.mT @ x, -dp.sum(-1)


class SumsReadTwice(Function):
    """Softmax attention by hand, whose backward wants the logarithm of the sum that it divides by, too."""

    @staticmethod
    def weights(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        s = (q @ k.mT).float()
        e = torch.exp(s - s.amax(-1, keepdim=True))
        total = e.sum(-1, keepdim=True)
        return (e / total).to(q.dtype), total

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return SumsReadTwice.weights(q, k)[0] @ v

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        p, total = SumsReadTwice.weights(q, k)
        dp = g @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * total.log().to(p.dtype)
        return ds @ k, ds.mT @ q, p.mT @ g


def small(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(*shape, generator=generator) * 0.5).to(torch.bfloat16).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("name", ["SavedProbabilities", "CausalGQA", "Textbook"])
def test_powers_beside_their_maximum_are_one_instruction(name: str) -> None:
    for text in attention(torch.bfloat16, name).values():
        assert all("near_power(" in body and "tl.exp2(" not in body for body in loops(text))


def test_other_powers_keep_their_subnormal_numbers() -> None:
    assert not any("near_power" in text for text in attention(torch.float32).values())
    given = [torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((2048, 64), (2048, 64), (2048,))]
    found = texts(Kernels, *given)
    assert found and all("tl.exp" in text and "near_power" not in text for text in found.values())


def test_sums_that_backward_divides_by_are_handed_over_inverted() -> None:
    found = attention(torch.bfloat16)
    assert re.search(r"tl\.store\(\w+ .*, 1\.0 / total, ", found["forward"])
    for direction in ("backward_1", "backward_2"):
        assert "e_sum_inverse_ptr" in found[direction] and " / " not in "".join(loops(found[direction]))
    case = named("SavedProbabilities")
    for dtype, name in ((torch.bfloat16, "1 / sum of e"), (torch.float32, "sum of e")):
        kept = fusegrad.explain(case.cls, *case.arguments(37, 16, dtype)).kept
        assert [row.name for row in kept if "sum of e" in row.name] == [name]


def test_sums_that_are_read_otherwise_are_handed_over_as_they_are() -> None:
    given = [torch.empty(2, 1024, 64, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    found = texts(SumsReadTwice, *given)
    assert found and not any("inverse_ptr" in text for text in found.values())


def test_rounding_by_pairs_is_for_processors_that_have_it() -> None:
    assert all("rounded_pairs(" in "".join(loops(text)) for text in attention(torch.bfloat16).values())
    for other in (attention(torch.float16), attention(torch.bfloat16, target="hip:gfx942")):
        assert not any("rounded_pairs" in text for text in other.values())


@pytest.mark.parametrize("function", [named("SavedProbabilities").cls, SumsReadTwice], ids=["Saved", "ReadTwice"])
def test_they_are_eagers_numbers(function: Any) -> None:
    if function is SumsReadTwice:
        args: Any = small((2, 37, 16), (2, 53, 16), (2, 53, 16))
    else:
        args = named("SavedProbabilities").arguments(37, 16, torch.bfloat16)
    with fusegrad.config.patch(backend="interpret"):
        assert not differences(fusegrad.compile(function), function, args)
