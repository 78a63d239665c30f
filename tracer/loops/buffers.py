"""Buffers that a loop fills, in the program of a short trace without its writes: what was written is what is read.

    out1 = select_scatter(out0, h0, 0, 0); out2 = select_scatter(out1, h1, 0, 1); ..   ->   out = stack([h0, h1, ..])
    select_backward(g1, (2, n), 0, 1) + select_backward(g0, (2, n), 0, 0) + ..         ->   stack([g0, g1, ..]) + 0

A loop that handed a whole buffer on from step to step would copy it each time. The second one is autograd's gradient of
x where a loop reads x[t]: zeros but for one place, and their sum.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..sizes import hint_of
from .affine import ONE, Number
from .program import MARK, Program, Ref, Step, refs_in

aten = torch.ops.aten
WRITES = 3
"""Writes to one buffer from which on they are a loop's."""
UNWRITTEN = 4
"""The most places of a buffer that a loop leaves as they were."""


@dataclass(frozen=True)
class Write:
    """A buffer with one slice of it exchanged."""

    buffer: Ref
    slice: Ref
    dim: int
    index: int


@dataclass(frozen=True)
class Placed:
    """A sum of tensors that are zero but for one place along a dim: what is at each place."""

    dim: int
    slices: dict[int, Ref]


def without_buffers(program: Program) -> Program:
    """The same program, its buffers put together once, at the end; what nothing reads is left out."""
    return replace(_Rewriting(program, {**WRITTEN, **PLACED}).program(), had_writes=True)


def without_sums_of_places(program: Program) -> Program:
    """The same program, a gradient that is added up place by place put together once."""
    has_some = any(step.target in PLACED for step in program.steps if step.target is not aten.add.Tensor)
    return _Rewriting(program, PLACED).program() if has_some else program


