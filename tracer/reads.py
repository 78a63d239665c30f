"""What a method reads besides its arguments, found in its byte code: globals, closure cells, attribute chains, helpers.

Scalars are compared by value on every call, tensors become inputs by reference, everything else is compared by identity
(and, for plain containers and objects, by content). Writes and calls that a captured graph would lose are `effects`.
"""

from __future__ import annotations

import builtins
import collections
import dataclasses
import dis
import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .containers import Hole

SCALARS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, torch.layout,
           torch.memory_format)  # fmt: skip
LIBRARIES = {
    "torch",
    "math",
    "numpy",
    "builtins",
    "operator",
    "functools",
    "itertools",
    "typing",
    "collections",
    "triton",
    "fusegrad",
    "pytest",
    "_pytest",  # what a rewritten `assert` calls
}
IMPURE_BUILTINS = {
    "print",
    "open",
    "input",
    "id",
    "hash",
    "repr",
    "exec",
    "eval",
    "globals",
    "locals",
    "setattr",
    "breakpoint",
}
NOT_IN_A_GRAPH = {"storage_offset", "_version", "_base", "is_leaf", "grad_fn"}
"""What a tensor tells about its memory and its history: another answer for tensors that one graph serves."""
IMPURE_MODULES = {"time", "random", "os", "sys", "io", "logging", "datetime", "uuid", "secrets"}
DEPTH = 3


@dataclass(frozen=True)
class Read:
    """One thing read: `get` fetches the present object, `kind` says how it is compared."""

    path: str
    kind: str  # "value", "tensor", "identity"
    get: Callable[[], Any]

    def fact(self) -> Any:
        """What goes into the key of a specialisation."""
        try:
            present = self.get()
        except (AttributeError, KeyError, IndexError, ValueError, TypeError) as error:
            return ("missing", type(error).__name__)
        if self.kind == "tensor":
            return tensor_fact(present) if isinstance(present, torch.Tensor) else ("not a tensor", id(present))
        return freeze(present) if self.kind == "value" else identity(present)


