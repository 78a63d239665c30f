"""A program written once more, step by step, by rules for what its steps call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...capture.grad_mode import CUT, HISTORY
from ...sizes import hint_of
from ..affine import ONE, Number
from ..program import MARK, Program, Ref, Step, refs_in

aten = torch.ops.aten
WRITES = 3
"""Writes to one buffer, or places of one sum, from which on they are a loop's."""
UNWRITTEN = 4
"""The most places of a buffer that a loop leaves as they were."""
WHOLE = (0, 0, sys.maxsize, 1)
"""Axis, start, stop and stride of a slice of which nothing was said."""


@dataclass(frozen=True)
class Write:
    """A buffer with one slice of it exchanged. span: so many places from the index on; None: one, without its axis."""

    buffer: Ref
    slice: Ref
    dim: int
    index: int
    span: int | None = None


@dataclass(frozen=True)
class Place:
    """What is added up at one place; has_whole: with what has all places and is added as well."""

    value: Ref
    has_whole: bool = False


@dataclass(frozen=True)
class Places:
    """A sum of tensors that are zero but for places along a dim.

    model: a step that makes one of them. number: how many are added up. whole: what has all places and is added, too.
    """

    model: Step
    dim: int
    at: Mapping[int, Place]
    number: int
    whole: Ref | None = None


Rule = Callable[["Rewriting", Step], Ref | None]
Finish = Callable[["Rewriting", Ref], Ref | None]


class Rewriting:
    """What becomes of a program: each step by the rule for it, else as it is.

    finish: what a value that a rule only took note of is, once it is read as a whole.
    """

    def __init__(self, program: Program, rules: Mapping[Any, Rule], finish: Sequence[Finish]) -> None:
        self.source, self.rules, self.finish = program, rules, finish
        self.steps: list[Step] = []
        self.known: dict[Ref, Ref] = {}  # values of the program by their new names
        self.writes: dict[Ref, Write] = {}
        self.placed: dict[Ref, Places] = {}
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
        rule, before = self.rules.get(step.target), len(self.steps)
        found = rule(self, step) if rule is not None else None
        if found is not None and is_cut_off(step):
            found = self.cut_off(step, found, found.step >= before)
        self.known[ref] = self.as_it_is(step) if found is None else found

    def cut_off(self, step: Step, found: Ref, is_own: bool) -> Ref:
        """What a rule found for a step that autograd does not follow, without the history of what it stands for."""
        if not is_own or self.steps[found.step].meta is not step.meta:
            return self.unfollowed(step, self.put_together(found))
        self.placed.pop(found, None)
        if (write := self.writes.get(found)) is not None:
            self.writes[found] = replace(write, slice=self.unfollowed(step, write.slice))
        return found

    def unfollowed(self, step: Step, ref: Ref) -> Ref:
        """A value as it is behind a step that cuts it off: where that only turned the grad mode off, with tangents."""
        target = aten.detach.default if step.meta.get(CUT) else aten.alias.default
        token = (target, step.place, tuple(mark for mark in HISTORY if step.meta.get(mark)))
        return self.add(Step(target, ((MARK,), {}), [ref], token, step.meta, self.value(ref)))

    def as_it_is(self, step: Step) -> Ref:
        return self.add(replace(step, leaves=[self.whole(leaf) for leaf in step.leaves]))

    def add(self, step: Step) -> Ref:
        self.steps.append(step)
        return Ref(len(self.steps) - 1)

    def whole(self, leaf: Any) -> Any:
        """An operand, where a filled buffer is read as a whole."""
        if isinstance(leaf, list):
            return [self.whole(ref) for ref in leaf]
        return self.put_together(self.named(leaf)) if isinstance(leaf, Ref) else leaf

    def put_together(self, buffer: Ref) -> Ref:
        """What a value is in the end that rules took note of."""
        if buffer not in self.joined:
            found = next((ref for finish in self.finish if (ref := finish(self, buffer)) is not None), None)
            self.joined[buffer] = buffer if found is None else self.laid_out(self.steps[buffer.step], found)
        return self.joined[buffer]

    def laid_out(self, step: Step, ref: Ref) -> Ref:
        """A value that stands for that of a step, its axes in memory in the order in which that has them."""
        order = layout_of(step.value)
        if order is None or layout_of(self.value(ref)) == order:
            return ref
        rows = self.add(turned(step, ref, self.value(ref), order))
        copy = self.add(in_rows(step, rows, self.value(rows)))
        return self.add(turned(step, copy, self.value(copy), [order.index(axis) for axis in range(len(order))]))

    # ------------------------------------------------------------------ what the steps of the source say
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


def _value(program: Program, ref: Ref) -> Any:
    if ref.step < 0:
        return [*program.trace.fakes, *program.trace.lifted][~ref.step]
    value = program.steps[ref.step].value
    return value if ref.port is None else value[ref.port]


