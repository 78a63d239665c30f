"""The metaclass of compiled classes: Dynamo takes them apart no more, and an assigned method is compiled."""

from __future__ import annotations

from typing import Any

from torch.autograd.function import FunctionMeta

from ..dynamo.graph_names import name_in_graphs
from .pickling import OPTIONS, arrived, register


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
    """True if an attribute of a compiled class is one that its user put there."""
    return not name.startswith("_") and name != "apply"


register(CompiledMeta)


def metaclass_for(cls: type) -> Any:
    """CompiledMeta, also of a class that has a metaclass of its own."""
    made = joined(CompiledMeta, type(cls))
    register(made)
    return made


def joined(ours: type, own: type) -> type:
    """A metaclass of ours that is one of the author's as well; the author's where it is one of ours."""
    if issubclass(ours, own):
        return ours
    return own if issubclass(own, ours) else type(ours.__name__, (ours, own), {})
