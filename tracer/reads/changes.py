"""Of which kind an effect is, by the words of its reason."""

from __future__ import annotations

import re

_CHANGE = re.compile(r"it (assigns|changes|registers)|it calls `(\w+` of an? .* from outside|(setattr|exec|eval)`)")
_SHOWN = re.compile(r"it (assigns the global|changes)|it calls `(\w+` of an? .* from outside|setattr`)")


def is_change(reason: str) -> bool:
    """True if something is assigned, changed or registered."""
    return _CHANGE.match(reason) is not None


def is_shown(reason: str) -> bool:
    """True if the change is seen afterwards: in what an object holds, or in what a global is."""
    return _SHOWN.match(reason) is not None


_ASKED = re.compile(r"it calls `(id|hash|repr|globals|locals|eval|exec|breakpoint)`")


def is_question(reason: str) -> bool:
    """True if Python is asked about itself: packages do that for tables and messages, of dtypes and of their own."""
    return _ASKED.match(reason) is not None
