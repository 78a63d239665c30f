"""Results of a unit: which history autograd is to see of them, and which memory they have."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.forward_ad import make_dual, unpack_dual

from ...tracer.capture.capture import is_capturing
from ...tracer.torch_private import has_tangent, is_batched, memory_of, transforms_active, unwrap_functorch
from ...tracer.trace import Trace
from ..capture.activity import independent_results, sources_of
from ..capture.guards import is_float, is_tracked

Tensor = torch.Tensor
Executed = tuple[Trace, list[int]] | None
"""A graph that ran, and which arguments are its inputs, by number."""

last_execution = threading.local()
"""`graph`: what this thread executed last (`Executed`)."""


def ran(executed: Executed, results: Sequence[Any]) -> Sequence[Any]:
    """The results of an execution, with a note of what it executed."""
    last_execution.graph = executed
    return results


# ------------------------------------------------------------------ history
def constant_results(
    executed: Executed, args: Sequence[Any], needs: Sequence[bool], tangents: bool = False
) -> list[int]:
    """The results of an execution on these arguments that depend on none that needs a gradient.

    tangents: or that moves, by what forward mode goes through.
    """
    if executed is None:
        return []
    trace, live = executed
    return independent_results(trace, [n for n, i in enumerate(live) if needs[i] and is_float(args[i])], tangents)


def needing_derivatives(needs: Sequence[bool], args: Sequence[Any]) -> list[bool]:
    """Which arguments a derivative is taken in: those that need a gradient, and dual numbers."""
    return [need or has_tangent(a) for need, a in zip(needs, args, strict=True)]


def without_history(result: Any) -> Any:
    """A dual number without what led to it: of a Function with tangents every result is differentiable."""
    if not is_tracked(result):
        return result
    if not has_tangent(result):
        return result.detach()
    pair: Any = unpack_dual(result)  # type: ignore[no-untyped-call]
    return make_dual(pair.primal.detach(), pair.tangent)  # type: ignore[no-untyped-call]


def unrecorded(results: Sequence[Any], args: Sequence[Any]) -> Sequence[Any]:
    """Results that torch's autograd computed, without the graph that it made for that where none is asked for."""
    if torch.is_grad_enabled() or transforms_active():
        return results
    return tuple(r if is_among(r, args) or not is_tracked(r) else without_history(r) for r in results)


def without_idle(executed: Executed, args: Sequence[Any]) -> list[Any]:
    """The arguments, detached where no result depends on them: in eager nothing leads back there (by a mask, say).

    A tangent goes on where the grad mode is off.
    """
    if executed is None:
        return list(args)
    trace, live = executed
    by_kind = [frozenset().union(*sources_of(trace, tangents)) for tangents in (False, True)]
    sources, moving = ({live[n] for n in numbers if n < len(live)} for numbers in by_kind)

    def attached(i: int, value: Any) -> Any:
        if i in sources or not is_tracked(value):
            return value
        return without_history(value) if i in moving else value.detach()

    return [attached(i, a) for i, a in enumerate(args)]


# ------------------------------------------------------------------ memory
def is_among(value: Any, tensors: Sequence[Any]) -> bool:
    """True if a tensor is one of these itself."""
    return isinstance(value, Tensor) and any(value is t for t in tensors)


def own_memory(result: Any) -> Any:
    """A value that repeats elements (the same in every lane, expanded), in full: no tangent fits its layout."""
    if not isinstance(result, Tensor):
        return result
    repeats = any(step == 0 and n > 1 for step, n in zip(result.stride(), result.shape, strict=True))
    return result.contiguous() if repeats else result


def as_made(results: Sequence[Any], args: Sequence[Any]) -> Sequence[Any]:
    """The results; a part of memory that nothing else shows as itself: autograd lets no view of a Function be written
    to, and what eager's own operations made of that memory can be."""
    tensors = [t for t in (*results, *args) if isinstance(t, Tensor)]
    views = [r for r in results if isinstance(r, Tensor) and r._is_view()]
    if not views or is_capturing() or any(t.layout is not torch.strided or is_batched(t) for t in tensors):
        return results
    uses = Counter(memory_of(unwrap_functorch(t)) for t in tensors)
    alone = {id(v) for v in views if uses[memory_of(unwrap_functorch(v))] == 1}
    return tuple(r.detach() if id(r) in alone else r for r in results)
