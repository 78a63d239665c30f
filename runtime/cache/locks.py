"""Locks between processes and threads: one makes a thing, the others wait and find it made.

A lock is a locked file. The kernel unlocks it when its process dies, so none outlives its owner; a child that was
forked meanwhile closes its copy. A lock that cannot be had in time costs double work, nothing else.
"""

from __future__ import annotations

import errno
import os
import time
import weakref
from contextlib import suppress
from typing import Any

from .private_folder import Folder

fcntl: Any
try:
    import fcntl
except ImportError:  # not a Unix: each process works for itself
    fcntl = None

NAP = 0.02
ATTEMPTS = 100
"""Tries for a file that turns out to be a removed one once it is locked: each time another process was done."""
NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)
_OPEN = os.O_RDWR | os.O_CREAT | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))


class FileLock:
    """A locked file: until `release`, until nothing refers to it, or until the process ends."""

    def __init__(self, folder: Folder, name: str, descriptor: int) -> None:
        self.name, self.descriptor, self.folder_fd = name, descriptor, os.dup(folder.fd)
        self.is_held = True
        _all.add(self)

    def release(self) -> None:
        """Remove the file while it is ours, then unlock it: who waits for it sees that, and opens another."""
        if not self.is_held:
            return
        with suppress(OSError):
            os.unlink(self.name, dir_fd=self.folder_fd)
        with suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # a forked child may have the descriptor, too
        self.close()

    __del__ = release

    def close(self) -> None:
        """Close the descriptors, which unlocks where no other process has them."""
        self.is_held = False
        for descriptor in (self.descriptor, self.folder_fd):
            with suppress(OSError):
                os.close(descriptor)


_all: weakref.WeakSet[FileLock] = weakref.WeakSet()


def is_held_here(name: str) -> bool:
    """True where this process has the lock: to wait for it may be to wait for oneself."""
    return any(c.name == name and c.is_held for c in tuple(_all))


def _close_in_child() -> None:
    for lock in [c for c in _all if c.is_held]:
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def claim(folder: Folder, name: str, seconds: float) -> FileLock | None:
    """The lock of that name, waited for at most so long; None where it cannot be had, or there are no locks here."""
    deadline = time.monotonic() + seconds
    for _ in range(ATTEMPTS if fcntl else 0):
        descriptor = _opened(folder, name)
        if descriptor is None:
            return None
        try:
            if not _locked(descriptor, deadline):
                break
            if _is_current(descriptor, folder, name):
                lock = FileLock(folder, name, descriptor)
                descriptor = None
                return lock
        finally:
            if descriptor is not None:
                os.close(descriptor)
    return None


def _opened(folder: Folder, name: str) -> int | None:
    try:
        return os.open(name, _OPEN, 0o600, dir_fd=folder.fd)
    except OSError as error:
        if error.errno in NO_FILE:
            folder.remove(name)  # a link, a folder, a device: no lock
        return None


def _locked(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(NAP)
        except OSError:  # a file system without locks
            return False


def _is_current(descriptor: int, folder: Folder, name: str) -> bool:
    """True where the file that was locked is still the one of that name."""
    try:
        mine, named = os.fstat(descriptor), folder.stat(name)
    except OSError:
        return False
    return (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)


def remove_stale(folder: Folder, seconds: float) -> None:
    """Lock files that killed processes left, if no process holds them now."""
    for name in folder.names():
        with suppress(OSError):
            if abs(time.time() - folder.stat(name).st_mtime) > seconds and (lock := claim(folder, name, 0.0)):
                lock.release()


__all__ = ["FileLock", "claim", "is_held_here", "remove_stale"]
