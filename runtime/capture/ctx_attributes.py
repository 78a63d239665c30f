"""Attributes of ctx, as `grad_fn` shows them: made at the first read, kept from then on, and seen by backward.

Our own entries are slots, so that a node's `__dict__` is the user's alone; while it is empty, none was read or set.
"""

from __future__ import annotations

from typing import Any

import torch

from ...tracer.containers import leaves
from ...tracer.reads.value_keys import freeze
from ...tracer.torch_private import dict_of_context as on
from .captured import CapturedFunction
from .user_methods import ctx_attributes

SLOTS = ("_fusegrad_tensors", "_fusegrad_sizes", "_fusegrad_patch", "_fusegrad_shared", "_fusegrad_shown")
REASON = "an attribute of its ctx was assigned or changed after forward"


def node_namespace(captured: CapturedFunction) -> dict[str, Any]:
    """The names of a class of nodes on which the user's attributes are found."""

    def attributes(ctx: Any) -> dict[str, Any]:
        return attributes_on(ctx, captured)

    def missing(ctx: Any, name: str) -> Any:
        if not name.startswith("_fusegrad") and name in (own := attributes(ctx)):
            return own[name]
        raise AttributeError(f"{type(ctx).__name__!r} object has no attribute {name!r}")

    return {"__slots__": SLOTS, "__getattr__": missing, "__dict__": property(attributes)}


def attributes_on(ctx: Any, captured: CapturedFunction) -> dict[str, Any]:
    """The attributes of ctx, to be read and changed."""
    attributes = on(ctx)
    if not getattr(ctx, "_fusegrad_shown", False):
        for name, value in _forward_attributes(ctx, captured).items():
            attributes.setdefault(name, value)
        ctx._fusegrad_shown = True  # only now: a fault above must not read as an attribute that forward never set
    return attributes


def is_changed(ctx: Any, captured: CapturedFunction) -> bool:
    """True if the attributes of ctx are not those that forward put there."""
    if not (current := on(ctx)):
        return False
    before = _forward_attributes(ctx, captured)
    deleted = getattr(ctx, "_fusegrad_shown", False) and before.keys() - current.keys()
    return bool(deleted) or any(name not in before or not _same(before[name], value) for name, value in current.items())


def _forward_attributes(ctx: Any, captured: CapturedFunction) -> dict[str, Any]:
    """The attributes that forward put on ctx, the caller's own objects among them."""
    own = ctx_attributes(captured, ctx._fusegrad_tensors, ctx._fusegrad_sizes)
    return own if captured.sharing is None else own | captured.sharing.attributes(ctx._fusegrad_shared)


def _same(before: Any, current: Any) -> bool:
    if before is current:
        return True
    tensors = [[leaf for leaf in leaves(v) if isinstance(leaf, torch.Tensor)] for v in (before, current)]
    identical = len(tensors[0]) == len(tensors[1]) and all(a is b for a, b in zip(*tensors, strict=True))
    return identical and not isinstance(current, torch.Tensor) and bool(freeze(before) == freeze(current))
