"""The stand-ins for ctx."""

from __future__ import annotations

import pytest
import torch

from fusegrad.tracer.capture.context import BackwardContext, ForwardContext, attributes_of


def test_calls_are_recorded_and_the_last_one_wins() -> None:
    ctx, a, b = ForwardContext((True,)), torch.ones(1), torch.ones(2)
    ctx.save_for_backward(a)
    ctx.save_for_backward(b, None)
    ctx.save_for_forward(a)
    ctx.mark_dirty(a)
    ctx.mark_non_differentiable(b)
    ctx.set_materialize_grads(False)
    assert ctx.to_save[0] is b and ctx.to_save[1] is None and len(ctx.to_save) == 2
    assert ctx.saved_for_forward[0] is a and ctx.dirty_tensors[0] is a and ctx.non_differentiable[0] is b
    assert ctx.materialize_grads is False


def test_attributes_are_set_read_and_deleted() -> None:
    ctx = ForwardContext((True,))
    ctx.k = 3
    ctx.k += 1
    assert ctx.k == 4 and attributes_of(ctx) == {"k": 4} and hasattr(ctx, "k")
    del ctx.k
    assert not hasattr(ctx, "k")
    with pytest.raises(AttributeError):
        del ctx.k


@pytest.mark.parametrize("name", ["dirty", "saved", "attributes", "marks", "hidden"])
def test_any_name_is_free_for_attributes(name) -> None:
    ctx = ForwardContext((True,))
    setattr(ctx, name, 3)
    assert getattr(ctx, name) == 3 and attributes_of(ctx) == {name: 3}
    assert ctx.dirty_tensors == () and ctx.to_save == ()


def test_assigning_a_field_of_torchs_own_is_calling_its_method() -> None:
    ctx, a = ForwardContext((True,)), torch.ones(1)
    ctx.to_save = (a,)
    ctx.materialize_grads = False
    assert ctx.to_save == (a,) and ctx.materialize_grads is False and attributes_of(ctx) == {}


def test_saving_what_is_no_tensor_raises_as_torch_does() -> None:
    for save in ("save_for_backward", "save_for_forward"):
        with pytest.raises(TypeError, match="can only save variables"):
            getattr(ForwardContext((True,)), save)(3)


def test_needs_input_grad_is_visible() -> None:
    assert ForwardContext((True, False)).needs_input_grad == (True, False)


def test_backward_sees_what_forward_left() -> None:
    t = torch.ones(1)
    ctx = BackwardContext([t, None], {"k": 3}, (True,))
    assert ctx.saved_tensors[0] is t and ctx.saved_tensors[1] is None and isinstance(ctx.saved_tensors, tuple)
    assert ctx.k == 3 and ctx.needs_input_grad == (True,) and ctx.saved_variables == ctx.saved_tensors
    ctx.k = 4
    assert ctx.k == 4
