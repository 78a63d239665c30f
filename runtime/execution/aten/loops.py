"""A `scan` step by step: what is carried goes from one step to the next, results into their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ....ir import Value
from ....ir.loops.body import operands_of
from ....tracer.dtypes import to_torch
from ...values.sizes import Sizes, evaluate, numbers

Step = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""(carries, one step of each x, wholes) -> (carries, one step of each y)"""


def run_loop(
    value: Value, operands: Sequence[torch.Tensor], sizes: Sizes, device: torch.device | None, step: Step
) -> torch.Tensor | list[torch.Tensor]:
    """The result of the scan, or the list of its results. Nothing of it shares memory with another."""
    params = value.params
    carries, xs, wholes = operands_of(params, operands)
    count, length = len(carries), int(evaluate(params["length"], sizes))
    stacked = [
        torch.empty(numbers(t.shape, sizes), dtype=to_torch(t.dtype), device=device) for t in value.avals[count:]
    ]
    for t in reversed(range(length)) if params["reverse"] else range(length):
        results = step([*carries, *(x[t] for x in xs), *wholes])
        carries = list(results[:count])
        for whole, part in zip(stacked, results[count:], strict=True):
            whole[t] = part
    found = [*carries, *stacked]
    return found if len(found) > 1 else found[0]