@dataclass(frozen=True)
class Callee:
    """A compiled function of an extension module, called by the code; `put` sets what stands in its place."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], None]


@dataclass
class Reads:
    """All reads of some functions, and the effects that make them unfit for capture (reason, file:line)."""

    entries: dict[str, Read] = field(default_factory=dict)
    effects: list[tuple[str, str]] = field(default_factory=list)
    mark: int = 0  # two scans of one class with the same mark found the same paths
    alive: list[Any] = field(default_factory=list)  # what is compared by identity must not be collected
    callees: dict[str, Callee] = field(default_factory=dict)

    def facts(self) -> tuple[Any, ...]:
        return tuple(read.fact() for read in self.entries.values())

    def signature(self) -> tuple[Any, ...]:
        """Which paths are read, and how each is compared."""
        return tuple((path, read.kind) for path, read in self.entries.items())

    def changed(self, before: tuple[Any, ...]) -> str | None:
        """The name of what is no longer as it was when `facts` said `before`."""
        paths = (p for p, old, now in zip(self.entries, before, self.facts(), strict=True) if old != now)
        return next((p.split(" in ")[0].split("@")[0] for p in paths), None)

    def tensor_path(self, tensor: torch.Tensor) -> Read | None:
        """The read that yields this very tensor."""
        return next((r for r in self.entries.values() if r.kind == "tensor" and _same(r, tensor)), None)


def _same(read: Read, tensor: torch.Tensor) -> bool:
    try:
        return read.get() is tensor
    except (AttributeError, KeyError, IndexError, ValueError, TypeError):
        return False


def identity(value: Any) -> tuple[Any, ...]:
    """Which object it is; bound methods are made anew at each access, so their function and their object count."""
    owner = getattr(value, "__self__", None)
    if isinstance(value, types.MethodType):
        return ("method", id(value.__func__), id(owner))
    if isinstance(value, types.BuiltinMethodType) and not isinstance(owner, types.ModuleType):
        return ("method", value.__name__, id(owner))
    return ("id", id(value))


def tensor_fact(t: torch.Tensor) -> tuple[Any, ...]:
    """What is compared of a tensor that is not an argument: everything but its data."""
    return (
        "tensor",
        t.dtype,
        t.device,
        tuple(t.shape),
        t.stride() if t.layout is torch.strided else None,
        t.requires_grad,
    )


def freeze(value: Any, depth: int = DEPTH) -> Any:
    """A hashable picture of a value; NaN equals itself; 1, 1.0, True differ; objects count by identity and content."""
    if isinstance(value, float | complex):
        return (type(value).__name__, repr(value))
    if isinstance(value, SCALARS):
        return (type(value).__name__, value)
    if isinstance(value, torch.Tensor):
        return tensor_fact(value)
    if depth == 0:
        return ("id", id(value))
    if isinstance(value, list | tuple):
        return (_name(value), tuple(freeze(v, depth - 1) for v in value))
    if isinstance(value, dict):
        return (_name(value), tuple((freeze(k, depth - 1), freeze(v, depth - 1)) for k, v in value.items()))
    if _is_plain_object(value):
        who = type(value) if dataclasses.is_dataclass(value) else id(value)
        return ("object", who, tuple((k, freeze(v, depth - 1)) for k, v in state_of(value).items()))
    return _frozen_rarity(value, depth)


def _frozen_rarity(value: Any, depth: int) -> Any:
    if isinstance(value, slice):
        return ("slice", freeze((value.start, value.stop, value.step), depth - 1))
    if isinstance(value, functools.partial):
        return ("partial", freeze((value.func, value.args, value.keywords), depth - 1))
    if isinstance(value, collections.deque):
        return ("deque", value.maxlen, freeze(list(value), depth - 1))
    if isinstance(value, set | frozenset):
        return (_name(value), frozenset(freeze(v, depth - 1) for v in value))
    if isinstance(value, types.FunctionType):
        return ("function", id(value), () if is_library(value) else reads_of(value).facts())
    if isinstance(value, Hole) or is_a_value(value):
        return (_name(value), value)
    return ("id", id(value))


def _name(value: Any) -> str:
    return type(value).__qualname__


def is_a_value(value: Any) -> bool:
    """Whether an object without visible state compares by value, and so never changes (a Decimal, a range)."""
    hashed: Any = type(value).__hash__
    is_code = isinstance(value, type | types.ModuleType | types.BuiltinFunctionType)
    return not is_code and hashed is not None and hashed is not object.__hash__


def state_of(value: Any) -> dict[str, Any]:
    """The attributes of a plain object, those in slots included."""
    slots = [n for c in type(value).__mro__ for n in _slots(c) if hasattr(value, n)]
    return {n: getattr(value, n) for n in slots} | getattr(value, "__dict__", {})


def _slots(cls: type) -> tuple[str, ...]:
    named = cls.__dict__.get("__slots__", ())
    return tuple(n for n in ((named,) if isinstance(named, str) else named) if n not in ("__dict__", "__weakref__"))


@functools.lru_cache(maxsize=256)
def reads_of(function: Any) -> Reads:
    """What a function that is given as an argument reads itself."""
    return scan(function)


def _is_plain_object(value: Any) -> bool:
    library = (getattr(type(value), "__module__", "") or "").split(".")[0] in LIBRARIES
    has_state = hasattr(value, "__dict__") or bool(_slots(type(value)))
    return has_state and not library and not isinstance(value, type) and not callable(value)


_SEEN = (*SCALARS, torch.Tensor, Hole, type, types.BuiltinFunctionType, types.EllipsisType, enum.Enum)


def unfit(value: Any, depth: int) -> str | None:
    """Why an argument's state cannot be seen, so that a capture could serve a call that it does not fit."""
    if isinstance(value, _SEEN) or type(value).__module__.split(".")[0] == "fusegrad":
        return None
    if isinstance(value, types.FunctionType):
        return reads_of(value).effects[0][0] if not is_library(value) and reads_of(value).effects else None
    inner = _inner(value)
    if inner is None or depth == 0:
        return None if inner is None and is_a_value(value) else f"an argument holds a {_name(value)}"
    return next((why for v in inner if (why := unfit(v, depth - 1))), None)


