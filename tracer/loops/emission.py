"""A rolled trace written in the official session, where the length is a symbol: steps outside as they are, one node for
each loop."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..arithmetic import compute_number
from ..opaque.extension_calls import add_call_node, newest_node, nodes_after
from .affine import ONE, Affine, Fit
from .body import Body, called_with, is_view, of_step, wanted_of
from .description import Each, Items, Outside, Parts, Place, Read, Rolled, Run
from .lengths import symbols_of
from .node import fake_results, loop_function, loop_of
from .program import UNBIND, Constant, Expression, Step, is_sliced
from .reasons import NotRolled
from .rolling import Located
from .turns.multiples import EACH, Multiples

Tensor = torch.Tensor
aten = torch.ops.aten
ROWS = torch.contiguous_format


class Emission:
    """One run on the official fakes, under the tracer: `run` returns the results.

    symbol: the size that is the length of the loops, or such a multiple of it; None where they have fixed ones.
    """

    def __init__(
        self, rolled: Rolled, symbol: sympy.Symbol | None, inputs: Sequence[Any], multiples: Multiples = EACH
    ) -> None:
        self.rolled, self.inputs, self.multiples = rolled, inputs, multiples
        self.located = Located(rolled.shown, rolled.layout)
        self.steps = {p.source.step: s for p, s in self.located.steps.items() if isinstance(p.source, Outside)}
        self.symbols = symbols_of(inputs)
        self.size: Any = 0 if symbol is None else self.symbols.get(symbol)
        self.values: dict[int, Any] = {}
        self.finals: dict[Each, Any] = {}
        self.stacked: dict[Any, Tensor] = {}
        self.given: set[Each] = set()
        self.wanted = wanted_of(rolled, self.located)

    def run(self) -> list[Any]:
        """All steps in order."""
        if self.size is None:
            raise NotRolled("the length of the loop is no size of an argument")
        for kind, number in self.rolled.layout.order(self.rolled.shown):
            (self.step if kind == "step" else self.loop)(number)
        return [self.operand(operand) for operand in self.rolled.results]

    # ------------------------------------------------------------------ steps outside the loops
    def step(self, number: int) -> None:
        """One step as it is; a join of what a loop made, of its stacked results."""
        step, operands = self.steps[number], self.rolled.outside[number]
        if is_sliced(step) and not self.is_read_whole(number):
            self.values[number] = Slices.of(step.target, [self.operand(o) for o in operands])
            return
        with marking(step):
            if any(isinstance(operand, Parts) for operand in operands):
                self.values[number] = self.joined(step, operands)
            else:
                self.values[number] = called(step, [self.operand(o) for o in operands])

    def is_read_whole(self, number: int) -> bool:
        """Whether a list is given to something as it is."""
        return Outside(number) in self.wanted.outside

    def operand(self, operand: Any) -> Any:
        """The value of an operand outside the loops."""
        if isinstance(operand, Read):
            return self.read(operand.source, operand.index)
        if isinstance(operand, Fit):
            return self.number(operand)
        if isinstance(operand, Expression):
            return self.computed(operand.expr)
        if isinstance(operand, Constant):
            return operand.value
        if isinstance(operand, tuple):
            return [self.operand(o) for o in operand]
        raise NotRolled("a list as long as the loop is a result")

    def read(self, source: Any, index: Affine) -> Any:
        if isinstance(source, Outside):
            value = self.inputs[~source.step] if source.step < 0 else self.values[source.step]
            return value if source.port is None else value[source.port]
        if isinstance(source, Items):
            return self.values[source.step].at(self.at(index))
        if self.is_view(source):
            return self.seen_again(source, index)
        if source in self.finals and index == self.last(source.loop):
            return self.finals[source]
        return aten.select.int(self.stacked[source], 0, self.at(index))

    def last(self, loop: int) -> Affine:
        """The index of a loop's last step."""
        count = self.rolled.layout.counts(loop)
        return Affine(0, count.length, count.constant - 1)

    def at(self, affine: Affine) -> Any:
        """The value of a function of the length."""
        return self.multiples.value(affine.length, affine.constant, self.size)

    def number(self, number: Fit) -> Any:
        terms = [self.term(term, self.at(affine)) for term, affine in number.terms]
        return functools.reduce(operator.add, terms) if terms else 0

    def term(self, term: Any, factor: Any) -> Any:
        """One term of a number."""
        if term == ONE:
            return factor
        value = self.computed(term)
        return value if isinstance(factor, int) and factor == 1 else value * factor

    def computed(self, expr: Any) -> Any:
        """A number made of sizes."""
        try:
            return compute_number(expr, self.symbols)
        except KeyError:
            raise NotRolled("a number is made of what is no size of an argument") from None

    # ------------------------------------------------------------------ views
    def is_view(self, source: Each) -> bool:
        """Whether a value of a loop is a view of what the loop is given: seen from outside, it is one as well."""
        return is_view(self.rolled, self.located, source)

    def seen_again(self, source: Each, index: Affine) -> Any:
        """The view that a step of a loop makes, with its number at an index, made outside."""
        step = self.located.steps[Place(Each(source.loop, source.step))]
        operands = self.rolled.bodies[source.loop][source.step]
        return called(step, [self.operand(of_step(source.loop, o, index)) for o in operands])

    # ------------------------------------------------------------------ lists
    def joined(self, step: Step, operands: Sequence[Any]) -> Tensor:
        """stack or cat of a list that is as long as a loop."""
        if step.target not in JOINS:
            raise NotRolled(f"`{step.target}` is given a list as long as the loop")
        parts, *rest = operands
        assert isinstance(parts, Parts)
        dim = self.operand(rest[0]) if rest else 0
        join = JOINS[step.target]
        pieces = [self.piece(p, join, dim) for p in parts.parts]
        if step.target is aten.stack.default:
            return stacked_along([p if many else p.unsqueeze(0) for p, many in pieces], dim)
        return concatenated([chained(p, dim) if many else p for p, many in pieces], dim)

    def piece(self, part: Any, join: Join, dim: int) -> tuple[Tensor, bool]:
        """One part of a list, and whether it is many values, along axis 0."""
        if isinstance(part, Read):
            return self.read(part.source, part.index), False
        if isinstance(part, tuple):
            return join([self.run_of(run) for run in part], dim), True
        return self.run_of(part), True

    def run_of(self, part: Run) -> Tensor:
        """The values of a run, along axis 0."""
        count, start = self.at(part.count), self.at(part.start)
        low = start if part.direction > 0 else start - count + 1
        if isinstance(part.source, Items):
            whole = self.values[part.source.step].all().narrow(0, low, count)
        elif self.is_all(part):
            return self.whole(part.source) if part.direction > 0 else self.stacked[part.source].flip(0)
        else:
            whole = self.stacked[part.source].narrow(0, low, count)
        in_order: Tensor = whole.clone(memory_format=ROWS) if part.direction > 0 else whole.flip(0)
        return in_order

    def is_all(self, part: Run) -> bool:
        """Whether a run is all that a loop made."""
        assert isinstance(part.source, Each)
        return part.count == self.rolled.layout.counts(part.source.loop)

    def whole(self, source: Any) -> Tensor:
        """All that a step of a loop's body made; memory of its own for each that is given it."""
        is_given, value = source in self.given, self.stacked[source]
        self.given.add(source)
        return value.clone() if is_given else value

    # ------------------------------------------------------------------ loops
    def loop(self, number: int) -> None:
        """A node for all steps of a loop; its results under their names."""
        body = Body(self, number)
        count = self.at(self.rolled.layout.counts(number))
        if not count >= 1:
            raise NotRolled("at this length the loop has no step that is like the others")
        if not body.carries and not body.stacked:
            return  # views, which its readers make themselves
        body.trace(count)
        loop = loop_function(body.module(), len(body.carries))
        origin = self.located.steps[next(p for p in self.located.places if _is_of(p.source, number))].meta
        results = body.results(count)
        carried = tuple(body.initial())
        add_call_node(loop, (count, carried, tuple(body.wholes)), {}, results, "loop", origin.get("fusegrad_origin"))
        last, stacked = results[: len(carried)], results[len(carried) :]
        self.finals |= {each: last[i] for each, i in body.final_at.items()}
        self.stacked |= dict(zip(body.stacked, stacked, strict=True))


