"""What a method reads besides its arguments, found in its byte code: globals, closure cells, attribute chains, helpers.

Scalars are compared by value on every call, tensors become inputs by reference, everything else is compared by identity
(and, for plain containers and objects, by content). Writes and calls that a captured graph would lose are `effects`.
"""

from __future__ import annotations

import builtins
import collections
import dis
import functools
import importlib.util
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from .declared import declarations
from .pictures import (
    DEPTH,
    LIBRARIES,
    SCALARS,
    Memory,
    Same,
    freeze,
    functions_of_class,
    identity,
    is_library,
    is_plain_object,
    state_of,
    tensor_fact,
    too_much,
)
from .torch_state import ANSWERS, effect_of, impure

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
NOT_IN_A_GRAPH = {"storage_offset", "_version", "_base", "is_leaf", "grad_fn", "retains_grad"}
"""What a tensor tells about its memory and its history: another answer for tensors that one graph serves."""

LAYOUT = {
    "is_contiguous", "stride", "as_strided", "dim_order", "is_non_overlapping_and_dense", "storage", "untyped_storage",
}  # fmt: skip
HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}


@dataclass(frozen=True)
class Read:
    """One thing read: `get` fetches the present object, `kind` says how it is compared.

    steps: how it is found: ("of", dict, name), ("cell", cell) or ("is", object), then names of attributes.
    """

    path: str
    kind: str  # "value", "tensor", "identity", "builtin", "function" (code, defaults), "names" (of a module)
    get: Callable[[], Any]
    steps: tuple[Any, ...] = ()

    def fact(self) -> Any:
        """What goes into the key of a specialisation."""
        try:
            present = self.get()
        except (AttributeError, KeyError, IndexError, ValueError, TypeError) as error:
            return ("missing", type(error).__name__)
        return _FACTS[self.kind](present)


def _tensor_or_not(present: Any) -> Any:
    return tensor_fact(present) if isinstance(present, torch.Tensor) else ("not a tensor", Same(present))


def _function_fact(function: Any) -> Any:
    return ("function", Same(function.__code__), freeze(function.__defaults__), freeze(function.__kwdefaults__))


def _named(value: Any) -> Any:
    """What stands under a name of a library: nearly always what stood there at all times."""
    return value if type(value) in LASTING else freeze(value)


LASTING = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ModuleType)
_FACTS: dict[str, Callable[[Any], Any]] = {
    "value": freeze,
    "tensor": _tensor_or_not,
    "identity": identity,
    "builtin": identity,
    "function": _function_fact,
    "names": lambda found: tuple(map(_named, found)),
}


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
    asked: set[str] = field(default_factory=set)  # attributes that no tensor has, unless someone put one there
    asks_identity: bool = False  # whether two things are one
    asks_layout: bool = False  # how a tensor lies in memory
    library: dict[int, tuple[Any, set[str]]] = field(default_factory=dict)  # names of modules and classes of libraries

    def name(self, owner: Any, name: str) -> None:
        """A name of a library's is used."""
        self.library.setdefault(id(owner), (owner, set()))[1].add(name)

    def take(self, other: Reads) -> None:
        """All that another scan found, but for effects."""
        self.entries |= other.entries
        self.alive += other.alive
        self.callees |= other.callees
        self.asked |= other.asked
        self.asks_identity |= other.asks_identity
        self.asks_layout |= other.asks_layout

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


def reads_of(function: Any) -> Reads:
    """What a function that is given as an argument reads itself."""
    return _reads_of(function, function.__code__)


@functools.lru_cache(maxsize=256)
def _reads_of(function: Any, code: Any) -> Reads:
    return scan(function)


def scan(*functions: Callable[..., Any]) -> Reads:
    """The reads of `functions` and of every helper that they call by a name that can be resolved."""
    reads = Reads()
    seen: set[Any] = set()
    for function in functions:
        _scan_source(function, reads, seen)
    _add_names(reads)
    return reads


def _add_names(reads: Reads) -> None:
    """One read for all names of a library's module: of many, that is faster than one for each."""
    for owner, names in reads.library.values():
        label, known = getattr(owner, "__name__", "?"), sorted(names)
        first, get = known[0], operator.attrgetter(*known, known[0])
        path = f"{label}.{first}" if len(known) == 1 else f"{label}.({' '.join(known)})"
        reads.entries[path] = Read(path, "names", partial(get, owner), (owner, *known))


