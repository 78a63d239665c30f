"""torch's aids for debugging look away from a capture: what it does on fakes is none of the user's calls.

Under anomaly mode every node would keep the node that runs, and so a graph that stays would keep a call's tensors; and
torch logs each error of a method on fakes, which the user then gets again, once, from the call itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..torch_private import FakeTensorMode

_LOG = logging.getLogger(FakeTensorMode.__module__)
_FAILED = "failed while attempting to run meta"


@contextmanager
def without_anomaly_mode() -> Iterator[None]:
    """Within the block nodes of autograd neither keep stacks and parents nor look for NaN."""
    if not torch.is_anomaly_enabled():
        yield
        return
    check_nan = torch.is_anomaly_check_nan_enabled()
    torch.set_anomaly_enabled(False)
    try:
        yield
    finally:
        torch.set_anomaly_enabled(True, check_nan)


@contextmanager
def without_logs_of_failures() -> Iterator[None]:
    """Within the block torch does not log, from this thread, that an operation fails on fakes."""
    thread = threading.get_ident()

    def is_told(record: logging.LogRecord) -> bool:
        return record.thread != thread or not str(record.msg).startswith(_FAILED)

    _LOG.addFilter(is_told)
    try:
        yield
    finally:
        _LOG.removeFilter(is_told)


_RECORDS = logging.getLogger("torch.__trace")


@contextmanager
def without_structured_logs() -> Iterator[None]:
    """Within the block torch makes no record, with a stack, of every guard, for handlers of all loggers.

    pytest does. What torch itself writes where TORCH_TRACE asks for it stays.
    """
    listening = list(_RECORDS.handlers)
    if not listening or any(type(h).__module__.startswith("torch.") for h in listening):
        yield
        return
    _RECORDS.handlers = []
    try:
        yield
    finally:
        _RECORDS.handlers = [*listening, *_RECORDS.handlers]