def layout_of(value: Any) -> list[int] | None:
    """The axes by their strides, the longest first: results of torch's operations have them in this order, too.

    None where values stand at several places, or it is no tensor.
    """
    if not isinstance(value, torch.Tensor):
        return None
    sizes, strides = (list(map(hint_of, ns)) for ns in (value.shape, value.stride()))
    if any(stride == 0 and size > 1 for size, stride in zip(sizes, strides, strict=True)):
        return None
    axes = iter(sorted((d for d, n in enumerate(sizes) if n != 1), key=lambda d: -strides[d]))
    return [d if n == 1 else next(axes) for d, n in enumerate(sizes)]


# ---------------------------------------------------------------------- numbers
def number(n: int) -> Number:
    return {ONE: n} if n else {}


def plain(leaf: Any) -> int | None:
    """A number that is no symbol."""
    return leaf.get(ONE, 0) if isinstance(leaf, Mapping) and leaf.keys() <= {ONE} else None


def slice_of(leaves: Sequence[Any]) -> tuple[int | None, ...]:
    """Axis, start, stop and stride of a slice by what was said of them; None where one is a symbol."""
    pairs = zip(leaves, WHOLE, strict=False)
    given = [plain(leaf) if isinstance(leaf, Mapping) else default for leaf, default in pairs]
    return (*given, *WHOLE[len(given) :])


# ---------------------------------------------------------------------- steps
def selected(step: Step, buffer: Ref, dim: int, index: int) -> Step:
    return like(step, aten.select.int, [buffer, number(dim), number(index)], step.value.select(dim, 0))


def stacked(step: Step, slices: list[Ref], dim: int) -> Step:
    rows = step.value.contiguous()
    return like(step, aten.stack.default, [slices, number(dim)], rows)


def sliced(step: Step, buffer: Ref, dim: int, index: int, span: int) -> Step:
    leaves = [buffer, *map(number, (dim, index, index + span))]
    return like(step, aten.slice.Tensor, leaves, step.value.narrow(dim, 0, span))


def chained(step: Step, blocks: list[Ref], dim: int) -> Step:
    return like(step, aten.cat.default, [blocks, number(dim)], step.value.contiguous())


def zeros(step: Step, model: Ref, value: Any) -> Step:
    return like(step, aten.zeros_like.default, [model], value)


def like(step: Step, target: Any, leaves: list[Any], value: Any) -> Step:
    """A step at the place of another; autograd follows it to what it is made of."""
    return Step(target, ((MARK,) * len(leaves), {}), leaves, (target, step.place), followed(step.meta), value)


def is_cut_off(step: Step) -> bool:
    """True of a step whose results autograd does not follow: the method detached, or turned the grad mode off."""
    return any(step.meta.get(mark) for mark in HISTORY)


def followed(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in meta.items() if key not in HISTORY}


def turned(step: Step, ref: Ref, value: Any, order: Sequence[int]) -> Step:
    form: Any = ((MARK, [MARK] * len(order)), {})
    token = (aten.permute.default, len(order), step.place)
    meta = followed(step.meta)
    return Step(aten.permute.default, form, [ref, *map(number, order)], token, meta, value.permute(*order))


def in_rows(step: Step, ref: Ref, value: Any) -> Step:
    """A copy, row-major."""
    form: Any = ((MARK,), {"memory_format": torch.contiguous_format})
    copy = value.clone(memory_format=torch.contiguous_format)
    return Step(aten.clone.default, form, [ref], (aten.clone.default, step.place), followed(step.meta), copy)


# ---------------------------------------------------------------------- what is left
def _pruned(program: Program) -> Program:
    """Without the steps that nothing reads, but for those that draw numbers."""
    alive = _alive(program)
    renumbered = {old: new for new, old in enumerate(sorted(alive))}

    def renamed(leaf: Any) -> Any:
        if isinstance(leaf, list):
            return [renamed(ref) for ref in leaf]
        return Ref(renumbered[leaf.step], leaf.port) if isinstance(leaf, Ref) and leaf.step >= 0 else leaf

    steps = [replace(program.steps[i], leaves=list(map(renamed, program.steps[i].leaves))) for i in sorted(alive)]
    return replace(program, steps=steps, results=list(map(renamed, program.results)))


def _alive(program: Program) -> set[int]:
    alive = {ref.step for ref in refs_in(program.results)}
    for index in reversed(range(len(program.steps))):
        step = program.steps[index]
        if index in alive or torch.Tag.nondeterministic_seeded in getattr(step.target, "tags", ()):
            alive |= {index, *(ref.step for ref in _read_by(step))}
    return {index for index in alive if index >= 0}


def _read_by(step: Step) -> Iterator[Ref]:
    return refs_in(step.leaves)
