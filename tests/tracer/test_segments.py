"""A method with segments does what the method does: names, attributes of ctx, ways out."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest

from fusegrad.tracer.opaque.opaque import Why
from fusegrad.tracer.opaque.segments import Lines, UnfitError, cut


def bound_in_one_arm(ctx, a):
    if a > 0:
        b = a
    c = a + 1  # segment
    d = b if a > 0 else c  # segment
    return c, d


def read_unbound(ctx, a):
    if a > 0:
        b = a
    c = b + a  # segment
    return c


def on_ctx_in_one_arm(ctx, a):
    ctx.a = a
    if a > 0:
        ctx.b = a
    c = ctx.b if a > 0 else ctx.a  # segment
    return c


def read_from_ctx_unbound(ctx, a):
    if a > 0:
        ctx.b = a
    c = ctx.b  # segment
    return c


def bound_on_ctx_in_the_segment(ctx, a):
    if a > 0:  # segment
        ctx.b = a
        c = ctx.b + 1
    else:
        ctx.b = c = 3
    return c


def bound_by_a_pattern(ctx, a):
    match [a, 1, 2]:  # segment
        case [0, *rest]:
            c = 5
        case [b, *rest]:
            c = b
    return c, rest


EVERY = (
    bound_in_one_arm, read_unbound, on_ctx_in_one_arm, read_from_ctx_unbound, bound_on_ctx_in_the_segment,
    bound_by_a_pattern,
)  # fmt: skip


@pytest.mark.parametrize("function", EVERY, ids=lambda f: f.__name__)
@pytest.mark.parametrize("a", [0, 2])
def test_a_method_with_segments_does_what_the_method_does(function, a):
    made, segments = cut(function, _marked(function), "ctx", "NodeBackward")
    assert segments
    assert _outcome(made, a) == _outcome(function, a)


def bound_again_in_one_arm(ctx, a):
    ctx.b = 1
    if a >= 0:  # segment
        if a > 0:
            ctx.b = a
        c = ctx.b
    return c


def test_an_attribute_that_is_bound_in_one_arm_and_read_behind_is_no_segments():
    with pytest.raises(UnfitError):
        cut(bound_again_in_one_arm, _marked(bound_again_in_one_arm), "ctx", "NodeBackward")


def _marked(function: types.FunctionType) -> Lines:
    text, first = inspect.getsourcelines(function)
    return Lines({first + n: Why("is marked") for n, line in enumerate(text) if "# segment" in line})


class NodeBackward:
    """A ctx whose errors have the text of a node's."""


def _outcome(function: Any, a: int) -> Any:
    ctx = NodeBackward()
    try:
        return function(ctx, a), vars(ctx)
    except (NameError, AttributeError) as error:
        return type(error), str(error), vars(ctx)
