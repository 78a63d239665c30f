"""backward of a Function under torch.func: the user's, and the gradient of the values that forward kept.

A hidden output's gradient flows back through forward, so that second order is whole and not silently partial.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.autograd.function import Function

from ....tracer.methods import backward_method
from ...capture.captured_backward import gradients_per_output
from ...compiled.backward import require_transposed
from ...fallback.answer import UNDER_FUNC, Fault, is_fault, put_on_record
from ...values.tensors import zeros
from .rules import FunctionRules


def backward(rules: FunctionRules, ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    """One gradient per argument: from kernels; by the user's own body after a mistake of ours, on record."""
    saved = ctx.saved_tensors
    try:
        require_transposed(rules.compiler, rules.spec)
        return _gradients(rules, ctx, saved, gradients)
    except Exception as error:
        if not is_fault(error):
            raise
        fault = Fault.of(error)
    results = _gradients(rules, ctx, saved, gradients, as_written=True)
    put_on_record(rules.compiler, UNDER_FUNC, fault, gradients)
    return results


def _gradients(
    rules: FunctionRules, ctx: Any, saved: Sequence[Any], gradients: Sequence[Any], as_written: bool = False
) -> tuple[Any, ...]:
    captured = rules.spec.captured
    n = len(captured.residual_places)
    residuals, inputs = saved[:n], saved[n:]
    if backward_method(rules.compiler.user.cls) is None:
        return _derived(rules, inputs, gradients)
    visible, hidden = rules.outputs.split(gradients)
    moves = any(g is not None for g in hidden)
    result: list[Any] = [None] * len(captured.arguments)
    # The user's backward, which runs without any gradient as well if there is no other.
    if any(g is not None for g in visible) or not moves:
        full = _per_output(rules, ctx, visible)
        sizes = [ctx.sizes[s] for s in rules.symbols]
        if as_written:
            result[: captured.count] = rules.backward_as_written(residuals, sizes, full)
        else:
            result[: captured.count] = rules.backward_for(full)(*residuals, *sizes, *full)
    # The second-order contribution of values that forward kept: their gradient goes back through forward.
    if moves:
        cotangents = [*[None] * rules.outputs.count, *hidden]
        _add(rules, result, rules.forward_unit.pullback(inputs, cotangents))
    return tuple(result)


def _per_output(rules: FunctionRules, ctx: Any, gradients: Sequence[Any]) -> list[Any]:
    """One gradient per user output: zeros where the user's backward expects them, None for plain objects."""
    if rules.spec.captured.forward.materialize_grads:
        gradients = [zeros(s) if g is None else g for g, s in zip(gradients, ctx.likes, strict=False)]
    return gradients_per_output(rules.spec.captured, gradients)


def _derived(rules: FunctionRules, inputs: Sequence[Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
    """The derivative of forward itself, where the user wrote forward alone."""
    if rules.compiler.user.cls.jvp is not Function.jvp:  # type: ignore[attr-defined]
        Function.backward(None, *gradients)  # the user's jvp may say otherwise: torch's own error
    result: list[Any] = [None] * len(rules.spec.captured.arguments)
    _add(rules, result, rules.forward_unit.pullback(inputs, gradients))
    return tuple(result)


def _add(rules: FunctionRules, result: list[Any], gradients: Sequence[Any]) -> None:
    """Gradients of the tensor arguments, added to those that are there."""
    for slot, gradient in zip(rules.spec.captured.slots[: rules.tracked], gradients, strict=False):
        if gradient is not None:
            result[slot] = gradient if result[slot] is None else result[slot] + gradient
