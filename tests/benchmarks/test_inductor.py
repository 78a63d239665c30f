"""The peer's column: what is counted in Inductor's text, and the rewriting that tracing without a GPU needs."""

from __future__ import annotations

import pytest
import torch

from fusegrad.benchmarks.inductor import Indexing, _launches

TEXT = """
def call(self, args):
        buf0 = empty_strided_cuda((8192, 1), (1, 8192), torch.float32)
        triton_red_fused_0.run(arg0_1, buf0, 8192, 4096, stream=stream0)
        extern_kernels.mm(buf0, arg1_1, out=buf1)
        buf2 = torch.ops.aten.sort.default(buf1)
        buf3 = reinterpret_tensor(buf2, (8192,), (1,), 0)
        return (buf3, )

runner = Runner(partitions=[])
    triton_red_fused_0.run(again)
"""


def test_kernels_and_library_calls_are_launches() -> None:
    assert _launches(TEXT) == 3


INDICES = [(slice(None), None), 1, (0, slice(1, 5, 2)), (slice(-2, None),), (None, slice(0, 2)), (1, None, 2)]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_by_operations_is_indexing(index: object) -> None:
    x = torch.arange(24).reshape(4, 6)
    with Indexing():
        found = x[index]  # type: ignore[index]
    assert torch.equal(found, x[index])  # type: ignore[index]


def test_indexing_by_tensors_is_left_alone() -> None:
    x, rows = torch.arange(24).reshape(4, 6), torch.tensor([3, 0])
    with Indexing():
        assert torch.equal(x[rows], torch.stack([x[3], x[0]]))
