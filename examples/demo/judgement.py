"""The tolerance that the demo judges losses by."""

from __future__ import annotations

import math
from collections.abc import Sequence

LEARNING_RATE = 2e-3
# Rounding each norm's output by one ulp moves the loss by 2e-7 (relative) within 60 steps, by 3e-5 within 300, and by
# anything after that: training is chaotic. A norm without its weight's gradient, the mildest mistake that was tried,
# moves it by 4e-3 within 60. The tolerance lies between; later steps are shown but not judged.
TOLERANCE = 3e-4
JUDGED_STEPS = 300


def divergence(eager: Sequence[float], fast: Sequence[float]) -> float:
    """The largest relative difference of two runs' losses; NaN where one is not a number."""
    differences = [abs(a - b) / abs(a) for a, b in zip(eager, fast, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)
