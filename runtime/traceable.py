"""Which methods may be captured: what the author declares (`is_traceable`, `traceable`), and what their code shows.

A method that must not be captured is *opaque*: it runs as written, on real tensors, as often as in eager.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..ir.errors import FusegradError
from ..tracer.capture import CaptureError, user_frame
from ..tracer.function import method_place, methods
from ..tracer.reads import Reads, scan

ROLES = {"forward": ("forward", "setup_context"), "backward": ("backward", "vjp"), "jvp": ("jvp",)}
"""The keys of `traceable`, and the methods that each speaks of."""
Option = bool | Mapping[str, bool] | None


class DeclarationError(FusegradError, TypeError):
    """`is_traceable` or `traceable` is not what it has to be."""

    message = "{function}.{what}\n  at:   {where}\n  fix:  {fix}"


@dataclass(frozen=True)
class Declared:
    """What was declared of one role; `how` quotes it."""

    value: bool | None = None
    how: str = ""


def declarations(cls: type, option: Option) -> dict[str, Declared]:
    """What holds for each role: the option of `compile`, else the class's `traceable`, else its `is_traceable`."""
    found = {role: Declared() for role in ROLES}
    if (whole := _whole(cls)) is not None:
        found = dict.fromkeys(ROLES, Declared(whole, f"it declares is_traceable = {whole}"))
    for owner in reversed(cls.__mro__):
        if "traceable" in vars(owner):
            table = _table(cls, "traceable", vars(owner)["traceable"], _class_place(owner))
            found |= {role: Declared(v, f"it declares traceable[{role!r}] = {v}") for role, v in table.items()}
    if isinstance(option, bool):
        return dict.fromkeys(ROLES, Declared(option, f"it is compiled with traceable={option}"))
    if option is not None:
        table = _table(cls, "compile(traceable=...)", option, call_place())
        found |= {role: Declared(v, f"it is compiled with traceable={{{role!r}: {v}}}") for role, v in table.items()}
    return found


def _whole(cls: type) -> bool | None:
    """The class's `is_traceable`, inherited: True, False, or None where it is not declared."""
    owner = next((c for c in cls.__mro__ if "is_traceable" in vars(c)), None)
    if owner is None:
        return None
    declared = vars(owner)["is_traceable"]
    if type(declared) is not bool:
        raise DeclarationError(
            function=cls.__name__,
            what=f"is_traceable must be exactly a bool, not {type(declared).__name__}",
            where=_class_place(owner),
            fix="write True or False; leave it out to have every method tried",
        )
    return declared


def _table(cls: type, name: str, table: Any, where: str) -> dict[str, bool]:
    """A `traceable` dict by role; `vjp` is another name of `backward`."""
    fix = "write a dict of bools with some of the keys 'forward', 'backward' (or 'vjp'), 'jvp'"
    if not isinstance(table, Mapping):
        what = f"{name} is a {type(table).__name__}, not a dict"
        fix = f"{fix}; for every method at once declare is_traceable"
        raise DeclarationError(function=cls.__name__, what=what, where=where, fix=fix)
    found: dict[str, bool] = {}
    for key, value in table.items():
        if (fault := _fault(name, key, value, found)) is not None:
            raise DeclarationError(function=cls.__name__, what=fault, where=where, fix=fix)
        found[_role(key)] = value
    return found


def _role(key: Any) -> Any:
    """The role that a key speaks of; what is none stays as it is."""
    return "backward" if key == "vjp" else key


def _fault(name: str, key: Any, value: Any, found: Mapping[str, bool]) -> str | None:
    role = _role(key)
    if not isinstance(role, str) or role not in ROLES:
        return f"{name} has the unknown key {key!r}"
    if type(value) is not bool:
        return f"{name}[{key!r}] must be exactly a bool, not {type(value).__name__}"
    if found.get(role, value) is not value:
        return f"{name} says two things of {role!r} and of its other name"
    return None


def _class_place(cls: type) -> str:
    """`file:line` of a class; of its first method where the source is gone."""
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        places = [method_place(m) for m in methods(cls).values()]
        return next((p for p in places if p != "unknown"), "unknown")


def call_place() -> str:
    """`file:line` of the user's call of fusegrad."""
    frame = user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "unknown"


class Traceability:
    """What may be captured of a class: declared, or read off the byte code (effects that a graph would lose)."""

    def __init__(self, cls: type, option: Option = None) -> None:
        self.cls, self.option = cls, option
        self.declared = declarations(cls, option)
        self.effects: dict[str, tuple[str, str] | None] = {}

    def sources(self, role: str) -> list[Callable[..., Any]]:
        """The user's code of a role."""
        own = getattr(self.cls, "_fusegrad_sources", None)  # a plain function: every role is made of it
        written = methods(self.cls)
        return [*own] if own is not None else [written[name] for name in ROLES[role] if name in written]

    def roles(self) -> Iterator[str]:
        """The roles that the user wrote a method for."""
        return (role for role in ROLES if self.sources(role))

    def scan(self) -> Reads:
        """What the methods that may be captured read; finds out which may not."""
        tried = [role for role in self.roles() if self.declared[role].value is not False]
        reads = scan(*(f for role in tried for f in self.sources(role)))
        self.effects = {}
        if reads.effects:
            self.effects = {role: next(iter(scan(*self.sources(role)).effects), None) for role in tried}
            pure = [role for role in tried if self.effects[role] is None]
            reads = scan(*(f for role in pure for f in self.sources(role)))
        return reads

    def opaque(self, role: str) -> CaptureError | None:
        """Why a role must not be captured; None where it may be tried."""
        declared = self.declared[role]
        if declared.value is False:
            return CaptureError(reason=declared.how, where=method_place(next(iter(self.sources(role)), None)))
        effect = self.effects.get(role)
        return None if effect is None else CaptureError(reason=effect[0], where=effect[1])

    def is_opaque(self, role: str) -> bool:
        """Whether `opaque` has a reason."""
        return self.declared[role].value is False or self.effects.get(role) is not None

    def declared_opaque(self) -> list[str]:
        """The roles that the author keeps out of any capture."""
        return [role for role in self.roles() if self.declared[role].value is False]
