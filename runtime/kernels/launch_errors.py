"""Failures of a group's launch after which another way is left: resources that a device lacks, memory, a compiler.

An error that may have written something (an illegal address) is none of these: it goes to the caller.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import torch

LACKS_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")
LACKS_RESOURCES = (
    "invalid argument", "invalid configuration", "too many resources", "out of resources", "invalid device function",
    "no kernel image", "invalid image", "image is invalid", "not supported", "jit compiler not found", "invalid ptx",
)  # fmt: skip
"""What the driver says, by `Triton Error [...]`, of a kernel that it did not start."""
LACKS_A_COMPILER = ("failed to find c compiler", "ptxas", "gcc", "ld.lld")


@dataclass(frozen=True)
class LaunchFailure:
    """`lacks`: "memory", which the next call may find, or "resources", which these kernels never will."""

    lacks: str
    reason: str


def launch_failure(error: BaseException) -> LaunchFailure | None:
    """Classify an error of an allocation or of a launch; None where nothing else may be tried.

    The frames that the error came through are cleared then: they hold what the launch was given.
    """
    failure = _classify(error)
    if failure is not None:
        traceback.clear_frames(error.__traceback__)
    return failure


def _classify(error: BaseException) -> LaunchFailure | None:
    text = str(error).strip()
    first, lower = (text.splitlines() or [""])[0], text.lower()
    reason = f"{type(error).__name__}: {first}" if first else type(error).__name__
    # Memory first: Python and torch have a class for it.
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return LaunchFailure("memory", reason)
    if type(error).__module__.startswith("triton."):  # before anything was launched: a compilation, shared memory
        return LaunchFailure("resources", reason)
    if isinstance(error, OSError):  # of the compiler's own files: a full disk, no file left to be opened
        return LaunchFailure("resources", reason)
    if not isinstance(error, RuntimeError):
        return None
    # The rest are RuntimeErrors, told apart by their words alone.
    if any(words in lower for words in LACKS_MEMORY):
        return LaunchFailure("memory", reason)
    started = LACKS_RESOURCES if lower.startswith("triton error") else LACKS_A_COMPILER
    return LaunchFailure("resources", reason) if any(words in lower for words in started) else None
