"""Every Function of the gallery within graphs that others make: torch.compile, torch.export, a file."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gallery_layers import Layer, inputs, results

import fusegrad
from fusegrad.examples.gallery.catalogue import CATALOGUE, Entry

every = pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)


@pytest.fixture(autouse=True)
def one_graph() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusegrad.FallbackWarning)
        yield


def same(found: dict[str, torch.Tensor], entry: Entry) -> None:
    expected = results(Layer(entry, compiled=False), inputs(entry))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@every
def test_inside_torch_compile(entry: Entry) -> None:
    layer = torch.compile(Layer(entry, compiled=True), backend="aot_eager", fullgraph=True)
    same(results(layer, inputs(entry)), entry)


@every
def test_exported_and_loaded_again(entry: Entry, tmp_path: Path) -> None:
    program = torch.export.export(Layer(entry, compiled=True), tuple(inputs(entry)))
    fusegrad.save_program(program, tmp_path / "layer.pt2")
    loaded = fusegrad.load_program(tmp_path / "layer.pt2").module()
    same(results(loaded, inputs(entry)), entry)
