"""Each rule of the verifier refuses the graph that breaks it."""

from collections.abc import Callable

import pytest

from fusegrad.ir import Graph, InvalidGraphError, TensorType, building, emit, verify


def graph() -> Graph:
    made = Graph("g")
    x = made.input(TensorType((4,), "f32"), "x")
    y = made.input(TensorType((4,), "f32"), "y")
    with building(made):
        return made.returning([emit("mul", emit("add", x, y), y)])


def test_accepts_what_is_right() -> None:
    made = graph()
    assert verify(made) is made


def unknown(g: Graph) -> None:
    g.outputs[0].attrs["prim"] = "mull"


def later_operand(g: Graph) -> None:
    add = g.outputs[0].args[0]
    add.attrs["args"] = (g.outputs[0].id, 1)


def edges(g: Graph) -> None:
    g.outputs[0].attrs["args"] = (0, 1)


def unhashable(g: Graph) -> None:
    g.inputs[0].params["strides"] = [1]


def wrong_type(g: Graph) -> None:
    g.outputs[0].attrs["avals"] = (TensorType((4,), "f64"),)


def numbering(g: Graph) -> None:
    g.inputs.reverse()


def strides_missing(g: Graph) -> None:
    g.output_strides = []


def mutation(g: Graph) -> None:
    with building(g):
        g.mutations[0] = emit("cast", g.inputs[0], dtype="f64")


FAULTS: list[tuple[Callable[[Graph], None], str]] = [
    (unknown, "no such primitive"),
    (later_operand, "after its user"),
    (edges, "edges and operands disagree"),
    (unhashable, "not hashable"),
    (wrong_type, "the type rule says"),
    (numbering, "numbered in order"),
    (strides_missing, "differ in number"),
    (mutation, "written with another type"),
]


@pytest.mark.parametrize(("break_it", "said"), FAULTS, ids=lambda p: getattr(p, "__name__", ""))
def test_refuses(break_it: Callable[[Graph], None], said: str) -> None:
    made = graph()
    break_it(made)
    with pytest.raises(InvalidGraphError, match=said):
        verify(made)


def test_an_operand_of_another_graph_is_refused() -> None:
    one, other = graph(), graph()
    with building(one), pytest.raises(InvalidGraphError, match="another graph"):
        emit("neg", other.inputs[0])
