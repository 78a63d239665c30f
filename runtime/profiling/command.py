"""`python -m fusegrad profile module:Class "bf16[4096,4096]" .. --output profile.html`."""

from __future__ import annotations

import argparse

from ..checking.command import argument, imported
from .devices import DEVICES
from .profile import BASELINES, profile

SUMMARY = "time a compiled Function, and model its kernels on a GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="module:Class, compiled or not")
    parser.add_argument("arguments", nargs="*", help='tensors as "f32[64,128]", anything else as a Python literal')
    parser.add_argument("--baseline", action="append", choices=BASELINES, help="beside it; more than once")
    parser.add_argument("--device", choices=list(DEVICES), default="h100", help="of the model")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each candidate and direction")
    parser.add_argument("--metrics", action="store_true", help="compile for it: registers, spills, shared memory")
    parser.add_argument("-o", "--output", action="append", default=[], help=".html, .json, .trace.json; more than once")


def run(options: argparse.Namespace) -> int:
    """Prints the tables."""
    found = profile(
        imported(options.target), *map(argument, options.arguments), baselines=options.baseline or ("eager",),
        device=options.device, seconds=options.seconds, metrics=options.metrics,
    )  # fmt: skip
    print(found)
    for path in options.output:
        found.write(path)
    return 0
