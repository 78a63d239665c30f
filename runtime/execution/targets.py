"""The devices that kernels are generated for, and whether they are tuned there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...codegen import TARGETS, Target
from ...ir.errors import UnsupportedBackendError
from ..kernels import autotune
from ..settings.config import FAST, is_interpreted, settings


def target_for(backend: str, device: torch.device) -> Target:
    """Return the target of a backend: the interpreter, or the GPU at hand with its own number of units and its L2."""
    return replace(_target_for(backend, device), fast=backend in FAST.values())


def named_target(name: str, numerics: str) -> Target:
    """A device by its name, to generate for with these numerics."""
    return replace(TARGETS[name], fast=numerics == "fast")


def _target_for(backend: str, device: torch.device) -> Target:
    if is_interpreted(backend):
        return TARGETS["interpret"]
    if device.type != "cuda":
        raise UnsupportedBackendError(
            backend=backend, what=f"{device.type} tensors", reason="Triton needs a GPU",
            fix='use backend="reference", or backend="interpret" to run the generated text without a GPU',
        )  # fmt: skip
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        base = TARGETS["hip:gfx942"]
        return Target("hip", arch, properties.multi_processor_count, base.l2, base.shared, 64)
    l2 = getattr(properties, "L2_cache_size", 40 << 20)
    shared = getattr(properties, "shared_memory_per_block_optin", 163 << 10)
    arch = f"{properties.major}{properties.minor}"
    return Target("cuda", arch, properties.multi_processor_count, l2, shared)


def is_tuned(backend: str) -> bool:
    """True where kernels are timed at the sizes that they meet first."""
    return backend.startswith("triton") and (settings().tune or autotune.is_tuning())
