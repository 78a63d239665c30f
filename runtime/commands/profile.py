"""`fusegrad profile module:Class "bf16[4096,4096]" .. --output profile.html`."""

from __future__ import annotations

import argparse

from ..profile.profile import BASELINES, profile
from ..profile.report import blocks
from ..report.command_result import CommandResult
from .arguments import add_device, add_target, call_of
from .output import add_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--baseline", action="append", choices=BASELINES, help="beside it; more than once")
    add_device(parser, default="h100", more="; of the model")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each candidate and direction")
    parser.add_argument("--metrics", action="store_true", help="compile for it: registers, spills, occupancy")
    add_output(parser, "write the figures, too", (".html", ".json", ".trace.json"))


def run(options: argparse.Namespace) -> CommandResult:
    """The tables, and the files that were asked for."""
    target, args = call_of(options)
    measured = profile(
        target, *args, baselines=options.baseline or ("eager",), device=options.device, seconds=options.seconds,
        metrics=options.metrics,
    )  # fmt: skip
    for path in options.output:
        measured.write(path)
    return CommandResult(measured.to_dict(), [*blocks(measured), *(f"wrote {path}" for path in options.output)])
