"""`fusegrad cache dir | ls | gc | verify | clear`: what is cached on disk between processes."""

from __future__ import annotations

import argparse
import time

from ..cache import entry_files
from ..cache import store as cache
from ..report.command_result import MISMATCH, OK, CommandResult
from ..report.terminal import Block, Table

ACTIONS = {
    "dir": "where it is",
    "ls": "its entries: key, size, time since the last use, what it is",
    "gc": "delete the entries used longest ago, until the rest fits",
    "verify": "compare every file with the sum in its manifest; exit code 2 where one is damaged",
    "clear": "delete every entry",
}
AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    listed = "; ".join(f"{name}: {purpose}" for name, purpose in ACTIONS.items())
    parser.add_argument("action", choices=list(ACTIONS), nargs="?", default="dir", help=listed)
    parser.add_argument("--limit", type=size, metavar="SIZE", help=f"gc: for instance 200M ({bytes_text(cache.LIMIT)})")


def size(text: str) -> int:
    """ "200M" -> 209715200."""
    try:
        return cache.bytes_of(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 200M, 2G or a number of bytes") from None


def bytes_text(count: float) -> str:
    """1536 -> "1.5 kB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GB"


def run(options: argparse.Namespace) -> CommandResult:
    """One of the actions, on the cache that the environment names."""
    store = cache.default()
    if store.root is None:
        line = f"no folder can be used, entries live in memory only: {store.reason}"
        return CommandResult({"root": None, "entries": []}, [line])
    return ANSWERS[options.action](store, options)


def _dir(store: cache.Cache, options: argparse.Namespace) -> CommandResult:
    entries = store.listed()
    total = sum(e.bytes for e in entries)
    facts = {"root": str(store.root), "entries": len(entries), "bytes": total, "limit": store.limit}
    return CommandResult(facts, [f"{store.root}"])


def counted(entries: int) -> str:
    """ "1 entry", "2 entries"."""
    return f"{entries} {'entry' if entries == 1 else 'entries'}"


def _ls(store: cache.Cache, options: argparse.Namespace) -> CommandResult:
    entries, clock = store.listed(), time.time()
    rows = [(e.key[:16], f"{e.bytes:,}", age_text(clock - e.used), e.what) for e in entries]
    facts = {"root": str(store.root), "entries": [vars(e) | {} for e in entries]}
    total = f"{bytes_text(sum(e.bytes for e in entries))} of at most {bytes_text(store.limit)}"
    summary = f"{counted(len(entries))}, {total}, in {store.root}"
    return CommandResult(facts, [Table("", ("key", "bytes", "used", "what"), rows), summary] if rows else [summary])


def age_text(seconds: float) -> str:
    """7300 -> "2 h"."""
    unit, name = next(((u, n) for u, n in AGES if seconds >= u), AGES[-1])
    return f"{max(seconds, 0) / unit:.0f} {name}"


def _gc(store: cache.Cache, options: argparse.Namespace) -> CommandResult:
    limit = store.limit if options.limit is None else options.limit
    before = store.listed()
    store.sweep(limit)
    return _shrinkage(store, before, {"limit": limit})


def _clear(store: cache.Cache, options: argparse.Namespace) -> CommandResult:
    before = store.listed()
    store.clear()
    return _shrinkage(store, before, {})


def _shrinkage(store: cache.Cache, before: list[cache.Entry], more: dict[str, int]) -> CommandResult:
    after = store.listed()
    gone, freed = len(before) - len(after), sum(e.bytes for e in before) - sum(e.bytes for e in after)
    facts = {"root": str(store.root), "deleted": gone, "freed": freed, "left": len(after), **more}
    return CommandResult(facts, [f"{counted(gone)} deleted, {bytes_text(freed)}; {len(after)} left in {store.root}"])


def _verify(store: cache.Cache, options: argparse.Namespace) -> CommandResult:
    states = {e.key: store.fault(e.key) for e in store.listed()}
    faults = {key: why for key, why in states.items() if why is not None}
    damaged = {key: why for key, why in faults.items() if why != entry_files.OTHER_VERSION}
    facts = {"root": str(store.root), "entries": len(states), "damaged": damaged,
             "of_other_versions": len(faults) - len(damaged)}  # fmt: skip
    rows = [(key[:16], why) for key, why in damaged.items()]
    summary = f"{counted(len(states))}: {len(damaged)} damaged, {len(faults) - len(damaged)} of other versions"
    healed = ["a damaged entry is deleted and made again when it is next wanted"] if rows else []
    table: list[Block] = [Table("", ("key", "fault"), rows)] if rows else []
    blocks = [*table, summary, *healed]
    return CommandResult(facts, blocks, MISMATCH if damaged else OK)


ANSWERS = {"dir": _dir, "ls": _ls, "gc": _gc, "verify": _verify, "clear": _clear}
