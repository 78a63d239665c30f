"""Ways of calling told from their arguments: keywords as positions, and what is inside containers by name.

    apply(x, eps=1e-6)  ->  (args, kwargs) -> (*args, default, kwargs["eps"])
    [a, {"w": b}]       ->  a1[0], a1[1]["w"], and the conditions under which another argument is of that form
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...tracer.containers import ATOMS, DEPTH, Hole, holes
from ...tracer.methods import signature_objects
from ..execution.source_writer import SourceWriter, row
from .guard_codegen import guard_value

Form = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None]
BY_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD
LEAF_TYPES = ATOMS - {torch.Size, slice}
"""Types that are no containers to torch's trees, whatever else is registered as one."""


class _Miss:
    def __reduce__(self) -> str:
        return "MISS"  # there is one


MISS = _Miss()
"""What a function that was written for one form gives for another."""


# ------------------------------------------------------------------ keywords


def positional(
    signature: inspect.Signature, count: int, keywords: Sequence[str], method: Callable[[], Any]
) -> Form | None:
    """The form that puts `count` arguments and these keywords into the signature's order, defaults filled in.

    None where that is not all there is to binding them, errors included; the form gives None where the method, which
    is asked for at each call, is another by then, or has another signature.
    """
    parameters = list(signature.parameters.values())
    unbound = parameters[count:]
    fits = {p.name for p in unbound} >= set(keywords) and len(parameters) >= count
    has_defaults = all(p.name in keywords or p.default is not p.empty for p in unbound)
    if not fits or not has_defaults or any(p.kind is not BY_EITHER for p in parameters):
        return None
    text, identity = SourceWriter(), signature_objects(method())
    # The method may be exchanged, or its code and defaults: the form asks each time, by identity.
    text.add(f"method = {text.constant(method, 'present')}()")
    same = [f"method is {text.constant(identity[0], 'method')}"]
    inner = inspect.unwrap(identity[0])
    for name, value in zip(("__code__", "__defaults__", "__kwdefaults__"), identity[1:], strict=True):
        if hasattr(inner, name):
            same.append(f"{text.constant(inner, 'inner')}.{name} is {text.constant(value, 'signed')}")
    with text.block(f"if not ({' and '.join(same)}):"):
        text.add("return None")
    # Keywords in the order of the parameters, defaults as they were.
    values = [
        f"kwargs[{p.name!r}]" if p.name in keywords else text.constant(p.default, "default") for p in unbound
    ]
    text.add(f"return (*args, {row(values)})")
    return text.function("positional", ("args", "kwargs"))


# ------------------------------------------------------------------ containers
def named_holes(name: str, value: Any) -> Iterator[tuple[Hole, str]] | None:
    """(hole, expression) for every hole of a container of this name; None where one cannot be named."""
    pairs = list(_named(name, value))
    return iter(pairs) if len(pairs) == len(holes(value)) else None


def _named(name: str, value: Any) -> Iterator[tuple[Hole, str]]:
    if isinstance(value, Hole):
        yield value, name
    for place, inner in _container(name, value)[1]:
        yield from _named(place, inner)


def form_conditions(text: SourceWriter, name: str, value: Any, depth: int = DEPTH) -> Iterator[str]:
    """The conditions under which what has this name is of the form of a value, tensors in its holes apart."""
    if isinstance(value, Hole):
        return
    condition, parts = _container(name, value) if depth else ("", [])
    yield condition or guard_value(text, name, value, depth)
    for place, inner in parts:
        yield from form_conditions(text, place, inner, depth - 1)


def _container(name: str, value: Any) -> tuple[str, list[tuple[str, Any]]]:
    """(the condition on what has this name to be a container like the value, its parts by name); no condition else."""
    if type(value) in (list, tuple):
        condition = f"type({name}) is {type(value).__name__} and len({name}) == {len(value)}"
        return condition, [(f"{name}[{i}]", inner) for i, inner in enumerate(value)]
    if _is_plain_dict(value):
        condition = f"type({name}) is dict and [*{name}] == {[*value]!r}"
        return condition, [(f"{name}[{key!r}]", inner) for key, inner in value.items()]
    return "", []


# ------------------------------------------------------------------ trees
def opener(value: tuple[Any, ...], first: Any) -> Callable[[Any], Any] | None:
    """(first, *leaves) of a nested tuple of this form, MISS of any other; None where the form cannot be asked for.

    A leaf is of a type that is no container, whatever is registered as one.
    """
    text, leaves, leaf_types = SourceWriter(), list[str](), LEAF_TYPES
    conditions = list(_tree_conditions("args", value, leaves, leaf_types))
    if None in conditions:
        return None
    types, miss = text.constant(leaf_types, "leaf_types"), text.constant(MISS, "MISS")
    with text.block(f"if {' and '.join(map(str, conditions))}:"):
        names = [text.let("leaf", leaf) for leaf in leaves]
        with text.block(f"if {' and '.join(f'type({n}) in {types}' for n in names) or 'True'}:"):
            text.add(f"return ({text.constant(first, 'structure')}, {row(names)})")
    text.add(f"return {miss}")
    return text.function("opened", ("args",))


def _tree_conditions(name: str, value: Any, leaves: list[str], atoms: frozenset[type]) -> Iterator[str | None]:
    condition, parts = _container(name, value)
    if condition:
        yield condition
    else:
        leaves.append(name)
        if type(value) not in atoms:
            yield None
    for place, inner in parts:
        yield from _tree_conditions(place, inner, leaves, atoms)


def builder(model: Any, is_leaf: Callable[[Any], bool]) -> Callable[[Any], Any] | None:
    """The function that builds a structure like the model's of leaves; None for more than lists, tuples and dicts."""
    count = itertools.count()
    expression = _built(model, is_leaf, count)
    if expression is None:
        return None
    text = SourceWriter()
    text.add(f"return {expression}")
    return text.function("built", ("leaves",))


def _built(model: Any, is_leaf: Callable[[Any], bool], count: Iterator[int]) -> str | None:
    if is_leaf(model):
        return f"leaves[{next(count)}]"
    if type(model) in (list, tuple):
        inner = [_built(m, is_leaf, count) for m in model]
        parts = None if None in inner else row([str(i) for i in inner])
        return None if parts is None else f"[{parts}]" if type(model) is list else f"({parts})"
    if not _is_plain_dict(model):
        return None
    pairs = {key: _built(m, is_leaf, count) for key, m in model.items()}
    return None if None in pairs.values() else "{" + ", ".join(f"{k!r}: {v}" for k, v in pairs.items()) + "}"


def _is_plain_dict(value: Any) -> bool:
    return type(value) is dict and all(type(key) is str for key in value)
