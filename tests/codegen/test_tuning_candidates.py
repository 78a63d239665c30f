"""Versions of a kernel beside the scheduled one: which there are, and that each is another kernel."""

from __future__ import annotations

import pytest
from bodies import BODIES
from harness import Input, M, N, T, graph_of

from fusegrad.codegen import TARGETS, Kernels, generate
from fusegrad.codegen.schedule.tuning_candidates import OF_STREAMS, OWN, candidates
from fusegrad.ir import emit


def versions(body: str, target: str = "cuda:90", **sizes: int) -> dict[str, Kernels]:
    """The candidates of one of the samples of codegen."""
    function, inputs = BODIES[body]
    hints = {M: sizes["m"], N: sizes["n"]}
    graph = graph_of(function, **inputs)
    emitted = lambda t: generate(graph, target=t, hints=hints, name=body)  # noqa: E731
    return candidates(emitted(TARGETS[target]), TARGETS[target], emitted, 3)


@pytest.mark.parametrize(
    ("body", "m", "n", "expected"),
    [
        ("rms_forward", 4096, 4096, ["more warps", "fewer warps"]),
        ("rms_forward", 65536, 256, ["wider blocks", "narrower blocks"]),
        ("rms_backward", 4096, 4096, ["more warps", "fewer loads in flight"]),
        ("softmax", 4096, 128256, ["more loads in flight", "wider blocks"]),
        ("swiglu", 4096, 4096, ["wider blocks", "narrower blocks"]),
    ],
)
def test_candidates_are_the_schedule_and_its_neighbours(body: str, m: int, n: int, expected: list[str]) -> None:
    found = versions(body, m=m, n=n)
    assert list(found) == [OWN, *expected]
    forms = {(k.source, *k.constants.items(), k.num_warps) for v in found.values() for k in v.kernels}
    assert len(forms) == len(found), "each is another kernel"


def attention(q: T, k: T, v: T) -> T:
    s = T(emit("dot", q.v, k.v, x_axes=(0, 1), y_axes=(2, 1), out_axes=(0, 2)))
    e = (s.to("f32") - s.to("f32").amax(1, keep=True)).exp()
    p = (e / e.sum(1, keep=True)).to("bf16")
    return T(emit("dot", p.v, v.v, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2)))


def of_attention(rows: int, depth: int, target: str = "cuda:90") -> dict[str, Kernels]:
    """The candidates of a kernel that walks a stream of 8192 keys."""
    shapes = {"q": (rows, depth), "k": (8192, depth), "v": (8192, depth)}
    graph = graph_of(attention, **{name: Input("bf16", shape) for name, shape in shapes.items()})
    emitted = lambda t: generate(graph, target=t, hints={}, name="attention")  # noqa: E731
    return candidates(emitted(TARGETS[target]), TARGETS[target], emitted, 20, OF_STREAMS)


def blocks(kernels: Kernels) -> tuple[object, ...]:
    first = kernels.kernels[0]
    return first.constants["BLOCK_M"], first.constants["BLOCK_N"], first.num_warps, first.num_stages


def test_candidates_of_a_stream_are_tiles_that_fit() -> None:
    """Rows, columns of a turn, warps and loads in flight; twice as many sums as registers have room for are none."""
    found = {name: blocks(kernels) for name, kernels in of_attention(32768, 128).items()}
    assert found == {
        OWN: (128, 64, 8, 2), "more loads in flight": (128, 64, 8, 3), "shorter blocks of the stream": (128, 32, 8, 2),
        "fewer rows and warps": (64, 64, 4, 2), "more warps": (128, 64, 16, 2), "fewer rows": (64, 64, 8, 2),
        "fewer loads in flight": (128, 64, 8, 1), "tiles through pointers": (128, 64, 8, 2),
    }  # fmt: skip


def test_few_rows_have_other_columns_of_a_turn() -> None:
    found = {name: blocks(kernels) for name, kernels in of_attention(16, 128).items()}
    assert found == {
        OWN: (16, 64, 4, 2), "more loads in flight": (16, 64, 4, 3), "longer blocks of the stream": (16, 128, 4, 2),
        "shorter blocks of the stream": (16, 32, 4, 2), "more warps": (16, 64, 8, 2), "fewer warps": (16, 64, 2, 2),
        "fewer loads in flight": (16, 64, 4, 1), "tiles through pointers": (16, 64, 4, 2),
    }  # fmt: skip


def test_no_program_has_more_than_1024_threads() -> None:
    found = versions("softmax", target="hip:gfx942", m=4096, n=16384)
    assert {k.num_warps * 64 for v in found.values() for k in v.kernels} <= {256, 512, 1024}
