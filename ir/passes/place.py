"""Parts of a concatenation that calls make are written where they belong: the concatenation itself copies nothing.

    a = mm(x0, w);  b = mm(x1, w);  y = cat(a, b)      becomes      mm(x0, w, out=y[:n]);  mm(x1, w, out=y[n:])

Along the outermost axis, so that every part is one piece of memory. Kernels store their parts in place by themselves.

After `Fuse` and `Streams`, which say what is a call; before `Products`, as a call that writes in place stays a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..graph import Graph, Value
from ..infer import same_shape
from ..types import Size, contiguous_strides, product, simplify_size
from .fuse import Extern, Group, Step, View


class Place(NamedTuple):
    """Where the result of a call goes: into `whole`, from element `start` of its memory on."""

    whole: Value
    start: Size


Places = dict[int, Place]
"""By the ids of the calls' results."""


def place_concatenations(graph: Graph, steps: Sequence[Step]) -> tuple[list[Step], Places]:
    """Steps in which such concatenations are views of what was written before, and where the calls are to write."""
    called = {s.value for s in steps if isinstance(s, Extern) and is_product_of_rows(s.value)}
    results = set(graph.results)
    placed_steps: list[Step] = []
    places: Places = {}
    for step in steps:
        concatenation = _concatenation(step)
        if concatenation is not None and _parts_are_calls(results, concatenation, called, places):
            known = {s.value for s in placed_steps if not isinstance(s, Group)}
            placed_steps += [View(part) for part in concatenation.args if part not in known]
            placed_steps.append(View(concatenation))
            places |= _places(concatenation)
        else:
            placed_steps.append(step)
    return placed_steps, places


def made_by(part: Value) -> Value:
    """The result of a call that a part of a concatenation is, in another shape at most."""
    return part.args[0] if part.prim == "reshape" else part


def is_plain_product(value: Value) -> bool:
    """A product of two matrices: what the library writes into memory that it is given."""
    if value.prim != "dot" or any(v.ndim != 2 for v in (*value.args, value)):
        return False
    x, y, out = (value.params[p] for p in ("x_axes", "y_axes", "out_axes"))
    return len({*x, *y}) == 3 and len(set(x) & set(y)) == 1 and not set(x) & set(y) & set(out)


def is_product_of_rows(value: Value) -> bool:
    """A product of two matrices, the rows of the first along one axis or several."""
    if value.prim != "dot" or value.args[1].ndim != 2:
        return is_plain_product(value)
    *rows, depth = value.params["x_axes"]
    columns = [a for a in value.params["y_axes"] if a != depth]
    return is_plain_product(value) or (len(columns) == 1 and value.params["out_axes"] == (*rows, *columns))


def _concatenation(step: Step) -> Value | None:
    """The row-major result of a step that does nothing but put its inputs one behind the other."""
    if not isinstance(step, Group) or len(step.outputs) != 1:
        return None
    (result,), (strides,) = step.outputs, step.graph.output_strides
    outermost = result.prim == "cat" and all(n == 1 for n in result.shape[: result.params["axis"]])
    packed = strides is not None and same_shape(strides, contiguous_strides(result.shape))
    return result if outermost and packed and set(map(made_by, result.args)) == set(step.inputs) else None


def _parts_are_calls(results: set[Value], concatenation: Value, called: set[Value], places: Places) -> bool:
    """Each part is made by a call, is in one place only, and is no result of its own."""
    made = [made_by(part) for part in concatenation.args]
    apart = len(set(made)) == len(made) and not {*made, *concatenation.args} & results
    return apart and all(v in called and v.id not in places for v in made)


def _places(concatenation: Value) -> Places:
    starts: Places = {}
    start: Size = 0
    for part in concatenation.args:
        starts[made_by(part).id] = Place(concatenation, start)
        start = simplify_size(start + product(part.shape))
    return starts
