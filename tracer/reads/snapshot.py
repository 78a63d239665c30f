"""Undoes the changes that a method makes around it while it is captured; no graph serves such a method.

Changes that the byte code shows end a capture before they happen. This is for the others: `table_of(device)[key] = w`,
a default argument that is a list, an object that counts its own calls. The method then runs as written, once.
"""

from __future__ import annotations

import array
import collections
import dis
import functools
import gc
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..capture.fake_leaks import holds_fakes
from .attributes import ABSENT, closed_over, has_instance_dict, instance_dict, is_a
from .reads import Reads
from .value_keys import SCALARS, Memory, is_fixed, is_library

MOST = 2_000
"""Things that are looked at, each with at most so many items."""
BYTES = 1 << 20
DEPTH = 4
_NOT_LOOKED_INTO = (types.ModuleType, torch.Tensor)


class _Kind(NamedTuple):
    """Reads the content of a container of one type, and puts it back."""

    read: Callable[[Any], list[Any]]
    restore: Callable[[Any, list[Any]], None]


def _put_dict(container: Any, content: list[Any]) -> None:
    dict.clear(container)
    dict.update(container, zip(content[::2], content[1::2], strict=True))
    if is_a(container, collections.OrderedDict):
        for key in content[::2]:
            container.move_to_end(key)


def _put_set(container: Any, content: list[Any]) -> None:
    set.clear(container)
    set.update(container, content)


def _put_deque(container: Any, content: list[Any]) -> None:
    collections.deque.clear(container)
    collections.deque.extend(container, content)


def _put_array(container: Any, content: list[Any]) -> None:
    del container[:]
    container.frombytes(content[0])


def _content_of_class(cls: Any) -> list[Any]:
    """Its own attributes; not what is noted there of its compiled twin, which a capture may make."""
    own = [(name, value) for name, value in list(vars(cls).items()) if not name.startswith("_fusegrad")]
    return [part for item in own for part in item]


def _put_class(cls: Any, content: list[Any]) -> None:
    before, current = _by_name(content), _by_name(_content_of_class(cls))
    for name in current.keys() - before.keys():
        type.__delattr__(cls, name)
    for name, value in before.items():
        if name not in current or current[name] is not value:
            type.__setattr__(cls, name, value)


def _by_name(content: list[Any]) -> dict[Any, Any]:
    return dict(zip(content[::2], content[1::2], strict=True))


def _pairs(container: Any) -> list[Any]:
    """Keys and values in their order."""
    return [part for item in list(dict.items(container)) for part in item]


_KINDS: tuple[tuple[Any, _Kind], ...] = (
    (dict, _Kind(_pairs, _put_dict)),
    (list, _Kind(lambda v: list.copy(v), lambda v, content: list.__setitem__(v, slice(None), content))),
    (set, _Kind(lambda held: list(set.copy(held)), _put_set)),
    (collections.deque, _Kind(list, _put_deque)),
    (bytearray, _Kind(lambda v: [bytes(v)], lambda v, content: v.__setitem__(slice(None), content[0]))),
    (array.array, _Kind(lambda held: [held.tobytes()], _put_array)),
    (Memory, _Kind(lambda v: [v.tobytes()], lambda v, c: v.__setitem__(..., type(v)(v.shape, v.dtype, c[0])))),
    (types.CellType, _Kind(lambda v: [v.cell_contents], lambda v, content: setattr(v, "cell_contents", content[0]))),
    (type, _Kind(_content_of_class, _put_class)),
)


class _Global(NamedTuple):
    """A name of a module, as something with a content."""

    env: dict[str, Any]
    name: str


@functools.lru_cache(maxsize=1024)
def _globals_assigned(code: types.CodeType) -> tuple[str, ...]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}
    return tuple(sorted(names))


def _put_global(variable: _Global, content: list[Any]) -> None:
    if content[0] is ABSENT:
        variable.env.pop(variable.name, None)
    else:
        variable.env[variable.name] = content[0]


_OF_GLOBAL = _Kind(lambda held: [held.env.get(held.name, ABSENT)], _put_global)