def _scan_source(function: Any, reads: Reads, seen: set[Any]) -> None:
    """A function, or a functools.partial of one with whatever was bound to it."""
    if not isinstance(function, functools.partial):
        _scan(function, reads, seen)
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
    """What a function reads; what one of a library was made around (`once_differentiable`, `custom_fwd`)."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None and (wrapped := getattr(function, "__wrapped__", None)) is not None:
        _scan(wrapped, reads, seen)  # of functools.lru_cache, say
    if code is None or (code, id(function)) in seen:
        return
    seen.add((code, id(function)))
    reads.alive.append(function)
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
    if is_library(function):
        _scan_wrapped(function, cells, reads, seen)
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            _scan(wrapped, reads, seen)  # a method of a class that is compiled with pytree=True
        return
    _read_itself(function, reads)
    _scan_code(code, function.__globals__, cells, reads, seen)


def _scan_wrapped(function: Any, cells: dict[str, Any], reads: Reads, seen: set[Any]) -> None:
    for name, cell in cells.items():
        get = _attribute(lambda cell=cell: cell, "cell_contents")  # type: ignore[misc]
        try:
            value = get()
        except ValueError:
            continue
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            _record(f"closure {name}@{id(cell)}", get, value, reads, seen, ("cell", cell))
    if not cells and function.__code__.co_filename.endswith(_SEEN_THROUGH):
        _scan_torchs(function, reads)


_SEEN_THROUGH = ("torch/nn/functional.py", "torch/functional.py")


def _scan_torchs(function: Any, reads: Reads) -> None:
    """The operators that a function of torch's own calls in turn: someone may have replaced one of those."""
    env = function.__globals__
    instructions = [i for i in dis.get_instructions(function.__code__) if i.opname not in _NOISE]
    for load, attribute in pairwise(instructions):
        owner = env.get(load.argval) if load.opname == "LOAD_GLOBAL" else None
        name = attribute.argval if attribute.opname in _ATTRIBUTE else None
        if isinstance(owner, types.ModuleType) and isinstance(getattr(owner, name or "", None), _OPERATORS):
            reads.name(owner, str(name))
        elif load.opname == "LOAD_FAST" and name is not None:
            _name_method(name, reads)


_OPERATORS = (types.BuiltinFunctionType, types.FunctionType)


def _name_method(name: str, reads: Reads) -> None:
    """A method of that name is called of something: if it is a tensor, of torch's own."""
    found = getattr(torch.Tensor, name, None)
    if callable(found) and not isinstance(found, type):
        reads.name(torch.Tensor, name)


def _read_itself(function: Any, reads: Reads) -> None:
    """Its code and its defaults can be exchanged, too."""
    path = f"code of {function.__qualname__}@{id(function)}"
    reads.entries[path] = Read(path, "function", lambda: function, ("is", function))
    for name in ("__defaults__", "__kwdefaults__"):
        get = _attribute(lambda: function, name)
        for inner, fetch in _tensors_inside(get(), get, DEPTH):
            where = f"{name} of {function.__qualname__}@{id(function)}{inner}"
            reads.entries[where] = Read(where, "tensor", fetch)


def _scan_code(
    code: types.CodeType,
    env: dict[str, Any],
    cells: dict[str, Any],
    reads: Reads,
    seen: set[Any],
    outer: _Imports | None = None,
) -> None:
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _NOISE]
    line, imports, followed = code.co_firstlineno, _Imports(env, outer), 0
    for at, instruction in enumerate(instructions):
        ran = instructions[: at + 1]
        reads.asks_layout |= isinstance(instruction.argval, str) and instruction.argval in LAYOUT
        line = (instruction.positions.lineno if instruction.positions else None) or line
        where = f"{code.co_filename}:{line}"
        why = _effect(ran, env) or _outside_write(ran, code, env, cells) or imports.see(ran)
        if why is not None:
            reads.effects.append((why, where))
        root = _root(instruction, env, cells) or imports.root(instruction)
        if root is not None:
            followed = at + _follow(root, instructions[at + 1 :], reads, seen, where)
        elif at > followed:
            _note_question(ran, reads)
    for nested in code.co_consts:
        if isinstance(nested, types.CodeType):
            _scan_code(nested, env, cells, reads, seen, imports)