class _Rewriting:
    def __init__(self, program: Program, rules: Mapping[Any, Any]) -> None:
        self.source, self.rules = program, rules
        self.steps: list[Step] = []
        self.known: dict[Ref, Ref] = {}  # values of the program by their new names
        self.writes: dict[Ref, Write] = {}
        self.placed: dict[Ref, Placed] = {}
        self.joined: dict[Ref, Ref] = {}

    def program(self) -> Program:
        for number, step in enumerate(self.source.steps):
            self.rewrite(Ref(number), step)
        results = [self.whole(leaf) for leaf in self.source.results]
        return _pruned(replace(self.source, steps=self.steps, results=results))

    def named(self, ref: Ref) -> Ref:
        """A value by its new name; a port of what was renamed."""
        if ref.step < 0 or ref in self.known:
            return self.known.get(ref, ref)
        return Ref(self.known[Ref(ref.step)].step, ref.port)

    def rewrite(self, ref: Ref, step: Step) -> None:
        rule = self.rules.get(step.target)
        found = rule(self, step) if rule is not None else None
        if found is None:
            found = self.add(replace(step, leaves=[self.whole(leaf) for leaf in step.leaves]))
        self.known[ref] = found

    def add(self, step: Step) -> Ref:
        self.steps.append(step)
        return Ref(len(self.steps) - 1)

    def whole(self, leaf: Any) -> Any:
        """An operand, where a filled buffer is read as a whole."""
        if isinstance(leaf, list):
            return [self.whole(ref) for ref in leaf]
        return self.put_together(self.named(leaf)) if isinstance(leaf, Ref) else leaf

    # ------------------------------------------------------------------ what is read of a buffer
    def select(self, step: Step) -> Ref | None:
        buffer, dim, index = self.named(step.leaves[0]), *self.axis_and_index(step, 0)
        while (write := self.writes.get(buffer)) is not None and write.dim == dim:
            if write.index == index:
                return write.slice
            buffer = write.buffer
        return self.add(replace(step, leaves=[self.put_together(buffer), *step.leaves[1:]]))

    def all_of(self, step: Step) -> Ref | None:
        """A slice from end to end is what it is taken of, where that is written to: `out[:, t] = h`."""
        return self.named(step.leaves[0]) if self.covers(step, 0) else None

    def all_scattered(self, step: Step) -> Ref | None:
        """What is written from end to end is what there is from then on."""
        source, value = self.named(step.leaves[0]), self.named(step.leaves[1])
        return value if self.covers(step, 1) and self.kind(source) == self.kind(value) else None

    def covers(self, step: Step, tensors: int) -> bool:
        """Whether a slice has all places of its axis."""
        dim, start, stop, stride = _slice_of(step.leaves[tensors + 1 :])
        if start is None or stop is None:
            return False
        return (start, stride) == (0, 1) and stop >= hint_of(self.source_value(step.leaves[0]).shape[dim or 0])

    def copy(self, step: Step) -> Ref | None:
        """A copy to a place of the same kind is what is copied."""
        place, value = self.named(step.leaves[0]), self.whole(step.leaves[1])
        same = isinstance(value, Ref) and self.kind(place) is not None and self.kind(place) == self.kind(value)
        return value if same else None

    def scatter(self, step: Step) -> Ref | None:
        buffer, value = self.named(step.leaves[0]), self.named(step.leaves[1])
        dim, index = self.axis_and_index(step, 1)
        made = self.add(replace(step, leaves=[buffer, value, *step.leaves[2:]]))
        self.writes[made] = Write(buffer, value, dim, index)
        return made

    def place(self, step: Step) -> Ref:
        """Zeros but for one place."""
        made = self.add(replace(step, leaves=[self.whole(leaf) for leaf in step.leaves]))
        dim, index = (leaf.get(ONE, 0) for leaf in step.leaves[-2:])
        dim %= step.value.ndim
        self.placed[made] = Placed(dim, {index % hint_of(step.value.shape[dim]): self.named(step.leaves[0])})
        return made

    def sum_of_placed(self, step: Step) -> Ref | None:
        """Two sums of places are one, of all of them."""
        names = [self.named(leaf) if isinstance(leaf, Ref) else None for leaf in step.leaves]
        pair = [self.placed.get(name) for name in names if name is not None]
        if len(names) != 2 or len(pair) != 2 or pair[0] is None or pair[1] is None or pair[0].dim != pair[1].dim:
            return None
        made = self.add(replace(step, leaves=names))
        slices = dict(pair[0].slices)
        for index, ref in pair[1].slices.items():
            slices[index] = ref if index not in slices else self.add(self.sum_of(step, slices[index], ref))
        self.placed[made] = Placed(pair[0].dim, slices)
        return made

    def sum_of(self, step: Step, a: Ref, b: Ref) -> Step:
        return _like(step, aten.add.Tensor, (MARK, MARK), [a, b], self.value(a))

    def detach(self, step: Step) -> Ref | None:
        """A value of the method's own, detached, is that value."""
        value = self.named(step.leaves[0])
        return value if value.step >= 0 else None

    def axis_and_index(self, step: Step, tensors: int) -> tuple[int, int]:
        """The axis and the index of a slice, counted from the front."""
        shape = self.source_value(step.leaves[0]).shape
        dim, index = (leaf.get(ONE, 0) for leaf in step.leaves[1 + tensors : 3 + tensors])
        return dim % len(shape), index % hint_of(shape[dim])

    def source_value(self, ref: Ref) -> Any:
        return _value(self.source, ref)

    def value(self, ref: Ref) -> Any:
        return _value(replace(self.source, steps=self.steps), ref)

    def kind(self, ref: Ref) -> Any:
        value = self.value(ref)
        shape = tuple(hint_of(n) for n in value.shape)
        return (value.dtype, value.device, shape) if isinstance(value, torch.Tensor) else None

    # ------------------------------------------------------------------ what a buffer is in the end
    def put_together(self, buffer: Ref) -> Ref:
        """A buffer that was filled is the stack of its slices."""
        if buffer in self.joined:
            return self.joined[buffer]
        if buffer in self.placed:
            return self.stack_of_placed(buffer)
        slices, below, dim = self.slices_of(buffer)
        if len(slices) < WRITES:
            return buffer
        step = self.steps[buffer.step]
        size = hint_of(step.value.shape[dim])
        missing = [i for i in range(size) if i not in slices]
        if len(missing) > UNWRITTEN:
            return buffer
        slices |= {i: self.add(_selected(step, below, dim, i)) for i in missing}
        self.joined[buffer] = self.add(_stacked(step, [self.put_together(slices[i]) for i in range(size)], dim))
        return self.joined[buffer]

    def stack_of_placed(self, total: Ref) -> Ref:
        """A sum of places is what is at each; and 0, which a sum of it and zeros begins with: it has no -0.0."""
        dim, slices, step = self.placed[total].dim, dict(self.placed[total].slices), self.steps[total.step]
        size = hint_of(step.value.shape[dim])
        missing = [i for i in range(size) if i not in slices]
        if len(slices) < WRITES or len(missing) > UNWRITTEN:
            return total
        some = next(iter(slices.values()))
        slices |= {i: self.add(_zeros(step, some, self.value(some))) for i in missing}
        stack = self.add(_stacked(step, [slices[i] for i in range(size)], dim))
        self.joined[total] = self.add(_like(step, aten.add.Scalar, (MARK, MARK), [stack, _number(0)], step.value))
        return self.joined[total]

    def slices_of(self, buffer: Ref) -> tuple[dict[int, Ref], Ref, int]:
        """The newest slice at each index, what the buffer was before, and the axis."""
        slices: dict[int, Ref] = {}
        dim = self.writes[buffer].dim if buffer in self.writes else 0
        while (write := self.writes.get(buffer)) is not None and write.dim == dim:
            slices.setdefault(write.index, write.slice)
            buffer = write.buffer
        return slices, buffer, dim


