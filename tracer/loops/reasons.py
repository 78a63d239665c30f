"""Why a loop over a size stays unrolled."""

from __future__ import annotations

LATE_STEPS = "what it does in late steps is not to be seen in short ones"
"""Where a graph of short loops is not the method in a longer one."""


class NotRolled(Exception):
    """A loop stays as many operations as it has steps. Internal: the reason is put on record."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class LoopFailure(NotRolled):
    """What kept one of several loops from being rolled as it was cut; with other steps apart it may be."""

    def __init__(self, loop: int, reason: str) -> None:
        super().__init__(reason)
        self.loop = loop
