"""Tensors inside Python containers: found, exchanged, put back. Autograd does not track them; a graph has to read them.

    (x, [w, 2.0])  --opened-->  (x, [Hole(2), 2.0], w)  --filled-->  (x, [w, 2.0])
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

Tensor = torch.Tensor
Leaf = Callable[[Any], Any]
DEPTH = 8
ATOMS = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, bytes, complex, type(None), torch.dtype,
                   torch.device, torch.Size, slice, torch.SymInt})  # fmt: skip


@dataclass(frozen=True)
class Hole:
    """Where a tensor was taken out of a container; `key` says which one belongs there."""

    key: Any


_REBUILD: dict[type, Callable[[Any, Leaf], Any]] = {
    list: lambda value, each: [each(v) for v in value],
    tuple: lambda value, each: tuple(each(v) for v in value),
    dict: lambda value, each: {k: each(v) for k, v in value.items()},
    collections.OrderedDict: lambda value, each: collections.OrderedDict((k, each(v)) for k, v in value.items()),
    collections.defaultdict: lambda value, each: collections.defaultdict(
        value.default_factory, {k: each(v) for k, v in value.items()}
    ),
    collections.deque: lambda value, each: collections.deque((each(v) for v in value), value.maxlen),
    functools.partial: lambda value, each: functools.partial(
        value.func, *map(each, value.args), **{k: each(v) for k, v in value.keywords.items()}
    ),
    types.SimpleNamespace: lambda value, each: types.SimpleNamespace(**{k: each(v) for k, v in vars(value).items()}),
    slice: lambda value, each: slice(each(value.start), each(value.stop), each(value.step)),
}


def _rebuilder(value: Any) -> Callable[[Any, Leaf], Any] | None:
    """The function that makes a container of this type again from other leaves; None for a leaf itself."""
    rebuild = _REBUILD.get(type(value))
    if rebuild is not None:
        return rebuild
    if isinstance(value, tuple) and hasattr(value, "_fields") and not isinstance(value, torch.Size):
        return lambda v, each: type(v)(*map(each, v))
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Hole):
        return _rebuild_dataclass
    return None


def _rebuild_dataclass(value: Any, each: Leaf) -> Any:
    again = copy.copy(value)
    if again is value:  # one that says that it never changes, as torch's own TreeSpec of a leaf does
        again = object.__new__(type(value))
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(again, field.name, each(getattr(value, field.name)))
    return again


def map_leaves(value: Any, leaf: Leaf, depth: int = DEPTH) -> Any:
    """`value` with every leaf exchanged; containers are made anew, other objects are leaves."""
    rebuild = _rebuilder(value) if depth else None
    return leaf(value) if rebuild is None else rebuild(value, lambda inner: map_leaves(inner, leaf, depth - 1))


def leaves(value: Any) -> list[Any]:
    """The leaves in the order in which `exchanged` visits them."""
    collected: list[Any] = []
    map_leaves(value, collected.append)
    return collected


def copy_containers(value: Any) -> Any:
    """The same leaves in containers of their own."""
    return map_leaves(value, lambda leaf: leaf)


def with_replaced(values: Sequence[Any], places: Sequence[int], replacements: Iterable[Any]) -> list[Any]:
    """The values, with others at some places."""
    full = list(values)
    for i, replacement in zip(places, replacements, strict=True):
        full[i] = replacement
    return full


def holds_tensors(value: Any) -> bool:
    """True if a container (not a tensor itself) has a tensor among its leaves."""
    return not isinstance(value, Tensor) and any(isinstance(leaf, Tensor) for leaf in leaves(value))


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of a pytree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def open_containers(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with holes for the tensors inside containers, those tensors behind them."""
    if ATOMS.issuperset(map(type, args)):
        return tuple(args)
    inner: list[Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        inner.append(leaf)
        return Hole(len(args) + len(inner) - 1)

    holed = [a if isinstance(a, Tensor) or not holds_tensors(a) else map_leaves(a, take) for a in args]
    return (*holed, *inner)


def holes(value: Any) -> list[Hole]:
    """The holes of a container."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Hole)]


def fill_holes(value: Any, tensors: Mapping[Any, Any] | Sequence[Any]) -> Any:
    """A container with every hole filled by its key."""
    return map_leaves(value, lambda leaf: tensors[leaf.key] if isinstance(leaf, Hole) else leaf)


def close_containers(args: Sequence[Any], count: int) -> list[Any]:
    """The `count` arguments that the user gave, from `opened` ones; containers are copies."""
    return [a if isinstance(a, Tensor) else fill_holes(a, args) for a in args[:count]]
