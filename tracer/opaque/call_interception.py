"""Interception of nested calls: while this thread has a watcher, `Function.apply` asks it before it runs.

`Function.apply` is exchanged while there is a watcher, and put back with the last of them: its code, or from
torch 2.14 on, where it is written in C, the attribute. What the user bound to a name before, `f = Inner.apply`, runs in
C all the same, and is led back here by two functions that it calls in Python. For a class without setup_context it does
not call them: the watcher hears of it when torch asks the class for its node, and cannot decide any more.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.autograd.function
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode

from ..capture.data import DataReads
from ..capture.memory import copy_tensor
from ..containers import tensors_in
from ..locks import INNER, lock_of
from ..scoped_state import attribute_within
from ..torch_private import begin_transform, end_transform, no_modes, operator_name, transforms_active
from .opaque import Run, Tape, Taped, call_for_real, opaque_operators, read_data_for_real, running
from .watching import Watcher, watcher, watching_now

_lock = lock_of(INNER)
watchers = 0
"""The number of watchers, in all threads."""


_module: Any = torch.autograd.function
_own: Any = vars(Function)["apply"]
IN_PYTHON = isinstance(_own, classmethod)
"""True if `Function.apply` has code that can be exchanged."""


def _plain_in_python(original: Any) -> Callable[..., Any]:
    return types.FunctionType(
        original.__code__, original.__globals__, original.__name__, original.__defaults__, original.__closure__
    )


def _plain_in_c(cls: type, *args: Any, **kwargs: Any) -> Any:
    with attribute_within(watching_now, "expected", cls):
        return _own.__get__(None, cls)(*args, **kwargs)


plain: Callable[..., Any] = _plain_in_python(_own.__func__) if IN_PYTHON else _plain_in_c
"""`Function.apply` without a watcher."""


def nested_call(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`cls.apply`, in a thread that may be watched."""
    watching_now = watcher()
    if watching_now is None:
        return plain(cls, *args, **kwargs)
    own = getattr(cls, "_fusegrad_user_class", None) or cls
    return watching_now(own, lambda *a, **k: plain(cls, *a, **k), args, kwargs)


class _Template:
    """Holds the code that `Function.apply` runs while there is a watcher; it has the same free variable."""

    @classmethod
    def apply(cls, *args, **kwargs):  # type: ignore[no-untyped-def]
        __class__  # type: ignore[name-defined]  # noqa: B018  the free variable that Function.apply's own code has
        import sys as _sys  # the code runs among the globals of torch's own module

        return _sys.modules["fusegrad.tracer.opaque.call_interception"].nested_call(cls, args, kwargs)


@contextlib.contextmanager
def watched_by(new: Watcher | None) -> Iterator[None]:
    """Within the block `new` decides about nested calls of this thread; None: they run as they are."""
    exchanged = _exchanged_apply() if new is not None else contextlib.nullcontext()
    with attribute_within(watching_now, "watcher", new), exchanged:
        yield


@contextlib.contextmanager
def _exchanged_apply() -> Iterator[None]:
    global watchers
    with _lock:
        watchers += 1
        if watchers == 1:
            _exchange()
    try:
        yield
    finally:
        with _lock:
            watchers -= 1
            if not watchers:
                _put_back()


class _Code:
    """Another code for a `Function.apply` that is written in Python: names that are bound to it have it, too."""

    before: Any = _own.__func__.__code__ if IN_PYTHON else None

    @staticmethod
    def exchange() -> None:
        with contextlib.suppress(ValueError):  # a torch whose apply has other free variables: nested calls are inlined
            _own.__func__.__code__ = _Template.apply.__func__.__code__  # type: ignore[attr-defined]

    @classmethod
    def put_back(cls) -> None:
        _own.__func__.__code__ = cls.before


class _InC:
    """Another attribute `apply`; and for names that are bound to the one in C, what that calls on its way.

        f(x)  ->  cls.forward  ->  _bind_default_args  ->  is a transform active?  ->  _call_custom_function_call
             _note_class: cls  _bind_arguments: begins one  so it is        _call_function: ends it, and asks
    """

    META: Any = type(Function)
    before: tuple[Any, Any] = (None, None)

    @classmethod
    def exchange(cls) -> None:
        cls.before = (_module._bind_default_args, _module._call_custom_function_call)
        _module._bind_default_args, _module._call_custom_function_call = _bind_arguments, _call_function
        Function.apply = classmethod(lambda own, *args, **kwargs: nested_call(own, args, kwargs))  # type: ignore[assignment, method-assign]
        cls.META.__getattribute__ = _note_class

    @classmethod
    def put_back(cls) -> None:
        del cls.META.__getattribute__
        Function.apply = _own  # type: ignore[method-assign]
        _module._bind_default_args, _module._call_custom_function_call = cls.before


def _no_class() -> None:
    """In the place of a weak reference to a class."""


def _is_unwatched(cls: Any) -> bool:
    """True if a call of this class runs that the watcher of this thread was not asked about."""
    called = isinstance(cls, type) and issubclass(cls, Function)
    return called and watcher() is not None and getattr(watching_now, "expected", None) is not cls


