"""The reads of a method besides its arguments, found in its byte code: globals, closure cells, attribute chains,
helpers.

Scalars are compared by value on every call, tensors become inputs by reference, everything else is compared by identity
(and, for plain containers and objects, by content). Writes and calls that a captured graph would lose are `effects`.
A scan calls nothing that it finds, and what it cannot follow is an effect, too.
"""

from __future__ import annotations

import abc
import array
import builtins
import collections
import dataclasses
import dis
import functools
import importlib
import importlib.util
import inspect
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..containers import leaves
from ..declared import declarations
from ..methods import methods
from ..scoped_state import attribute_within
from .attributes import (
    ABSENT,
    attribute,
    bound_to,
    cells_of,
    closed_over,
    has_instance_dict,
    instance_dict,
    is_a,
    is_tensor,
    module_of,
)
from .bytecode import ATTRIBUTE, instructions_of, line_of, operand_before, straight_count, telling_instructions
from .changes import is_question, is_shown
from .packages import homes_of, is_cached, is_foreign, is_of_unknown
from .torch_state import DRAWN, answer_of, effect_of, why_impure, why_moving
from .value_keys import (
    DEPTH,
    LIBRARIES,
    SCALARS,
    Memory,
    Same,
    Scans,
    freeze,
    functions_of_class,
    identity,
    is_library,
    is_plain_object,
    items_of,
    set_scans,
    shared_allowance,
    state_of,
    tensor_fact,
    why_too_much,
)

IMPURE_BUILTINS = {
    "__import__",
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
"""Attributes of a tensor that tell of its memory and its history: another answer for tensors that one graph serves."""

LAYOUT = {
    "is_contiguous", "stride", "as_strided", "dim_order", "is_non_overlapping_and_dense", "storage", "untyped_storage",
}  # fmt: skip
_STATE = "it asks for the state of a torch.Generator, or sets it"
OF_GENERATORS = {
    "manual_seed", "seed", "initial_seed", "get_state", "set_state", "get_offset", "set_offset", "clone_state",
    "graphsafe_get_state", "graphsafe_set_state",
}  # fmt: skip
HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}


class Effect(NamedTuple):
    """Something that a captured graph would lose: the reason, `file:line`, the instruction with which it begins.

    certain: it happens whenever the method is called; else it is one where a capture reaches it (reached.py).
    subject: the local name of what has to be a tensor (or a torch.Generator), so that it is one.
    """

    reason: str
    where: str
    code: types.CodeType | None = None
    offset: int = -1
    certain: bool = True
    subject: str | None = None


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
        """The part of a specialization's key that stands for this read."""
        try:
            present = self.get()
        except Exception as error:
            return ("missing", type(error).__name__)
        return _FACTS[self.kind](present)


LASTING = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ModuleType)
_FACTS: dict[str, Callable[[Any], Any]] = {
    "value": freeze,
    "tensor": lambda value: tensor_fact(value) if is_tensor(value) else ("not a tensor", Same(value)),
    "identity": identity,
    "builtin": identity,
    "function": lambda f: ("function", Same(f.__code__), freeze(f.__defaults__), freeze(f.__kwdefaults__)),
    "names": lambda values: tuple([v if type(v) in LASTING else freeze(v) for v in values]),
}
"""By the kind of a read. A value under a name of a library is nearly always the same one at all times."""


@dataclass(frozen=True)
class Callee:
    """A compiled function of an extension module, called by the code; `put` sets what stands in its place."""

    name: str
    get: Callable[[], Any]
    replace: Callable[[Any], None]


@dataclass
class Reads:
    """All reads of some functions, and the effects that make them unfit for capture."""

    entries: dict[str, Read] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    of_arguments: dict[Any, Effect] = field(default_factory=dict)  # the effects of functions that came as arguments
    version: int = 0  # two scans of one class with the same mark found the same paths
    keepalive: list[Any] = field(default_factory=list)  # what is compared by identity must not be collected
    callees: dict[str, Callee] = field(default_factory=dict)
    custom_attributes: set[str] = field(default_factory=set)  # that a tensor has only if the user put one there
    compares_identity: bool = False  # whether two things are one
    queries_layout: bool = False  # how a tensor lies in memory; of a class: whether its backward does
    calls_unknown: bool = False  # code of other packages, which no scan looks into
    is_whole: bool = True  # false where a scan ended before all was looked at
    functions_scanned: int = 0  # functions
    library: dict[int, tuple[Any, set[str]]] = field(default_factory=dict)  # names of modules and classes of libraries
    generators: tuple[Callable[[], Any], ...] = ()  # that are arguments: a call with others has another key
    scanned: set[types.CodeType] = field(default_factory=set)
    skipped: list[tuple[types.FunctionType, _Root | None]] = field(default_factory=list)  # of other packages
    foreign: ForeignFunctions = field(default_factory=lambda: ForeignFunctions())
    widened: int = 0  # batches of `beyond` that are among these reads
    origin: Reads | None = None  # what these are a copy of, for one call's arguments

    def add_library_name(self, owner: Any, name: str) -> None:
        """A name of a library's is used."""
        self.library.setdefault(id(owner), (owner, set()))[1].add(name)

    def certain_effects(self) -> list[Effect]:
        """The effects of every call."""
        return [effect for effect in self.effects if effect.certain]

    def uncertain_effects(self) -> list[Effect]:
        """The effects that some calls may have."""
        return [effect for effect in (*self.effects, *self.of_arguments.values()) if not effect.certain]

    def add_argument_effects(self, effects: Sequence[Effect]) -> None:
        """Effects of functions that are given as arguments."""
        self.of_arguments |= {(effect.code, effect.offset): effect for effect in effects}

    def merge(self, scanned: Reads) -> None:
        """All that another scan found."""
        self.effects += scanned.effects
        self.entries = {**self.entries, **scanned.entries}  # exchanged as a whole: other threads may be reading them
        self.keepalive += scanned.keepalive
        self.callees |= scanned.callees
        self.custom_attributes |= scanned.custom_attributes
        self.compares_identity |= scanned.compares_identity
        self.queries_layout |= scanned.queries_layout
        self.calls_unknown |= scanned.calls_unknown
        self.scanned |= scanned.scanned
        self.skipped += scanned.skipped

    def widen(self) -> None:
        """Compares from now on what functions of other packages read, too, that captures came to."""
        if self.origin is not None:
            self.origin.widen()
        for number in range(self.widened, len(self.foreign.batches)):
            batch = self.foreign.reads(number, self.skipped)
            batch.entries = {path: read for path, read in batch.entries.items() if path not in self.entries}
            batch.effects = self.foreign.capture_ending(batch.effects)
            self.merge(batch)
        self.widened = len(self.foreign.batches)

    def facts(self) -> tuple[Any, ...]:
        with shared_allowance():
            return tuple([read.fact() for read in self.entries.values()])

    def signature(self) -> tuple[Any, ...]:
        """Which paths are read, how each is compared, and what may not be captured."""
        effects = tuple((effect.reason, effect.where) for effect in self.effects)
        return (*((path, read.kind) for path, read in self.entries.items()), *effects)

    def present_values(self) -> Iterator[tuple[str, Any]]:
        """The present values of the reads, by path, but for tensors."""
        for path, read in self.entries.items():
            if read.kind not in ("tensor", "names"):
                with suppress(Exception):
                    yield path, read.get()

    def by_path(self) -> dict[str, Any]:
        """The fact of each read, by its path."""
        return dict(zip(self.entries, self.facts(), strict=True))

    def changed(self, before: Mapping[str, Any]) -> str | None:
        """The name of what is no longer as it was when `by_path` said `before`."""
        facts_now = self.by_path()
        paths = (path for path, fact in before.items() if path in facts_now and fact != facts_now[path])
        return next((p.split(" in ")[0].split("@")[0] for p in paths), None)

    def has_object(self, value: Any) -> bool:
        """True if one of the reads is this very object."""
        return any(_yields_object(read, value) for read in self.entries.values())

    def with_arguments(self, args: Sequence[Any]) -> Reads:
        """And the tensors in objects and modules among the arguments, or whose methods are: by reference, as long as
        these live."""
        tensors, values = {}, [leaf for a in args for leaf in leaves(a)]
        for number, value in enumerate(values):
            value = value.__self__ if isinstance(value, types.MethodType) else value
            get = _weak_getter(value) if is_plain_object(value) else None
            for name, inner in _tensors_inside(value, get, DEPTH) if get is not None else ():
                path = f"argument {number}{name}"
                tensors[path] = Read(path, "tensor", inner)
        generators = tuple(_weak_getter(v) for v in values if isinstance(v, torch.Generator))
        if not (tensors or generators):
            return self
        return dataclasses.replace(self, entries={**self.entries, **tensors}, generators=generators, origin=self)

    def tensor_path(self, tensor: torch.Tensor) -> Read | None:
        """The read that yields this very tensor."""
        return next((r for r in self.entries.values() if r.kind == "tensor" and _yields_object(r, tensor)), None)