def _inner(value: Any) -> list[Any] | None:
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return list(value)
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    return list(state_of(value).values()) if _is_plain_object(value) else None


def scan(*functions: Callable[..., Any]) -> Reads:
    """The reads of `functions` and of every helper that they call by a name that can be resolved."""
    reads = Reads()
    seen: set[Any] = set()
    for function in functions:
        _scan_source(function, reads, seen)
    return reads


def _scan_source(function: Any, reads: Reads, seen: set[Any]) -> None:
    """A function, or a functools.partial of one with whatever was bound to it."""
    if not isinstance(function, functools.partial):
        _scan(inspect.unwrap(function), reads, seen)
        return
    for name in ("args", "keywords"):
        path, get = f"{name} of partial@{id(function)}", _attribute(lambda: function, name)
        _record(path, get, get(), reads, seen)
    _scan_source(function.func, reads, seen)


def backward_effects(method: Callable[..., Any]) -> list[tuple[str, str]]:
    """What a backward does to ctx that its next run would see, and what it asks that differs between runs."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is None or not code.co_argcount:
        return []
    found, line = [], code.co_firstlineno
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _NOISE]
    for at, instruction in enumerate(instructions):
        line = (instruction.positions.lineno if instruction.positions else None) or line
        if (why := _kept_on(code.co_varnames[0], instructions[: at + 1])) is not None:
            found.append((why, f"{code.co_filename}:{line}"))
    return found


def _kept_on(ctx: str, ran: list[dis.Instruction]) -> str | None:
    """Why the last of `ran` is seen by the next run: `ctx.k = ...`, `ctx.table[i] = ...`, `ctx.seen.append(...)`."""
    last, before = ran[-1], ran[:-1]
    if last.argval == "is_grad_enabled":
        return "it asks for the grad mode"
    if last.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") and before and before[-1].opname in _LOADS:
        before = before[:-1]  # the index
    elif last.opname in _ATTRIBUTE:
        if last.argval not in _CHANGES - {"add", "sort"}:  # which tensors have as well
            return None
    elif last.opname not in ("STORE_ATTR", "DELETE_ATTR"):
        return None
    chain = 0
    while before and before[-1].opname in _ATTRIBUTE:
        before, chain = before[:-1], chain + 1
    stored = last.opname in ("STORE_ATTR", "DELETE_ATTR") or chain
    is_ctx = bool(before) and _loads(before[-1], ctx)
    if (is_ctx and stored) or _is_augmented(ctx, last, ran):
        return f"it changes what is on `{ctx}`, which its next run reads"
    return None


def _loads(instruction: dis.Instruction, name: str) -> bool:
    return instruction.opname.startswith("LOAD_FAST") and instruction.argval == name


def _is_augmented(ctx: str, store: dis.Instruction, ran: list[dis.Instruction]) -> bool:
    """Whether a store ends `ctx.k += ...`: the object was loaded and copied before its attribute was read."""
    triples = zip(ran, ran[1:], ran[2:], strict=False)
    return store.opname == "STORE_ATTR" and any(
        _loads(a, ctx) and b.opname.startswith(("COPY", "DUP")) and c.opname in _ATTRIBUTE and c.argval == store.argval
        for a, b, c in triples
    )


def _scan(function: Any, reads: Reads, seen: set[Any]) -> None:
    code = getattr(function, "__code__", None)
    if code is None or (code, id(function)) in seen or is_library(function):
        return
    seen.add((code, id(function)))
    reads.alive.append(function)
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
    _scan_code(code, function.__globals__, cells, reads, seen)


def _scan_code(code: types.CodeType, env: dict[str, Any], cells: dict[str, Any], reads: Reads, seen: set[Any]) -> None:
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _NOISE]
    line = code.co_firstlineno
    for at, instruction in enumerate(instructions):
        line = (instruction.positions.lineno if instruction.positions else None) or line
        why = _effect(instruction, env) or _outside_write(instructions[: at + 1], code, env, cells)
        if why is not None:
            reads.effects.append((why, f"{code.co_filename}:{line}"))
        if (root := _root(instruction, env, cells)) is not None:
            _follow(root, instructions[at + 1 :], reads, seen, f"{code.co_filename}:{line}")
    for nested in code.co_consts:
        if isinstance(nested, types.CodeType):
            _scan_code(nested, env, cells, reads, seen)


_NOISE = {"CACHE", "PRECALL", "PUSH_NULL", "RESUME", "NOP", "COPY_FREE_VARS", "EXTENDED_ARG", "NOT_TAKEN"}
_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD"}


def _effect(instruction: dis.Instruction, env: dict[str, Any]) -> str | None:
    """Why this instruction does something that a captured graph would lose."""
    name = instruction.argval
    if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
        return f"it assigns the global `{name}`"
    if instruction.opname == "STORE_ATTR" and name in ("data", "grad", "requires_grad"):
        return f"it assigns `.{name}` of a tensor"
    if instruction.opname in _ATTRIBUTE and name in NOT_IN_A_GRAPH:
        return f"it reads `.{name}` of a tensor"
    if instruction.opname == "LOAD_GLOBAL" and name in IMPURE_BUILTINS and name not in env and hasattr(builtins, name):
        return f"it calls `{name}`"
    if instruction.opname == "LOAD_GLOBAL" and isinstance(env.get(name), types.ModuleType) and name in IMPURE_MODULES:
        return f"it uses the module `{name}`"
    return None


_LOADS = {"LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"}


def _outside_write(
    ran: list[dis.Instruction], code: types.CodeType, env: dict[str, Any], cells: dict[str, Any]
) -> str | None:
    """Why the last of `ran` changes something outside the function: `nonlocal k`, `table[i] = ...`, `cfg.k = ...`."""
    last, before = ran[-1], _before_store(ran)
    if last.opname in ("STORE_DEREF", "DELETE_DEREF") and last.argval in cells and last.argval in code.co_freevars:
        return f"it assigns the nonlocal `{last.argval}`"
    if last.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") and before and before[-1].opname in _LOADS:
        before = before[:-1]  # the index
    elif last.opname not in ("STORE_ATTR", "DELETE_ATTR"):
        return None
    while before and before[-1].opname in _ATTRIBUTE:
        before = before[:-1]
    if before and (root := _root(before[-1], env, cells)) is not None and not isinstance(root.get(), torch.Tensor):
        return f"it changes `{before[-1].argval}`, which is not its own"
    return None


def _before_store(ran: list[dis.Instruction]) -> list[dis.Instruction]:
    """What computed the object (and index) that the last of `ran` stores to; `x.n += 1` loads it once, for both."""
    last, before = ran[-1], ran[:-1]
    if not before or before[-1].opname != "SWAP":
        return before
    width, read = (1, "LOAD_ATTR") if last.opname == "STORE_ATTR" else (2, "BINARY_SUBSCR")
    for i in range(len(before) - width - 1, 0, -1):
        copied = all(c.opname == "COPY" for c in before[i : i + width])
        if copied and before[i + width].opname == read and (width == 2 or before[i + 1].argval == last.argval):
            return before[:i]
    return before


@dataclass(frozen=True)
class _Root:
    """A name of the code's surroundings: how its path begins, and how the object there is fetched and replaced."""

    path: str
    get: Callable[[], Any]
    put: Callable[[Any], None]


