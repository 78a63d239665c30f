"""The options of one compiled class, and the backend of a call by them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from ...tracer.declared import Option
from ...tracer.frames import warn_user
from ..fallback.records import FallbackWarning
from ..settings.config import ROLLED_BACKENDS, backend_name, with_numerics


@dataclass(frozen=True)
class Options:
    """The parameters of `fusegrad.compile`, in their order."""

    backend: str
    fullgraph: bool = False
    dynamic: bool = True
    traceable: Option | None = None
    derive_jvp: str | bool = "backward"
    numerics: str = "eager"
    slab_bytes: int | None = None

    def as_arguments(self) -> tuple[Any, ...]:
        """The options in their order, which a pickle names them by."""
        return astuple(self)

    def backend_for(self, args: Sequence[Any]) -> str:
        """The backend of a call: "auto" is triton for GPU tensors and the reference for CPU tensors."""
        name = backend_name(self.backend)
        if name == "auto":
            on_gpu = any(isinstance(a, torch.Tensor) and a.device.type == "cuda" for a in args)
            name = "triton" if on_gpu and is_triton_installed() else "reference"
        return with_numerics(name, self.numerics)

    def rolls_loops(self, args: Sequence[Any]) -> bool:
        """True if a call runs where a loop over a size is one."""
        return self.backend_for(args) in ROLLED_BACKENDS


@functools.cache
def is_triton_installed() -> bool:
    """True if triton can be imported; warns once where it cannot."""
    try:
        import triton  # noqa: F401
    except ImportError:
        warn_user("triton is not installed: GPU tensors run on the reference backend", FallbackWarning)
        return False
    return True
