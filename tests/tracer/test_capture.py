"""Capture: provenance, nested Functions, captured tensors, what a capture restores, and its lock."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.autograd.function import Function

from fusegrad.tracer.capture import capture
from fusegrad.tracer.capture.capture import Session, is_capturing, with_known_sizes
from fusegrad.tracer.frames import where_raised
from fusegrad.tracer.opaque import call_interception
from fusegrad.tracer.reads.reads import scan
from fusegrad.tracer.trace import CaptureError

WEIGHT = torch.arange(3.0)


class Inner(Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return 100 * g


def trace(fn: Any, *tensors: torch.Tensor, dynamic: bool = True) -> capture.Trace:
    session = Session(dynamic)
    return session.trace(fn, [session.fake(t) for t in tensors], scan(fn))


def calls(found: capture.Trace) -> list[Any]:
    return [n for n in found.graph_module.graph.nodes if n.op == "call_function"]


def test_a_node_knows_the_name_the_line_and_its_text() -> None:
    def body(x):
        doubled = x * 2
        return (doubled + 1,)

    first, second = calls(trace(body, torch.randn(3)))
    name, where, line = first.meta["fusegrad_origin"]
    start = body.__code__.co_firstlineno
    assert (name, line) == ("doubled", "doubled = x * 2")
    assert where == f"{__file__}:{start + 1}"
    assert second.meta["fusegrad_origin"] == (None, f"{__file__}:{start + 2}", "return (doubled + 1,)")


def test_an_annotated_assignment_names_its_value_and_a_comparison_does_not() -> None:
    def body(x):
        scaled: torch.Tensor = x * 2
        x == 2  # noqa: B015
        return (scaled,)

    names = [n.meta["fusegrad_origin"][0] for n in calls(trace(body, torch.randn(3)))]
    assert names == ["scaled", None][: len(names)]


def test_a_value_of_a_helper_is_placed_in_the_helper() -> None:
    def helper(x):
        inside = x.exp()
        return inside

    def body(x):
        return (helper(x),)

    (node,) = calls(trace(body, torch.randn(3)))
    assert node.meta["fusegrad_origin"][0] == "inside"
    assert node.meta["fusegrad_origin"][1].endswith(f":{helper.__code__.co_firstlineno + 1}")


def test_operators_on_self_in_place_are_seen_with_their_place() -> None:
    def body(x):
        y = x.clone()
        y += 1
        return (y,)

    assert all("fusegrad_origin" in n.meta for n in calls(trace(body, torch.randn(3))))


class Split(Function):
    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return 100 * g


@pytest.mark.parametrize("cls", [Inner, Split])
@pytest.mark.parametrize("bound", [False, True])
def test_a_nested_function_is_one_node(cls, bound) -> None:
    f = cls.apply

    def body(x):
        y = f(x * 2) if bound else cls.apply(x * 2)
        return (y + 1,)

    if bound and cls is Inner and not call_interception.IN_PYTHON:
        with pytest.raises(capture.CaptureError, match="a name that was bound before"):
            trace(body, torch.randn(3))
        return
    targets = [getattr(n.target, "fusegrad_call", n.target) for n in calls(trace(body, torch.randn(3)))]
    assert targets == [torch.ops.aten.mul.Tensor, cls, torch.ops.aten.add.Tensor]


def test_a_nested_call_has_a_place_and_a_value() -> None:
    def body(x):
        return (Inner.apply(x),)

    (node,) = calls(trace(body, torch.randn(3)))
    assert node.meta["fusegrad_origin"][2] == "return (Inner.apply(x),)"
    assert node.meta["val"].dim() == 1


def test_a_nested_function_of_two_outputs() -> None:
    class Pair(Function):
        @staticmethod
        def forward(ctx, x, k):
            return x * k, x + k

        @staticmethod
        def backward(ctx, g, h):
            return g + h, None

    def body(x):
        a, b = Pair.apply(x, 3)
        return (a - b,)

    found = trace(body, x := torch.randn(4))
    assert [n.target for n in calls(found)].count(capture.function_of_call_node(Pair)) == 1
    assert torch.equal(found.graph_module(x)[0], x * 3 - (x + 3))


def test_replaying_a_nested_call_keeps_its_custom_backward() -> None:
    found = trace(lambda x: (Inner.apply(x),), torch.randn(3))
    x = torch.randn(3, requires_grad=True)
    found.graph_module(x)[0].sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 100.0))


def test_call_nodes_of_one_class_are_one_object() -> None:
    assert capture.function_of_call_node(Inner) is capture.function_of_call_node(Inner)
    assert capture.function_of_call_node(Inner) is not capture.function_of_call_node(type("Inner", (Inner,), {}))


@pytest.mark.parametrize("fails", [False, True])
def test_apply_is_restored(fails) -> None:
    def applied() -> Any:
        """What Function.apply does now, in Python or in C."""
        return getattr(getattr(Function.apply, "__func__", None), "__code__", vars(Function)["apply"])

    before = applied()
    cache = torch.is_autocast_cache_enabled()

    def body(x):
        assert applied() is not before
        if fails:
            raise ValueError("mine")
        return (x * 2,)

    if fails:
        with pytest.raises(ValueError, match="mine"):
            trace(body, torch.randn(3))
    else:
        trace(body, torch.randn(3))
    assert applied() is before
    assert "__getattribute__" not in vars(type(Function))
    assert not hasattr(torch, "_fusegrad_nested_call")
    assert torch.is_autocast_cache_enabled() is cache
    assert not is_capturing()


def test_another_thread_calls_functions_as_ever_while_one_captures() -> None:
    inside, done = threading.Event(), threading.Event()
    found: list[Any] = []

    def body(x):
        inside.set()
        assert done.wait(10)
        return (x * 2,)

    def other() -> None:
        assert inside.wait(10)
        x = torch.ones(2, requires_grad=True)
        y = Inner.apply(x)
        y.sum().backward()
        found.append((y.detach(), x.grad, y.grad_fn.name()))
        done.set()

    worker = threading.Thread(target=other)
    worker.start()
    session = Session()
    session.trace(body, [session.fake(torch.randn(3))], None)
    worker.join()
    ((y, grad, name),) = found
    assert torch.equal(y, torch.ones(2).sin()) and torch.equal(grad, torch.full((2,), 100.0))
    assert name == "InnerBackward"


def test_captures_of_several_threads_take_turns() -> None:
    errors: list[BaseException] = []
    graphs: list[str] = []

    def work(k: int) -> None:
        try:
            for _ in range(3):
                graphs.append(str(trace(lambda x: (x * k + k,), torch.randn(3)).graph_module.code))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert len(set(graphs)) == 4 and len(graphs) == 12


def test_a_global_tensor_becomes_a_placeholder() -> None:
    found = trace(lambda x: (x * WEIGHT,), torch.randn(3))
    assert found.lifted == [WEIGHT]
    placeholders = [n for n in found.graph_module.graph.nodes if n.op == "placeholder"]
    assert [str(p.target) for p in placeholders][-1] == "captured_0" and len(placeholders) == 2
    assert torch.equal(found.graph_module(torch.ones(3), torch.full((3,), 5.0))[0], torch.full((3,), 5.0))


def test_a_tensor_read_twice_is_one_placeholder() -> None:
    assert len(trace(lambda x: (x * WEIGHT + WEIGHT,), torch.randn(3)).lifted) == 1


def test_a_tensor_made_during_the_trace_is_a_constant() -> None:
    found = trace(lambda x: (x * torch.tensor([1.0, 2.0, 3.0]),), torch.randn(3))
    assert found.lifted == []
    assert torch.equal(found.graph_module(torch.ones(3))[0], torch.tensor([1.0, 2.0, 3.0]))


def test_a_constant_is_not_shared_between_replays() -> None:
    def body(x):
        made = torch.tensor([1.0, 2.0, 3.0])
        made += x
        return (made,)

    found = trace(body, torch.randn(3))
    first = found.graph_module(torch.ones(3))[0]
    assert torch.equal(found.graph_module(torch.ones(3))[0], first)
    assert torch.equal(first, torch.tensor([2.0, 3.0, 4.0]))


def test_a_tensor_that_cannot_be_found_again_is_refused() -> None:
    def hide() -> Any:
        return iter([torch.ones(3)])

    hidden = hide()

    def body(x):
        return (x * next(hidden),)

    with pytest.raises(CaptureError, match="cannot be found again"):
        trace(body, torch.randn(3))


WRITES = {
    "method": lambda x: (WEIGHT.add_(1), x)[1:],
    "view": lambda x: (WEIGHT[0].fill_(1), x)[1:],
    "argument": lambda x: (WEIGHT.copy_(x), x)[1:],
    "out": lambda x: (torch.add(WEIGHT, 1, out=WEIGHT), x)[1:],
    "out, argument": lambda x: (torch.add(x, 1, out=WEIGHT), x)[1:],
    "item": lambda x: (WEIGHT.__setitem__(0, 4.0), x)[1:],
    "list": lambda x: (torch._foreach_add_([WEIGHT], 1), x)[1:],
    "function": lambda x: (torch.nn.functional.relu(WEIGHT.view(3), inplace=True), x)[1:],
}


@pytest.mark.parametrize("how", WRITES)
def test_a_write_to_a_tensor_from_outside_is_refused_and_did_not_happen(how) -> None:
    with pytest.raises(CaptureError, match="writes to a tensor that is no argument") as found:
        trace(WRITES[how], torch.randn(3))
    assert found.value.facts["where"].startswith(f"{__file__}:")
    assert torch.equal(WEIGHT, torch.arange(3.0))


def test_a_change_that_the_byte_code_does_not_show_is_refused() -> None:
    store = {"n": 0}

    def body(x):
        store["n"] += 1
        return (x * 2,)

    with pytest.raises(CaptureError, match="it changes the closure store, which it also reads"):
        trace(body, torch.randn(3))


def test_item_is_refused_with_its_line() -> None:
    def body(x):
        return (x * x.sum().item(),)

    with pytest.raises(CaptureError, match="reads the data of a tensor") as found:
        trace(body, torch.randn(3))
    assert found.value.facts["where"] == f"{__file__}:{body.__code__.co_firstlineno + 1}"


def test_reading_memory_raises_instead_of_giving_zero() -> None:
    with pytest.raises(RuntimeError, match=r"[Dd]ata pointer|data ptr"):
        trace(lambda x: (x + x.data_ptr(),), torch.randn(3))


def test_sizes_are_symbols_and_static_sessions_have_none() -> None:
    found = trace(lambda x: (x * x.shape[0],), torch.randn(3))
    assert torch.equal(found.graph_module(torch.ones(7))[0], torch.full((7,), 7.0))
    session = Session(dynamic=False)
    assert session.fake(torch.randn(3, 4)).shape == (3, 4)
    assert all(type(n) is int for n in session.fake(torch.randn(3, 4)).shape)


def test_equal_sizes_are_different_symbols() -> None:
    session = Session()
    a, b = session.fake(torch.randn(4, 4)), session.fake(torch.randn(4))
    assert len({str(s) for s in (*a.shape, *b.shape)}) == 3


def test_a_fake_keeps_strides_grad_and_type_and_forgets_the_offset() -> None:
    base = torch.randn(40, dtype=torch.float64)
    t = base[3:27].view(4, 6).t().requires_grad_()
    fake = Session().fake(t)
    assert (fake.dtype, fake.requires_grad, fake.dim()) == (torch.float64, True, 2)
    assert fake.stride()[0] == 1 and fake.storage_offset() == 0


def test_conditions_are_what_a_trace_assumed_about_sizes() -> None:
    session = Session()
    fake = session.fake(torch.randn(6))

    def body(x):
        return (x * 2,) if x.shape[0] > 5 else (x,)

    session.trace(body, [fake], scan(body))
    (symbol,) = fake.shape[0].node.expr.free_symbols
    conditions = session.conditions([symbol])
    assert conditions and all(bool(c.xreplace({symbol: 6})) for c in conditions)
    assert not all(bool(c.xreplace({symbol: 5})) for c in conditions)
    assert session.conditions([symbol], since=len(session.env.guards)) == ()


def test_settled_gives_ints_where_a_size_is_known() -> None:
    session = Session()
    fake = session.fake(torch.randn(6, 2))

    def body(x):
        return (x * 2,) if x.shape[0] == 6 else (x,)

    session.trace(body, [fake], scan(body))
    again = session.fake_again(fake)
    assert again.shape[0] == 6 and type(with_known_sizes(again.shape)[0]) is int
    assert not isinstance(again.shape[1], int)


def test_an_error_is_placed_at_the_users_last_line() -> None:
    def body(x):
        return (torch.cat([x, x.unsqueeze(0)]),)

    try:
        body(torch.randn(3))
    except RuntimeError as error:
        assert where_raised(error) == f"{__file__}:{body.__code__.co_firstlineno + 1}"
    else:
        pytest.fail("torch joined tensors of different rank")


def test_random_numbers_of_a_capture_leave_the_generator_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = trace(lambda x: (x + torch.rand_like(x),), torch.randn(3, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(found.graph_module(torch.zeros(3))[0], found.graph_module(torch.zeros(3))[0])


def test_autocast_is_part_of_the_graph() -> None:
    def body(x):
        return (x @ x,)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = trace(body, torch.randn(3, 3))
    assert found.graph_module(torch.randn(3, 3))[0].dtype is torch.bfloat16


def test_who_asked_for_a_guard_is_found_without_importing_torchs_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.fx.experimental import symbolic_shapes

    monkeypatch.setattr(symbolic_shapes, "uninteresting_files", lambda: pytest.fail("imports a fifth of a second"))
    session = Session()
    fake = session.fake(torch.ones(4, 3))
    assert fake.shape[0] > 2
    assert session.env.guards


INDICES: dict[str, tuple[Any, list[str]]] = {
    "a new axis": ((slice(None), None), ["unsqueeze"]),
    "an element": ((slice(None), 1), ["select"]),
    "the last ones": ((slice(None), slice(-2, None)), ["slice"]),
    "around": ((None, ..., slice(None)), ["unsqueeze"]),
    "all of it": (slice(None), ["alias"]),
}


@pytest.mark.parametrize("name", INDICES)
def test_an_axis_that_is_taken_whole_is_not_sliced(name: str) -> None:
    """As in eager: the gradient of a slice would lie otherwise than what it is the gradient of."""
    index, expected = INDICES[name]
    x = torch.randn(3, 4)
    found = trace(lambda x: (x[index],), x)
    assert [n.target._schema.name.partition("::")[2] for n in calls(found) if hasattr(n.target, "_schema")] == expected
    (made,) = found.graph_module(x)
    assert torch.equal(made, x[index]) and made.stride() == x[index].stride()
