"""`python -m fusegrad check module:Class "f32[64,128]" ...`: exit code 1 where compiled and eager differ."""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from typing import Any

from ..config import BACKENDS
from ..specs import is_spec
from .cases import DTYPES
from .layouts import LAYOUTS
from .modes import MODES
from .subject import CheckArgumentError
from .trial import check

SUMMARY = "compare a compiled Function with the one you wrote"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="module:Class, compiled or not")
    parser.add_argument("arguments", nargs="*", help='tensors as "f32[64,128]", anything else as a Python literal')
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="what runs it; more than one is possible")
    parser.add_argument("--transform", action="append", choices=list(MODES), help="only this mode; more than once")
    parser.add_argument("--dtype", action="append", choices=list(DTYPES), help="of the variations; more than once")
    parser.add_argument("--layout", action="append", choices=list(LAYOUTS), help="of the variations; more than once")
    parser.add_argument("--size", action="append", type=int, help="of an axis; more than once")
    parser.add_argument("--seed", type=int, default=0, help="of the numbers")


def run(options: argparse.Namespace) -> int:
    """Exit code 1 where something differs, which the table says."""
    target, args = imported(options.target), [argument(a) for a in options.arguments]
    chosen = {"dtypes": options.dtype, "layouts": options.layout, "sizes": options.size, "seed": options.seed}
    check(target, *args, backends=options.backend, transforms=options.transform, **chosen)
    return 0


def imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise CheckArgumentError(
            function=name, detail=f"cannot be imported: {error}", fix="write module:Class, importable from here"
        ) from error
    return found


def argument(text: str) -> Any:
    if is_spec(text):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
