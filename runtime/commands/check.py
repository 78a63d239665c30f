"""`fusegrad check module:Class "f32[64,128]" ...`: exit code 2 where they differ, or nothing was compared."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..check.cases import DTYPES
from ..check.check import CheckError, Report, check
from ..check.modes import MODES
from ..check.variations import LAYOUTS
from ..report.command_result import MISMATCH, CommandResult
from ..settings.config import BACKENDS
from .arguments import add_target, call_of
from .output import add_output, write_outputs, write_reproducer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="what runs it; more than one is possible")
    for name, choices in {"transform": list(MODES), "dtype": list(DTYPES), "layout": list(LAYOUTS)}.items():
        help_ = f"only {', '.join(choices)}; more than once"
        parser.add_argument(f"--{name}", action="append", choices=choices, metavar=name.upper(), help=help_)
    parser.add_argument("--size", action="append", type=int, help="of an axis; more than once")
    parser.add_argument("--seed", type=int, default=0, help="of the numbers")
    help_ = "yes: backward has to be the derivative of forward; no: it is not meant to be"
    parser.add_argument("--expect-derivative", choices=("yes", "no"), help=help_)
    what = "the script that shows the first difference (fusegrad-check-CLASS.py), or the report"
    add_output(parser, what, (".py", ".json", ".txt"))


def run(options: argparse.Namespace) -> CommandResult:
    """The table; where something differs, the script that shows it."""
    target, args = call_of(options)
    keywords = {"dtypes": options.dtype, "layouts": options.layout, "sizes": options.size, "seed": options.seed}
    keywords["expect_derivative"] = options.expect_derivative and options.expect_derivative == "yes"
    try:
        report = check(target, *args, backends=options.backend, transforms=options.transform, quiet=True, **keywords)
    except CheckError as error:
        return _differs(error, options)
    facts = report.to_dict()
    return CommandResult(facts, [str(report), *write_outputs(options, _texts(facts, report))])


def _texts(facts: dict[str, Any], report: Report) -> dict[str, str]:
    return {".json": json.dumps(facts, indent=1, default=str) + "\n", ".txt": f"{report}\n"}


def _differs(error: CheckError, options: argparse.Namespace) -> CommandResult:
    """The table, the difference, and the file that shows it again."""
    facts = {**error.report.to_dict(), "difference": str(error.facts["difference"]), "script": error.reproducer}
    lines = write_outputs(options, _texts(facts, error.report))
    if error.reproducer:
        file = write_reproducer(options, error.report.name, error.reproducer)
        lines, facts = [*lines, f"wrote {file}, which shows it again"], {**facts, "output": str(file)}
    return CommandResult(facts, [str(error.report), str(error), *lines], MISMATCH)
