"""Which primitives are linear, in which operands: one table, read by `linearize` and `transpose`, and as a proof.

    add: (0, 1)    linear in both together: with one of them constant it is affine, unless the constant is zero
    mul: bilinear  linear in either while the other is constant
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..errors import FusegradError
from ..graph import Graph, Value
from ..rewrite import number_of
from .extern import NO_RULES, ExternRules, op_name, source_place
from .ops import DIFFERENTIABLE, EXTERN

Kind: TypeAlias = Literal["non-linear", "affine", "unknown"]

linear: dict[str, tuple[int, ...] | Literal["all"]] = {
    **dict.fromkeys("neg conj cast broadcast reshape permute slice pad flip sum cumsum gather".split(), (0,)),
    **dict.fromkeys(("add", "sub", "scatter"), (0, 1)),
    "where": (1, 2),
    "cat": "all",
    "div": (0,),
}
"""Over the reals: conj, and a cast of complex numbers to real ones, are linear too."""

bilinear = ("mul", "dot")


def linear_positions(prim: str, operands: int) -> tuple[int, ...]:
    """The operands, of so many, in which a primitive is linear together."""
    operands_of_prim = linear.get(prim, ())
    return tuple(range(operands)) if operands_of_prim == "all" else operands_of_prim


@dataclass(frozen=True)
class Refusal:
    """The reason why a graph is not linear: the user's operation, its place, and its effect.

    "unknown" is an operation that is not a primitive and of unknown linearity.
    """

    kind: Kind
    op: str
    where: str
    why: str

    def __str__(self) -> str:
        return f"`{self.op}` {self.why}"


class NonLinearError(FusegradError):
    """Only a graph that is linear in its inputs has a transpose. `refusal` says why this one is not."""

    message = (
        "{graph} is not linear in {inputs}: {refusal}\n  at:   {where}\n"
        "  fix:  keep the operation off the way of {inputs}, or write the rule yourself."
    )

    @property
    def refusal(self) -> Refusal:
        return self.facts["refusal"]  # type: ignore[no-any-return]


Reasons: TypeAlias = "dict[int, Refusal | None]"
"""By the ids of the values that depend on the inputs: None where they do linearly."""
State: TypeAlias = 'Refusal | Literal["constant", "zero"] | None'


def why_not_linear(
    graph: Graph, inputs: Sequence[int], rules: ExternRules = NO_RULES, outputs: Sequence[int] | None = None
) -> Refusal | None:
    """The first reason why outputs (by default all, and mutations) are not linear in these inputs together, or None."""
    results = graph.results if outputs is None else [o for i in outputs if (o := graph.outputs[i]) is not None]
    return _first_refusal(results, *_of_inputs(graph, inputs, rules))


def linear_part(graph: Graph, inputs: Sequence[int], rules: ExternRules = NO_RULES) -> set[int]:
    """Ids of the values that are linear in these inputs, as every result is proved to be. Raises NonLinearError."""
    reasons, zero = _of_inputs(graph, inputs, rules)
    refusal = _first_refusal(graph.results, reasons, zero)
    if refusal is not None:
        names = ", ".join(f"`{graph.inputs[i].params['name']}`" for i in inputs)
        raise NonLinearError(graph=graph.name, inputs=names, refusal=refusal, where=refusal.where)
    return {value for value, reason in reasons.items() if reason is None}


def _of_inputs(graph: Graph, inputs: Sequence[int], rules: ExternRules) -> tuple[Reasons, set[int]]:
    return _classify(graph, {graph.inputs[i].id: None for i in inputs}, set(), rules)


def _classify(graph: Graph, reasons: Reasons, zero: set[int], rules: ExternRules) -> tuple[Reasons, set[int]]:
    """Values that depend on the inputs (None: linear, else the first reason why not), and those that are zero.

    Of the inputs both are given.
    """
    of_loops: dict[int, list[State]] = {}
    for node in graph.order():
        if node.prim == "scan":
            of_loops[node.id] = _states_of_scan(node, reasons, zero, rules)
        if (states := _states(node, of_loops)) is not None:
            _record(node, states, reasons, zero)
            continue
        hits = tuple(i for i, a in enumerate(node.args) if a.id in reasons)
        if hits:
            before = (reasons[node.args[i].id] for i in hits)
            reasons[node.id] = next((r for r in before if r is not None), None) or _refusal(node, hits, zero, rules)
        elif _is_zero(node, zero, rules):
            zero.add(node.id)
    return reasons, zero


def _first_refusal(results: Sequence[Value], by_value: Reasons, zero: set[int]) -> Refusal | None:
    reasons = (by_value[r.id] if r.id in by_value else _constant(r, zero) for r in results)
    return next((reason for reason in reasons if reason is not None), None)


def _refusal(node: Value, hits: tuple[int, ...], zero: set[int], rules: ExternRules) -> Refusal | None:
    """The reason why a node is not linear in the operands `hits`, the others being constant, or None."""
    if node.prim == "pick":
        return None
    if node.prim in EXTERN:
        linear_there = rules.is_linear(node, hits)
        return None if linear_there else _refusal_at(node, *(UNKNOWN if linear_there is None else NON_LINEAR))
    if node.prim in bilinear:
        return _refusal_at(node, "non-linear", "multiplies it by itself") if len(hits) > 1 else None
    together = linear_positions(node.prim, len(node.args))
    if node.dtype not in DIFFERENTIABLE or not set(hits) <= set(together):
        return _refusal_at(node, *NON_LINEAR)
    if all(i in hits or node.args[i].id in zero for i in together):
        return None
    return _refusal_at(node, "affine", "adds a term that does not depend on it (affine)")


# ---------------------------------------------------------------------------------------------- loops
def _states(node: Value, of_loops: dict[int, list[State]]) -> list[State] | None:
    """What is known of the results of a loop, or of the one that is picked."""
    if node.prim == "pick" and (states := of_loops.get(node.args[0].id)) is not None:
        return [states[node.params["index"]]]
    return of_loops.get(node.id)


def _record(node: Value, states: list[State], reasons: Reasons, zero: set[int]) -> None:
    """A loop is linear where a result is; which results are not, their picks say."""
    depending = [s for s in states if not isinstance(s, str)]
    if depending:
        reasons[node.id] = None if None in depending else depending[0]
    elif "constant" not in states:
        zero.add(node.id)


def _state(value: Value, reasons: Reasons, zero: set[int]) -> State:
    return reasons[value.id] if value.id in reasons else "zero" if value.id in zero else "constant"


def _states_of_scan(node: Value, reasons: Reasons, zero: set[int], rules: ExternRules) -> list[State]:
    """The states of the results: those of the carries are what all steps together make of them."""
    body, count = node.params["body"].graph, node.params["carries"]
    states = [_state(a, reasons, zero) for a in node.args]
    while True:
        pairs = list(zip(body.inputs, states, strict=True))
        own = {v.id: s for v, s in pairs if not isinstance(s, str)}, {v.id for v, s in pairs if s == "zero"}
        found = _classify(body, *own, rules)
        given = [_state(o, *found) for o in body.outputs]
        carried = [_joined(*pair) for pair in zip(states, given, body.outputs[:count], strict=False)]
        if carried == states[:count]:
            return [*carried, *given[count:]]
        states[:count] = carried


def _joined(before: State, after: State, value: Value) -> State:
    """The state of a carry that may be either: a linear one with a constant added is affine."""
    if before == after or after == "zero" or isinstance(before, Refusal):
        return before
    if before == "zero" or isinstance(after, Refusal):
        return after
    return _refusal_at(value, "affine", "gives a result that does not depend on it (affine)")


NON_LINEAR: tuple[Kind, str] = ("non-linear", "is not linear in it")
UNKNOWN: tuple[Kind, str] = ("unknown", "is not known to be linear in it")


def _constant(result: Value, zero: set[int]) -> Refusal | None:
    """A result that does not depend on the inputs at all has to be zero."""
    if result.id in zero or result.dtype not in DIFFERENTIABLE:
        return None
    return _refusal_at(result, "affine", "gives a result that does not depend on it (affine)")


def _is_zero(node: Value, zero: set[int], rules: ExternRules) -> bool:
    """True if a node is zero everywhere by construction: a linear map of zeros, and 0 * x, infinities apart."""
    if node.prim in EXTERN or node.prim == "pick":
        zeros = tuple(i for i, a in enumerate(node.args) if a.id in zero)
        return bool(zeros) and (node.prim == "pick" or rules.keeps_zero(node, zeros))
    if node.prim == "full":
        return number_of(node) == 0
    if node.prim in bilinear:
        return any(a.id in zero for a in node.args)
    return node.prim in linear and all(node.args[i].id in zero for i in linear_positions(node.prim, len(node.args)))


def _refusal_at(node: Value, kind: Kind, why: str) -> Refusal:
    return Refusal(kind, op_name(node), source_place(node), why)
