"""Ways of calling told from their arguments: keywords as positions, and what is inside containers by name.

    apply(x, eps=1e-6)  ->  (args, kwargs) -> (*args, default, kwargs["eps"])
    [a, {"w": b}], 2.0  ->  a1[0], a1[1]["w"]; and the conditions under which another argument is of that form
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..tracer.containers import DEPTH, Hole, holes
from .conditions import equal
from .straight import Straight, row

Form = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]
BY_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD


# ------------------------------------------------------------------ keywords
def positional(signature: inspect.Signature, count: int, keywords: Sequence[str]) -> Form | None:
    """What puts `count` positional arguments and these keywords into the order of the signature, defaults filled in.

    None where that is not all there is to binding them, errors included.
    """
    parameters = list(signature.parameters.values())
    rest = parameters[count:]
    known = {p.name for p in rest} >= set(keywords) and len(parameters) >= count
    given = all(p.name in keywords or p.default is not p.empty for p in rest)
    if not known or not given or any(p.kind is not BY_EITHER for p in parameters):
        return None
    text = Straight()
    values = [
        f"kwargs[{p.name!r}]" if p.name in keywords else text.constant(p.default, "default") for p in rest
    ]
    text.add(f"return (*args, {row(values)})")
    return text.function("positional", ("args", "kwargs"))


# ------------------------------------------------------------------ containers
def inside(name: str, value: Any) -> Iterator[tuple[Hole, str]] | None:
    """(hole, expression) for every hole of a container of this name; None where one cannot be named."""
    found = list(_named(name, value))
    return iter(found) if len(found) == len(holes(value)) else None


def _named(name: str, value: Any) -> Iterator[tuple[Hole, str]]:
    if isinstance(value, Hole):
        yield value, name
    elif type(value) in (list, tuple):
        for i, inner in enumerate(value):
            yield from _named(f"{name}[{i}]", inner)
    elif _is_plain_dict(value):
        for key, inner in value.items():
            yield from _named(f"{name}[{key!r}]", inner)


def formed(text: Straight, name: str, value: Any, depth: int = DEPTH) -> Iterator[str]:
    """The conditions under which what has this name is of the form of a value, tensors in its holes apart."""
    if isinstance(value, Hole):
        return
    if type(value) in (list, tuple) and depth:
        yield f"type({name}) is {type(value).__name__} and len({name}) == {len(value)}"
        for i, inner in enumerate(value):
            yield from formed(text, f"{name}[{i}]", inner, depth - 1)
    elif _is_plain_dict(value) and depth:
        yield f"type({name}) is dict and [*{name}] == {[*value]!r}"
        for key, inner in value.items():
            yield from formed(text, f"{name}[{key!r}]", inner, depth - 1)
    else:
        yield equal(text, name, value, depth)


def _is_plain_dict(value: Any) -> bool:
    return type(value) is dict and all(type(key) is str for key in value)