@dataclass
class ForeignFunctions:
    """Functions of other packages that captures of one class came to, by the capture, in the order of meeting.

    No scan looks into such a package, which may be large and of which a method uses little. What ran is little.
    """

    batches: list[tuple[ForeignFunction, ...]] = field(default_factory=list)
    failures: int = 0  # captures that changed something

    def capture_ending(self, effects: Sequence[Effect]) -> list[Effect]:
        """Those that end a capture: changes show in what has changed, until there were too many of such."""
        are_shown = self.failures < FAILURES
        return [e for e in effects if not is_question(e.reason) and not (are_shown and is_shown(e.reason))]

    def functions(self) -> Iterator[ForeignFunction]:
        """All of them."""
        return (function for batch in self.batches for function in batch)

    def knows(self, code: types.CodeType) -> bool:
        """True if an earlier capture came to this."""
        return any(function.code is code for function in self.functions())

    def reads(self, number: int, skipped: Sequence[tuple[types.FunctionType, _Root | None]]) -> Reads:
        """The reads of the functions of a batch, and of those of earlier batches that they call."""
        codes = {function.code for batch in self.batches[: number + 1] for function in batch}
        return scan_foreign_functions(self.batches[number], codes, skipped)


FAILURES = 3
"""Captures that functions of other packages may spoil by what they change; then such changes are not tried any more."""


class ForeignFunction(NamedTuple):
    """A function that ran: its code, the names around it, the class whose class method it is."""

    code: types.CodeType
    env: dict[str, Any]
    cls: type | None = None


def scan_foreign_functions(
    foreign: Sequence[ForeignFunction],
    codes: Collection[types.CodeType],
    skipped: Sequence[tuple[types.FunctionType, _Root | None]],
) -> Reads:
    """The reads of functions of other packages; of such, those of `codes` are looked into where they are called.

    skipped: functions that a scan came to and did not look into; one that runs has defaults, and what it closes over.
    """
    plan, reads = _Plan(codes), Reads()
    search = _Search(reads, plan, frozenset())
    for function, of in list(skipped):
        if function.__code__ in codes:
            plan.add(_Task(search, function, False, of))
    for code, env, cls in foreign:
        get, path = partial(_itself, cls), f"{cls.__qualname__}@{id(cls)}" if cls is not None else ""
        me = None if cls is None else _Root(path, get, _cannot_rebind, ("is", cls))
        try:
            _scan_code(_Names(code, env, {}, me), search, False)
        except Exception as error:
            reads.effects.append(_unfollowed_effect(error, code))
    plan.scan_all()
    _add_names(reads)
    _add_custom_attributes(reads)
    reads.keepalive += foreign
    return reads


