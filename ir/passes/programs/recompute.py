"""The residuals that forward hands to backward, chosen by a minimum cut on the joint graph, weighted by bytes moved.

    saved: x, w, x_hat [M, N] f32   ->   saved: x, w, rstd [M]; backward begins with x_hat = x * rstd

Candidates are hidden intermediates only. What the user saved among inputs and outputs stays saved as it is, and
backward may read it; one that is not saved is never held, but a copy of it may be. Reductions, products and calls are
not done twice; elementwise work, layout, gathers and random numbers are. Bytes saved never grow: the user's choice is
one of the cuts.

On simplified graphs, where equal values are one node; before fusion, which has to know what forward returns.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import networkx as nx

from ...errors import InvalidGraphError
from ...graph import Graph, Value, building, emit
from ...prims import PRIMS
from ...program import Program, ValueRef
from ...rewrite import copy_into, nodes_between, rebuild, returning_as, unique_names
from ...text.source_names import variable_name
from ...types import TensorType, contiguous_strides
from ..cost import Hints, estimate
from .exchange import Bracket, exchanged
from .handed_rows import is_top

Mask = tuple[bool, ...]
NONE: frozenset[int] = frozenset()
AGAIN = ("elementwise", "layout", "source", "gather", "random", "pick")
"""Families that backward may compute again."""
DEAR = 1 << 16
"""The weight of a virtual value that is saved: as many times that of another of its size."""
COPIED = 2
"""The weight of an input that is copied, since the user does not save it: what is made of it is preferred."""
CHOICE = "residuals"
"""The attribute of a program under which the choice is kept."""


@dataclass(frozen=True)
class Choice:
    """The program as it was captured, and the values of its forward graph that are handed over in place of its own."""

    captured: Program
    saved: tuple[Value, ...]
    brackets: tuple[Value, ...] = ()
    """Products of forward that backward has, and that stand for sums of its own (`exchange`)."""
    rows: tuple[Value, ...] = ()
    """Values of forward that backward has, and would compute again from what it is given."""
    exact: tuple[Value, ...] = ()
    """Those of low floats that are handed over as float32: kernels that round nothing in between lose nothing."""
    inverted: tuple[Value, ...] = ()
    """Those of which the reciprocal is handed over: backward divides by them (`handed_rows`)."""

    def type_of(self, value: Value) -> TensorType:
        """The type in which a value is handed over; a bracket that is a result has one more axis: another value."""
        aval = value.aval.with_dtype("f32") if value in self.exact else value.aval
        results = self.captured.forward.outputs[: self.captured.user_outputs]
        return aval.with_shape((1, *aval.shape)) if value in self.brackets and value in results else aval

    def place_of(self, value: Value) -> int:
        """The place of what is saved among the inputs of a backward: behind the user's own residuals."""
        own = sum(p.kind != "hidden" and value_at(self.captured, p) is not None for p in present(self.captured))
        return own + self.saved.index(value)


@dataclass(frozen=True)
class Recompute:
    """Program -> the same program with residuals that cost less. `hints`: the sizes to weigh at."""

    hints: Hints = field(default_factory=dict, hash=False)

    def __call__(self, program: Program) -> Program:
        captured = hidden_values(program)
        saved = cheapest(program, self.hints) if captured and program.backward else captured
        return program if set(saved) == set(captured) else with_choice(program, Choice(program, tuple(saved)))


def with_choice(program: Program, choice: Choice) -> Program:
    """The program with these residuals."""
    forward = program.forward.copy()
    saved = [Value(forward, v.id) for v in choice.saved]
    with building(forward):
        typed = {own: _as_type(v, choice.type_of(own)) for v, own in zip(saved, choice.saved, strict=True)}
        handed = [emit("reciprocal", v) if own in choice.inverted else v for own, v in typed.items()]
    shown = with_hidden(replace(program, forward=forward), handed)
    new = Program(program.name, shown, _places(program, len(handed)), program.user_outputs)
    new.attributes = program.attributes | {CHOICE: choice}
    for mask, backward in program.backward.items():
        apply_choice(new, mask, backward)
    return new


def _as_type(value: Value, aval: TensorType) -> Value:
    cast = emit("cast", value, dtype=aval.dtype) if value.dtype != aval.dtype else value
    return emit("reshape", cast, shape=aval.shape) if cast.shape != aval.shape else cast


def apply_choice(program: Program, mask: Mask, backward: Graph) -> Graph:
    """A backward graph on the captured residuals, made to start from those of `program`, which keeps it."""
    choice: Choice | None = program.attributes.get(CHOICE)
    program.backward[mask] = backward if choice is None else rebased(choice, backward)[0]
    return program.backward[mask]


# ---------------------------------------------------------------------------------------------------- the places
def present(program: Program) -> list[ValueRef]:
    """The residuals that are tensors: backward graphs have an input for each."""
    return [p for p in program.residuals if p is not None]


