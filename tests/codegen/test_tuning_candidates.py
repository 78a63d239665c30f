"""Versions of a kernel beside the scheduled one: which there are, and that each is another kernel."""

from __future__ import annotations

import pytest
from bodies import BODIES
from harness import M, N, graph_of

from fusegrad.codegen import TARGETS, Kernels, generate
from fusegrad.codegen.schedule.tuning_candidates import OWN, candidates


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


def test_no_program_has_more_than_1024_threads() -> None:
    found = versions("softmax", target="hip:gfx942", m=4096, n=16384)
    assert {k.num_warps * 64 for v in found.values() for k in v.kernels} <= {256, 512, 1024}
