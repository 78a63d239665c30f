"""Inputs of which forward hands over a view are read through that view, so that what is made of them is backward's.

    q -> heads (handed over);  q -> a -> scores    ->    q -> heads (handed over) -> a' -> scores

A class that saves `q.view(b, n, h, d)` saves q: without, a copy of what forward multiplies would be saved besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...graph import Graph, Value, building, emit
from ...program import Program
from ...rewrite import copy_into, unique_names
from ..simplify import Simplify
from .recompute import hidden_values, saved_by_user

Chain = tuple[Value, ...]
"""Reshapes and permutes from an input on to a value."""


def through_views(program: Program) -> Program:
    """The same program, whose forward makes what it makes of such an input of the view of it."""
    chains = _views(program)
    if not chains:
        return program
    return replace(program, forward=_joined(_apart(program.forward, chains), program.forward, chains))


def _views(program: Program) -> list[Chain]:
    """For each input that is handed over as a view alone, the first one."""
    kept = saved_by_user(program) | {program.forward.inputs[i].id for i in program.forward.mutations}
    found: dict[int, Chain] = {}
    for value in hidden_values(program):
        chain, source = list[Value](), value
        while source.prim in ("reshape", "permute"):
            chain.append(source)
            (source,) = source.args
        if chain and source.prim == "input" and source.id not in kept:
            found.setdefault(source.id, tuple(reversed(chain)))
    return list(found.values())


def _apart(forward: Graph, chains: Sequence[Chain]) -> Graph:
    """forward with an input more for each view, of which its own input is made; simplified."""
    out = Graph(forward.name)
    given = {v.id: out.input_like(v) for v in forward.inputs}
    views = [chain[-1] for chain in chains]
    names = unique_names([*forward.inputs, *views])[len(forward.inputs) :]
    env = dict(given)
    with building(out):
        for chain, name in zip(chains, names, strict=True):
            env[chain[-1].id] = view = out.input(chain[-1].aval, name)
            env[chain[0].args[0].id] = _back(chain, view)
        copy_into(forward.order(), env)
    return Simplify()(_returning(out, forward, env | given))


def _joined(apart: Graph, forward: Graph, chains: Sequence[Chain]) -> Graph:
    """The same, with each view made of its input again."""
    out, count = Graph(forward.name), len(forward.inputs)
    env = {v.id: out.input_like(v) for v in apart.inputs[:count]}
    with building(out):
        for chain, stand_in in zip(chains, apart.inputs[count:], strict=True):
            value = out.inputs[chain[0].args[0].params["index"]]
            for node in chain:
                value = emit(node.prim, value, **node.params)
            env[stand_in.id] = value
        copy_into(apart.order(), env)
    return _returning(out, apart, env)


def _back(chain: Chain, value: Value) -> Value:
    """The input of the view."""
    for node in reversed(chain):
        if node.prim == "reshape":
            value = emit("reshape", value, shape=node.args[0].shape)
        else:
            perm = node.params["perm"]
            value = emit("permute", value, perm=tuple(perm.index(axis) for axis in range(len(perm))))
    return value


def _returning(out: Graph, graph: Graph, env: Mapping[int, Value]) -> Graph:
    out.mutations = {i: env[v.id] for i, v in graph.mutations.items()}
    return out.returning([None if o is None else env[o.id] for o in graph.outputs], graph.output_strides)
