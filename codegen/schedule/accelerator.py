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


def descriptors_pay(moved: int, warps: int, target: Target) -> bool:
    """Whether tiles of so many bytes in a turn are read by descriptors, by so many warps; `tune` leans to it, or from
    it. Triton's interpreter reads them as well, where they are asked for.
    """
    is_hopper = target.kind == "cuda" and int(target.arch) >= HOPPER
    if not is_on("descriptors") or not (is_hopper or target.kind == "interpret"):
        return False
    if target.leaning.accelerated:
        return target.leaning.accelerated > 0
    return is_hopper and moved >= WORTH * warps * target.warp
