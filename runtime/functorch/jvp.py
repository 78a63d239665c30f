"""Tangents of a body as torch has them: by differentiating its vjp, or by forward mode where that says something else.

A vjp that is differentiated once more makes a graph half the size, honours the backward of a nested Function without a
jvp, and is the same linear map. Where it is not, in torch itself, eager's forward mode decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual

from ...tracer.capture.grad_mode import Switches
from ...tracer.containers import with_replaced
from ...tracer.opaque.extension_calls import RecordedNodes
from ...tracer.torch_private import own_leaves_allowed, sharing_dual_level
from ..capture.guards import is_float, is_tracked
from .vjp import tracked_alias, transposed

Tensor = torch.Tensor
Body = Callable[..., Sequence[Any]]
OWN_FORWARD_MODE = frozenset(
    f"aten::{name}"
    for name in "logcumsumexp linalg_cholesky_ex cholesky _linalg_eigh linalg_eigh linalg_lu linalg_lu_factor_ex "
    "lu_unpack triangular_solve as_strided as_strided_scatter max_unpool2d max_unpool3d".split()
)
"""Operations whose forward mode is not the transpose of their vjp, in torch: through the logarithm of a gradient, by a
matrix that counts as symmetric or triangular, over elements that share memory."""


class NotTransposable(Exception):
    """The vjp of a body is, differentiated once more, not its forward mode."""


def jvp_of(body: Body, inputs: Sequence[Any], tangents: Sequence[Any], calls: bool = False) -> list[Any]:
    """Tangents of `body`. calls: whether it calls Functions, of which each may bring its own jvp."""
    recorded, ways = RecordedNodes.begin(), [_by_double_vjp, _by_forward_mode]
    if calls or recorded is None:
        ways.reverse()
    try:
        return ways[0](body, inputs, tangents)
    except (NotTransposable, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_missing(error):
            raise
        if recorded is not None:
            recorded.undo()
    return ways[1](body, inputs, tangents)


def _is_missing(error: RuntimeError) -> bool:
    """True if torch has no derivative of this kind for an operation."""
    return isinstance(error, NotImplementedError) or "derivative for" in str(error)


def _by_forward_mode(body: Body, inputs: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    moved = [i for i, t in enumerate(tangents) if t is not None and is_float(inputs[i])]
    full: list[Any] = []
    captured = RecordedNodes.begin() is not None

    def of_moved(*primals: Tensor) -> tuple[Tensor, ...]:
        with own_leaves_allowed() if captured else nullcontext():
            outputs = body(*with_replaced(inputs, moved, primals))
        full[:] = [o if is_float(o) and _moves(o) else None for o in outputs]
        return tuple(o for o in full if o is not None) or primals  # torch takes no function without results

    primals, steps = (tuple(values[i] for i in moved) for values in (inputs, tangents))
    with sharing_dual_level():
        results: tuple[Any, ...] = torch.func.jvp(of_moved, primals, steps) if moved else ((), ())
    # torch.func makes float64 of a float32 number (no axis) beside one of Python; a tangent has its result's dtype
    pushed = iter([t.to(r.dtype) for r, t in zip(*results, strict=True)])
    return [None if o is None else next(pushed) for o in full]


def _moves(output: Tensor) -> bool:
    pair: Any = unpack_dual(output)  # type: ignore[no-untyped-call]
    return pair.tangent is not None


def _by_double_vjp(body: Body, inputs: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    recorded = RecordedNodes.begin()
    with torch.enable_grad():
        leaves = [tracked_alias(x) for x in inputs]
        with Switches() as switches:
            outputs = list(body(*leaves))
        if switches.is_unrecorded or (recorded is not None and recorded.names() & OWN_FORWARD_MODE):
            raise NotTransposable
        duals = [torch.zeros_like(o).requires_grad_() if is_tracked(o) else None for o in outputs]
        cotangents = [d for d in duals if d is not None]
        moved = [leaves[i] for i, t in enumerate(tangents) if t is not None and is_float(leaves[i])]
        steps = [t for i, t in enumerate(tangents) if t is not None and is_float(leaves[i])]
        live = [o for o, d in zip(outputs, duals, strict=True) if d is not None]
        pulled: Sequence[Any] = ()
        if live and moved:
            pulled = torch.autograd.grad(live, moved, cotangents, create_graph=True, allow_unused=True)
        return transposed(duals, pulled, steps, outputs)
