"""`fusegrad explain module:Class "bf16[8192,4096]" ..`: what a class becomes, and why a method is not compiled."""

from __future__ import annotations

import argparse
import json

from ..report.command_result import CommandResult
from ..report.explain import explain
from ..report.terminal import Block
from .arguments import add_device, add_target, call_of
from .output import add_output, write_outputs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_device(parser, more=', or "cpu"; by default an H100\'s')
    add_output(parser, "write the report, too", (".html", ".json", ".txt"))
    parser.add_argument("--kernels", action="store_true", help="print the Triton text, too")


def run(options: argparse.Namespace) -> CommandResult:
    """The report."""
    target, args = call_of(options)
    explanation = explain(target, *args, target=options.device)
    blocks: list[Block] = [str(explanation)]
    if options.kernels and explanation.kernel_records:
        blocks.append(explanation.module)
    facts = explanation.to_dict()
    if options.output:
        texts = {".html": explanation.to_html(), ".json": json.dumps(facts, indent=1, default=str) + "\n"}
        blocks += write_outputs(options, {**texts, ".txt": f"{explanation}\n"})
    return CommandResult(facts, blocks)
