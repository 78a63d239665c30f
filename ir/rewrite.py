"""Rewriting by rebuilding: a graph is copied node by node, and rules replace what they recognise on the way.

    algebra = rules((neg(neg(X)), lambda x: x), (mul(X, Number(1)), lambda x: x))
    better = rebuild(graph, algebra)

A rule looks at a node of the graph being built, whose operands are rewritten already, and returns its replacement or
None ("does not apply"). Rules build with `make`, so whatever they return is in normal form itself. Inputs, outputs,
strides, mutations, origins and the order of effects are kept; nodes that nothing needs are left behind.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import sympy

from .errors import InvalidGraphError
from .graph import Graph, Value, building, emit, provenance
from .switches import watch_allows
from .types import Size

Rule: TypeAlias = Callable[[Value], "Value | None"]
Rules: TypeAlias = Mapping[str, Sequence[Rule]]
"""Rules by the primitive that they look at; the first that applies wins."""
Replacements: TypeAlias = Mapping[int, Callable[[dict[int, Value]], Value]]
NOTHING: Replacements = {}


# ------------------------------------------------------------------------------------------------------ patterns
class Pattern(Protocol):
    """A shape of values. `match` records in `bound` the values that its wildcards stand for."""

    def match(self, value: Value, bound: dict[Wildcard, Value]) -> bool: ...


@dataclass(frozen=True)
class Wildcard:
    """Any value; the same one wherever the wildcard occurs again."""

    name: str

    def match(self, value: Value, bound: dict[Wildcard, Value]) -> bool:
        return bound.setdefault(self, value) == value


@dataclass(frozen=True)
class Number:
    """A `full` of this number: 1 matches 1.0 and True, 0.0 does not match -0.0."""

    number: float

    def match(self, value: Value, bound: dict[Wildcard, Value]) -> bool:
        number = number_of(value)
        if number is None or number != self.number:
            return False
        return math.copysign(1, number) == math.copysign(1, self.number)


@dataclass(frozen=True)
class Op:
    """A node of this primitive whose operands match in turn."""

    prim: str
    args: tuple[Pattern, ...]
    when: Callable[[Value], bool] = lambda value: True

    def match(self, value: Value, bound: dict[Wildcard, Value]) -> bool:
        if value.prim != self.prim or not self.when(value):
            return False
        return all(p.match(a, bound) for p, a in zip(self.args, value.args, strict=True))


X, Y, Z = Wildcard("X"), Wildcard("Y"), Wildcard("Z")


def number_of(value: Value) -> float | int | None:
    """The number that a `full` holds everywhere, if it is one and not an expression over sizes."""
    number = value.params["value"] if value.prim == "full" else None
    if isinstance(number, (sympy.Integer, sympy.Float)):
        return int(number) if number.is_Integer else float(number)
    return number if isinstance(number, (bool, int, float)) else None


def rules(*pairs: tuple[Op, Callable[..., Value | None]]) -> Rules:
    """Pairs of a pattern and a function of what its wildcards stand for, in order of first appearance."""
    table: dict[str, list[Rule]] = {}
    for pattern, build in pairs:
        table.setdefault(pattern.prim, []).append(_rule(pattern, build))
    return table


def _rule(pattern: Op, build: Callable[..., Value | None]) -> Rule:
    def rule(value: Value) -> Value | None:
        bound: dict[Wildcard, Value] = {}
        return build(*bound.values()) if pattern.match(value, bound) else None

    return rule


def join_rules(*tables: Rules) -> Rules:
    """All the rules; those of an earlier table are tried first."""
    prims = {prim for table in tables for prim in table}
    return {prim: tuple(rule for table in tables for rule in table.get(prim, ())) for prim in sorted(prims)}


# ------------------------------------------------------------------------------------------------------- driving
_rules: ContextVar[Rules] = ContextVar("fusegrad_rules", default={})  # noqa: B039  (never mutated)


@contextlib.contextmanager
def rewriting(table: Rules) -> Iterator[None]:
    """Within the block, `make` applies these rules."""
    token = _rules.set(table)
    try:
        yield
    finally:
        _rules.reset(token)


def make(prim: str, *args: Value, **params: Any) -> Value:
    """`emit`, then what the rules make of it."""
    value = emit(prim, *args, **params)
    for rule in _rules.get().get(prim, ()):
        # A rule may be refused by the watch: bisection leaves out single applications.
        better = rule(value)
        if better is not None and watch_allows("rule", value.graph.name, Applied(rule, value, better)):
            return better
    return value


class Applied(NamedTuple):
    """A rule that is about to put `better` in the place of `value`."""

    rule: Rule
    value: Value
    better: Value


def rebuild(graph: Graph, table: Rules, replacing: Replacements = NOTHING) -> Graph:
    """A copy of the graph in which every rule has been applied wherever it does.

    `replacing` has builders for single nodes, by id: each is called with the values built so far, by old id.
    """
    out = Graph(graph.name)
    env = {v.id: out.input_like(v) for v in graph.inputs}
    with building(out), rewriting(table):
        copy_into(graph.order(), env, replacing)
    return returning_as(graph, out, env)


def returning_as(graph: Graph, out: Graph, env: Mapping[int, Value]) -> Graph:
    """`out`, which returns what a graph does: mutations by their values there, outputs with the strides of the graph's.

    env: the ids of the graph's values to those of `out`.
    """
    out.mutations = {i: env[v.id] for i, v in graph.mutations.items()}
    return out.returning([None if o is None else env[o.id] for o in graph.outputs], graph.output_strides)


def copy_into(nodes: Iterable[Value], env: dict[int, Value], replacing: Replacements = NOTHING) -> None:
    """Make these nodes again in the graph being built. `env` maps ids of operands to values there, and is extended."""
    for value in nodes:
        if value.id in env:
            continue
        with provenance(value.origin):
            build = replacing.get(value.id)
            copied = build(env) if build else make(value.prim, *(env[a.id] for a in value.args), **value.params)
        env[value.id] = copied


# -------------------------------------------------------------------------------------------------------- shapes
SHAPES = ("permute", "reshape")
"""Primitives of which the result has the elements of the argument, each once."""


def without_shapes(value: Value) -> Value:
    """What a value is in another shape: the gradient of a matrix that is transposed in memory is a turned product."""
    while value.prim in SHAPES:
        (value,) = value.args
    return value


def shaped_as(model: Value, value: Value) -> Value:
    """The same shapes, one after the other, of another value than the model's."""
    if model.prim not in SHAPES:
        return value
    return make(model.prim, shaped_as(model.args[0], value), **model.params)


