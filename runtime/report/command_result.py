"""The result of a command: facts for programs, blocks for people, and an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .terminal import Block

OK, USERS, MISMATCH, INTERNAL = range(4)
"""Exit codes: as asked for; a mistake in what was asked; compiled and eager differ; a mistake of fusegrad."""


@dataclass(frozen=True)
class CommandResult:
    """facts: what --json prints. blocks: what is printed otherwise."""

    facts: Any
    blocks: Sequence[Block] = ()
    code: int = OK
