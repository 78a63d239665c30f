"""Whether tiles that a loop reads are copied by the tensor memory accelerator, or by the threads that wait for them.

The accelerator is asked for a tile by one thread, with a barrier that all wait at; the other threads spend no
instruction on addresses and hold none. A thread that copies little spends less than the barrier takes.
"""

from __future__ import annotations

from ...ir.switches import is_on
from ..kernel import Target

HOPPER = 90
"""The architecture from which on there is one."""
WORTH = 128
"""Bytes of a turn's tiles, for each thread, from which on loops have fewer instructions with descriptors than with
pointers: plain products a fifth, attention's forward 2 % on average. Of half as many they have up to 6 % more
(triton 3.7.1 for sm_90)."""


def has_accelerator(target: Target) -> bool:
    """True of a device that has one; Triton's interpreter reads descriptors as well."""
    return target.kind == "interpret" or (target.kind == "cuda" and int(target.arch) >= HOPPER)


def leans_to_descriptors(target: Target) -> bool:
    """True where they are asked for, by `tune` or a test."""
    return is_on("descriptors") and has_accelerator(target) and target.leaning.accelerated > 0


def has_descriptors(moved: int, warps: int, target: Target) -> bool:
    """Whether tiles of so many bytes in a turn are read by descriptors, by so many warps."""
    if not is_on("descriptors") or not has_accelerator(target) or target.leaning.accelerated < 0:
        return False
    return leans_to_descriptors(target) or (target.kind == "cuda" and moved >= WORTH * warps * target.warp)