def _note_question(ran: list[dis.Instruction], reads: Reads) -> None:
    """What is asked of something that is known at the call alone: of a tensor, for what someone may have put on it."""
    last, before = ran[-1], ran[-2]
    if last.opname in ("IS_OP", "CONTAINS_OP") and before.opname != "LOAD_CONST":
        reads.asks_identity = True
    if last.opname in _ATTRIBUTE:
        _name_method(last.argval, reads)
        if last.argval == "__dict__":
            reads.asked.add(ANY)
        elif last.argval not in _USUAL and not (before.opname.startswith("LOAD_FAST") and before.argval == "ctx"):
            reads.asked.add(last.argval)
    elif last.opname == "LOAD_GLOBAL" and last.argval in ("vars", "dir"):
        reads.asked.add(ANY)
    elif last.opname == "LOAD_CONST" and isinstance(last.argval, str) and last.argval not in _USUAL:
        if last.argval.isidentifier() and any(i.argval in ("getattr", "hasattr") for i in ran):
            reads.asked.add(last.argval)


ANY = "*"
"""In `Reads.asked`: whatever someone may have put on a tensor is asked for."""
_USUAL = {n for kind in (torch.Tensor, list, dict, str, tuple, set, int, float, range) for n in dir(kind)}
"""Attributes that a tensor has, or what no tensor is."""


class _Imports:
    """Names that a function binds to modules and what is in them: `import m`, `from m import n`, `import a.b as c`."""

    def __init__(self, env: dict[str, Any], outer: _Imports | None = None) -> None:
        self.env = env
        self.bound: dict[str, _Root] = dict(outer.bound) if outer is not None else {}
        self.of: _Root | None = None  # where names are taken from
        self.now: _Root | None = None  # what the next store binds

    def see(self, ran: list[dis.Instruction]) -> str | None:
        """Follows an import; a reason where it cannot."""
        last = ran[-1]
        if last.opname == "IMPORT_NAME":
            return self._begins(last.argval, ran[-3].argval, bool(ran[-2].argval))
        if self.now is None:
            return None
        if last.opname == "IMPORT_FROM":
            self.now = self._part(self.of or self.now, last.argval)
        elif last.opname.startswith("STORE_"):
            self.bound[last.argval] = self.now
            self.now = self.of
        elif last.opname == "POP_TOP" and self.of is not None:
            self.now = self.of = None
        return None

    def _begins(self, name: str, level: int, takes_names: bool) -> str | None:
        package = self.env.get("__package__") or ""
        try:
            path = importlib.util.resolve_name("." * level + name, package) if level else name
            importlib.import_module(path)
        except Exception:
            return f"it imports `{name}`"
        held = path if takes_names else path.split(".")[0]
        self.now = _Root(f"import {held}", lambda: sys.modules[held], lambda _: None, ("of", sys.modules, held))
        self.of = self.now if takes_names else None
        return None

    @staticmethod
    def _part(owner: _Root, name: str) -> _Root:
        return _Root(f"{owner.path}.{name}", _attribute(owner.get, name), lambda _: None, (*owner.steps, name))

    def root(self, instruction: dis.Instruction) -> _Root | None:
        """The object that a local name stands for."""
        is_load = instruction.opname.startswith("LOAD_FAST") or instruction.opname == "LOAD_DEREF"
        return self.bound.get(instruction.argval) if is_load else None


_NOISE = {"CACHE", "PRECALL", "PUSH_NULL", "RESUME", "NOP", "COPY_FREE_VARS", "EXTENDED_ARG", "NOT_TAKEN"}
_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD"}


def _effect(ran: list[dis.Instruction], env: dict[str, Any]) -> str | None:
    """Why the last of `ran` does something that a captured graph would lose."""
    instruction, name = ran[-1], ran[-1].argval
    if instruction.opname in _ATTRIBUTE and name == "grad" and len(ran) > 1 and _is_local(ran[-2]):
        return "it reads `.grad` of a tensor"
    if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
        return f"it assigns the global `{name}`"
    if instruction.opname == "STORE_ATTR" and name in ("data", "grad", "requires_grad"):
        return f"it assigns `.{name}` of a tensor"
    if instruction.opname in _ATTRIBUTE and name in HOOKS:
        return "it registers a hook on a tensor"
    if instruction.opname in _ATTRIBUTE and name in NOT_IN_A_GRAPH:
        return f"it reads `.{name}` of a tensor"
    if instruction.opname == "LOAD_GLOBAL" and name in IMPURE_BUILTINS and name not in env and hasattr(builtins, name):
        return f"it calls `{name}`"
    return None


def _is_local(load: dis.Instruction) -> bool:
    return load.opname.startswith("LOAD_FAST") and load.argval != "ctx"


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
    steps: tuple[Any, ...] = ()


