"""Ways of calling a Function. Each tells a census which tensors it met, and keeps none of them.

What a way raises is what eager raises, too, or it is no fault here: only what stays afterwards is looked at.
"""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils.checkpoint import checkpoint

import fusegrad

Tensor = torch.Tensor
DEPTH = 9
"""How far a failure follows who refers to whom."""


class Census:
    """Weak references to the tensors of one call, by what they were in it."""

    def __init__(self) -> None:
        self.met: list[tuple[str, weakref.ref[Tensor]]] = []

    def __call__(self, what: str, values: Any) -> None:
        self.met += [(what, weakref.ref(t)) for t in tensors_in(values)]

    def alive(self) -> list[str]:
        """What they were that are still there; and where the frames are of errors that are."""
        return [*(what for what, ref in self.met if ref() is not None), *map(_place, _tracebacks())]

    def holders(self) -> str:
        """Who refers to the first of them, and who to that."""
        found = next((t for _, ref in self.met if (t := ref()) is not None), None)
        lines: list[str] = []
        _add_holders(lines, found if found is not None else next(iter(_tracebacks()), None), DEPTH, set())
        return "\n".join(lines)


def _tracebacks() -> list[types.TracebackType]:
    """The innermost parts of those that are alive, of what was made since `uncollected` began."""
    return [t for t in gc.get_objects() if type(t) is types.TracebackType and t.tb_next is None]


def _place(trace: types.TracebackType) -> str:
    return f"an error at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def _add_holders(lines: list[str], held: Any, depth: int, seen: set[int]) -> None:
    """A line per object that refers to another; what only C++ refers to has none."""
    holders = gc.get_referrers(held) if depth and held is not None else []
    seen |= {id(holders), id(lines), *_stack()}
    for holder in holders:
        if id(holder) in seen or isinstance(holder, types.ModuleType) or type(holder).__name__ == "list_iterator":
            continue
        seen.add(id(holder))
        lines.append("  " * (DEPTH - depth) + _described(holder, held))
        _add_holders(lines, holder, depth - 1, seen)


def _stack() -> list[int]:
    frame, found = sys._getframe(1), list[int]()
    while frame is not None:
        found.append(id(frame))
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _described(holder: Any, held: Any) -> str:
    if isinstance(holder, types.FrameType):
        return f"frame of {holder.f_code.co_qualname}, {holder.f_code.co_filename}:{holder.f_lineno}"
    if isinstance(holder, types.FunctionType | BaseException):
        return repr(holder)[:150]
    if isinstance(holder, dict):
        return f"dict at {_key_of(held, holder)}"
    return type(holder).__name__


def _key_of(value: Any, table: dict[Any, Any]) -> str:
    for key, other in list(table.items()):
        if other is value:
            return str(key)[:60]
    return "a key"


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def tracked(values: Any) -> list[Tensor]:
    return [t for t in tensors_in(values) if t.requires_grad]


Apply = Callable[..., Any]
Way = Callable[[Apply, tuple[Any, ...], Census], Any]


def called(apply: Apply, args: Sequence[Any], met: Census) -> list[Tensor]:
    """The outputs that can be differentiated."""
    outputs = tensors_in(apply(*args))
    met("output", outputs)
    return tracked(outputs)


def _weights(ends: Sequence[Tensor], met: Census, differentiable: bool = False) -> list[Tensor]:
    weights = [torch.rand_like(end, requires_grad=differentiable) for end in ends]
    met("gradient of an output", weights)
    return weights


