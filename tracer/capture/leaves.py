"""`.requires_grad`, `.backward()` and `.grad` within a method: they are part of a graph for the method's own tensors.

    x = x.detach(); x.requires_grad = True; f(x).backward(g); return x.grad

What is done to a tensor from outside (an argument, a saved tensor, a parameter) is seen after the call: that has
to happen at every call, and no graph does it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from ..torch_private import is_fake

Tensor = torch.Tensor
GET_GRAD: Any = inspect.getattr_static(Tensor, "grad").__get__
SET_FLAG: Any = inspect.getattr_static(Tensor, "requires_grad").__set__


class OwnLeaves:
    """Tells the tensors that a method made from those that it was given."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.arguments = {id(t): t for t in arguments if isinstance(t, Tensor)}

    def why_not(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """The reason why what is asked of torch can be no part of a graph; None where it can."""
        if func == GET_GRAD and not self._is_own(args[0]):
            return "it reads `.grad` of a tensor"
        if func == SET_FLAG and not is_fake(args[0]):
            return "it assigns `.requires_grad` of a tensor"
        return self._why_no_backward(*args, **kwargs) if func is Tensor.backward else None

    def tracked_type(self, tensors: Sequence[Tensor]) -> str | None:
        """That autograd follows one of these tensors within the method; None where it does not."""
        own = any(t.requires_grad and self._is_own(t) for t in tensors)
        return "tensor with a history of its own" if own else None

    def _is_own(self, tensor: Any) -> bool:
        return is_fake(tensor) and id(tensor) not in self.arguments

    def _why_no_backward(
        self, output: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False,
        inputs: Any = None,
    ) -> str | None:  # fmt: skip
        if create_graph:
            return "it calls `.backward(create_graph=True)`"
        listed_inputs = list(inputs) if isinstance(inputs, Sequence) else [inputs]
        leaves = leaves_of(output) if inputs is None else listed_inputs
        return None if all(map(self._is_own, leaves)) else "it adds to `.grad` of a tensor that is not its own"


def leaves_of(output: Tensor) -> list[Any]:
    """The tensors in whose `.grad` the gradients of `output` end."""
    waiting, visited, collected = [output.grad_fn], set[Any](), list[Any]()
    if output.grad_fn is None and output.requires_grad:
        return [output]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        collected += [node.variable] if hasattr(node, "variable") else []
        waiting += [following for following, _ in node.next_functions]
    return collected