def _weak_getter(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _yields_object(read: Read, value: Any) -> bool:
    try:
        return read.get() is value
    except Exception:
        return False


# ------------------------------------------------------------------ scans
def reads_of(function: types.FunctionType) -> Reads:
    """The reads of a function that is given as an argument.

    A closure is scanned anew, so that nothing keeps what it holds: a tensor of one call, say.
    """
    if not function.__closure__:
        return _scanned_once(function)
    cached = getattr(_known, "closures", None)
    if cached is None:
        return scan(function)
    if (id(function), function.__code__) not in cached:
        cached[id(function), function.__code__] = (function, scan(function))
    return cached[id(function), function.__code__][1]  # type: ignore[no-any-return]


_known = threading.local()


def each_closure_once() -> AbstractContextManager[None]:
    """Within the block this thread scans no closure twice: nothing changes what they read."""
    return _cached_within("closures")


def each_method_once() -> AbstractContextManager[None]:
    """Within the block this thread finds out once what the methods of a class do at every call."""
    return _cached_within("certain")


def _cached_within(cache: str) -> AbstractContextManager[None]:
    outer = getattr(_known, cache, None)
    return attribute_within(_known, cache, {} if outer is None else outer)


def certain_effects(*functions: Callable[..., Any]) -> list[Effect]:
    """The effects of these functions at every call, which a graph would lose."""
    cached = getattr(_known, "certain", None)
    if cached is None:
        return scan(*functions).certain_effects()
    key = tuple(map(id, functions))
    if key not in cached:
        cached[key] = (functions, scan(*functions).certain_effects())
    return cached[key][1]  # type: ignore[no-any-return]


_scanned: weakref.WeakKeyDictionary[types.FunctionType, tuple[types.CodeType, Reads]] = weakref.WeakKeyDictionary()
SCANNED = 4096
"""Functions of which scans are kept while they live: one argument may lead to hundreds of them."""


def _scanned_once(function: types.FunctionType) -> Reads:
    code, cached = _scanned.get(function, (None, None))
    if cached is None or code is not function.__code__:
        cached = scan(function)
        _make_room(_scanned)
        _scanned[function] = function.__code__, cached
    return cached


def _make_room(scans: weakref.WeakKeyDictionary[Any, Any]) -> None:
    if len(scans) >= SCANNED:
        scans.clear()


def reads_of_class(cls: type, functions: Sequence[types.FunctionType]) -> Reads | None:
    """The reads of the functions in a class's own body, found by one scan of all; None where that reaches too many.

    The scan is kept while the class lives. Where methods close over something it would keep what they hold, and is made
    anew; but for `super()` in a class that its module holds, which lives as long as that does.
    """
    body = tuple((f, f.__code__) for f in functions)
    scanned_body, reads = _bodies.get(cls, (None, None))
    if reads is None or scanned_body != body:
        reads = scan(*functions)
        is_held = instance_dict(sys.modules.get(module_of(cls))).get(cls.__name__) is cls
        if all(not f.__closure__ or (is_held and _holds_its_class_alone(f, cls)) for f in functions):
            _make_room(_bodies)
            _bodies[cls] = body, reads
    return reads if reads.is_whole else None


_bodies: weakref.WeakKeyDictionary[type, tuple[Any, Reads]] = weakref.WeakKeyDictionary()


def _holds_its_class_alone(function: types.FunctionType, cls: type) -> bool:
    """True if the closure of a method is no more than the cell of `super()`."""
    return function.__code__.co_freevars == ("__class__",) and any(value is cls for value in closed_over(function))


def scan(*functions: Callable[..., Any], foreign: ForeignFunctions | None = None) -> Reads:
    """The reads of `functions` and of every helper that they call by a name that can be resolved.

    It calls nothing and raises nothing: what cannot be followed is an effect. foreign: functions of other packages that
    captures came to, which are looked into as well.
    """
    plan, reads = _Plan(), Reads(foreign=foreign if foreign is not None else ForeignFunctions())
    top = _Search(reads, plan, homes_of(functions))
    for function in functions:
        top.add_source(function)
    plan.scan_all()
    # Names of libraries and attributes of tensors are read together, once all code was looked at.
    reads.is_whole, reads.functions_scanned = plan.is_whole, len(plan.planned)
    _add_names(reads)
    _add_custom_attributes(reads)
    reads.widen()
    return reads


FUNCTIONS = 1000
"""Functions that one scan looks at; a method that can reach more is not captured."""


@dataclass(frozen=True)
class _Task:
    """A function to look at: for whom, whether it is a method itself, and what its `self` stands for."""

    search: _Search
    function: types.FunctionType
    is_method: bool
    me: _Root | None


class _Plan:
    """The tasks still to be scanned: a list, since code may call code to any depth.

    foreign_codes: code of other packages that is scanned as the user's own; None where a scan begins with the user's.
    """

    def __init__(self, foreign_codes: Collection[types.CodeType] | None = None) -> None:
        self.foreign_codes, self.is_beyond = foreign_codes or (), foreign_codes is not None
        self.waiting: collections.deque[_Task] = collections.deque()
        self.planned: set[Any] = set()
        self.children: list[tuple[Reads, Reads, Callable[[Reads], bool]]] = []
        self.classes: dict[type, Reads] = {}  # nested Functions, each looked at once
        self.is_whole = True
        self.owners: dict[int, tuple[Any, _Root]] = {}  # how the objects of bound methods were found first

    def add(self, task: _Task) -> None:
        function, me = task.function, task.me
        key = (id(task.search.reads), id(function), function.__code__, me and id(me.value()))
        if key not in self.planned:
            self.planned.add(key)
            self.waiting.append(task)

    def scan_all(self) -> None:
        """Look at all of it; then the reads of nested classes are added to those of who calls them."""
        while self.waiting:
            task = self.waiting.popleft()
            reads, code = task.search.reads, task.function.__code__
            if len(self.planned) - len(self.waiting) > FUNCTIONS:
                location = f"{code.co_filename}:{code.co_firstlineno}"
                reads.effects.append(Effect(f"it can reach more than {FUNCTIONS} functions", location))
                self.is_whole = False
                break
            try:
                _scan_function(task)
            except Exception as error:  # whatever the objects around a method do when they are looked at
                reads.effects.append(_unfollowed_effect(error, code))
        for parent, child, fits in reversed(self.children):
            if parent is not child and fits(child):
                parent.merge(child)


def _unfollowed_effect(error: Exception, code: types.CodeType) -> Effect:
    location = f"{code.co_filename}:{code.co_firstlineno}"
    return Effect(f"what it reads cannot be followed: {type(error).__name__}", location)


@dataclass(frozen=True)
class _Search:
    """The part of a plan that finds what is read for one caller, from code of these packages."""

    reads: Reads
    plan: _Plan
    homes: frozenset[str]

    def add_source(self, function: Any) -> None:
        """A method, or a functools.partial of one with whatever was bound to it."""
        while is_a(function, functools.partial):
            for name in ("args", "keywords"):
                path, get = f"{name} of partial@{id(function)}", partial(getattr, function, name)
                _record(path, get, get(), self)
            function = function.func
        self.add(function, is_method=True)

    def add(self, value: Any, path: str = "", get: Callable[[], Any] | None = None, is_method: bool = False) -> None:
        """A function, or what is made around one: a bound method, `functools.lru_cache`."""
        me = None
        if is_a(value, types.MethodType):
            fetch = get or partial(_itself, value)
            me = _Root(f"{path or value.__func__.__qualname__}.__self__", lambda: fetch().__self__, _cannot_rebind)
            me = self.plan.owners.setdefault(id(value.__self__), (value.__self__, me))[1]
            value = value.__func__
        if is_cached(value):
            value = instance_dict(value).get("__wrapped__")
        if is_a(value, types.FunctionType):
            self.plan.add(_Task(self, value, is_method, me))

    def nested_class(self, cls: type, homes: frozenset[str], fits: Callable[[Reads], bool]) -> _Search | None:
        """A search for a nested class, whose reads join these in the end, if they fit; None where it is known."""
        earlier = self.plan.classes.get(cls)
        reads = earlier or self.plan.classes.setdefault(cls, Reads(library=self.reads.library))
        self.plan.children.append((self.reads, reads, fits))
        return None if earlier is not None else _Search(reads, self.plan, self.homes | homes)


def _itself(value: Any) -> Any:
    return value


def _cannot_rebind(value: Any) -> None:
    """Puts nothing back: the value has no place of its own."""


def _add_names(reads: Reads) -> None:
    """One read for all names of a library's module: of many, that is faster than one for each."""
    for owner, names in reads.library.values():
        label, ordered = getattr(owner, "__name__", "?"), sorted(names)
        first, get = ordered[0], operator.attrgetter(*ordered, ordered[0])
        path = f"{label}.{first}" if len(ordered) == 1 else f"{label}.({' '.join(ordered)})"
        reads.entries[path] = Read(path, "names", partial(get, owner), (owner, *ordered))


def _add_custom_attributes(reads: Reads) -> None:
    """Adds the custom attributes of the tensors that are read, of those that the code asks for."""
    for read in [r for r in reads.entries.values() if r.kind == "tensor"] if reads.custom_attributes else ():
        path = f"what is put on {read.path}"
        get = partial(_custom_attribute_values, read.get, frozenset(reads.custom_attributes))
        reads.entries[path] = Read(path, "value", get)


def _custom_attribute_values(get: Callable[[], Any], asked_names: frozenset[str]) -> dict[str, Any]:
    tensor = get()
    own = instance_dict(tensor) if is_tensor(tensor) else {}
    return {name: value for name, value in own.items() if name in asked_names or ANY in asked_names}


def backward_effects(method: Callable[..., Any]) -> list[Effect]:
    """The effects of a backward on ctx that its next run would see, and its questions that differ between runs."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is None or not code.co_argcount:
        return []
    effects, line = [], code.co_firstlineno
    instructions = instructions_of(code)
    for at, instruction in enumerate(instructions):
        line = line_of(instruction) or line
        if (why := _change_of_ctx(code, instructions[: at + 1])) is not None:
            always = at < straight_count(instructions)
            effects.append(Effect(why, f"{code.co_filename}:{line}", code, instruction.offset, always))
    return effects


def _change_of_ctx(code: types.CodeType, executed: Sequence[dis.Instruction]) -> str | None:
    """The reason why the last of `executed` is seen by the next run: `ctx.k = ...`, `ctx.table[i] = ...`,
    `ctx.seen.append(...)`."""
    last, ctx = executed[-1], code.co_varnames[0]
    if last.argval == "is_grad_enabled":
        return "it asks for the grad mode"
    if last.opname in ATTRIBUTE:
        if last.argval not in _CHANGES - {"add", "sort"}:  # which tensors have as well
            return None
        owner, steps = _owner(code, executed[:-1])
    elif last.opname in _STORES:
        owner, steps = _owner(code, _before_store(executed, code))
    else:
        return None
    stored = last.opname in ("STORE_ATTR", "DELETE_ATTR") or (steps and steps[-1] != "saved_tensors")
    is_ctx = owner is not None and _loads(owner, ctx)
    if (is_ctx and stored) or _is_augmented(ctx, last, executed):
        return f"it changes what is on `{ctx}`, which its next run reads"
    return None


def _owner(code: types.CodeType, before: Sequence[dis.Instruction]) -> tuple[dis.Instruction | None, list[Any]]:
    """The load of the name that an object is a part of, and the steps from the object back: `a` of `a.b[i]`, [0, b]."""
    steps: list[Any] = []
    while before and (before[-1].opname in ATTRIBUTE or before[-1].opname == "BINARY_SUBSCR"):
        last = before[-1]
        first = operand_before(code, last.offset) if last.opname == "BINARY_SUBSCR" else last.offset  # the index
        before = [i for i in before if i.offset < first]
        steps.append(last.argval)
    return (before[-1] if before else None), steps


def _loads(instruction: dis.Instruction, name: str) -> bool:
    return instruction.opname.startswith("LOAD_FAST") and instruction.argval == name


def _is_augmented(ctx: str, store: dis.Instruction, executed: Sequence[dis.Instruction]) -> bool:
    """True if a store ends `ctx.k += ...`: the object was loaded and copied before its attribute was read."""
    triples = zip(executed, executed[1:], executed[2:], strict=False)
    return store.opname == "STORE_ATTR" and any(
        _loads(a, ctx) and b.opname.startswith(("COPY", "DUP")) and c.opname in ATTRIBUTE and c.argval == store.argval
        for a, b, c in triples
    )


def _scan_function(task: _Task) -> None:
    """Scans a function; of one of a library, the function that it wraps (`once_differentiable`, `custom_fwd`)."""
    function, search = task.function, task.search
    code, reads = function.__code__, search.reads
    reads.keepalive.append(function)
    cells = cells_of(function)
    if is_library(function) or (is_foreign(function, search.homes) and code not in search.plan.foreign_codes):
        reads.skipped.append((function, task.me))
        _scan_wrapped(function, cells, search)
        search.add(instance_dict(function).get("__wrapped__"))  # of a class that is compiled with pytree=True, say
        return
    _read_itself(function, reads)
    names = _Names(code, function.__globals__, cells, task.me)
    _scan_code(names, search, task.is_method)


def _scan_wrapped(function: types.FunctionType, cells: dict[str, Any], search: _Search) -> None:
    for name, cell in cells.items():
        get = _attribute(lambda cell=cell: cell, "cell_contents")  # type: ignore[misc]
        try:
            value = get()
        except ValueError:
            continue
        if is_a(value, types.FunctionType | types.MethodType | functools.partial):
            _record(f"closure {name}@{id(cell)}", get, value, search, ("cell", cell))
    if not cells and function.__code__.co_filename.endswith(_SEEN_THROUGH):
        _scan_torchs(function, search.reads)


_SEEN_THROUGH = ("torch/nn/functional.py", "torch/functional.py")


def _scan_torchs(function: Any, reads: Reads) -> None:
    """The operators that a function of torch's own calls in turn: user code may have replaced one of those."""
    env = function.__globals__
    for load, attribute_ in pairwise(instructions_of(function.__code__)):
        owner = env.get(load.argval) if load.opname == "LOAD_GLOBAL" else None
        name = attribute_.argval if attribute_.opname in ATTRIBUTE else None
        if isinstance(owner, types.ModuleType) and isinstance(getattr(owner, name or "", None), _OPERATORS):
            reads.add_library_name(owner, str(name))
        elif load.opname == "LOAD_FAST" and name is not None:
            _name_method(name, reads)


_OPERATORS = (types.BuiltinFunctionType, types.FunctionType)


def _name_method(name: str, reads: Reads) -> None:
    """A method of that name is called of something: if it is a tensor, of torch's own."""
    method = getattr(torch.Tensor, name, None)
    if callable(method) and not isinstance(method, type):
        reads.add_library_name(torch.Tensor, name)


def _read_itself(function: types.FunctionType, reads: Reads) -> None:
    """Its code and its defaults can be exchanged, too."""
    path = f"code of {function.__qualname__}@{id(function)}"
    reads.entries[path] = Read(path, "function", lambda: function, ("is", function))
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    place = _Place(function.__code__, function.__code__.co_firstlineno, instructions_of(function.__code__)[0].offset)
    reads.effects += [place.effect(why) for value in defaults if (why := why_moving(value)) is not None]
    for name in ("__defaults__", "__kwdefaults__"):
        get = _attribute(lambda: function, name)
        for inner, fetch in _tensors_inside(get(), get, DEPTH):
            tensor_path = f"{name} of {function.__qualname__}@{id(function)}{inner}"
            reads.entries[tensor_path] = Read(tensor_path, "tensor", fetch)


class _Place(NamedTuple):
    """An instruction: where it stands, and whether it runs at every call of the method."""

    code: types.CodeType
    line: int
    offset: int = -1
    always: bool = False

    def effect(self, reason: str, subject: str | None = None) -> Effect:
        """An effect there. subject: the name of what has to be a tensor, so that it is one."""
        location = f"{self.code.co_filename}:{self.line}"
        return Effect(reason, location, self.code, self.offset, self.always and subject is None, subject)

    def is_of_super(self) -> bool:
        """True if the loaded value is one of the two that `super` is called with."""
        before = [i for i in instructions_of(self.code) if i.offset < self.offset]
        return any(i.opname == "LOAD_GLOBAL" and i.argval == "super" for i in before[-2:])


_LOOK_BACK = 32
"""Instructions before one that may tell what it is about; of a store, all."""


def _scan_code(names: _Names, search: _Search, is_method: bool) -> None:
    code, reads = names.code, search.reads
    reads.scanned.add(code)
    instructions = instructions_of(code)
    certain = straight_count(instructions) if is_method else 0
    followed, by_name = 0, False
    for at, line, instruction in telling_instructions(code):
        if instruction.opname.startswith("LOAD_FAST") and not names.bound:
            continue
        first = 0 if instruction.opname.startswith(_CHANGING) else max(0, at - _LOOK_BACK)
        executed = instructions[first : at + 1]
        reads.queries_layout |= isinstance(instruction.argval, str) and instruction.argval in LAYOUT
        by_name |= instruction.argval in ("getattr", "hasattr")
        place = _Place(code, line, instruction.offset, at < certain)
        # What a graph would lose comes first: it stands whether or not the object can be followed.
        reason = _effect(executed, names.env) or _outside_write(executed, names) or names.note_instruction(executed)
        if reason is not None:
            reads.effects.append(place.effect(*(reason if isinstance(reason, tuple) else (reason,))))
        # Then what is loaded from outside, with its attributes; of a local name only questions are noted.
        root = names.root(instruction)
        if instruction.argval == "super" and (me := names.self_root()) is not None:
            _Link(me, me.value()).record(search, place)
        if root is not None:
            followed = at + _follow(root, instructions[at + 1 :], search, place)
        elif at > followed:
            _note_question(executed, reads, by_name)
    for nested in code.co_consts:
        if isinstance(nested, types.CodeType):
            _scan_code(names.within(nested), search, False)


_CHANGING = ("STORE_", "DELETE_")


def _note_question(executed: Sequence[dis.Instruction], reads: Reads, by_name: bool) -> None:
    """Notes a question about something that is known at the call alone: of a tensor, for an attribute that the user
    may have put on it."""
    last, before = executed[-1], executed[-2]
    if last.opname in ("IS_OP", "CONTAINS_OP") and before.opname != "LOAD_CONST":
        reads.compares_identity = True
    if last.opname in ATTRIBUTE:
        _name_method(last.argval, reads)
        if last.argval == "__dict__":
            reads.custom_attributes.add(ANY)
        elif last.argval not in _USUAL and not (before.opname.startswith("LOAD_FAST") and before.argval == "ctx"):
            reads.custom_attributes.add(last.argval)
    elif last.opname == "LOAD_GLOBAL" and last.argval in ("vars", "dir"):
        reads.custom_attributes.add(ANY)
    elif last.opname == "LOAD_CONST" and isinstance(last.argval, str) and last.argval not in _USUAL:
        if last.argval.isidentifier() and by_name:
            reads.custom_attributes.add(last.argval)


ANY = "*"
"""In `Reads.custom_attributes`: all that user code may have put on a tensor is asked for."""
_USUAL = {n for kind in (torch.Tensor, list, dict, str, tuple, set, int, float, range) for n in dir(kind)}
"""Attributes that a tensor has, or what no tensor is."""


class _Names:
    """The values of the names in a code: globals, cells, `self` of a bound method, and what the code imports.

    `import m`, `from m import n`, `import a.b as c`
    """

    def __init__(
        self, code: types.CodeType, env: dict[str, Any], cells: dict[str, Any], me: _Root | None = None
    ) -> None:
        self.code, self.env, self.cells = code, env, cells
        self.bound: dict[str, _Root] = {}
        self.imported_from: _Root | None = None  # where names are taken from
        self.imported: _Root | None = None  # what the next store binds
        if me is not None and code.co_argcount and not _rebinds(code, code.co_varnames[0]):
            self.bound[code.co_varnames[0]] = me

    def within(self, code: types.CodeType) -> _Names:
        """The names in a function or a comprehension within the code."""
        inner = _Names(code, self.env, self.cells)
        inner.bound = {name: root for name, root in self.bound.items() if name in code.co_freevars}
        return inner

    def note_instruction(self, executed: Sequence[dis.Instruction]) -> str | None:
        """Follows an import; a reason where it cannot."""
        last = executed[-1]
        if last.opname == "IMPORT_NAME":
            return self._begin_import(last.argval, executed[-3].argval, bool(executed[-2].argval))
        if self.imported is None:
            return None
        if last.opname == "IMPORT_FROM":
            self.imported = (self.imported_from or self.imported).part(last.argval, _cannot_rebind)
        elif last.opname.startswith("STORE_"):
            self.bound[last.argval] = self.imported
            self.imported = self.imported_from
        elif last.opname == "POP_TOP" and self.imported_from is not None:
            self.imported = self.imported_from = None
        return None

    def _begin_import(self, name: str, level: int, takes_names: bool) -> str | None:
        package = self.env.get("__package__") or ""
        try:
            path = importlib.util.resolve_name("." * level + name, package) if level else name
            importlib.import_module(path)
        except Exception:
            return f"it imports `{name}`"
        module = path if takes_names else path.split(".")[0]
        steps = ("of", sys.modules, module)
        self.imported = _Root(f"import {module}", lambda: sys.modules[module], _cannot_rebind, steps)
        self.imported_from = self.imported if takes_names else None
        return None

    def self_root(self) -> _Root | None:
        """The object that `super()` yields, beginning with another class."""
        return self.bound.get(self.code.co_varnames[0]) if self.code.co_argcount else None

    def root(self, instruction: dis.Instruction) -> _Root | None:
        """The object from outside that an instruction loads."""
        name = instruction.argval
        if instruction.opname.startswith("LOAD_FAST") or (instruction.opname == "LOAD_DEREF" and name in self.bound):
            return self.bound.get(name)
        return _root(instruction, self.env, self.cells)


def _rebinds(code: types.CodeType, name: str) -> bool:
    """True if a code, or one within it, gives a name another value."""
    own = any(i.argval == name and i.opname.startswith(_CHANGING) for i in instructions_of(code))
    return own or any(_rebinds(c, name) for c in code.co_consts if isinstance(c, types.CodeType))


def _effect(executed: Sequence[dis.Instruction], env: dict[str, Any]) -> str | tuple[str, str | None] | None:
    """The reason why the last of `executed` is an effect that a graph would lose; of which local name, if it is a
    tensor."""
    instruction, name = executed[-1], executed[-1].argval
    about = executed[-2].argval if len(executed) > 1 and executed[-2].opname.startswith("LOAD_FAST") else None
    if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
        return f"it assigns the global `{name}`"
    if instruction.opname == "STORE_ATTR" and name in ("data", "grad"):
        return f"it assigns `.{name}` of a tensor", about
    if instruction.opname in ATTRIBUTE and name in HOOKS:
        return "it registers a hook on a tensor", about
    if instruction.opname in ATTRIBUTE and name in NOT_IN_A_GRAPH:
        return f"it reads `.{name}` of a tensor", about
    if instruction.opname in ATTRIBUTE and name in OF_GENERATORS and (about is not None or _is_part_of_local(executed)):
        return _STATE, about
    if instruction.opname == "LOAD_GLOBAL" and name in IMPURE_BUILTINS and name not in env and hasattr(builtins, name):
        return f"it calls `{name}`"
    return None


def _is_part_of_local(executed: Sequence[dis.Instruction]) -> bool:
    """True if the last of `executed` is an attribute of an attribute of a local name: `ctx.rng.manual_seed`."""
    before = executed[:-1]
    while before and before[-1].opname in ATTRIBUTE:
        before = before[:-1]
    return len(executed) - len(before) > 1 and bool(before) and before[-1].opname.startswith("LOAD_FAST")


def _outside_write(executed: Sequence[dis.Instruction], names: _Names) -> str | None:
    """The reason why the last of `executed` changes something outside the function: `nonlocal k`, `table[i] = ...`."""
    last = executed[-1]
    if last.opname in ("STORE_DEREF", "DELETE_DEREF"):
        is_nonlocal = last.argval in names.cells and last.argval in names.code.co_freevars
        return f"it assigns the nonlocal `{last.argval}`" if is_nonlocal else None
    if last.opname not in _STORES:
        return None
    owner, steps = _owner(names.code, _before_store(executed, names.code))
    if owner is None or (root := names.root(owner)) is None or _is_of_tensors(root.value(), bool(steps)):
        return None
    return f"it changes `{owner.argval}`, which is not its own"


_STORES = {"STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR"}


def _is_of_tensors(value: Any, parts: bool) -> bool:
    """True if a store into it, or into its parts, is one into a tensor: an operation of torch's."""
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return is_tensor(value) or (parts and any(map(is_tensor, items)))


def _before_store(executed: Sequence[dis.Instruction], code: types.CodeType) -> Sequence[dis.Instruction]:
    """The instructions that computed the object to which the last of `executed` stores; `x.n += 1` loads it once, for
    reading as well."""
    last, before = executed[-1], executed[:-1]
    if before and before[-1].opname == "SWAP":
        before = _before_augmented(last, before)
    if last.opname in ("STORE_ATTR", "DELETE_ATTR") or not before:
        return before
    first = operand_before(code, executed[len(before)].offset)  # the index
    return [i for i in before if i.offset < first]


def _before_augmented(last: dis.Instruction, before: Sequence[dis.Instruction]) -> Sequence[dis.Instruction]:
    width, read = (1, "LOAD_ATTR") if last.opname == "STORE_ATTR" else (2, "BINARY_SUBSCR")
    for i in range(len(before) - width - 1, 0, -1):
        copied = all(c.opname == "COPY" for c in before[i : i + width])
        if copied and before[i + width].opname == read and (width == 2 or before[i + 1].argval == last.argval):
            return before[:i]
    return before


class _Root(NamedTuple):
    """The way to an object around the code: its path, and how what stands there is fetched and replaced.

    steps: see Read; () where it is not found by steps.
    """

    path: str
    get: Callable[[], Any]
    replace: Callable[[Any], None]
    steps: tuple[Any, ...] = ()

    def value(self) -> Any:
        """The object, ABSENT where there is none: an empty cell, a name bound later."""
        try:
            return self.get()
        except Exception:
            return ABSENT

    def part(self, name: str, replace: Callable[[Any], None]) -> _Root:
        """The way to an attribute of the object."""
        steps = (*self.steps, name) if self.steps else ()
        return _Root(f"{self.path}.{name}", _attribute(self.get, name), replace, steps)

    def read(self, kind: str) -> Read:
        """The object as a read of this kind."""
        return Read(self.path, kind, self.get, self.steps)


def _root(instruction: dis.Instruction, env: dict[str, Any], cells: dict[str, Any]) -> _Root | None:
    name = instruction.argval
    if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        scope = f"in {env.get('__name__', '?')}@{id(env)}"
        if name not in env and hasattr(builtins, name):
            get = lambda: env[name] if name in env else getattr(builtins, name)  # noqa: E731
            return _Root(f"builtin {name} {scope}", get, partial(env.__setitem__, name), ("builtin", env, name))
        return _Root(f"global {name} {scope}", lambda: env[name], partial(env.__setitem__, name), ("of", env, name))
    if instruction.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF") and name in cells:
        cell = cells[name]
        replace = partial(setattr, cell, "cell_contents")
        return _Root(f"closure {name}@{id(cell)}", lambda: cell.cell_contents, replace, ("cell", cell))
    return None


def _follow(root: _Root, instructions: Sequence[dis.Instruction], search: _Search, place: _Place) -> int:
    """Follow `a.b.c` as long as attributes are loaded, then record what stands at the end; how many were loaded."""
    reads, value = search.reads, root.value()
    if value is ABSENT:  # a later call may put it there
        reads.entries.setdefault(root.path, root.read("identity"))
        return 0
    at, loaded = _Link(root, value), 0
    if root.steps[:1] == ("builtin",):
        reads.entries.setdefault(root.path, root.read("builtin"))
        return 0
    for instruction in instructions:
        if instruction.opname not in ATTRIBUTE:
            break
        if at.is_of_a_library():
            reads.entries.setdefault(root.path, root.read("identity"))
            return loaded + _follow_library(at.value, instructions[loaded:], search, place)
        further = at.then(instruction.argval)
        if further is None:
            break
        at, loaded = further, loaded + 1
    at.record(search, place)
    return loaded


class _Link(NamedTuple):
    """An object that a chain of names leads to, the way to it, and the object before it."""

    way: _Root
    value: Any
    owner: Any = None

    def is_of_a_library(self) -> bool:
        of_class = is_a(self.value, type) and is_library(self.value)
        return _is_library_module(self.value) or (of_class and not _is_function_class(self.value))

    def then(self, name: str) -> _Link | None:
        """The value under a name of it; None where that would have to be computed."""
        if is_tensor(self.value) or (value := attribute(self.value, name)) is ABSENT:
            return None
        return _Link(self.way.part(name, _replacing(self.value, name)), value, self.value)

    def record(self, search: _Search, place: _Place) -> None:
        value, owner, (path, get, replace, steps) = self.value, self.owner, self.way
        if (why := self._effect(search.homes)) is not None:
            search.reads.effects.append(place.effect(why))
        is_part = owner is not None and is_compared(owner) and not is_a(owner, type)
        of_content = is_part and is_a(value, types.BuiltinMethodType)
        if of_content or is_a(value, types.MethodWrapperType):  # which is made anew at every look
            _record(f"{path}.__self__", lambda: get().__self__, owner, search, place=place)
            return
        _record(path, get, value, search, steps, place)
        if is_a(value, types.MethodType) and _has_state(owner) and not _is_scanned(value, search.homes):
            _record(f"{path}.__self__", lambda: get().__self__, owner, search, place=place)
        if is_compiled(value):
            search.reads.callees.setdefault(path, Callee(value.__name__, get, replace))

    def _effect(self, homes: frozenset[str]) -> str | None:
        value, owner = self.value, self.owner
        if (why := why_impure(value)) is not None:
            return why
        changes = is_a(value, types.BuiltinMethodType) and value.__name__ in _CHANGES
        if changes and is_a(owner, _CONTAINERS):
            return f"it calls `{value.__name__}` of a {type(owner).__name__} from outside"
        if is_a(owner, torch.Generator) and getattr(value, "__name__", "") in OF_GENERATORS:
            return _STATE
        if (why := why_moving(value) or why_moving(owner)) is not None:
            return why
        container = owner if is_a(value, types.MethodType | types.BuiltinMethodType) else value
        if _is_unseen_container(container):
            return f"it uses a {type(container).__name__} from outside, whose content is not compared"
        if is_a(value, types.MethodType) and is_cached(value.__func__):
            return f"it calls `{value.__func__.__name__}`, which keeps what it returns for each object"
        is_users = is_a(value, types.ModuleType) and not _is_library_module(value) and not is_foreign(value, homes)
        return f"it hands on the module `{instance_dict(value).get('__name__')}`" if is_users else None


def _replacing(owner: Any, name: str) -> Callable[[Any], None]:
    """Sets what stands under a name of an object, where it stands: of a class, or of the object itself."""
    kinds = owner.__mro__ if is_a(owner, type) else () if name in instance_dict(owner) else type(owner).__mro__
    place = next((kind for kind in kinds if name in vars(kind)), owner)
    raw: Any = vars(place).get(name) if place in kinds else None  # `__name__` is of its metaclass
    if not is_a(raw, staticmethod):
        return partial(setattr, place, name)
    return lambda value: setattr(place, name, raw if value is raw.__func__ else staticmethod(value))


def _follow_library(value: Any, instructions: Sequence[dis.Instruction], search: _Search, place: _Place) -> int:
    """A name within a library: what stands there, and what it tells of the process."""
    owner, name, loaded, reads = value, "", 0, search.reads
    for loaded, instruction in enumerate(instructions):
        if instruction.opname not in ATTRIBUTE or not is_a(value, types.ModuleType | type):
            break
        owner, name = value, instruction.argval
        value = attribute(owner, name)
        if value is ABSENT:
            return loaded
    if (why := why_impure(value) or why_impure(owner) or effect_of(owner, name, value)) is not None:
        reads.effects.append(place.effect(why))
    reads.add_library_name(owner, name)
    path, get = f"{getattr(owner, '__name__', '?')}.{name}", _attribute(lambda: owner, name)
    if (answer := answer_of(owner, name, value)) is not None:
        reads.entries[f"{path}()"] = Read(f"{path}()", "value", answer)
    if is_a(value, types.FunctionType) and is_library(value):
        search.add(value)
    elif not is_library(value) and not is_a(value, SCALARS) and callable(value):
        _record(path, get, value, search, ("is", owner, name), place)
    return loaded


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
    search: _Search,
    steps: tuple[Any, ...] = (),
    place: _Place | None = None,
) -> None:
    reads = search.reads
    reads.calls_unknown |= is_of_unknown(value)
    if value is sys.modules and search.plan.is_beyond:  # packages ask for each other: what is imported stays as it is
        return
    if path in reads.entries:
        return
    if is_a(value, types.ModuleType) and not (_is_library_module(value) or is_foreign(value, search.homes)):
        return
    if is_tensor(value):
        reads.entries[path] = Read(path, "tensor", get, steps)
    elif _is_function_class(value) or _is_function_class(bound_to(value)):
        _record_function_class(path, get, value, search, steps)
        search.add(value, path, get)  # a class method, which reads what it likes
        if is_a(value, type) and (place is None or not place.is_of_super()):
            _record_data_of_class(path, get, value, search, place)
    elif is_a(value, _CODE) or not is_compared(value) or (is_a(value, type) and is_foreign(value, search.homes)):
        reads.entries[path] = Read(path, "identity", get, steps)
        search.add(value, path, get)
        if _is_library_object(value):  # an optimiser, a schedule, a distribution
            get_state: Callable[[], Any] = lambda: dict(instance_dict(get()))  # noqa: E731
            _record(f"what {path} holds", get_state, get_state(), search, place=place)
    elif (why := why_too_much(value)) is not None:
        reason = f"it reads `{_readable_path(path)}`, which {why}"
        reads.effects.append(Effect(reason, "unknown") if place is None else place.effect(reason))
    else:
        _record_value(path, get, value, search, steps)
    _record_behind(path, get, value, search)


