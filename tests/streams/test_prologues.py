"""Numbers of rows that a walk makes first, and stores for kernels behind it: launches, order, and what has none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from beside_eager import differences, expanded, transposed_heads
from stream_functions import named

Tensor = torch.Tensor
Numbers = Callable[[Tensor, Tensor, Tensor], Tensor]
SIZES = ((37, 24), (130, 40))
"""Rows that fill no block, depths that are no power of two."""


def attention(numbers: Numbers) -> Any:
    """An attention whose backward takes these numbers of each row from the gradient of its scores."""

    class Attention(Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
            p = torch.softmax(q @ k.mT * 0.2, -1)
            out = p @ v
            ctx.save_for_backward(q, k, v, w, out)
            return out

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
            q, k, v, w, out = ctx.saved_tensors
            p = torch.softmax(q @ k.mT * 0.2, -1)
            ds = p * (g @ v.mT - numbers(g, out, w)) * 0.2
            return ds @ k, ds.mT @ q, p.mT @ g, None

    return Attention


NUMBERS: dict[str, Numbers] = {
    "sums": lambda g, out, w: (g * out).sum(-1, keepdim=True),
    # lanes beyond the depth would be the greatest, and powers of them one
    "maxima": lambda g, out, w: (-(g * out).abs() - 1).amax(-1, keepdim=True),
    "powers": lambda g, out, w: (g * out).exp().sum(-1, keepdim=True).log(),
    "made of another": lambda g, out, w: (g * (g * out).mean(-1, keepdim=True)).sum(-1, keepdim=True),
    "of what nothing else reads": lambda g, out, w: w.sum(-1, keepdim=True),
}


def arguments(n: int, d: int, wide: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(n + d)
    heads = [torch.randn(2, 3, n, width, generator=draw).to(dtype) for width in (d, d, d, wide)]
    return [a.requires_grad_(at < 3) for at, a in enumerate(heads)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "d"), SIZES)
@pytest.mark.parametrize("name", NUMBERS)
def test_beside_eager(name: str, n: int, d: int, dtype: torch.dtype) -> None:
    cls = attention(NUMBERS[name])
    fast = fusegrad.compile(cls, backend="interpret", fullgraph=True)
    assert not differences(fast.apply, cls.apply, arguments(n, d, d, dtype))


@pytest.mark.parametrize("layout", [transposed_heads, expanded], ids=["heads", "expanded"])
@pytest.mark.parametrize("name", NUMBERS)
def test_gradients_in_other_layouts(name: str, layout: Any) -> None:
    cls = attention(NUMBERS[name])
    fast = fusegrad.compile(cls, backend="interpret", fullgraph=True)
    assert not differences(fast.apply, cls.apply, arguments(37, 24, 24), layout)


def described(cls: Any, *widths: int, n: int = 1024) -> Any:
    return fusegrad.explain(fusegrad.compile(cls), *(f"bf16[2,8,{n},{d}]" for d in widths), target="cuda:90")


@pytest.mark.parametrize("name", ["sums", "maxima", "powers"])
def test_the_walk_that_has_the_rows_makes_their_numbers(name: str) -> None:
    """It stores them before it begins, and reads them behind a barrier; the kernel behind it reads them."""
    found = described(attention(NUMBERS[name]), 64, 64, 64, 64)
    first, second = [k.source for k in found.kernels if k.direction == "backward"]
    walk = found.directions["backward"].launches[0].walk
    (label,) = [w.removeprefix("makes ").removesuffix(" of them first") for w in walk.split("; ") if "first" in w]
    stored, barrier, read = (first.index(s) for s in (f"store({label}_ptr", "tl.debug_barrier()", f"load({label}_ptr"))
    assert stored < barrier < read < first.index("for col_at")
    assert f"load({label}_ptr" in second and f"store({label}_ptr" not in second and "debug_barrier" not in second


def test_sums_along_the_stream_are_a_pass_before() -> None:
    """No product of forward has summed p beside the mask: the walk of dq goes along the stream twice."""
    case = named("LogSoftmaxDropout")
    given = case.arguments(1024, 64, torch.bfloat16, "meta")
    found = fusegrad.explain(fusegrad.compile(case.cls), *given, target="cuda:90")
    first, second = (launch.walk for launch in found.directions["backward"].launches)
    assert "walks them 2 times" in first and "walks them" not in second


def test_without_the_switch() -> None:
    with fusegrad.config.patch(disable=["prologues"]):
        found = described(attention(NUMBERS["sums"]), 64, 64, 64, 64)
    assert found.directions["backward"].launch_count == 3 and "debug_barrier" not in found.module


def test_other_gradients_than_that_of_the_queries() -> None:
    """No walk is left whose programs have the rows: a kernel of their own makes the numbers."""

    class OfKeys(attention(NUMBERS["sums"])):
        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
            q, k, v, _, out = ctx.saved_tensors
            p = torch.softmax(q @ k.mT * 0.2, -1)
            ds = p * (g @ v.mT - (g * out).sum(-1, keepdim=True)) * 0.2
            return None, ds.mT @ q, p.mT @ g, None

    found = described(OfKeys, 64, 64, 64, 64)
    assert found.directions["backward"].launch_count == 2 and "debug_barrier" not in found.module
    fast = fusegrad.compile(OfKeys, backend="interpret", fullgraph=True)
    assert not differences(fast.apply, OfKeys.apply, arguments(37, 24, 24))


def test_rows_that_no_tile_holds() -> None:
    """They are longer than what the walk multiplies: registers would not hold them."""
    cls = attention(NUMBERS["of what nothing else reads"])
    found = described(cls, 64, 64, 64, 1000)
    assert found.directions["backward"].launch_count == 3 and "debug_barrier" not in found.module
    fast = fusegrad.compile(cls, backend="interpret", fullgraph=True)
    assert not differences(fast.apply, cls.apply, arguments(37, 24, 70))


class WithNumbers(Function):
    """Numbers of the rows are a result, and in the scores."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        size = (q * q).sum(-1, keepdim=True)
        p = torch.sigmoid(q @ k.mT - size)
        ctx.save_for_backward(q, k, v)
        return p @ v, size

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        q, k, v = ctx.saved_tensors
        p = torch.sigmoid(q @ k.mT - (q * q).sum(-1, keepdim=True))
        ds = p * (1 - p) * (g @ v.mT)
        return ds @ k + 2 * q * (h - ds.sum(-1, keepdim=True)), ds.mT @ q, p.mT @ g


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_that_are_returned(dtype: torch.dtype) -> None:
    found = described(WithNumbers, 64, 64, 64)
    assert [d.launch_count for d in found.directions.values()] == [1, 2]
    fast = fusegrad.compile(WithNumbers, backend="interpret", fullgraph=True)
    assert not differences(fast.apply, WithNumbers.apply, arguments(37, 24, 24, dtype)[:3])


def test_second_derivatives() -> None:
    case = named("SavedLogSumExp")
    fast, found = fusegrad.compile(case.cls, backend="interpret"), []
    for cls in (fast, case.cls):
        q, k, v, scale = case.arguments(19, 12)
        first = torch.autograd.grad(cls.apply(q, k, v, scale).sin().sum(), (q, k, v), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v)))
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-4)


def test_a_stream_in_parts_has_no_prologue() -> None:
    """Several programs have the same rows: none of them is to store their numbers."""
    found = fusegrad.explain(
        fusegrad.compile(attention(NUMBERS["sums"])),
        *(f"bf16[1,8,{n},64]" for n in (1, 8192, 8192, 1)), target="cuda:90",
    )  # fmt: skip
    sources = [k.source for k in found.kernels if "tl.dot" in k.source]
    assert any("split" in s for s in sources)
    assert not any("debug_barrier" in s for s in sources)
