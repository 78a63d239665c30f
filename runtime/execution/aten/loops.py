"""A `scan` step by step: what is carried goes from one step to the next, results are stacked at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ....ir import Value
from ....ir.loops.body import operands_of
from ....tracer.dtypes import to_torch
from ...values.sizes import Sizes, number, numbers

Tensor = torch.Tensor
Step = Callable[[list[Tensor]], Sequence[Tensor]]
"""(carries, one step of each x, wholes) -> (carries, one step of each y)"""


def run_loop(
    value: Value, operands: Sequence[Tensor], sizes: Sizes, device: torch.device | None, step: Step
) -> Tensor | list[Tensor]:
    """The result of the scan, or the list of its results; what it carries may be an operand, or twice the same."""
    carries, xs, wholes = operands_of(value.params, operands)
    count, length = len(carries), number(value.params["length"], sizes)
    given: list[Sequence[Tensor]] = []
    for t in reversed(range(length)) if value.params["reverse"] else range(length):
        results = step([*carries, *(x[t] for x in xs), *wholes])
        carries = list(results[:count])
        given.append(results[count:])
    if value.params["reverse"]:
        given.reverse()
    found = [*carries, *(torch.stack(parts) for parts in zip(*given, strict=True))]
    if not length:
        found += [torch.empty(numbers(t.shape, sizes), dtype=to_torch(t.dtype), device=device)
                  for t in value.avals[count:]]  # fmt: skip
    return found if len(found) > 1 else found[0]
