"""The face of a compiled Function to torch.compile and to compiled autograd.

Dynamo takes an autograd.Function apart by itself, and under a torch.func transform it drops its backward. So it meets
a class of another metaclass here: `apply` is Python that it follows, to one call that it puts into its graph as it is
(`in_graph`). That call makes operators of torch.library, or refuses, which breaks the graph and runs what was compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch

from ...tracer.methods import methods
from ..fallback.user_traceback import hide_own_frames
from .traceability import Traceability

in_dynamo: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""True if Dynamo follows the code that asks: false in all that really runs."""

BREAKS = (
    "fusegrad runs what it compiled outside of this graph: a subclass of a compiled class or, under compiled autograd, "
    "a backward that does not declare `is_traceable = True`"
)
_NEEDS_RUNTIME = ("mark_dirty", "mark_non_differentiable", "set_materialize_grads", "save_for_forward")
"""Calls on ctx whose meaning Dynamo's own rendering of a Function does not keep in every case."""


def fits_a_graph(cls: type, promised: Traceability) -> bool:
    """True if Dynamo may take the user's class into its graph: it is promised traceable, and plain enough."""
    written = methods(cls)
    plain = not written.keys() & {"jvp", "vjp", "vmap"} and not getattr(cls, "generate_vmap_rule", False)
    names = {name for method in written.values() for name in _names(getattr(method, "__code__", None))}
    traceable = all(promised.declared[role].value is True for role in promised.roles())
    return traceable and plain and names.isdisjoint(_NEEDS_RUNTIME)


def _names(code: CodeType | None) -> Iterator[str]:
    """The attributes and globals that code mentions, functions inside it included."""
    if code is None:
        return
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


@torch.compiler.disable(reason=BREAKS)  # type: ignore[untyped-decorator,no-untyped-call]
def outside_backward(run: Callable[..., Any], *args: Any) -> Any:
    """A backward, with a graph break around it."""
    return run(*args)


def shown(run: Callable[..., Any], own: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """`run` as the backward of a Function; to compiled autograd, which follows it, the user's `own` or a break."""

    def backward(ctx: Any, *gradients: Any) -> Any:
        if not in_dynamo():
            try:
                return run(ctx, *gradients)
            except Exception as error:
                hide_own_frames(error)
                raise
        return outside_backward(run, ctx, *gradients) if own is None else own(ctx, *gradients)

    return backward


def node_class(cls: Any, bases: tuple[type, ...], body: dict[str, Any], more: dict[str, Any] | None = None) -> Any:
    """A Function that stands for `cls`: its `grad_fn`s are instances of the user's own `_backward_cls`.

    more: names of their class.
    """
    node: Any = type(bases[0])(cls.__name__, bases, body)
    users = cls._backward_cls
    names = {"_forward_cls": node, **(more or {})}
    node._backward_cls = type(users.__name__, (users,), names)
    return node


def with_opaque_backward(cls: type, method: Callable[..., Any]) -> type:
    """`cls` with its own backward, around which compiled autograd breaks the graph."""
    name = "backward" if cls.backward is method else "vjp"  # type: ignore[attr-defined]
    body = {name: staticmethod(shown(method)), "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return node_class(cls, (cls,), body)  # type: ignore[no-any-return]


@torch.compiler.disable(reason=BREAKS)  # type: ignore[untyped-decorator,no-untyped-call]
def outside(own: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`own.apply`, with a graph break around it."""
    return own.apply(*args, **kwargs)  # type: ignore[attr-defined]


__all__ = ["fits_a_graph", "shown", "with_opaque_backward"]
