"""Every decision of the generator that can be left out: other kernels, the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import sympy
from bodies import BODIES
from harness import INTERPRET, MANY, SMALL, Input, K, M, N, T, agree, cat, scatter
from loop_bodies import TIME, B, D, loops, on_rows

from fusegrad.codegen import TARGETS, Target
from fusegrad.codegen.kernel import Leaning
from fusegrad.ir import emit
from fusegrad.ir.switches import KERNELS, switched_off

ROOM = replace(SMALL, packed=64)
FEW = replace(INTERPRET, shared=16)
ODD, EVEN, WIDE = {M: 13, N: 50, K: 3}, {M: 6, N: 64, K: 2}, {M: 6, N: 48, K: 2}


def nested(x: T) -> tuple[T, T]:
    return x - x.sum(1, keep=True), x.sum(0, 1)


def interleaved(x: T) -> T:
    even, odd = x[:, slice(0, None, 2)], x[:, slice(1, None, 2)]
    return cat([even * odd, even - odd], 1)


def halves_of_a_norm(x: T) -> T:
    y = x / (x * x).sum(1, keep=True)
    return y[:, slice(0, 32)] * y[:, slice(32, 64)]


def column_softmax(x: T) -> T:
    e = (x - x.amax(0, keep=True)).exp()
    return e / e.sum(0, keep=True)


def recurrence(h: T, a: T, x: T) -> list[T]:
    return RECURRENCE.results({"h": h, "a": a, "x": x})


def two_recurrences(h: T, a: T, x: T) -> list[T]:
    return [*recurrence(h, a, x), *recurrence(h * 2, a * a, x)]


RECURRENCE = loops()["gated"]
BENT = on_rows(lambda h, a, x: [T(emit("tanh", (h * a + x).v))] * 2, "h", "a x")


def there_and_back(h: T, a: T, x: T) -> list[T]:
    """A loop over all steps, and one against time that reads what each of them gave."""
    _, given = BENT.results({"h": h, "a": a, "x": x})
    return replace(BENT, reverse=True).results({"h": h, "a": a, "x": given})[1:]


def added_at_a_place(h: T, a: T, x: T) -> T:
    """All that a step gives, at the second of four places."""
    _, given = BENT.results({"h": h, "a": a, "x": x})
    own = (emit("broadcast", emit("iota", size=n, dtype="i64"), shape=given.v.shape, axes=(i,))
           for i, n in enumerate(given.v.shape[:2]))  # fmt: skip
    place = emit("full", value=1, shape=given.v.shape, dtype="i64")
    places = emit("full", value=0.0, shape=(*given.v.shape[:2], 4), dtype="f32")
    return scatter(T(places), given, *map(T, own), T(place), axes=(0, 1, 2))


IDLE = replace(INTERPRET, units=1 << 20)
"""A device with more units than elements."""


def few_queries(q: T, k: T) -> T:
    scores = T(emit("dot", q.v, k.v, x_axes=(0, 1), y_axes=(2, 1), out_axes=(0, 2)))
    e = (scores - scores.amax(1, keep=True)).exp()
    return T(emit("dot", e.v, k.v, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2)))


def beside_row_sums(q: T, k: T, g: T) -> tuple[T, T]:
    """What is summed both ways, less a number of each row."""
    scores = T(emit("dot", q.v, k.v, x_axes=(0, 1), y_axes=(2, 1), out_axes=(0, 2))) * 0.25
    d = scores.exp() - (q * g).sum(1, keep=True)
    along = T(emit("dot", d.v, k.v, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2)))
    return along, T(emit("dot", d.v, q.v, x_axes=(1, 0), y_axes=(1, 2), out_axes=(0, 2)))


def gate(x: T, w: T) -> T:
    return T(emit("dot", x.v, w.v, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))).sigmoid()


def shares_of_both(x: T) -> T:
    """Of columns, then of rows: what one sums along, the other keeps."""
    e = x.exp()
    y = e / e.sum(0, keep=True)
    return y / y.sum(1, keep=True)


class Witness(NamedTuple):
    """A body whose kernels are others without the decision."""

    body: Callable[..., Any]
    inputs: Mapping[str, Input]
    target: Target
    sizes: Mapping[sympy.Symbol, int]
    small: bool = False


def _of(name: str, target: Target, sizes: Mapping[sympy.Symbol, int]) -> Witness:
    return Witness(*BODIES[name], target, sizes)


WITNESSES: dict[str, Witness] = {
    "merge": _of("swiglu", INTERPRET, ODD),
    "whole_sums": Witness(shares_of_both, {"x": Input("f32", (M, N))}, INTERPRET, ODD, small=True),
    "nested_sums": Witness(nested, {"x": Input("f32", (M, N))}, INTERPRET, ODD),
    "resident": _of("rms_backward", INTERPRET, ODD),
    "packed": _of("softmax", ROOM, WIDE),
    "tails": _of("softmax", TARGETS["cuda:90"], {M: 3, N: 1280}),
    "online": _of("softmax", SMALL, ODD),
    "row_parts": Witness(halves_of_a_norm, {"x": Input("f32", (M, 64))}, INTERPRET, ODD),
    "partials": _of("group_backward", SMALL, ODD),
    "pieces": Witness(column_softmax, {"x": Input("f32", (M, N))}, FEW, {M: 97, N: 3}),
    "strips": _of("rms_backward", SMALL, EVEN),
    "splits": Witness(few_queries, {"q": Input("f32", (3, 16)), "k": Input("f32", (N, 16))}, INTERPRET, {N: 1100}),
    "prologues": Witness(
        beside_row_sums, dict.fromkeys("qkg", Input("f32", (M, 16))), INTERPRET, {M: 70}
    ),
    "boundary": _of("rms_backward", MANY, ODD),
    "pairs": Witness(interleaved, {"x": Input("f32", (M, 64))}, INTERPRET, EVEN),
    "hoist": _of("rms_backward", INTERPRET, EVEN),
    "multiples": _of("layer_backward", SMALL, EVEN),
    "at_once": Witness(recurrence, RECURRENCE.inputs(), IDLE, {TIME: 40, B: 2, D: 3}),
    "chunks_of_time": Witness(recurrence, RECURRENCE.inputs(), IDLE, {TIME: 1030, B: 1, D: 2}),
    "side_by_side": Witness(two_recurrences, RECURRENCE.inputs(), IDLE, {TIME: 12, B: 2, D: 3}),
    "scattered_steps": Witness(
        added_at_a_place, BENT.inputs(), INTERPRET, {TIME: 9, B: 2, D: 3}
    ),
    "round_trips": Witness(there_and_back, BENT.inputs(), INTERPRET, {TIME: 40, B: 2, D: 3}),
    "blocks_of_steps": Witness(there_and_back, BENT.inputs(), INTERPRET, {TIME: 40, B: 2, D: 3}),
    "stages": _of("rms_backward", INTERPRET, EVEN),
    "descriptors": Witness(
        gate, {"x": Input("bf16", (M, K)), "w": Input("bf16", (K, N))},
        replace(INTERPRET, leaning=Leaning(accelerated=1)), {M: 20, N: 24, K: 72},
    ),
}  # fmt: skip


def test_every_switch_has_a_witness() -> None:
    assert set(WITNESSES) == set(KERNELS)


@pytest.mark.parametrize("switch", KERNELS)
def test_other_kernels_and_the_same_numbers(switch: str) -> None:
    body, inputs, target, sizes, small = WITNESSES[switch]
    own = agree(body, sizes, target, slack=12, small=small, **inputs)
    with switched_off((switch,)):
        other = agree(body, sizes, target, slack=12, small=small, **inputs)
    assert own != other


@pytest.mark.parametrize("target", [INTERPRET, SMALL, MANY], ids=["whole", "chunked", "tree"])
def test_without_all_of_them(target: Target) -> None:
    with switched_off(KERNELS):
        for name in ("rms_backward", "softmax", "group_backward", "cross_entropy", "swiglu"):
            function, inputs = BODIES[name]
            agree(function, ODD, target, slack=12, **inputs)
