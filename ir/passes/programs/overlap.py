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
from .recompute import AGAIN, Mask, cheapest, present, showing, with_hidden


class Overlap:
    """forward and what backward computes of the arguments alone, in one graph: what both compute is one value."""

    def __init__(self, program: Program) -> None:
        self.program, self.joint = program, rebuild(program.forward, {})
        self.own = self.joint.live()
        self.candidates: list[Value] = []
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

    def offered(self, mask: Mask) -> Program:
        """The program as if forward handed over all that the part of backward that gradients reach reads of the other.

        Its forward has the very nodes of the joint graph.
        """
        backward = self.program.backward[mask]
        values = self.values_of(backward)
        ends = {a.id for v in backward.order() if v.id not in values for a in v.args} | {v.id for v in backward.results}
        self.candidates = list(dict.fromkeys(v for i, v in values.items() if i in ends and _is_worth_it(v)))
        offered = self._handing_over(self.candidates, showing)
        offered.backward[mask] = self.on_offered(backward)
        return offered

    def on_offered(self, backward: Graph) -> Graph:
        """backward on the arguments, made to start from all that was offered."""
        return self._received(backward, self.candidates)

    def choose(self, offered: Program, hints: Hints) -> bool:
        """Decide what forward hands over of all that it might; False where that is nothing."""
        saved = cheapest(offered, hints)
        self.saved = saved if self.may_make(saved) else []
        return bool(self.saved)

    def may_make(self, values: Sequence[Value]) -> bool:
        """forward may compute a little more than its own for backward, but neither products nor reductions."""
        more = [v for v in nodes_between(values, [i.id for i in self.joint.inputs]) if v.id not in self.own]
        return all(PRIMS[v.prim].family in AGAIN for v in more)

    def program_now(self) -> Program:
        """The program with what was chosen as its hidden outputs."""
        now = self._handing_over(self.saved)
        now.backward.update({mask: self.backward(b) for mask, b in self.program.backward.items()})
        return now

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


def overlap_of(program: Program) -> Overlap | None:
    """None where backward is given more than arguments, or a method writes to them."""
    others = [p for p in present(program) if p.kind != "input"]
    writes = any(g.mutations for g in (program.forward, *program.backward.values()))
    return None if others or writes else Overlap(program)
