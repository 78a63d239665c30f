"""How arguments are made: the words that the table of the world may use, each a small constructor.

`normal(4, 5), 2.0` is evaluated with a maker's vocabulary: the same text and seed give the same arguments.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import tempfile
import types
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
WORDS = (
    "normal", "positive", "uniform", "probabilities", "signs", "integers", "numbers", "mask", "definite", "symmetric",
    "orthogonal", "complex_normal", "fixed", "inner", "sparse", "name", "call", "linear", "with_parameters", "group",
    "alone", "namespace", "size",
)  # fmt: skip
"""The methods of `Maker` that a row may name."""


class Maker:
    """One list of arguments: each tensor is drawn with a generator of its own place in the list."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def __call__(self, text: str) -> tuple[Any, ...]:
        """The arguments of a row; `()` where it has none."""
        words = {word: getattr(self, word) for word in WORDS}
        made: tuple[Any, ...] = eval(f"({text},)" if text else "()", {"__builtins__": {}, "torch": torch}, words)
        return made

    def _generator(self) -> torch.Generator:
        self.seed += 1
        return torch.Generator().manual_seed(self.seed)

    # ------------------------------------------------------------------ tensors
    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator()).requires_grad_()

    def positive(self, *shape: int) -> Tensor:
        return (torch.rand(shape, generator=self._generator()) + 0.5).requires_grad_()

    def uniform(self, *shape: int) -> Tensor:
        """In (0.05, 0.95)."""
        return (torch.rand(shape, generator=self._generator()) * 0.9 + 0.05).requires_grad_()

    def probabilities(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator()).softmax(-1).requires_grad_()

    def signs(self, *shape: int) -> Tensor:
        return (torch.randint(0, 2, shape, generator=self._generator()) * 2.0 - 1.0).requires_grad_()

    def definite(self, *shape: int) -> Tensor:
        """Symmetric and positive definite in the last two axes."""
        root = torch.randn(shape, generator=self._generator())
        return (root @ root.mT + shape[-1] * torch.eye(shape[-1])).requires_grad_()

    def symmetric(self, *shape: int) -> Tensor:
        root = torch.randn(shape, generator=self._generator())
        return (root + root.mT).requires_grad_()

    def orthogonal(self, *shape: int) -> Tensor:
        return torch.linalg.qr(torch.randn(shape, generator=self._generator()))[0].requires_grad_()

    def complex_normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator(), dtype=torch.complex64).requires_grad_()

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self._generator())

    def mask(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator()) < 0.6

    def numbers(self, *values: Any) -> Tensor:
        return torch.tensor(values)

    def sparse(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator()).relu().to_sparse()

    # ------------------------------------------------------------------ of others
    def fixed(self, tensor: Tensor) -> Tensor:
        """The tensor without a gradient."""
        return tensor.detach()

    def inner(self, tensor: Tensor) -> Tensor:
        """The tensor as a result, which a Function may write to."""
        return tensor.clone()

    def name(self, dotted: str) -> Any:
        """The object that is imported by a name."""
        return named(dotted)

    def call(self, dotted: str, *args: Any, **kwargs: Any) -> Any:
        """What a named callable returns, with torch's own generator seeded."""
        self.seed += 1
        torch.manual_seed(self.seed)
        return named(dotted)(*args, **kwargs)

    def linear(self, inputs: int, outputs: int) -> Any:
        return self.call("torch.nn.Linear", inputs, outputs)

    def with_parameters(self, *args: Any) -> tuple[Any, ...]:
        """The arguments, then the parameters of the modules among them: how Functions of modules are called."""
        modules = [a for a in args if isinstance(a, torch.nn.Module)]
        return (*args, *(p for m in modules for p in m.parameters()))

    def namespace(self, **attributes: Any) -> Any:
        return types.SimpleNamespace(**attributes)

    def size(self, *sizes: int) -> torch.Size:
        return torch.Size(sizes)

    def group(self) -> Any:
        """A process group of this process alone."""
        return _group()

    def alone(self, tensor: Tensor) -> Tensor:
        """The tensor, in a process that is a group of its own: for what asks whether there is one."""
        _group()
        return tensor


@functools.cache
def _group() -> Any:
    import torch.distributed as dist

    if not dist.is_initialized():
        place = os.path.join(tempfile.mkdtemp(), "store")
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    return dist.group.WORLD


def named(dotted: str) -> Any:
    """`a.b.C.d`: the longest part that is a module is imported, the rest are attributes."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[end:], module)
    raise ModuleNotFoundError(dotted)


# ------------------------------------------------------------------ variations
def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of any place in a value in a dtype; complex ones in the complex dtype of that width."""
    return _mapped(value, lambda t: _leaf(t.detach().to(_width(t, dtype)), t))


def _width(t: Tensor, dtype: torch.dtype) -> torch.dtype:
    if t.is_complex():
        return torch.complex128 if dtype is torch.float64 else torch.complex64
    return dtype if t.is_floating_point() else t.dtype


def laid_out(value: Any, layout: str) -> Any:
    """Tensors with other strides and the same numbers: "transposed" or "step 2"."""
    return _mapped(value, lambda t: _leaf(LAYOUTS[layout](t.detach()), t))


def _transposed(t: Tensor) -> Tensor:
    axes = tuple(reversed(range(t.dim())))
    return t.permute(axes).contiguous().permute(axes)


def _step_2(t: Tensor) -> Tensor:
    if not t.dim():
        return t
    memory = t.new_zeros((*t.shape[:-1], 2 * t.shape[-1]))
    memory[..., ::2] = t
    return memory[..., ::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {"transposed": _transposed, "step 2": _step_2}


def _leaf(made: Tensor, like: Tensor) -> Tensor:
    made = made.requires_grad_(like.requires_grad)
    return made if like.is_leaf else made.clone()


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value) if value.layout is torch.strided else value
    if type(value) in (tuple, list):
        return type(value)(_mapped(v, change) for v in value)
    if type(value) is dict:
        return {k: _mapped(v, change) for k, v in value.items()}
    return value


def elements(values: Any) -> int:
    """How many numbers the tensors of a list of arguments hold."""
    return sum(math.prod(v.shape) for v in values if isinstance(v, Tensor))
