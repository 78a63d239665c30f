"""Compiled against eager: the same call on the same data, and a float64 run as the judge of accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor


def laid_out(tensor: Any, layout: str) -> Any:
    """The tensor in another layout; "expanded" and "row" keep less of its data."""
    if not isinstance(tensor, Tensor) or tensor.dim() == 0:
        return tensor
    return LAYOUTS[layout](tensor)


def _transposed(t: Tensor) -> Tensor:
    axes = list(range(t.dim()))[::-1]
    return t.permute(axes).contiguous().permute(axes)


def _offset(t: Tensor) -> Tensor:
    memory = torch.zeros((t.shape[0] + 1, *t.shape[1:]), dtype=t.dtype)
    memory[1:] = t
    return memory[1:]


def _step(t: Tensor) -> Tensor:
    memory = torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype)
    memory[..., ::2] = t
    return memory[..., ::2]


def _expanded(t: Tensor) -> Tensor:
    return torch.full((), 1.25, dtype=t.dtype).expand(t.shape) if t.is_floating_point() else t


def _row(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape) if t.is_floating_point() and t.shape[0] else t


def _channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else _transposed(t)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": _transposed,
    "offset": _offset,
    "step": _step,
    "expanded": _expanded,
    "row": _row,
    "channels_last": _channels_last,
}


@dataclass
class Run:
    """What one call gave: outputs, gradients of the differentiable inputs, and the cotangents that were used."""

    outputs: list[Any]
    gradients: list[Tensor | None]
    cotangents: list[Tensor]


def run(apply: Callable[..., Any], args: Sequence[Any], seed: int, layout: str = "contiguous") -> Run:
    """Forward and backward; random cotangents in the layout."""
    given = [a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in args]
    result = apply(*given)
    outputs = list(result) if isinstance(result, tuple) else [result]
    ends = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
    numbers = torch.Generator().manual_seed(seed)
    cotangents = [laid_out(_normal(o, numbers), layout) for o in ends]
    return Run(outputs, _gradients(given, ends, cotangents), cotangents)


def wide_run(apply: Callable[..., Any], args: Sequence[Any], cotangents: Sequence[Tensor]) -> Run:
    """The same call in float64, with the same cotangents."""
    given = [
        a.detach().double().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
    ]
    result = apply(*given)
    outputs = list(result) if isinstance(result, tuple) else [result]
    ends = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
    wide = [c.to(o.dtype) for c, o in zip(cotangents, ends, strict=True)]
    return Run(outputs, _gradients(given, ends, wide), wide)


def _normal(like: Tensor, numbers: torch.Generator) -> Tensor:
    drawn = torch.randn(like.shape, generator=numbers, dtype=torch.float64)
    if like.is_complex():
        drawn = torch.complex(drawn, torch.randn(like.shape, generator=numbers, dtype=torch.float64))
    return drawn.to(like.dtype)


def _gradients(given: Sequence[Any], ends: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor | None]:
    leaves = [g for g in given if isinstance(g, Tensor) and g.requires_grad]
    return list(torch.autograd.grad(ends, leaves, cotangents, allow_unused=True)) if ends and leaves else []


def faults(compiled: Run, eager: Run, wide: Run) -> list[str]:
    """Everything in which a compiled call is not the eager one."""
    if len(compiled.outputs) != len(eager.outputs):
        return [f"{len(compiled.outputs)} outputs, eager has {len(eager.outputs)}"]
    rows = [(f"output {i}", *r) for i, r in enumerate(zip(compiled.outputs, eager.outputs, wide.outputs, strict=True))]
    rows += [
        (f"gradient {i}", *r)
        for i, r in enumerate(zip(compiled.gradients, eager.gradients, wide.gradients, strict=True))
    ]
    return [f"{name}: {why}" for name, c, e, w in rows if (why := fault(c, e, w)) is not None]


def fault(compiled: Any, eager: Any, wide: Any) -> str | None:
    """Why one value is not eager's; None where it is."""
    if not isinstance(eager, Tensor) or not isinstance(compiled, Tensor):
        same = type(compiled) is type(eager) and (isinstance(eager, Tensor) or compiled == eager)
        return None if same else f"{compiled!r}, eager {eager!r}"
    for fact in ("dtype", "shape", "requires_grad", "device"):
        if getattr(compiled, fact) != getattr(eager, fact):
            return f"{fact} {getattr(compiled, fact)}, eager {getattr(eager, fact)}"
    if eager.numel() and strides(compiled) != strides(eager):
        return f"stride {compiled.stride()}, eager {eager.stride()} of {tuple(eager.shape)}"
    return inaccuracy(compiled.detach(), eager.detach(), wide.detach())


def strides(tensor: Tensor) -> list[int]:
    """The strides that mean something: those of axes longer than one."""
    return [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1]


def inaccuracy(compiled: Tensor, eager: Tensor, wide: Tensor) -> str | None:
    """Integers are equal; floats miss float64 by at most twice what eager does, and 4 ulp of the largest."""
    if not eager.is_floating_point() and not eager.is_complex():
        return None if torch.equal(compiled, eager) else f"{int((compiled != eager).sum())} of {eager.numel()} differ"
    c, e, w = (t.to(torch.complex128 if eager.is_complex() else torch.float64) for t in (compiled, eager, wide))
    for special in (torch.isnan, torch.isinf):
        if not torch.equal(special(c), special(e)):
            return f"{special.__name__} at {int(special(c).sum())} places, eager at {int(special(e).sum())}"
    finite = torch.isfinite(c) & torch.isfinite(w)
    if not finite.any():
        return None
    mine, theirs = ((x - w).abs()[finite].max().item() for x in (c, e))
    limit = 2 * theirs + 4 * torch.finfo(eager.dtype).eps * w.abs()[finite].max().item()
    return None if mine <= limit else f"error {mine:.3g}, eager {theirs:.3g}"
