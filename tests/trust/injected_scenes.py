"""Ways of calling a class, each in two steps: what goes before, and what is done while a fault is injected.

A scene tells the same story with the class itself and with the class compiled. `made(number)` makes a class that no
other number makes: nothing of what was captured or generated for one serves another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import Function, forward_ad

import fusegrad

Tensor = torch.Tensor
Step = Callable[..., Any]


# ------------------------------------------------------------------ classes
def norm(number: float) -> Any:
    class Norm(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (w + number)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            x, w, ctx.eps = inputs
            ctx.save_for_backward(x, w)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, w = ctx.saved_tensors
            rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + ctx.eps)
            x_hat, gw = x * rstd, g * (w + number)
            return (gw - x_hat * (gw * x_hat).mean(-1, keepdim=True)) * rstd, (g * x_hat).sum(0), None

    return Norm


def gate(number: float) -> Any:
    """Old style, saves a value in between."""

    class Gate(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            gate = torch.sigmoid(x * w + number)
            ctx.save_for_backward(x, w, gate)
            return gate * x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, w, gate = ctx.saved_tensors
            inner = g * x * gate * (1 - gate)
            return g * gate + inner * w, (inner * x).sum(0)

    return Gate


def written(number: float) -> Any:
    """Writes to its argument."""

    class Written(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            ctx.save_for_backward(w)
            return x.mul_(w).add_(number)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            (w,) = ctx.saved_tensors
            return g * w, None

    return Written


def noise(number: float) -> Any:
    """Draws random numbers, in forward and in backward."""

    class Noise(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            mask = torch.rand_like(x) > 0.25
            ctx.save_for_backward(mask, w)
            return x * mask * w + number

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            mask, w = ctx.saved_tensors
            return g * mask * w + torch.rand_like(g), None

    return Noise


class Told(Function):
    """Runs as written: its data decides."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Told.calls += 1
        return x * 2 if x.sum().item() > 0 else x * 3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


def around(number: float) -> Any:
    """Calls what runs as written: two segments around it."""

    class Around(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            y = Told.apply(x.exp() + number)
            ctx.save_for_backward(x, w)
            return y * w

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, w = ctx.saved_tensors
            return g * w * 2 * x.exp(), None

    return Around


def opaque(number: float) -> Any:
    """Its forward runs as written, its backward is captured."""

    class Opaque(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.scale = 2.0 if x.sum().item() > 0 else 3.0
            ctx.save_for_backward(x, w)
            return x * w * ctx.scale + number

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, w = ctx.saved_tensors
            return g * w * ctx.scale, (g * x).sum(0) * ctx.scale

    return Opaque


def function(number: float) -> Any:
    def plain(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).tanh().exp() + number

    return plain


# ------------------------------------------------------------------ steps
@dataclass
class State:
    """What one telling of a scene has: the call, its tensors, what the first step made."""

    call: Step
    args: list[Tensor]
    kept: list[Any] = field(default_factory=list)


def tensors(seed: int = 0, rows: int = 5, columns: int = 8, tracked: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(rows, columns, generator=generator), torch.randn(columns, generator=generator)]
    return [t.requires_grad_(tracked) for t in made]


def gradient(y: Tensor) -> Tensor:
    return torch.linspace(-1, 1, y.numel()).reshape(y.shape)


def nothing(state: State) -> None:
    """The first call is the one."""


def times(count: int, backward: bool = False, rows: int = 5) -> Callable[[State], None]:
    """So many calls before."""

    def before(state: State) -> None:
        for n in range(count):
            args = tensors(n, rows)
            y = state.call(*args)
            if backward:
                torch.autograd.grad(y, args, gradient(y), allow_unused=True)

    return before


def recorded(count: int) -> Callable[[State], None]:
    """So many calls, forward and backward, then a forward whose backward is to come."""

    def before(state: State) -> None:
        times(count, True)(state)
        state.kept.append(state.call(*state.args))

    return before


def twice_recorded(state: State) -> None:
    """A forward and a backward that is to be differentiated."""
    y = state.call(*state.args)
    found = torch.autograd.grad(y, state.args, gradient(y), create_graph=True)
    state.kept.append(sum(f.pow(2).sum() for f in found))


def forward(state: State) -> Any:
    y = state.call(*state.args)
    return y, y.requires_grad


def of_other_rows(state: State) -> Any:
    return state.call(*tensors(3, 9))


def backward(state: State) -> Any:
    (y,) = state.kept
    return torch.autograd.grad(y, state.args, gradient(y), allow_unused=True)


def double(state: State) -> Any:
    y = state.call(*state.args)
    found = torch.autograd.grad(y, state.args, gradient(y), create_graph=True)
    return torch.autograd.grad(sum(f.pow(2).sum() for f in found), state.args)


def second(state: State) -> Any:
    return torch.autograd.grad(state.kept[0], state.args)


def into_a_leaf(state: State) -> Any:
    x, w = tensors(tracked=False)
    y = state.call(x, w)
    return y, x, y is x


def mapped(state: State) -> Any:
    return torch.vmap(state.call, (0, None))(*plain(state))


def plain(state: State) -> list[Tensor]:
    x, w = (a.detach() for a in state.args)
    return [x.expand(3, *x.shape).clone(), w]


def pushed(state: State) -> Any:
    x, w = (a.detach() for a in state.args)
    return torch.func.jvp(lambda x: state.call(x, w), (x,), (torch.ones_like(x),))


def dual(state: State) -> Any:
    x, w = (a.detach() for a in state.args)
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(state.call(forward_ad.make_dual(x, torch.ones_like(x)), w)))


def graded(state: State) -> Any:
    x, w = (a.detach() for a in state.args)
    return torch.func.grad(lambda x, w: state.call(x, w).sin().sum(), (0, 1))(x, w)


def mapped_gradient(state: State) -> Any:
    x, w = plain(state)
    return torch.vmap(torch.func.grad(lambda x, w: state.call(x, w).sin().sum()), (0, None))(x, w)


def pulled(state: State) -> None:
    x, w = (a.detach() for a in state.args)
    state.kept.extend(torch.func.vjp(state.call, x, w))


def pulling(state: State) -> Any:
    return state.kept[1](gradient(state.kept[0]))


def in_graphs(state: State) -> Any:
    torch._dynamo.reset()
    x, w = state.args
    y = torch.compile(lambda x, w: state.call(x, w) * 2, backend="eager")(x, w)
    return y, torch.autograd.grad(y, (x, w), gradient(y))


def in_a_thread(state: State) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(double(state)))
    thread.start()
    thread.join()
    return found


