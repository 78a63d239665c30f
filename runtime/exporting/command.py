"""`python -m fusegrad export module:Class "f32[64,128]" .. --output name.py`."""

from __future__ import annotations

import argparse

from ..checking.command import argument, imported
from .export import FORMATS, export

SUMMARY = "write a compiled Function as a Triton module, a graph or a picture"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="module:Class, compiled or not")
    parser.add_argument("arguments", nargs="*", help='tensors as "f32[64,128]", anything else as a Python literal')
    parser.add_argument("-o", "--output", help="the file; its suffix is the format. Without it the text is printed")
    parser.add_argument("--format", choices=list(FORMATS), help="where the suffix does not say it")
    parser.add_argument("--gpu", metavar="TARGET", help='"cuda:80", "cuda:90" (the default), "cuda:100", "hip:gfx942"')


def run(options: argparse.Namespace) -> int:
    """Exit code 1 where it cannot be exported, with the reason."""
    args = [argument(a) for a in options.arguments]
    chosen = options.format or (None if options.output else "py")
    text = export(imported(options.target), *args, path=options.output, format=chosen, target=options.gpu)
    if options.output:
        print(f"wrote {options.output} ({len(text.splitlines())} lines)")
    else:
        print(text, end="")
    return 0
