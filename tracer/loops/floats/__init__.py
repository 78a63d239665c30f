"""Floats that Python computes anew in each step of a loop, as functions of the step: `0.9 ** t`, `1 / (t + 1)`.

    x[t] * 0.9, x[t] * 0.81, x[t] * 0.729, ..  ->  x[t] * 0.9 ** (t + 1)

Of the forms that people write one is looked for that gives every float of the short traces, to the last bit. It is
computed as Python does, where the body runs as it is; the first call of a longer loop is compared with the method.
"""

from __future__ import annotations

from .apart import Float, floats_apart
from .forms import formula_of
from .formula import Formula

__all__ = ["Float", "Formula", "floats_apart", "formula_of"]
