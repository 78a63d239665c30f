"""A million calls over a thousand shapes: memory, variants, threads and open files stay what they are.

    python tests/trust/soak.py --calls 1000000 --shapes 1000 --json

Functions, shapes, numbers, backward, transforms and backends are drawn with a seed. The first pass over every shape is
the warm-up; from its end on the resident memory must not grow, and one call in a thousand is compared with eager.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import outcome
import torch
import trust_functions as functions

import fusegrad

Tell = Callable[[dict[str, Any]], None]
CLASSES = tuple(cls for cls in functions.ALL if cls is not functions.Opaque)
GROWTH = 20 << 20
"""Bytes of resident memory that a soak may add after its warm-up."""
COMPARED = 1000
"""One call in so many is compared with eager; one in INTERPRETED runs the generated text, one in MAPPED under vmap."""
INTERPRETED, MAPPED, BACKWARD = 500, 200, 3
FEW = 20
WARM = 100_000
"""Drawn calls after the first pass over all shapes, before the memory is looked at."""
NUMBERED = 400
NUMBERS = 0.25
"""The share of calls of Scale with a number that no call had before."""


@dataclass
class State:
    """What must stay flat."""

    resident: int
    threads: int
    tasks: int
    files: int
    garbage: int
    objects: int
    variants: int

    @classmethod
    def now(cls, compiled: Any) -> State:
        gc.collect()
        variants = sum(len(list(fast._fusegrad.table)) for fast in compiled.values())
        tasks, files = (len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident = pages * os.sysconf("SC_PAGE_SIZE")
        threads, garbage, objects = threading.active_count(), len(gc.garbage), len(gc.get_objects())
        return cls(resident, threads, tasks, files, garbage, objects, variants)


@dataclass
class Soak:
    """One run. wrong: calls whose result was not eager's."""

    shapes: list[tuple[int, int]]
    seed: int = 0
    classes: tuple[Any, ...] = CLASSES
    wrong: list[str] = field(default_factory=list)
    compared: int = 0
    numbers: int = 0

    def __post_init__(self) -> None:
        self.random, backends = random.Random(self.seed), ("auto", "interpret")
        self.compiled = {(cls, b): fusegrad.compile(cls, backend=b) for cls in self.classes for b in backends}
        self.few, self.given = self.some_of_every_kind(), {}
        for shape in self.shapes:
            self.given[shape] = {cls: functions.arguments(cls, *shape) for cls in self.classes}

    def warm_up(self, drawn: int) -> int:
        """Every Function at every shape, forward and backward, often enough that the quickest way is taken."""
        calls = 0
        for cls in self.classes:
            for shape in self.shapes:
                self.once(cls, shape, "auto", backward=True)
            for shape in self.few:
                self.mapped(cls, shape)
                self.once(cls, shape, "interpret", backward=True)
            calls += len(self.shapes) + 2 * len(self.few)
        for backend in ("auto", "interpret"):
            calls += self.exhaust(backend)
        for at in range(drawn):
            self.call(at)
        return calls + drawn

    def exhaust(self, backend: str) -> int:
        """As many new numbers as are captured at all: on a backend that is seldom called they would come for long."""
        if functions.Scale not in self.classes:
            return 0
        for _ in range(NUMBERED):
            self.once(functions.Scale, self.shapes[-1], backend, backward=True)
        return NUMBERED

    def some_of_every_kind(self) -> list[tuple[int, int]]:
        """The shapes for transforms and interpreted kernels: some of every kind (sizes of one are captured apart)."""
        kinds = {(rows == 1, columns == 1): (rows, columns) for rows, columns in self.shapes}
        return [*kinds.values(), *self.shapes[:: max(1, len(self.shapes) // FEW)]]

    def call(self, at: int) -> None:
        """One call, drawn."""
        special = at % MAPPED == 0 or at % INTERPRETED == 1
        cls, shape = self.random.choice(self.classes), self.random.choice(self.few if special else self.shapes)
        if at % MAPPED == 0:
            return self.mapped(cls, shape)
        backend = "interpret" if special else "auto"
        self.once(cls, shape, backend, at % BACKWARD == 0, at % COMPARED == COMPARED - 1)

    def once(self, cls: Any, shape: tuple[int, int], backend: str, backward: bool, compare: bool = False) -> None:
        args = self.with_number(self.given[shape][cls])
        if compare:
            return self.compare(cls, backend, args)
        y = functions.first(self.compiled[cls, backend].apply(*args))
        if backward:
            torch.autograd.grad(y.sum(), [a for a in args if isinstance(a, torch.Tensor)])

    def with_number(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The number of Scale: one of a few, or one that never was before."""
        if len(args) < 2 or not isinstance(args[1], float):
            return args
        if self.random.random() >= NUMBERS:
            return (args[0], self.random.choice((0.5, 1.0, 2.0)))
        self.numbers += 1
        return (args[0], self.random.random())

    def compare(self, cls: Any, backend: str, args: tuple[Any, ...]) -> None:
        self.compared += 1
        mine, eager = functions.run(self.compiled[cls, backend], args), functions.run(cls, args)
        if not all(torch.allclose(m, e, rtol=1e-4, atol=1e-5) for m, e in zip(mine, eager, strict=True)):
            self.wrong.append(f"{cls.__name__} at {tuple(args[0].shape)} on {backend}")

    def mapped(self, cls: Any, shape: tuple[int, int]) -> None:
        """The gradient of every lane of a batch of two, by torch.func."""
        fast = self.compiled[cls, "auto"]
        args = [a.detach() if isinstance(a, torch.Tensor) else a for a in self.given[shape][cls]]
        x = torch.stack([args[0], args[0] + 1])

        def loss(x: Any) -> Any:
            return functions.first(fast.apply(x, *args[1:])).sum()

        torch.func.vmap(torch.func.grad(loss))(x)


def shapes(count: int) -> list[tuple[int, int]]:
    """(1, 1), (1, 2), ...: rows and columns, all different, none large."""
    columns = max(1, round(count**0.5))
    return [(1 + i // columns, 1 + i % columns) for i in range(count)]


@dataclass
class Course:
    """A run from the end of its warm-up on: what was looked at on the way."""

    run: Soak
    warm: int
    before: State
    started: float
    resident: list[int] = field(default_factory=list)

    def numbers(self, calls: int) -> dict[str, Any]:
        """The outcome after so many calls."""
        after = State.now(self.run.compiled)
        self.resident.append(after.resident - self.before.resident)
        return {
            "calls": calls, "shapes": len(self.run.shapes), "seed": self.run.seed, "warm_up_calls": self.warm,
            "seconds": round(time.perf_counter() - self.started, 1), "distinct_numbers": self.run.numbers,
            "compared_with_eager": self.run.compared, "wrong": self.run.wrong, "growth_bytes": self.resident[-1],
            "growth_course_bytes": list(self.resident), "before": asdict(self.before), "after": asdict(after),
            "flat": is_flat(self.before, after) and not self.run.wrong,
        }  # fmt: skip


def soak(run: Soak, calls: int, tell: Tell, blame: bool = False, warm_calls: int = WARM) -> dict[str, Any]:
    """The numbers of a run, told twenty times on the way. blame: tell what tracemalloc says is left."""
    started = time.perf_counter()
    warm = run.warm_up(warm_calls)
    if blame:
        tracemalloc.start(12)
        snapshot = tracemalloc.take_snapshot()
    course = Course(run, warm, State.now(run.compiled), started)
    for at in range(calls):
        run.call(at)
        if (at + 1) % max(1, calls // 20) == 0:
            tell(course.numbers(at + 1))
    if blame:
        for line in tracemalloc.take_snapshot().compare_to(snapshot, "traceback")[:15]:
            print(f"{line}\n" + "\n".join(line.traceback.format()[-8:]))
    return course.numbers(calls)


def is_flat(before: State, after: State) -> bool:
    """Whether nothing grew."""
    same = (before.threads, before.files, before.garbage) == (after.threads, after.files, after.garbage)
    return same and after.tasks <= before.tasks and after.resident - before.resident < GROWTH


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--calls", type=int, default=1_000_000)
    options.add_argument("--shapes", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--json", action="store_true", help="write benchmarks/results/trust/soak.json")
    options.add_argument("--blame", action="store_true", help="tell which lines allocated what is left")
    chosen = options.parse_args()

    def tell(found: dict[str, Any]) -> None:
        growth, now = found["growth_bytes"] / 2**20, found["after"]
        print(f"{found['calls']} calls, {found['seconds']:.0f} s: {growth:+.1f} MB, {now}", flush=True)
        if chosen.json:
            outcome.write("soak", found)

    found = soak(Soak(shapes(chosen.shapes), chosen.seed), chosen.calls, tell, chosen.blame)
    print(f"growth {found['growth_bytes'] / 2**20:+.1f} MB, {len(found['wrong'])} wrong, flat: {found['flat']}")
    return 0 if found["flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
