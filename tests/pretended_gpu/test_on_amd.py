"""The same on a pretended GPU of AMD's: Triton's HIP driver and launcher, and code objects for gfx942."""

from __future__ import annotations

from typing import Any

import pytest

from fusegrad.benchmarks.suite import CASES
from fusegrad.examples.gallery.catalogue import CATALOGUE

ONCE = (
    "autocast", "twice_and_thrice", "transformed", "inside_torch_compile", "streams", "captured_launches",
    "captured_on_the_other_device", "two_devices", "tuned_in_backward", "out_of_memory", "illegal_address",
)  # fmt: skip
NO_KERNELS = {"gradient_reversal", "soft_rank", "soft_sort"}


def test_tensors_beyond_two_gigabytes_have_kernels_of_their_own(play_on_amd: Any) -> None:
    assert play_on_amd("beyond_two_gigabytes")


@pytest.mark.parametrize("name", list({c.function: c.name for c in CASES}.values()))
def test_a_benchmark(name: str, play_on_amd: Any) -> None:
    launched = play_on_amd("suite", name=name)
    assert any("forward" in k for k in launched) and any("backward" in k for k in launched), launched


@pytest.mark.parametrize("name", [e.name for e in CATALOGUE])
def test_a_function_of_the_gallery(name: str, play_on_amd: Any) -> None:
    launched = play_on_amd("gallery", name=name)
    assert launched or name in NO_KERNELS


@pytest.mark.parametrize("scene", ONCE)
def test_a_call(scene: str, play_on_amd: Any) -> None:
    play_on_amd(scene)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "step", "unaligned", "expanded"])
def test_layouts(layout: str, play_on_amd: Any) -> None:
    assert play_on_amd("laid_out", layout=layout, rows=17)


def test_threads(play_on_amd: Any) -> None:
    assert play_on_amd("threads", count=16)
