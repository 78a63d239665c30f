"""`fusegrad bisect module:Class "f32[64,128]" ...`: exit code 2 where a step is found after which the two differ."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..bisect.search import bisect
from ..check.modes import MODES
from ..report.command_result import MISMATCH, OK, CommandResult
from ..settings.config import BACKENDS
from .arguments import add_target, call_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--backend", choices=BACKENDS, help="what runs it; by default the class's own")
    parser.add_argument("--transform", action="append", choices=list(MODES), help="only this mode; more than once")
    parser.add_argument("--seed", type=int, default=0, help="of the numbers")
    parser.add_argument("-o", "--output", type=Path, help="where a script goes that shows the difference again")


def run(options: argparse.Namespace) -> CommandResult:
    """Bisect, and report; with the script where something differs."""
    target, args = call_of(options)
    keywords = {"transforms": options.transform, "backend": options.backend, "seed": options.seed}
    bisection = bisect(target, *args, quiet=True, **keywords)
    if bisection.ok:
        return CommandResult(bisection.to_dict(), [str(bisection)], OK)
    if options.output is None:
        return CommandResult(bisection.to_dict(), [str(bisection), bisection.script], MISMATCH)
    options.output.write_text(bisection.script, encoding="utf-8")
    return CommandResult({**bisection.to_dict(), "output": str(options.output)},
                  [str(bisection), f"  written: {options.output}"], MISMATCH)  # fmt: skip
