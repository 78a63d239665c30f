"""Every Function of examples/gallery, compiled, beside the class as it was written."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fusegrad
from fusegrad.examples.gallery import catalogue
from fusegrad.examples.gallery.catalogue import CATALOGUE, Entry

FOLDER = Path(catalogue.__file__).parent
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.py")) if path.stem not in ("__init__", "catalogue")}
every = pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)


@pytest.fixture(autouse=True)
def nothing_falls_back() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusegrad.FallbackWarning)
        yield


def run(apply: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Outputs, and the gradients of what wants one, for fixed random output gradients."""
    result = apply(*args)
    outputs = result if isinstance(result, tuple) else (result,)
    numbers = torch.Generator().manual_seed(1)
    ends = [output for output in outputs if output.requires_grad]
    gradients = [torch.randn(end.shape, generator=numbers).to(end.dtype) for end in ends]
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    return [*(output.detach() for output in outputs), *torch.autograd.grad(ends, leaves, gradients)]


def test_the_catalogue_has_every_file() -> None:
    assert len(FILES) >= 24
    assert [entry.name for entry in CATALOGUE if entry.name not in FILES] == []
    assert len({entry.name for entry in CATALOGUE}) == len(CATALOGUE) == len(FILES)


@pytest.mark.parametrize("path", FILES.values(), ids=lambda path: path.stem)
def test_a_file_can_be_copied(path: Path) -> None:
    """20 to 60 lines that import torch, Python's own and fusegrad, and nothing beside it."""
    text = path.read_text(encoding="utf-8")
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    named = {node.names[0].name.split(".")[0] for node in imports if isinstance(node, ast.Import)}
    assert 20 <= len(text.splitlines()) <= 60
    assert named <= {"math", "torch", "fusegrad"} and not any(isinstance(node, ast.ImportFrom) for node in imports)


@every
@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_compiled_is_as_written(entry: Entry, backend: str) -> None:
    expected = run(entry.written.apply, entry.arguments())
    with fusegrad.config.patch(backend=backend):
        got = run(entry.function.apply, entry.arguments())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert {role: record.reason for role, record in entry.function._fusegrad.records.items() if record.reason} == {}


@pytest.mark.parametrize("entry", [e for e in CATALOGUE if e.exact], ids=lambda entry: entry.name)
def test_backward_is_the_derivative(entry: Entry) -> None:
    assert torch.autograd.gradcheck(entry.function.apply, entry.arguments(torch.float64))
