"""What a list of timings says: least, quartiles, geometric means, and the noise under which nothing is a difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The least of some samples, their median and their middle half."""

    least: float
    lower: float
    median: float
    upper: float

    @property
    def range(self) -> float:
        """The interquartile range."""
        return self.upper - self.lower


def spread(samples: Sequence[float]) -> Spread:
    """Raises ValueError without samples."""
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("there are no samples")
    return Spread(ordered[0], *(quantile(ordered, q) for q in (0.25, 0.5, 0.75)))


def quantile(ordered: Sequence[float], q: float) -> float:
    """Between the two nearest samples in proportion, as numpy's default."""
    at = q * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def geometric_mean(ratios: Iterable[float]) -> float:
    """Of positive numbers; 1 of none."""
    logs = [math.log(r) for r in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def noise(first: float, second: float) -> float:
    """How far apart two timings of the same thing are, as a share: 0.02 for 1.00 and 1.02 (in either order)."""
    return max(first, second) / min(first, second) - 1
