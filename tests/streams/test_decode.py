"""A few queries against a long cache: its stream in parts for programs, merged, on the interpreter, beside float64."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fusegrad
from fusegrad.codegen import Kernel, Kernels
from fusegrad.codegen.emit.statements import binary
from fusegrad.codegen.emit.streams.bounds import StreamBounds
from fusegrad.codegen.proofs import prove_kernel
from fusegrad.codegen.schedule.streams import splits
from fusegrad.ir import Graph
from fusegrad.ir.passes.fuse import Group
from fusegrad.runtime.execution import graph_to_kernels, variants

sys.path.insert(0, str(Path(__file__).parent))
import stream_functions
from beside_eager import differences
from decode_functions import CASES, Case, named

KEYS = 1203
"""Some blocks of the interpreter's, and a part of one."""
DTYPES = (torch.float32, torch.bfloat16)
each = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The kernels that are made, as they are."""
    own, kernels = graph_to_kernels.kernels_of, list[Kernel]()

    def noted(*arguments: Any, **options: Any) -> Any:
        found = own(*arguments, **options)
        kernels.extend(found.kernels)
        return found

    for module in (graph_to_kernels, variants):
        monkeypatch.setattr(module, "kernels_of", noted)
    return kernels


def compiled(case: Case) -> Any:
    """The class on the interpreter; an error where something would be run by torch."""
    return fusegrad.compile(case.cls, backend="interpret", fullgraph=True).apply


def without_gradients(arguments: Any) -> list[Any]:
    """The same numbers; of the queries alone a gradient is asked for."""
    queries, *others = arguments
    return [queries, *(a.detach() if isinstance(a, torch.Tensor) else a for a in others)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 3, 16])
@each
def test_beside_eager(case: Case, queries: int, dtype: torch.dtype, made: list[Kernel]) -> None:
    assert not differences(compiled(case), case.cls.apply, case.arguments(queries, KEYS, dtype))
    assert any(k.splits > 1 for k in made) and any(k.name.endswith("_merged") for k in made)


@pytest.mark.parametrize("queries", [1, 3])
@each
def test_the_gradient_of_the_queries_alone(case: Case, queries: int) -> None:
    arguments = without_gradients(case.arguments(queries, KEYS))
    assert not differences(compiled(case), case.cls.apply, arguments)


@pytest.mark.parametrize("length", [0, 1, 128, 129, 700, KEYS])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("name", ["GroupedLength", "CausalAlibi", "Sink", "Sigmoid"])
def test_lengths(name: str, queries: int, length: int) -> None:
    """Parts without any key have nothing; a row without any is NaN where it is in eager."""
    case = named(name)
    arguments = [
        torch.tensor([length]) if isinstance(a, torch.Tensor) and a.dtype == torch.int64 else a
        for a in case.arguments(queries, KEYS)
    ]
    assert not differences(compiled(case), case.cls.apply, without_gradients(arguments))


def test_sums_of_two_widths_are_merged_apart(made: list[Kernel]) -> None:
    """Few keys of many queries: their gradients and those of the values, which are wider, in parts over the queries."""
    cross = stream_functions.named("CrossAttention").cls
    with torch.random.fork_rng():
        torch.manual_seed(7)
        q, k, v = (torch.randn(1, 1, n, d).requires_grad_() for n, d in ((1500, 16), (40, 16), (40, 24)))
    arguments = [q, k, v, torch.tensor([37]), 0.25]
    compiled_cross = fusegrad.compile(cross, backend="interpret", fullgraph=True).apply
    assert not differences(compiled_cross, cross.apply, arguments)
    assert {k.name.partition("_merged")[2] for k in made if "_merged" in k.name} == {"", "_1"}


def test_numbers_that_are_none() -> None:
    """A key of infinities in one part, and of NaN in another, reach the result as they do in eager."""
    q, k, v, *more = named("GroupedLength").arguments(3, KEYS)
    for place, number in ((5, float("inf")), (900, float("-inf")), (1000, float("nan"))):
        keys = torch.where(torch.arange(KEYS)[:, None] == place, number, k.detach()).requires_grad_()
        arguments = without_gradients([q, keys, v, *more])
        assert not differences(compiled(named("GroupedLength")), named("GroupedLength").cls.apply, arguments), number


def test_a_cache_that_grows(made: list[Kernel]) -> None:
    """Parts are for sizes that want them: the kernels of a short cache do not walk a long one."""
    case, parts = named("GroupedLength"), list[set[int]]()
    fast = compiled(case)
    for keys in (40, 41, 1100, 1203, 1500, 300):
        made.clear()
        assert not differences(fast, case.cls.apply, without_gradients(case.arguments(3, keys))), keys
        parts.append({k.splits for k in made if not isinstance(k.wanted, int)})
    # those of 40 keys have smaller blocks, of which 300 keys are many
    assert parts == [{1}, set(), {4}, set(), set(), {1}]


def test_explain_says_how_many_parts_and_what_they_move() -> None:
    q, kv = "bf16[4,32,1,128]", "bf16[4,8,8192,128]"
    e = fusegrad.explain(fusegrad.compile(named("GroupedLength").cls), q, kv, kv, "i64[4]", 0.1, target="h100")
    report = e.directions["forward"]
    assert "never in memory, the stream in 8 splits, merged" in str(e)
    assert [launch.name for launch in report.launches] == ["GroupedLength_forward", "GroupedLength_forward_merged"]
    parts, merged = report.launches
    inputs, rows = 4 * 32 * 128 * 2 + 2 * 4 * 8 * 8192 * 128 * 2 + 4 * 8, 8 * 4 * 32 * (128 + 2) * 4
    assert (parts.bytes_read, parts.bytes_written) == (inputs, rows)
    result, saved = 4 * 32 * 128 * 2, 4 * 32 * (128 * 2 + 2 * 4)  # a copy for backward, a maximum and a sum of each row
    assert (merged.bytes_read, merged.bytes_written) == (rows, result + saved)


def test_many_rows_are_not_divided() -> None:
    shape = "bf16[4,32,2048,128]"
    e = fusegrad.explain(fusegrad.compile(named("Linear").cls), shape, shape, shape, 0.01, target="h100")
    assert "splits" not in str(e) and len(e.directions["forward"].launches) == 1


@pytest.mark.parametrize("queries", [1, 3])
def test_parts_and_what_merges_them_are_proved_for_all_sizes(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every access is in range, and no two programs store into one place."""
    own, groups = graph_to_kernels.kernels_of, list[tuple[Graph, Kernels]]()

    def noted(group: Group, *arguments: Any, **options: Any) -> Kernels:
        groups.append((group.graph, own(group, *arguments, **options)))
        return groups[-1][1]

    monkeypatch.setattr(graph_to_kernels, "kernels_of", noted)
    kv = "bf16[1,8,8192,128]"
    arguments = (f"bf16[1,8,{queries},128]", kv, kv, "bf16[8]", "i64[1]", 0.1)
    fusegrad.explain(fusegrad.compile(named("CausalAlibi").cls), *arguments, target="h100")
    proofs = [prove_kernel(k, graph, kernels, apart=True) for graph, kernels in groups for k in kernels.kernels]
    assert any(k.splits > 1 for _, kernels in groups for k in kernels.kernels)
    assert not [p.faults for p in proofs if p.faults]


# -------------------------------------------------------------------------------------------------- faults are noticed
def _unscaled(own: Any) -> Any:
    def sums(self: Any, partial: Any) -> Any:
        return self._over_parts(partial, partial.load)

    return sums


def _late(own: Any) -> Any:
    """The parts begin one block too late."""

    def share(self: StreamBounds, host: Any) -> Any:
        begin, end = own(self, host)
        return (begin, end) if self.roles.split is None else (binary("+", begin, self.block), end)

    return share


FAULTS = {
    "unscaled": (splits._Merge, "_sum", _unscaled),
    "a block less": (StreamBounds, "_share", _late),
}


@pytest.fixture
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    owner, attribute, fault = FAULTS[request.param]
    monkeypatch.setattr(owner, attribute, fault(getattr(owner, attribute)))
    yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("planted", FAULTS, indirect=True)
def test_a_planted_fault_is_noticed(planted: None, dtype: torch.dtype) -> None:
    case = named("GroupedLength")
    assert differences(compiled(case), case.cls.apply, case.arguments(3, KEYS, dtype))