# ---------------------------------------------------------------------------------------------------- extraction
def extract(
    outputs: Sequence[Value | None],
    inputs: Sequence[Value],
    *,
    name: str,
    strides: Sequence[tuple[Size, ...] | None] | None = None,
    layouts: Mapping[int, tuple[Size, ...] | None] | None = None,
    replacing: Replacements = NOTHING,
) -> Graph:
    """The part of a graph between `inputs` and `outputs`, standing alone; `replacing` as for `rebuild`.

    An input of the whole graph keeps its name, strides and what is known of it; any other value is taken as row-major
    unless `layouts` has strides for its id, under the name that the user gave it. `strides` are those of the outputs.
    """
    out = Graph(name)
    input_strides = {v.id: v.params.get("strides") for v in inputs} | dict(layouts or {})
    named = zip(inputs, unique_names(inputs), strict=True)
    env = {v.id: out.input(v.aval, n, input_strides[v.id], v.params.get("is_top", False)) for v, n in named}
    with building(out):
        copy_into(nodes_between([o for o in outputs if o is not None], env), env, replacing)
    return out.returning([None if o is None else env[o.id] for o in outputs], strides)


def nodes_between(outputs: Iterable[Value], known_ids: Iterable[int]) -> list[Value]:
    """The nodes that compute `outputs` from the values with the ids `known`, operands first."""
    seen = set(known_ids)
    nodes: dict[int, Value] = {}
    todo = [o for o in outputs if o.id not in seen]
    while todo:
        value = todo.pop()
        if value.id in nodes:
            continue
        if value.prim == "input":
            raise InvalidGraphError(f"input {value.params['name']!r} is needed and not given", node=repr(value))
        nodes[value.id] = value
        todo.extend(a for a in value.args if a.id not in seen)
    return [nodes[i] for i in sorted(nodes)]


def unique_names(values: Iterable[Value], wishes: Mapping[Value, str] | None = None) -> list[str]:
    """A name for each value, an identifier: the user's or a wished one where there is one, made unique by a number."""
    used: set[str] = set()
    return [_free_name((wishes or {}).get(v) or name_of(v), used) for v in values]


def name_of(value: Value) -> str:
    """The user's name for a value, else its primitive and number."""
    user_name = value.params["name"] if value.prim == "input" else value.origin.name
    name = re.sub(r"\W", "_", user_name or f"{value.prim}_{value.id}")
    return f"_{name}" if name[:1].isdigit() else name


def _free_name(name: str, used: set[str]) -> str:
    number = 1
    free = name
    while free in used:
        number += 1
        free = f"{name}_{number}"
    used.add(free)
    return free
