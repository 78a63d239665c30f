"""Computing a graph in parts: one dim of some inputs is divided among ranks, and each runs the same graph.

    y = x * w.sum()     x: rows divided, w whole    ->  y: rows divided
    s = (x * x).sum(0)  x: rows divided             ->  s: partial, the ranks' parts have to be added

A dim is a symbol of the capture: all sizes that are this symbol are divided together. Per rank a value is WHOLE (every
rank has it), PARTIAL (the value is the sum over the ranks), or divided along an axis, which its shape tells: that where
the symbol stands. The rules, one per primitive, say what a node computed on such operands is, or refuse. What becomes
of numbers that are made of the divided size, such as the count in a mean, is told by scaling.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import sympy

from ..graph import Graph, Value
from ..prims import PRIMS
from ..rewrite import number_of
from ..types import FLOATS, INTEGERS, Size, product, simplify_size
from .scaling import NotDivisible, degrees, mentions, refusal

WHOLE, PARTIAL, POSITION, ZERO = "whole", "partial", "position", "zero"
State: TypeAlias = "int | str"
"""The axis that is divided, WHOLE or PARTIAL; or POSITION, of what counts along the divided axis from 0 on each rank.

An output that is ZERO is both whole and a sum of parts.
"""


@dataclass(frozen=True)
class Divided:
    """One way to run a graph in parts: the states of its inputs and outputs where `symbol` is divided.

    even: whether the parts must be equally large, since some result has several elements for each of the dim's.
    degrees: of the outputs that there are, by which power of a rank's share they have to be multiplied (scaling.py).
    """

    symbol: sympy.Symbol
    inputs: tuple[State, ...]
    outputs: tuple[State | None, ...]
    even: bool
    degrees: tuple[Fraction, ...]


def dims(graph: Graph) -> list[sympy.Symbol]:
    """The symbols that are the size of some input's dim, in the order of the inputs."""
    return list(dict.fromkeys(n for v in graph.inputs for n in v.shape if isinstance(n, sympy.Symbol)))


def divide(
    graph: Graph, symbol: sympy.Symbol,
    partial: Mapping[int, State] | None = None, scaled: Mapping[int, Fraction] | None = None,
) -> Divided:  # fmt: skip
    """The states of the graph's outputs where `symbol` is divided. Raises NotDivisible, naming the node.

    partial: states of inputs by number, for those that are not told by their shape (PARTIAL ones). scaled: degrees of
    inputs by number, where they are not 0.
    """
    if graph.mutations:
        raise NotDivisible(why="it writes to an argument")
    states: dict[int, State] = {}
    # Inputs by their shapes, and by the caller where a shape does not tell (PARTIAL).
    for number, value in enumerate(graph.inputs):
        state = (partial or {}).get(number, WHOLE)
        states[value.id] = _checked_state(value, state, symbol)
    # Then node by node; the shape of a result has the last word on its axis.
    for node in graph.order():
        states[node.id] = state_of(node, [states[a.id] for a in node.args], symbol)
    outputs = tuple(None if o is None else _result(o, states[o.id]) for o in graph.outputs)
    # Parts may differ in size by one unless a boundary value has several elements for each of the dim's.
    ends = [*graph.inputs, *(o for o in graph.outputs if o is not None)]
    even = any(unit(v, symbol) != 1 for v in ends if isinstance(states[v.id], int))
    inputs = tuple(states[v.id] for v in graph.inputs)
    return Divided(symbol, inputs, outputs, even, degrees(graph, symbol, scaled))


def state_of(node: Value, operands: Sequence[State], symbol: sympy.Symbol) -> State:
    """The state of a node computed on such operands. Raises NotDivisible, naming it."""
    return _checked_state(node, _node_state(node, operands, symbol), symbol)


def _result(value: Value, state: State) -> State:
    if state == POSITION:
        raise refusal(value, "counts along it")
    return ZERO if state == WHOLE and _is_zero(value) else state


