"""The locks of this process. A fork waits for them, so that no child finds one held for ever, or a capture half done.

Where a thread does not let go in time (it may be waiting for the one that forks), the child gets the lock anew.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

PATIENCE = 20.0
"""Seconds for which a fork waits for what other threads are doing under a lock."""
CLASS, CAPTURE, KERNEL, INNER = range(4)
"""The order in which a thread takes locks: for a class, a capture, an interpreted kernel, a table."""

_known: list[tuple[int, Any]] = []
_here = threading.local()  # `taken`: by the fork of this thread


def lock_of(rank: int) -> Any:
    """A lock that its holder may take again."""
    lock = threading.RLock()
    _known.append((rank, lock))
    return lock


def _acquired() -> Iterator[Any]:
    """Every lock in its order, but for those that are not let go of in time."""
    deadline = time.monotonic() + PATIENCE
    for _, lock in sorted(_known, key=lambda known: known[0]):
        if lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            yield lock


def _take_all() -> None:
    _here.taken = list(_acquired())


def _let_go() -> None:
    for lock in reversed(_here.taken):
        lock.release()
    _here.taken = []


def _let_go_in_child() -> None:
    for _, lock in _known:
        if lock not in _here.taken:
            lock._at_fork_reinit()  # its holder does not exist here
    _let_go()


# At the end of the process no thread is left within a capture: one that is stopped in C++ code aborts it. Threads that
# the process waits for have ended by then: this module comes with `import fusegrad`, so that handlers which a user
# registers afterwards, and which may wait for a thread that captures, run before this one.
atexit.register(_take_all)
os.register_at_fork(before=_take_all, after_in_parent=_let_go, after_in_child=_let_go_in_child)