_CODE = (types.FunctionType, types.MethodType, types.ModuleType)


def _record_behind(path: str, get: Callable[[], Any], value: Any, search: _Search) -> None:
    """Records the objects that a call of the value, or a question about it, reaches: a weak reference, a function by
    types, an abstract class."""
    if is_a(value, weakref.ref):
        _record(f"{path}()", lambda: get()(), value(), search)
    elif is_a(value, types.FunctionType) and is_library(value) and "registry" in instance_dict(value):
        _record(f"{path}.registry", _attribute(get, "registry"), value.registry, search)
    elif is_a(value, abc.ABCMeta) and not is_library(value):
        name = "classes that were registered"
        search.reads.entries[name] = Read(name, "value", abc.get_cache_token)


def _has_state(owner: Any) -> bool:
    return not is_a(owner, type) and (is_compared(owner) or _is_library_object(owner))


def _is_library_object(value: Any) -> bool:
    """True if a value is an object of a library's class in Python, which has attributes to compare and is no
    function."""
    odd = is_a(value, type | types.ModuleType | types.FunctionType) or is_tensor(value) or callable(value)
    return not odd and is_library(type(value)) and has_instance_dict(type(value))


def _is_scanned(function: Any, homes: frozenset[str]) -> bool:
    return not is_library(function) and not is_foreign(function, homes)


