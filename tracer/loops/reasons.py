"""Why a loop over a size stays unrolled."""

from __future__ import annotations

LATE_STEPS = "what it does in late steps is not to be seen in short ones"
"""Where a graph of short loops is not the method in a longer one."""


class NotRolled(Exception):
    """A loop stays as many operations as it has steps. Internal: the reason is put on record."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class OtherSteps(NotRolled):
    """Its steps are not the same ones each time, or the method does not take such a length: steps that come round, or
    that take so much of a size each, may be."""


class LoopFailure(NotRolled):
    """What kept one of several loops from being rolled as it was cut; with other steps apart it may be."""

    def __init__(self, loop: int, reason: str) -> None:
        super().__init__(reason)
        self.loop = loop