def _root(instruction: dis.Instruction, env: dict[str, Any], cells: dict[str, Any]) -> _Root | None:
    name = instruction.argval
    if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and name in env:
        path = f"global {name} in {env.get('__name__', '?')}@{id(env)}"
        return _Root(path, lambda: env[name], partial(env.__setitem__, name))
    if instruction.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF") and name in cells:
        cell = cells[name]
        return _Root(f"closure {name}@{id(cell)}", lambda: cell.cell_contents, partial(setattr, cell, "cell_contents"))
    return None


def _follow(root: _Root, rest: list[dis.Instruction], reads: Reads, seen: set[Any], where: str) -> None:
    """Follow `a.b.c` as long as attributes are loaded, then record what stands at the end."""
    path, get, put = root.path, root.get, root.put
    try:
        value = get()
    except (ValueError, KeyError):  # an empty cell: a name bound later
        return
    owner: Any = None
    for instruction in rest:
        if instruction.opname not in _ATTRIBUTE or isinstance(value, torch.Tensor) or _is_library_module(value):
            break
        if not hasattr(value, instruction.argval):
            break
        get, path = _attribute(get, instruction.argval), f"{path}.{instruction.argval}"
        owner, value, put = value, getattr(value, instruction.argval), partial(setattr, value, instruction.argval)
    if isinstance(owner, _CONTAINERS) and isinstance(value, types.BuiltinMethodType):
        if value.__name__ in _CHANGES:
            reads.effects.append((f"it calls `{value.__name__}` of a {type(owner).__name__} from outside", where))
        _record(f"{path}.__self__", lambda: get().__self__, owner, reads, seen)
        return
    _record(path, get, value, reads, seen)
    if is_compiled(value):
        reads.callees.setdefault(path, Callee(value.__name__, get, put))
    if owner is not None and isinstance(value, types.MethodType) and _is_plain_object(owner):
        _record(f"{path}.__self__", lambda: get().__self__, owner, reads, seen)
    if isinstance(value, types.ModuleType) and value.__name__ in IMPURE_MODULES:
        reads.effects.append((f"it uses the module `{value.__name__}`", where))


