"""Real arguments for a case: random, with the values that its Function is made for, at full or at reduced sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusegrad.runtime.values.tensor_specs import is_spec, parse_spec

from . import functions as f
from . import stream_functions as s
from .suite import Case

REDUCED = {
    4: 2, 16: 4, 32: 4, 64: 8, 128: 16, 256: 12, 512: 64, 1024: 16, 4096: 24, 5120: 40, 8192: 40, 16384: 72, 32000: 50,
    50257: 53, 65536: 130, 128256: 96,
}  # fmt: skip
"""Sizes of the suite by those that an interpreter runs in a moment. What divides another size still does."""


def reduced(case: Case) -> Case:
    """The case at small sizes; counts among the arguments (groups, rows of a chunk) shrink with them."""

    def small(text: str) -> str:
        name, bracket, sizes = text.rpartition("[")  # the 16 of bf16 is no size
        return name + bracket + re.sub(r"\d+", lambda n: str(REDUCED.get(int(n[0]), n[0])), sizes)

    args = tuple(
        small(a) if is_spec(a) else REDUCED.get(a, a) if isinstance(a, int) else a for a in case.args
    )
    return replace(case, shape=small(case.shape), args=args)


# ------------------------------------------------------------------ values
Draw = Callable[[tuple[int, ...], torch.Generator, Sequence[Any]], Tensor]
"""(shape, numbers, all arguments of the case) -> values, in float32 or int64."""


def _normal(shape: tuple[int, ...], numbers: torch.Generator, args: Sequence[Any]) -> Tensor:
    return torch.randn(shape, generator=numbers, device=numbers.device)


def _log_probabilities(shape: tuple[int, ...], numbers: torch.Generator, args: Sequence[Any]) -> Tensor:
    return torch.log_softmax(_normal(shape, numbers, args), -1)


def _probabilities(shape: tuple[int, ...], numbers: torch.Generator, args: Sequence[Any]) -> Tensor:
    return torch.softmax(_normal(shape, numbers, args), -1)


def _angles(function: Callable[[Tensor], Tensor]) -> Draw:
    def draw(shape: tuple[int, ...], numbers: torch.Generator, args: Sequence[Any]) -> Tensor:
        time, width = (torch.arange(n, dtype=torch.float32, device=numbers.device) for n in shape)
        return function(time[:, None] * 10000 ** (-width / shape[1])[None])

    return draw


def _weights(shape: tuple[int, ...], numbers: torch.Generator, args: Sequence[Any]) -> Tensor:
    return _normal(shape, numbers, args) / shape[-1] ** 0.5


def _slopes(shape: tuple[int, ...], numbers: torch.Generator, args: Sequence[Any]) -> Tensor:
    return 2.0 ** -torch.linspace(0.5, 8.0, shape[0], device=numbers.device)


def _labels(classes_of: int, axis: int, ignored: float = 0.0) -> Draw:
    """Classes of argument `classes_of`, the size of its `axis`; a share of them is -100."""

    def draw(shape: tuple[int, ...], numbers: torch.Generator, args: Sequence[Any]) -> Tensor:
        classes = parse_spec(args[classes_of])[1][axis]
        labels = torch.randint(classes, shape, generator=numbers, device=numbers.device)
        left_out = torch.rand(shape, generator=numbers, device=numbers.device) < ignored
        return labels.masked_fill(left_out, -100)

    return draw


def _seed(shape: tuple[int, ...], numbers: torch.Generator, args: Sequence[Any]) -> Tensor:
    return torch.randint(1 << 40, shape, generator=numbers, device=numbers.device)


DRAWS: dict[tuple[type, int], Draw] = {
    (f.DropoutBiasResidual, 3): _seed,
    (f.CrossEntropy, 1): _labels(0, -1, ignored=0.1),
    (f.SmoothedCrossEntropy, 1): _labels(0, -1),
    (f.FusedLinearCrossEntropy, 1): _weights,
    (f.FusedLinearCrossEntropy, 2): _labels(1, 0),
    (f.KLDivergence, 0): _log_probabilities,
    (f.KLDivergence, 1): _probabilities,
    (f.JSDivergence, 0): _log_probabilities,
    (f.JSDivergence, 1): _log_probabilities,
    (f.TotalVariation, 0): _probabilities,
    (f.TotalVariation, 1): _probabilities,
    (s.ALiBi, 3): _slopes,
    (s.LinearCrossEntropy, 1): _weights,
    (s.LinearCrossEntropy, 2): _labels(1, 0),
    (f.RoPE, 1): _angles(torch.cos),
    (f.RoPE, 2): _angles(torch.sin),
}
"""Arguments that are not normally distributed numbers, by Function and position."""


def real(case: Case, seed: int, device: torch.device | str = "cpu") -> list[Any]:
    """Tensors for the specifications, other arguments as they are; floating ones require grad."""
    numbers = torch.Generator(device).manual_seed(seed)
    return [_real(case, at, a, numbers) if is_spec(a) else a for at, a in enumerate(case.args)]


def _real(case: Case, at: int, spec: str, numbers: torch.Generator) -> Tensor:
    dtype, shape = parse_spec(spec)
    values = DRAWS.get((case.function, at), _normal)(shape, numbers, case.args).to(dtype)
    return values.requires_grad_(dtype.is_floating_point)


def cotangents(outputs: Sequence[Any], seed: int) -> list[Tensor]:
    """Random gradients for the outputs that have a history."""
    ends = differentiable(outputs)
    numbers = torch.Generator(ends[0].device).manual_seed(seed)
    return [torch.randn(o.shape, generator=numbers, device=o.device).to(o.dtype) for o in ends]


def differentiable(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among them that require grad."""
    return [v for v in values if isinstance(v, Tensor) and v.requires_grad]


def as_list(result: Any) -> list[Any]:
    """What a Function returned, as a list."""
    return list(result) if isinstance(result, tuple) else [result]