class Snapshot:
    """A copy of everything that a method can reach by its reads, as it is now."""

    def __init__(self, reads: Reads | None) -> None:
        self.before: dict[int, tuple[str, Any, _Kind, list[Any]]] = {}
        self.caches: list[tuple[str, Any, int]] = []
        self.is_partial = False  # whether some of it was found only as the method came to it
        self.visited: set[int] = set()
        if reads is not None:
            self.add(reads)
            for function in reads.foreign.functions():
                self.add_globals(function.code, function.env)

    def add(self, reads: Reads) -> None:
        """Copies everything that can be reached by these reads, too."""
        for path, value in reads.present_values():
            for container in _containers_in(value, DEPTH, self.visited):
                if len(self.before) < MOST and id(container) not in self.before:
                    self._add_container(path, container)

    def add_globals(self, code: types.CodeType, env: dict[str, Any]) -> None:
        """Copies the globals to which a function gives new values, by `global`."""
        for name in _globals_assigned(code):
            variable = _Global(env, name)
            self.before[id(variable)] = (f"global {name}", variable, _OF_GLOBAL, _OF_GLOBAL.read(variable))

    def _add_container(self, path: str, container: Any) -> None:
        if is_a(container, functools._lru_cache_wrapper):
            self.caches.append((path, container, container.cache_info().misses))
            return
        kind = next(kind for container_type, kind in _KINDS if is_a(container, container_type))
        try:
            content = kind.read(container)
        except ValueError:  # an empty cell
            return
        if len(content) <= 2 * MOST:
            self.before[id(container)] = (path, container, kind, content)

    def restore(self) -> str | None:
        """Puts everything back; the path to the first thing that had changed."""
        changed = None
        for path, container, kind, before, _ in self._changes():
            kind.restore(container, before)
            changed = changed or path
        for path, cache, misses in self.caches:
            if cache.cache_info().misses != misses and _drop_fakes(cache):
                changed = changed or path
        return changed

    def has_only_filled(self) -> bool:
        """True if tables grew and names got a value, and nothing else changed, by what a run in eager adds, too."""
        fillings = [_is_filling(container, before, current) for _, container, _, before, current in self._changes()]
        return bool(fillings) and all(fillings)

    def _changes(self) -> Iterator[tuple[str, Any, _Kind, list[Any], list[Any]]]:
        """(path, container, its kind, its content before, its content now) of all whose content is another one."""
        for path, container, kind, before in self.before.values():
            current = kind.read(container)
            if len(current) != len(before) or not all(map(_same, current, before)):
                yield path, container, kind, before, current


class CaptureAgain(Exception):
    """A capture is to be made once more (internal): it came to functions that were not known, or it filled a cache.

    With all of them known from the start, it has to change nothing; of one that filled caches, these stay full.
    """

    def __init__(self, snapshot: Snapshot, filled: bool) -> None:
        super().__init__()
        self.snapshot, self.filled = snapshot, filled


def _is_filling(container: Any, before: Sequence[Any], current: Sequence[Any]) -> bool:
    if type(container) is _Global:
        return before[0] in (None, ABSENT) and not holds_fakes(current)
    return is_a(container, dict) and all(map(_same, current, before)) and not holds_fakes(current[len(before) :])


def _drop_fakes(cache: Any) -> bool:
    """Drops from a `functools.cache` what is of a capture: later calls would be given it. Whether there was any.

    What it keeps besides is what the same call keeps in eager. Of one with a bound, which may drop what it likes, all.
    """
    parts, own = gc.get_referents(cache), (cache.__wrapped__, instance_dict(cache))
    entries = [part for part in parts if type(part) is dict and part is not own[1]]
    if cache.cache_parameters()["maxsize"] is None and len(entries) == 1:
        stale = [key for key, result in entries[0].items() if holds_fakes([key, result])]
        for key in stale:
            del entries[0][key]
        return bool(stale)
    stale = [part for part in parts if not any(part is it for it in own) and holds_fakes(part)]
    if stale:
        cache.cache_clear()
    return bool(stale)


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and is_a(a, SCALARS) and a == b)


def _containers_in(value: Any, depth: int, visited: set[int]) -> Iterator[Any]:
    """The things with a content within a value, itself first."""
    if id(value) in visited or len(visited) > MOST or is_a(value, _NOT_LOOKED_INTO):
        return
    visited.add(id(value))
    if is_a(value, _WITH_CONTENT) and _can_be_kept(value):
        yield value
    for part in _parts(value)[:MOST] if depth else ():
        yield from _containers_in(part, depth - 1, visited)


def _parts(value: Any) -> list[Any]:
    parts = next((parts(value) for kind, parts in _PARTS if is_a(value, kind)), [])
    own = has_instance_dict(type(value)) and not is_a(value, type) and not _is_librarys_callable(value)
    kind = [] if is_fixed(type(value)) else [type(value)]  # a descriptor, a metaclass: it may count on its class
    return [*parts, instance_dict(value), *kind] if own else [*parts, *kind]


def _is_librarys_callable(value: Any) -> bool:
    """An operator or a kernel: what it notes down of itself (overloads found by name, builds) is the library's."""
    own = is_library(type(value)) and not is_a(value, torch.nn.Module)
    return own and callable(value)


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    """The values in a function: defaults, and the objects that it wraps."""
    if is_library(function):
        return []
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [*defaults, *(function.__closure__ or ()), *closed_over(function)]


_WITH_CONTENT = (*(kind for kind, _ in _KINDS), functools._lru_cache_wrapper)
_PARTS: tuple[tuple[Any, Callable[[Any], list[Any]]], ...] = (
    (types.MethodType, lambda v: [v.__func__, v.__self__]),
    (types.BuiltinMethodType, lambda v: [v.__self__]),  # of a module's function that is the module
    (types.FunctionType, _parts_of_function),
    ((staticmethod, classmethod), lambda v: [v.__func__]),
    (functools._lru_cache_wrapper, lambda v: [v.__wrapped__]),
    (functools.partial, lambda v: [v.func, *v.args, *v.keywords.values()]),
    (types.MappingProxyType, lambda v: list(v.values())),
    (type, lambda v: [] if is_library(v) else list(vars(v).values())),
    (dict, lambda v: list(dict.values(v))),
    ((list, tuple, set, collections.deque), list),
)


def _can_be_kept(value: Any) -> bool:
    if is_a(value, type):
        return not is_library(value)
    if is_a(value, Memory):
        return bool(value.flags.writeable) and value.nbytes <= BYTES and not value.dtype.hasobject
    return True
