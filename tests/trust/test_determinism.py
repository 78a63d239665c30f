"""Same inputs, same bits and same text; nothing is added with float atomics; deterministic algorithms are honoured."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function

pytest.importorskip("triton")

import fusegrad
from fusegrad.benchmarks.suite import CASES
from fusegrad.codegen import Kernel, Pointer

sys.path.insert(0, str(Path(__file__).parent))
import repeats
from repeats import Picked, emitted

pytestmark = pytest.mark.filterwarnings("ignore")
FLOATS = ("f16", "bf16", "f32", "f64")


# ------------------------------------------------------------------ bits
@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_repeats_give_the_same_bits(backend: str) -> None:
    assert repeats.again(120 if backend == "reference" else 12, backend) == 0


def test_threads_give_the_same_bits() -> None:
    assert len(repeats.in_threads(8, 5, "reference")) == 1


def test_a_process_with_another_hash_seed_gives_the_same_bits_and_text() -> None:
    assert repeats.of_a_process(1, "interpret") == repeats.everything("interpret")


# ------------------------------------------------------------------ no float atomics
def float_atomics(kernel: Kernel) -> Iterator[str]:
    """The atomic operations of a kernel on memory that holds floats."""
    dtypes = {a.name: a.dtype for a in kernel.arguments if isinstance(a, Pointer)}
    for node in ast.walk(ast.parse(kernel.source)):
        if isinstance(node, ast.Call) and "atomic" in ast.unparse(node.func):
            names = {n.id for n in ast.walk(node.args[0]) if isinstance(n, ast.Name)}
            if any(dtypes.get(name) in FLOATS for name in names):
                yield f"{kernel.name}: {ast.unparse(node)}"


def all_float_atomics(function: Any, args: Any) -> list[str]:
    with emitted() as found:
        fusegrad.explain(function, *args, target="cuda:90")
    assert found
    return [text for kernels in found for kernel in kernels.kernels for text in float_atomics(kernel)]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_no_kernel_adds_floats_with_atomics(case: Any) -> None:
    assert all_float_atomics(case.function, case.args) == []


class Scattered(Function):
    """Adds to one place by every operation that does, floats and integers."""

    @staticmethod
    def forward(ctx, x, i, n):
        counts = torch.zeros_like(n).scatter_add(0, i, n)
        y = torch.zeros_like(x).index_add(0, i, x).scatter_add(0, i[:, None].expand_as(x), x)
        return y.index_put((i,), x, accumulate=True), counts

    @staticmethod
    def backward(ctx, g, _):
        return g * 2, None, None


SPECS = ("f32[64,8]", "i64[64]", "i64[64]")


def test_no_way_to_add_uses_them_and_integers_may() -> None:
    with emitted() as found:
        fusegrad.explain(Scattered, *SPECS, target="cuda:90")
    kernels = [kernel for k in found for kernel in k.kernels]
    assert [text for kernel in kernels for text in float_atomics(kernel)] == []
    assert any("tl.atomic_add" in kernel.source for kernel in kernels), "integers have no order to keep"


def test_the_search_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats.pipeline, "unordered_scatters", lambda graph: {})
    assert len(all_float_atomics(Scattered, SPECS)) == 3
    assert all_float_atomics(Picked, ("f32[64,8]", "i64[100]"))


def test_explain_names_the_cut() -> None:
    text = str(fusegrad.explain(Picked, "f32[64,8]", "i64[100]", target="cuda:90"))
    assert "no fixed order" in text and "FG119" in text


# ------------------------------------------------------------------ deterministic algorithms
class Put(Function):
    @staticmethod
    def forward(ctx, x, i):
        return torch.zeros_like(x).index_put((i,), x * 2) + 1

    @staticmethod
    def backward(ctx, g):
        return g * 2, None


def library_calls(function: Any, *args: Any) -> int:
    found = fusegrad.explain(function, *args, target="cuda:90")
    return sum(k.kind != "triton" for k in found.kernels)


def test_values_that_are_put_are_torchs_under_deterministic_algorithms() -> None:
    before = library_calls(Put, "f32[64,8]", "i64[64]")
    torch.use_deterministic_algorithms(True)
    try:
        during = library_calls(Put, "f32[64,8]", "i64[64]")
    finally:
        torch.use_deterministic_algorithms(False)
    assert (before, during) == (0, 1)


class Refused(Function):
    """torch has no deterministic implementation of `put_`, on any device."""

    @staticmethod
    def forward(ctx, x):
        return torch.put(x * 3, torch.arange(4), x[0]) * 2

    @staticmethod
    def backward(ctx, g):
        return torch.put(g, torch.arange(4), g[0]) * 3


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_what_torch_refuses_is_refused_with_its_error(backend: str) -> None:
    fast: Any = fusegrad.compile(Refused, backend=backend)
    x = torch.randn(3, 4).requires_grad_()
    before = fast.apply(x)
    for apply in (Refused.apply, fast.apply):
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
                apply(x)
            with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
                before.sum().backward(retain_graph=True)
        finally:
            torch.use_deterministic_algorithms(False)
    for made in (fast.apply(x), before):
        assert torch.equal(made.detach(), Refused.apply(x).detach())
        made.sum().backward(retain_graph=True)
