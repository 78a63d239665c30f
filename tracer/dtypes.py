"""The names that the IR gives to torch's dtypes, and back."""

from __future__ import annotations

import torch

from ..ir.errors import LoweringError

TO_TORCH: dict[str, torch.dtype] = {
    "b1": torch.bool, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "u8": torch.uint8, "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64,
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
    "c64": torch.complex64, "c128": torch.complex128,
    "f8e4m3fn": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2,
    "f8e4m3fnuz": torch.float8_e4m3fnuz, "f8e5m2fnuz": torch.float8_e5m2fnuz,
}  # fmt: skip
FROM_TORCH: dict[torch.dtype, str] = {dtype: name for name, dtype in TO_TORCH.items()}


def from_torch(dtype: torch.dtype) -> str:
    """The IR's name of a dtype; raises LoweringError for one that it has no name for."""
    if dtype not in FROM_TORCH:
        raise LoweringError(f"values of dtype {dtype} have no type in the IR")
    return FROM_TORCH[dtype]


def to_torch(name: str) -> torch.dtype:
    return TO_TORCH[name]