def forward_and_backward(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    ends, leaves = called(apply, args, met), tracked(args)
    if ends:
        met("gradient", torch.autograd.grad(ends, leaves, _weights(ends, met), allow_unused=True))


def forward_alone(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    called(apply, args, met)


def without_grad(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    with torch.no_grad():
        called(apply, args, met)


def twice(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    """The same graph backwards twice."""
    ends, leaves = called(apply, args, met), tracked(args)
    for keep in (True, False) if ends else ():
        found = torch.autograd.grad(ends, leaves, _weights(ends, met), allow_unused=True, retain_graph=keep)
        met("gradient", found)


def double_backward(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    ends, leaves = called(apply, args, met), tracked(args)
    weights = _weights(ends, met, differentiable=True)
    first = torch.autograd.grad(ends, leaves, weights, allow_unused=True, create_graph=True) if ends else ()
    met("gradient", first)
    if again := tracked(first):
        met("second gradient", torch.autograd.grad([g.sum() for g in again], [*leaves, *weights], allow_unused=True))


def in_anomaly_mode(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    with torch.autograd.detect_anomaly(check_nan=False):
        double_backward(apply, args, met)


def under_a_hook_that_raises(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    """A hook of the output: the error comes before any backward runs."""
    ends = called(apply, args, met)
    for end in ends:
        end.register_hook(_refuse)
    torch.autograd.grad(ends, tracked(args), _weights(ends, met), allow_unused=True)


def _refuse(*given: Any) -> Any:
    raise ValueError("refused")


def with_saved_tensors_that_cannot_be_unpacked(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), _refuse):
        ends = called(apply, args, met)
    torch.autograd.grad(ends, tracked(args), _weights(ends, met), allow_unused=True)


def with_saved_tensors_elsewhere(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    with torch.autograd.graph.save_on_cpu():
        forward_and_backward(apply, args, met)


def with_wrong_arguments(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    """The first tensor lacks a column."""
    first = next((i for i, a in enumerate(args) if isinstance(a, Tensor) and a.dim()), 0)
    wrong = tuple(a[..., :-1] if i == first and isinstance(a, Tensor) else a for i, a in enumerate(args))
    met("argument", wrong)
    forward_and_backward(apply, wrong, met)


def with_too_many_arguments(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    called(apply, (*args, *args, 3), met)


def checkpointed(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    for reentrant in (False, True):
        ends = tracked(checkpoint(apply, *args, use_reentrant=reentrant))
        met("output", ends)
        torch.autograd.backward(ends, _weights(ends, met))
        met("gradient", [leaf.grad for leaf in tracked(args)])


def in_a_thread(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    def run() -> None:
        try:
            forward_and_backward(apply, args, met)
        except Exception:
            pass

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def _of_floats(apply: Apply, args: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Tensor]]:
    """A function of the tensors that can be differentiated alone, and these."""
    at = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point()]
    fixed = [a.detach() if isinstance(a, Tensor) else a for a in args]

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        full = list(fixed)
        for i, value in zip(at, given, strict=False):
            full[i] = value
        return tuple(t for t in tensors_in(apply(*full)) if t.is_floating_point())

    return function, [fixed[i] for i in at]


def _summed(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: sum(o.sum() for o in function(*given))


def of_samples(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    function, floats = _of_floats(apply, args)
    batch = [torch.stack([t, t + 1]) for t in floats]
    met("argument", batch)
    every = tuple(range(len(batch)))
    found = torch.func.vmap(torch.func.grad(_summed(function), every), randomness="different")(*batch)
    met("gradient", found)


def pushed_forward(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    function, floats = _of_floats(apply, args)
    tangents = _weights(floats, met)
    met("tangent", torch.func.jvp(function, tuple(floats), tuple(tangents)))


def hessian(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    function, floats = _of_floats(apply, args)
    met("second derivative", torch.func.hessian(_summed(function))(*floats))


def in_dual_numbers(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    with torch.autograd.forward_ad.dual_level():
        met("output", apply(*[_dual(a, met) for a in args]))


def _dual(value: Any, met: Census) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    tangent = torch.rand_like(value)
    met("tangent", tangent)
    return torch.autograd.forward_ad.make_dual(value.detach(), tangent)


def within_torch_compile(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    torch._dynamo.reset()
    outputs = tensors_in(torch.compile(lambda *given: apply(*given), backend="eager")(*args))
    met("output", outputs)
    if ends := tracked(outputs):
        met("gradient", torch.autograd.grad(ends, tracked(args), _weights(ends, met), allow_unused=True))


def explained_in_between(apply: Apply, args: tuple[Any, ...], met: Census) -> None:
    ends, leaves = called(apply, args, met), tracked(args)
    owner = getattr(apply, "__self__", None)
    if hasattr(owner, "_fusegrad"):
        fusegrad.explain(owner, *args)
    if ends:
        met("gradient", torch.autograd.grad(ends, leaves, _weights(ends, met), allow_unused=True))


WAYS: tuple[Way, ...] = (
    forward_and_backward, forward_alone, without_grad, twice, double_backward, in_anomaly_mode,
    under_a_hook_that_raises, with_saved_tensors_that_cannot_be_unpacked, with_saved_tensors_elsewhere,
    with_wrong_arguments, with_too_many_arguments, checkpointed, in_a_thread, of_samples, pushed_forward, hessian,
    in_dual_numbers, within_torch_compile, explained_in_between,
)  # fmt: skip


def census(apply: Apply, way: Way, make: Callable[[], tuple[Any, ...]]) -> Census:
    """What a call of this way met."""
    met = Census()
    args = make()
    met("argument", args)
    try:
        way(apply, args, met)
    except Exception:
        pass
    return met


def kept(apply: Apply, way: Way, make: Callable[[], tuple[Any, ...]], calls: int) -> list[tuple[int, list[str], str]]:
    """(call, what is alive after it, who holds it), of the calls after which something is; Python collects nothing."""
    found = []
    with uncollected():
        for at in range(calls):
            met = census(apply, way, make)
            if alive := met.alive():
                found.append((at + 1, alive, met.holders()))
    return found


@contextmanager
def uncollected() -> Iterator[None]:
    """Within the block nothing is freed but by its last reference going away, as memory of a GPU has to be."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # what was there before is not looked through
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
