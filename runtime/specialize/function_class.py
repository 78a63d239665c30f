"""How a compiled Function shows itself to torch.compile and to compiled autograd.

Dynamo takes an autograd.Function apart by itself, and under a torch.func transform it drops its backward. So it meets
a class of another metaclass here: `apply` is Python that it follows, to one call that it puts into its graph as it is
(`in_graph`). That call makes operators of torch.library, or refuses, which breaks the graph and runs what was compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType
from typing import Any

import torch
from torch.autograd.function import FunctionMeta

from ...tracer.function import methods
from ...tracer.torch_private import DYNAMO_TAKES_ANY_CLOSURE, hide_from_dynamo
from ..dispatch.pickling import OPTIONS, arrived, register
from ..dynamo.graph_names import in_graph, name_in_graphs
from ..fallback.answer import Fault, is_fault
from ..fast_path.argument_forms import MISS
from ..fast_path.inline_cache import Ready
from .traceability import Traceability

in_dynamo: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""Whether Dynamo follows the code that asks: false in all that really runs."""

_REASON = (
    "fusegrad runs what it compiled outside of this graph: a subclass of a compiled class or, under compiled autograd, "
    "a backward that does not declare `is_traceable = True`"
)
_NEEDS_RUNTIME = ("mark_dirty", "mark_non_differentiable", "set_materialize_grads", "save_for_forward")
"""Calls on ctx whose meaning Dynamo's own rendering of a Function does not keep in every case."""


class CompiledMeta(FunctionMeta):
    """FunctionMeta by another name: Dynamo takes classes of exactly that metaclass apart, past their `apply`.

    A method that is assigned to a compiled class (by a patch, by a notebook that loads a changed file) is compiled.
    """

    def __init__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any]) -> None:
        super().__init__(name, bases, names)  # type: ignore[no-untyped-call]
        if OPTIONS in names:
            arrived(cls)
        elif "apply" not in names:
            _name_subclass(cls)

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        _changed(cls, name)
        if name == OPTIONS:
            arrived(cls)

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        _changed(cls, name)


def _name_subclass(cls: Any) -> None:
    """A user's subclass of a compiled class has a name of its own in graphs."""
    inherited = getattr(getattr(cls, "apply", None), "__func__", None)
    if (call_of := getattr(inherited, "_fusegrad_call_of", None)) is not None:
        cls._fusegrad_call = call_of(cls)
        cls._fusegrad_name = name_in_graphs(cls, cls._fusegrad_call)


def _changed(cls: Any, name: str) -> None:
    if is_public(name) and "_fusegrad" in vars(cls):
        assigned = {name: value for name, value in vars(cls).items() if is_public(name)}
        cls._fusegrad_user_class = cls._fusegrad.begin_again(assigned)


def is_public(name: str) -> bool:
    """Whether an attribute of a compiled class is one that its user put there."""
    return not name.startswith("_") and name != "apply"


register(CompiledMeta)


def metaclass_for(cls: type) -> Any:
    """CompiledMeta, also of a class whose author has a metaclass of his own."""
    made = joined(CompiledMeta, type(cls))
    register(made)
    return made


def joined(ours: type, own: type) -> type:
    """A metaclass of ours that is one of its author's as well; his own where it is one of ours."""
    if issubclass(ours, own):
        return ours
    return own if issubclass(own, ours) else type(ours.__name__, (ours, own), {})


def fits_a_graph(cls: type, promised: Traceability) -> bool:
    """Whether Dynamo may take the user's class into its graph: it is promised traceable, and plain enough."""
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


