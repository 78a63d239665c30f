"""The devices that kernels are generated for, and whether they are tuned there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...codegen import TARGETS, Target
from ...codegen.devices import DEVICES, device_of
from ...ir.errors import FusegradError, UnsupportedBackendError
from ..kernels import autotune
from ..settings.config import FAST, KERNEL_BACKENDS, is_interpreted, settings
from ..settings.suggestions import meant


def target_for(backend: str, device: torch.device) -> Target:
    """Return the target of a backend: the interpreter, or the GPU at hand with its own number of units and its L2.

    Where torch runs all, it is what costs are weighed for.
    """
    return replace(_target_for(backend, device), fast=backend in FAST.values())


class UnknownTargetError(FusegradError, ValueError):
    """A target that is neither a GPU known by name nor "cpu"."""

    message = (
        "explain(target={target!r}): there is no such target\n  at:   {where}\n"
        '  fix:  {hint}use "cpu" or one of {known}'
    )


GENERATED_FOR = tuple(name for name in TARGETS if ":" in name)
"""The targets that name a GPU's machine code."""


def target_name(name: str) -> str:
    """ "cuda:89" for "4090": the target of a device or a target by its name. Raises UnknownTargetError."""
    if name in TARGETS:
        return name
    if (device := device_of(name)) is None:
        known = (*DEVICES, *GENERATED_FOR)
        raise UnknownTargetError(target=name, known=", ".join(known), hint=meant(name, known))
    return device.target


def named_target(name: str, numerics: str) -> Target:
    """A device or a target by its name, to generate for with these numerics. Raises UnknownTargetError."""
    target = replace(TARGETS[target_name(name)], fast=numerics == "fast")
    if name in TARGETS or (device := device_of(name)) is None:
        return target
    return replace(target, units=device.multiprocessors, l2=device.l2 or target.l2)


def _target_for(backend: str, device: torch.device) -> Target:
    if is_interpreted(backend) or backend not in KERNEL_BACKENDS:
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
