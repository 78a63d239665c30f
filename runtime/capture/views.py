"""Outputs that are views: of the memory of arguments, of another output or of a hidden tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import sympy
import torch

from ...tracer.function import ForwardCapture, rebind
from ...tracer.opaque.parts import span
from ...tracer.torch_private import neg_view

Tensor = torch.Tensor
Sizes = Mapping[sympy.Symbol, Any]
V = TypeVar("V")


def with_aliases(
    captured: ForwardCapture, outputs: Sequence[V], inputs: Sequence[V], hidden: Sequence[V],
    view: Callable[[Tensor, V, Tensor, bool], V],
) -> list[V]:  # fmt: skip
    """Outputs of which some are an input, show the memory of one or of another output, or are one object twice.

    Over values of any kind: tensors in a call, their names in a text. view: (fake of the view, base, fake of the base,
    whether autograd knows it as a view) -> the view.
    """
    full = list(outputs)
    pools = {
        "view": (inputs, captured.fakes),
        "part of output": (full, captured.fake_outputs),
        "part of hidden": (hidden, captured.fake_hidden),
    }
    for i, position in enumerate(captured.tensor_outputs):
        described = captured.outputs[position]
        kind, index = described.kind, described.index
        if kind == "input":
            full[i] = inputs[index]
        elif kind == "same":
            full[i] = full[index]
        elif kind in pools:
            bases, likes = pools[kind]
            full[i] = view(captured.fake_outputs[i], bases[index], likes[index], bool(described.value))
    return full


def view_like(fake: Tensor, base: Tensor, sizes: Sizes, of: Tensor | None = None) -> Tensor:
    """What the fake is a view of (of the fake `of`), seen the same way: strides, offset, dtype, lazy conjugate."""
    shape, strides, offset = view_of(fake, sizes)
    base = base if fake.dtype == base.dtype else _reinterpreted(base, fake.dtype)
    view = base.as_strided(shape, strides, base.storage_offset() + offset)
    view = view.conj() if _differ(Tensor.is_conj, fake, of) else view
    return neg_view(view) if _differ(Tensor.is_neg, fake, of) else view


def is_as_strided(fake: Tensor, of: Tensor | None) -> bool:
    """Whether `as_strided` of the base alone is the view."""
    bits = _differ(Tensor.is_conj, fake, of) or _differ(Tensor.is_neg, fake, of)
    return not bits and (of is None or fake.dtype == of.dtype)


def _differ(bit: Callable[[Tensor], bool], fake: Tensor, of: Tensor | None) -> bool:
    return bit(fake) != (of is not None and bit(of))


def view_of(view: Tensor, sizes: Sizes) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides and first element of a view within its base."""
    shape, strides = rebind(tuple(view.shape), sizes), rebind(tuple(view.stride()), sizes)
    return shape, strides, int(rebind(view.storage_offset(), sizes))


def _reinterpreted(base: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory that a tensor spans as a vector of another dtype."""
    every = span(tuple(base.shape), base.stride())
    return base.as_strided((every,), (1,), base.storage_offset()).view(dtype)