def _record_value(
    path: str, get: Callable[[], Any], value: Any, search: _Search, steps: tuple[Any, ...]
) -> None:
    """Records a value that is compared by content: the tensors within become inputs, the methods of its class are
    read."""
    reads = search.reads
    reads.entries[path] = Read(path, "value", get, steps)
    for name, inner in _tensors_inside(value, get, DEPTH):
        reads.entries[path + name] = Read(path + name, "tensor", inner)
    if is_a(value, type):
        _scan_class(value, search)
    if not is_a(value, SCALARS):
        _scan_class(type(value), search)  # of a class, too: its metaclass


def is_compared(value: Any) -> bool:
    """True if a value from outside is compared by content at every call."""
    kinds = (*SCALARS, list, tuple, dict, set, frozenset, collections.deque, functools.partial, *_MEMORY)
    is_users = is_a(value, type) and not is_library(value)
    return is_a(value, kinds) or isinstance(value, Memory) or is_plain_object(value) or is_users


_MEMORY = (bytearray, array.array, types.MappingProxyType)


def _is_unseen_container(value: Any) -> bool:
    """True if a value holds what may be exchanged, and nothing shows that: a ChainMap, a WeakKeyDictionary, a
    memoryview."""
    kind = type(value)
    is_one = hasattr(kind, "__setitem__") or hasattr(kind, "discard")
    return is_one and not (is_a(value, type) or is_tensor(value) or is_compared(value) or is_a(value, torch.nn.Module))