def hidden_values(program: Program) -> list[Value]:
    """The hidden values of forward that backward receives."""
    values = [value_at(program, p) for p in present(program) if p.kind == "hidden"]
    return list(dict.fromkeys(v for v in values if v is not None))


def value_at(program: Program, place: ValueRef) -> Value | None:
    """The value of the forward graph at a place."""
    if place.kind == "input":
        return program.forward.inputs[place.index]
    return program.forward.outputs[place.index + (program.user_outputs if place.kind == "hidden" else 0)]


def _places(program: Program, hidden: int) -> tuple[ValueRef | None, ...]:
    """The user's own residuals in their order, then the hidden ones."""
    visible = [p for p in program.residuals if p is None or p.kind != "hidden"]
    return (*visible, *(ValueRef("hidden", i) for i in range(hidden)))


def with_hidden(program: Program, saved: Sequence[Value]) -> Graph:
    """forward, with these values as its hidden outputs, in a graph of its own."""
    return rebuild(showing(program, saved), {})


def showing(program: Program, saved: Sequence[Value]) -> Graph:
    """The very nodes of forward, with these values as its hidden outputs."""
    graph = copy.copy(program.forward)
    users, strides = graph.outputs[: program.user_outputs], graph.output_strides[: program.user_outputs]
    graph.outputs = [*users, *saved]
    graph.output_strides = [*strides, *(contiguous_strides(v.shape) for v in saved)]
    return graph


# ------------------------------------------------------------------------------------------------------- the cut
def cheapest(program: Program, hints: Hints, virtual: frozenset[int] = NONE) -> list[Value]:
    """The hidden values to hand over: those on the minimum cut nearest to backward, so that little is done twice.

    virtual: ids of values that backward is to make again, whatever makes them.
    """
    prices = _Prices(program, hints, virtual)
    cost, (_, near) = nx.minimum_cut(_network(program, prices), "forward", "backward")
    captured = hidden_values(program)
    # at equal cost the program stays as it was captured
    if cost >= sum(prices.of_saving(v) for v in captured):
        return captured
    cut = [v for v in program.forward if ("out", v.id) in near and ("in", v.id) not in near]
    return [v for v in cut if v.id not in prices.user_saved and v.id not in prices.parts]


def _network(program: Program, prices: _Prices) -> nx.DiGraph:
    """An edge per value, its capacity what it costs to have it in backward; edges to a value from what it is made of.

    A value saved is written once and read once; one that the user holds is read, or parts of it are, for nothing where
    backward reads it.
    networkx gives the cut that is nearest to the target.
    """
    network = nx.DiGraph()
    # whatever backward reads now has to reach it on one way or another
    network.add_nodes_from(("forward", "backward"))
    network.add_edges_from((("out", i), "backward") for i in sorted(prices.hidden))
    for value in program.forward:
        network.add_edge(("in", value.id), ("out", value.id), **prices.capacity(value))
        # what is at hand, and what is not to be done twice, comes from forward alone: the cut has to pass its edge
        if prices.is_made_again(value):
            network.add_edges_from((("out", a.id), ("in", value.id)) for a in value.args)
        else:
            network.add_edge("forward", ("in", value.id))
    return network


class _Prices:
    """The cost in bytes of each value of forward in backward."""

    def __init__(self, program: Program, hints: Hints, virtual: frozenset[int]) -> None:
        self.hints, self.virtual = hints, virtual
        self.user_saved, self.read = saved_by_user(program), _read(program)
        self.parts = _parts(program.forward, self.user_saved)
        self.hidden = {v.id for v in hidden_values(program)}
        self.written = {program.forward.inputs[i].id for i in program.forward.mutations}

    def capacity(self, value: Value) -> dict[str, int]:
        """{} is without bound: an input that the user did not save (nor a view), or a node with several results.

        Beside virtual values a copy of such an input may be saved: one of a mask is little, and p needs it.
        """
        if value.id in self.user_saved:
            return {"capacity": 0 if value.id in self.read else estimate(value.aval.nbytes, self.hints)}
        if value.id in self.parts:
            return {"capacity": estimate(value.aval.nbytes, self.hints)}
        if value.prim == "input" and value.id not in self.hidden:
            copied = bool(self.virtual) and value.id not in self.written
            return {"capacity": COPIED * self.of_saving(value)} if copied else {}
        return {"capacity": self.of_saving(value)} if len(value.avals) == 1 else {}

    def of_saving(self, value: Value) -> int:
        """Written, then read."""
        return 2 * estimate(value.aval.nbytes, self.hints) * (DEAR if value.id in self.virtual else 1)

    def is_made_again(self, value: Value) -> bool:
        if value.id in self.user_saved:
            return False
        return PRIMS[value.prim].family in AGAIN or value.id in self.virtual


def saved_by_user(program: Program) -> set[int]:
    """Values that the user saved: inputs that forward does not write to, and outputs."""
    places = [p for p in present(program) if p.kind != "hidden"]
    mutated = {("input", i) for i in program.forward.mutations}
    return {v.id for p in places if tuple(p) not in mutated and (v := value_at(program, p)) is not None}


