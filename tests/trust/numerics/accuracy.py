"""How far results are from the truth, in units of the last place, and whether they are of the same class as eager's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

Tensor = torch.Tensor
FACTOR, SLACK = 1.5, 1.0
"""An error may be FACTOR times eager's and SLACK units in the last place more."""


def unit(reference: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The distance of neighbours in `dtype` where the reference lies; of subnormals at least."""
    kind = torch.finfo(dtype)
    size = np.abs(reference)
    _, exponent = np.frexp(np.where(np.isfinite(size), size, 1.0))
    digits, least = round(-math.log2(kind.eps)), round(math.log2(kind.tiny))
    return np.ldexp(np.ones_like(size), np.maximum(exponent - 1, least) - digits)


def ulps(found: Tensor, reference: np.ndarray, size: np.ndarray | None = None) -> np.ndarray:
    """Errors in units of the last place of the truth, or of `size`: of what cancels.

    0 where the truth is no number that the dtype has, which classes judge.
    """
    value = found.detach().to(torch.float64).numpy().astype(reference.dtype)
    with np.errstate(all="ignore"):
        error = np.abs(value - reference) / unit(reference if size is None else size, found.dtype)
    comparable = np.isfinite(reference) & np.isfinite(value)
    return np.where(comparable, error, 0.0).astype(np.float64)


def strange(found: Tensor, eager: Tensor) -> Tensor:
    """Where one is NaN, infinite or a zero of some sign, and the other is not the same; integers: where they differ."""
    if not eager.is_floating_point():
        return found != eager
    zeros = (found == 0) & (eager == 0) & (torch.signbit(found) != torch.signbit(eager))
    infinite = (found.isinf() | eager.isinf()) & (found != eager) & ~(found.isnan() & eager.isnan())
    return (found.isnan() != eager.isnan()) | infinite | zeros


@dataclass(frozen=True)
class Errors:
    """The worst of one operation in one dtype.

    `over`: how many results break the bound; `odd`: of another class than eager's; `excused`: of another class, where
    eager's is not the truth's and ours is, or where eager itself has more than one answer.
    """

    eager: float
    found: float
    over: int
    odd: int
    count: int
    excused: int = 0
    worst: str = ""

    @property
    def good(self) -> bool:
        return not self.over and not self.odd


NEIGHBOURS = 64
"""How many results, nearest in size, share eager's worst error: one result alone may be right by luck."""


def nearby(errors: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Of each result, the worst error among its neighbours in size."""
    order = np.argsort(np.abs(reference), axis=None)
    blocks = np.arange(len(order)) // NEIGHBOURS
    worst = np.zeros(blocks[-1] + 1 if len(order) else 0)
    np.maximum.at(worst, blocks, errors.reshape(-1)[order])
    result = np.empty(len(order))
    result[order] = worst[blocks]
    return result.reshape(errors.shape)


def compared(
    found: Tensor,
    eager: Tensor,
    reference: np.ndarray,
    inputs: tuple[Tensor, ...] = (),
    local: bool = True,
    size: np.ndarray | None = None,
    others: Sequence[Tensor] = (),
) -> Errors:
    """local: each result against eager's error nearby; else the worst against eager's worst.

    others: what eager says as well, by other code or on another machine.
    """
    odd = strange(found, eager).numpy()
    if not eager.is_floating_point():
        return Errors(0.0, 0.0, 0, int(odd.sum()), eager.numel(), 0, _shown(odd, found, eager, inputs))
    ours, theirs = ulps(found, reference, size), ulps(eager, reference, size)
    excused = odd & _right(found, reference) & ~_right(eager, reference)
    for other in others:
        excused |= odd & ~strange(found, other).numpy()
    odd = odd & ~excused
    limit = FACTOR * (nearby(theirs, reference) if local else theirs.max(initial=0.0)) + SLACK
    over = (ours > limit) & ~odd
    return Errors(
        float(theirs.max(initial=0.0)), float(ours.max(initial=0.0)), int(over.sum()), int(odd.sum()), eager.numel(),
        int(excused.sum()), _shown(odd | over, found, eager, inputs),
    )  # fmt: skip


def _right(found: Tensor, reference: np.ndarray) -> np.ndarray:
    """Where a result is the truth, rounded; zeros of either sign."""
    truth = torch.from_numpy(reference.astype(np.float64)).to(found.dtype)
    return np.isnan(reference) & found.isnan().numpy() | (truth == found).numpy()


def _shown(bad: np.ndarray, found: Tensor, eager: Tensor, inputs: tuple[Tensor, ...]) -> str:
    """The first results that differ, with their operands."""
    places = np.flatnonzero(bad.reshape(-1))[:4]
    same = [i for i in inputs if i.numel() == found.numel()]
    texts = []
    for place in places.tolist():
        operands = ", ".join(str(i.reshape(-1)[place].item()) for i in same)
        texts.append(f"({operands}): {found.reshape(-1)[place].item()} not {eager.reshape(-1)[place].item()}")
    return "; ".join(texts)
