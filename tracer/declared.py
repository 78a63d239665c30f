"""Declarations of a class's author about capture: `is_traceable` of the class, `traceable` of single methods.

`compile(traceable=...)` goes before the class's `traceable` (merged along the MRO), which goes before `is_traceable`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..ir.errors import FusegradError
from ..ir.text.syntax_trees import source_lines
from .frames import user_line

ROLES = {"forward": ("forward", "setup_context"), "backward": ("backward", "vjp"), "jvp": ("jvp",)}
"""The keys of `traceable`, and the methods that each speaks of."""
Option = bool | Mapping[str, bool]


class DeclarationError(FusegradError, TypeError):
    """`is_traceable` or `traceable` is not what it has to be."""

    message = "{function}.{what}\n  at:   {where}\n  fix:  {fix}"


@dataclass(frozen=True)
class Declared:
    """The declaration for one role; `how` quotes it."""

    value: bool | None = None
    how: str = ""


def declarations(cls: type, option: Option | None) -> dict[str, Declared]:
    """The declaration of each role: the option of `compile`, else the class's `traceable`, else its `is_traceable`."""
    by_role = {role: Declared() for role in ROLES}
    if (for_all := _declared_for_all(cls)) is not None:
        by_role = dict.fromkeys(ROLES, Declared(for_all, f"it declares is_traceable = {for_all}"))
    for owner in reversed(cls.__mro__):
        if "traceable" in vars(owner):
            table = _table(cls, "traceable", vars(owner)["traceable"], _class_place(owner))
            by_role |= {role: Declared(v, f"it declares traceable[{role!r}] = {v}") for role, v in table.items()}
    if isinstance(option, bool):
        return dict.fromkeys(ROLES, Declared(option, f"it is compiled with traceable={option}"))
    if option is not None:
        table = _table(cls, "compile(traceable=...)", option, user_line())
        by_role |= {role: Declared(v, f"it is compiled with traceable={{{role!r}: {v}}}") for role, v in table.items()}
    return by_role


def _declared_for_all(cls: type) -> bool | None:
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


def _table(cls: type, name: str, table: Any, location: str) -> dict[str, bool]:
    """A `traceable` dict by role; `vjp` is another name of `backward`."""
    fix = "write a dict of bools with some of the keys 'forward', 'backward' (or 'vjp'), 'jvp'"
    if not isinstance(table, Mapping):
        complaint = f"{name} is a {type(table).__name__}, not a dict"
        fix = f"{fix}; for every method at once declare is_traceable"
        raise DeclarationError(function=cls.__name__, what=complaint, where=location, fix=fix)
    by_role: dict[str, bool] = {}
    for key, value in table.items():
        if (fault := _fault(name, key, value, by_role)) is not None:
            raise DeclarationError(function=cls.__name__, what=fault, where=location, fix=fix)
        by_role[_role(key)] = value
    return by_role


def _role(key: Any) -> Any:
    """The role that a key speaks of; what is none stays as it is."""
    return "backward" if key == "vjp" else key


def _fault(name: str, key: Any, value: Any, by_role: Mapping[str, bool]) -> str | None:
    role = _role(key)
    if not isinstance(role, str) or role not in ROLES:
        return f"{name} has the unknown key {key!r}"
    if type(value) is not bool:
        return f"{name}[{key!r}] must be exactly a bool, not {type(value).__name__}"
    if by_role.get(role, value) is not value:
        return f"{name} says two things of {role!r} and of its other name"
    return None


def _class_place(cls: type) -> str:
    """`file:line` of a class; of its first method where the source is gone."""
    try:
        return f"{inspect.getsourcefile(cls)}:{source_lines(cls)[1]}"
    except (OSError, TypeError):
        from .methods import method_place, methods  # which needs a capture, which needs to know what is declared

        places = [method_place(m) for m in methods(cls).values()]
        return next((p for p in places if p != "unknown"), "unknown")
