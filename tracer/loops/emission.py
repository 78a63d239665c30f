"""A rolled trace written in the official session, where the length is a symbol: steps outside as they are, one node for
each loop."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..arithmetic import compute_number
from ..opaque.extension_calls import add_call_node, newest_node, nodes_after
from .affine import ONE, Affine, Fit
from .body import Body, wanted_of
from .description import Each, Items, Outside, Parts, Read, Rolled, Run
from .lengths import symbols_of
from .node import loop_function
from .program import UNBIND, Constant, Expression, Step, with_leaves
from .reasons import NotRolled
from .rolling import Located

Tensor = torch.Tensor
aten = torch.ops.aten
JOINS = (aten.stack.default, aten.cat.default)
"""Operations that a list as long as the loop may be given to."""


class Emission:
    """One run on the official fakes, under the tracer: `run` returns the results."""

    def __init__(self, rolled: Rolled, symbol: sympy.Symbol, inputs: Sequence[Any]) -> None:
        self.rolled, self.inputs = rolled, inputs
        self.located = Located(rolled.shown, rolled.layout)
        self.steps = {p.source.step: s for p, s in self.located.steps.items() if isinstance(p.source, Outside)}
        self.symbols = symbols_of(inputs)
        self.length: Any = self.symbols.get(symbol)
        self.values: dict[int, Any] = {}
        self.finals: dict[Each, Any] = {}
        self.stacked: dict[Any, Tensor] = {}
        self.given: set[Each] = set()
        self.wanted = wanted_of(rolled)

    def run(self) -> list[Any]:
        """All steps in order."""
        if self.length is None:
            raise NotRolled("the length of the loop is no size of an argument")
        for kind, number in self.rolled.layout.order(self.rolled.shown):
            (self.step if kind == "step" else self.loop)(number)
        return [self.operand(operand) for operand in self.rolled.results]

    # ------------------------------------------------------------------ steps outside the loops
    def step(self, number: int) -> None:
        """One step as it is; a join of what a loop made, of its stacked results."""
        step, operands = self.steps[number], self.rolled.outside[number]
        if step.target is UNBIND and not self.is_read_whole(number):
            self.values[number] = [self.operand(o) for o in operands]
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
            base, *dim = self.values[source.step]
            return aten.select.int(base, *(dim or [0]), self.at(index))
        if source in self.finals and index == self.last(source.loop):
            return self.finals[source]
        return aten.select.int(self.stacked[source], 0, self.at(index))

    def last(self, loop: int) -> Affine:
        """The index of a loop's last step."""
        count = self.rolled.layout.counts(loop)
        return Affine(0, count.length, count.constant - 1)

    def at(self, affine: Affine) -> Any:
        """The value of a function of the length."""
        if not affine.length:
            return affine.constant
        scaled = self.length if affine.length == 1 else self.length * affine.length
        return scaled + affine.constant if affine.constant else scaled

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

    # ------------------------------------------------------------------ lists
    def joined(self, step: Step, operands: Sequence[Any]) -> Tensor:
        """stack or cat of a list that is as long as a loop."""
        if step.target not in JOINS:
            raise NotRolled(f"`{step.target}` is given a list as long as the loop")
        parts, *rest = operands
        assert isinstance(parts, Parts)
        dim = self.operand(rest[0]) if rest else 0
        pieces = [self.piece(p) for p in parts.parts]
        if step.target is aten.stack.default:
            return stacked_along([p if many else p.unsqueeze(0) for p, many in pieces], dim)
        return concatenated([chained(p, dim) if many else p for p, many in pieces], dim)

    def piece(self, part: Read | Run) -> tuple[Tensor, bool]:
        """One part of a list, and whether it is many values, along axis 0."""
        if isinstance(part, Read):
            return self.read(part.source, part.index), False
        count, start = self.at(part.count), self.at(part.start)
        if isinstance(part.source, Items):
            base, *dim = self.values[part.source.step]
            whole = base.movedim(*(dim or [0]), 0)
        else:
            whole = self.whole(part.source)
        low = start if part.direction > 0 else start - count + 1
        if not (isinstance(part.source, Each) and self.is_all(part)):
            whole = whole.narrow(0, low, count)
        return whole if part.direction > 0 else whole.flip(0), True

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


def called(step: Step, leaves: Sequence[Any]) -> Any:
    """The operation of a step on these."""
    supply = iter(leaves)
    args, kwargs = with_leaves(step.form, lambda: next(supply))
    return step.target(*args, **kwargs)


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
    return whole if dim == 0 else whole.movedim(0, dim).contiguous()


def chained(values: Tensor, dim: int) -> Tensor:
    """Values along axis 0 as `torch.cat(..., dim)` has them."""
    dim = dim % (values.dim() - 1)
    return values.movedim(0, dim).flatten(dim, dim + 1)


def concatenated(pieces: Sequence[Tensor], dim: int) -> Tensor:
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(list(pieces), dim)

