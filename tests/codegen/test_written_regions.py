"""Parts of a tensor that are written, y[a:b] += v, and rolled tensors: one kernel, which asks for each place once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusegrad
from fusegrad.runtime.settings import config

Write = Callable[[Tensor], Tensor]


def variation(x: Tensor) -> Tensor:
    """The gradient of total variation."""
    dx, dy = (x[..., 1:] - x[..., :-1]).sign(), (x[..., 1:, :] - x[..., :-1, :]).sign()
    out = torch.zeros_like(x)
    out[..., 1:] += dx
    out[..., :-1] -= dx
    out[..., 1:, :] += dy
    out[..., :-1, :] -= dy
    return out


def parts_of_parts(x: Tensor) -> Tensor:
    out = x.new_zeros(*x.shape[:-2], x.shape[-2] + 2, x.shape[-1] + 2)
    out[..., 1:-1, 2:] += x
    out[..., 1:-1, :-2] -= x.exp()
    out[..., 2:, 1:-1] *= x
    return out[..., 1:-1, 1:-1] + out[..., 2:, 2:]


def rows_and_columns(x: Tensor) -> Tensor:
    """What a reflected margin gives back."""
    inner = x[..., 1:-1, 1:-1].clone()
    inner[..., 1, :] += x[..., 0, 1:-1]
    inner[..., -2, :] += x[..., -1, 1:-1]
    inner[..., :, 1] += x[..., 1:-1, 0]
    return inner


def every_other(x: Tensor) -> Tensor:
    out = x.clone()
    out[..., ::2] = x[..., ::2] * 2
    out[..., 1::2] += 1
    out[..., ::2] -= out[..., ::2].sin()
    return out


def shifted_between(x: Tensor) -> Tensor:
    """Read at quotients of places that begin below 0, where a mask says that they do not."""
    out = x.clone()
    out[..., 1::2] = x[..., : out[..., 1::2].shape[-1]].exp()
    out[::2, ..., 1::3] += x[: out[::2].shape[0], ..., : out[..., 1::3].shape[-1]]
    return out


def over_what_was_written(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[1:] = x[1:]
    out[1:] = x[:-1] * 2
    out[2:] /= out[2:].exp()
    return out + out[:1]


def masked(x: Tensor) -> Tensor:
    out = torch.zeros_like(x, dtype=torch.int32)
    out[..., 1:] += (x[..., 1:] > 0).int()
    out[..., :-1] |= (x[..., :-1] > 0).int() * 4
    return out


def rolled(x: Tensor) -> Tensor:
    return x.roll(1, -1) + x.roll(-1, -1) + x.roll(1, -2) + x.roll(-1, -2) - 4 * x


def window(x: Tensor) -> Tensor:
    return x.roll((-2, -3), (-2, -1)) * 2 - x.roll(x.shape[-1] // 2, -1) + x.roll(3)


WRITES = (
    variation, parts_of_parts, rows_and_columns, every_other, shifted_between, over_what_was_written, masked, rolled,
    window,
)  # fmt: skip
SHAPES = ((2, 6, 7), (3, 8, 8), (4, 5))


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_eager(write: Write, dtype: torch.dtype) -> None:
    fast = fusegrad.compile(write)
    with config.patch(backend="interpret"):
        for shape in SHAPES:
            x = torch.randn(shape).to(dtype)
            for given in (x, x.mT.contiguous().mT):
                torch.testing.assert_close(fast(given), write(given), rtol=0, atol=1e-6 if dtype.itemsize == 4 else 0)


@pytest.mark.parametrize("write", WRITES)
def test_in_one_kernel(write: Write) -> None:
    report = fusegrad.explain(fusegrad.compile(write), torch.empty(16, 512, 512, device="meta"), target="cuda:90")
    assert report.directions["forward"].launch_count == 1 and not report.directions["forward"].reasons


def test_steps_that_do_not_fit_each_other_are_taken_one_by_one() -> None:
    """The derivative looks like a loop, of whose steps the types do not agree."""
    report = fusegrad.explain(fusegrad.compile(rows_and_columns), torch.empty(16, 512, 512, device="meta"))
    assert not report.directions["backward"].reasons


def test_small_sums_are_read_where_they_are() -> None:
    """Their elements under the masks of the places at which they are asked for."""

    def repeated(x: Tensor) -> Tensor:
        return torch.cat([x[..., 1:], x[..., :1] * 2], -1).repeat_interleave(2, -2)

    fast = fusegrad.compile(repeated)
    x = torch.randn(2, 4, 7, requires_grad=True)
    assert not fusegrad.explain(fast, x).directions["backward"].reasons
    with config.patch(backend="interpret"):
        found, expected = (torch.autograd.grad(f(x).sin().sum(), x) for f in (fast, repeated))
    torch.testing.assert_close(found, expected)


def test_pieces_that_an_axis_has_no_whole_number_of() -> None:
    def between(x: Tensor) -> Tensor:
        y = torch.cat([x.sin(), x.cos()], -2)
        return y[..., 2:, :] - y[..., :-2, :]

    x = torch.randn(2, 5, 4)
    with config.patch(backend="interpret"):
        torch.testing.assert_close(fusegrad.compile(between)(x), between(x))


def test_a_roll_by_more_than_there_is_is_one_by_the_remainder() -> None:
    fast = fusegrad.compile(lambda x: x.roll(-5, -1) * 2 + x.roll(9, 0))
    with config.patch(backend="interpret"):
        for shape in ((3, 4), (9, 12), (2, 20), (1, 5), (5, 1), (0, 3)):
            x = torch.randn(shape)
            assert torch.equal(fast(x), x.roll(-5, -1) * 2 + x.roll(9, 0))


def test_minus_zero_stays_outside_of_what_is_written() -> None:
    def write(x: Tensor) -> Tensor:
        out = x.clone()
        out[1:] += 0.0
        return out

    x = torch.full((3,), -0.0)
    with config.patch(backend="interpret"):
        assert torch.equal(torch.signbit(fusegrad.compile(write)(x)), torch.signbit(write(x)))


def softmax_by_tiles(top: Tensor, total: Tensor, *blocks: Tensor) -> tuple[Tensor, ...]:
    """Running maxima and sums of tiles of rows, updated in place block by block, as flash attention is written."""
    top, total = top.clone(), total.clone()
    made = []
    for at in (0, 8):
        m, s = top[:, at : at + 8], total[:, at : at + 8]
        for x in blocks:
            now = torch.maximum(x.amax(-1), m)
            e = torch.exp(x + at - now[..., None])
            made.append(e)
            s.copy_(torch.exp(m - now) * s + e.sum(-1))
            m.copy_(now)
    return *made, top, total


@pytest.mark.parametrize("last", [7, 23])
def test_running_sums_of_tiles(last: int) -> None:
    """Each kernel reads what earlier ones have reduced; the steps of a tile are made on the tile."""
    given = torch.randn(4, 19), torch.rand(4, 19), *(torch.randn(4, 8, n) for n in (8, 8, last))
    fast = fusegrad.compile(softmax_by_tiles)
    with config.patch(backend="interpret"):
        torch.testing.assert_close(fast(*given), softmax_by_tiles(*given))
        assert not fusegrad.explain(fast, *given).directions["forward"].reasons
