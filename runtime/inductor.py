"""backend="inductor": a captured graph through Inductor's C++ backend; without a C++ compiler, the reference."""

from __future__ import annotations

import functools
import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch


@functools.cache
def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would use, or None."""
    import os

    candidates = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return next((found for c in candidates if c and (found := shutil.which(c))), None)


def compiled(gm: torch.fx.GraphModule) -> Callable[[Sequence[Any], Sequence[torch.Tensor]], list[Any]]:
    """`gm` compiled by `torch.compile`; `gm` itself, with a warning, where nothing can compile C++."""
    if cpp_compiler() is None and not torch.cuda.is_available():
        warnings.warn(
            "backend='inductor' needs a C++ compiler (set CXX or install g++); running the reference instead",
            stacklevel=2,
        )
        return lambda inputs, lifted: list(gm(*inputs, *lifted))
    fast = torch.compile(gm, dynamic=None)

    def run(inputs: Sequence[Any], lifted: Sequence[torch.Tensor]) -> list[Any]:
        with torch.no_grad():
            return list(fast(*inputs, *lifted))

    return run
