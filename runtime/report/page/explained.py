"""The facts of an explanation that its page and its drawings show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import sympy

from ....codegen import Kernel
from ....ir import Program, ValueRef
from ...compiled.variants import Variant
from ...fallback.records import Record
from ...values.sizes import Sizes
from ..directions import DirectionReport, KernelReport
from ..residuals import ResidualRow


class Explained(Protocol):
    """An Explanation, seen from below."""

    name: str
    target: str
    numerics: str
    device: str
    methods: dict[str, Record]
    directions: dict[str, DirectionReport]
    saved_bytes: int
    residuals: tuple[ValueRef, ...]
    user_outputs: int
    sizes: Sizes
    kept: list[ResidualRow]
    variants: list[Variant]

    @property
    def kernels(self) -> Sequence[KernelReport]:
        """Every launch, forward first."""

    @property
    def kernel_records(self) -> Sequence[Kernel]:
        """The generated kernels."""

    @property
    def module(self) -> str:
        """The Triton module that holds them."""

    @property
    def program(self) -> Program:
        """Both graphs after the passes."""

    def made_again(self, direction: str) -> Sequence[str]:
        """A line for each matrix that several kernels form."""

    @property
    def size_names(self) -> Mapping[sympy.Symbol, str]:
        """M and N."""
