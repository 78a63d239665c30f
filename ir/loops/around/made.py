"""What is made of a loop's steps element by element, and of what is beside them; and the same in one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...graph import Value, emit
from ...infer import drop_axes
from ...passes.cost import estimate
from ...prims import PRIMS
from .carrying import BESIDE, Carrying

MOST = 32
"""Operations between what a loop gives and what is made of it."""


@dataclass(frozen=True)
class Made:
    """A value whose `axis` is the steps of a loop. later: ids of what is made again in each of them."""

    value: Value
    axis: int
    scan: Value
    later: frozenset[int]

    @property
    def is_possible(self) -> bool:
        """It is made of steps in a few operations, and no larger than a step of a result."""
        seen = list[Value]()
        is_made = self._is_made(self.value, self.axis, seen) and len(seen) <= MOST
        results = self.scan.avals[self.scan.params["carries"] :]
        given = (estimate(t.numel) // max(1, estimate(t.shape[0])) for t in results)
        most = estimate(self.value.shape[self.axis]) * max(given, default=0)
        return is_made and estimate(self.value.aval.numel) <= most

    def _is_made(self, value: Value, axis: int, seen: list[Value]) -> bool:
        seen.append(value)
        if len(seen) > MOST:
            return False
        if value.id not in self.later:
            return PRIMS[value.prim].family in BESIDE and all(self._is_beside(a, seen) for a in value.args)
        if value.prim == "pick":
            is_step = value.args[0] == self.scan and value.params["index"] >= self.scan.params["carries"]
            return is_step and axis == 0
        along = axis_before(value, axis)
        return along is not None and all(self._is_made(a, along, seen) for a in value.args)

    def _is_beside(self, value: Value, seen: list[Value]) -> bool:
        seen.append(value)
        few = len(seen) <= MOST and PRIMS[value.prim].family in BESIDE
        return few and all(self._is_beside(a, seen) for a in value.args)

    @property
    def outside(self) -> list[Value]:
        """What has to be there before the loop."""
        return list(dict.fromkeys(v for v, _ in self._read(self.value, self.axis)))

    def _read(self, value: Value, axis: int) -> Iterator[tuple[Value, int]]:
        """What is read beside the steps, with the axis that goes with them."""
        if value.id not in self.later:
            yield value, axis
        elif value.prim != "pick":
            along = axis_before(value, axis)
            assert along is not None
            for arg in value.args:
                yield from self._read(arg, along)

    # ------------------------------------------------------------------ in a step
    @property
    def shape(self) -> tuple[Any, ...]:
        """Of one step."""
        return drop_axes(self.value.shape, (self.axis,))

    def operands(self, carrying: Carrying, env: Mapping[int, Any]) -> dict[int, Value]:
        """One step of what is read beside, within the body, by id. `env`: values of the new graph, by id."""
        return {v.id: _operand(carrying, env[v.id], axis) for v, axis in self._read(self.value, self.axis)}

    def in_step(self, carrying: Carrying, operands: Mapping[int, Value]) -> Value:
        return self._in_step(self.value, self.axis, carrying, operands)

    def _in_step(self, value: Value, axis: int, carrying: Carrying, operands: Mapping[int, Value]) -> Value:
        if value.id in operands:
            return operands[value.id]
        if value.prim == "pick":
            return carrying.result(value.params["index"])
        along = axis_before(value, axis)
        assert along is not None
        args = [self._in_step(a, along, carrying, operands) for a in value.args]
        return emit(value.prim, *args, **_params_of_step(value, axis, along))


def _operand(carrying: Carrying, value: Value, axis: int) -> Value:
    """One step of what is read beside the loop, within its body."""
    if value.prim == "broadcast" and axis not in value.params["axes"]:
        axes = tuple(a - (a > axis) for a in value.params["axes"])
        return carrying.whole(emit("broadcast", value.args[0], shape=drop_axes(value.shape, (axis,)), axes=axes))
    first = (axis, *(a for a in range(value.ndim) if a != axis))
    return carrying.step_of(emit("permute", value, perm=first) if axis else value)


def axis_before(value: Value, axis: int) -> int | None:
    """The axis of the operands that an axis of a value is; None where it is none of theirs alone."""
    if value.prim == "permute":
        return value.params["perm"][axis]  # type: ignore[no-any-return]
    if value.prim == "broadcast" and axis in value.params["axes"]:
        own = value.params["axes"].index(axis)
        return own if value.args[0].shape[own] != 1 else None
    return axis if PRIMS[value.prim].family == "elementwise" else None


def _params_of_step(value: Value, axis: int, along: int) -> dict[str, Any]:
    """The params of a node without its axis of the steps."""
    params = value.params
    if value.prim == "permute":
        return {"perm": tuple(a - (a > along) for a in params["perm"] if a != along)}
    if value.prim == "broadcast":
        axes = tuple(a - (a > axis) for a in params["axes"] if a != axis)
        return {"shape": drop_axes(value.shape, (axis,)), "axes": axes}
    return params
