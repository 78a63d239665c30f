"""Counters of what the compiler did in this process."""

from __future__ import annotations

from ...tracer.locks import INNER, lock_of

COUNTERS = ("captures", "from_disk", "compiles", "cache_hits", "fallbacks")

_counts = dict.fromkeys(COUNTERS, 0)
_lock = lock_of(INNER)


def count(name: str, by: int = 1) -> None:
    """Add to a counter."""
    with _lock:
        _counts[name] += by


def stats() -> dict[str, int]:
    """Counters of what the compiler did in this process.

    Returns:
        By name: "captures": methods traced; "from_disk": traces of a class that another process had left; "compiles":
            kernels generated, and graphs prepared for the other backends; "cache_hits": kernels or binaries found
            again; "fallbacks": methods that fell back to eager.
    """
    with _lock:
        return dict(_counts)


def reset() -> None:
    """All counters back to zero."""
    with _lock:
        _counts.update(dict.fromkeys(COUNTERS, 0))
