"""The known name that was meant by an unknown one. Needs no torch: a mistyped command is answered at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

ALIKE = 0.6
"""How much of two names is the same, at least, from 0 to 1."""


def suggestion(name: str, candidates: Iterable[str], alike: float = ALIKE) -> str | None:
    """The known name that looks most like this one, if any does. "vmap in_dims=0" is known by its first word, too."""
    names = list(candidates)
    folded = {re.split(r"[ (]", n.lower())[0]: n for n in reversed(names)} | {n.lower(): n for n in reversed(names)}
    near = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=alike)
    return folded[near[0]] if near else None


def meant(name: str, candidates: Iterable[str]) -> str:
    """ "did you mean fuse? ", to be put before the names that there are; "" where none is alike."""
    near = suggestion(name, candidates)
    return f"did you mean {near}? " if near else ""
