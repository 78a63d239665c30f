"""Every Function of examples/gallery, compiled, beside the class as it was written: alone and in company."""

from __future__ import annotations

import ast
import copy
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusegrad
from fusegrad.examples.gallery import catalogue
from fusegrad.examples.gallery.catalogue import CATALOGUE, Entry
from fusegrad.examples.gallery.figures import SIZES, row
from fusegrad.runtime.check.cases import Plan
from fusegrad.runtime.check.compare import Tolerance
from fusegrad.runtime.check.derivative import compare_with_derivative
from fusegrad.runtime.check.subject import examine

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(catalogue.__file__).parent
TABLES = ("__init__", "__main__", "catalogue", "figures")
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.py")) if path.stem not in TABLES}
every = pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)


@pytest.fixture(autouse=True)
def nothing_falls_back() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusegrad.FallbackWarning)
        yield


def run(apply: Any, args: tuple[Any, ...], layout: Any = lambda t: t) -> list[torch.Tensor]:
    """Outputs, and the gradients of what wants one, for fixed random output gradients."""
    result = apply(*args)
    outputs = result if isinstance(result, tuple) else (result,)
    numbers = torch.Generator().manual_seed(1)
    ends = [output for output in outputs if output.requires_grad]
    gradients = [layout(torch.randn(end.shape, generator=numbers).to(end.dtype)) for end in ends]
    torch.autograd.backward(ends, gradients)  # a reentrant checkpoint takes no torch.autograd.grad
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    return [*(output.detach() for output in outputs), *(leaf.grad for leaf in leaves)]


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


BACKENDS = pytest.mark.parametrize("backend", ["reference", "interpret"])


@every
@BACKENDS
def test_compiled_is_as_written(entry: Entry, backend: str) -> None:
    expected = run(entry.written.apply, entry.arguments())
    with fusegrad.config.patch(backend=backend):
        got = run(entry.function.apply, entry.arguments())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    records = entry.function._fusegrad.ledger.records
    assert {role: record.reason for role, record in records.items() if record.reason} == {}


@pytest.mark.parametrize("entry", [e for e in CATALOGUE if e.exact], ids=lambda entry: entry.name)
def test_backward_is_the_derivative(entry: Entry) -> None:
    assert torch.autograd.gradcheck(entry.function.apply, entry.arguments(torch.float64))


# ------------------------------------------------------------------ layouts
def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.mT.contiguous().mT if t.dim() > 1 else t


def stepped(t: torch.Tensor) -> torch.Tensor:
    return torch.stack((t, t), -1)[..., 1]


def expanded(t: torch.Tensor) -> torch.Tensor:
    return t.flatten()[0].expand(t.shape)


LAYOUTS = (transposed, stepped, expanded)


@every
@BACKENDS
def test_gradients_in_other_layouts(entry: Entry, backend: str) -> None:
    """gradcheck gives contiguous ones alone; on interpret one of the layouts each."""
    first = CATALOGUE.index(entry)
    layouts = LAYOUTS if backend == "reference" else (LAYOUTS[first % len(LAYOUTS)],)
    with fusegrad.config.patch(backend=backend):
        for layout in layouts:
            got, expected = (run(f.apply, entry.arguments(), layout) for f in (entry.function, entry.written))
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ torch.func
def parted(args: tuple[Any, ...], wanted: Any) -> tuple[list[torch.Tensor], Any]:
    """The arguments that `wanted` says, and a function of them that puts the others in."""
    places = [i for i, a in enumerate(args) if wanted(a)]

    def filled(some: Any) -> list[Any]:
        every = list(args)
        for i, a in zip(places, some, strict=True):
            every[i] = a
        return every

    return [args[i].detach() for i in places], filled


def floats(result: Any) -> list[torch.Tensor]:
    outputs = result if isinstance(result, tuple) else (result,)
    return [output for output in outputs if output.is_floating_point()]