def _readable_path(path: str) -> str:
    return path.split(" in ")[0].split("@")[0].removeprefix("global ").removeprefix("closure ")


def _scan_class(cls: type, search: _Search) -> None:
    """Records the reads of the methods of a user's class, and the effects of those that are called."""
    for function in functions_of_class(cls) if not is_foreign(cls, search.homes) else ():
        search.add(function)


def draws_of(code: types.CodeType, env: dict[str, Any]) -> list[Effect]:
    """Effects of a function of another package that no graph can hold: it draws numbers, looks at a clock, prints."""
    names, effects, line = _Names(code, env, {}), list[Effect](), code.co_firstlineno
    instructions = instructions_of(code)
    for at, instruction in enumerate(instructions):
        line = line_of(instruction) or line
        root = names.root(instruction)
        if root is not None and (why := _draw_reason(root, instructions[at + 1 : at + 4])) is not None:
            effects.append(_Place(code, line, instruction.offset).effect(why))
    return effects


def _draw_reason(root: _Root, instructions: Sequence[dis.Instruction]) -> str | None:
    """The reason why the object at the end of a chain of names may not be part of a graph, wherever it is met."""
    value = root.value()
    if root.steps[:1] == ("builtin",):
        name = root.steps[2]
        return f"it calls `{name}`" if name in ("print", "input", "open") else None
    for instruction in (None, *instructions):
        if instruction is not None:
            if instruction.opname not in ATTRIBUTE or (value := attribute(value, instruction.argval)) is ABSENT:
                return None
        if not is_a(value, types.ModuleType) and (why := why_impure(value)) is not None:
            return why if any(f"`{module}" in why for module in DRAWN) else None
    return None


