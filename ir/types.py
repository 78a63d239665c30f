"""The type of a value: a dtype and a symbolic shape. No layout: strides belong to buffers, at the edge of a graph."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import sympy

Size: TypeAlias = "int | sympy.Expr"
"""A concrete or symbolic number of elements."""

FLOATS = ("f16", "bf16", "f32", "f64")
LOW_FLOATS = ("f16", "bf16")
COMPLEX = ("c64", "c128")
SIGNED = ("i8", "i16", "i32", "i64")
UNSIGNED = ("u8", "u16", "u32", "u64")
INTEGERS = SIGNED + UNSIGNED
FLOAT8 = ("f8e4m3fn", "f8e5m2", "f8e4m3fnuz", "f8e5m2fnuz")
ITEMSIZE = {
    "b1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8,
    "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16, **dict.fromkeys(FLOAT8, 1),
}  # fmt: skip
DTYPES = tuple(ITEMSIZE)


def simplify_size(size: Size) -> Size:
    """The size as a plain int where it is a number, else as a sympy expression."""
    return int(size) if isinstance(size, sympy.Integer) else size


def product(sizes: Iterable[Size]) -> Size:
    """prod(sizes), 1 for none."""
    return simplify_size(math.prod(sizes, start=sympy.Integer(1)))


def elements_in_memory(shape: Iterable[Size], strides: Iterable[Size]) -> Size:
    """The elements in memory: an axis of stride 0 has one."""
    return product(n for n, step in zip(shape, strides, strict=True) if step != 0)


@dataclass(frozen=True, slots=True)
class TensorType:
    """f32[s0, 4096]: sizes are ints or sympy expressions over the symbols of the capture."""

    shape: tuple[Size, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"unknown dtype {self.dtype!r}")
        object.__setattr__(self, "shape", tuple(simplify_size(d) for d in self.shape))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> Size:
        return product(self.shape)

    @property
    def nbytes(self) -> Size:
        return simplify_size(self.numel * ITEMSIZE[self.dtype])

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    def with_dtype(self, dtype: str) -> TensorType:
        return TensorType(self.shape, dtype)

    def with_shape(self, shape: Iterable[Size]) -> TensorType:
        return TensorType(tuple(shape), self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def contiguous_strides(shape: Iterable[Size]) -> tuple[Size, ...]:
    """Row-major strides in elements, as torch gives them: a size-0 dimension counts as one."""
    return _contiguous_strides(tuple(shape))


@functools.lru_cache(maxsize=1 << 12)
def _contiguous_strides(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = simplify_size(step * size) if size != 0 else step
    return tuple(reversed(strides))
