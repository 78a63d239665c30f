"""One place of what is made of a concatenation, element by element, is made of the one piece that is there.

slice(exp(cat(a, x @ y, axis=1) - m[:, None]), [:, :1])     exp(a - m[:, None]), where a is one column

A column beside scores, such as a sink or the one positive among negatives, and its gradient: without, a place of what
need not be in memory would be read from there. Asked only where another piece is made of a product.
"""

from __future__ import annotations

from ...graph import Value
from ...infer import sizes_equal
from ...prims import PRIMS
from ...rewrite import Rules, make
from ...types import Size, simplify_size

MOST = 64
"""Operations that are done again for the place."""


def at_lone_piece(value: Value) -> Value | None:
    (x,) = value.args
    axis = _lone_axis(value)
    if axis is None or PRIMS[x.prim].family != "elementwise":
        return None
    place = _Place(value.params["start"][axis])
    found = place.of(x, axis)
    return found if place.is_beside_product and len(place.made) <= MOST else None


def _lone_axis(value: Value) -> int | None:
    """The axis of which one place is taken, where the others are whole."""
    start, stop, step = (value.params[k] for k in ("start", "stop", "step"))
    (x,) = value.args
    cut = [
        axis for axis, (a, b, s, n) in enumerate(zip(start, stop, step, x.shape, strict=True))
        if not (a == 0 and s == 1 and sizes_equal(b, n))
    ]  # fmt: skip
    return cut[0] if len(cut) == 1 and value.shape[cut[0]] == 1 else None


class _Place:
    """One place along an axis of values that are made of each other; None where it is a place of what has no pieces."""

    def __init__(self, at: Size) -> None:
        self.at, self.is_beside_product = at, False
        self.made: dict[tuple[int, int], Value | None] = {}

    def of(self, x: Value, axis: int) -> Value | None:
        key = x.id, axis
        if key not in self.made:
            self.made[key] = self._of(x, axis) if len(self.made) < MOST else None
        return self.made[key]

    def _of(self, x: Value, axis: int) -> Value | None:
        shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
        if x.prim == "full":
            return make("full", **{**x.params, "shape": shape})
        if x.prim == "iota":
            return make("full", value=self.at, shape=shape, dtype=x.dtype)
        if x.prim == "broadcast":
            return self._of_broadcast(x, axis, shape)
        if x.prim in ("cat", "pad"):
            return self._of_cat(x, axis) if x.prim == "cat" else self._of_pad(x, axis)
        if PRIMS[x.prim].family != "elementwise" or x.prim == "check_index":
            return None
        args = [self.of(a, axis) for a in x.args]
        return make(x.prim, *(a for a in args if a is not None), **x.params) if None not in args else None

    def _of_broadcast(self, x: Value, axis: int, shape: tuple[Size, ...]) -> Value | None:
        (source,), axes = x.args, x.params["axes"]
        there = self.of(source, axes.index(axis)) if axis in axes else source
        return None if there is None else make("broadcast", there, shape=shape, axes=axes)

    def _of_cat(self, x: Value, axis: int) -> Value | None:
        """The piece that is this place alone."""
        before: Size = 0
        for piece in x.args if x.params["axis"] == axis else ():
            if piece.shape[axis] == 1 and sizes_equal(before, self.at):
                self.is_beside_product |= any(is_of_product(other) for other in x.args if other != piece)
                return piece
            before = simplify_size(before + piece.shape[axis])
        return None

    def _of_pad(self, x: Value, axis: int) -> Value | None:
        """What was padded, where it is this place alone: the gradient of one place that was taken."""
        (source,), low = x.args, x.params["lo"]
        others = [k[a] for k in (low, x.params["hi"], x.params["inner"]) for a in range(x.ndim) if a != axis]
        is_there = source.shape[axis] == 1 and sizes_equal(low[axis], self.at)
        return source if is_there and all(n == 0 for n in others) else None


def is_of_product(x: Value) -> bool:
    """Made of a product element by element, as far as MOST values tell."""
    todo, seen = [x], set[Value]()
    while todo and len(seen) < MOST:
        if (value := todo.pop()) in seen:
            continue
        seen.add(value)
        if value.prim == "dot":
            return True
        todo += value.args if PRIMS[value.prim].family in ("elementwise", "layout") else ()
    return False


lone_pieces: Rules = {"slice": (at_lone_piece,)}
