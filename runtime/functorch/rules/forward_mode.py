"""jvp of a Function under torch.func: the user's own, else the transpose of backward, else forward differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import Function

from ....tracer.methods import backward_method
from ....tracer.torch_private import below_forward_mode, can_work_below, forward_levels, levels_active
from ...values.tensors import zeros
from .rules import FunctionRules
from .user_jvp import NestedForwardMode

Tensor = torch.Tensor


def jvp(rules: FunctionRules, ctx: Any, *tangents: Any) -> tuple[Any, ...]:
    """One tangent per result. The transpose of backward in its gradients honours a custom gradient here too."""
    captured, n = rules.spec.captured, len(rules.jvp_places)
    saved, inputs = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
    tangents = tangents[: captured.count]
    moving = [tangents[i] for i in captured.slots[: rules.tracked]]
    moving += [None] * (len(inputs) - rules.tracked)
    if rules.compiler.user.overrides("jvp"):
        visible = rules.outputs.of_tensors(_by_the_user(rules, saved, ctx.sizes, tangents))
    elif rules.compiler.options.derive_jvp is False:
        return tuple(Function.jvp(ctx, *tangents))  # torch's own error
    elif rules.compiler.options.derive_jvp == "forward" or _has_no_backward(rules):
        return _through_forward(rules, inputs, moving)
    else:
        visible = _written_in_place(rules, _by_transposition(rules, ctx, saved, tangents), moving)
    return (*visible, *_of_hidden(rules, ctx, inputs, moving))


def _has_no_backward(rules: FunctionRules) -> bool:
    """Nor has a plain function: its forward mode is torch's, by the jvp of each Function that it calls."""
    return rules.spec.captured.is_plain or backward_method(rules.compiler.user.cls) is None


def _through_forward(rules: FunctionRules, inputs: Sequence[Any], moving: Sequence[Any]) -> tuple[Any, ...]:
    """The derivative of forward itself; outputs that the user marked have no tangent."""
    pushed = rules.pushed_unit.pushforward(inputs, moving)[: rules.outputs.total]
    visible, hidden = rules.outputs.split(pushed)
    return (*_written_in_place(rules, rules.outputs.without_fixed(visible), moving), *hidden)


def _by_transposition(
    rules: FunctionRules, ctx: Any, residuals: Sequence[Any], tangents: Sequence[Any]
) -> list[Any]:
    sizes = [ctx.sizes[s] for s in rules.symbols]
    likes = [torch.empty(s[0], dtype=s[1], device=s[2]) for s in rules.outputs.split(ctx.likes)[0]]
    unit = rules.tangent_unit(tuple(t is not None for t in tangents))
    pushed = unit(*residuals, *sizes, *likes, *[t for t in tangents if t is not None])
    return rules.outputs.without_fixed(pushed)


def _of_hidden(rules: FunctionRules, ctx: Any, inputs: Sequence[Any], moving: Sequence[Any]) -> list[Any]:
    """Tangents of the values that forward kept: zeros where a float does not move, since torch takes no None for it."""
    if not rules.outputs.has_hidden:
        return []
    pushed = rules.outputs.split(rules.pushed_unit.pushforward(inputs, moving)[: rules.outputs.total])[1]
    likes = rules.outputs.split(ctx.likes)[1]
    return [zeros(s) if t is None and _is_differentiable(s[1]) else t for t, s in zip(pushed, likes, strict=True)]


def _is_differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _written_in_place(rules: FunctionRules, tangents: list[Any], moving: Sequence[Any]) -> list[Any]:
    """autograd wants the tangent of an argument that forward writes to be written as well, and returned."""
    dirty = {i: moving[index] for i, index in rules.outputs.written if moving[index] is not None}
    if dirty:  # the tangent of another output may be that tangent, as it was
        tangents = [t.clone() if isinstance(t, Tensor) else t for t in tangents]
    for i, tangent in dirty.items():
        tangents[i] = tangent.copy_(tangents[i])
    return tangents


def _by_the_user(rules: FunctionRules, saved: Sequence[Any], sizes: Any, tangents: Sequence[Any]) -> tuple[Any, ...]:
    """The tangents of the user's jvp. Under two levels of forward mode torch loses the outer tangent of its results:
    there it is captured or, where it cannot be, run one level down."""
    nested = forward_levels() > 1
    if not (nested and rules.compiler.pushes_below):
        try:
            return rules.user_jvp(saved, sizes, tangents, nested)
        except NestedForwardMode as error:
            calls = error.facts["why"].startswith("it calls")
            if not can_work_below or (calls and len(levels_active()) > 2):  # of what it calls torch loses more
                raise
            rules.compiler.pushes_below = not calls  # then no capture is tried again
    return below_forward_mode(rules.user_jvp, saved, sizes, tangents, False)  # type: ignore[no-any-return]
