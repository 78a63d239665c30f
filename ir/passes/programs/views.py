"""Inputs of which forward hands over a view are read through that view, so that what is made of them is backward's.

    q -> heads (handed over);  q -> a -> scores    ->    q -> heads (handed over) -> a' -> scores

A class that saves `q.view(b, n, h, d)` saves q: without, a copy of what forward multiplies would be saved besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...graph import Graph, Value, building, emit
from ...program import Program
from ...rewrite import copy_into, returning_as, shaped_as, unique_names, without_shapes
from ..simplify import Simplify
from .recompute import hidden_values, saved_by_user


def through_views(program: Program) -> Program:
    """The same program, whose forward makes what it makes of such an input of the view of it."""
    views = _views(program)
    if not views:
        return program
    return replace(program, forward=_joined(_apart(program.forward, views), views))


def _views(program: Program) -> list[Value]:
    """For each input that is handed over as a view alone, the first one."""
    kept = saved_by_user(program) | {program.forward.inputs[i].id for i in program.forward.mutations}
    found: dict[int, Value] = {}
    for value in hidden_values(program):
        source = without_shapes(value)
        if source.prim == "input" and source != value and source.id not in kept:
            found.setdefault(source.id, value)
    return list(found.values())


def _apart(forward: Graph, views: Sequence[Value]) -> Graph:
    """forward with an input more for each view, of which its own input is made; simplified."""
    out = Graph(forward.name)
    given = {v.id: out.input_like(v) for v in forward.inputs}
    names = unique_names([*forward.inputs, *views])[len(forward.inputs) :]
    env = dict(given)
    with building(out):
        for view, name in zip(views, names, strict=True):
            env[view.id] = out.input(view.aval, name)
            env[without_shapes(view).id] = _back(view, env[view.id])
        copy_into(forward.order(), env)
    return Simplify()(returning_as(forward, out, env | given))


def _joined(apart: Graph, views: Sequence[Value]) -> Graph:
    """The same, with each view made of its input again."""
    out, count = Graph(apart.name), len(apart.inputs) - len(views)
    env = {v.id: out.input_like(v) for v in apart.inputs[:count]}
    with building(out):
        for view, stand_in in zip(views, apart.inputs[count:], strict=True):
            env[stand_in.id] = shaped_as(view, out.inputs[without_shapes(view).params["index"]])
        copy_into(apart.order(), env)
    return returning_as(apart, out, env)


def _back(view: Value, value: Value) -> Value:
    """The input of a view, made of what stands for the view."""
    while view.prim != "input":
        source = view.args[0]
        if view.prim == "reshape":
            value = emit("reshape", value, shape=source.shape)
        else:
            value = emit("permute", value, perm=tuple(map(view.params["perm"].index, range(source.ndim))))
        view = source
    return value
