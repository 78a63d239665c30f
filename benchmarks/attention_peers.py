"""What attention is timed beside: torch's scaled_dot_product_attention, and flex_attention compiled by Inductor.

Each computes what the Function of `stream_functions` computes, from the same arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import stream_functions as s

Apply = Callable[..., Any]


# ------------------------------------------------------------------ scaled_dot_product_attention
def _sdpa(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **given)


SDPA: dict[type, Apply] = {
    s.Attention: lambda q, k, v, scale, causal: _sdpa(q, k, v, scale=scale, is_causal=causal),
    s.LearnedBias: lambda q, k, v, bias, scale: _sdpa(q, k, v, scale=scale, attn_mask=bias),
}


# ------------------------------------------------------------------ flex_attention
@functools.cache
def _compiled_flex() -> Apply:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)  # type: ignore[no-any-return]


@functools.cache
def _block_mask(allowed: Any, queries: int, keys: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(allowed, None, None, queries, keys, device=device)


@dataclass(frozen=True)
class Modified:
    """A call of flex_attention. score: of (score, batch, head, row, column, *buffers); allowed: of the last four."""

    q: Any
    k: Any
    v: Any
    scale: float
    score: Callable[..., Any] | None = None
    allowed: Callable[..., Any] | None = None
    buffers: tuple[Any, ...] = ()
    is_learned: bool = False
    """Whether the buffers have gradients."""


def _flex(call: Modified) -> Any:
    q, k, v = call.q, call.k, call.v
    mask = None if call.allowed is None else _block_mask(call.allowed, q.shape[-2], k.shape[-2], q.device.type)
    score = None if call.score is None else lambda *places: call.score(*places, *call.buffers)  # type: ignore[misc]
    grouped = q.shape[1] != k.shape[1]
    return _compiled_flex()(q, k, v, score_mod=score, block_mask=mask, scale=call.scale, enable_gqa=grouped)


def _past(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


@functools.cache
def _window(width: int) -> Any:
    return lambda b, h, i, j: (i >= j) & (i - j < width)


def _sloped(x: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any) -> Any:
    return x + slopes[h] * (j - i)


def _biased(x: Any, b: Any, h: Any, i: Any, j: Any, bias: Any) -> Any:
    return x + bias[h, i, j]


def _alibi(q: Any, k: Any, v: Any, slopes: Any, scale: float) -> Modified:
    slopes = slopes.detach()  # whose gradient the class leaves out
    return Modified(q, k, v, scale, _sloped, _past, (slopes,))


def _capped(q: Any, k: Any, v: Any, scale: float, cap: float, width: int) -> Modified:
    return Modified(q, k, v, scale, lambda x, b, h, i, j: cap * torch.tanh(x / cap), _window(width))


MODIFIED: dict[type, Callable[..., Modified]] = {
    s.Attention: lambda q, k, v, scale, causal: Modified(q, k, v, scale, allowed=_past if causal else None),
    s.ALiBi: _alibi,
    s.SoftcapWindow: _capped,
    s.LearnedBias: lambda q, k, v, bias, scale: Modified(q, k, v, scale, _biased, None, (bias,), True),
}
FLEX: dict[type, Apply] = {cls: lambda *args, of=of: _flex(of(*args)) for cls, of in MODIFIED.items()}
ATTENTION: dict[str, dict[type, Apply]] = {"sdpa": SDPA, "flex": FLEX}
