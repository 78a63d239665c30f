"""Saved tensors of which some are lists, as long as a loop: one stack each in a graph, and one by one under hooks.

Hooks pack what the user saved, each tensor once: where any are active, slices of the stacks are saved in their place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...tracer.loops.stacks import stacked_again, unstacked
from ...tracer.torch_private import hooks_are_active, saved_tensors_of
from ..capture.captured import CapturedFunction
from ..capture.user_methods import stack_lengths
from ..execution.source_writer import SourceWriter


def are_listed(captured: CapturedFunction) -> bool:
    """True if nodes that are made now save lists one by one."""
    return bool(captured.forward.stacks) and hooks_are_active()


def users_expression(text: SourceWriter, captured: CapturedFunction, saved: str) -> str:
    """The expression of what a node saves, from that of what its graphs save."""
    if not are_listed(captured):
        return saved
    return f"{text.constant(unstacked, 'unstacked')}({saved}, {captured.forward.stacks})"


def kept_by(ctx: Any, captured: CapturedFunction) -> tuple[Tensor, ...]:
    """The saved tensors of a node as its graphs take them."""
    kept: tuple[Tensor, ...] = saved_tensors_of(ctx)
    if not getattr(ctx, "_fusegrad_listed", False):
        return kept
    return tuple(stacked_again(kept, stack_lengths(captured, ctx._fusegrad_sizes)))


def users_of(ctx: Any, captured: CapturedFunction, graphs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same as the user saved them. graphs: as the graphs take them; where the node lists them, as it keeps them."""
    return graphs if getattr(ctx, "_fusegrad_listed", False) else unstacked(graphs, captured.forward.stacks)