def axis_of(value: Value, symbol: sympy.Symbol) -> int | None:
    """The axis whose size is a multiple of the symbol; None where it is in no size. Raises NotDivisible."""
    axes = [axis for axis, size in enumerate(value.shape) if mentions(size, symbol)]
    if len(axes) > 1:
        raise refusal(value, "pairs its elements with each other")
    if axes and _per_element(value.shape[axes[0]], symbol) is None:
        raise refusal(value, f"makes a dim of size {value.shape[axes[0]]} of it")
    return axes[0] if axes else None


def unit(value: Value, symbol: sympy.Symbol) -> Size:
    """The number of elements of a value's divided axis for each element of the dim."""
    axis = axis_of(value, symbol)
    count = None if axis is None else _per_element(value.shape[axis], symbol)
    assert count is not None
    return count


def _per_element(size: Size, symbol: sympy.Symbol) -> Size | None:
    """The coefficient of the symbol in a size; None where it is no multiple of it."""
    coefficient = sympy.sympify(size).as_coefficient(symbol)
    return None if coefficient is None else simplify_size(coefficient)


def _is_same_size(a: Size, b: Size) -> bool:
    return a == b or sympy.expand(sympy.sympify(a) - b) == 0


def _checked_state(value: Value, state: State, symbol: sympy.Symbol) -> State:
    """The state, which has to be what the shape says: parts of a divided value alone are smaller."""
    if len(value.avals) != 1:
        return state
    axis = axis_of(value, symbol)
    if axis is None and isinstance(state, int):
        raise refusal(value, "loses it")
    if axis is None or state == POSITION:
        return state
    if state == PARTIAL:
        raise refusal(value, "spreads over it what is a sum over it")
    return axis


# ---------------------------------------------------------------------------------------------- the rules
Rule: TypeAlias = "Callable[[Value, Sequence[State], sympy.Symbol], State]"
"""(the node, the states of its operands, the symbol) -> the state of its result; any axis means the divided one."""

DIVIDED = 0
"""What a rule returns for a divided result: `_consistent` puts the axis that the shape tells in its place."""


