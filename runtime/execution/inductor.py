"""backend="inductor": a captured graph through Inductor's C++ backend; without a C++ compiler, the reference."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.passes.split_module import split_module

from ...tracer.frames import warn_user


@functools.cache
def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would use, or None."""
    import os

    candidates = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return next((path for c in candidates if c and (path := shutil.which(c))), None)


def compile_by_inductor(gm: torch.fx.GraphModule) -> Callable[[Sequence[Any], Sequence[torch.Tensor]], list[Any]]:
    """`gm` compiled by `torch.compile`; `gm` itself, with a warning, where nothing can compile C++.

    With opaque nodes in it, every segment between them is compiled, and they are called as they are.
    """
    if cpp_compiler() is None and not torch.cuda.is_available():
        told = "backend='inductor' needs a C++ compiler (set CXX or install g++); running the reference instead"
        warn_user(told, UserWarning)
        return lambda inputs, lifted: list(gm(*inputs, *lifted))
    fast = _compiled_apart(gm) if _has_opaque(gm) else torch.compile(gm, dynamic=None)

    def run(inputs: Sequence[Any], lifted: Sequence[torch.Tensor]) -> list[Any]:
        with torch.no_grad():
            return list(fast(*inputs, *lifted))

    return run


def _has_opaque(gm: torch.fx.GraphModule) -> bool:
    return any(hasattr(node.target, "opaque") for node in gm.graph.nodes)


def _compiled_apart(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    part = 0
    parts: dict[torch.fx.Node, int] = {}
    for node in gm.graph.nodes:
        opaque = hasattr(node.target, "opaque")
        parts[node], part = part + opaque, part + 2 * opaque
    apart = split_module(gm, gm, parts.__getitem__, keep_original_order=True)
    for name, segment in list(apart.named_children()):
        if isinstance(segment, torch.fx.GraphModule) and not _has_opaque(segment):
            setattr(apart, name, torch.compile(segment, dynamic=None))
    return apart
