"""The user's own vmap, called with arguments in the user's form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.utils._pytree as pytree

from ....tracer.containers import Hole, close_containers
from .user_outputs import UserOutputs

if TYPE_CHECKING:
    from ...specialize.specialization import Specialization


def call_user_vmap(
    cls: type,
    spec: Specialization,
    outputs: UserOutputs,
    info: Any,
    in_dims: Sequence[Any],
    tensors: Sequence[Any],
    hidden: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
) -> Any:
    """(results, where their batch axes are), the hidden values behind the user's.

    hidden: the values that forward keeps besides, of the results and their batch axes.
    """
    captured = spec.captured
    args = close_containers(captured.with_tensors(tensors), captured.count)
    result = cls.vmap(info, _dims_of_containers(spec, in_dims), *args)  # type: ignore[attr-defined]
    if not isinstance(result, tuple) or len(result) != 2:
        return result  # torch says what is wrong
    several = isinstance(result[0], tuple)
    results = result[0] if several else (result[0],)
    out_dims = result[1] if isinstance(result[1], tuple) and several else (result[1],) * len(results)
    if len(results) != len(out_dims) or not all(d is None or isinstance(d, int) for d in out_dims):
        return result
    results, out_dims = tuple(outputs.of_tensors(results)), tuple(outputs.of_tensors(out_dims))
    extra = hidden(results, out_dims)
    return (*results, *extra), (*out_dims, *[0] * len(extra))


def _dims_of_containers(spec: Specialization, in_dims: Sequence[Any]) -> tuple[Any, ...]:
    """The batch dimensions in the form of the user's arguments."""
    captured = spec.captured

    def of_leaf(leaf: Any) -> Any:
        return in_dims[leaf.key] if isinstance(leaf, Hole) else None

    args = captured.arguments[: captured.count]
    return tuple(in_dims[i] if i in captured.slots else pytree.tree_map(of_leaf, a) for i, a in enumerate(args))
