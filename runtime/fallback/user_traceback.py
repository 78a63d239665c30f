"""The traceback of an error that leaves a compiled call: the user's own frames, as if torch had called their method.

The boundary is where a call comes in from the user, or a backward from autograd's engine. FUSEGRAD_DEBUG=1 shows all.
"""

from __future__ import annotations

import types
from contextlib import suppress

from ...ir.errors import FusegradError
from ...tracer.capture.capture import is_capturing
from ...tracer.frames import TORCH, is_user_file
from ...tracer.opaque.watching import watcher
from ..settings.config import settings

USERS = "_fusegrad_users"
"""The attribute of an error that was found to be the user's: its frames no longer tell."""
GENERATED = ("<fusegrad", "<string>", "<frozen")


def hide_own_frames(error: BaseException) -> None:
    """Take fusegrad's frames out of an error's traceback, in place, and our own errors out of what led to it.

    To be followed by a bare `raise`, which adds no frame of the function in which it stands.
    """
    if _shows_all() or is_capturing() or watcher() is not None:
        return
    with suppress(Exception):
        setattr(error, USERS, True)
        error.__traceback__ = _users_steps(error.__traceback__)
        _cut_own_errors(error)


def _shows_all() -> bool:
    try:
        return settings().debug
    except FusegradError:  # a setting that is wrong: it is what the error says
        return False


def _users_steps(tb: types.TracebackType | None) -> types.TracebackType | None:
    """The steps in the user's files, and those in torch that came of them."""
    kept: list[types.TracebackType] = []
    is_ours = True  # what comes next was called by us
    while tb is not None:
        file = tb.tb_frame.f_code.co_filename
        if is_user_file(file) and not file.startswith(GENERATED):
            if not (is_ours and kept and _place(kept[-1]) == _place(tb)):  # a line of theirs that runs as a segment
                kept.append(tb)
            is_ours = False
        elif not file.startswith(TORCH):
            is_ours = True
        elif not is_ours:
            kept.append(tb)
        tb = tb.tb_next
    steps: types.TracebackType | None = None
    for step in reversed(kept):
        steps = types.TracebackType(steps, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return steps


def _place(tb: types.TracebackType) -> tuple[str, int]:
    return tb.tb_frame.f_code.co_filename, tb.tb_lineno


def _cut_own_errors(error: BaseException) -> None:
    """Where an error was raised while we handled one of ours, that one goes."""
    visited: set[int] = set()
    led: BaseException | None = error
    while led is not None and id(led) not in visited:
        visited.add(id(led))
        if led.__cause__ is not None and _is_ours(led.__cause__):
            led.__cause__ = None
        if led.__context__ is not None and _is_ours(led.__context__):
            led.__context__ = None
        led = led.__cause__ or led.__context__


def _is_ours(error: BaseException) -> bool:
    """True if an error was caught in our own code."""
    tb = error.__traceback__
    if tb is None:
        return type(error).__module__.startswith(__name__.partition(".")[0] + ".")
    file = tb.tb_frame.f_code.co_filename
    return not is_user_file(file) and not file.startswith(TORCH)
