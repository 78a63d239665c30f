"""Objects on ctx that the caller has, too: an argument, or what is in one. Eager's ctx holds the very object.

A look at `grad_fn` has to see it, and a backward that was captured holds for what it was at forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..containers import Hole, leaves, map_leaves
from ..reads.attributes import is_a, is_tensor
from ..reads.value_keys import DEPTH, SCALARS, freeze, is_plain_object, items_of

_CHANGING = (list, dict, set, bytearray)
_NOT_CHANGED = (*SCALARS, torch.Tensor, Hole, type)


@dataclass(frozen=True)
class Shared:
    """An attribute of ctx that is an argument or in one: the argument's number, and the keys that lead to it."""

    name: str
    argument: int
    keys: tuple[Any, ...] = ()

    def object_in(self, args: Sequence[Any]) -> Any:
        """The object of a call with these arguments."""
        value = args[self.argument]
        for key in self.keys:
            value = value[key]
        return value


def shared_with(attributes: Mapping[str, Any], args: Sequence[Any]) -> tuple[Shared, ...]:
    """The attributes that are such objects."""
    changeable = {name: value for name, value in attributes.items() if may_change(value)}
    places = [(n, *place) for n, arg in enumerate(args) for place in _places(arg, (), DEPTH)] if changeable else []
    first_place = {id(value): (n, keys) for n, keys, value in reversed(places)}
    return tuple(Shared(name, *first_place[id(v)]) for name, v in changeable.items() if id(v) in first_place)


def may_change(value: Any) -> bool:
    """True if something has a state that a caller may change."""
    return not is_a(value, _NOT_CHANGED) and (is_a(value, _CHANGING) or is_plain_object(value))


def _places(value: Any, keys: tuple[Any, ...], depth: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(keys, object) of all that may change in an argument."""
    if may_change(value):
        yield keys, value
    if depth == 0 or not is_a(value, list | tuple | dict) or is_a(value, torch.Size):
        return
    parts = dict.items(value) if is_a(value, dict) else enumerate(items_of(value))
    for key, part in parts:
        yield from _places(part, (*keys, key), depth - 1)


def tensors_of(value: Any) -> tuple[Any, ...]:
    """The tensors in a container."""
    return tuple(leaf for leaf in leaves(value) if is_tensor(leaf))


def picture(value: Any) -> Any:
    """The object as a captured backward sees it, which tensors are in it apart."""
    return freeze(map_leaves(value, lambda leaf: Hole(None) if is_a(leaf, torch.Tensor | Hole) else leaf))
