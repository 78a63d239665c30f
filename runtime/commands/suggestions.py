"""The known name that was meant by an unknown one. Needs no torch: a mistyped command is answered at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggestion(name: str, candidates: Iterable[str]) -> str | None:
    """The known name that looks most like this one, if any does."""
    names = list(candidates)
    folded = {n.lower(): n for n in reversed(names)}
    near = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    return folded[near[0]] if near else None
