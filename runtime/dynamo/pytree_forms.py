"""Nested arguments and results in Dynamo's graphs: `compile(pytree=True)` there.

A graph takes and returns tensors. What is left of a nested value is a form, which Dynamo keeps as a constant:

    {"w": x, "b": [y, None]}  ->  [x, y], ("dict", ("w", "b"), (TENSOR, ("list", (TENSOR, ("is", None)))))

The class of a named tuple is no constant of a graph: its number is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..capture.graph_mode import is_for_a_graph
from ..compiled.function_class import in_dynamo, outside
from ..fallback.user_traceback import hide_own_frames
from .call import OuterGraphError
from .graph_names import in_graph

Tensor = torch.Tensor
TENSOR = ("tensor",)
CONSTANTS = (bool, int, float, str, type(None))
_forms: dict[Any, Any] = {}
"""Of what a call in a graph returned when the graph was made, by its name and the form of what it was given."""


_named: list[type] = []
"""The classes of named tuples that stood in a graph, by number."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _number_of(cls: type) -> int:
    if cls not in _named:
        _named.append(cls)
    return _named.index(cls)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _named_by(number: int) -> type:
    return _named[number]


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def has_form(value: Any) -> bool:
    """True if a value is of plain containers, named tuples, tensors and constants."""
    if type(value) is dict:
        return all(isinstance(key, (str, int)) and has_form(inner) for key, inner in value.items())
    if type(value) is list or type(value) is tuple or _is_named(value):
        return all(has_form(inner) for inner in value)
    return isinstance(value, Tensor) or isinstance(value, CONSTANTS)


def taken_apart(value: Any, tensors: list[Tensor]) -> Any:
    """The form of a value, whose tensors are appended."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return TENSOR
    if type(value) is dict:
        return "dict", tuple(value.keys()), tuple([taken_apart(v, tensors) for v in value.values()])
    if type(value) is list:
        return "list", tuple([taken_apart(v, tensors) for v in value])
    if type(value) is tuple:
        return "tuple", tuple([taken_apart(v, tensors) for v in value])
    if _is_named(value):
        return "named", _number_of(type(value)), tuple([taken_apart(v, tensors) for v in value])
    return "is", value


def put_together(form: Any, tensors: Iterator[Tensor]) -> Any:
    """The value of a form again."""
    kind = form[0]
    if kind == "tensor":
        return next(tensors)
    if kind == "is":
        return form[1]
    inner = [put_together(f, tensors) for f in form[-1]]
    if kind == "named":
        return _named_by(form[1])(*inner)
    if kind == "dict":
        return dict(zip(form[1], inner, strict=True))
    return inner if kind == "list" else tuple(inner)


def nested_in_graph(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call of this name, on arguments that have a form: what Dynamo follows."""
    tensors: list[Tensor] = []
    form = taken_apart((args, kwargs), tensors)
    results = in_graph(name, name, form, *tensors)
    return put_together(_form_of(name, form), iter(results))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _form_of(name: str, form: Any) -> Any:
    return _forms[name, form]


def of_forms(call: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Callable[..., tuple[Tensor, ...]]:
    """`call` on nested arguments as what a graph calls: of a name, a form and tensors; it returns tensors."""

    def within(inputs: tuple[Any, ...], _: dict[str, Any]) -> tuple[Tensor, ...]:
        name, form, *tensors = inputs
        args, kwargs = put_together(form, iter(tensors))
        results: list[Tensor] = []
        result_form = taken_apart(call(args, kwargs), results)
        if is_for_a_graph(tensors):
            _forms[name, form] = result_form
        elif result_form != _forms.setdefault((name, form), result_form):
            reason = "it returns other containers than when the graph after it was made"
            facts = {"who": "torch.compile", "reason": reason, "where": "unknown"}
            raise OuterGraphError(function=name.rpartition(" ")[0], **facts)
        return tuple(results)

    return within


def shown_nested(itself: list[type], name: str, run: Callable[..., Any]) -> Any:
    """`apply` of the class that `itself` holds, on nested arguments: `run(own, args, kwargs)`; to Dynamo a call."""

    def apply(own: type, *args: Any, **kwargs: Any) -> Any:
        if not in_dynamo():
            try:
                return run(own, args, kwargs)
            except Exception as error:
                hide_own_frames(error)
                raise
        if own is itself[0] and has_form(args) and has_form(kwargs):
            return nested_in_graph(name, args, kwargs)
        return outside(own, args, kwargs)

    return classmethod(apply)


def function_shown_nested(fn: Callable[..., Any], name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a plain function."""

    @functools.wraps(fn)
    def nested(*args: Any, **kwargs: Any) -> Any:
        if not in_dynamo():
            try:
                return run(args, kwargs)
            except Exception as error:
                hide_own_frames(error)
                raise
        if has_form(args) and has_form(kwargs):
            return nested_in_graph(name, args, kwargs)
        return _outside(run, args, kwargs)

    return nested


@torch.compiler.disable(reason="fusegrad takes containers of its own kind between two graphs")  # type: ignore[untyped-decorator,no-untyped-call]
def _outside(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run(args, kwargs)