def _root(instruction: dis.Instruction, env: dict[str, Any], cells: dict[str, Any]) -> _Root | None:
    name = instruction.argval
    if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        where = f"in {env.get('__name__', '?')}@{id(env)}"
        if name in env:
            return _Root(f"global {name} {where}", lambda: env[name], partial(env.__setitem__, name), ("of", env, name))
        if hasattr(builtins, name):
            get = lambda: env[name] if name in env else getattr(builtins, name)  # noqa: E731
            return _Root(f"builtin {name} {where}", get, partial(env.__setitem__, name), ("builtin", env, name))
    if instruction.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF") and name in cells:
        cell = cells[name]
        put = partial(setattr, cell, "cell_contents")
        return _Root(f"closure {name}@{id(cell)}", lambda: cell.cell_contents, put, ("cell", cell))
    return None


def _follow(root: _Root, rest: list[dis.Instruction], reads: Reads, seen: set[Any], where: str) -> int:
    """Follow `a.b.c` as long as attributes are loaded, then record what stands at the end; how many were loaded."""
    try:
        at, done = _Found(root.path, root.get, root.put, root.steps, root.get()), 0
    except (ValueError, KeyError, AttributeError):  # an empty cell: a name bound later
        return 0
    if root.steps[:1] == ("builtin",):
        reads.entries.setdefault(root.path, Read(root.path, "builtin", root.get, root.steps))
        return 0
    for instruction in rest:
        if instruction.opname not in _ATTRIBUTE or not at.has(instruction.argval):
            break
        if at.is_of_a_library():
            reads.entries.setdefault(root.path, Read(root.path, "identity", root.get, root.steps))
            return done + _follow_library(at.value, rest[done:], reads, seen, where)
        at, done = at.then(instruction.argval), done + 1
    at.record(reads, seen, where)
    return done


@dataclass(frozen=True)
class _Found:
    """An object that a chain of names leads to, and the one before it."""

    path: str
    get: Callable[[], Any]
    put: Callable[[Any], None]
    steps: tuple[Any, ...]
    value: Any
    owner: Any = None

    def has(self, name: str) -> bool:
        return not isinstance(self.value, torch.Tensor) and hasattr(self.value, name)

    def is_of_a_library(self) -> bool:
        of_class = isinstance(self.value, type) and is_library(self.value)
        return _is_library_module(self.value) or (of_class and not _is_function_class(self.value))

    def then(self, name: str) -> _Found:
        value, put = getattr(self.value, name), partial(setattr, self.value, name)
        return _Found(f"{self.path}.{name}", _attribute(self.get, name), put, (*self.steps, name), value, self.value)

    def record(self, reads: Reads, seen: set[Any], where: str) -> None:
        value, owner, get = self.value, self.owner, self.get
        if (why := self._effect()) is not None:
            reads.effects.append((why, where))
        if isinstance(owner, _CONTAINERS) and isinstance(value, types.BuiltinMethodType):
            _record(f"{self.path}.__self__", lambda: get().__self__, owner, reads, seen, where=where)
            return
        _record(self.path, get, value, reads, seen, self.steps, where)
        if is_compiled(value):
            reads.callees.setdefault(self.path, Callee(value.__name__, get, self.put))
        if isinstance(value, types.MethodType) and is_plain_object(owner):
            _record(f"{self.path}.__self__", lambda: get().__self__, owner, reads, seen, where=where)

    def _effect(self) -> str | None:
        value, owner = self.value, self.owner
        if (why := impure(value)) is not None:
            return why
        changes = isinstance(value, types.BuiltinMethodType) and value.__name__ in _CHANGES
        if changes and isinstance(owner, _CONTAINERS):
            return f"it calls `{value.__name__}` of a {type(owner).__name__} from outside"
        is_users = isinstance(value, types.ModuleType) and not _is_library_module(value)
        return f"it hands on the module `{value.__name__}`" if is_users else None


def _follow_library(value: Any, rest: list[dis.Instruction], reads: Reads, seen: set[Any], where: str) -> int:
    """A name within a library: what stands there, and what it tells of the process."""
    owner, name, done = value, "", 0
    for done, instruction in enumerate(rest):
        if instruction.opname not in _ATTRIBUTE or not isinstance(value, types.ModuleType | type):
            break
        owner, name = value, instruction.argval
        if not hasattr(owner, name):
            return done
        value = getattr(owner, name)
    if (why := impure(value) or impure(owner) or effect_of(owner, name, value)) is not None:
        reads.effects.append((why, where))
    reads.name(owner, name)
    path, get = f"{getattr(owner, '__name__', '?')}.{name}", _attribute(lambda: owner, name)
    if name in ANSWERS and callable(value) and (getattr(owner, "__name__", "")).startswith("torch"):
        reads.entries[f"{path}()"] = Read(f"{path}()", "value", lambda: get()())
    if isinstance(value, types.FunctionType) and is_library(value):
        _scan(value, reads, seen)
    elif not is_library(value) and not isinstance(value, SCALARS) and callable(value):
        _record(path, get, value, reads, seen, ("is", owner, name), where)
    return done


