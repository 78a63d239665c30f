"""What a graph asserts of every element of an index is a check of the index: nothing is reduced, and nothing called.

    assert all(i >= 0); assert all(i < n); f(i)    ->    f(check_index(i, n))

F.one_hot asserts so. As with every index, what nothing reads is not looked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...graph import Graph, Origin, Value, building, emit, provenance
from ...rewrite import copy_into, number_of
from ...switches import is_on
from ...types import Size
from ..index_checks import is_never_negative, is_within

ASSERTIONS = ("aten._assert_async.msg", "aten._assert_async.default")


class Claim(NamedTuple):
    """What an assertion says of every element of an index: that it is below a size, or not negative (None)."""

    indices: Value
    below: Size | None
    origin: Origin


@dataclass(frozen=True)
class AssertedIndices:
    """Graph -> an equal graph whose indices are checked where they are read."""

    def __call__(self, graph: Graph) -> Graph:
        asserted = (v for v in graph.order() if v.params.get("op") in ASSERTIONS)
        claims = {v.id: claim for v in asserted if (claim := _claim(v)) is not None}
        known = _about_indices(claims)
        return _checked_where_read(graph, known) if known else graph


def _about_indices(claims: Mapping[int, Claim]) -> dict[int, Claim]:
    """Those of indices that have both ends."""
    positive = {c.indices.id for c in claims.values() if c.below is None or is_never_negative(c.indices)}
    bounded = {c.indices.id for c in claims.values() if c.below is not None} & positive
    return {at: c for at, c in claims.items() if c.indices.id in bounded}


def _checked_where_read(graph: Graph, claims: Mapping[int, Claim]) -> Graph:
    """The graph without these assertions; an argument that is returned is that argument."""
    of_index: dict[int, list[Claim]] = {}
    for claim in claims.values():
        of_index.setdefault(claim.indices.id, []).append(claim)
    out = Graph(graph.name)
    inputs = {v.id: out.input_like(v) for v in graph.inputs}
    with building(out):
        env = {at: _checked(v, of_index.get(at, ())) for at, v in inputs.items()}
        for value in graph.order():
            if value.id not in claims:
                copy_into([value], env)
                env[value.id] = _checked(env[value.id], of_index.get(value.id, ()))
    env = {**env, **inputs}
    out.mutations = {i: env[v.id] for i, v in graph.mutations.items()}
    return out.returning([None if o is None else env[o.id] for o in graph.outputs], graph.output_strides)


def _checked(index: Value, claims: Iterable[Claim]) -> Value:
    for claim in claims if is_on("index_checks") else ():
        if claim.below is not None and not is_within(index, claim.below):
            with provenance(claim.origin):
                index = emit("check_index", index, emit("full", value=claim.below, shape=index.shape, dtype="i64"))
    return index


# ------------------------------------------------------------------ what an assertion says
def _claim(assertion: Value) -> Claim | None:
    """all(i < n), all(i >= 0)"""
    comparison = _of_all(assertion.arg(0))
    if comparison.prim not in ("lt", "ge") or comparison.arg(0).dtype != "i64" or comparison.arg(1).prim != "full":
        return None
    index, end = comparison.args
    origin = replace(assertion.origin, op=_who_asserts(assertion))
    if comparison.prim == "lt":
        return Claim(index, end.params["value"], origin)
    return Claim(index, None, origin) if number_of(end) == 0 else None


def _of_all(condition: Value) -> Value:
    """gt(amin(cast(c)), 0)  ->  c   which holds everywhere where its minimum does"""
    while True:
        is_truth = condition.prim in ("gt", "ne") and number_of(condition.arg(1)) == 0
        if not (is_truth or condition.prim in ("amin", "cast", "reshape")):
            return condition
        condition = condition.arg(0)


def _who_asserts(assertion: Value) -> str | None:
    """`one_hot` of "one_hot: Class values must be non-negative.", else the operation that asserts."""
    _, *message = assertion.params["spec"][0]
    name, colon, _ = str(message[0]).partition(":") if message else ("", "", "")
    return name if colon and name.isidentifier() else assertion.origin.op
