"""Results of a rolled trace, in memory as where the steps run one by one: their strides are what a user sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..reasons import NotRolled

Tensor = torch.Tensor


def result_values(gm: torch.fx.GraphModule) -> list[Any]:
    """The fake of each result; None for what is no node."""
    (results,) = gm.graph.find_nodes(op="output")[0].args
    return [r.meta.get("val") if isinstance(r, torch.fx.Node) else None for r in results]


def result_strides(gm: torch.fx.GraphModule) -> list[torch.Size | None]:
    """The strides of each result; None for what is no tensor."""
    return [torch.Size(v.stride()) if isinstance(v, Tensor) else None for v in result_values(gm)]


def in_layout(value: Any, strides: Sequence[Any] | None) -> Any:
    """The same numbers with these strides, under the tracer. Raises NotRolled where memory would have gaps."""
    if strides is None or not isinstance(value, Tensor) or _lies_so(value, strides):
        return value
    wide = [d for d in range(value.dim()) if _present(value.shape[d]) != 1]
    spread = [d for d in wide if _present(strides[d]) == 0]
    order = sorted((d for d in wide if d not in spread), key=lambda d: -_present(strides[d]))
    once = _once_along(value, spread)
    axes = [*order, *(d for d in range(value.dim()) if d not in order)]
    dense = once.permute(axes).clone(memory_format=torch.contiguous_format)
    found = dense.permute([axes.index(d) for d in range(value.dim())]).expand_as(value)
    if not _lies_so(found, strides):
        raise NotRolled("what it returns or keeps is a part of a larger tensor")
    return found


def _lies_so(value: Tensor, strides: Sequence[Any]) -> bool:
    sizes = [_present(n) for n in value.shape]
    pairs = zip(sizes, value.stride(), strides, strict=True)
    return 0 in sizes or all(n == 1 or _present(a) == _present(b) for n, a, b in pairs)


def _present(size: Any) -> Any:
    """The value of a size now: what was told at another length has the number of that one."""
    return int(size.node.shape_env.value(size.node.expr)) if isinstance(size, torch.SymInt) else size


def _once_along(value: Tensor, axes: Sequence[int]) -> Tensor:
    """Of numbers that are the same along some axes the first."""
    for axis in axes:
        value = value.narrow(axis, 0, 1)
    return value
