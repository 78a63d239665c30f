"""Whether a result may take the memory of an operand: asked of emitted kernels, and of texts with a fault planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy

from fusegrad import codegen
from fusegrad.codegen import TARGETS, Kernels
from fusegrad.codegen.proofs import may_overwrite
from fusegrad.ir import Graph, TensorType, Value, building, emit

M, N = sympy.symbols("m n", integer=True, positive=True)
Body = Callable[[Value, Value], list[Value]]


def shifted(z: Value, row: Value) -> list[Value]:
    """exp(z - row), element by element."""
    return [emit("exp", emit("sub", z, emit("broadcast", row, shape=z.shape, axes=(0,))))]


def centred(z: Value, row: Value) -> list[Value]:
    """z less the maximum of its row: each is read before the first is written, and again."""
    top = emit("amax", z, axes=(1,))
    return [emit("sub", z, emit("broadcast", top, shape=z.shape, axes=(0,)))]


def turned(z: Value, row: Value) -> list[Value]:
    """Another element is read than the one that is written."""
    return [emit("flip", emit("exp", z), axes=(1,))]


def with_sums(z: Value, row: Value) -> list[Value]:
    """A second result of a kernel of its own."""
    made = shifted(z, row)[0]
    return [made, emit("sum", made, axes=(0,))]


def kernels_of(body: Body, sizes: tuple[int, int], dtype: str = "f32") -> tuple[Graph, Kernels]:
    graph = Graph("body")
    with building(graph):
        results = body(graph.input(TensorType((M, N), dtype), "z"), graph.input(TensorType((M,), dtype), "row"))
    graph.returning(results)
    hints = dict(zip((M, N), sizes, strict=True))
    return graph, codegen.generate(graph, target=TARGETS["cuda:90"], hints=hints, name="body")


@pytest.mark.parametrize("sizes", [(64, 128), (1000, 128256), (37, 111), (8192, 16), (3, 5)])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_element_by_element(sizes: tuple[int, int], dtype: str) -> None:
    graph, kernels = kernels_of(shifted, sizes, dtype)
    assert may_overwrite(graph, kernels, 0, 0)


@pytest.mark.parametrize("body", [centred, turned, with_sums], ids=lambda b: b.__name__)
def test_others_keep_what_they_read(body: Body) -> None:
    graph, kernels = kernels_of(body, (1000, 50257))
    assert not may_overwrite(graph, kernels, 0, 0)


def test_an_operand_that_is_read_by_every_column_is_kept() -> None:
    graph, kernels = kernels_of(shifted, (64, 128))
    assert not may_overwrite(graph, kernels, 1, 0)


def _line(source: str, word: str) -> str:
    return next(line for line in source.splitlines() if word in line)


def _load_again(source: str) -> str:
    """Another load of the same, behind the store."""
    store = _line(source, "tl.store(")
    load = _line(source, "z = ")
    return source.replace(store, f"{store}\n{load}")


def _next_row(source: str) -> str:
    """What is read is one row further down."""
    load = _line(source, "z = ")
    return source.replace(load, load.replace("z_ptr +", "z_ptr + N +"))


def _every_program(source: str) -> str:
    """All programs do the work of the first."""
    return source.replace("tl.program_id(0)", "tl.program_id(0) * 0")


@pytest.mark.parametrize("plant", [_load_again, _next_row, _every_program], ids=lambda f: f.__name__)
def test_a_planted_fault_is_found(plant: Callable[[str], str]) -> None:
    graph, kernels = kernels_of(shifted, (1000, 50257))
    (kernel,) = kernels.kernels
    faulty = replace(kernel, source=plant(kernel.source))
    assert faulty.source != kernel.source
    assert not may_overwrite(graph, Kernels((faulty,), kernels.temporaries), 0, 0)