@dataclass(frozen=True)
class Scene:
    """before: without the fault. act: with it. eager: whether the class itself can be told it."""

    made: Callable[[float], Any]
    before: Callable[[State], None]
    act: Callable[[State], Any]
    backend: str = "reference"
    options: tuple[tuple[str, Any], ...] = ()

    def compiled(self, number: float) -> Step:
        """The call of a class that is compiled afresh."""
        target = fusegrad.compile(self.made(number), backend=self.backend, **dict(self.options))
        return getattr(target, "apply", target)  # type: ignore[no-any-return]

    def eager(self, number: float) -> Step:
        """The call of the class itself."""
        target = self.made(number)
        return getattr(target, "apply", target)  # type: ignore[no-any-return]


WAYS: dict[str, tuple[Callable[[State], None], Callable[[State], Any]]] = {
    "first call": (nothing, forward),
    "third call": (times(2, True), forward),
    "later call": (times(5, True), forward),
    "other sizes": (times(2), of_other_rows),
    "backward": (recorded(0), backward),
    "third backward": (recorded(4), backward),
    "later backward": (recorded(8), backward),
    "double backward": (nothing, double),
    "second backward": (twice_recorded, second),
    "vmap": (nothing, mapped),
    "jvp": (nothing, pushed),
    "dual numbers": (nothing, dual),
    "grad": (nothing, graded),
    "vmap of grad": (nothing, mapped_gradient),
    "vjp": (pulled, pulling),
    "torch.compile": (nothing, in_graphs),
    "a thread": (nothing, in_a_thread),
}
WRITES = {
    "first call": (nothing, into_a_leaf),
    "later call": (lambda state: [into_a_leaf(state) for _ in range(5)] and None, into_a_leaf),
}
KINDS_OF_CALL = {
    "first": ("first call", "third call", "other sizes", "torch.compile", "a thread"),
    "later": ("later call",),
    "transformed": ("vmap", "jvp", "dual numbers", "grad", "vmap of grad", "vjp"),
    "backward": ("backward", "third backward"),
    "later backward": ("later backward",),
    "double backward": ("double backward", "second backward"),
}
PLAIN = ("first call", "later call", "backward", "later backward")


def _scenes(made: Callable[[float], Any], ways: Any, backend: str = "reference") -> dict[str, Scene]:
    return {f"{made.__name__}, {name}, {backend}": Scene(made, *way, backend) for name, way in ways.items()}


def _some(*names: str) -> Any:
    return {name: WAYS[name] for name in names}


SCENES: dict[str, Scene] = {
    **_scenes(norm, WAYS),
    **_scenes(norm, _some("first call", "third call", "later call", "other sizes", "backward", "later backward",
                          "double backward", "vmap of grad", "jvp"), "interpret"),
    **_scenes(gate, _some(*PLAIN, "double backward")),
    **_scenes(gate, _some("first call", "backward", "double backward"), "interpret"),
    **_scenes(written, WRITES),
    **_scenes(written, WRITES, "interpret"),
    **_scenes(noise, _some(*PLAIN)),
    **_scenes(noise, _some(*PLAIN), "interpret"),
    **_scenes(around, _some(*PLAIN)),
    **_scenes(opaque, _some(*PLAIN, "double backward")),
    **_scenes(function, _some(*PLAIN, "grad")),
}  # fmt: skip


def kind_of(scene: str) -> str:
    """The kind of call that a scene is, and its backend."""
    _, way, backend = scene.split(", ")
    return f"{next(kind for kind, ways in KINDS_OF_CALL.items() if way in ways)}, {backend}"
