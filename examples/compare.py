"""Run a compiled Function beside the class as written: same inputs, outputs and gradients, on two backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import fusegrad

# the captured graph through ATen; the generated Triton text under Triton's interpreter
BACKENDS = ("reference", "interpret")


Outputs = Tensor | tuple[Tensor, ...]


def forward_backward(function: Callable[..., Outputs], arguments: Sequence[object]) -> list[Tensor]:
    """The outputs, and the gradient of every argument that requires one, for fixed random output gradients."""
    fresh = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in arguments]
    outputs = function(*fresh)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(output.shape, generator=generator).to(output) for output in outputs]
    leaves = [a for a in fresh if isinstance(a, Tensor) and a.requires_grad]
    return [*(output.detach() for output in outputs), *torch.autograd.grad(outputs, leaves, gradients)]


def show(backend: str, what: str, got: Tensor, expected: Tensor) -> None:
    """Print one row; raise if the two differ by more than rounding."""
    shape = "x".join(map(str, got.shape)) or "scalar"
    largest = (got - expected).abs().max().item()
    print(f"{backend:<10} {what:<22} {shape:>10} {largest:>12.1e}")
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-5)


def header(title: str) -> None:
    print(f"{title}\n{'backend':<10} {'compared with eager':<22} {'shape':>10} {'largest diff':>12}")


def compare(title: str, eager: Callable[..., Outputs], compiled: Callable[..., Outputs], *arguments: object) -> None:
    """Forward and backward of both functions on both backends."""
    header(title)
    expected = forward_backward(eager, arguments)
    gradients = sum(isinstance(a, Tensor) and a.requires_grad for a in arguments)
    outputs = len(expected) - gradients
    names = [*(f"output {i}" for i in range(outputs)), *(f"gradient {i}" for i in range(gradients))]
    for backend in BACKENDS:
        with fusegrad.config.patch(backend=backend):
            results = forward_backward(compiled, arguments)
        for name, got, wanted in zip(names, results, expected, strict=True):
            show(backend, name, got, wanted)
