"""`python -m fusegrad COMMAND`: one module of `runtime` per command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Protocol

from .ir.errors import FusegradError
from .runtime import demo
from .runtime.checking import command as check_command
from .runtime.exporting import command as export_command
from .runtime.profiling import command as profile_command


class Command(Protocol):
    """What a command's module has; `run` returns the exit code."""

    SUMMARY: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int: ...


COMMANDS: dict[str, Command] = {
    "demo": demo, "check": check_command, "export": export_command, "profile": profile_command,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, 2 for a command or an option that does not exist."""
    options = parser().parse_args(arguments)
    try:
        return COMMANDS[options.command].run(options)
    except FusegradError as error:
        print(f"fusegrad {options.command}: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser("fusegrad", description="Compiles custom autograd Functions into Triton kernels.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=module.SUMMARY, description=module.SUMMARY))
    return top


if __name__ == "__main__":
    sys.exit(main())
