"""Every Function class compiled as it is defined: for running code that does not know fusegrad, in tests above all.

A class stays the object that it is (identity, pickling, `isinstance`, `super()`); only its `apply` goes through a
compiled twin, and what bound `Cls.apply` early goes there too. Leaving the block puts everything back.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.autograd.function import Function

from ...tracer.frames import is_user_file
from ...tracer.locks import CLASS, lock_of
from ..compiled.options import Options
from ..dispatch.compiled_class import compile_class
from ..fallback.records import OpaqueCall, Record
from ..settings.config import valid_backend

_above: Any = super
_HOOK = "__init_subclass__"
_TESTS_OF_TORCH = "torch/testing/"
_lock = lock_of(CLASS)


@dataclass
class Seen:
    """A class that was defined while `Everywhere` was on, and what became of its methods."""

    name: str
    place: str
    records: dict[str, Record] = field(default_factory=dict)
    calls: list[OpaqueCall] = field(default_factory=list)
    called: bool = False

    @property
    def opaque(self) -> dict[str, Record]:
        """The methods that run as written."""
        return {method: r for method, r in self.records.items() if r.status == "opaque"}

    @property
    def restricted(self) -> dict[str, Record]:
        """The methods that are compiled, or would be, but not for every call."""
        return {method: r for method, r in self.records.items() if r.status == "compiled" and r.reason}


class Everywhere:
    """The switch. `seen`: the classes that were defined since it was turned on."""

    def __init__(self, backend: str = "auto") -> None:
        self.backend, self.on = valid_backend(backend), False
        self.seen: list[Seen] = []
        self._changed: list[weakref.ref[type]] = []
        self._hook: Any = None

    def use(self, backend: str) -> None:
        """The backend of the classes that are called from now on."""
        self.backend = valid_backend(backend)

    def turn_on(self) -> None:
        """Give every Function class that is defined outside torch from now on an `apply` of its own."""
        self._hook = Function.__dict__.get("__init_subclass__")

        def init_subclass(cls: Any, /, **kwargs: Any) -> None:
            _above(Function, cls).__init_subclass__(**kwargs)
            if (place := _defined_by_a_user()) is not None and "apply" not in cls.__dict__:
                self._redirect(cls, place)

        type.__setattr__(Function, _HOOK, classmethod(init_subclass))
        self.on = True

    def turn_off(self) -> None:
        """Classes are as they were; an `apply` that was bound meanwhile runs the class itself."""
        if not self.on:
            return
        self.on = False
        type.__delattr__(Function, _HOOK)
        if self._hook is not None:
            type.__setattr__(Function, _HOOK, self._hook)
        for cls in filter(None, (ref() for ref in self._changed)):
            for name in ("apply", "_fusegrad_twin"):
                if name in cls.__dict__:
                    delattr(cls, name)

    def _redirect(self, cls: Any, place: str) -> None:
        record = self._record_class(cls, place)

        def apply(own: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return _above(cls, own).apply(*args, **kwargs)
            return self._twin(own, record if own is cls else None).apply(*args, **kwargs)

        cls.apply = classmethod(apply)

    def _record_class(self, cls: type, place: str) -> Seen:
        self.seen.append(Seen(f"{cls.__module__}.{cls.__qualname__}", place))
        self._changed.append(weakref.ref(cls))
        return self.seen[-1]

    def _twin(self, own: type, record: Seen | None) -> Any:
        twin = own.__dict__.get("_fusegrad_twin")
        if twin is None:
            with _lock:
                twin = own.__dict__.get("_fusegrad_twin") or self._compiled(own, record)
        return twin

    def _compiled(self, own: type, record: Seen | None) -> type:
        twin = compile_class(own, Options(self.backend), below=True)
        if record is None:  # it has an `apply` of its own, which calls this one
            record = self._record_class(own, "its own apply")
        compiler = twin._fusegrad  # type: ignore[attr-defined]
        record.records, record.calls, record.called = compiler.ledger.records, compiler.ledger.opaque_calls, True
        own._fusegrad_twin = twin  # type: ignore[attr-defined]
        return twin


def _defined_by_a_user() -> str | None:
    """`file:line` of the class statement that runs, None where torch's or fusegrad's own code makes the class."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.replace("\\", "/").endswith("torch/autograd/function.py"):
        frame = frame.f_back
    if frame is None:
        return None
    filename = frame.f_code.co_filename
    mine = is_user_file(filename) or _TESTS_OF_TORCH in filename.replace("\\", "/")
    return f"{filename}:{frame.f_lineno}" if mine else None


@contextlib.contextmanager
def every_function(backend: str = "auto") -> Iterator[Everywhere]:
    """Within the block every `torch.autograd.Function` class is compiled as it is defined.

        with every_function(backend="interpret") as everywhere:
            import third_party
            third_party.run()
        print(summary(everywhere))
    """
    everywhere = Everywhere(backend)
    everywhere.turn_on()
    try:
        yield everywhere
    finally:
        everywhere.turn_off()


def summary(everywhere: Everywhere) -> str:
    """The number of classes that were compiled, and the methods that run as written, with reason and place."""
    called = [s for s in everywhere.seen if s.called]
    compiled = [s for s in called if any(r.status == "compiled" for r in s.records.values())]
    lines = [
        f"fusegrad: {len(everywhere.seen)} Function classes defined, {len(called)} called, {len(compiled)} compiled "
        f"in whole or in part"
    ]
    # Each reason once, however many classes share it.
    reasons: dict[str, None] = {}
    for s in called:
        for method, record in s.opaque.items():
            reasons[f"  as written: {s.name}.{method}: {record.reason} ({record.where})"] = None
        for method, record in s.restricted.items():
            reasons[f"  not always: {s.name}.{method}: {record.reason} ({record.where})"] = None
        for call in s.calls:
            reasons[f"  in part: {s.name}.{call.method}: {call.reason_of_method} ({call.where})"] = None
        if not s.records:
            reasons[f"  as written: {s.name}: nothing was traced ({s.place})"] = None
    return "\n".join([*lines, *reasons])


__all__ = ["Everywhere", "Seen", "every_function", "summary"]
