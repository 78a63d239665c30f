"""What a class of the outside world is driven through: each scene makes fresh arguments and says what it saw.

A scene is told with the class itself and with the compiled class. What it saw is a list of (label, value): results,
gradients, tangents, with their strides and flags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from constructors import Maker, cast, laid_out

Tensor = torch.Tensor
Seen = list[tuple[str, Any]]
LANES = 3


@dataclass(frozen=True)
class Scene:
    """What is done, and to which variation of a row's arguments."""

    play: Callable[[Any, Scene, str], Seen]
    dtype: torch.dtype = torch.float32
    layout: str | None = None
    gradient: str = "uneven"
    checked: Callable[[Any, Scene, str], Seen] | None = None
    """The same from single calls of the class itself, for where eager has no rule of its own."""
    wide: bool = False
    """Whether the numbers, made in `dtype`, are handed over as float64."""

    def arguments(self, text: str, seed: int = 0) -> tuple[Any, ...]:
        args: Any = Maker(1000 * seed)(text)
        if self.dtype is not torch.float32:
            args = cast(args, self.dtype)
        if self.wide:
            args = cast(args, torch.float64)
        if self.layout is not None:
            args = laid_out(args, self.layout)
        torch.manual_seed(1)  # for what the class itself draws
        return tuple(args)


# ------------------------------------------------------------------ pieces
def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def moving(args: Sequence[Any]) -> list[int]:
    """The places of the arguments that a gradient is asked of."""
    return [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]


def weights(outputs: Sequence[Tensor], how: str, seed: int = 7) -> list[Tensor]:
    """A gradient for each output: uneven numbers (drawn without a generator, for vmap), or one number expanded."""
    if how == "expanded":
        return [o.new_ones(()).expand(o.shape) for o in outputs]
    return [_uneven(o, seed + i) for i, o in enumerate(outputs)]


def _uneven(like: Tensor, seed: int) -> Tensor:
    count = torch.arange(like.numel(), dtype=torch.float64).reshape(like.shape)
    real = (1.7 * count + seed).cos() + 0.3
    return (torch.complex(real, real.flip(-1) if real.dim() else real) if like.is_complex() else real).to(like.dtype)


def differentiable(outputs: Any) -> list[Tensor]:
    return [o for o in tensors_of(outputs) if o.requires_grad]


def _replaced(args: Sequence[Any], at: Sequence[int], by: Sequence[Any]) -> list[Any]:
    changed = dict(zip(at, by, strict=True))
    return [changed.get(i, a) for i, a in enumerate(args)]


def _floating(outputs: Any) -> list[Tensor]:
    return [o for o in tensors_of(outputs) if o.is_floating_point() or o.is_complex()]


def _labelled(label: str, values: Sequence[Any]) -> Seen:
    return [(f"{label} {i}", value) for i, value in enumerate(values)]


# ------------------------------------------------------------------ scenes
def backward(apply: Any, scene: Scene, text: str) -> Seen:
    args = scene.arguments(text)
    at = moving(args)
    result = apply(*args)
    seen = _labelled("output", pytree.tree_leaves(result))
    ends = differentiable(result)
    if not ends or not at:
        return seen
    found = torch.autograd.grad(ends, [args[i] for i in at], weights(ends, scene.gradient), allow_unused=True)
    return seen + _labelled("gradient", found)


def double(apply: Any, scene: Scene, text: str) -> Seen:
    args = scene.arguments(text)
    xs = [args[i] for i in moving(args)]
    ends = differentiable(apply(*args))
    if not ends:
        return []
    given = [w.requires_grad_() for w in weights(ends, scene.gradient)]
    first = torch.autograd.grad(ends, xs, given, create_graph=True, allow_unused=True)
    again = differentiable([g for g in first if g is not None])
    if not again:
        return _labelled("gradient", first)
    second = torch.autograd.grad(again, [*xs, *given], weights(again, "uneven", 8), allow_unused=True)
    return _labelled("gradient", first) + _labelled("second gradient", second)


def jvp(apply: Any, scene: Scene, text: str) -> Seen:
    args = scene.arguments(text)
    at = moving(args)
    xs = tuple(args[i].detach() for i in at)
    tangents = tuple(weights(xs, "uneven", 9))
    primal, tangent = torch.func.jvp(lambda *ys: apply(*_replaced(args, at, ys)), xs, tangents)
    return _labelled("output", tensors_of(primal)) + _labelled("tangent", _floating(tangent))


