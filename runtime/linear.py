"""The user's backward as a linear map of its gradients: what is transposed for forward mode, what is refused by name.

A backward that is not linear in its gradients is no vjp, and no transpose of it would be the jvp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..ir.errors import FusegradError
from ..tracer.torch_private import grad_switch

Tensor = torch.Tensor


class NonLinearBackward(FusegradError):
    """Forward mode is derived by transposing backward, which has to be linear in its gradients."""

    message = (
        "jvp({function}): backward is not linear in its gradients: {why}\n  at:   {where}\n"
        "  fix:  write a `jvp` staticmethod, or keep the operation off the way of the gradients."
    )


_KINKS = ("Clamp", "Relu", "Abs", "Sgn", "Sign", "Max", "Min", "Amax", "Amin", "Sort", "Topk", "Hardtanh", "Threshold",
          "LeakyRelu", "Round", "Floor", "Ceil", "Trunc", "LinalgVectorNorm", "Norm")  # fmt: skip
"""autograd nodes that are linear in pieces only: their derivative tells nothing about another gradient."""


def why_not_linear(gradients: Sequence[Tensor], transposed: Sequence[Any], probes: Sequence[Tensor]) -> str | None:
    """Why what was computed from the probes is not linear in them; None where nothing speaks against it."""
    for gradient in gradients:
        for node in _ways(gradient, probes):
            name = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
            if name in _KINKS:
                return f"it goes through `{name.lower()}`"
    depends = any(isinstance(t, Tensor) and depends_on(t, probes) for t in transposed)
    return "its derivative depends on them" if depends else None


def depends_on(tensor: Tensor, probes: Sequence[Tensor]) -> bool:
    """Whether autograd recorded a way from a probe to the tensor."""
    return any(tensor is p for p in probes) or bool(_ways(tensor, probes))


def _ways(tensor: Tensor, probes: Sequence[Tensor]) -> list[Any]:
    """The autograd nodes between the probes and the tensor."""
    readers: dict[Any, list[Any]] = {}
    waiting = [tensor.grad_fn] if tensor.grad_fn is not None else []
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for source in (n for n, _ in node.next_functions if n is not None):
            readers.setdefault(source, []).append(node)
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    on_the_way = dict.fromkeys(n for n in seen if any(getattr(n, "variable", None) is p for p in probes))
    waiting = list(on_the_way)
    while waiting:
        fresh = [r for r in readers.get(waiting.pop(), ()) if r not in on_the_way]
        on_the_way.update(dict.fromkeys(fresh))
        waiting += fresh
    return list(on_the_way)


class AttachedGradients(TorchFunctionMode):
    """Within the block `detach` and `no_grad` do not cut the way of a gradient: they stop double differentiation, and
    change nothing about which linear map backward is."""

    def __init__(self, probes: Sequence[Tensor]) -> None:
        super().__init__()
        self.probes = probes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is grad_switch:
            return None
        if func in _CUTS and depends_on(args[0], self.probes):
            return args[0].view_as(args[0])
        return func(*args, **(kwargs or {}))


_CUTS = (torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