# ------------------------------------------------------------------ other Functions
def _is_function_class(value: Any) -> bool:
    return is_a(value, type) and issubclass(value, torch.autograd.Function)


def _record_function_class(
    path: str, get: Callable[[], Any], value: Any, search: _Search, steps: tuple[Any, ...]
) -> None:
    """A Function that is called: which one it is, what its methods are, and what they read; its effects are its own."""
    search.reads.entries[path] = Read(path, "identity", get, steps if is_a(value, type) else ())
    cls = value if is_a(value, type) else value.__self__
    cls = getattr(cls, "_fusegrad_user_class", None) or cls
    own_methods = methods(cls)

    def fits(nested: Reads) -> bool:  # else it runs as written, and reads for itself
        declared = declarations(cls, None).values()
        return not nested.certain_effects() and not any(d.value is False for d in declared)

    if (inner := search.nested_class(cls, homes_of(own_methods.values()), fits)) is None:
        return
    for name, method in own_methods.items():
        method_path, fetch = f"{name} of {cls.__qualname__}@{id(cls)}", _attribute(lambda: cls, name)
        inner.reads.entries[method_path] = Read(method_path, "identity", fetch, ("is", cls, name))
        inner.add(method, is_method=True)


def _record_data_of_class(
    path: str, get: Callable[[], Any], value: Any, search: _Search, place: _Place | None
) -> None:
    """Records the attributes of a Function class, where it is handed on itself: to `getattr`, to a function that
    looks at it."""
    get_data = partial(_data_of_class, get)
    if not (data := get_data()):
        return
    _record(f"what {path} holds", get_data, data, search, place=place)


