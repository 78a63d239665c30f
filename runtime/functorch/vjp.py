"""Cotangents of a body, through eager's own autograd: nested Functions, `detach` and custom gradients are eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ...tracer.capture.capture import is_capturing
from ...tracer.capture.debugging import without_anomaly_mode
from ...tracer.containers import with_replaced
from ...tracer.torch_private import transforms_active
from ..capture.guards import is_float, is_tracked
from ..capture.redraw import end_redraw, last_node, require_no_draw_after

Tensor = torch.Tensor
Body = Callable[..., Sequence[Any]]
Needed = tuple[bool, ...] | None
"""Which inputs need a gradient; None: all."""


def vjp_of(
    body: Body,
    inputs: Sequence[Any],
    cotangents: Sequence[Any],
    needed: Needed = None,
    again: bool = True,
    repeats: bool = False,
) -> list[Any]:
    """Gradients of `body` at `inputs`. Autograd watches only what needs one.

    again: they are to be differentiated, too. repeats: `body` draws what another run drew; its derivative does not.
    """
    if transforms_active():  # a forward mode that is captured: no tensor within it may be made to require grad
        return _vjp_within(body, inputs, cotangents, needed)
    with torch.enable_grad():
        # Leaves of its own for every input that is asked about, so that the graph ends here.
        is_leaf = [is_float(x) and (needed is None or needed[i]) for i, x in enumerate(inputs)]
        leaves = [tracked_alias(x) if a else x for a, x in zip(is_leaf, inputs, strict=True)]
        # torch keeps for good what it tells as the parent of a node that makes a NaN
        with without_anomaly_mode() if torch.is_anomaly_enabled() else nullcontext():
            outputs = body(*leaves)
        if not is_capturing():
            end_redraw()
        last = last_node() if repeats and is_capturing() else None

        # autograd takes neither outputs without a history nor an empty list.
        pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if is_tracked(o) and c is not None]
        sources = [leaf for a, leaf in zip(is_leaf, leaves, strict=True) if a]
        gradients: Sequence[Any] = [None] * len(sources)
        if pairs and sources:
            gradients = torch.autograd.grad(
                [p[0] for p in pairs], sources, [p[1] for p in pairs], allow_unused=True, create_graph=again
            )
        if last is not None:
            require_no_draw_after(last)
    supply = iter(gradients)
    return [next(supply) if a else None for a in is_leaf]


def _vjp_within(body: Body, inputs: Sequence[Any], cotangents: Sequence[Any], needed: Needed) -> list[Any]:
    """The same by torch.func; zeros for what no output depends on."""
    at = [i for i, x in enumerate(inputs) if is_float(x) and (needed is None or needed[i])]

    def of_asked(*values: Tensor) -> tuple[Tensor, ...]:
        outputs = body(*with_replaced(inputs, at, values))
        return tuple(o for o, c in zip(outputs, cotangents, strict=True) if c is not None and is_float(o))

    full: list[Any] = [None] * len(inputs)
    if not at:
        return full
    pulled: Any = torch.func.vjp(of_asked, *(inputs[i] for i in at))
    outputs, pull = pulled
    for i, g in zip(at, pull(tuple(c for c in cotangents if c is not None)) if outputs else (), strict=False):
        full[i] = g
    return full


def is_followed() -> bool:
    """True if gradients are to be differentiated again: by autograd, or by the capture that is under way."""
    return is_capturing() or torch.is_grad_enabled()


def tracked_alias(value: Any) -> Any:
    """The same float tensor as one that autograd follows; other values as they are."""
    if not is_float(value):
        return value
    return value.view_as(value) if value.requires_grad else value.detach().requires_grad_()


def transposed(
    probes: Sequence[Any], pulled: Sequence[Any], tangents: Sequence[Any], outputs: Sequence[Any]
) -> list[Any]:
    """One tangent per output: gradients at `probes`, which stand for cotangents, differentiated with tangents in hand.

    pulled: one gradient per tangent. Zeros where no gradient depends on a probe; None where there is none to follow.
    """
    pairs = [(g, t) for g, t in zip(pulled, tangents, strict=False) if is_tracked(g) and t is not None]
    leaves = [p for p in probes if is_tracked(p)]
    pushed: Sequence[Any] = [None] * len(leaves)
    if pairs and leaves:
        pushed = torch.autograd.grad(
            [g for g, _ in pairs], leaves, [t for _, t in pairs], allow_unused=True, create_graph=True
        )
    supply = iter(pushed)
    results = [next(supply) if is_tracked(p) else None for p in probes]
    triples = zip(results, probes, outputs, strict=True)
    return [torch.zeros_like(o) if r is None and is_tracked(p) else r for r, p, o in triples]
