"""Run a compiled Function beside the class as written: same inputs, outputs and gradients, on two backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import fusegrad

# the captured graph through ATen; the generated Triton text under Triton's interpreter
BACKENDS = ("reference", "interpret")


def forward_backward(function: Callable[..., Tensor], arguments: Sequence[object]) -> list[Tensor]:
    """The output, and the gradient of every argument that requires one, for a fixed random output gradient."""
    fresh = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in arguments]
    output = function(*fresh)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    leaves = [a for a in fresh if isinstance(a, Tensor) and a.requires_grad]
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def show(backend: str, what: str, got: Tensor, expected: Tensor) -> None:
    """Print one row; raise if the two differ by more than rounding."""
    shape = "x".join(map(str, got.shape)) or "scalar"
    largest = (got - expected).abs().max().item()
    print(f"{backend:<10} {what:<22} {shape:>10} {largest:>12.1e}")
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-5)


def header(title: str) -> None:
    print(f"{title}\n{'backend':<10} {'compared with eager':<22} {'shape':>10} {'largest diff':>12}")


def compare(title: str, eager: Callable[..., Tensor], compiled: Callable[..., Tensor], *arguments: object) -> None:
    """Forward and backward of both functions on both backends."""
    header(title)
    expected = forward_backward(eager, arguments)
    names = ["output"] + [f"gradient {i}" for i in range(len(expected) - 1)]
    for backend in BACKENDS:
        with fusegrad.config.patch(backend=backend):
            results = forward_backward(compiled, arguments)
        for name, got, wanted in zip(names, results, expected, strict=True):
            show(backend, name, got, wanted)
