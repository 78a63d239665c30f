"""Functions of other packages that a capture comes to: what they read counts from then on, as the method's reads do.

A method's control flow is that of every call with its key, so what a capture does not come to, no such call runs. What
such a function changes is seen by what has changed: caches are filled once, and then the method is captured.
"""

from __future__ import annotations

import types
from typing import Any

from .attributes import is_a
from .reads import Effect, ForeignFunction, Reads, draws_of, scan_foreign_functions
from .snapshot import CaptureAgain, Snapshot


class Crossing:
    """One capture: told of each function of another package before it runs."""

    def __init__(self, reads: Reads, snapshot: Snapshot, before: dict[str, Any]) -> None:
        self.reads, self.snapshot, self.before = reads, snapshot, before
        self.functions: list[ForeignFunction] = []

    def enter(self, frame: types.FrameType) -> list[Effect]:
        """The effects of the code that a graph would lose; its reads are copied before it runs."""
        code, foreign = frame.f_code, self.reads.foreign
        if code in self.reads.scanned:
            return draws_of(code, frame.f_globals)
        # Its reads, as far as they are not known, are copied now: it may change them when it runs.
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        function = ForeignFunction(code, frame.f_globals, first if is_a(first, type) else None)
        function_reads = scan_foreign_functions((function,), {code}, self.reads.skipped)
        if not foreign.knows(code):
            self.functions.append(function)
            fresh = {path: read for path, read in function_reads.entries.items() if path not in self.before}
            function_reads.entries = fresh
            self.snapshot.add(function_reads)
            self.snapshot.add_globals(code, frame.f_globals)
            self.before |= function_reads.by_path()
        return [*foreign.capture_ending(function_reads.effects), *draws_of(code, frame.f_globals)]

    def leave(self) -> None:
        """From now on the reads of the functions are compared to which the capture came."""
        self.snapshot.is_partial = bool(self.functions)
        if self.functions:
            self.reads.foreign.batches.append(tuple(self.functions))
            self.reads.widen()
        if self.snapshot.has_only_filled():
            raise CaptureAgain(self.snapshot, filled=True)
