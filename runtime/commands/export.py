"""`fusegrad export module:Class "f32[64,128]" .. --output name.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..export.export import FORMATS, TREES, export
from ..report.command_result import CommandResult
from .arguments import add_device, add_target, call_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    what = "the file; its suffix is the format. Without it the text is printed"
    parser.add_argument("-o", "--output", metavar="FILE", help=what)
    parser.set_defaults(suffixes=())
    parser.add_argument("--format", choices=[*FORMATS, *TREES], help="where the suffix does not say it")
    add_device(parser, more="; by default an H100's")
    parser.add_argument("--targets", nargs="*", default=(), metavar="TARGET", help="GPUs to compile a bundle for")
    parser.add_argument(
        "--derivatives", action="append", type=_words, default=[], metavar="jvp,vmap", help="what a .py has besides"
    )
    help_ = 'sizes that a .py is made for alone, by its names or those of "bf16[M,N]": N=4096,M=8192'
    parser.add_argument("--sizes", action="append", type=_sizes, default=[], metavar="N=4096", help=help_)


def _sizes(text: str) -> dict[str, int]:
    """ "N=4096,M=8192" by name."""
    pairs = [part.split("=") for part in text.split(",")]
    if any(len(pair) != 2 or not pair[1].strip().isdecimal() for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form N=4096,M=8192")
    return {name.strip(): int(value) for name, value in pairs}


def _words(text: str) -> list[str]:
    return text.split(",")


def run(options: argparse.Namespace) -> CommandResult:
    """Export, and report the file; the text itself without one."""
    target, args = call_of(options)
    format_name = options.format or (None if options.output else "py")
    text = export(
        target, *args, path=options.output, format=format_name, target=options.device, targets=options.targets,
        derivatives=[word for words in options.derivatives for word in words],
        sizes={name: value for several in options.sizes for name, value in several.items()},
    )  # fmt: skip
    facts = {"path": options.output, "lines": len(text.splitlines())}
    if options.output:
        return CommandResult(facts, _file_line(options.output, text))
    return CommandResult({**facts, "text": text}, [text.rstrip("\n")])


def _file_line(path: str, text: str) -> list[str]:
    """A line on a file: its length where it is text, else its contents."""
    if Path(path).suffix == ".pt2":
        return [f"wrote {path}", *text.splitlines()]
    is_text = Path(path).is_file() and Path(path).suffix != ".zip"
    return [f"wrote {path} ({len(text.splitlines())} lines)" if is_text else f"wrote {path}"]
