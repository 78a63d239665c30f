"""The stand-ins for `ctx` while a method is captured: they record what the method does, and compute nothing."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_TORCHS = (
    "to_save", "saved_for_forward", "dirty_tensors", "non_differentiable", "materialize_grads",
    "_materialize_non_diff_grads",
)  # fmt: skip
"""Fields of the real ctx: a user who assigns one has called the method that sets it."""


class ForwardContext:
    """The ctx of forward and setup_context during a capture. Calls end up in the fields that the real ctx has, last
    call wins."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        slots = {
            "needs_input_grad": needs_input_grad,
            "to_save": (),
            "saved_for_forward": (),
            "dirty_tensors": (),
            "non_differentiable": (),
            "materialize_grads": True,
            "_materialize_non_diff_grads": True,
            "_fusegrad_attributes": {},
        }
        self.__dict__.update(slots)

    def save_for_backward(self, *tensors: Any) -> None:
        self.__dict__["to_save"] = _only_tensors(tensors)

    def save_for_forward(self, *tensors: Any) -> None:
        self.__dict__["saved_for_forward"] = _only_tensors(tensors)

    def mark_dirty(self, *tensors: Any) -> None:
        self.__dict__["dirty_tensors"] = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.__dict__["non_differentiable"] = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.__dict__["materialize_grads"] = value

    def __setattr__(self, name: str, value: Any) -> None:
        (self.__dict__ if name in _TORCHS else self.__dict__["_fusegrad_attributes"])[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self.__dict__["_fusegrad_attributes"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_fusegrad_attributes"][name]
        except KeyError:
            raise AttributeError(f"ctx has no attribute {name!r}") from None


def attributes_of(ctx: ForwardContext) -> dict[str, Any]:
    """The attributes that the user put on ctx."""
    return ctx.__dict__["_fusegrad_attributes"]  # type: ignore[no-any-return]


class BackwardContext:
    """The ctx of backward and jvp during a capture: the residuals, the attributes that forward left,
    `needs_input_grad`."""

    def __init__(
        self, saved_tensors: Sequence[Any], attributes: Mapping[str, Any], needs_input_grad: tuple[bool, ...]
    ) -> None:
        self.__dict__.update(attributes)
        self.saved_tensors = tuple(saved_tensors)
        self.needs_input_grad = needs_input_grad

    def left(self) -> dict[str, Any]:
        """The attributes as they are now."""
        return {k: v for k, v in vars(self).items() if k not in ("saved_tensors", "needs_input_grad")}

    @property
    def saved_variables(self) -> tuple[Any, ...]:
        warnings.warn("'saved_variables' is deprecated; use 'saved_tensors'", DeprecationWarning, stacklevel=2)
        return self.saved_tensors


@functools.lru_cache(maxsize=1024)
def backward_context(function: str) -> type[BackwardContext]:
    """Of a Function by its name, which Python's own error says where an attribute is missing."""
    return type(f"{function}Backward", (BackwardContext,), {})


def _only_tensors(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    for t in tensors:
        if t is not None and not isinstance(t, torch.Tensor):
            raise TypeError(
                f"save_for_backward can only save variables, but got an argument of type {type(t).__name__}"
            )
    return tensors
