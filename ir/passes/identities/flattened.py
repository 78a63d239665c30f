"""What is made of a flattened product, element by element, is flattened itself: what sums it has the product's axes.

exp(reshape(x @ y, [n * m]) - top)     reshape(exp(x @ y - top), [n * m])

So `logsumexp(s.flatten(), 0)` is the sum over both axes of scores, which need not be in memory; their gradient is no
longer flattened and taken apart again.
"""

from __future__ import annotations

from ...graph import Value
from ...infer import same_shape
from ...prims import PRIMS
from ...rewrite import Rules, make
from ...types import Size
from ..layout import wide
from .lone_pieces import is_of_product


def on_its_axes(value: Value) -> Value | None:
    flat = [a for a in value.args if a.prim == "reshape"]
    if value.ndim != 1 or not flat:
        return None
    shape = flat[0].args[0].shape
    args = [_on(a, shape) for a in value.args]
    made = [a for a in args if a is not None]
    if len(wide(shape)) < 2 or len(made) < len(args) or not any(map(is_of_product, made)):
        return None
    return make("reshape", make(value.prim, *made, **value.params), shape=value.shape)


def _on(value: Value, shape: tuple[Size, ...]) -> Value | None:
    """What is flattened, or one number at all places, on these axes; None for anything else."""
    if value.prim == "full":
        return make("full", **{**value.params, "shape": shape})
    if value.prim == "broadcast" and not value.params["axes"]:
        return make("broadcast", value.args[0], shape=shape, axes=())
    is_flat = value.prim == "reshape" and same_shape(value.args[0].shape, shape)
    return value.args[0] if is_flat else None


flattened: Rules = {name: (on_its_axes,) for name, prim in PRIMS.items() if prim.family == "elementwise"}