PLACED: dict[Any, Any] = {
    aten.select_backward.default: _Rewriting.place,
    aten.add.Tensor: _Rewriting.sum_of_placed,
}
WRITTEN: dict[Any, Any] = {
    aten.select.int: _Rewriting.select,
    aten.copy.default: _Rewriting.copy,
    aten.select_scatter.default: _Rewriting.scatter,
    aten.detach.default: _Rewriting.detach,
    aten.slice.Tensor: _Rewriting.all_of,
    aten.slice_scatter.default: _Rewriting.all_scattered,
}


def _value(program: Program, ref: Ref) -> Any:
    if ref.step < 0:
        return [*program.trace.fakes, *program.trace.lifted][~ref.step]
    value = program.steps[ref.step].value
    return value if ref.port is None else value[ref.port]


def _number(n: int) -> dict[Any, int]:
    return {ONE: n} if n else {}


WHOLE = (0, 0, sys.maxsize, 1)
"""Axis, start, stop and stride of a slice of which nothing was said."""


def _slice_of(leaves: Sequence[Any]) -> tuple[int | None, ...]:
    """The same of a slice by these; None where one is a symbol."""
    pairs = zip(leaves, WHOLE, strict=False)
    given = [_plain(leaf) if isinstance(leaf, Mapping) else default for leaf, default in pairs]
    return (*given, *WHOLE[len(given) :])


def _plain(number: Number) -> int | None:
    return number.get(ONE, 0) if number.keys() <= {ONE} else None


def _selected(step: Step, buffer: Ref, dim: int, index: int) -> Step:
    return _like(step, aten.select.int, (MARK, MARK, MARK), [buffer, _number(dim), _number(index)], _part(step, dim))


def _stacked(step: Step, slices: list[Ref], dim: int) -> Step:
    return _like(step, aten.stack.default, (MARK, MARK), [slices, _number(dim)], step.value)


def _zeros(step: Step, like: Ref, value: Any) -> Step:
    return _like(step, aten.zeros_like.default, (MARK,), [like], value)


def _part(step: Step, dim: int) -> Any:
    return step.value.select(dim, 0)


def _like(step: Step, target: Any, form: Any, leaves: list[Any], value: Any) -> Step:
    """A step at the place of another."""
    return Step(target, (form, {}), leaves, (target, step.place), step.meta, value)


def _pruned(program: Program) -> Program:
    """Without the steps that nothing reads, but for those that draw numbers."""
    alive = _alive(program)
    number = {old: new for new, old in enumerate(sorted(alive))}

    def renamed(leaf: Any) -> Any:
        if isinstance(leaf, list):
            return [renamed(ref) for ref in leaf]
        return Ref(number[leaf.step], leaf.port) if isinstance(leaf, Ref) and leaf.step >= 0 else leaf

    steps = [replace(program.steps[i], leaves=list(map(renamed, program.steps[i].leaves))) for i in sorted(alive)]
    return replace(program, steps=steps, results=list(map(renamed, program.results)))


def _alive(program: Program) -> set[int]:
    alive = {ref.step for ref in refs_in(program.results)}
    for number in reversed(range(len(program.steps))):
        step = program.steps[number]
        if number in alive or torch.Tag.nondeterministic_seeded in getattr(step.target, "tags", ()):
            alive |= {number, *(ref.step for ref in _read_by(step))}
    return {number for number in alive if number >= 0}


def _read_by(step: Step) -> Iterator[Ref]:
    return refs_in(step.leaves)
