"""Values that a derived backward takes over from forward: captured of the arguments alone, it does forward again.

    backward: h = x @ w; y = relu(h); ...   ->   forward hands h over too; backward begins with h, and has y = relu(h)

The user saves nothing for it, so that more may be saved than the arguments: what costs least, as in `recompute`,
which chooses for a backward that the user wrote. This runs where such a backward is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...graph import Graph, Value, building, emit, provenance
from ...prims import PRIMS
from ...program import Program, ValueRef
from ...rewrite import copy_into, nodes_between, rebuild, unique_names
from ..cost import Hints
from .recompute import AGAIN, cheapest, present, showing, value_at, with_hidden


class Overlap:
    """forward and what backward computes of the arguments alone, in one graph: what both compute is one value."""

    def __init__(self, program: Program) -> None:
        self.program, self.joint = program, rebuild(program.forward, {})
        self.own = self.joint.live()
        self.saved: list[Value] = []

    def values_of(self, backward: Graph) -> dict[int, Value]:
        """The value of the joint graph of each node of backward that depends on no gradient."""
        places = present(self.program)
        values = {v.id: self.joint.inputs[p.index] for v, p in zip(backward.inputs, places, strict=False)}
        with building(self.joint):
            for node in backward.order():
                if not PRIMS[node.prim].effect and all(a.id in values for a in node.args):
                    with provenance(node.origin):
                        values[node.id] = emit(node.prim, *(values[a.id] for a in node.args), **node.params)
        return values

    def choose(self, backward: Graph, hints: Hints) -> bool:
        """Decide what forward hands over; False where that is nothing."""
        # candidates: what the part of backward that depends on gradients reads of the part that does not
        values = self.values_of(backward)
        ends = {a.id for v in backward.order() if v.id not in values for a in v.args} | {v.id for v in backward.results}
        candidates = dict.fromkeys(v for i, v in values.items() if i in ends and _is_worth_it(v))
        # the cut is chosen as if all of them were handed over, and names values of the joint graph itself
        everything = self._handing_over(list(candidates), showing)
        everything.backward[()] = self._received(backward, list(candidates))
        saved = cheapest(everything, hints)
        # forward may compute a little more than its own, but neither products nor reductions
        more = [v for v in nodes_between(saved, [i.id for i in self.joint.inputs]) if v.id not in self.own]
        self.saved = saved if all(PRIMS[v.prim].family in AGAIN for v in more) else []
        return bool(self.saved)

    def program_now(self) -> Program:
        """The program with what was chosen as its hidden outputs."""
        return self._handing_over(self.saved)

    def both(self, mask: tuple[bool, ...]) -> Program:
        """The same with its backward for these gradients."""
        return replace(self.program_now(), backward={mask: self.backward(self.program.backward[mask])})

    def backward(self, backward: Graph) -> Graph:
        """backward on the arguments, made to start from what was chosen besides."""
        return self._received(backward, self.saved)

    def _handing_over(self, values: Sequence[Value], how: Callable[..., Graph] = with_hidden) -> Program:
        program = replace(self.program, forward=self.joint, backward={})
        places = (*self.program.residuals, *(ValueRef("hidden", i) for i in range(len(values))))
        return replace(program, forward=how(program, values), residuals=places)

    def _received(self, backward: Graph, values: Sequence[Value]) -> Graph:
        in_joint, out = self.values_of(backward), Graph(backward.name)
        first = len(present(self.program))
        names = unique_names([*backward.inputs, *values])[len(backward.inputs) :]
        env = {v.id: out.input_like(v) for v in backward.inputs[:first]}
        received = {v.id: out.input(v.aval, name) for v, name in zip(values, names, strict=True)}
        env |= {v.id: out.input_like(v) for v in backward.inputs[first:]}
        env |= {i: received[v.id] for i, v in in_joint.items() if v.id in received}
        with building(out):
            copy_into(backward.order(), env)
        return out.returning([None if o is None else env[o.id] for o in backward.outputs], backward.output_strides)


def _is_worth_it(value: Value) -> bool:
    return value.prim != "input" and PRIMS[value.prim].family != "source" and len(value.avals) == 1


def overlap(program: Program, mask: tuple[bool, ...], hints: Hints) -> Overlap | None:
    """The values to hand over to a derived backward; None where the arguments are best, or no value can be compared."""
    places = [value_at(program, p) for p in present(program) if p.kind == "input"]
    backward = program.backward[mask]
    if len(places) != len(present(program)) or program.forward.mutations or backward.mutations:
        return None
    choice = Overlap(program)
    return choice if choice.choose(backward, hints) else None
