"""The cases: a Function of the suite at the shapes that PERFORMANCE measures it at, as specifications for `explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import functions as f

MATRICES = ("512,1024", "4096,4096", "16384,4096", "8192,8192", "8192,16384", "4096,5120", "8192,50257", "65536,256")
VOCABULARIES = ("8192,32000", "8192,128256", "8192,50257")


@dataclass(frozen=True)
class Case:
    """One Function at one shape. `args`: tensor specifications and plain values."""

    function: type
    shape: str
    args: tuple[Any, ...]

    @property
    def name(self) -> str:
        return f"{self.function.__name__}[{self.shape}]"


def _rows(function: type, *parts: str | float | int, shapes: tuple[str, ...] = MATRICES) -> list[Case]:
    """Parts are specifications in which M, N and R stand for the shape, its last and its first size."""

    def filled(part: Any, shape: str) -> Any:
        if not isinstance(part, str):
            return part
        first, last = shape.split(",")[0], shape.split(",")[-1]
        return part.replace("M", shape).replace("N", last).replace("R", first)

    return [Case(function, shape, tuple(filled(p, shape) for p in parts)) for shape in shapes]


CASES: list[Case] = [
    *_rows(f.SwiGLU, "bf16[M]", "bf16[M]"),
    *_rows(f.GeGLU, "bf16[M]", "bf16[M]"),
    *_rows(f.SquaredReLU, "bf16[M]"),
    *_rows(f.BiasGELU, "bf16[M]", "bf16[N]"),
    *_rows(f.DropoutBiasResidual, "bf16[M]", "bf16[N]", "bf16[M]", "i64[1]", 0.1),
    *_rows(f.RMSNorm, "bf16[M]", "bf16[N]", 1e-6),
    *_rows(f.AddRMSNorm, "bf16[M]", "bf16[M]", "bf16[N]", 1e-6),
    *_rows(f.LayerNorm, "bf16[M]", "bf16[N]", "bf16[N]", 1e-5),
    *_rows(f.DyT, "bf16[M]", "f32[1]", "bf16[N]", "bf16[N]"),
    *_rows(f.GroupNorm, "bf16[M]", "bf16[512]", "bf16[512]", 32, 1e-5, shapes=("32,512,64,64",)),
    *_rows(f.RMSNormFP8, "bf16[M]", "bf16[N]", 1e-6),
    *_rows(f.PolyNorm, "bf16[M]", "f32[3]", "f32[1]", 1e-6),
    *_rows(f.Softmax, "bf16[M]"),
    *_rows(f.CausalSoftmax, "bf16[M]", shapes=("16,4096,4096",)),
    *_rows(f.ColumnSoftmax, "bf16[M]"),
    *_rows(f.CrossEntropy, "bf16[M]", "i64[R]", -100, shapes=VOCABULARIES),
    *_rows(f.SmoothedCrossEntropy, "bf16[M]", "i64[R]", 0.1, 1e-4, 30.0, shapes=VOCABULARIES),
    *_rows(f.KLDivergence, "f32[M]", "f32[M]"),
    *_rows(f.JSDivergence, "f32[M]", "f32[M]", 0.5),
    *_rows(f.TotalVariation, "f32[M]", "f32[M]"),
    *_rows(f.RoPE, "bf16[M]", "bf16[4096,64]", "bf16[4096,64]", shapes=("4,4096,32,128",)),
    *[Case(f.FusedLinearCrossEntropy, "8192,4096x32000", ("bf16[8192,4096]", "bf16[32000,4096]", "i64[8192]", 1024))],
]


def chosen(pattern: str = "", one_per_function: bool = False) -> list[Case]:
    """The cases whose names contain `pattern`; of each Function one alone, at 4096x4096 where it has that."""
    found = [case for case in CASES if pattern in case.name]
    if not one_per_function:
        return found
    first: dict[type, Case] = {}
    for case in sorted(found, key=lambda c: c.shape != "4096,4096"):
        first.setdefault(case.function, case)
    return [case for case in found if first[case.function] is case]
