"""Functions as people write and call them: styles, marks, numbers, keywords, containers; on tiny tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import Function
from torch.utils._pytree import tree_leaves

import fusegrad

Tensor = torch.Tensor
Call = Callable[..., Any]


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


class Scaled(Function):
    """ctx style."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.sigmoid(x) * x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * w * s * (1 + x * (1 - s)), (g * s * x).sum(0)


class ScaledApart(Function):
    """setup_context style."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, scale: float = 1.0, mode: str = "mul") -> Tensor:
        return torch.sigmoid(x) * x * (w * scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.scale = inputs[2]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * (w * ctx.scale) * s * (1 + x * (1 - s)), (g * s * x).sum(0) * ctx.scale, None, None


class Mixed(Function):
    """Five tensors, three numbers, None."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor,
                p: float, q: float, r: float, bias: Tensor | None) -> Tensor:  # fmt: skip
        ctx.save_for_backward(a, b, c)
        ctx.p, ctx.q, ctx.r = p, q, r
        out = a * b * p + c * q + (d - e) * r
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        a, b, _ = ctx.saved_tensors
        return g * b * ctx.p, g * a * ctx.p, g * ctx.q, g * ctx.r, -g * ctx.r, None, None, None, None


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        ctx.mark_dirty(x)
        return x.mul_(w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0], None


class Marked(Function):
    """An output that has no gradient beside one that has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        ctx.save_for_backward(positive)
        return torch.where(positive, x, 0), positive

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Tensor:
        return g * ctx.saved_tensors[0]


class Several(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x.sin(), x.cos(), x * 2

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return a * x.cos() - b * x.sin() + c * 2


class Viewed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.transpose(0, 1)


class Listed(Function):
    """A list of tensors, which autograd does not track, and a tuple of numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: list[Tensor], weights: tuple[float, ...]) -> Tensor:
        ctx.weights = weights
        out = x * weights[0]
        for part, weight in zip(parts, weights[1:], strict=True):
            out = out + part * weight
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.weights[0], None, None


class Tree(Function):
    """A dict of tensors in, a dict out: tracked with pytree=True; eager takes the tensors apart itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Any) -> Any:
        ctx.save_for_backward(x, p["w"])
        return {"y": x * p["w"] + p["b"], "s": x.sin()}

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, w = ctx.saved_tensors
        return g["y"] * w + g["s"] * x.cos(), {"w": (g["y"] * x).sum(0), "b": g["y"].sum(0)}


class TreeByHand(Function):
    """What an author writes for the same in eager."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        return x * w + b, x.sin()

    @staticmethod
    def backward(ctx: Any, gy: Tensor, gs: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return gy * w + gs * x.cos(), (gy * x).sum(0), gy.sum(0)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.randn(16)), 1e-6


LAYER = Layer()


class Attributed(Function):
    """Reads a module's parameter and number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * LAYER.weight + LAYER.eps

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * LAYER.weight


for _own in (Layer, Attributed.forward, Attributed.backward):
    _own.__module__ = "users"  # what is fusegrad's own is not looked into


@dataclass
class Style:
    """function: compiled and called as `apply(*args(), **kwargs)`. by_hand: what stands for it in eager, if another."""

    function: type
    args: Callable[[], tuple[Any, ...]]
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    by_hand: tuple[type, Callable[..., tuple[Any, ...]]] | None = None
    watched: Tensor | None = None  # a leaf behind the arguments

    def peers(self) -> dict[str, Call]:
        """`apply` of eager, of kernels whose launches are stubbed, of the captured operations."""
        function: Any = self.function
        backends = ("triton", "reference")
        compiled = {b: fusegrad.compile(function, backend=b, **self.options).apply for b in backends}
        return {"eager": self._by_hand if self.by_hand else function.apply, **compiled}

    def _by_hand(self, *args: Any) -> Any:
        assert self.by_hand is not None
        function, taken_apart = self.by_hand
        return function.apply(*taken_apart(*args))  # type: ignore[attr-defined]

    def calls(self, apply: Call) -> dict[str, Call]:
        """forward, and forward with `torch.autograd.grad`."""
        wanted = [t for t in tree_leaves((self.args(), self.kwargs, self.watched)) if _is_leaf(t)]

        def forward() -> Any:
            return apply(*self.args(), **self.kwargs)

        gradients = [torch.randn_like(o) for o in _ends(forward())]
        return {
            "forward": forward,
            "both": lambda: torch.autograd.grad(_ends(forward()), wanted, gradients, allow_unused=True),
        }


def _ends(output: Any) -> list[Tensor]:
    found = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else (output,)
    return [o for o in found if isinstance(o, Tensor) and o.requires_grad]


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_leaf and value.requires_grad


def _fixed(*args: Any) -> Callable[[], tuple[Any, ...]]:
    return lambda: args


def _styles() -> dict[str, Style]:
    torch.manual_seed(0)
    x, w, b = _leaf(8, 16), _leaf(16), _leaf(16)
    five = [_leaf(8, 16) for _ in range(5)]
    parts = [torch.randn(8, 16) for _ in range(2)]
    return {
        "ctx style": Style(Scaled, _fixed(x, w)),
        "setup_context style": Style(ScaledApart, _fixed(x, w, 2.0, "mul")),
        "defaults": Style(ScaledApart, _fixed(x, w)),
        "keywords": Style(ScaledApart, _fixed(x), {"w": w, "scale": 0.5}),
        "5 tensors, 3 numbers, None": Style(Mixed, _fixed(*five, 0.5, 0.0, 2.0, None)),
        "a module's attributes": Style(Attributed, _fixed(x)),
        "in place": Style(InPlace, lambda: (x.clone(), w), watched=x),
        "an output without gradient": Style(Marked, _fixed(x)),
        "several outputs": Style(Several, _fixed(x)),
        "a view": Style(Viewed, _fixed(x)),
        "a list of tensors": Style(Listed, _fixed(x, parts, (1.0, 0.5, 0.25))),
        "a tree of tensors": Style(
            Tree, _fixed(x, {"w": w, "b": b}), options={"pytree": True},
            by_hand=(TreeByHand, lambda x, p: (x, p["w"], p["b"])),
        ),
    }  # fmt: skip


STYLES = _styles()
