"""Kernels that are emitted for functions with large products, streamed or not, are proved at once, and in no time."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fusegrad
from fusegrad.codegen import Kernel, Kernels
from fusegrad.codegen.proofs import Proof
from fusegrad.ir import Graph
from fusegrad.runtime.kernels import proofs

sys.path.insert(0, str(Path(__file__).parents[1] / "streams"))
from beside_eager import expanded, run, tensors_of
from stream_functions import CASES, Case

Asked = list[tuple[Kernel, Graph, Kernels]]
MILLISECONDS = 150
"""More than twice what the slowest takes."""
GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"contiguous": torch.ones_like, "expanded": expanded}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The kernels of which a proof is asked, each time that one is."""
    own, kernels = proofs.prove_kernel, Asked()

    def noted(kernel: Kernel, graph: Graph, group: Kernels, **options: Any) -> Proof:
        kernels.append((kernel, graph, group))
        return own(kernel, graph, group, **options)

    monkeypatch.setattr(proofs, "prove_kernel", noted)
    monkeypatch.setattr(proofs, "_answers", OrderedDict())
    return kernels


def seconds_of(kernel: Kernel, graph: Graph, kernels: Kernels) -> float:
    """The fastest of three proofs, on a machine that others use."""
    times = []
    for _ in range(3):
        started = time.process_time()
        proofs.prove_kernel(kernel, graph, kernels, apart=False)
        times.append(time.process_time() - started)
    return min(times)


@pytest.mark.filterwarnings("error::fusegrad.FallbackWarning")
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("n", "d"), [(37, 16), (97, 32)])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_kernel_is_proved(case: Case, n: int, d: int, dtype: torch.dtype, gradient: str, asked: Asked) -> None:
    arguments = case.arguments(n, d, dtype)
    given = [GRADIENTS[gradient](r.detach()) for r in tensors_of(case.cls.apply(*arguments))]
    run(fusegrad.compile(case.cls, backend="interpret").apply, arguments, given)
    assert len(asked) > 1  # forward and backward
    # An access that is proved only at a call's own sizes was asked for before, for all sizes.
    for kernel, graph, kernels in [*asked]:
        assert not proofs.prove_kernel(kernel, graph, kernels, apart=False).faults
        assert seconds_of(kernel, graph, kernels) * 1e3 < MILLISECONDS
