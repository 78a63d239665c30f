"""`fusegrad demo ..`: the training example of examples/demo, which wheels hold too."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from pathlib import Path

from ...ir.errors import FusegradError
from ..report.command_result import CommandResult
from ..settings.config import BACKENDS
from .arguments import HERE

EXAMPLE = f"{__name__.partition('.')[0]}.examples.demo"


class DemoMissing(FusegradError, LookupError):
    """The installation has no examples/demo."""

    message = (
        "demo: its example is not in this installation\n  at:   {where}\n"
        "  fix:  install a wheel of fusegrad, or clone the repository and run `make demo` there"
    )


class NoTextError(FusegradError):
    """The standard library has no source files here."""

    message = (
        "demo: there is no Python source under {folder} to train on\n  at:   {where}\n"
        "  fix:  run a Python whose standard library is not zipped."
    )


class RanksFailedError(FusegradError):
    """torchrun gave up."""

    message = (
        "demo --nproc {count}: a process failed: {said}\n  at:   {where}\n"
        "  fix:  run it with --nproc 1, and `fusegrad doctor`; torch.distributed needs gloo, or nccl on GPUs."
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=positive, default=60, help="training steps (default 60)")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="what runs the compiled Functions")
    parser.add_argument("-o", "--output", "--out", type=Path, default=Path("fusegrad-demo"), metavar="FOLDER",
                        help="of the files (fusegrad-demo)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the batches")
    parser.add_argument("--nproc", type=int, choices=(1, 2, 4), default=1, help="processes: DDP, FSDP2 and so on")


def positive(text: str) -> int:
    """The number, at least 1."""
    if not text.strip().isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def run(options: argparse.Namespace) -> CommandResult:
    """Run the example, which prints as it goes."""
    if not _is_installed():
        raise DemoMissing(where=HERE)
    facts, code = importlib.import_module(f"{EXAMPLE}.training").run(options)
    return CommandResult(facts, (), code)


def _is_installed() -> bool:
    """`find_spec` raises where the package above is missing, too."""
    try:
        return importlib.util.find_spec(EXAMPLE) is not None
    except ModuleNotFoundError:
        return False
