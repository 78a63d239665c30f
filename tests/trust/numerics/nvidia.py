"""What primitives become on NVIDIA GPUs: the function called, the instructions of sm_90, and the documented bound.

The bounds are those of the CUDA C++ Programming Guide ("Mathematical Functions", full range) and of the PTX ISA, in
units of the last place; "exact" is to be read as correctly rounded. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Input, T, graph_of

from fusegrad.codegen import TARGETS, generate, module
from fusegrad.ir.prims import UNARY
from fusegrad.runtime.kernels.cross_compile import worker
from fusegrad.runtime.kernels.cross_compile.pool import job_of

BOUNDS: dict[str, tuple[float, float]] = {
    "exp": (2, 1), "exp2": (2, 1), "expm1": (1, 1), "log": (1, 1), "log2": (1, 1), "log10": (2, 1), "log1p": (1, 1),
    "rsqrt": (2, 1), "sin": (2, 2), "cos": (2, 2), "tan": (4, 2), "asin": (2, 2), "acos": (2, 2), "atan": (2, 2),
    "atan2": (3, 2), "sinh": (3, 2), "cosh": (2, 1), "tanh": (2, 1), "asinh": (3, 3), "acosh": (4, 3), "atanh": (3, 2),
    "erf": (2, 2), "lgamma": (6, 4), "pow": (4, 2), "hypot": (3, 2),
}  # fmt: skip
"""Of the device library's functions, in float32 and float64; torch's CUDA kernels call the same ones."""
ROUNDED = frozenset("add sub mul div sqrt reciprocal fmod".split())
"""Correctly rounded by IEEE 754."""
NOTES = {
    "sigmoid": "1 / (1 + exp(-x)), each step as above; torch's formula",
    "rem": "fmod and one addition, torch's formula",
    "floordiv": "fmod, a quotient and floor, torch's formula",
    "lgamma": "6 outside -10.001 .. -2.264, larger inside",
}
APPROXIMATE = re.compile(r"\b(div\.full|div\.approx|sqrt\.approx|rsqrt\.approx|ex2\.approx|lg2\.approx|rcp\.approx)\S*")
ARITHMETIC = re.compile(r"\b((?:div|sqrt|rsqrt|ex2|lg2|rcp|fma|add|sub|mul)\.\S*f(?:32|64))\b")


def ptx(body: Callable[..., Any], dtype: str, operands: int, fast: bool = False) -> str:
    """The PTX of a body for sm_90; no GPU is needed."""
    graph = graph_of(body, **{f"x{i}": Input(dtype, (4096,)) for i in range(operands)})
    kernels = generate(graph, target=replace(TARGETS["cuda:90"], fast=fast), hints={}, name="body").kernels
    (kernel,) = kernels
    return str(worker._compile(job_of(kernel, module(kernels), "cuda:90")).asm["ptx"])


def instructions(body: Callable[..., Any], dtype: str, operands: int, fast: bool = False) -> Counter[str]:
    """The arithmetic on floats in it: how often each instruction."""
    return Counter(ARITHMETIC.findall(ptx(body, dtype, operands, fast)))


def bound(name: str) -> str:
    """The documented bound of a primitive's result in float32 and float64."""
    if name in NOTES and name not in BOUNDS:
        return NOTES[name]
    if name in BOUNDS:
        single, double = BOUNDS[name]
        return f"{single:g} and {double:g} ulp" + (f" ({NOTES[name]})" if name in NOTES else "")
    return "exact" if name in ROUNDED else "no rounding"


def called(name: str, dtype: str = "f32") -> str:
    """What the emitted text of a primitive calls."""
    from primitive_rows import body_of

    operands = 1 if name in UNARY else 3 if name == "where" else 2
    body = body_of(name) if name != "where" else lambda x, y, z: T(body_of(name)(T(_positive(x)), y, z).v)
    text = generate(
        graph_of(body, **{f"x{i}": Input(dtype, (4096,)) for i in range(operands)}),
        target=TARGETS["cuda:90"], hints={}, name="body",
    ).kernels[0].source  # fmt: skip
    found = re.findall(r"\b(libdevice\.\w+|tl\.\w+|[a-z_]+)\(", text.split("tl.load")[-1])
    return ", ".join(n for n in dict.fromkeys(found) if n not in ("tl.store", "tl.cast", "tl.full", "body"))


def _positive(x: T) -> Any:
    from fusegrad.ir import emit

    return emit("signbit", x.v)
