"""From the plans alone, nothing compiled: launches, bytes moved over the least possible, bytes saved for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fusegrad import explain
from fusegrad.runtime.values.tensor_specs import is_spec, parse_spec

from .suite import Case

DIRECTIONS = ("forward", "backward")
TARGET = "cuda:90"


def plan(case: Case, target: str = TARGET) -> dict[str, Any]:
    """What the compiler plans for a case, as plain values; `asked`: bytes that the class itself saves."""
    found = explain(case.function, *case.args, target=target)
    facts = found.to_dict()
    # a method that is compiled may have a remark: a loop of it is traced step by step
    why = {name: r.reason for name, r in found.methods.items() if r.reason and r.status not in ("derived", "compiled")}
    return {
        "case": case.name,
        "launches": [facts["launches"][d] for d in DIRECTIONS],
        "library": [sum(k.kind != "triton" for k in found.kernels if k.direction == d) for d in DIRECTIONS],
        "bytes": [facts["bytes"][d] for d in DIRECTIONS],
        "minimal": [facts["bytes"][f"minimal_{d}"] for d in DIRECTIONS],
        "saved": facts["saved_bytes"],
        "asked": asked_bytes(case),
        "as_written": why,
    }


def asked_bytes(case: Case) -> int:
    """Bytes of the distinct tensors that the class saves by itself, in eager, on tensors without memory."""
    kept: dict[Any, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        kept[place] = tensor.numel() * tensor.element_size()
        return tensor

    args = [memoryless(a) for a in case.args]
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = case.function.apply(*args)  # type: ignore[attr-defined]
    del result  # alive until here: no place is counted for two tensors
    return sum(kept.values())


def memoryless(value: Any) -> Any:
    """A meta tensor for a specification; it requires grad where it can."""
    if not is_spec(value):
        return value
    dtype, shape = parse_spec(value)
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)
