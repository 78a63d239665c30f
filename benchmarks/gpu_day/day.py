"""How a slice's minutes are divided: every step has its budget first, then what is left goes to what is left."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .child import Child
from .record import Record
from .steps import Step

STARTS = 2
"""Processes of a step that may fail before they are ready; then it is left, in this slice."""
PATIENCE = {"cuda": 1, "pretended": 3}
"""Times the limit of a unit: what is interpreted takes its time."""
NO_MEMORY = "OutOfMemoryError"
Say = Callable[[str], None]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class _Work:
    """Units that lanes take. until: seconds of the slice that are to be left; crowded: for what found no memory."""

    step: Step
    todo: list[str]
    until: float
    crowded: list[str] | None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> str | None:
        with self.lock:
            return self.todo.pop(0) if self.todo else None


@dataclass
class Day:
    """One slice. minutes: of the wall. again: what failed is tried once more. changed: after every result."""

    record: Record
    kind: str
    minutes: float
    environment: Mapping[str, str]
    again: bool = False
    changed: Callable[[Record], None] = lambda record: None
    say: Say = _say
    began: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def left(self) -> float:
        """Seconds of the slice."""
        return 60 * self.minutes - (time.monotonic() - self.began)

    def run(self, steps: Sequence[Step]) -> bool:
        """Whether everything has a result. First every step within its budget, in their order; then without."""
        for step in steps:
            self._step(step, step.budget - self.record.seconds(step.name))
        for step in steps:
            self._step(step, float("inf"))
        self.record.spend(time.monotonic() - self.began)
        self.record.write()
        return not any(self.record.left(step, self.again) for step in steps)

    def _step(self, step: Step, budget: float) -> None:
        """Units as long as the step and the slice have time for one; several at once where the step allows it."""
        crowded: list[str] = []
        todo = self.record.left(step, self.again)
        jobs = min(step.jobs, len(todo)) if self.kind == "cuda" else 1
        work = _Work(step, todo, self.left - budget / max(1, jobs), crowded if jobs > 1 else None)
        lanes = [threading.Thread(target=self._lane, args=(work,), daemon=True) for _ in range(jobs)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        if crowded:  # there was no memory for several at once
            self._lane(_Work(step, crowded, work.until, None))

    def _lane(self, work: _Work) -> None:
        """One process that takes units until none is left, or there is no time."""
        step, child, failures = work.step, Child(self.kind, work.step.body, self.environment), 0
        try:
            while self.left >= step.least and self.left > work.until and failures < STARTS:
                if (unit := work.take()) is None:
                    return
                self.say(f"{60 * self.minutes - self.left:5.0f} s  {step.name}  {unit}  ({len(work.todo)} more)")
                failures += not self._unit(work, unit, child)
        finally:
            child.stop()

    def _unit(self, work: _Work, unit: str, child: Child) -> bool:
        """Ask for one and write what came. Whether the process began at all."""
        step = work.step
        found = child.ask(unit, step.limit * PATIENCE[self.kind], self.left)
        begun = bool(found.pop("started", True))
        if work.crowded is not None and any(NO_MEMORY in fault for fault in found["faults"]):
            work.crowded.append(unit)
            return begun
        with self.lock:
            self.record.spend(time.monotonic() - self.began)
            if found["outcome"] == "hung" and self.left <= 0:
                self.record.interrupt(step.name, unit, found)
                found = {**found, "outcome": "interrupted"}
            else:
                self.record.put(step.name, unit, found)
            if found["outcome"] not in ("ok", "skipped"):
                self.say(f"         {unit}: {found['outcome']}: {'; '.join(found['faults'])[:300]}")
            self.changed(self.record)
        return begun


def one_answer(kind: str, body: str, unit: str, environment: Mapping[str, str], limit: float) -> dict[str, Any]:
    """What a process of its own answers to one unit."""
    child = Child(kind, body, environment)
    try:
        return child.ask(unit, limit, limit)
    finally:
        child.stop()
