"""The class that compile returns: a subclass whose apply runs what was compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import Function

from ...ir.errors import FusegradError
from ...tracer.torch_private import torchs_apply
from ..compiled.compiled import class_lock
from ..compiled.options import Options
from ..dynamo.call import in_dynamos_graph
from ..dynamo.graph_names import name_in_graphs
from ..fallback.answer import Fault, answer_as_written
from . import pickling as pickled
from .dispatcher import Dispatcher
from .entry import applied, shown_apart
from .metaclass import metaclass_for


class CompileTargetError(FusegradError, TypeError):
    """`compile` was given something that it cannot compile."""

    message = "fusegrad.compile({what}): {detail}\n  at:   {where}\n  fix:  {fix}"


def module_refused(what: str) -> CompileTargetError:
    """The error for a module or its class, with what does serve there."""
    return CompileTargetError(
        what=what,
        detail="it is a module, whose parameters a function of tensors does not track",
        fix="compile the Function classes that it calls; fusegrad.swap(model, {...}) puts them into a model, and "
        "torch.compile is for whole models",
    )


def compile_class(cls: type, options: Options, below: bool = False) -> type:
    """A subclass of `cls` whose `apply` runs what was compiled.

    below: an `apply` of the user's own was called already.
    """
    if issubclass(cls, torch.nn.Module):
        raise module_refused(cls.__name__)
    if not issubclass(cls, Function):
        raise CompileTargetError(
            what=cls.__name__,
            detail="the class is no torch.autograd.Function",
            fix="derive it from torch.autograd.Function",
        )
    if issubclass(cls, torch.autograd.function.NestedIOFunction):
        raise CompileTargetError(
            what=cls.__name__,
            detail="NestedIOFunction is a legacy class that torch keeps for old code",
            fix="derive from torch.autograd.Function, with forward and backward as staticmethods instead of "
            "forward_extended and backward_extended, and compile it with pytree=True: nested arguments, results and "
            "gradients are tracked then",
        )
    cls = vars(cls).get("_fusegrad_user_class", cls)
    compiler = Dispatcher(cls, options)
    itself: list[type] = []
    apply = entrance(compiler, itself)
    body: dict[str, Any] = {
        "apply": apply,
        "_fusegrad_apply": apply,  # Dynamo looks a bound method up by its own name
        "_fusegrad": compiler,
        "_fusegrad_user_class": cls,
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    bases: tuple[type, ...] = (cls,)
    if not below and (users := _own_apply(cls)) is not None:
        bases, body["apply"] = (cls, _below(apply)), shown_apart(users)
    fast: Any = metaclass_for(cls)(cls.__name__, bases, body)
    fast._backward_cls = cls._backward_cls  # type: ignore[attr-defined]
    itself.append(fast)
    pickled.remember(fast, options.as_arguments())
    return fast  # type: ignore[no-any-return]


def _own_apply(cls: type) -> Any:
    """The `apply` that the user wrote in front of torch's: it decides whether, and with what, that is called."""
    apply = next(vars(c)["apply"] for c in cls.__mro__ if "apply" in vars(c))
    is_ours = hasattr(getattr(apply, "__func__", None), "_fusegrad_within")
    return None if is_ours or apply is vars(Function)["apply"] else apply


def _below(apply: Any) -> type:
    """A base of the compiled class behind the user's: there their `super().apply` finds ours in place of torch's."""
    metaclass: Any = type(Function)
    below: type = metaclass("Function", (Function,), {"apply": apply, "__module__": Function.__module__})
    return below


def entrance(compiler: Dispatcher, itself: list[type]) -> Any:
    """`apply` of the compiled class that `itself` holds."""

    def run(own: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if own is not itself[0]:  # a subclass of the compiled class has methods of its own
            return compiled_subclass(own, compiler).apply(*args, **kwargs)
        return compiler(args, kwargs)

    def otherwise(own: type, args: tuple[Any, ...], kwargs: dict[str, Any], fault: Fault) -> Any:
        users = None if own is itself[0] else torchs_apply(_plain_subclass(own))
        return answer_as_written(compiler, args, kwargs, fault, users)

    def within(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return in_dynamos_graph(compiler, args, kwargs, lambda *a, **k: compiler(a, k))

    apply: Any = applied(itself, name_in_graphs(compiler.user.original, within), compiler.inline_cache, run, otherwise)
    def call_of(own: type) -> Callable[..., Any]:
        return lambda args, kwargs: compiled_subclass(own, compiler).apply.__func__._fusegrad_within(args, kwargs)

    apply._fusegrad_within, apply._fusegrad_call_of = within, call_of
    return classmethod(apply)


def compiled_subclass(cls: type, parent: Dispatcher) -> Any:
    """A user's subclass of a compiled class, compiled with its parent's options."""
    with class_lock:
        if "_fusegrad_compiled" not in vars(cls):  # with the class, so that it goes where the class goes
            cls._fusegrad_compiled = _subclass(cls, parent)  # type: ignore[attr-defined]
    return cls._fusegrad_compiled  # type: ignore[attr-defined]


def _subclass(cls: type, parent: Dispatcher) -> Any:
    return compile_class(_plain_subclass(cls), parent.options)


def _plain_subclass(cls: type) -> type:
    """A user's subclass of a compiled class as if its parent were not."""
    plain = type(cls.__name__, (cls,), {"_fusegrad_user_class": None, "__module__": cls.__module__})
    plain._fusegrad_user_class = plain  # type: ignore[attr-defined]
    plain.apply = vars(Function)["apply"]  # type: ignore[attr-defined]
    return plain


pickled.make_classes_by(pickled.Maker(compile_class, entrance))
