"""`fusegrad.swap`: what is kept, what is refused, and that all of it can be taken back."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fusegrad
from fusegrad.runtime.swap.compatibility import attributes_read, signature_misfit
from fusegrad.runtime.swap.swap import SwapError

sys.path.insert(0, str(Path(__file__).parents[1]))
from swap_samples import FastGate, FastNorm, Gate, Net, Norm, doubled, fast_norm, tripled, wrapped_twice

X = torch.linspace(-1, 1, 24).reshape(3, 8)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def step(model: nn.Module) -> list[torch.Tensor]:
    """The output, and every gradient."""
    model.zero_grad()
    out = model(X)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


BOTH = {Norm: FastNorm, "gates.*": FastGate}


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_values_and_gradients_are_the_models(backend: str) -> None:
    model = net()
    expected = step(model)
    with fusegrad.config.patch(backend=backend), fusegrad.swap(model, BOTH):
        got = step(model)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_the_compiled_functions_run() -> None:
    model = net()
    with fusegrad.swap(model, BOTH):
        inner = model.norm(X)
        assert type(inner.grad_fn).__name__ == "RMSNormBackward"
        assert type(model.gates[0](X).grad_fn.next_functions[0][0]).__name__ == "SwiGLUBackward"
    assert "RMSNorm" not in type(model.norm(X).grad_fn).__name__


def test_nothing_of_the_modules_is_touched() -> None:
    model = net().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[str] = []
    model.norm.register_forward_hook(lambda module, *_: calls.append(type(module).__name__))
    before = {n: (p, p.data_ptr()) for n, p in [*model.named_parameters(), *model.named_buffers()]}
    modules, keys = dict(model.named_modules()), list(model.state_dict())
    with fusegrad.swap(model, BOTH) as swapped:
        assert dict(model.named_modules()) == modules and list(model.state_dict()) == keys
        assert all(p is before[n][0] for n, p in [*model.named_parameters(), *model.named_buffers()])
        assert isinstance(model.norm, Norm) and not model.norm.training
        assert model.norm.label() == "norm of 8"  # what the replacement does not have is the module's own
        assert set(swapped.modules) == {"norm", "tied", "gates.0", "gates.1"}
        step(model)
        optimizer.step()
    assert calls == ["Norm", "Norm"]
    assert all(p.data_ptr() == before[n][1] for n, p in model.named_parameters())


def test_a_module_under_two_names_is_one() -> None:
    model = net()
    with fusegrad.swap(model, {"tied": FastNorm}) as swapped:
        assert model.norm is model.tied and list(swapped.modules) == ["norm", "tied"]
    assert type(model.norm) is Norm


def test_what_is_done_meanwhile_stays() -> None:
    model = net()
    swapped = fusegrad.swap(model, BOTH)
    model.to(torch.float64).train(False)
    model.load_state_dict({n: torch.ones_like(p) for n, p in model.state_dict().items()}, assign=True)
    model.norm.register_buffer("late", torch.ones(1))
    swapped.revert()
    swapped.revert()
    assert type(model.norm) is Norm and model.norm.weight.dtype is torch.float64 and not model.norm.training
    assert bool((model.norm.weight == 1).all()) and "norm.late" in model.state_dict()


def test_copies_and_pickles_stay_swapped() -> None:
    model = net()
    expected = step(model)
    with fusegrad.swap(model, {Norm: fast_norm, Gate: FastGate, doubled: tripled}):
        now = step(model)
        others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in others:
        assert other.norm(X).grad_fn.name() == "RMSNormBackward" and other.norm is other.tied
        assert other.norm.weight is not model.norm.weight
        torch.testing.assert_close(step(other), now)
    torch.testing.assert_close(step(model), expected)


def test_a_global_of_the_methods_means_something_else_in_this_model() -> None:
    model, other = net(), net()
    plain = model(X)
    with fusegrad.swap(model, {doubled: tripled}):
        torch.testing.assert_close(model(X), plain * 1.5)
        torch.testing.assert_close(other(X), plain)
    torch.testing.assert_close(model(X), plain)


def test_a_global_is_found_in_what_a_decorator_wraps() -> None:
    class Wrapped(Net):
        forward = wrapped_twice

    model = Wrapped()
    plain = model(X)
    with fusegrad.swap(model, {doubled: tripled}):
        torch.testing.assert_close(model(X), plain * 1.5)


def test_swaps_nest_and_are_taken_back_in_order() -> None:
    model = net()
    outer = fusegrad.swap(model, {Norm: FastNorm})
    inner = fusegrad.swap(model, {"norm": fast_norm})
    with pytest.raises(SwapError, match="exchanged again"):
        outer.revert()
    inner.revert()
    outer.revert()
    assert type(model.norm) is Norm


def test_the_root_can_be_swapped() -> None:
    model = Norm(8)
    with fusegrad.swap(model, {"": FastNorm}) as swapped:
        assert model(X).grad_fn.name() == "RMSNormBackward" and "1 modules of Norm" in repr(swapped)


def test_inside_torch_compile_and_functional_call() -> None:
    model = net()
    expected = model(X)
    with fusegrad.swap(model, BOTH):
        called = torch.func.functional_call(model, dict(model.named_parameters()), (X,))
        compiled = torch.compile(model, backend="eager")(X)
    torch.testing.assert_close([called, compiled], [expected, expected])


def test_a_model_that_is_compiled_already_notices() -> None:
    model = net()
    compiled = torch.compile(model, backend="eager")
    plain = compiled(X).detach()
    with fusegrad.swap(model, {doubled: tripled}):
        torch.testing.assert_close(compiled(X).detach(), plain * 1.5)
    torch.testing.assert_close(compiled(X).detach(), plain)


def test_under_parametrizations() -> None:
    model = net()
    parametrize.register_parametrization(model.gates[0].up, "weight", nn.Tanh())
    expected = step(model)
    with fusegrad.swap(model, BOTH):
        torch.testing.assert_close(step(model), expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ refusals
def eps_reader(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * self.weight * self.epsilon


def deaf(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * self.eps


def further(self: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
    return x * self.weight * scale


class Choosy(FastNorm):
    @staticmethod
    def refuses(module: Any) -> str | None:
        return "it is too wide" if module.weight.numel() > 4 else None


REFUSED = {
    "no such name": ({"nrom": FastNorm}, "no module is called 'nrom'", "did you mean norm"),
    "no such class": ({nn.LayerNorm: FastNorm}, "no module is exactly a LayerNorm", "did you mean Norm?"),
    "no such global": ({len: tripled}, "no method of one names it", "named_modules"),
    "a number": ({3: FastNorm}, "no module is called 3", "named_modules"),
    "nothing": ({}, "nothing to replace", "dict"),
    "no dict": ([Norm], "nothing to replace", "dict"),
    "two keys": ({Norm: FastNorm, "n*": FastNorm}, "matched by Norm and by 'n*'", "one key"),
    "a module": ({Norm: Norm(8)}, "parameters of its own", "a class"),
    "a Function": ({Norm: torch.autograd.Function}, "autograd Function", "a class"),
    "other argument": ({Norm: lambda self, y: y}, "takes no `x` in place 0", "fits"),
    "one more argument": ({Norm: further}, "it needs `scale`", "fits"),
    "what is not there": ({Norm: eps_reader}, "reads `self.epsilon`", "fits"),
    "what is not read": ({Norm: deaf}, "misses the parameters in `weight`", "fits"),
    "its own word": ({Norm: Choosy}, "too wide", "fits"),
    "other call": ({doubled: fast_norm}, "takes no `y` in place 0", "signature"),
    "no call": ({doubled: 3}, "it cannot be called", "signature"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(case: str) -> None:
    replacements, fact, fix = REFUSED[case]
    model = net()
    types = [type(module) for module in model.modules()]
    has_keys = bool(replacements) and isinstance(replacements, dict)
    with pytest.raises(SwapError) as refused:
        fusegrad.swap(model, {"gates.0": FastGate, **replacements} if has_keys else replacements)
    assert fact in str(refused.value) and fix in str(refused.value).partition("fix:")[2]
    assert f"{__file__}:" in str(refused.value)
    assert [type(module) for module in model.modules()] == types


def test_a_forward_set_on_the_instance_is_not_hidden() -> None:
    model = net()
    model.norm.forward = functools.partial(Norm.forward, model.norm)
    with pytest.raises(SwapError, match="set on the instance"):
        fusegrad.swap(model, {Norm: FastNorm})


def test_a_script_module_is_refused() -> None:
    with pytest.raises(SwapError, match="ScriptModule"):
        fusegrad.swap(torch.jit.script(nn.ReLU()), {"": fast_norm})


def test_a_layout_that_cannot_be_exchanged_leaves_everything_as_it_was() -> None:
    class Slotted(FastNorm):
        __slots__ = ("more",)

    model = net()
    with pytest.raises(SwapError, match="layout"):
        fusegrad.swap(model, {"gates.0": FastGate, Norm: Slotted})
    assert type(model.gates[0]) is Gate and type(model.norm) is Norm


# ------------------------------------------------------------------ what is known of a method
def passes_on(self: Any, x: Any) -> Any:
    return tripled(self), self.weight


def closes_over(self: Any, x: Any) -> Any:
    return lambda: self.weight


class Louder(FastNorm):
    def forward(self: Any, x: Any) -> Any:
        return super().forward(x) * self.eps


@pytest.mark.parametrize(
    ("method", "read", "is_all"),
    [
        (FastNorm.forward, ["weight", "eps"], True),
        (FastGate.forward, ["down", "gated", "up", "gate"], True),  # through another method
        (passes_on, ["weight"], False),
        (closes_over, [], False),
        (Louder.forward, ["eps"], False),
    ],
)
def test_what_a_method_reads(method: Any, read: list[str], is_all: bool) -> None:
    names, known = attributes_read(method, FastGate)
    assert sorted(names) == sorted(read) and known is is_all


def test_signatures() -> None:
    assert signature_misfit(lambda a, b=1: 0, lambda a, b=2, c=3: 0) is None
    assert signature_misfit(lambda a, *, b: 0, lambda a, **k: 0) is None
    assert signature_misfit(lambda a, b=1: 0, lambda *a, **k: 0) is None
    assert "needs `b`" in (signature_misfit(lambda a, b=1: 0, lambda a, b: 0) or "")
    assert "`**k`" in (signature_misfit(lambda a, **k: 0, lambda a: 0) or "")
    assert "place 1" in (signature_misfit(lambda a, b: 0, lambda a, c, b: 0) or "")


# ------------------------------------------------------------------ wrapped for many processes, in a group of one
@pytest.fixture
def alone() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrapped_first", [False, True])
def test_with_ddp(alone: None, wrapped_first: bool) -> None:
    expected, model = step(net()), net()
    if not wrapped_first:
        fusegrad.swap(model, BOTH)
    wrapped = nn.parallel.DistributedDataParallel(model)
    if wrapped_first:
        fusegrad.swap(wrapped, {Norm: FastNorm, "module.gates.*": FastGate})
    assert model.norm(X).grad_fn.name() == "RMSNormBackward"
    torch.testing.assert_close(step(wrapped), expected, rtol=1e-4, atol=1e-5)


def test_with_fsdp2(alone: None) -> None:
    from torch.distributed.fsdp import fully_shard

    expected, model = step(net()), net()
    swapped = fusegrad.swap(model, BOTH)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for part in (*model.gates, model):
        fully_shard(part, mesh=mesh)
    got = step(model)
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in got]
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(SwapError, match="exchanged again"):
        swapped.revert()
