"""Who decides about nested calls in this thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol


class Watcher(Protocol):
    """Decides what becomes of a nested call: `apply(*args, **kwargs)` runs it as it is."""

    def __call__(self, what: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def unseen(self, what: Any) -> None:
        """A call runs already about which no watcher was asked; may raise, in the place of the call."""


watching_now = threading.local()
"""`watcher`: who decides in this thread."""


def watcher() -> Watcher | None:
    """Who watches in this thread."""
    return getattr(watching_now, "watcher", None)
