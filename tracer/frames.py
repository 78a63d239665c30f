"""Where code is: torch's, this package's, or the user's; and the frame of theirs in which something happened."""

from __future__ import annotations

import os
import sys
import traceback
import types
import warnings

import torch

TORCH = os.path.dirname(torch.__file__) + os.sep
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
ROOMS = ("ir", "tracer", "codegen", "runtime")
_FOLDERS = tuple(
    root + room + os.sep
    for root in dict.fromkeys((OURS, os.path.join(os.path.realpath(OURS), "")))  # through a link, too
    for room in ROOMS
)


def user_frame() -> types.FrameType | None:
    """The innermost frame outside torch and fusegrad's own rooms."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def warn_user(message: str, category: type[Warning]) -> None:
    """A warning at the user's innermost line; at the caller's where the stack has none (autograd's own threads)."""
    frame = user_frame()
    if frame is None:
        warnings.warn(message, category, stacklevel=2)
        return
    names = frame.f_globals
    registry, module = names.setdefault("__warningregistry__", {}), names.get("__name__")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def user_line() -> str:
    """`file:line` of that frame."""
    frame = user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "unknown"


def is_user_file(filename: str) -> bool:
    """True if a file is neither torch's, nor of this package (its rooms, generated text), nor a frozen module."""
    return not filename.startswith((TORCH, *_FOLDERS, "<frozen", "<fusegrad"))


def where_raised(error: BaseException) -> str:
    """`file:line` of the last user frame that the error passed through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_file(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"
