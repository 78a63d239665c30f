"""The one call that stands in Dynamo's graphs for every compiled Function, under the name of its class.

Dynamo does not follow it: it asks it for results without memory, and has more graph made of it. Where that is refused
Dynamo breaks its graph and makes the call itself, and then nothing within it is Dynamo's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch

from ...ir.errors import FusegradError
from ...tracer.torch_private import graph_break

_shown: WeakValueDictionary[str, Callable[..., Any]] = WeakValueDictionary()
"""What calls in graphs mean, by the name that stands there, as long as what makes them is there."""
_numbers = itertools.count()


def name_in_graphs(cls: Any, call: Callable[..., Any]) -> str:
    """The name under which a class is called in graphs of this process, and a number. The caller keeps `call`."""
    name = f"{cls.__qualname__} {next(_numbers)}"
    _shown[name] = call
    return name


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def in_graph(name: str, *args: Any, **kwargs: Any) -> Any:
    """A call of the class of this name. Where it is refused Dynamo is told why, in our words."""
    try:
        return _undisturbed(name, args, kwargs)
    except NotImplementedError as error:
        broken = graph_break(str(error)) if isinstance(error, FusegradError) else None
        raise broken or error from None


@torch.compiler.disable(reason="fusegrad compiled it")  # type: ignore[untyped-decorator,no-untyped-call]
def _undisturbed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _shown[name](args, kwargs)
