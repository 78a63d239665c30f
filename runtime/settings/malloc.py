"""Large blocks of CPU memory kept by the process from one call to the next, where it asks for that.

glibc hands blocks from 128 kB to 32 MB on back to the system when they are freed, and the page faults of the next one
cost more than most arithmetic on it. Within its heap it would keep them: two of its thresholds decide (mallopt(3)).
They are the process's own: everything in it allocates so from then on, eager code too.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from dataclasses import dataclass
from typing import Any

from ...tracer.locks import INNER, lock_of

VARIABLE = "FUSEGRAD_RECYCLE_MEMORY"
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""mallopt's numbers for M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""
LARGEST = 1 << 30
"""Blocks up to this size are recycled; each larger one is still the system's."""
RECYCLING = ((MMAP_THRESHOLD, LARGEST), (TRIM_THRESHOLD, -1))
USUAL = ((MMAP_THRESHOLD, 32 << 20), (TRIM_THRESHOLD, 64 << 20))
"""What glibc itself comes to where large blocks are freed; once set, they stay."""

NEEDED = ("gnu_get_libc_version", "mallopt", "malloc_trim", "malloc")
OTHER_LIBRARY = "the process's C library is not glibc: it has no thresholds to set (musl, macOS, Windows)"
OTHER_ALLOCATOR = "another allocator than glibc's is loaded into the process: it has settings of its own"


@dataclass(frozen=True)
class State:
    """recycles: whether large blocks are kept at present. possible: whether they can be; why: a sentence on both."""

    recycles: bool
    possible: bool
    why: str


class RecyclingWarning(UserWarning):
    """Recycling was asked for where the process has no allocator that can be told to."""


_recycles = False
_warned = False
_lock = lock_of(INNER)


def state() -> State:
    """Whether large blocks of CPU memory are recycled, and why not."""
    refused = _refusal()
    if refused is not None:
        return State(False, False, refused)
    if _recycles:
        return State(True, True, f"freed blocks up to {LARGEST >> 20} MB stay with the process")
    return State(False, True, f"off: fusegrad.config.recycle_memory(), or {VARIABLE}=1, turns it on")


def recycle(on: bool = True) -> State:
    """Keep freed large blocks for the next ones, or give them back again; warns once where that cannot be had."""
    global _recycles
    with _lock:
        refused = _refusal()
        if refused is None:
            accepted = [_libc().mallopt(*option) == 1 for option in (RECYCLING if on else USUAL)]
            _recycles = on and all(accepted)
            if not on:
                _libc().malloc_trim(0)
        elif on:
            _warn(refused)
    return state()


def release() -> None:
    """Give what is free at present back to the system; recycling, where it is on, goes on."""
    if _refusal() is None:
        _libc().malloc_trim(0)


def recycle_where_asked() -> None:
    """What the environment asks for."""
    if os.environ.get(VARIABLE, "0") not in ("", "0"):
        recycle()


def _libc() -> Any:
    return ctypes.CDLL(None)


def _refusal() -> str | None:
    """Why nothing can be recycled; None where it can."""
    try:
        process, own = _libc(), ctypes.CDLL("libc.so.6")
    except (OSError, TypeError):
        return OTHER_LIBRARY
    if not all(hasattr(process, name) for name in NEEDED):
        return OTHER_LIBRARY
    return None if _address(process.malloc) == _address(own.malloc) else OTHER_ALLOCATOR


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


def _warn(why: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"large blocks of memory are not recycled: {why}", RecyclingWarning, stacklevel=3)
