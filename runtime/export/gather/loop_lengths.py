"""Loops of an export, which were recognised in short ones: compared with the methods before anything is written.

A compiled class compares a loop that is longer than all before at the call; no call of an export does. So its loops are
compared at many lengths, on made-up numbers, and the longest of these is the longest that the export takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch

from ....tracer.capture.capture import capture_lock
from ....tracer.trace import CaptureError
from ...capture.captured import CapturedFunction
from ...capture.captured_backward import BackwardEntry, gradient_likes
from ...capture.first_call_check import check_backward, check_forward, near, replay_forward
from ...capture.outputs import tensor_at
from ...specialize.specialization import Specialization
from ...values.bitwise import small_sizes
from ...values.sizes import BoundSizes, traced_numbers

Tensor = torch.Tensor
Sizes = dict[sympy.Symbol, int]
Backwards = Mapping[tuple[Any, ...], BackwardEntry]
"""The captured backwards, by the kinds of gradients that each is for."""
FIRST, LONGEST = 12, 4096
"""The fewest steps at which a loop is compared, and the most, if the example has no more."""
INDICES = 4
"""Whole numbers that are made up are below it: they may be indices."""


def assume_compared(spec: Specialization, backwards: Backwards) -> None:
    """Compares the loops of a capture; that they are no longer than what was compared is a condition from here on.

    Raises CaptureError where a long loop is another one than short ones show, or made-up numbers are no fit.
    """
    captured = spec.captured
    traces = [captured.forward.trace, *(e.trace for e in backwards.values())]
    loops = list(dict.fromkeys(s for t in traces for s in t.rolled))
    longest, failure = dict.fromkeys(loops, 0), "no sizes that it was traced for"
    for sizes in _lengths(captured, loops) if loops else ():
        try:
            _compare(captured, backwards, sizes)
        except CaptureError as error:
            reason = f"its loop is at {sizes[loops[0]]} steps not what it is at few: {error.facts['reason']}"
            raise CaptureError(reason=reason, where=captured.forward_place()) from error
        except Exception as error:
            failure = f"{type(error).__name__}: {error}".partition("\n")[0]
        else:
            longest = {s: max(n, sizes[s]) for s, n in longest.items()}
    if not all(longest.values()):
        reason = f"its loop cannot be compared with the method on made-up arguments: {failure}"
        raise CaptureError(reason=reason, where=captured.forward_place())
    for symbol, most in longest.items():
        captured.session.env.evaluate_expr(sympy.Le(symbol, most))


# ------------------------------------------------------------------ lengths
def _lengths(captured: CapturedFunction, loops: Sequence[sympy.Symbol]) -> Iterator[Sizes]:
    """Sizes at which to compare: loops from short ones on, else a few elements; at last as they are."""
    hints, conditions = captured.session.env.hints(), captured.session.conditions(captured.symbols)
    own = {s: int(hints[s]) for s in captured.symbols}
    whole, steps = near(loops, own), FIRST
    while steps <= LONGEST:
        moved = {s: n + (steps - own[loops[0]]) * (s in whole) for s, n in own.items()}
        found = small_sizes(moved, conditions, whole) if min(moved.values()) > 0 else None
        yield from [found] if found is not None else []
        steps = min(steps * 3 // 2, LONGEST) if steps < LONGEST else LONGEST + 1
    yield own


# ------------------------------------------------------------------ one length
def _compare(captured: CapturedFunction, backwards: Backwards, sizes: Sizes) -> None:
    """Forward, and each backward, beside the user's on made-up numbers. Raises CaptureError where they differ."""
    drawn = torch.Generator().manual_seed(0)
    tensors = [_made_up(fake, sizes, drawn) for fake in captured.forward.fakes]
    args = captured.with_tensors(tensors)
    with capture_lock, torch.no_grad():
        if (why := check_forward(captured, args)) is not None:
            raise CaptureError(reason=why, where="unknown")
        results, count = replay_forward(captured, args), len(captured.forward.fake_outputs)
        residuals = [tensor_at(p, tensors, results[:count], results[count:]) for p in captured.residual_places]
        for kinds, entry in backwards.items():
            given = zip(kinds, gradient_likes(captured), strict=True)
            gradients = [None if k is None else _made_up(like, sizes, drawn) for k, like in given]
            check_backward(captured, entry, residuals, BoundSizes(captured.sizes(args)), gradients)


def _made_up(fake: Tensor, sizes: Sizes, drawn: torch.Generator) -> Tensor:
    """A tensor like this one at these sizes, with random numbers."""
    shape, strides = traced_numbers(fake.shape, sizes), traced_numbers(fake.stride(), sizes)
    single = [1 if s == 0 else n for n, s in zip(shape, strides, strict=True)]
    value = torch.empty_strided(single, strides, dtype=fake.dtype, device=fake.device)
    value.copy_(_numbers(single, fake.dtype, drawn))
    return value.expand(shape).requires_grad_(fake.requires_grad)


def _numbers(shape: Collection[int], dtype: torch.dtype, drawn: torch.Generator) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(list(shape), generator=drawn) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(list(shape), generator=drawn) * 0.5
    return torch.randint(0, INDICES, list(shape), generator=drawn)
