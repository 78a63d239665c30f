"""Nested calls are seen here: while someone in this thread watches, `Function.apply` tells him before it runs.

The code of `Function.apply` is exchanged while anybody watches, and put back with the last of them.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode

from .locks import INNER, lock_of
from .opaque import Run, Tape, call_for_real, copied, opaque_operators, running, tensors_in
from .torch_private import operator_name


class Watcher(Protocol):
    """Decides what becomes of a nested call: `apply(*args, **kwargs)` runs it as it is."""

    def __call__(self, what: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


_now = threading.local()
_lock = lock_of(INNER)
watchers = 0
"""How many watch, in all threads."""


def watcher() -> Watcher | None:
    """Who watches in this thread."""
    return getattr(_now, "watcher", None)


def _plain(original: Any) -> Callable[..., Any]:
    return types.FunctionType(
        original.__code__, original.__globals__, original.__name__, original.__defaults__, original.__closure__
    )


_original: Any = Function.apply.__func__  # type: ignore[attr-defined]
_code = _original.__code__
plain = _plain(_original)
"""What `Function.apply` is when nobody watches."""


def nested_call(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`cls.apply`, in a thread that may be watched."""
    watching_now = watcher()
    if watching_now is None:
        return plain(cls, *args, **kwargs)
    own = getattr(cls, "_fusegrad_user_class", None) or cls
    return watching_now(own, lambda *a, **k: plain(cls, *a, **k), args, kwargs)


class _Template:
    """Holds the code that `Function.apply` runs while somebody watches; it has the same free variable."""

    @classmethod
    def apply(cls, *args, **kwargs):  # type: ignore[no-untyped-def]
        __class__  # type: ignore[name-defined]  # noqa: B018  the free variable that Function.apply's own code has
        import sys as _sys  # the code runs among the globals of torch's own module

        return _sys.modules["fusegrad.tracer.nested"].nested_call(cls, args, kwargs)


@contextlib.contextmanager
def watched_by(new: Watcher | None) -> Iterator[None]:
    """Within the block `new` decides about nested calls of this thread; None: they run as they are."""
    outer, _now.watcher = watcher(), new
    try:
        with _exchanged() if new is not None else contextlib.nullcontext():
            yield
    finally:
        _now.watcher = outer


@contextlib.contextmanager
def _exchanged() -> Iterator[None]:
    global watchers
    with _lock:
        watchers += 1
        with contextlib.suppress(ValueError):  # a torch whose apply has other free variables: nested calls are inlined
            _original.__code__ = _Template.apply.__func__.__code__  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with _lock:
            watchers -= 1
            if not watchers:
                _original.__code__ = _code


# ------------------------------------------------------------------ running a method for real
class Recorder:
    """A run of the user's method on real tensors: every nested call goes on the tape, those on it are played back.

    skip: the class whose own apply is the run. given: copies of what opaque bodies were given, for a comparison.
    """

    def __init__(self, tape: Tape, skip: type | None = None, given: list[Any] | None = None) -> None:
        self.tape, self.skip, self.given = tape, skip, given

    def __call__(self, what: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if what is self.skip:
            self.skip = None
            return apply(*args, **kwargs)
        taped = self.tape.take(what)
        if taped is None:
            with watched_by(None), running(None):
                result, taped = call_for_real(what, apply, args, kwargs, True)
        else:
            result = taped.play(args, kwargs)
            if self.given is not None and taped.opaque:
                self.given += [copied(t) for t in tensors_in((args, kwargs))]
        self.tape.made.append(taped)
        return result


@contextlib.contextmanager
def recording(
    tape: Tape, skip: type | None = None, given: list[Any] | None = None, operators: bool = False
) -> Iterator[None]:
    """Within the block the user's method runs, and `tape` plays back and records its nested calls.

    operators: those of custom operators too, as always once one of them turned out to be opaque.
    """
    recorder, look = Recorder(tape, skip, given), operators or opaque_operators()
    with watched_by(recorder), _Operators(recorder) if look else contextlib.nullcontext():
        yield


class _Operators(TorchFunctionMode):
    """Shows calls of custom operators to a watcher."""

    def __init__(self, watching: Watcher) -> None:
        super().__init__()
        self.watching = watching

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator_name(func) if watcher() is self.watching else None
        if name is None:
            return func(*args, **(kwargs or {}))
        return self.watching(name, func, args, kwargs or {})


__all__ = ["Recorder", "Run", "Watcher", "nested_call", "plain", "recording", "watched_by", "watcher"]