def _is_of(source: Any, loop: int) -> bool:
    return isinstance(source, Each) and source.loop == loop


@dataclass(frozen=True)
class Slices:
    """The slices of a tensor along an axis; kept: each with that axis, of length 1."""

    base: Tensor
    axis: int
    kept: bool

    @classmethod
    def of(cls, target: Any, operands: Sequence[Any]) -> Slices:
        """What `unbind` or `split(1)` takes of a tensor."""
        base, *more = operands
        is_split = target is not UNBIND
        axis = more[is_split:]
        return cls(base, axis[0] % base.dim() if axis else 0, is_split)

    def at(self, index: Any) -> Tensor:
        """One slice."""
        if self.kept:
            return aten.slice.Tensor(self.base, self.axis, index, index + 1)  # type: ignore[no-any-return]
        return aten.select.int(self.base, self.axis, index)  # type: ignore[no-any-return]

    def all(self) -> Tensor:
        """All slices along a new first axis."""
        moved = self.base.movedim(self.axis, 0)
        return moved.unsqueeze(self.axis + 1) if self.kept else moved


def called(step: Step, leaves: Sequence[Any]) -> Any:
    """The operation of a step on these; of a loop, its node."""
    target, args, kwargs = called_with(step, leaves)
    if (loop := loop_of(target)) is None:
        return target(*args, **kwargs)
    return add_call_node(target, args, {}, fake_results(loop, *args), "loop", step.meta.get("fusegrad_origin"))


class marking:
    """Within the block, operations come from a step: its line, and what else is noted of it."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def __enter__(self) -> None:
        mode: Any = get_proxy_mode()
        self.graph = mode.tracer.graph
        self.last = newest_node(self.graph)

    def __exit__(self, *_: object) -> None:
        for node in nodes_after(self.last, self.graph):
            node.meta.update(self.step.meta)


def stacked_along(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """Values along axis 0 as `torch.stack(..., dim)` has them."""
    whole = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
    dim = dim % whole.dim()
    return whole if dim == 0 else whole.movedim(0, dim).clone(memory_format=ROWS)


def chained(values: Tensor, dim: int) -> Tensor:
    """Values along axis 0 as `torch.cat(..., dim)` has them."""
    dim = dim % (values.dim() - 1)
    return values.movedim(0, dim).clone(memory_format=ROWS).flatten(dim, dim + 1)


def in_turn(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """One value of each, the next one of each, ..: along axis 0."""
    return torch.stack(list(pieces), 1).flatten(0, 1)


def side_by_side(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """The values of each turn one behind the other."""
    return torch.cat(list(pieces), dim % (pieces[0].dim() - 1) + 1)


Join = Callable[[Sequence[Tensor], int], Tensor]
JOINS: dict[Any, Join] = {aten.stack.default: in_turn, aten.cat.default: side_by_side}
"""Operations that a list as long as the loop may be given to; how values of several sources are joined for it."""


def concatenated(pieces: Sequence[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim)

