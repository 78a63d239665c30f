"""What attention is timed beside: torch's scaled_dot_product_attention, and flex_attention compiled by Inductor.

Each computes what the Function of `stream_functions` computes, from the same arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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


def _flex(q: Tensor, k: Tensor, v: Tensor, scale: float, score: Any = None, allowed: Any = None) -> Any:
    mask = None if allowed is None else _block_mask(allowed, q.shape[-2], k.shape[-2], q.device.type)
    grouped = q.shape[1] != k.shape[1]
    return _compiled_flex()(q, k, v, score_mod=score, block_mask=mask, scale=scale, enable_gqa=grouped)


def _past(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


@functools.cache
def _window(width: int) -> Any:
    return lambda b, h, i, j: (i >= j) & (i - j < width)


def _alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, scale: float) -> Any:
    slopes = slopes.detach()  # whose gradient the class leaves out
    return _flex(q, k, v, scale, lambda x, b, h, i, j: x + slopes[h] * (j - i), _past)


def _capped(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, width: int) -> Any:
    return _flex(q, k, v, scale, lambda x, b, h, i, j: cap * torch.tanh(x / cap), _window(width))


FLEX: dict[type, Apply] = {
    s.Attention: lambda q, k, v, scale, causal: _flex(q, k, v, scale, allowed=_past if causal else None),
    s.ALiBi: _alibi,
    s.SoftcapWindow: _capped,
    s.LearnedBias: lambda q, k, v, bias, scale: _flex(q, k, v, scale, lambda x, b, h, i, j: x + bias[h, i, j]),
}
ATTENTION: dict[str, dict[type, Apply]] = {"sdpa": SDPA, "flex": FLEX}
