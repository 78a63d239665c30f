"""A class that fails in eager on the arguments that are explained: its own error, with sizes in numbers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from ...ir.codes import code_of
from ...tracer.capture.debugging import without_logs_of_failures
from ...tracer.frames import where_raised
from ...tracer.torch_private import FakeTensor, FakeTensorMode
from ...tracer.trace import CaptureError

FAILED = "FG080"
"""The code of a trace that failed by an error of an operation, or of the method."""


def own_error(cls: Any, args: Sequence[Any], met: CaptureError) -> tuple[str, str] | None:
    """What the class raises on tensors without data of these sizes, and where; None where it runs there.

    met: the failure of its trace, which names sizes by symbols. Where it fails by another kind of error (data that is
    not there, say) nothing is known of eager.
    """
    reason = str(met.facts["reason"])
    if code_of(reason) != FAILED:
        return None
    mode = FakeTensorMode()
    try:
        with mode, torch.no_grad(), without_logs_of_failures(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cls.apply(*[_in_one_mode(a) for a in args])
    except Exception as error:
        # An error that speaks of the stand-in itself says nothing of a tensor with data.
        if reason.startswith(f"{type(error).__name__}:") and FakeTensor.__name__ not in str(error):
            return f"forward raises {type(error).__name__}: {error}", where_raised(error)
    return None


def _in_one_mode(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
