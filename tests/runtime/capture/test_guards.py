"""When a captured graph is used again: facts that are compared, and the guard over sizes and strides."""

from __future__ import annotations

import pytest
import torch

import fusegrad
from fusegrad.runtime.capture.guards import argument_fact, exact_key, global_state, is_plain, size_guard
from fusegrad.tracer.capture.capture import Session
from fusegrad.tracer.reads.reads import scan


def guard_of(body, *tensors: torch.Tensor):
    session = Session()
    fakes = [session.fake(t) for t in tensors]
    session.trace(body, fakes, scan(body))
    return size_guard(session, fakes)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def test_any_size_but_the_small_ones_that_mean_something() -> None:
    guard = guard_of(lambda x: (x * 2,), ones(3, 4))
    assert guard([ones(5, 9)]) and guard([ones(100, 2)])
    assert not guard([ones(4, 3).t()])


@pytest.mark.parametrize(
    ("body", "fits", "does_not"),
    [
        (lambda x: (x * 2 if x.shape[0] > 3 else x,), (4, 4), (3, 4)),
        (lambda x: (x.view(-1, 2),), (3, 6), None),
        (lambda x: (x[:, :4] * 1,), (9, 7), (9, 3)),
        (lambda x: (x * 1 if x.shape[0] == 5 else x * 2,), (5, 7), (4, 7)),
        (lambda x: (x * 1 if x.shape[0] == x.shape[1] else x * 2,), (5, 7), (4, 4)),
    ],
)
def test_what_the_method_asked_of_the_sizes(body, fits, does_not) -> None:
    guard = guard_of(body, ones(5, 6))
    assert guard([ones(*fits)])
    assert does_not is None or not guard([ones(*does_not)])


def test_sizes_of_several_tensors_are_related() -> None:
    guard = guard_of(lambda a, b: (a + b,), ones(3, 4), ones(3, 4))
    assert guard([ones(5, 6), ones(5, 6)]) and not guard([ones(5, 6), ones(4, 6)])


def test_a_broadcast_size_is_not_any_size() -> None:
    guard = guard_of(lambda a, b: (a + b,), ones(3, 4), ones(1, 4))
    assert guard([ones(5, 6), ones(1, 6)]) and not guard([ones(5, 6), ones(5, 6)])


def test_an_expanded_stride_is_not_any_stride() -> None:
    guard = guard_of(lambda a: (a * 2,), ones(1, 4).expand(3, 4))
    assert guard([ones(1, 6).expand(5, 6)]) and not guard([ones(5, 6)])


def test_where_a_view_begins_does_not_matter() -> None:
    base = torch.ones(40)
    assert guard_of(lambda a: (a * 2,), base[4:12])([base[3:11]])


def test_scalars_have_no_guard() -> None:
    assert guard_of(lambda a: (a * 2,), torch.ones(()))([torch.ones(())])


def test_facts_of_arguments() -> None:
    base = torch.ones(3, 4)
    same = [torch.zeros(5, 6), torch.ones(4, 3).t()]
    others = [base.double(), base.clone().requires_grad_(), torch.ones(3), base + 0j, torch.ones(3, 4, 1)]
    assert all(argument_fact(t) == argument_fact(base) for t in same)
    assert all(argument_fact(t) != argument_fact(base) for t in others)
    z = base.to(torch.complex64)
    assert len({argument_fact(t) for t in (z, z.conj(), z.conj().imag, z.imag)}) == 4
    assert len({argument_fact(v) for v in (1, 1.0, True, "1", None, 0.0, -0.0)}) == 7
    assert argument_fact(float("nan")) == argument_fact(float("nan"))


def test_the_exact_key_tells_layouts_apart() -> None:
    square = torch.ones(4, 4)
    keys = {exact_key([t]) for t in (square, square.t(), square.double(), torch.ones(4, 5), torch.nn.Parameter(square),
                                     square.clone().requires_grad_())}  # fmt: skip
    assert len(keys) == 5 or len(keys) == 6
    assert exact_key([torch.zeros(4, 4), 2.0]) == exact_key([square, 2.0]) != exact_key([square, 2])


def test_global_state() -> None:
    plain = global_state()
    seen = {plain}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen.add(global_state())
    with torch.autocast("cpu", dtype=torch.float16):
        seen.add(global_state())
    with torch.inference_mode():
        seen.add(global_state())
    with torch.device("meta"):
        seen.add(global_state())
    try:
        torch.set_default_dtype(torch.float64)
        seen.add(global_state())
    finally:
        torch.set_default_dtype(torch.float32)
    try:
        torch.use_deterministic_algorithms(True)
        seen.add(global_state())
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(seen) == 7 and global_state() == plain
    with torch.no_grad():
        assert global_state() == plain


def test_plain_tensors() -> None:
    class Mine(torch.Tensor):
        pass

    assert is_plain(torch.ones(2)) and is_plain(torch.nn.Parameter(torch.ones(2)))
    assert not is_plain(torch.ones(2).as_subclass(Mine))
    assert not is_plain(torch.ones(2).to_sparse())


def test_a_condition_that_divides_by_a_size_that_is_zero_now_does_not_hold() -> None:
    """A reshape with -1 leaves `numel % size`; eager's own error is raised, not the guard's."""

    class Grouped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.reshape(x.shape[0], 3, -1).sum(-1)

        @staticmethod
        def backward(ctx, g):
            return g

    fast = fusegrad.compile(Grouped)
    fast.apply(torch.ones(2, 6, 4))
    for apply in (fast.apply, Grouped.apply):
        with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
            apply(torch.ones(0, 6, 4))