_CONTAINERS = (list, dict, set, bytearray, collections.deque)
_CHANGES = {
    *("append", "extend", "insert", "remove", "pop", "popitem", "popleft", "appendleft", "extendleft", "clear"),
    *("sort", "reverse", "rotate", "add", "discard", "update", "setdefault", "__setitem__", "__delitem__"),
    *("difference_update", "intersection_update", "symmetric_difference_update"),
}


def _attribute(get: Callable[[], Any], name: str) -> Callable[[], Any]:
    return lambda: getattr(get(), name)


def _record(path: str, get: Callable[[], Any], value: Any, reads: Reads, seen: set[Any]) -> None:
    if path in reads.entries:
        return
    if isinstance(value, torch.Tensor):
        reads.entries[path] = Read(path, "tensor", get)
        return
    if isinstance(value, types.FunctionType | types.MethodType):
        if not is_library(value):
            reads.entries[path] = Read(path, "identity", get)
            reads.alive.append(value)
            _scan(inspect.unwrap(getattr(value, "__func__", value)), reads, seen)
        return
    if _is_library_module(value) or isinstance(value, types.ModuleType) or is_library(value):
        return
    if isinstance(value, SCALARS) or isinstance(value, list | tuple | dict) or _is_plain_object(value):
        reads.entries[path] = Read(path, "value", get)
        for name, inner in _tensors_inside(value, get, DEPTH):
            reads.entries[path + name] = Read(path + name, "tensor", inner)
        return
    reads.entries[path] = Read(path, "identity", get)
    reads.alive.append(value)


def _tensors_inside(value: Any, get: Callable[[], Any], depth: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    if isinstance(value, torch.Tensor):
        yield "", get
    if depth == 0:
        return
    for name, inner, fetch in _items(value, get):
        for path, getter in _tensors_inside(inner, fetch, depth - 1):
            yield f"{name}{path}", getter


def _items(value: Any, get: Callable[[], Any]) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
    if isinstance(value, list | tuple):
        yield from ((f"[{i}]", v, _item(get, i)) for i, v in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"[{k!r}]", v, _item(get, k)) for k, v in value.items())
    elif _is_plain_object(value):
        yield from ((f".{k}", v, _attribute(get, k)) for k, v in vars(value).items())


def _item(get: Callable[[], Any], key: Any) -> Callable[[], Any]:
    return lambda: get()[key]


def is_compiled(value: Any) -> bool:
    """Whether the value is a function of an extension module that is neither torch's nor Python's own."""
    module = getattr(value, "__module__", None)
    if not callable(value) or isinstance(value, type) or not isinstance(module, str) or is_library(value):
        return False
    native = not isinstance(type(value).__call__, types.FunctionType)
    python = isinstance(value, types.FunctionType | types.MethodType)
    return native and not python and module.split(".")[0] not in sys.stdlib_module_names and hasattr(value, "__name__")


def is_library(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return isinstance(module, str) and module.split(".")[0] in LIBRARIES


def _is_library_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__.split(".")[0] in LIBRARIES
