"""`fusegrad tune module:Class "bf16[8192,4096]" ..`: time candidates of every kernel on this GPU, keep the fastest."""

from __future__ import annotations

import argparse

from ..profile.tuning import tune_function
from ..report.command_result import CommandResult
from .arguments import add_target, call_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)


def run(options: argparse.Namespace) -> CommandResult:
    """Tune, and report the candidates and the choice."""
    target, args = call_of(options)
    tuned = tune_function(target, *args)
    return CommandResult(tuned.to_dict(), [str(tuned)])
