"""A mistake of fusegrad's own while it prepares kernels: what was captured runs another way, told and on record."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ...ir.errors import FusegradError, LoweringError
from ...tracer.trace import CaptureError
from .config import settings

T = TypeVar("T")
ONE_BY_ONE = "no kernels, the traced ATen operations run one by one"


def is_internal(error: Exception) -> bool:
    """True for an exception that is no message for the user, no lack of memory, and nothing that a caller settles."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | CaptureError | LoweringError):
        return False
    return not isinstance(error, FusegradError) or error.speaks == "inside"


def or_fall_back(build: Callable[[], T], report: Callable[[str], None], instead: str = ONE_BY_ONE) -> T | None:
    """Return what `build` makes; None, told and on record, where that is a mistake of ours, but under `config.debug`.

    instead: what happens then.
    """
    try:
        return build()
    except Exception as error:
        if not is_internal(error) or settings().debug:
            raise
        first = (str(error).strip().splitlines() or [""])[0]
        report(f"{instead}: internal error: {type(error).__name__}: {first} (please report it)")
        return None
