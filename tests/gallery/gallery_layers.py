"""A Function of the gallery as a layer of a model, for what models are put into: graphs, files, process groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusegrad.examples.gallery.catalogue import Entry


class Layer(nn.Module):
    """weights are parameters, other tensors inputs; a parameter `gain` scales the first that wants a gradient, if any.

    compiled: the compiled class, or else the class as it was written.
    """

    def __init__(self, entry: Entry, compiled: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.apply_function = (entry.function if compiled else entry.written).apply
        self.whole = list(entry.arguments(dtype))
        self.places = [i for i, a in enumerate(self.whole) if isinstance(a, Tensor) and i not in entry.weights]
        self.scaled = next((i for i in self.places if self.whole[i].requires_grad), None)
        self.shapes = {i: self.whole[i].shape for i in entry.weights}
        flat = {str(i): nn.Parameter(self.whole[i].detach().reshape(-1)) for i in entry.weights}  # FSDP takes no 0-d
        self.weights = nn.ParameterDict(flat)
        self.gain = None if self.scaled is None else nn.Parameter(torch.full((1,), 1.25, dtype=dtype))
        self.whole = [None if isinstance(a, Tensor) else a for a in self.whole]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = list(self.whole)
        for i, x in zip(self.places, inputs, strict=True):
            given[i] = x * self.gain if i == self.scaled else x
        for i, shape in self.shapes.items():
            given[i] = self.weights[str(i)].reshape(shape)
        result = self.apply_function(*given)
        outputs = result if isinstance(result, tuple) else (result,)
        return tuple(o for o in outputs if o.is_floating_point())


def inputs(entry: Entry, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """What the layer is called with."""
    args = entry.arguments(dtype, seed)
    return [a for i, a in enumerate(args) if isinstance(a, Tensor) and i not in entry.weights]


def results(layer: Any, given: list[Tensor]) -> dict[str, Tensor]:
    """Outputs, and the gradients of inputs and parameters."""
    outputs = layer(*given)
    numbers = torch.Generator().manual_seed(1)
    ends = [o for o in outputs if o.requires_grad]
    torch.autograd.backward(ends, [torch.randn(o.shape, generator=numbers).to(o.dtype) for o in ends])
    found = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    found |= {f"input {i}": x.grad for i, x in enumerate(given) if x.requires_grad}
    return found | gradients(layer)


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    """Of the parameters, by their names in the layer itself."""
    return {n.removeprefix("module.").removeprefix("_orig_mod."): p.grad for n, p in layer.named_parameters()}
