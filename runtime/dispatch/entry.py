"""apply of a compiled class, and a compiled function: what Dynamo follows stands here alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

from ...tracer.torch_private import DYNAMO_TAKES_ANY_CLOSURE, hide_from_dynamo
from ..compiled.function_class import in_dynamo, outside
from ..dynamo.graph_names import in_graph
from ..fallback.answer import Fault, is_fault
from ..fallback.user_traceback import hide_own_frames
from ..fast_path.argument_forms import MISS
from ..fast_path.inline_cache import InlineCache


def applied(  # noqa: C901  # in one piece: every call comes through here
    compiled: list[type], name: str, ready: InlineCache, run: Callable[..., Any], otherwise: Callable[..., Any]
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
                    if (result := ready.latest(args)) is not MISS or (result := ready.lookup(args)) is not MISS:
                        return result
                return run(own, args, kwargs)
            except Exception as error:
                if not is_fault(error):
                    hide_own_frames(error)
                    raise
                fault = Fault.of(error)
            try:
                return otherwise(own, args, kwargs, fault)
            except Exception as error:
                hide_own_frames(error)
                raise
        return _in_dynamos_graph(own, name if own is compiled[0] else None, args, kwargs)

    def two_steps(own: type, *args: Any, **kwargs: Any) -> Any:
        if in_dynamo():
            return _in_dynamos_graph(own, name if own is compiled[0] else None, args, kwargs)
        try:
            return _fusegrad_apply(own, *args, **kwargs)
        except Exception as error:
            hide_own_frames(error)
            raise

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
        if in_dynamo():
            return in_graph(name, *args, **kwargs)
        try:
            return run(*args, **kwargs)
        except Exception as error:
            hide_own_frames(error)
            raise

    return compiled


_ROOT = Path(__file__).parents[2]
_FOLLOWED = (
    "runtime/dispatch/entry.py", "runtime/compiled/function_class.py", "runtime/dynamo/pytree_forms.py",
    "runtime/execution/aten/random.py", "runtime/execution/aten/philox.py",
    "tracer/torch_private.py",
)  # fmt: skip
"""What Dynamo may follow: this, and what users write or call themselves."""


hide_from_dynamo(
    str(file)
    for room in ("ir", "tracer", "codegen", "runtime")
    for file in (_ROOT / room).rglob("*.py")
    if str(file.relative_to(_ROOT)) not in _FOLLOWED
)
