"""Philox4x32-10 in torch integer arithmetic: four numbers for each counter, those of Triton's `rand4x` and `randn4x`.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A word, 0 <= word < 2**32, is held in an int64.
"""

from __future__ import annotations

import torch

_ROUNDS = 10
_MASK = 0xFFFFFFFF
_KEYS = (0x9E3779B9, 0xBB67AE85)
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_UNIFORM_SCALE = 4.6566127342e-10
_SMALLEST_UNIFORM = 1.0e-7
_TURN = 6.283185307179586

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _multiplied(factor: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of factor*x; the product of two words does not fit int64, so x goes in halves."""
    high, low = x >> 16, x & 0xFFFF
    return (factor * high + (factor * low >> 16)) >> 16, (factor * x) & _MASK


def philox(seed: torch.Tensor, counter: torch.Tensor) -> Words:
    """Four random words for each i64 counter."""
    zero = torch.zeros_like(counter)
    c0, c1, c2, c3 = counter & _MASK, (counter >> 32) & _MASK, zero, zero
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        high_a, low_a = _multiplied(_FACTORS[0], c0)
        high_b, low_b = _multiplied(_FACTORS[1], c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + _KEYS[0]) & _MASK, (k1 + _KEYS[1]) & _MASK
    return c0, c1, c2, c3


def _uniform(word: torch.Tensor) -> torch.Tensor:
    signed = torch.where(word >= 1 << 31, word - (1 << 32), word)
    return torch.where(signed < 0, -signed - 1, signed).to(torch.float32) * _UNIFORM_SCALE


def uniform(seed: torch.Tensor, offset: torch.Tensor, count: int) -> torch.Tensor:
    """float32 [.., count] in [0, 1): place i = offset + k has number i % 4 of tl.rand4x(seed, i // 4).

    seed, offset: i64, of shape [] or, for a batch, [.., 1].
    """
    words = philox(seed, _counters(offset, count, seed.device))
    return _placed([_uniform(word) for word in words], offset, count)


def normal(seed: torch.Tensor, offset: torch.Tensor, count: int) -> torch.Tensor:
    """The same of tl.randn4x: two Box-Muller pairs for a counter, of two words each."""
    a, b, c, d = philox(seed, _counters(offset, count, seed.device))
    return _placed([*_pair(a, b), *_pair(c, d)], offset, count)


def _pair(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    radius = torch.sqrt(-2.0 * torch.log(torch.clamp(_uniform(first), min=_SMALLEST_UNIFORM)))
    angle = _TURN * _uniform(second)
    return radius * torch.cos(angle), radius * torch.sin(angle)


def _counters(offset: torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    """Of so many places, wherever in a counter the first one is."""
    return (offset >> 2) + torch.arange((count + 6) // 4, dtype=torch.int64, device=device)


def _placed(four: list[torch.Tensor], offset: torch.Tensor, count: int) -> torch.Tensor:
    """The numbers of each counter one behind the other, from that of the first place on."""
    numbers = torch.stack(four, -1).flatten(-2)
    places = (offset & 3) + torch.arange(count, dtype=torch.int64, device=numbers.device)
    return numbers.gather(-1, places.expand(*numbers.shape[:-1], count))
