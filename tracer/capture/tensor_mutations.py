"""Changes that a method makes to tensors beside their values: attributes, hooks, another `requires_grad`. A graph
would lose it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..containers import tensors_in
from ..torch_private import is_cache, plain_tensors

Tensor = torch.Tensor
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
Marks = tuple[dict[str, Any], int, bool]


class TensorMarks:
    """The attributes of the tensors that a method is given, before it runs."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.before = [(t, _marks_of(t)) for t in arguments if isinstance(t, Tensor)]

    def why_not(self, returned: Any) -> str | None:
        """The change that the method made to a tensor that it was given or returns; None where it made none."""
        argument_ids = {id(t) for t, _ in self.before}
        fresh = [t for t in tensors_in(returned) if id(t) not in argument_ids]
        all_of_them = [*self.before, *((t, ({}, 0, t.requires_grad)) for t in fresh)]
        return next((why for t, marks in all_of_them if (why := _difference(marks, _marks_of(t)))), None)


def _marks_of(tensor: Tensor) -> Marks:
    """(attributes, how many hooks, whether it requires a gradient)."""
    own = _own_attributes() if isinstance(tensor, FakeTensor) else ()
    attributes = {name: value for name, value in vars(tensor).items() if name not in own and not is_cache(name)}
    hooks = sum(len(getattr(tensor, name, None) or ()) for name in HOOKS)
    return attributes, hooks + tensor.retains_grad, tensor.requires_grad


def _difference(before: Marks, after: Marks) -> str | None:
    for name in {**after[0], **before[0]}:
        if name not in after[0] or name not in before[0] or after[0][name] is not before[0][name]:
            return f"it assigns `.{name}` of a tensor"
    if after[1] != before[1]:
        return "it registers a hook on a tensor"
    return None if after[2] == before[2] else "it assigns `.requires_grad` of a tensor"


@functools.cache
def _own_attributes() -> frozenset[str]:
    """The attributes that every fake tensor has. Not asked for at import: a torch with CUDA and no GPU forks badly
    after fakes."""
    with plain_tensors(), FakeTensorMode():
        return frozenset((*vars(torch.empty(1)), *dir(FakeTensor)))