def pairing(apply: Any, scene: Scene, text: str) -> Seen:
    """`<w, J t>` as `<backward(w), t>`: one number for all tangents."""
    args = scene.arguments(text)
    xs = [args[i] for i in moving(args)]
    ends = differentiable(apply(*args))
    found = torch.autograd.grad(ends, xs, weights(ends, "uneven"), allow_unused=True)
    pairs = [(g, t) for g, t in zip(found, weights(xs, "uneven", 9), strict=True) if g is not None]
    return [("pairing", sum((g.double() * t.double()).sum() for g, t in pairs))]


def paired(tangents: Seen) -> Seen:
    """The same number from tangents."""
    found = [value for label, value in tangents if label.startswith("tangent")]
    pairs = zip(found, weights(found, "uneven"), strict=True)
    return [("pairing", sum((t.double() * w.double()).sum() for t, w in pairs))]


def _lanes(scene: Scene, text: str) -> tuple[list[Any], list[int], list[Any], list[tuple[Any, ...]]]:
    """Arguments, the places that are batched, the stacks, and the arguments of each lane."""
    lanes = [scene.arguments(text, seed) for seed in range(LANES)]
    at = moving(lanes[0])
    stacks = [torch.stack([lane[i].detach() for lane in lanes]) for i in at]
    singles = [tuple(_replaced(lanes[0], at, [s[k] for s in stacks])) for k in range(LANES)]
    return list(lanes[0]), at, stacks, singles


def vmap(apply: Any, scene: Scene, text: str) -> Seen:
    args, at, stacks, _ = _lanes(scene, text)
    result = torch.func.vmap(lambda *ys: tuple(tensors_of(apply(*_replaced(args, at, ys)))))(*stacks)
    return _labelled("output", result)


def vmap_by_lanes(apply: Any, scene: Scene, text: str) -> Seen:
    _, _, _, singles = _lanes(scene, text)
    rows = [tensors_of(apply(*single)) for single in singles]
    return _labelled("output", [torch.stack(column).detach() for column in zip(*rows, strict=True)])


def _weighed(apply: Any, args: Sequence[Any], at: Sequence[int]) -> Callable[..., Tensor]:
    def total(*ys: Any) -> Any:
        outputs = _floating(apply(*_replaced(args, at, ys)))
        return sum((o * w).sum() for o, w in zip(outputs, weights(outputs, "uneven"), strict=True))

    return total


def vmap_grad(apply: Any, scene: Scene, text: str) -> Seen:
    args, at, stacks, _ = _lanes(scene, text)
    gradients = torch.func.grad(_weighed(apply, args, at), argnums=tuple(range(len(at))))
    return _labelled("gradient", torch.func.vmap(gradients)(*stacks))


def vmap_grad_by_lanes(apply: Any, scene: Scene, text: str) -> Seen:
    args, at, stacks, _ = _lanes(scene, text)
    total = _weighed(apply, args, at)
    rows = []
    for k in range(LANES):
        xs = [s[k].detach().requires_grad_() for s in stacks]
        value = total(*xs)
        found = torch.autograd.grad(value, xs, allow_unused=True) if value.requires_grad else [None] * len(xs)
        rows.append([torch.zeros_like(x) if g is None else g for x, g in zip(xs, found, strict=True)])
    return _labelled("gradient", [torch.stack(column) for column in zip(*rows, strict=True)])


SCENES: dict[str, Scene] = {
    "backward": Scene(backward),
    "double backward": Scene(double),
    "jvp": Scene(jvp, checked=pairing),
    "vmap": Scene(vmap, checked=vmap_by_lanes),
    "vmap of grad": Scene(vmap_grad, checked=vmap_grad_by_lanes),
    "transposed": Scene(backward, layout="transposed"),
    "step 2": Scene(backward, layout="step 2"),
    "expanded gradient": Scene(backward, gradient="expanded"),
    "float64": Scene(backward, dtype=torch.float64),
    "bfloat16": Scene(backward, dtype=torch.bfloat16),
}
TRANSFORMS = ("jvp", "vmap", "vmap of grad")