_CONTAINERS = (list, dict, set, bytearray, collections.deque)
_CHANGES = {
    *("append", "extend", "insert", "remove", "pop", "popitem", "popleft", "appendleft", "extendleft", "clear"),
    *("sort", "reverse", "rotate", "add", "discard", "update", "setdefault", "__setitem__", "__delitem__"),
    *("difference_update", "intersection_update", "symmetric_difference_update"),
}


def _attribute(get: Callable[[], Any], name: str) -> Callable[[], Any]:
    return lambda: getattr(get(), name)


def _record(
    path: str,
    get: Callable[[], Any],
    value: Any,
    reads: Reads,
    seen: set[Any],
    steps: tuple[Any, ...] = (),
    where: str = "unknown",
) -> None:
    if path in reads.entries or (isinstance(value, types.ModuleType) and not _is_library_module(value)):
        return
    if isinstance(value, torch.Tensor):
        reads.entries[path] = Read(path, "tensor", get, steps)
    elif _is_function_class(value) or _is_function_class(getattr(value, "__self__", None)):
        _record_function_class(path, get, value, reads, seen, steps)
    elif _is_code(value) or not is_compared(value):
        reads.entries[path] = Read(path, "identity", get, steps)
        _scan(value, reads, seen)
    elif (why := too_much(value)) is not None:
        reads.effects.append((f"it reads `{_shown(path)}`, which {why}", where))
    else:
        _record_value(path, get, value, reads, seen, steps)


def _is_code(value: Any) -> bool:
    return isinstance(value, types.FunctionType | types.MethodType | types.ModuleType)


def _record_value(
    path: str, get: Callable[[], Any], value: Any, reads: Reads, seen: set[Any], steps: tuple[Any, ...]
) -> None:
    """What is compared by content: the tensors within become inputs, the methods of its class are read."""
    reads.entries[path] = Read(path, "value", get, steps)
    for name, inner in _tensors_inside(value, get, DEPTH):
        reads.entries[path + name] = Read(path + name, "tensor", inner)
    if not isinstance(value, SCALARS):
        _scan_class(value if isinstance(value, type) else type(value), reads, seen)


def is_compared(value: Any) -> bool:
    """Whether a value from outside is compared by content at every call."""
    kinds = (*SCALARS, list, tuple, dict, set, frozenset, collections.deque, functools.partial, bytearray, Memory)
    return isinstance(value, kinds) or is_plain_object(value) or (isinstance(value, type) and not is_library(value))


def _shown(path: str) -> str:
    return path.split(" in ")[0].split("@")[0].removeprefix("global ").removeprefix("closure ")


def _scan_class(cls: type, reads: Reads, seen: set[Any]) -> None:
    """What the methods of a user's class read; what they do to the world shows where they are called by name."""
    inner = Reads(library=reads.library)
    for function in functions_of_class(cls):
        _scan(function, inner, seen)
    reads.take(inner)


# ------------------------------------------------------------------ other Functions
def _is_function_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def _record_function_class(
    path: str, get: Callable[[], Any], value: Any, reads: Reads, seen: set[Any], steps: tuple[Any, ...]
) -> None:
    """A Function that is called: which one it is, what its methods are, and what they read; its effects are its own."""
    reads.entries[path] = Read(path, "identity", get, steps if isinstance(value, type) else ())
    cls, inner = value if isinstance(value, type) else value.__self__, Reads(library=reads.library)
    cls = getattr(cls, "_fusegrad_user_class", None) or cls
    for name in ("forward", "setup_context", "backward", "vjp", "jvp", "vmap"):
        method = getattr(cls, name, None)
        if method is not getattr(torch.autograd.Function, name):
            where, get = f"{name} of {cls.__qualname__}@{id(cls)}", _attribute(lambda: cls, name)
            reads.entries[where] = Read(where, "identity", get, ("is", cls, name))
            _scan(method, inner, seen)
    if not inner.effects and not any(d.value is False for d in declarations(cls, None).values()):
        reads.take(inner)  # else it runs as written, and reads for itself


# ------------------------------------------------------------------ tensors in values
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
    elif is_plain_object(value):
        yield from ((f".{k}", v, _attribute(get, k)) for k, v in state_of(value).items())


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


def _is_library_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__.split(".")[0] in LIBRARIES