@every
def test_forward_mode_is_the_transpose_of_backward(entry: Entry) -> None:
    """<jvp(t), g> = <t, backward(g)>; of those that are no derivative of forward too."""
    args = entry.arguments(torch.float64)
    primals, filled = parted(args, lambda a: isinstance(a, torch.Tensor) and a.requires_grad)
    numbers = torch.Generator().manual_seed(2)
    tangents = [torch.randn(p.shape, generator=numbers, dtype=p.dtype) for p in primals]

    def call(*some: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(floats(entry.function.apply(*filled(some))))

    outputs, moved = torch.func.jvp(call, tuple(primals), tuple(tangents))
    gradients = tuple(torch.randn(o.shape, generator=numbers, dtype=o.dtype) for o in outputs)
    _, pull = torch.func.vjp(call, *primals)
    forward = sum((m * g).sum() for m, g in zip(moved, gradients, strict=True))
    backward = sum((t * g).sum() for t, g in zip(tangents, pull(gradients), strict=True))
    torch.testing.assert_close(forward, backward, rtol=1e-8, atol=1e-10)
    assert any(bool(m.any()) for m in moved)


@every
def test_vmap_is_the_calls_stacked(entry: Entry) -> None:
    calls = [entry.arguments(seed=seed) for seed in range(3)]
    _, filled = parted(calls[0], lambda a: isinstance(a, torch.Tensor))
    each = [parted(args, lambda a: isinstance(a, torch.Tensor))[0] for args in calls]
    stacked = [torch.stack(lanes) for lanes in zip(*each, strict=True)]

    def call(*some: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(floats(entry.function.apply(*filled(some))))

    got = torch.func.vmap(call)(*stacked)
    expected = [torch.stack(lanes) for lanes in zip(*(floats(entry.written.apply(*a)) for a in calls), strict=True)]
    torch.testing.assert_close(list(got), [e.detach() for e in expected], rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ in a training loop
@every
def test_under_autocast(entry: Entry) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = (run(f.apply, entry.arguments()) for f in (entry.written, entry.function))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@every
def test_in_bfloat16(entry: Entry) -> None:
    expected, got = (run(f.apply, entry.arguments(torch.bfloat16)) for f in (entry.written, entry.function))
    assert [g.dtype for g in got] == [e.dtype for e in expected]
    torch.testing.assert_close(got, expected, rtol=0, atol=0)  # the reference executes the same operations


@every
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_by_a_checkpoint(entry: Entry, reentrant: bool) -> None:
    def call(*args: Any) -> Any:
        return checkpoint(entry.function.apply, *args, use_reentrant=reentrant)

    torch.testing.assert_close(run(call, entry.arguments()), run(entry.written.apply, entry.arguments()))


class Holder(torch.nn.Module):
    """A module that has a Function as an attribute."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function.apply(*args)


@every
def test_copied_and_pickled(entry: Entry) -> None:
    module = Holder(entry.function)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(entry.function)), entry.function):
        assert (other.function if isinstance(other, Holder) else other) is entry.function
    torch.testing.assert_close(run(copy.deepcopy(module), entry.arguments()), run(module, entry.arguments()))


# ------------------------------------------------------------------ what it became
PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
TOLD = {line.split("`")[1]: line for line in PAGE.splitlines() if re.match(r"\| `\w+` \| (bf16|f32)", line)}


def test_every_function_has_its_figures() -> None:
    assert list(TOLD) == list(SIZES) == [entry.name for entry in CATALOGUE]


@every
def test_launches_and_bytes_are_those_of_the_page(entry: Entry) -> None:
    """`python -m fusegrad.examples.gallery.figures` writes the table; more launches or bytes are a regression."""
    assert row(entry.name) == TOLD[entry.name]


@every
def test_check_tells_a_derivative_from_what_is_meant_to_be_none(entry: Entry) -> None:
    subject, own = examine(entry.function, entry.arguments(), {}, "auto", Tolerance(), 0)
    answer = compare_with_derivative(subject, Plan(subject, own, [], [], [], []).tiny())
    assert answer is not None and answer.holds is entry.exact, str(answer)