def _node_state(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    rule = sharding_rules.get(node.prim)
    if rule is None:
        raise refusal(node, "has no rule for parts")
    if POSITION in states and node.prim not in KEEPS_POSITIONS:
        raise refusal(node, "asks for the position along it")
    return rule(node, states, symbol)


def _state_by_shape(node: Value, symbol: sympy.Symbol) -> State:
    return WHOLE if axis_of(node, symbol) is None else DIVIDED


def _is_zero(value: Value) -> bool:
    return number_of(value) == 0


def _elementwise(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    if PARTIAL in states and not linear_rules.get(node.prim, _is_never_linear)(node, states):
        raise refusal(node, "is not linear in a sum over it, of which each rank has a part")
    return PARTIAL if PARTIAL in states else _state_by_shape(node, symbol)


def _is_never_linear(node: Value, states: Sequence[State]) -> bool:
    return False


def _all_partial(node: Value, states: Sequence[State]) -> bool:
    """True if all operands are partial; a zero is."""
    return all(s == PARTIAL or _is_zero(a) for a, s in zip(node.args, states, strict=True))


def _one_partial(node: Value, states: Sequence[State]) -> bool:
    return sorted(map(str, states)) == [PARTIAL, WHOLE]


linear_rules: dict[str, Callable[[Value, Sequence[State]], bool]] = {
    **dict.fromkeys(("neg", "conj"), _all_partial),
    **dict.fromkeys(("add", "sub"), _all_partial),
    "cast": lambda node, states: node.dtype in FLOATS and node.args[0].dtype in (*FLOATS, *INTEGERS),
    **dict.fromkeys(("mul", "dot"), _one_partial),
    "div": lambda node, states: list(states) == [PARTIAL, WHOLE],
    "where": lambda node, states: states[0] == WHOLE and all(
        s == PARTIAL or _is_zero(a) for a, s in zip(node.args[1:], states[1:], strict=True)
    ),
}  # fmt: skip
"""Elementwise primitives of partial operands: whether the result is the sum of the ranks' results."""


def _iota(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    if not mentions(node.params["size"], symbol):
        return WHOLE
    if node.params["size"] != symbol:
        raise refusal(node, "counts along it")
    return POSITION


def _layout(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    return states[0] if states[0] in (PARTIAL, POSITION) else _state_by_shape(node, symbol)


def _reshape(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    """Elements keep their rank where as many of them are in front of the divided axis as before."""
    (x,) = node.args
    before, after = axis_of(x, symbol), axis_of(node, symbol)
    if before is None or after is None:
        return _layout(node, states, symbol)
    if not _is_same_size(product(x.shape[:before]), product(node.shape[:after])):
        raise refusal(node, "mixes it with a dim in front of it")
    return _layout(node, states, symbol)


def _broadcast(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    (x,) = node.args
    before = axis_of(x, symbol)
    if before is not None and axis_of(node, symbol) != node.params["axes"][before]:
        raise refusal(node, "moves it")
    return _layout(node, states, symbol)


def _slice(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    (x,) = node.args
    axis, p = axis_of(x, symbol), node.params
    for i, (start, stop, step) in enumerate(zip(p["start"], p["stop"], p["step"], strict=True)):
        is_whole = start == 0 and step == 1 and _is_same_size(stop, x.shape[i])
        if (i == axis and not is_whole) or (i != axis and mentions((start, stop), symbol)):
            raise refusal(node, "takes a part of it")
    return _layout(node, states, symbol)


def _pad(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    axis = axis_of(node.args[0], symbol)
    for i, added in enumerate(zip(node.params["lo"], node.params["hi"], node.params["inner"], strict=True)):
        if (i == axis and any(n != 0 for n in added)) or mentions(added, symbol):
            raise refusal(node, "adds to it")
    return _layout(node, states, symbol)


def _flip(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    if axis_of(node, symbol) in node.params["axes"]:
        raise refusal(node, "reverses it")
    return _layout(node, states, symbol)


def _cat(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    if any(mentions(a.shape[node.params["axis"]], symbol) for a in node.args):
        raise refusal(node, "adds to it")
    if PARTIAL in states and not _all_partial(node, states):
        raise refusal(node, "puts a sum over it beside what is none")
    return PARTIAL if PARTIAL in states else _state_by_shape(node, symbol)


def _sum(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    if states[0] == PARTIAL or axis_of(node.args[0], symbol) in node.params["axes"]:
        return PARTIAL
    return _state_by_shape(node, symbol)


def _reduce(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    """A reduction that is no sum: of parts there is no sum of results."""
    axes = node.params.get("axes", (node.params.get("axis"),))
    if states[0] == PARTIAL or axis_of(node.args[0], symbol) in axes:
        raise refusal(node, f"reduces it by {node.prim}")
    return _state_by_shape(node, symbol)


def _cumulative(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    if axis_of(node, symbol) == node.params["axis"]:
        raise refusal(node, "runs along it")
    return _layout(node, states, symbol)


def _scan(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    """Not along time; along another dim each step is divided, as long as none of its results is a sum over it."""
    if mentions(node.params["length"], symbol):
        raise refusal(node, "runs along it")
    if PARTIAL in states:
        raise refusal(node, "is not linear in a sum over it, of which each rank has a part")
    step = divide(node.params["body"].graph, symbol)
    if PARTIAL in step.outputs or any(step.degrees):
        raise refusal(node, "adds over it in each step")
    return _state_by_shape(node, symbol) if len(node.avals) == 1 else WHOLE


def _dot(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    """einsum: a divided label that the result has divides it, one that it lacks leaves a sum."""
    if PARTIAL in states:
        return _elementwise(node, states, symbol)
    axes = [(node.params[n], axis_of(a, symbol)) for n, a in zip(("x_axes", "y_axes"), node.args, strict=True)]
    labels = {labels[axis] for labels, axis in axes if axis is not None}
    if len(labels) > 1:
        raise refusal(node, "pairs its elements with each other")
    return PARTIAL if labels - set(node.params["out_axes"]) else _state_by_shape(node, symbol)


def _check_index(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    """An index is in range on each rank as it is on all, unless it is for the divided axis."""
    if mentions(node.args[1].params.get("value"), symbol):
        raise refusal(node, "looks rows of it up")
    return _elementwise(node, states, symbol)


def _gather(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    """Each rank reads the rows that it has where they are asked for by their position."""
    _require_own_rows(node, node.args[0], node.args[1:], states[1:], symbol)
    if states[0] == PARTIAL and _state_by_shape(node, symbol) != WHOLE:
        raise refusal(node, "reads rows of a sum over it")
    return PARTIAL if states[0] == PARTIAL else _state_by_shape(node, symbol)


def _scatter(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    """Rows of each rank that are added into what is zero leave a sum."""
    base, _, *index = node.args
    _require_own_rows(node, base, index, states[2:], symbol)
    if states[0] != PARTIAL and axis_of(base, symbol) is not None:
        if PARTIAL in states:
            raise refusal(node, "is not linear in a sum over it, of which each rank has a part")
        return DIVIDED
    divided = [i for i, s in enumerate(states) if isinstance(s, int)]
    if not divided and PARTIAL not in states:
        return WHOLE
    if (divided and node.params["mode"] != "add") or not all(map(_adds_up, node.args[:2], states[:2])):
        raise refusal(node, "puts values of several ranks in one place")
    return PARTIAL


def _adds_up(value: Value, state: State) -> bool:
    """True if the ranks' parts of a value are to be added: of values that are the same on each, zeros alone."""
    return state != WHOLE or _is_zero(value)


def _require_own_rows(
    node: Value, x: Value, index: Sequence[Value], states: Sequence[State], symbol: sympy.Symbol
) -> None:
    """Refuse access along the divided axis of x, unless each rank addresses its own rows by their position."""
    axis, axes = axis_of(x, symbol), node.params["axes"]
    counted = [a for a, s in zip(axes, states, strict=True) if s == POSITION]
    own = axis in counted and unit(x, symbol) == 1
    if (axis in axes and not own) or any(a != axis for a in counted):
        raise refusal(node, "looks rows of it up")


def _extern(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    """A call of the library: allowed on whole values, which every rank computes alike."""
    all_whole = all(s == WHOLE for s in states)
    if not all_whole or mentions(tuple(n for t in node.avals for n in t.shape), symbol) or _spec_mentions(node, symbol):
        raise refusal(node, "has no rule for parts")
    if node.prim == "aten_effect" and node.avals:
        raise refusal(node, "draws random numbers")
    return WHOLE


def _spec_mentions(node: Value, symbol: sympy.Symbol) -> bool:
    return mentions(node.params["spec"], symbol)


def _random(node: Value, states: Sequence[State], symbol: sympy.Symbol) -> State:
    if any(s != WHOLE for s in states) or axis_of(node, symbol) is not None:
        raise refusal(node, "draws random numbers along it")
    return WHOLE


sharding_rules: dict[str, Rule] = {
    **{p.name: _elementwise for p in PRIMS.values() if p.family == "elementwise"},
    **dict.fromkeys(("prod", "amax", "amin", "argmax", "argmin"), _reduce),
    **dict.fromkeys(("aten", "aten_effect", "call"), _extern),
    "check_index": _check_index,
    "full": lambda node, states, symbol: _state_by_shape(node, symbol),
    "iota": _iota,
    "broadcast": _broadcast,
    "reshape": _reshape,
    "permute": _layout,
    "slice": _slice,
    "pad": _pad,
    "flip": _flip,
    "cat": _cat,
    "sum": _sum,
    "cumsum": _cumulative,
    "scan": _scan,
    "dot": _dot,
    "gather": _gather,
    "scatter": _scatter,
    "random": _random,
    "pick": lambda node, states, symbol: states[0],
}

KEEPS_POSITIONS = ("broadcast", "reshape", "permute", "gather", "scatter")
"""The primitives that may be given positions: they look rows up by them, or lay them out."""
