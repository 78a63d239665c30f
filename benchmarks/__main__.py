"""`make bench`: what can be measured without a GPU, as one table.

    python -m fusegrad.benchmarks limits             tighten limits.json to what has become better
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from . import limits, plans
from .suite import CASES, Case, chosen

COMMANDS = ("limits",)


def each(measure: Callable[[Case], dict[str, Any]], cases: Sequence[Case], jobs: int) -> Iterator[dict[str, Any]]:
    """`measure` of every case by `jobs` processes, in the order of the cases, with progress on stderr."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes inherit it
    with ProcessPoolExecutor(jobs, get_context("spawn")) as processes:
        for done, (case, found) in enumerate(zip(cases, processes.map(measure, cases), strict=True), 1):
            print(f"\r{measure.__name__} {done}/{len(cases)}  {case.name:<44}", end="", file=sys.stderr, flush=True)
            yield found
    print(file=sys.stderr)


def tighten(options: argparse.Namespace) -> int:
    """Write limits.json."""
    old = limits.read()
    new = limits.tightened(old, each(plans.plan, chosen(options.match), options.jobs), options.raise_)
    new = {case.name: new[case.name] for case in CASES if case.name in new}
    limits.write(new)
    changed = sum(old.get(name) != limit for name, limit in new.items())
    print(f"{changed} of {len(new)} cases changed in {limits.PATH.name}")
    return 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("make bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--match", default="", help="only cases whose names contain this")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--raise", action="store_true", dest="raise_", help="limits: numbers may become larger, too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return tighten(parsed(arguments))


if __name__ == "__main__":
    sys.exit(main())
