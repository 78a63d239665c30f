"""What processes of `multiprocessing` import: compiled Functions at module level, used by name."""

from __future__ import annotations

import torch
import trust_functions as functions

import fusegrad


@fusegrad.compile
class Fast(functions.Softmax):
    """Is what its name finds, and so can be pickled."""


Norm = fusegrad.compile(functions.RMSNorm, backend="interpret")


@fusegrad.compile
def fast_plain(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).tanh()


def use(x: torch.Tensor) -> torch.Tensor:
    return Fast.apply(x)  # type: ignore[no-any-return]


class Module(torch.nn.Module):
    """Holds a compiled Function by reference."""

    def __init__(self) -> None:
        super().__init__()
        self.function, self.weight = Fast, torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x * self.weight)  # type: ignore[no-any-return]


def compute(at: int) -> bool:
    """Whether forward and backward are eager's, in whatever process this runs."""
    pairs = ((Fast, functions.Softmax), (Norm, functions.RMSNorm))
    for fast, cls in pairs:
        args = functions.arguments(cls, 2 + at, 4, at)
        found = zip(functions.run(fast, args), functions.run(cls, args), strict=True)
        if not all(torch.allclose(m, e, rtol=1e-4, atol=1e-5) for m, e in found):
            return False
    return True


def expected(at: int) -> torch.Tensor:
    """An element of the data, by eager."""
    return functions.run(functions.Softmax, functions.arguments(functions.Softmax, 3, 4, at))[1]


class Data(torch.utils.data.Dataset[torch.Tensor]):
    """Elements that a compiled Function computes, forward and backward."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: int) -> torch.Tensor:
        return functions.run(Fast, functions.arguments(functions.Softmax, 3, 4, at))[1]  # type: ignore[no-any-return]
