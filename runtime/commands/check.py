"""`fusegrad check module:Class "f32[64,128]" ...`: exit code 2 where they differ, or nothing was compared."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..check.cases import DTYPES
from ..check.check import CheckError, check
from ..check.modes import MODES
from ..check.variations import LAYOUTS
from ..report.command_result import MISMATCH, CommandResult
from ..settings.config import BACKENDS
from .arguments import add_target, call_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="what runs it; more than one is possible")
    parser.add_argument("--transform", action="append", choices=list(MODES), help="only this mode; more than once")
    parser.add_argument("--dtype", action="append", choices=list(DTYPES), help="of the variations; more than once")
    parser.add_argument("--layout", action="append", choices=list(LAYOUTS), help="of the variations; more than once")
    parser.add_argument("--size", action="append", type=int, help="of an axis; more than once")
    parser.add_argument("--seed", type=int, default=0, help="of the numbers")
    help_ = "yes: backward has to be the derivative of forward; no: it is not meant to be"
    parser.add_argument("--expect-derivative", choices=("yes", "no"), help=help_)
    parser.add_argument("-o", "--output", type=Path, help="where differences go, as a script that shows the first one")


def run(options: argparse.Namespace) -> CommandResult:
    """The table; where something differs, the script that shows it."""
    target, args = call_of(options)
    keywords = {"dtypes": options.dtype, "layouts": options.layout, "sizes": options.size, "seed": options.seed}
    keywords["expect_derivative"] = options.expect_derivative and options.expect_derivative == "yes"
    try:
        report = check(target, *args, backends=options.backend, transforms=options.transform, quiet=True, **keywords)
    except CheckError as error:
        return _differs(error, options.output)
    return CommandResult(report.to_dict(), [str(report)])


def _differs(error: CheckError, output: Path | None) -> CommandResult:
    facts = {**error.report.to_dict(), "difference": error.facts["difference"].__str__(), "script": error.reproducer}
    if output is None or not error.reproducer:
        return CommandResult(facts, [str(error.report), str(error)], MISMATCH)
    output.write_text(error.reproducer, encoding="utf-8")
    text = str(error).replace(error.reproducer, "").replace("the script below", str(output)).rstrip()
    return CommandResult({**facts, "output": str(output)}, [str(error.report), text], MISMATCH)
