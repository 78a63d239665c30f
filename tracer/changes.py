"""Which effects change something around a method, by the words of their reason."""

from __future__ import annotations

import re

_CHANGE = re.compile(r"it (assigns|changes|registers)|it calls `(\w+` of an? .* from outside|(setattr|exec|eval)`)")
_OF_OBJECT = re.compile(r"it changes|it calls `\w+` of an? .* from outside")


def is_change(reason: str) -> bool:
    """Whether something is assigned, changed or registered."""
    return _CHANGE.match(reason) is not None


def is_change_of_object(reason: str) -> bool:
    """Whether that is within an object, whose content tells afterwards."""
    return _OF_OBJECT.match(reason) is not None
