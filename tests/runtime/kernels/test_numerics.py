"""numerics="eager" | "fast": where kernels round, which functions they call, and that the two never share a kernel."""

from __future__ import annotations

import pytest
import torch

import fusegrad
from fusegrad.codegen.kernel import Kernel
from fusegrad.runtime.settings import config
from fusegrad.runtime.settings.config import ConfigError


class Steps(torch.autograd.Function):
    """Each of its three operations rounds in eager."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return (x * y + x).sigmoid() / y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y * y + grad, grad * x * x


class Quantised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.to(torch.bfloat16).float() * 3

    @staticmethod
    def backward(ctx, grad):
        return grad


def numbers(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(512).to(dtype).requires_grad_(), (torch.rand(512) + 0.5).to(dtype).requires_grad_()


def results(function: type, *args: torch.Tensor) -> list[torch.Tensor]:
    y = function.apply(*args)
    return [y, *torch.autograd.grad(y, args, torch.ones_like(y))]


def in_float32(*args: torch.Tensor) -> list[torch.Tensor]:
    wide = [a.detach().float().requires_grad_() for a in args]
    return [r.to(args[0].dtype) for r in results(Steps, *wide)]


def test_eager_rounds_where_the_operations_do_and_fast_where_they_store() -> None:
    args = numbers(torch.bfloat16)
    fast = fusegrad.compile(Steps, backend="interpret")
    rounded, kept = results(Steps, *args), in_float32(*args)
    for numerics, wanted in (("eager", rounded), ("fast", kept), ("eager", rounded)):
        with config.patch(numerics=numerics):
            for got, value in zip(results(fast, *args), wanted, strict=True):
                torch.testing.assert_close(got, value, rtol=0, atol=0)
    assert not torch.equal(rounded[0], kept[0])


def test_backward_has_the_numerics_of_its_forward() -> None:
    args = numbers(torch.bfloat16)
    with config.patch(numerics="fast"):
        y = fusegrad.compile(Steps, backend="interpret").apply(*args)
    dx, dy = torch.autograd.grad(y, args, torch.ones_like(y))
    assert torch.equal(dx, in_float32(*args)[1]) and torch.equal(dy, in_float32(*args)[2])


def test_fast_still_rounds_what_is_converted() -> None:
    x = torch.randn(300, requires_grad=True)
    fast = fusegrad.compile(Quantised, backend="interpret", numerics="fast")
    assert torch.equal(fast.apply(x), Quantised.apply(x))


@pytest.mark.parametrize(
    ("numerics", "has", "lacks"),
    [
        ("eager", ("libdevice.exp(", "rounded("), ("tl.exp(", "tl.sigmoid(")),
        ("fast", ("tl.sigmoid(",), ("libdevice.", "div_rn", "rounded(")),
    ],
)
def test_explain_says_which_and_shows_its_text(numerics: str, has: tuple[str, ...], lacks: tuple[str, ...]) -> None:
    found = fusegrad.explain(fusegrad.compile(Steps, numerics=numerics), "bf16[64,128]", "bf16[64,128]")
    assert found.numerics == found.to_dict()["numerics"] == numerics
    assert (", numerics=" in str(found)) == (numerics == "fast")
    assert all(word in found.module for word in has) and not any(word in found.module for word in lacks)
    assert all(k.fast == (numerics == "fast") for k in found.kernel_records)


def test_the_compiler_is_told() -> None:
    exact, loose = (Kernel("k", "", (), {}, 1, 4, fast=fast) for fast in (False, True))
    assert exact.options("cuda") == {
        "num_warps": 4, "num_stages": 1, "enable_fp_fusion": False, "enable_reflect_ftz": False,
    }  # fmt: skip
    assert loose.options("hip") == {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}


def test_the_compiler_is_told_of_assertions() -> None:
    """Triton leaves assertions out unless it debugs, and then adds its own of overflow unless it is told not to."""
    kernel = Kernel("k", 'tl.device_assert((0 <= i) & (i < N), "")', (), {}, 1, 4)
    for kind in ("cuda", "hip"):
        options = kernel.options(kind)
        assert options["debug"] is True and options["sanitize_overflow"] is False


def test_the_environment_and_patch_win_over_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = fusegrad.compile(Steps, backend="interpret", numerics="fast")
    args = numbers(torch.float32)
    assert fast._fusegrad.options.backend_for(args) == "interpret fast"
    with config.patch(numerics="eager"):
        assert fast._fusegrad.options.backend_for(args) == "interpret"
    monkeypatch.setattr(config, "_NUMERICS", "eager")
    config._settings_of.cache_clear()
    try:
        assert fast._fusegrad.options.backend_for(args) == "interpret"
    finally:
        monkeypatch.undo()
        config._settings_of.cache_clear()
    fast = fusegrad.compile(Steps, backend="reference", numerics="fast")
    assert fast._fusegrad.options.backend_for(args) == "reference"


def test_other_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no numerics 'precise'"):
        fusegrad.compile(Steps, numerics="precise")
    with pytest.raises(ConfigError, match="use one of eager, fast"), config.patch(numerics="precise"):
        pass
    monkeypatch.setattr(config, "_NUMERICS", "precise")
    config._settings_of.cache_clear()
    try:
        with pytest.raises(ConfigError, match="precise"):
            config.settings()
    finally:
        monkeypatch.undo()
        config._settings_of.cache_clear()


def test_a_subclass_and_a_function_keep_them() -> None:
    fast = fusegrad.compile(lambda x, y: x * y + x, backend="interpret", numerics="fast")
    x, y = (a.detach() for a in numbers(torch.bfloat16))
    assert torch.equal(fast(x, y), (x.float() * y.float() + x.float()).bfloat16())

    class Own(fusegrad.compile(Steps, backend="interpret", numerics="fast")):
        pass

    assert torch.equal(Own.apply(x, y), Steps.apply(x.float(), y.float()).bfloat16())
