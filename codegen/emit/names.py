"""Names for the emitted text: the user's own where there are any, none twice, none that Python or Triton owns."""

from __future__ import annotations

import keyword
import re
import string
from collections.abc import Iterable

LABELS = {
    "PROGRAMS", "ITEMS", "TOTAL", "GROUP", "GROUPS", "FAN", "STRIPS", "PRECISION",
    *(f"{kind}_{letter}" for kind in ("BLOCK", "OWN") for letter in string.ascii_uppercase),
}  # fmt: skip
"""The constants of kernels, which have the same names in all of them."""
RESERVED = frozenset(keyword.kwlist) | {
    "tl", "triton", "libdevice", "range", "float", "int", "bool", "min", "max", "sum", "abs", "pow", "print", "len",
    "constexpr", "static_range", "cdiv", "minimum", "maximum", "self",
}  # fmt: skip


def identifier(text: str | None) -> str:
    """The text as a plain ASCII identifier, or "" where nothing is left of it."""
    word = re.sub(r"[^0-9A-Za-z_]+", "_", text or "").strip("_")
    return f"v{word}" if word[:1].isdigit() else word


class Names:
    """Hands out each name once: x, x_2, x_3 .."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._taken = set(RESERVED) | set(reserved)

    def fresh(self, wish: str | None, otherwise: str = "v") -> str:
        base = identifier(wish) or otherwise
        chosen, number = base, 2
        while chosen in self._taken:
            chosen, number = f"{base}_{number}", number + 1
        self._taken.add(chosen)
        return chosen

    def release(self, texts: Iterable[str]) -> None:
        """Names of a block that is closed: its neighbours may use them again."""
        self._taken.difference_update(texts)

    def taken(self, text: str) -> bool:
        return text in self._taken
