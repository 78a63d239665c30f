"""The cases of `fusegrad.check`: every mode on the user's own tensors, and variations of these under one mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .modes import DERIVABLE
from .subject import Case, Subject, Weights
from .variations import aliasable_pairs, all_cast, lengths, scalars, with_layout, with_layouts, with_sizes

Tensor = torch.Tensor
DTYPES = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
SIZES = (0, 1, 2, 3, 17)
SMALL, TINY = 2048, 36  # elements of a tensor: for variations, and for jacobians


@dataclass
class Plan:
    """The arguments at their own size, small, and tiny, with what is to be varied."""

    subject: Subject
    own: tuple[Tensor, ...]
    modes: Sequence[str]
    dtypes: Sequence[str]
    layouts: Sequence[str]
    sizes: Sequence[int]
    varied: str = "backward"

    def __iter__(self) -> Iterator[Case]:
        # Every mode: at the user's own sizes where it is cheap, at tiny ones where it makes whole jacobians.
        small = self.smaller(self.own, SMALL)
        tiny = self.smaller(small, TINY)
        for mode in self.modes:
            xs = tiny if mode in DERIVABLE else self.own if mode in ("forward", "backward") else small
            yield Case(mode, shapes(xs), xs)
        # Then one mode on everything that can be varied, one thing at a time.
        yield from self.gradient_cases(small)
        yield from (Case(self.varied, name, tuple(all_cast(small, DTYPES[name]))) for name in self.other_dtypes())
        yield from self.layout_cases(small)
        yield from self.size_cases(small)

    def tiny(self) -> tuple[Tensor, ...]:
        """The arguments at the size of jacobians."""
        return self.smaller(self.smaller(self.own, SMALL), TINY)

    def eager_works(self, xs: Sequence[Tensor]) -> bool:
        gs = self.subject.gradients(xs, Weights())
        return bool(gs) and self.subject.run(self.subject.eager, "backward", xs, gs).error is None

    def smaller(self, xs: tuple[Tensor, ...], limit: int) -> tuple[Tensor, ...]:
        """Lengths halved one after the other, as long as eager works, until no tensor has more elements."""
        fixed: set[int] = set()
        while max((x.numel() for x in xs), default=0) > limit:
            n = next((n for n in lengths(xs) if n not in fixed and n > 2), None)
            if n is None:
                break
            options = [m for m in (n // 2, n // 2 + 1) if m not in lengths(xs)] or [n // 2]
            candidates = (tuple(with_sizes(xs, {n: m})) for m in options)
            better = next((candidate for candidate in candidates if self.eager_works(candidate)), None)
            fixed |= {n} if better is None else set()
            xs = better or xs
        return xs

    def gradient_cases(self, xs: tuple[Tensor, ...]) -> Iterator[Case]:
        """One output alone, one argument alone, one tensor as two arguments."""
        gs = self.subject.gradients(xs, Weights())
        ends = [i for i, g in enumerate(gs) if g is not None]
        if len(ends) > 1:
            yield from (Case(self.varied, f"gradient of output {i} alone", xs, Weights(only=i)) for i in ends[:4])
        moving = [i for i, x in enumerate(xs) if x.requires_grad]
        if len(moving) > 1:
            for i in moving[:4]:
                alone = tuple(x.detach().requires_grad_(i == j) for j, x in enumerate(xs))
                yield Case(self.varied, f"only {self.subject.names[i]} requires grad", alone)
        for i, j in aliasable_pairs(xs)[:3]:
            same = tuple(xs[i] if k == j else x for k, x in enumerate(xs))
            yield Case(self.varied, f"{self.subject.names[j]} is {self.subject.names[i]}", same)

    def other_dtypes(self) -> list[str]:
        own = {x.dtype for x in self.own if x.is_floating_point()}
        narrow = () if any(x.is_complex() for x in self.own) else ("f16", "bf16")
        return [n for n in self.dtypes if own != {DTYPES[n]} and (n in narrow or n in ("f32", "f64"))]

    def layout_cases(self, xs: tuple[Tensor, ...]) -> Iterator[Case]:
        """Every layout on all arguments, some in turns, and every layout on the gradients."""
        k = len(self.layouts)
        mixes = [[self.layouts[(s + i) % k] for i in range(len(xs))] for s in range(min(k, 3))] if len(xs) > 1 else []
        for names in [*([n] * len(xs) for n in self.layouts), *mixes]:
            if (arguments := with_layouts(xs, names)) is not None:
                yield Case(self.varied, f"arguments {', '.join(dict.fromkeys(names))}", tuple(arguments))
        gs = [g for g in self.subject.gradients(xs, Weights()) if g is not None]
        for name in self.layouts:
            if any(with_layout(g, name) is not None for g in gs):
                yield Case(self.varied, f"grad_output {name}", xs, Weights(name))

    def size_cases(self, xs: tuple[Tensor, ...]) -> Iterator[Case]:
        for n in lengths(xs)[:4]:
            for m in self.sizes:
                if n and m != n:
                    yield Case(self.varied, f"size {n} -> {m}", tuple(with_sizes(xs, {n: m})))
        if xs and all(x.numel() for x in xs) and any(x.dim() for x in xs):
            yield Case(self.varied, "0-d", tuple(scalars(xs)))


def shapes(xs: Sequence[Tensor]) -> str:
    return " ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}".replace(" ", "") for x in xs)
