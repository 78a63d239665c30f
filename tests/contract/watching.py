"""Functions with opaque methods, what is done with them, and how often each body ran, on what.

Bodies are counted from outside, through the profiler: a counter inside would be an effect that makes a method opaque.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.func import grad, jacrev, jvp, vmap

import fusegrad

Tensor = torch.Tensor
METHODS = ("forward", "setup_context", "backward", "vjp", "jvp", "vmap")
ALL = ("forward", "backward", "jvp")


# ------------------------------------------------------------------ watching bodies run
@dataclass
class Seen:
    """What was seen of the bodies of some classes: calls by name, calls on fakes, and torch's modes at each call."""

    calls: Counter[str] = field(default_factory=Counter)
    on_fakes: Counter[str] = field(default_factory=Counter)
    modes: list[tuple[str, bool, bool, bool]] = field(default_factory=list)


@contextmanager
def watching(*classes: Any) -> Iterator[Seen]:
    """classes: of which the methods are watched; functions are, too."""
    seen = Seen()
    codes = {inspect.unwrap(getattr(c, n)).__code__: n for c in classes for n in METHODS if n in vars(c)}
    codes |= {f.__code__: f.__name__ for f in classes if inspect.isfunction(f)}

    def look(frame: Any, event: str, _: Any) -> None:
        if event != "call" or frame.f_code not in codes:
            return
        name = codes[frame.f_code]
        seen.calls[name] += 1
        flat = torch.utils._pytree.tree_leaves(list(frame.f_locals.values()))
        seen.on_fakes[name] += any(isinstance(v, FakeTensor | torch.SymInt) for v in flat)
        autocast = torch.is_autocast_enabled("cpu")
        seen.modes.append((name, torch.is_grad_enabled(), autocast, torch.is_inference_mode_enabled()))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(before)


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return made.requires_grad_()


def outcome(action: Callable[[Any], Any], cls: Any) -> Any:
    """What an action gives, flat and detached, or the error that it raises."""
    torch.manual_seed(0)
    random.seed(0)
    try:
        result = action(cls)
    except Exception as error:
        return type(error), str(error)
    flat = torch.utils._pytree.tree_leaves(result)
    return [v.detach().clone() if isinstance(v, Tensor) else v for v in flat]


def same(mine: Any, theirs: Any) -> None:
    if isinstance(theirs, tuple):
        assert mine == theirs
        return
    assert isinstance(mine, list), mine
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(b, Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b)
        else:
            assert type(a) is type(b) and a == b


def record(fast: Any, method: str) -> Any:
    return fast._fusegrad.ledger.records[method]


def captures() -> int:
    return fusegrad.stats()["captures"]


def line_of(method: Any, text: str) -> str:
    lines, first = inspect.getsourcelines(inspect.unwrap(method))
    at = next(i for i, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(inspect.unwrap(method))}:{first + at}"


# ------------------------------------------------------------------ Functions, and what is done with them
class Sine(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


class Opaque(Function):
    """What the ones below have in common: numpy in forward, the rest theirs."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


def first_of(cls: Any, *rest: Any) -> Any:
    x = leaf(3)
    y = cls.apply(x, *rest)
    return y, torch.autograd.grad(y.sum(), x)


def through_numpy(t: Tensor) -> Tensor:
    return torch.from_numpy(np.cos(t.detach().numpy()))


def prints(t: Tensor) -> float:
    print("seen", float(t.sum()))
    return 2.0


TOUCHES: dict[str, Callable[[Tensor], Any]] = {
    "numpy": through_numpy,
    "item": lambda t: 1 + t.detach().sum().item(),
    "data_ptr": lambda t: 2.0 if t.data_ptr() else 3.0,
    "print": prints,
    "torch random": lambda t: torch.rand(t.shape),
    "python random": lambda t: random.random(),
}


def touching(touch: Callable[[Tensor], Any], roles: tuple[str, ...], **body: Any) -> type:
    """A Function that touches what no graph can hold in the methods of `roles`, and nowhere else."""
    inside = {role: touch if role in roles else (lambda t: 1.5) for role in ALL}
    in_forward, in_backward, in_jvp = (inside[role] for role in ALL)

    class Touching(Function):
        @staticmethod
        def forward(x, k):
            return x.sin() * in_forward(x) * k

        @staticmethod
        def setup_context(ctx, inputs, output):
            x, ctx.k = inputs
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x.cos() * in_backward(g) * ctx.k, None

        @staticmethod
        def jvp(ctx, t, _):
            (x,) = ctx.saved_tensors
            return t * x.cos() * in_jvp(t) * ctx.k

        @staticmethod
        def vmap(info, in_dims, x, k):
            return Touching.apply(x, k), in_dims[0]

    for name, value in body.items():
        setattr(Touching, name, value)
    return Touching


def first_order(cls: Any) -> Any:
    x = leaf(3)
    y = cls.apply(x, 2)
    return y, torch.autograd.grad(y.sum(), x)


def second_order(cls: Any) -> Any:
    x = leaf(3)
    (g,) = torch.autograd.grad(cls.apply(x, 2).sum(), x, create_graph=True)
    return g, torch.autograd.grad((g * g).sum(), x)


def twice_backward(cls: Any) -> Any:
    x = leaf(3)
    y = cls.apply(x, 2)
    return [torch.autograd.grad(y, x, torch.full_like(y, k), retain_graph=True) for k in (1.0, 2.0)]


def under_autocast(cls: Any) -> Any:
    x = leaf(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.autograd.grad(cls.apply(x, 2).sum(), x)


def duals(cls: Any) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(cls.apply(forward_ad.make_dual(leaf(3), torch.ones(3)), 2)))


ACTIONS: dict[str, Callable[[Any], Any]] = {
    "no grad": lambda cls: cls.apply(leaf(3).detach(), 2),
    "first": first_order,
    "second": second_order,
    "twice": twice_backward,
    "autocast": under_autocast,
    "duals": duals,
    "grad": lambda cls: grad(lambda x: cls.apply(x, 2).sum())(leaf(3).detach()),
    "vmap": lambda cls: vmap(lambda x: cls.apply(x, 2))(leaf(2, 3).detach()),
    "jvp": lambda cls: jvp(lambda x: cls.apply(x, 2), (leaf(3).detach(),), (torch.ones(3),)),
    "jacrev": lambda cls: jacrev(lambda x: cls.apply(x, 2))(leaf(3).detach()),
    "vmap grad": lambda cls: vmap(grad(lambda x: cls.apply(x, 2).sum()))(leaf(2, 3).detach()),
}
DECLARATIONS = {
    "flag": ({"is_traceable": False}, ALL),
    "forward": ({"traceable": {"forward": False}}, ("forward",)),
    "backward": ({"traceable": {"backward": False}}, ("backward",)),
    "jvp": ({"traceable": {"jvp": False}}, ("jvp",)),
}
