"""Copies and comparisons of real tensors, some of whose memory is not there."""

from __future__ import annotations

import pytest
import torch

from fusegrad.tracer.capture.memory import copy_tensor, has_its_storage, has_same_content, overlap, storage_bytes

Tensor = torch.Tensor
LAYOUTS = {
    "contiguous": torch.rand(4, 6),
    "transposed": torch.rand(6, 4).t(),
    "a part": torch.rand(9, 9)[2:6, 3:],
    "the end": torch.rand(100)[76:].view(4, 6),
    "expanded": torch.rand(4, 1).expand(4, 6),
    "empty": torch.rand(0, 6),
    "0-d": torch.rand(()),
    "complex": torch.rand(4, 6, dtype=torch.complex64),
    "sparse": torch.eye(4).to_sparse(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_copy_has_the_content_and_the_layout_in_memory_of_its_own(name: str) -> None:
    tensor = LAYOUTS[name]
    copy = copy_tensor(tensor)
    assert has_same_content(copy, tensor)
    assert has_its_storage(tensor)
    if tensor.layout is torch.strided:
        assert copy.stride() == tensor.stride()
        assert torch.equal(copy, tensor)
        assert not overlap(copy, tensor)


@pytest.mark.parametrize("name", ["contiguous", "transposed", "a part", "expanded", "0-d", "complex"])
def test_of_what_was_freed_a_copy_is_as_empty(name: str) -> None:
    tensor = LAYOUTS[name].clone(memory_format=torch.preserve_format)
    tensor.untyped_storage().resize_(0)
    copy = copy_tensor(tensor)
    assert not has_its_storage(tensor)
    assert storage_bytes(copy) == 0
    assert copy.shape == tensor.shape
    assert has_same_content(copy, tensor)
    assert not has_same_content(copy, torch.zeros_like(LAYOUTS[name]))


def test_a_storage_that_is_one_byte_short() -> None:
    tensor = torch.rand(10)[2:]
    tensor.untyped_storage().resize_(39)
    assert not has_its_storage(tensor)
    tensor.untyped_storage().resize_(40)
    assert has_its_storage(tensor)
    assert has_its_storage(tensor[:0])


def test_sparse_tensors_have_no_storage() -> None:
    assert storage_bytes(torch.eye(3).to_sparse()) is None