def _parts(forward: Graph, saved: set[int]) -> set[int]:
    """Views of what is saved: backward reads of it what they are of, and no more."""
    at_hand = set(saved)
    for value in forward:
        if value.prim in ("slice", "permute", "reshape") and value.args[0].id in at_hand:
            at_hand.add(value.id)
    return at_hand - saved


def _read(program: Program) -> set[int]:
    """Values of forward that some backward graph reads."""
    read: set[int] = set()
    for graph in program.backward.values():
        live = graph.live()
        for place, source in zip(present(program), graph.inputs, strict=False):
            value = value_at(program, place) if source.id in live else None
            read |= {value.id} if value is not None else set()
    return read


# -------------------------------------------------------------------------------------------------- the backward
def rebased(choice: Choice, backward: Graph) -> tuple[Graph, list[Value]]:
    """backward on the new residuals, the captured ones computed first; and the brackets that it reads."""
    out = Graph(backward.name)
    captured = choice.captured
    places = present(captured)
    env, at_hand = _receive(out, captured, choice, backward)
    hidden = [(v, value_at(captured, p)) for v, p in zip(backward.inputs, places, strict=False) if p.kind == "hidden"]
    # the captured residuals that are not handed over any more are computed before anything reads them
    with building(out):
        copy_into(nodes_between([value for _, value in hidden if value is not None], at_hand), at_hand)
        env |= {v.id: at_hand[value.id] for v, value in hidden if value is not None}
        env |= {i: at_hand[v.id] for i, v in made_in_forward(captured, backward).items() if v in choice.rows}
        copy_into(backward.order(), env)
    returning_as(backward, out, env)
    made = {b: v for v in choice.brackets if (b := _bracket(out, v, at_hand)) is not None}
    better, used = exchanged(out, list(made)) if made and not out.mutations else (out, [])
    return better, [made[b] for b in used]


def _bracket(out: Graph, value: Value, at_hand: Mapping[int, Value]) -> Bracket | None:
    """A value of forward that backward has, and its nodes there; None where these need more than there is."""
    others = {i: v for i, v in at_hand.items() if i != value.id}
    with contextlib.suppress(InvalidGraphError), building(out):
        copy_into(nodes_between([value], others), others)
        return Bracket(_below_reshapes(at_hand[value.id]), others[value.id])
    return None


def _below_reshapes(value: Value) -> Value:
    while value.prim == "reshape":
        (value,) = value.args
    return value


def made_in_forward(program: Program, backward: Graph) -> dict[int, Value]:
    """The nodes of backward that depend on no gradient and are nodes of forward, by their ids."""
    joint, places = program.forward.copy(), present(program)
    received = zip(backward.inputs, (value_at(program, p) for p in places), strict=False)
    values = {v.id: Value(joint, source.id) for v, source in received if source is not None}
    with building(joint):
        for node in backward.order():
            if not PRIMS[node.prim].effect and all(a.id in values for a in node.args):
                values[node.id] = emit(node.prim, *(values[a.id] for a in node.args), **node.params)
    own = program.forward.attributes
    return {i: Value(program.forward, v.id) for i, v in values.items() if v.id in own}


def _wishes(choice: Choice) -> dict[Value, str]:
    """scores_max for the maxima of scores; out for what is returned as well."""
    results = choice.captured.forward.outputs[: choice.captured.user_outputs]
    returned = {_below_reshapes(v) for v in results if v is not None}
    wishes = {v: "out" if _below_reshapes(v) in returned else variable_name(v) for v in choice.saved}
    wishes |= {v: f"{name}_inverse" for v in choice.inverted if (name := wishes[v])}
    return {v: name for v, name in wishes.items() if name}


def _receive(
    out: Graph, captured: Program, choice: Choice, backward: Graph
) -> tuple[dict[int, Value], dict[int, Value]]:
    """The inputs of a rebased backward: the user's residuals, the saved values, the gradients.

    Returned as a map from the old inputs of backward, and as one from the values of forward that are at hand.
    """
    places, user_saved = present(captured), saved_by_user(captured)
    names = iter(unique_names([*backward.inputs, *choice.saved], _wishes(choice))[len(backward.inputs) :])
    env: dict[int, Value] = {}
    at_hand: dict[int, Value] = {}
    # in the order that the runtime passes them: the user's residuals first, hidden ones behind, gradients last
    for source, place in zip(backward.inputs, places, strict=False):
        value = value_at(captured, place)
        if place.kind != "hidden" and value is not None:
            env[source.id] = out.input_like(source)
            at_hand |= {value.id: env[source.id]} if value.id in user_saved else {}
    received = {v: out.input(choice.type_of(v), next(names), is_top=is_top(v)) for v in choice.saved}
    with building(out):
        inverted = {v: emit("reciprocal", received[v]) for v in choice.inverted}
        at_hand |= {v.id: _as_type(r, v.aval) for v, r in (received | inverted).items()}
    for source in backward.inputs[len(places) :]:
        env[source.id] = out.input_like(source)
    return env, at_hand
