"""Kill -9 during captures, compilations and writes of the cache, then start again: right, and nobody is left behind.

    python tests/trust/kills.py --count 100 --seed 1 --json

Four kinds in turn: the process at a random moment; one of its compile workers; both at once; and the process by itself
at the n-th call that it makes to the system for the cache, which finds the short moments of a write.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import forked
import outcome

from fusegrad.runtime.cache import locks as claims
from fusegrad.runtime.cache import private_folder as folder
from fusegrad.runtime.cache import store as cache

PATIENCE = 240.0
ORPHAN_SECONDS = 15.0
CALLS = ("open", "mkdir", "write", "rename", "fchmod", "chmod", "utime", "unlink", "close")
"""What the cache asks of the system; a process that is to die at one of them counts them."""
KINDS = ("process", "worker", "both", "call")


# ------------------------------------------------------------------ what is killed, and when
class DyingAt:
    """The work of a process that kills itself at the n-th call for the cache; without n it counts them."""

    def __init__(self, work: Callable[[], dict[str, Any]], number: int | None) -> None:
        self.work, self.number, self.count = work, number, 0

    def __call__(self) -> dict[str, Any]:
        for module in (folder, claims):
            module.os = _Counted(self)  # type: ignore[attr-defined]
        return {**self.work(), "calls": self.count}

    def called(self) -> None:
        self.count += 1
        if self.count == self.number:
            os.kill(os.getpid(), signal.SIGKILL)


class _Counted:
    """The module os, which tells of each call."""

    def __init__(self, told: DyingAt) -> None:
        self.told = told

    def __getattr__(self, name: str) -> Any:
        if name in CALLS:
            self.told.called()
        return getattr(os, name)


def killed(kind: str, process: forked.Forked, token: str, moment: float) -> bool:
    """Wait for the moment, then kill; False where what was to be killed was not there (yet, or any more)."""
    time.sleep(moment)
    workers = [pid for pid in forked.running(token) if pid != process.pid] if kind in ("worker", "both") else []
    victims = {"process": [process.pid], "worker": workers[:1], "both": [process.pid, *workers], "call": []}[kind]
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(victims)


# ------------------------------------------------------------------ one kill
@dataclass
class Found:
    """What became of the kills."""

    kinds: Counter[str] = field(default_factory=Counter)
    ended_before: Counter[str] = field(default_factory=Counter)
    found_entries: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    locked: list[str] = field(default_factory=list)
    left: int = 0
    slowest: float = 0.0

    @property
    def ok(self) -> bool:
        return not (self.wrong or self.failed or self.orphans or self.locked)


@dataclass
class Normal:
    """One run that nobody kills: what is right, how long it takes, how many calls it makes."""

    answer: dict[str, Any]
    seconds: float
    calls: int


def normal(work: Callable[[], dict[str, Any]], root: Path) -> Normal:
    """The second of two runs, each on an empty cache: the first takes longer."""
    once_normal(work, root / "first")
    return once_normal(work, root / "second")


def once_normal(work: Callable[[], dict[str, Any]], root: Path) -> Normal:
    began = time.monotonic()
    process = forked.Forked(DyingAt(work, None), root, "normal")
    status = process.wait(PATIENCE)
    answer = process.answer()
    assert status == 0 and answer is not None, answer
    return Normal(answer, time.monotonic() - began, answer["calls"])


def once(kind: str, chance: random.Random, work: Any, usual: Normal, root: Path, found: Found) -> bool:
    """Begin on an empty cache, kill, and begin again on what is left. Whether there still was something to kill."""
    label = f"{root.name} {kind}"
    number = chance.randrange(1, usual.calls + 1) if kind == "call" else None
    first = forked.Forked(DyingAt(work, number) if number else work, root, root.name)
    hit = killed(kind, first, root.name, 0.0 if number else chance.uniform(0.0, usual.seconds))
    status = first.wait(PATIENCE)
    if kind == "worker":
        judge(first, usual, f"{label}, with a worker killed", found)
    in_time = bool(hit or number) and (status != 0 or kind == "worker")
    (found.kinds if in_time else found.ended_before)[kind] += 1
    if orphans := forked.left_after(root.name, ORPHAN_SECONDS):
        found.orphans.append(f"{label}: {len(orphans)}")
    found.found_entries[len(list(root.glob("cache/v1/entries/*/*")))] += 1
    again(label, work, usual, root, found)
    return in_time


def again(label: str, work: Any, usual: Normal, root: Path, found: Found) -> None:
    """The run after the kill, and what it leaves."""
    began = time.monotonic()
    second = forked.Forked(work, root, root.name)
    second.wait(PATIENCE)
    found.slowest = max(found.slowest, time.monotonic() - began)
    judge(second, usual, f"{label}, started again", found)
    if forked.left_after(root.name, ORPHAN_SECONDS):
        found.orphans.append(f"{label}, started again")
    if held_locks(root / "cache"):
        found.locked.append(label)
    found.left += len(list(root.glob("cache/v1/tmp/*"))) + len(list(root.glob("fusegrad-*")))


def judge(process: forked.Forked, usual: Normal, label: str, found: Found) -> None:
    answer = process.answer() or {"error": "killed or hung"}
    if "error" in answer:
        found.failed.append(f"{label}: {answer['error']}")
    elif any(answer[n] != usual.answer[n] for n in ("tensors", "binaries")):
        found.wrong.append(label)


TRIES = 10
"""How often, at most, for a kill that is to come in time."""


def held_locks(root: Path) -> list[str]:
    """Locks that nobody can take although every process is gone."""
    store = cache.Cache(root)
    names = [path.name for path in root.glob("v1/locks/*")]
    taken = {name: store.claim(name, 0.0) for name in names}
    return [name for name, claim in taken.items() if claim is None]


# ------------------------------------------------------------------ the run
def run(count: int, seed: int, work: Any, place: Path, kinds: tuple[str, ...] = KINDS) -> tuple[Found, Normal]:
    """`count` kills that came in time, of the kinds in turn; one that came too late is tried again."""
    chance, found = random.Random(seed), Found()
    usual, hits = normal(work, place / "normal"), 0
    for at in range(TRIES * count):
        hits += once(kinds[hits % len(kinds)], chance, work, usual, place / f"kill{at}", found)
        if hits == count:
            break
    return found, usual


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/trust/kills.json")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        found, usual = run(options.count, options.seed, forked.Work(), Path(place))
    lists = {name: len(getattr(found, name)) for name in ("wrong", "failed", "orphans", "locked")}
    told = {
        "kills": found.kinds.total(), "seed": options.seed, **lists, "by_kind": dict(found.kinds),
        "came_too_late": dict(found.ended_before), "entries_left": dict(sorted(found.found_entries.items())),
        "entries_of_a_whole_run": len(usual.answer["written"]), "folders_left_for_the_sweep": found.left,
        "seconds_of_the_slowest_restart": round(found.slowest, 1), "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    print(json.dumps(told, indent=1))
    for name in lists:
        for line in getattr(found, name)[:10]:
            print(f"{name}: {line}")
    if options.json:
        print(outcome.write("kills", told))
    return 0 if found.ok else 1


if __name__ == "__main__":
    sys.exit(main())
