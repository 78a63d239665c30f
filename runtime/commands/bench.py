"""`fusegrad bench ..`: the benchmarks, where they are in the installation: they are part of the sources alone."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from pathlib import Path

from ...ir.errors import FusegradError
from ..report.command_result import OK, USERS, CommandResult
from .arguments import HERE

PACKAGE = f"{__name__.partition('.')[0]}.benchmarks"


class BenchmarksMissing(FusegradError, LookupError):
    """The package was installed from a wheel, which has no benchmarks."""

    message = (
        "bench: the benchmarks are not in this installation\n  at:   {where}\n"
        "  fix:  clone the repository and run `make bench` there, or install it with `pip install -e .`"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", action="store_true", help="time on the GPU at hand instead")
    parser.epilog = (
        "Other options go to the benchmarks: fusegrad bench --quick --only plans. Results go to build/bench; with "
        "--write-docs into the repository: benchmarks/results, docs/benchmarks.md"
    )
    parser.set_defaults(rest=[])


def run(options: argparse.Namespace) -> CommandResult:
    """Their own exit code, and with --json the file of results."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise BenchmarksMissing(where=HERE)
    module = importlib.import_module(f"{PACKAGE}.{'gpu' if options.gpu else '__main__'}")
    try:
        code = module.main(options.rest)
    except SystemExit as stopped:  # of their own parser, which has said why
        return CommandResult({}, (), OK if not stopped.code else USERS)
    return CommandResult(_results(module, options.rest), (), code)


def _results(module: object, words: list[str]) -> object:
    """The files of results, as they were written."""
    folder = module.parsed(words).out  # type: ignore[attr-defined]
    files = sorted(Path(folder).glob("*.json")) if Path(folder).is_dir() else []
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files}
