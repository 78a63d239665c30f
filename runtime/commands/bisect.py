"""`fusegrad bisect module:Class "f32[64,128]" ...`: exit code 2 where a step is found after which the two differ."""

from __future__ import annotations

import argparse
import json

from ..bisect.search import bisect
from ..check.modes import MODES
from ..report.command_result import MISMATCH, OK, CommandResult
from ..settings.config import BACKENDS
from .arguments import add_target, call_of
from .output import add_output, write_outputs, write_reproducer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--backend", choices=BACKENDS, help="what runs it; by default the class's own")
    parser.add_argument("--transform", action="append", choices=list(MODES), metavar="MODE",
                        help=f"only {', '.join(MODES)}; more than once")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the numbers")
    what = "the script that shows the difference again (fusegrad-bisect-CLASS.py), or the report"
    add_output(parser, what, (".py", ".json", ".txt"))


def run(options: argparse.Namespace) -> CommandResult:
    """Bisect, and report; with the script where something differs."""
    target, args = call_of(options)
    keywords = {"transforms": options.transform, "backend": options.backend, "seed": options.seed}
    bisection = bisect(target, *args, quiet=True, **keywords)
    facts = bisection.to_dict()
    texts = {".json": json.dumps(facts, indent=1, default=str) + "\n", ".txt": f"{bisection}\n"}
    lines = write_outputs(options, texts)
    if bisection.ok:
        return CommandResult(facts, [str(bisection), *lines], OK)
    file = write_reproducer(options, bisection.name, bisection.script)
    blocks = [str(bisection), *lines, f"wrote {file}, which shows it again"]
    return CommandResult({**facts, "output": str(file)}, blocks, MISMATCH)
