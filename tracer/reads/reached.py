"""Effects that a method may have, decided by whether a capture reaches them: `if verbose: print(...)`.

The control flow of a captured run is that of every call with its key, so what it does not reach, no such call does. The
instructions that begin an effect are watched while the method runs on fakes, and end the capture before they run.
"""

from __future__ import annotations

import dis
import functools
import gc
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .attributes import is_a, is_tensor
from .packages import is_unknown
from .reads import Effect

_now = threading.local()
Entering = Callable[[types.FrameType], Sequence[Effect]]


class CallReached(Exception):
    """A function of these was called (internal)."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@contextmanager
def without_calls(functions: Mapping[str, Any]) -> Iterator[None]:
    """Raises CallReached, at the latest at the end of the block, if a Python function of these is called within it.

    Of what is no Python function no call can be seen: it counts as called.
    """
    codes = {id(code): name for name, value in functions.items() if (code := _code_of(value)) is not None}
    unseen = next((name for name, value in functions.items() if _code_of(value) is None), None)
    if unseen is not None:
        raise CallReached(unseen)
    if not codes:
        yield
        return
    called, before = list[str](), sys.gettrace()

    def enter(frame: types.FrameType, event: str, argument: Any) -> None:
        if id(frame.f_code) in codes:
            called.append(codes[id(frame.f_code)])
            raise CallReached(called[0])

    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)
    if called:
        raise CallReached(called[0])


def _code_of(value: Any) -> types.CodeType | None:
    function = value.func if is_a(value, functools.partial) else value
    return function.__code__ if is_a(function, types.FunctionType) else None



class Reached(Exception):
    """An effect was reached (internal: it becomes the reason why the method is not captured)."""

    def __init__(self, effect: Effect) -> None:
        super().__init__(effect.reason)
        self.effect = effect


class Watch:
    """Looks at the frames of one thread for instructions of these effects.

    unknown: told of functions of other packages, one by one before they run; says what effects these may have.
    """

    def __init__(self, effects: Sequence[Effect], unknown: Entering | None = None) -> None:
        self.unknown = unknown
        self.codes: dict[int, Any] = {}  # held, so that the numbers stay theirs
        self.spots: dict[int, dict[int, list[Effect]]] = {}
        self.add(effects)
        self.hit: Effect | None = None
        # The interpreter borrows its reference to a trace function while it calls one: these have to outlive the call.
        self.entered, self.stepped = self.enter, self.step

    def add(self, effects: Sequence[Effect]) -> None:
        """Look for these, too."""
        for effect in effects:
            assert effect.code is not None
            self.codes[id(effect.code)] = effect.code
            for offset in _offsets(effect.code, effect.offset):
                self.spots.setdefault(id(effect.code), {}).setdefault(offset, []).append(effect)

    def begin(self) -> None:
        """From now on; also where a hit had ended it, in frames that are under way."""
        self.hit, frame = None, sys._getframe(1)
        sys.settrace(self.entered)
        while frame is not None:
            if id(frame.f_code) in self.spots:
                frame.f_trace, frame.f_trace_opcodes = self.stepped, True
            frame = frame.f_back  # type: ignore[assignment]

    def enter(self, frame: types.FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        new = self.unknown is not None and id(code) not in self.codes and is_unknown(code.co_filename)
        if new and not _is_between(frame):
            assert self.unknown is not None
            self.codes[id(code)] = code
            self.add(self.unknown(frame))
        if id(code) not in self.spots:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.stepped

    def step(self, frame: types.FrameType, event: str, argument: Any) -> Callable[..., Any]:
        for effect in self.spots[id(frame.f_code)].get(frame.f_lasti, ()) if event == "opcode" else ():
            if self.hit is None and _is_one(effect, frame) and not _is_between(frame):
                self.hit = effect
                raise Reached(effect)
        return self.stepped


_IMPORTS = "<frozen importlib"


def _is_between(frame: types.FrameType | None) -> bool:
    """True if the garbage collector or a finalizer runs, which may be anywhere, or an import, which is done once."""
    collecting = {id(code) for call in gc.callbacks if (code := _code_of(call)) is not None}
    while frame is not None:
        code = frame.f_code
        if id(code) in collecting or code.co_name == "__del__" or code.co_filename.startswith(_IMPORTS):
            return True
        frame = frame.f_back
    return False


def _is_one(effect: Effect, frame: types.FrameType) -> bool:
    """True if the subject of the effect is what it has to be."""
    about = frame.f_locals.get(effect.subject) if effect.subject is not None else None
    return effect.subject is None or is_tensor(about) or is_a(about, torch.Generator)


@functools.lru_cache(maxsize=1024)
def _prefixes(code: types.CodeType) -> dict[int, int]:
    """Where instructions begin whose argument is long: with an EXTENDED_ARG, which may be all that is seen of them."""
    prefixes, first = dict[int, int](), None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "EXTENDED_ARG":
            first = instruction.offset if first is None else first
        elif first is not None:
            prefixes[instruction.offset], first = first, None
    return prefixes


def _offsets(code: types.CodeType, offset: int) -> set[int]:
    return {offset, _prefixes(code).get(offset, offset)}


@contextmanager
def watching_effects(effects: Sequence[Effect], unknown: Entering | None = None) -> Iterator[None]:
    """Raises Reached, at the latest at the end of the block, if one of the effects is reached within it."""
    if not effects and unknown is None:
        yield
        return
    outer, before, watch = getattr(_now, "watch", None), sys.gettrace(), Watch(effects, unknown)
    _now.watch = watch
    watch.begin()
    try:
        yield
    finally:
        sys.settrace(before)
        _now.watch = outer
    if watch.hit is not None:
        raise Reached(watch.hit)


def resume_watch() -> None:
    """A nested call reached an effect and is not captured for that: what follows it is watched again."""
    watch = getattr(_now, "watch", None)
    if watch is not None and watch.hit is not None:
        watch.begin()
