"""Keeps the entries on disk below a limit: those used longest ago go, once an hour for all processes together."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress

from ..settings import logs
from . import locks
from .disk_entries import DiskEntries
from .entry_files import STALE_SECONDS, time_of
from .private_folder import Damaged

SWEEP_SECONDS = 3600.0
SWEPT = "swept"
"""The file whose time says when entries were swept last."""


def is_due(disk: DiskEntries, always: bool) -> bool:
    """True where this process is to sweep: its turn after an hour, or always; notes that it was done."""
    with suppress(OSError, Damaged), ExitStack() as folders:
        top = disk.top(folders)
        if not always and abs(time.time() - time_of(top, SWEPT)) < SWEEP_SECONDS:
            return False
        top.remove(SWEPT)
        top.write(SWEPT, b"")
        return True
    return False


def sweep(disk: DiskEntries, limit: int) -> None:
    """Delete the entries used longest ago until the rest fits, and what killed processes left."""
    entries = disk.entries()
    total = sum(size for _, size, _ in entries)
    for _, size, name in entries:
        if total <= limit:
            break
        logs.cache.info("evicted: %s, %d bytes", name[:16], size)
        disk.drop(name)
        total -= size
    _remove_stale(disk)


def _remove_stale(disk: DiskEntries) -> None:
    """Remove what killed processes left: entries half written, and locks."""
    with suppress(OSError, Damaged), ExitStack() as folders:
        tmp = disk.folder(folders, "tmp", make=True)
        for name in tmp.names():
            if abs(time.time() - time_of(tmp, name)) > STALE_SECONDS:
                tmp.remove(name)
        locks.remove_stale(disk.folder(folders, "locks", make=True), STALE_SECONDS)
