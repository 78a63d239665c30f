"""Functions that take the ways of calling which few take: as written, split, refused, raising, over containers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd.function import Function, once_differentiable

import fusegrad

Tensor = torch.Tensor


class OpaqueForward(Function):
    """forward reads data, backward is captured by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.top = float(x.detach().abs().max().item() > 1e9)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.cos() + ctx.top


class OpaqueBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sin()
        ctx.save_for_backward(x, y)
        return y * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return g * y if x.sum().item() > 1e9 else g * x


class ByNumpy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.from_numpy(g.detach().numpy() * 3)


class Split(Function):
    """Calls what stays as written, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = ByNumpy.apply(x * 2) + 1
        ctx.save_for_backward(x, y)
        return y.sigmoid()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return ByNumpy.apply(g * y.cos()) * x


class Nested(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = OpaqueFree.apply(x)
        ctx.save_for_backward(x, y)
        return y + x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return OpaqueFree.apply(g * y) * x


class OpaqueFree(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].exp()


class OnContext(Function):
    """Tensors on ctx by themselves and in a container, beside numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float) -> Tensor:
        ctx.x, ctx.parts, ctx.k = x, [x * 2, {"s": x.sin()}], k
        return x * k

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.k * ctx.parts[0] + ctx.parts[1]["s"] * ctx.x, None


class OnNamespace(Function):
    """An object on ctx that no key describes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = SimpleNamespace(x=x, y=x.sin())
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.kept.x + ctx.kept.y


class FromContainers(Function):
    @staticmethod
    def forward(ctx: Any, parts: list[Any], table: dict[str, Any], x: Tensor) -> Any:
        ctx.save_for_backward(x, parts[0])
        return x * parts[0] + table["b"][0], {"twice": x * 2}

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        x, a = ctx.saved_tensors
        return None, None, g * a + x


class WithObject(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.settings = settings
        return x * settings.scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0] * ctx.settings.scale, None


@dataclass
class Settings:
    scale: float = 2.0
    mask: Any = None


class WithTensorInObject(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: Settings) -> Tensor:
        ctx.save_for_backward(x, settings.mask)
        return x * settings.mask

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, mask = ctx.saved_tensors
        return g * mask * x, None


class Module(Function):
    """A module among the arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.save_for_backward(x)
        return x * module.weight.sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0], None


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


class Views(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.view_as(x), x[0], x * 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, h: Tensor, i: Tensor) -> Tensor:
        return g + i * 2


class OwnRules(Function):
    """setup_context style with a jvp and a vmap of its own."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos() * 2

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return t * ctx.saved_tensors[0].cos() * 3

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return OwnRules.apply(x), in_dims[0]


class Selected(Function):
    """Sizes that depend on data."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        at = x.detach().abs().nonzero()
        ctx.save_for_backward(x, at)
        return x * at.shape[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[1].shape[0]


class Draws(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = (torch.rand_like(x) > 0.5).to(x.dtype)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


class ErrorInForward(Function):
    """An index that is too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()[x.shape[0] + 1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class ErrorInBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return g * torch.cat([x, y])


class RaisesInBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x = ctx.saved_tensors[0] * g
        raise ValueError(f"no gradient for {tuple(x.shape)}")


class ErrorInDoubleBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return ErrorInBackward.apply(g * ctx.saved_tensors[0])


class WrongCount(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


class WrongShape(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return (g * ctx.saved_tensors[0]).expand(2, *g.shape).flatten()[1:]


class WithoutBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


class Writes(Function):
    """Changes what it was given, outside of what any graph can hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, box: list[Any]) -> Tensor:
        box.append(1)
        ctx.save_for_backward(x)
        return x * len(box)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0], None


SCALE = torch.tensor([1.0, 2.0, 3.0])


class FromOutside(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * SCALE

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * SCALE * ctx.saved_tensors[0]


class Checks(Function):
    """Other numbers at every call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.k = k
        return x * k

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0] * ctx.k, None


class Declared(Function):
    """Says that nothing of it is to be captured."""

    is_traceable = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


def plain_function(x: Tensor, w: Tensor, k: float = 2.0) -> Any:
    h = torch.sigmoid(x * k)
    return h * w, h


def plain_container(parts: list[Tensor], k: float) -> Tensor:
    return parts[0] * k + parts[1].sin()


class Tree(Function):
    @staticmethod
    def forward(ctx: Any, parts: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x, parts["a"])
        return {"y": x * parts["a"], "z": (x + parts["b"],)}

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, a = ctx.saved_tensors
        return {"a": g["y"] * x, "b": g["z"][0]}, g["y"] * a + g["z"][0]


@dataclass(frozen=True)
class Odd:
    """A Function, its arguments, and what `compile` is told."""

    function: Any
    make: Callable[[], tuple[Any, ...]]
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return str(self.function.__name__)

    @property
    def written(self) -> Any:
        """What is called in eager; None where there is no such thing."""
        if dict(self.options).get("pytree"):
            return None
        return getattr(self.function, "apply", self.function)

    def compiled(self, backend: str) -> Any:
        """What is called compiled, anew."""
        fast = fusegrad.compile(self.function, backend=backend, **dict(self.options))
        return getattr(fast, "apply", fast)


def x() -> Tensor:
    return torch.rand(4, 3, requires_grad=True)


def fixed() -> Tensor:
    return torch.rand(4, 3)


_settings, _layer = Settings(), torch.nn.Linear(3, 3)

ONE = (
    OpaqueForward, OpaqueBackward, ByNumpy, Split, Nested, OnNamespace, InPlace, Views, OwnRules, Selected, Draws,
    ErrorInForward, ErrorInBackward, RaisesInBackward, ErrorInDoubleBackward, WrongShape, WithoutBackward, FromOutside,
    Declared,
)  # fmt: skip
ODD = (
    *(Odd(cls, lambda: (x(),)) for cls in ONE if cls is not InPlace),
    Odd(InPlace, lambda: (x() * 1,)),
    Odd(OnContext, lambda: (x(), 2.0)),
    Odd(FromContainers, lambda: ([fixed(), 1], {"b": (fixed(),)}, x())),
    Odd(WithObject, lambda: (x(), _settings)),
    Odd(WithTensorInObject, lambda: (x(), Settings(mask=fixed()))),
    Odd(Module, lambda: (x(), _layer)),
    Odd(WrongCount, lambda: (x(), x())),
    Odd(Writes, lambda: (x(), [fixed()])),
    Odd(Checks, lambda: (x(), torch.rand(()).item())),
    Odd(plain_function, lambda: (x(), x())),
    Odd(plain_container, lambda: ([fixed(), fixed()], 2.0)),
    Odd(Tree, lambda: ({"a": x(), "b": x()}, x()), (("pytree", True),)),
    Odd(plain_container, lambda: ([x(), x()], 2.0), (("pytree", True),)),
)