def _data_of_class(get: Callable[[], Any]) -> dict[str, Any]:
    """By name; without methods, which are read as such, and what torch or fusegrad put there."""
    owners = [c for c in reversed(get().__mro__) if not is_library(c)]
    code = (type, property, staticmethod, classmethod, types.FunctionType)
    return {n: v for c in owners for n, v in vars(c).items() if not (n.startswith("_") or is_a(v, code))}


# ------------------------------------------------------------------ tensors in values
def _tensors_inside(value: Any, get: Callable[[], Any], depth: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    if is_tensor(value):
        yield "", get
    if depth == 0:
        return
    for name, inner, fetch in _items(value, get):
        for path, getter in _tensors_inside(inner, fetch, depth - 1):
            yield f"{name}{path}", getter


def _items(value: Any, get: Callable[[], Any]) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
    if is_a(value, list | tuple):
        yield from ((f"[{i}]", v, _item(get, i)) for i, v in enumerate(items_of(value)))
    elif is_a(value, dict):
        yield from ((f"[{_key(k)}]", v, _item(get, k)) for k, v in dict.items(value))
    elif is_plain_object(value):
        yield from ((f".{k}", v, _attribute(get, k)) for k, v in state_of(value).items())


def _key(key: Any) -> str:
    return repr(key) if type(key) in SCALARS else f"{type(key).__name__}@{id(key)}"


def _item(get: Callable[[], Any], key: Any) -> Callable[[], Any]:
    return lambda: get()[key]


def is_compiled(value: Any) -> bool:
    """True if the value is a function of an extension module that is neither torch's nor Python's own."""
    module = module_of(value)
    if type(value) is torch.jit.ScriptFunction:
        return True
    if not module or is_a(value, type) or is_library(value) or not callable(value):
        return False
    native = not isinstance(type(value).__call__, types.FunctionType)
    python = is_a(value, types.FunctionType | types.MethodType)
    named = type(attribute(value, "__name__")) is str
    return native and not python and module.split(".")[0] not in sys.stdlib_module_names and named


def _is_library_module(value: Any) -> bool:
    return is_a(value, types.ModuleType) and str(instance_dict(value).get("__name__")).split(".")[0] in LIBRARIES


set_scans(Scans(reads_of, reads_of_class))
