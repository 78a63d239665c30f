"""What a method fills while it is captured (a cache, a registry) keeps nothing of that capture: it is as it was before.

Writes that the byte code shows end a capture before they happen. This is for the others: `table_of(device)[key] = w`.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Iterator
from typing import Any

import torch

from .attributes import instance_dict, is_a
from .held import holds_fakes
from .reads import Reads

MOST = 2_000
"""Containers that are looked at, each with at most so many items."""
DEPTH = 3
_KINDS = frozenset({dict, list, set, collections.deque, collections.OrderedDict, collections.defaultdict})
_NOT_LOOKED_INTO = (types.ModuleType, torch.nn.Module, torch.Tensor, types.FunctionType)


class Soiled:
    """The containers that a method can reach by what it reads, as they are now."""

    def __init__(self, reads: Reads | None) -> None:
        found: dict[int, Any] = {}
        for value in reads.present() if reads is not None else ():
            for container in _containers(value, DEPTH):
                if len(found) < MOST and len(container) <= MOST:
                    found[id(container)] = container
        self.before = [(c, _content(c)) for c in found.values()]

    def clean(self) -> None:
        """Takes out what was put in and holds a fake tensor or a symbol."""
        for container, before in self.before:
            now = _content(container)
            if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
                _cleaned(container, before, now)


def _containers(value: Any, depth: int) -> Iterator[Any]:
    if type(value) in _KINDS:
        yield value
        inner = list(value.values()) if is_a(value, dict) else list(value)
    elif is_a(value, type):
        inner = [v for v in vars(value).values() if type(v) in _KINDS]
    elif not is_a(value, _NOT_LOOKED_INTO) and type(own := instance_dict(value)) is dict:
        inner = [own]
    else:
        return
    if depth:
        for part in inner[:MOST]:
            yield from _containers(part, depth - 1)


def _content(container: Any) -> list[Any]:
    """Keys and values in their order."""
    if isinstance(container, dict):
        return [part for item in list(container.items()) for part in item]
    return list(container)


def _cleaned(container: Any, before: list[Any], now: list[Any]) -> None:
    if isinstance(container, dict):
        known = {id(k): v for k, v in zip(before[::2], before[1::2], strict=True)}
        items = [(k, known.get(id(k), v) if holds_fakes(v) else v) for k, v in zip(now[::2], now[1::2], strict=True)]
        clean: Any = [(k, v) for k, v in items if not (holds_fakes(k) or holds_fakes(v))]
        soiled = len(clean) < len(now) // 2 or any(v is not n for (_, v), n in zip(clean, now[1::2], strict=True))
        put: Any = container.update
    else:
        clean = [v for v in now if not holds_fakes(v)]
        soiled = len(clean) < len(now)
        put = container.update if isinstance(container, set) else container.extend
    if soiled:
        container.clear()
        put(clean)
