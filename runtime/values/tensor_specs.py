"""Arguments of `explain`: tensors, meta tensors, or specifications such as "bf16[8192,4096]"; none needs memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from ...ir.errors import SpecError
from ...tracer.dtypes import TO_TORCH
from ...tracer.torch_private import FakeTensorMode

Tensor = torch.Tensor
_SPEC = re.compile(r"^\s*(\w+)\s*\[([\d\s,_]*)\]\s*$")
_BEGINNING = re.compile(r"^\s*(\w+)\s*\[")

_ALIASES = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
            "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "b1", "float": "f32", "double": "f64", "half": "f16",
            "long": "i64", "int": "i32"}  # fmt: skip


def parse_spec(spec: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """ "bf16[8192,4096]" -> (torch.bfloat16, (8192, 4096)). Raises SpecError."""
    match = _SPEC.match(spec)
    dtype = _ALIASES.get(match.group(1), match.group(1)) if match else ""
    if match is None or dtype not in TO_TORCH:
        raise SpecError(spec=spec)
    sizes = [s for s in match.group(2).replace("_", "").split(",") if s.strip()]
    return TO_TORCH[dtype], tuple(int(s) for s in sizes)


def fake_argument(value: Any) -> Any:
    """A tensor without memory for a specification, a meta or a real tensor; other arguments as they are."""
    if isinstance(value, str) and (is_spec(value) or ("[" in value and value.rstrip().endswith("]"))):
        dtype, shape = parse_spec(value)
        return fake_tensor(shape, None, dtype, torch.device("cpu"), dtype.is_floating_point)
    if isinstance(value, Tensor):
        device = torch.device("cpu") if value.device.type == "meta" else value.device
        return fake_tensor(tuple(value.shape), value.stride(), value.dtype, device, value.requires_grad)
    return value


def fake_tensor(shape: Any, strides: Any, dtype: torch.dtype, device: torch.device, grad: bool) -> Tensor:
    with FakeTensorMode():
        fake = (
            torch.empty(shape, dtype=dtype, device=device)
            if strides is None
            else torch.empty_strided(shape, strides, dtype=dtype, device=device)
        )
    return fake.requires_grad_() if grad else fake


def with_gradients_asked(args: Sequence[Any]) -> list[Any]:
    """Where no argument asks for a gradient, every floating one is taken to: backward is to be explained too."""
    if any(isinstance(a, Tensor) and a.requires_grad for a in args):
        return list(args)
    return [a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


def is_spec(value: Any) -> bool:
    """True if an argument is a specification, or begins like one: `parse_spec` then says what is wrong with it."""
    if not isinstance(value, str):
        return False
    beginning = _BEGINNING.match(value)
    return _SPEC.match(value) is not None or (beginning is not None and beginning.group(1) in {*_ALIASES, *TO_TORCH})
