"""The watcher of nested calls of this thread, which decides what becomes of each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol


class Watcher(Protocol):
    """Decides what becomes of a nested call: `apply(*args, **kwargs)` runs it as it is."""

    def __call__(self, callee: Any, apply: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any: ...

    def note_unseen_call(self, callee: Any) -> None:
        """A call runs already about which no watcher was asked; may raise, in the place of the call."""


watching_now = threading.local()
"""`watcher`: the one of this thread."""


def watcher() -> Watcher | None:
    """The watcher of this thread; None without one."""
    return getattr(watching_now, "watcher", None)
