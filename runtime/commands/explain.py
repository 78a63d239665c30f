"""`fusegrad explain module:Class "bf16[8192,4096]" ..`: what a class becomes, and why a method is not compiled."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..report.command_result import CommandResult
from ..report.explain import explain
from ..report.terminal import Block
from .arguments import add_device, add_target, call_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_device(parser, more=', or "cpu"; by default an H100\'s')
    parser.add_argument("-o", "--output", "--html", type=Path, metavar="FILE", help="write the report as a page, too")
    parser.add_argument("--kernels", action="store_true", help="print the Triton text, too")


def run(options: argparse.Namespace) -> CommandResult:
    """The report."""
    target, args = call_of(options)
    explanation = explain(target, *args, target=options.device)
    blocks: list[Block] = [str(explanation)]
    if options.kernels and explanation.kernel_records:
        blocks.append(explanation.module)
    if options.output is not None:
        options.output.write_text(explanation.to_html(), encoding="utf-8")
        blocks.append(f"wrote {options.output}")
    return CommandResult(explanation.to_dict(), blocks)
