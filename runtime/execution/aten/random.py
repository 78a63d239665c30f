"""Random numbers from an explicit seed and offset: the same on every device, in eager code and inside a kernel.

    mask = fusegrad.random.uniform(x.shape, seed, like=x) > p        # drawn again in backward, not saved

Philox4x32-10 makes four for each counter: at place i is number i % 4 of `tl.rand4x(seed, i // 4)` or `tl.randn4x`, and
number k of a shape is the one at `offset + k`. Offsets that are multiples of eight cost a kernel least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ....ir import Value, emit
from ....tracer.lowering.rules import Call, cast, reshape, rules
from . import philox

Tensor = torch.Tensor


def uniform(shape: Sequence[int], seed: int | Tensor, offset: int | Tensor = 0, *, like: Tensor) -> Tensor:
    """float32 numbers in [0, 1) of `shape`, on the device of `like`.

    Args:
        shape: Of the result.
        seed: An int, or a 0-d int64 tensor.
        offset: An int, or a 0-d int64 tensor: number k of the result is the one at `offset + k`.
        like: A tensor on the device that is wanted.

    Returns:
        A float32 tensor.
    """
    return _op(_scalar(seed, like), _scalar(offset, like), list(shape), "uniform")  # type: ignore[no-any-return]


def normal(shape: Sequence[int], seed: int | Tensor, offset: int | Tensor = 0, *, like: Tensor) -> Tensor:
    """float32 standard normal numbers of `shape`, on the device of `like`.

    Args:
        shape: Of the result.
        seed: An int, or a 0-d int64 tensor.
        offset: An int, or a 0-d int64 tensor: number k of the result is the one at `offset + k`.
        like: A tensor on the device that is wanted.

    Returns:
        A float32 tensor.
    """
    return _op(_scalar(seed, like), _scalar(offset, like), list(shape), "normal")  # type: ignore[no-any-return]


def _scalar(value: int | Tensor, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(torch.int64)
    return torch.full((), value, dtype=torch.int64, device=like.device)


@torch.library.custom_op("fusegrad::philox", mutates_args=())
def _op(seed: Tensor, offset: Tensor, shape: list[int], kind: str) -> Tensor:
    draw = philox.uniform if kind == "uniform" else philox.normal
    return draw(seed, offset, math.prod(shape)).reshape(shape)


@_op.register_vmap
def _(
    info: Any, in_dims: Sequence[int | None], seed: Tensor, offset: Tensor, shape: list[int], kind: str
) -> tuple[Tensor, int | None]:
    """Lane i draws with its own seed and offset, whatever vmap's `randomness` says; one draw where all share both."""
    if in_dims[0] is None and in_dims[1] is None:
        return _op(seed, offset, shape, kind), None
    seeds, offsets = (t if d is None else t.reshape(-1, 1) for t, d in zip((seed, offset), in_dims, strict=False))
    draw = philox.uniform if kind == "uniform" else philox.normal
    numbers = draw(seeds, offsets, math.prod(shape))
    return numbers.reshape(info.batch_size, *shape), 0


@_op.register_fake
def _(seed: Tensor, offset: Tensor, shape: list[int], kind: str) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=seed.device)


def _lowered(call: Call, seed: Value, offset: Value, shape: Sequence[int], kind: str) -> Value:
    at = [reshape(cast(v, "i64"), ()) for v in (seed, offset)]
    return emit("random", *at, shape=call.out.shape, dtype="f32", kind=kind)


OPERATOR = torch.ops.fusegrad.philox.default
"""What stands in a graph; there as soon as this module is imported, which loading a program that calls it needs."""
rules[OPERATOR] = _lowered
