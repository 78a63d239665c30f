"""The dims of a Function's arguments that may be divided among ranks, by its graphs, forward and backward each.

A capture at the whole sizes says what is computed. Where the rules of ir/sharding prove that the same graphs on the
ranks' parts give the parts of its results, a dim may be divided; else the record says which operation needs all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import sympy

from ...ir import Graph
from ...ir.program import ValueRef
from ...ir.sharding.rules import PARTIAL, WHOLE, ZERO, State, dims, divide
from ...ir.sharding.scaling import NONE, NotDivisible
from ...ir.transforms.extern import op_name, source_place
from ...tracer.function import symbols_in
from ...tracer.trace import CaptureError
from ..capture.captured import present_residuals
from ..capture.captured_backward import gradient_likes, predicted_kinds
from ..capture.guards import Guard, is_float
from ..execution.graph_to_kernels import graph_of
from ..specialize.specialization import Specialization

MOST_MASKS = 3
"""Outputs of a class that asks for no zeros up to which every combination of missing gradients is looked at."""
DUAL: Mapping[State, State] = {WHOLE: PARTIAL, PARTIAL: WHOLE}
"""Of a gradient: parts of what is divided, a sum for what every rank reads, the whole for each part of a sum."""


def dual(state: State) -> State:
    """The state of the gradient of what is in this state."""
    return DUAL.get(state, state)


@dataclass(frozen=True)
class ShardingPlan:
    """One dim divided: the states of the tensor arguments and of the tensor results. even: parts of one size alone.

    scales, gradients: by which power of its share a rank multiplies its part of a result, and of the gradient of a
    tensor argument, since a number in it was made of the part's size.
    """

    symbol: sympy.Symbol
    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    even: bool
    scales: tuple[Fraction, ...]
    gradients: tuple[Fraction, ...]


class ShardingPropagation:
    """The dims of a specialisation that may be divided; it was captured at the whole sizes."""

    def __init__(self, spec: Specialization, asks_backward: bool) -> None:
        """asks_backward: the user wrote one, which will run; what is derived of forward is divided as forward is."""
        captured = spec.captured
        self.spec = spec
        self.ways: dict[sympy.Symbol, ShardingPlan] = {}
        self.refused: dict[sympy.Symbol, str] = {}
        graphs = list(_backwards(spec)) if asks_backward else []
        # Forward at last: the session then knows what backward assumed.
        forward = graph_of(captured.forward.trace, f"{captured.name}_forward")
        backwards = [(mask, graph_of(trace, f"{captured.name}_backward")) for mask, trace in graphs]
        for graph in (forward, *(g for _, g in backwards)):
            _require_same_everywhere(graph)
        self.dims = [v.shape for v in forward.inputs[: len(captured.slots)]]  # as the graphs write them
        for symbol in dims(forward):
            try:
                self.ways[symbol] = _way(spec, forward, backwards, symbol)
            except NotDivisible as error:
                self.refused[symbol] = str(error)
        self.guard: Guard = captured.current_guard()

    def why_not(self, argument: int, axis: int) -> str | None:
        """The reason why an axis of a tensor argument cannot be divided; None where it can, by itself."""
        size = self.dims[argument][axis]
        if isinstance(size, sympy.Symbol):
            return self.refused.get(size)
        if any(way.inputs[argument] == axis for way in self.ways.values()):
            return None
        return f"its size is {size} in the trace, which is no dim of its own"


def _require_same_everywhere(graph: Graph) -> None:
    """Raises CaptureError for what each rank would do on its own: draw its random numbers, or call who knows what."""
    for node in graph.order():
        if node.prim == "aten_effect" and node.avals:
            reason = f"it is given DTensors, and draws random numbers (`{op_name(node)}`)"
            raise CaptureError(reason=reason, where=source_place(node))
        if node.prim == "call":
            reason = "it is given DTensors, and calls another Function, which is divided apart"
            raise CaptureError(reason=reason, where=source_place(node))


def _backwards(spec: Specialization) -> Iterator[tuple[tuple[bool, ...], Any]]:
    """(which outputs have a gradient, backward's trace) for every such combination that a call may meet."""
    captured = spec.captured
    kinds = predicted_kinds(captured)
    moving = [i for i, k in enumerate(kinds) if k is not None and is_float(gradient_likes(captured)[i])]
    missing: Iterable[tuple[int, ...]] = [()]
    if not captured.forward.materialize_grads and len(moving) > 1:
        if len(moving) > MOST_MASKS:
            raise NotDivisible(why=f"backward may be given any of {len(moving)} gradients without the others")
        missing = (c for n in range(len(moving)) for c in itertools.combinations(moving, n))
    for left_out in missing:
        mask = tuple(k is not None and i not in left_out for i, k in enumerate(kinds))
        entry = spec.backward.entry(tuple(k if is_present else None for k, is_present in zip(kinds, mask, strict=True)))
        if any(t.dim() for t in entry.trace.lifted):
            reason = "it is given DTensors, and backward reads another tensor"
            raise CaptureError(reason=reason, where=captured.backward_place())
        yield mask, entry.trace


def _way(
    spec: Specialization, forward: Graph, backwards: Sequence[tuple[tuple[bool, ...], Graph]], symbol: sympy.Symbol
) -> ShardingPlan:
    """The states of arguments and results where the symbol is divided. Raises NotDivisible."""
    captured = spec.captured
    returned = [o.value for o in captured.forward.outputs if o.kind == "object"]
    if symbol in symbols_in(returned):
        raise NotDivisible(why="it returns its size")
    # Forward first: what it proves of its results is where backward begins.
    division = divide(forward, symbol)
    tensors = len(captured.forward.tensor_outputs)
    states = [WHOLE if s == ZERO else s for s in division.outputs if s is not None]
    ends = Ends(spec, division.inputs[: len(captured.slots)], states[:tensors], states[tensors:], division.degrees)
    if any(captured.forward.needs_input_grad) and any(ends.outputs[i] == WHOLE for i in _moving(spec)):
        raise NotDivisible(why="a result that has a gradient does not depend on it, though others do")
    # Every backward that a call may meet has to agree on the gradients, since one plan serves them all.
    even, gradients = division.even, [NONE] * len(captured.slots)
    for number, (mask, graph) in enumerate(backwards):
        through = _through(ends, graph, mask, symbol)
        if number and through.degrees != gradients:
            raise NotDivisible(why="which results have a gradient decides how backward computes with its size")
        even, gradients = even or through.even, through.degrees
    scales = tuple(division.degrees[:tensors])
    return ShardingPlan(symbol, ends.inputs, tuple(ends.outputs), even, scales, tuple(gradients))


@dataclass(frozen=True)
class Ends:
    """The ends of forward that backward reads, where a dim is divided: states, and the degrees of all results."""

    spec: Specialization
    inputs: tuple[State, ...]
    outputs: Sequence[State]
    hidden: Sequence[State]
    degrees: Sequence[Fraction]

    def degree_at(self, place: ValueRef) -> Fraction:
        """The degree of what is saved."""
        if place.kind == "input":
            return NONE
        return self.degrees[place.index + (len(self.outputs) if place.kind == "hidden" else 0)]


class Through(NamedTuple):
    """Backward on parts: whether they have to be equal, and the degrees of the gradients of the tensor arguments."""

    even: bool
    degrees: list[Fraction]


def _moving(spec: Specialization) -> list[int]:
    """The tensor results that have a gradient."""
    fixed = {p.index for p in spec.captured.forward.non_differentiable if p.kind == "output"}
    return [i for i, fake in enumerate(spec.captured.forward.fake_outputs) if is_float(fake) and i not in fixed]


def _through(ends: Ends, graph: Graph, mask: Sequence[bool], symbol: sympy.Symbol) -> Through:
    """Proves that backward on parts gives parts of gradients, or what adds up to them."""
    spec = ends.spec
    at = {"input": ends.inputs, "output": ends.outputs, "hidden": ends.hidden}
    # The states in which backward's inputs are: residuals as forward left them, gradients dual to their outputs.
    places = present_residuals(spec.captured)
    supply = iter(zip(ends.outputs, ends.degrees, strict=False))
    per_output = [None if o.kind == "object" else next(supply) for o in spec.captured.forward.outputs]
    incoming = [s for s, is_present in zip(per_output, mask, strict=True) if is_present and s is not None]
    states = [*(at[p.kind][p.index] for p in places), *(dual(s) for s, _ in incoming)]
    scaled = [*map(ends.degree_at, places), *(-degree for _, degree in incoming)]
    division = divide(graph, symbol, dict(enumerate(states)), dict(enumerate(scaled)))
    supplied = iter(division.degrees)
    degrees = [None if o is None else next(supplied) for o in division.outputs]
    # A gradient has to be dual to its argument, or to become so by the share of each rank.
    gradients = [NONE] * len(spec.captured.slots)
    for number, (slot, state) in enumerate(zip(spec.captured.slots, ends.inputs, strict=True)):
        gradient = division.outputs[slot] if slot < len(division.outputs) else None
        if gradient is not None and gradient != ZERO:
            gradients[number] = (degrees[slot] or NONE) + _turned(spec.captured.names[slot], gradient, dual(state))
        elif gradient == ZERO and isinstance(dual(state), int):
            raise _differs(spec.captured.names[slot], gradient, dual(state))
    return Through(division.even, gradients)


def _turned(name: str, actual: State, expected: State) -> int:
    """The growth of the degree where a gradient is taken in the expected state: a whole is the sum of its shares."""
    if actual == WHOLE and expected == PARTIAL:
        return 1
    if actual != expected:
        raise _differs(name, actual, expected)
    return 0


def _differs(name: str, actual: State, expected: State) -> NotDivisible:
    return NotDivisible(why=f"backward's gradient of `{name}` is {_words(actual)} and not {_words(expected)}")


def _words(state: State) -> str:
    words = {WHOLE: "the same on every rank", PARTIAL: "a sum over the ranks"}
    return words.get(str(state), f"divided along axis {state}")