@torch.compiler.disable(reason=_REASON)  # type: ignore[untyped-decorator,no-untyped-call]
def outside(own: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`own.apply`, with a graph break around it."""
    return own.apply(*args, **kwargs)  # type: ignore[attr-defined]


@torch.compiler.disable(reason=_REASON)  # type: ignore[untyped-decorator,no-untyped-call]
def outside_backward(run: Callable[..., Any], *args: Any) -> Any:
    """A backward, with a graph break around it."""
    return run(*args)


def shown(run: Callable[..., Any], own: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """`run` as the backward of a Function; to compiled autograd, which follows it, the user's `own` or a break."""

    def backward(ctx: Any, *gradients: Any) -> Any:
        if not in_dynamo():
            return run(ctx, *gradients)
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


def applied(  # noqa: C901  # in one piece: every call comes through here
    compiled: list[type], name: str, ready: Ready, run: Callable[..., Any], otherwise: Callable[..., Any]
) -> Callable[..., Any]:
    """`apply` of a compiled class: what is ready, or `run(own, args, kwargs)`; to Dynamo, the user's class or a break.

    compiled: holds the compiled class alone, a subclass of which has methods of its own. otherwise: answers, as `run`
    does, after a fault of ours.
    """

    def _fusegrad_apply(own: type, *args: Any, **kwargs: Any) -> Any:
        if not in_dynamo():
            try:
                if own is not compiled[0]:
                    return run(own, args, kwargs)
                if kwargs and (form := ready.forms.get((len(args), *kwargs))) is not None:
                    if (placed := form(args, kwargs)) is not None:
                        args, kwargs = placed, {}
                if not kwargs:
                    if (result := ready.now(args)) is not MISS or (result := ready.other(args)) is not MISS:
                        return result
                return run(own, args, kwargs)
            except Exception as error:
                if not is_fault(error):
                    raise
                fault = Fault.of(error)
            return otherwise(own, args, kwargs, fault)
        return _in_dynamos_graph(own, name if own is compiled[0] else None, args, kwargs)

    def two_steps(own: type, *args: Any, **kwargs: Any) -> Any:
        if not in_dynamo():
            return _fusegrad_apply(own, *args, **kwargs)
        return _in_dynamos_graph(own, name if own is compiled[0] else None, args, kwargs)

    two_steps.__name__ = _fusegrad_apply.__name__  # by which pickle and Dynamo look a bound method up
    return _fusegrad_apply if DYNAMO_TAKES_ANY_CLOSURE else two_steps


def _in_dynamos_graph(own: type, name: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call under its name there; a subclass may have one of its own, or is called between two graphs."""
    name = getattr(own, "_fusegrad_name", None) if name is None else name
    takes_code = any([isinstance(a, BuiltinFunctionType) for a in (*args, *kwargs.values())])
    return outside(own, args, kwargs) if name is None or takes_code else in_graph(name, *args, **kwargs)


def shown_apart(users: Any) -> Any:
    """An `apply` of the user's own; to Dynamo, which does not follow its `super().apply`, a break."""

    def apply(own: type, *args: Any, **kwargs: Any) -> Any:
        if in_dynamo():
            return outside(own, args, kwargs)
        return users.__get__(None, own)(*args, **kwargs)

    return classmethod(apply)


def function_shown(fn: Callable[..., Any], name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` in place of the plain function `fn`; to Dynamo the call of this name."""

    @functools.wraps(fn)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return in_graph(name, *args, **kwargs) if in_dynamo() else run(*args, **kwargs)

    return compiled


_ROOT = Path(__file__).parents[2]
_FOLLOWED = (
    "runtime/specialize/function_class.py", "runtime/dynamo/pytree_forms.py", "runtime/demo/functions.py",
    "runtime/execution/aten/random.py", "runtime/execution/aten/philox.py", "tracer/torch_private.py",
)  # fmt: skip
"""What Dynamo may follow: this, and what users write or call themselves."""

hide_from_dynamo(
    str(file)
    for room in ("ir", "tracer", "codegen", "runtime")
    for file in (_ROOT / room).rglob("*.py")
    if str(file.relative_to(_ROOT)) not in _FOLLOWED
)

__all__ = ["CompiledMeta", "applied", "fits_a_graph", "outside", "shown", "with_opaque_backward"]
