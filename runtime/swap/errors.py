"""The one refusal of `fusegrad.swap`."""

from __future__ import annotations

from ...ir.errors import FusegradError


class SwapError(FusegradError, ValueError):
    """A swap that does not fit the model, or that cannot be taken back; the model is as it was."""

    message = "fusegrad.swap({model}): {detail}\n  at:   {where}\n  fix:  {fix}"