def _note_class(cls: type, name: str) -> Any:
    """The attributes that torch asks a class for while there is a watcher: the last thing is its node."""
    if name == "forward":
        watching_now.asked = weakref.ref(cls)
    elif name == "_backward_cls":
        if _is_unwatched(cls):
            watcher().note_unseen_call(getattr(cls, "_fusegrad_user_class", None) or cls)  # type: ignore[union-attr]
        watching_now.expected = None
    return type.__getattribute__(cls, name)


def _bind_arguments(forward: Any, args: Any, kwargs: Any) -> Any:
    arguments = _InC.before[0](forward, args, kwargs)
    if _is_unwatched(getattr(watching_now, "asked", _no_class)()) and not transforms_active():
        begin_transform()
        watching_now.begun = True
    return arguments


def _call_function(cls: Any, args: Any, kwargs: Any) -> Any:
    if getattr(watching_now, "begun", False):
        watching_now.begun = False
        end_transform()
    if _is_unwatched(cls):
        return nested_call(cls, args, kwargs or {})
    return _InC.before[1](cls, args, kwargs)


_exchange, _put_back = (_Code.exchange, _Code.put_back) if IN_PYTHON else (_InC.exchange, _InC.put_back)


# ------------------------------------------------------------------ running a method for real
class _Body:
    """A call that runs once: whether it ran, and its result; or whether an earlier run is played back."""

    def __init__(self, apply: Callable[..., Any]) -> None:
        self.apply, self.result = apply, None
        self.is_begun = self.is_done = self.is_played = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.is_begun = True
        self.result = self.apply(*args, **kwargs)
        self.is_done = True
        return self.result


class Recorder:
    """A run of the user's method on real tensors: every nested call goes on the tape, those on it are played back.

    skip: the class whose own apply is the run.
    compared_inputs: copies of what opaque bodies were given, for a comparison.
    """

    def __init__(self, tape: Tape, skip: type | None = None, compared_inputs: list[Any] | None = None) -> None:
        self.tape, self.skip, self.compared_inputs = tape, skip, compared_inputs

    def __call__(self, callee: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if callee is self.skip:
            self.skip = None
            return apply(*args, **kwargs)
        return self._run_once(callee, _Body(apply), args, kwargs, self._call_for_real)

    def _run_once(
        self, callee: Any, body: _Body, args: Any, kwargs: Any, run: Callable[..., tuple[Any, Taped]]
    ) -> Any:
        """The result of the body, which runs once whatever goes wrong around it; then the tape tells of that."""
        try:
            return self._take_or_run(callee, body, args, kwargs, run)
        except Exception as error:
            if body.is_played or (body.is_begun and not body.is_done):
                raise
            self.tape.broken = error.with_traceback(None)
        if body.is_done:
            return body.result
        with watched_by(None):
            return body.apply(*args, **kwargs)

    def _take_or_run(
        self, callee: Any, body: _Body, args: Any, kwargs: Any, run: Callable[..., tuple[Any, Taped]]
    ) -> Any:
        taped = self.tape.take(callee)
        if taped is None:
            result, taped = run(callee, body, args, kwargs)
        else:
            result = self._play_back(taped, body, args, kwargs)
        self.tape.completed.append(taped)
        return result

    def _call_for_real(self, callee: Any, body: _Body, args: Any, kwargs: Any) -> tuple[Any, Taped]:
        with watched_by(None), running(None), no_modes() if self.tape.data else contextlib.nullcontext():
            return call_for_real(callee, body, args, kwargs, True)

    def _play_back(self, taped: Taped, body: _Body, args: Any, kwargs: Any) -> Any:
        body.is_played = True
        if self.compared_inputs is not None and taped.opaque:
            self.compared_inputs += taped.select_compared([copy_tensor(t) for t in tensors_in((args, kwargs))])
        return taped.play(args, kwargs)

    def read_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that says what is in a tensor."""
        if watcher() is not self:
            return func(*args, **kwargs)
        return self._run_once(str(func), _Body(func), args, kwargs, read_data_for_real)

    def note_unseen_call(self, callee: Any) -> None:
        """It runs for real, as all of this does."""


@contextlib.contextmanager
def recording(
    tape: Tape, skip: type | None = None, compared_inputs: list[Any] | None = None, operators: bool = False
) -> Iterator[None]:
    """Within the block the user's method runs, and `tape` plays back and records its nested calls.

    operators: those of custom operators too, as always once one of them turned out to be opaque.
    """
    recorder, look = Recorder(tape, skip, compared_inputs), operators or opaque_operators()
    with contextlib.ExitStack() as stack:
        stack.enter_context(watched_by(recorder))
        if look:
            stack.enter_context(_Operators(recorder))
        if tape.data:
            stack.enter_context(DataReads(recorder.read_data))
        yield


class _Operators(TorchFunctionMode):
    """Shows calls of custom operators to a watcher."""

    def __init__(self, watching: Watcher) -> None:
        super().__init__()
        self.watching = watching

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Dynamo, which `while_loop` runs, traces this too, and may not call the watcher
        name = operator_name(func) if not torch.compiler.is_dynamo_compiling() and watcher() is self.watching else None
        if name is None:
            return func(*args, **(kwargs or {}))
        return self.watching(name, func, args, kwargs or {})


__all__ = ["Recorder", "Run", "Watcher", "nested_call", "plain", "recording", "watched_by", "watcher"]
