"""A Function class captured: where everything is that forward saves, marks and returns; attributes; reasons."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.function import Function, once_differentiable

from fusegrad.ir.program import ValueRef
from fusegrad.tracer.capture.capture import Session
from fusegrad.tracer.function import (
    ForwardCapture,
    capture_forward,
    has_unbacked,
    merge_attributes,
    rebind,
    symbols_in,
)
from fusegrad.tracer.gradients import GradientCountError, exact_gradients
from fusegrad.tracer.methods import (
    backward_method,
    is_once_differentiable,
    methods,
    parameter_names,
    uses_setup_context,
)
from fusegrad.tracer.reads.reads import scan
from fusegrad.tracer.trace import CaptureError

INPUT, OUTPUT, HIDDEN = (lambda i, kind=kind: ValueRef(kind, i) for kind in ("input", "output", "hidden"))


def function(forward: Any, **rules: Any) -> type:
    body = {name: staticmethod(rule) for name, rule in {"forward": forward, **rules}.items()}
    return type("Made", (Function,), body)


def capture(cls: type, *args: Any) -> ForwardCapture:
    session = Session()
    fakes = [session.fake(a) for a in args if isinstance(a, torch.Tensor)]
    needs = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    return capture_forward(cls, args, fakes, session, scan(*methods(cls).values()), needs)


def x() -> torch.Tensor:
    return torch.randn(3, 4, requires_grad=True)


def test_places_of_what_is_saved() -> None:
    def forward(ctx, a, b):
        y, middle = a * b, a + b
        ctx.save_for_backward(a, None, y, middle, b, middle)
        ctx.save_for_forward(middle, a)
        return y

    found = capture(function(forward), x(), x())
    assert found.saved == [INPUT(0), None, OUTPUT(0), HIDDEN(0), INPUT(1), HIDDEN(0)]
    assert found.saved_for_forward == [HIDDEN(0), INPUT(0)]
    assert found.hidden_count == 1 and len(found.fake_outputs) == 1
    assert found.fake_at(None) is None and found.fake_at(INPUT(1)) is found.fakes[1]
    assert found.fake_at(HIDDEN(0)) is found.fake_hidden[0]


def test_the_graph_returns_outputs_and_then_hidden_tensors() -> None:
    def forward(ctx, a):
        middle = a.exp()
        ctx.save_for_backward(middle)
        return middle * 2, 5, a.sin()

    found = capture(function(forward), a := x())
    results = found.trace.graph_module(a.detach())
    for result, expected in zip(results, (a.exp() * 2, a.sin(), a.exp()), strict=True):
        assert torch.equal(result, expected)
    assert [o.kind for o in found.outputs] == ["tensor", "object", "tensor"]
    assert found.outputs[1].value == 5 and found.tensor_outputs == [0, 2] and found.is_tuple


@pytest.mark.parametrize(
    ("make", "kind", "autograd_sees_a_view"),
    [
        (lambda a: a, "input", None),
        (lambda a: a.t(), "view", True),
        (lambda a: a[1:, ::2], "view", True),
        (lambda a: a.detach(), "view", False),
        (lambda a: a.clone(), "tensor", False),
        (lambda a: a.contiguous(), "input", None),
        (lambda a: a * 1, "tensor", False),
    ],
)
def test_outputs_that_are_inputs_or_views(make, kind, autograd_sees_a_view) -> None:
    (output,) = capture(function(lambda ctx, b, a: make(a)), x(), x()).outputs
    assert output.kind == kind
    assert kind == "tensor" or output.index == 1
    assert output.value is autograd_sees_a_view


def test_one_object_returned_twice() -> None:
    def forward(ctx, a):
        y = a * 2
        return y, y

    assert [o.kind for o in capture(function(forward), x()).outputs] == ["tensor", "same"]


def test_marks() -> None:
    def forward(ctx, a, b):
        y, z = a * 2, b * 2
        b.add_(1)
        ctx.mark_dirty(b)
        ctx.mark_non_differentiable(z)
        ctx.set_materialize_grads(False)
        return y, z, b

    found = capture(function(forward), x(), torch.randn(3))
    assert found.dirty == [INPUT(1)] and found.non_differentiable == [OUTPUT(1)]
    assert found.materialize_grads is False and found.outputs[2].kind == "input"


def test_marking_something_else_is_refused() -> None:
    def forward(ctx, a):
        ctx.mark_non_differentiable(a + 1)
        return a * 2

    with pytest.raises(CaptureError, match="mark_non_differentiable is given something"):
        capture(function(forward), x())


def test_attributes_keep_sizes_symbolic() -> None:
    def forward(ctx, a):
        ctx.shape, ctx.rows, ctx.dim = a.shape, a.shape[0], a.dim()
        ctx.nested = {"sizes": [a.shape[0] * 2, (a.shape[1],)], "k": "v"}
        ctx.kept, ctx.same, ctx.out = a * 3, a, a * 2
        return ctx.out

    found = capture(function(forward), x())
    assert found.tensor_attributes == {"kept": HIDDEN(0), "same": INPUT(0), "out": OUTPUT(0)}
    n, m = (s.node.expr for s in found.fakes[0].shape)
    assert symbols_in(found.constants.values()) == {n, m}
    at = rebind(found.constants, {n: 7, m: 5})
    assert at["shape"] == torch.Size([7, 5]) and type(at["shape"]) is torch.Size
    assert at["rows"] == 7 and at["dim"] == 2 and at["nested"] == {"sizes": [14, (5,)], "k": "v"}


def test_setup_context_is_part_of_the_capture() -> None:
    def setup_context(ctx, inputs, output):
        assert isinstance(inputs, tuple)
        ctx.save_for_backward(inputs[0], output)
        ctx.k = inputs[1]

    cls = function(lambda a, k: a * k, setup_context=setup_context)
    found = capture(cls, x(), 3.0)
    assert found.saved == [INPUT(0), OUTPUT(0)] and found.constants == {"k": 3.0} and not found.is_tuple
    assert uses_setup_context(cls) and not uses_setup_context(function(lambda ctx, a: a))


def test_needs_input_grad_and_requires_grad_are_those_of_the_call() -> None:
    seen: dict[str, Any] = {}

    def forward(ctx, a, b, k):
        return a * (2 if ctx.needs_input_grad == (True, False, False) and a.requires_grad else 5)

    found = capture(function(forward), x(), torch.randn(3), 2)
    assert found.needs_input_grad == (True, False, False) and not seen
    assert torch.equal(found.trace.graph_module(torch.ones(3, 4), torch.ones(3))[0], torch.full((3, 4), 2.0))


REASONS = {
    "branch": (lambda ctx, a: a * 2 if a.sum() > 0 else a, "control flow depends on the data"),
    "numpy": (lambda ctx, a: torch.from_numpy(a.detach().numpy()), "numpy array"),
    "item": (lambda ctx, a: a * a.sum().item(), "reads the data of a tensor"),
    "equal": (lambda ctx, a: a * 2 if torch.equal(a, a) else a, "depends on the data"),
    "address": (lambda ctx, a: a * a.data_ptr(), "memory address"),
    "own error": (lambda ctx, a: a @ a, "RuntimeError"),
    "view in a list": (lambda ctx, a: (a * 2, [a.view(-1)]), "returns a container with a view"),
    "number": (lambda ctx, a: (a * 2, a.nonzero().shape[0]), "returns a number that depends on the data"),
    "object": (lambda ctx, a: (a * 2, object()), "returns a object"),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name) -> None:
    forward, reason = REASONS[name]
    with pytest.raises(CaptureError) as found:
        capture(function(forward), x())
    assert reason in found.value.facts["reason"]
    assert name in ("view in a list", "number", "object") or found.value.facts["where"].startswith(f"{__file__}:")
    assert str(found.value).startswith(found.value.facts["reason"])


def test_a_container_of_tensors_on_ctx_has_places() -> None:
    def forward(ctx, a):
        ctx.parts = [a * 2, {"k": a}]
        return a

    captured = capture(function(forward), x())
    assert captured.tensor_attributes == {"parts[0]": ValueRef("hidden", 0), "parts[1]": ValueRef("input", 0)}
    assert merge_attributes(captured.constants, {"parts[0]": 5, "parts[1]": 6}) == {"parts": [5, {"k": 6}]}


class Parts:
    def __init__(self, twice: torch.Tensor) -> None:
        self.twice = twice


def test_an_object_with_tensors_on_ctx_is_refused_by_name() -> None:
    def forward(ctx, a):
        ctx.parts = Parts(a * 2)
        return a

    with pytest.raises(CaptureError, match=r"`ctx.parts` is a Parts with tensors"):
        capture(function(forward), x())


def test_a_size_that_depends_on_data_is_refused_by_name() -> None:
    def forward(ctx, a):
        ctx.count = a.nonzero().shape[0]
        return a * 2

    with pytest.raises(CaptureError, match=r"`ctx.count` depends on the data"):
        capture(function(forward), x())


def test_has_unbacked() -> None:
    session = Session()
    fake = session.fake(torch.randn(3))
    assert not has_unbacked(fake.shape[0] * 2)


# ------------------------------------------------------------------ the class
def test_backward_has_two_names() -> None:
    rule = lambda ctx, g: g  # noqa: E731
    assert backward_method(function(rule)) is None
    assert backward_method(function(rule, backward=rule)) is rule
    assert backward_method(function(rule, vjp=rule)) is rule


def test_methods_are_those_that_the_user_wrote() -> None:
    rule = lambda *a: a  # noqa: E731
    assert set(methods(function(rule))) == {"forward"}
    assert set(methods(function(rule, backward=rule, jvp=rule, vmap=rule))) == {"forward", "backward", "jvp", "vmap"}


def test_names_of_parameters() -> None:
    def method(ctx, logits, target, *rest):
        pass

    assert parameter_names(method, 4, 1, "argument") == ["logits", "target", "argument_2", "argument_3"]
    assert parameter_names(once_differentiable(method), 2, 1, "argument") == ["logits", "target"]
    assert parameter_names(print, 1, 0, "argument") == ["argument_0"]


def test_once_differentiable_is_recognised() -> None:
    rule = lambda ctx, g: g  # noqa: E731
    assert is_once_differentiable(once_differentiable(rule)) and not is_once_differentiable(rule)
    assert not is_once_differentiable(torch.amp.custom_bwd(rule, device_type="cpu"))


def test_the_number_of_gradients() -> None:
    g = torch.ones(1)
    cls = function(lambda ctx, a: a)
    assert exact_gradients(cls, g, 1) == (g,) and exact_gradients(cls, (g, None, None), 2) == (g, None)
    for wrong, count in (((g,), 2), ((g, None, g), 2), ((g, g), 1), ([g, g], 2)):
        with pytest.raises(GradientCountError, match="function MadeBackward returned an incorrect number of gradients"):
            exact_gradients(cls, wrong, count)
