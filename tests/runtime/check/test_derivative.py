"""What check says of hessians where forward saves an intermediate, of a backward that raises, and of a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function, gradcheck

import fusegrad
from fusegrad.__main__ import main
from fusegrad.runtime.check.check import DerivativeError, NothingComparedError
from fusegrad.runtime.check.reference_transforms import InFloat64
from fusegrad.runtime.functorch.rules import forward_mode

Tensor = torch.Tensor
ONE: dict[str, Any] = {"dtypes": [], "layouts": [], "sizes": [], "quiet": True}


class MixedNorm(Function):
    """RMSNorm in float32 over any float: `rstd` is neither an argument nor an output."""

    @staticmethod
    def forward(ctx, x, w):
        wide = x.float()
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, w, rstd)
        return (wide * rstd).to(x.dtype) * w

    @staticmethod
    def backward(ctx, g):
        x, w, rstd = ctx.saved_tensors
        n, gw = x.float() * rstd, g.float() * w.float()
        gx = rstd * (gw - n * (gw * n).mean(-1, keepdim=True))
        return gx.to(x.dtype), (g.float() * n).sum_to_size(w.shape).to(w.dtype)


class MixedEntropy(Function):
    @staticmethod
    def forward(ctx, x, t):
        lse = torch.logsumexp(x.float(), -1)
        ctx.save_for_backward(x, t, lse)
        return (lse - x.float().gather(1, t[:, None])[:, 0]).mean()

    @staticmethod
    def backward(ctx, g):
        x, t, lse = ctx.saved_tensors
        p = (x.float() - lse[:, None]).exp() - torch.nn.functional.one_hot(t, x.shape[1])
        return (p * g / x.shape[0]).to(x.dtype), None


class Rounded(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class WrongSign(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return -g * (1 - y * y)


class Raises(Function):
    @staticmethod
    def forward(ctx, x, w):
        return x * w

    @staticmethod
    def backward(ctx, g):
        return g


CALLS: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "norm": (MixedNorm, ("bf16[3,4]", "bf16[4]"), "`rstd` saved"),
    "norm in float32": (MixedNorm, ("f32[3,4]", "f32[4]"), "`rstd` saved"),
    "entropy": (MixedEntropy, ("f32[3,4]", "i64[3]"), "`lse` saved"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_hessian_through_a_saved_intermediate_is_judged_by_differences(name: str) -> None:
    cls, args, saved = CALLS[name]
    report = fusegrad.check(cls, *args, transforms=["hessian"], **ONE)
    row = report.rows[0]
    assert (row.mode, row.result, row.errors) == ("hessian", "derived", None), str(report)
    assert saved in row.detail and "differences of backward" in row.detail
    assert report.derivative is not None and report.derivative.holds


def test_a_wrong_hessian_through_a_saved_intermediate_is_told_and_reproduced(monkeypatch: pytest.MonkeyPatch) -> None:
    original = forward_mode.jvp

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return tuple(r if r is None else 2 * r for r in original(*args, **kwargs))

    monkeypatch.setattr(forward_mode, "jvp", wrong)
    with pytest.raises(fusegrad.CheckError, match="hessian") as caught:
        fusegrad.check(MixedEntropy, "f32[3,4]", "i64[3]", transforms=["hessian"], **ONE)
    script = caught.value.reproducer
    with pytest.raises(AssertionError):
        exec(compile(script, "<wrong>", "exec"), {"__name__": "reproducer"})
    monkeypatch.undo()
    exec(compile(script, "<right>", "exec"), {"__name__": "reproducer"})


def test_casts_stay_wide_and_bits_are_left_alone() -> None:
    x = torch.randn(3, dtype=torch.float64)
    with InFloat64():
        assert x.float().dtype is torch.float64 and torch.equal(x.float(), x)
        assert x.sum(dtype=torch.bfloat16).dtype is torch.float64
        assert torch.ones(3, dtype=torch.int32).view(torch.float32).dtype is torch.float32


# ------------------------------------------------------------------ nothing to compare
def test_a_backward_that_raises_in_every_mode_is_no_success() -> None:
    with pytest.raises(NothingComparedError, match="incorrect number of gradients") as caught:
        fusegrad.check(Raises, "f32[3]", "f32[3]", quiet=True)
    report = caught.value.report
    assert not report.ok and not report.to_dict()["ok"] and report.counts["not applicable"] > 3
    assert "test_derivative.py:" in str(caught.value) and caught.value.code == "FG213"


def test_no_case_at_all_is_no_success() -> None:
    with pytest.raises(NothingComparedError, match="nothing was compared"):
        fusegrad.check(Raises, "f32[3]", "f32[3]", transforms=["vjp"], **ONE)


# ------------------------------------------------------------------ the true derivative
def test_a_wrong_sign_is_told_with_its_place() -> None:
    report = fusegrad.check(WrongSign, "f32[4]", transforms=["backward"], **ONE)
    assert report.ok and report.derivative is not None and report.derivative.holds is False
    assert report.derivative.got == pytest.approx(-report.derivative.expected, rel=1e-6)
    last = str(report).splitlines()[-2:]
    assert last[0].startswith("backward is not the derivative of forward: largest difference ") and " at x[" in last[0]
    assert "straight-through" in last[1] and "expect_derivative=False" in last[1]


def test_an_answer_to_the_question() -> None:
    report = fusegrad.check(Rounded, "f32[4]", transforms=["backward"], expect_derivative=False, **ONE)
    assert report.ok and report.derivative is None and "derivative" not in str(report)
    with pytest.raises(DerivativeError, match="mend the backward"):
        fusegrad.check(WrongSign, "f32[4]", transforms=["backward"], expect_derivative=True, **ONE)
    assert fusegrad.check(MixedNorm, "f32[3,4]", "f32[4]", transforms=["backward"], expect_derivative=True, **ONE).ok


def test_a_kink_has_no_derivative() -> None:
    class Relu(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clamp(min=0)

        @staticmethod
        def backward(ctx, g):
            return g * (ctx.saved_tensors[0] >= 0)

    at_the_kink = fusegrad.check(Relu, torch.zeros(3), transforms=["backward"], **ONE).derivative
    assert at_the_kink is not None and at_the_kink.holds is None and "kinks" in str(at_the_kink)
    beside = fusegrad.check(Relu, torch.tensor([-1.0, 0.0, 2.0]), transforms=["backward"], **ONE).derivative
    assert beside is not None and beside.holds


class Square(Function):
    """Of complex numbers: the gradient is that of torch, with the conjugate."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * z

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0].conj()


class NotConjugated(Square):
    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


class Turned(Function):
    """A real argument, a complex output."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.polar(torch.ones_like(x), x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (g.conj() * 1j * torch.polar(torch.ones_like(x), x)).real


class Modulus(Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.abs()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].sgn()


@pytest.mark.parametrize(
    ("cls", "spec", "holds"),
    [(Square, "c64[3]", True), (NotConjugated, "c64[3]", False), (Turned, "f64[3]", True), (Modulus, "c128[3]", True)],
)
def test_complex_numbers_are_moved_along_both_parts(cls: Any, spec: str, holds: bool) -> None:
    found = fusegrad.check(cls, spec, transforms=["backward"], **ONE).derivative
    assert found is not None and found.holds is holds, str(found)
    exact = torch.randn(3, dtype=torch.float64 if spec[0] == "f" else torch.complex128, requires_grad=True)
    assert gradcheck(cls.apply, exact, raise_exception=False) is holds, "torch says the same"
    if spec[0] == "c":
        assert found.at.rpartition(".")[2] in ("real", "imag")


def test_a_modulus_has_no_derivative_at_zero() -> None:
    found = fusegrad.check(Modulus, torch.zeros(2, dtype=torch.complex128), transforms=["backward"], **ONE).derivative
    assert found is not None and found.holds is None and "kinks" in str(found)


def test_a_function_without_backward_is_not_asked() -> None:
    @fusegrad.compile
    def f(x: Tensor) -> Tensor:
        return x.tanh()

    assert fusegrad.check(f, "f32[3]", transforms=["backward"], **ONE).derivative is None


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    source = (
        "from torch.autograd import Function\n\n\nclass Few(Function):\n"
        "    @staticmethod\n    def forward(ctx, x, k):\n        return x * k\n\n"
        "    @staticmethod\n    def backward(ctx, g):\n        return g\n\n\n"
        "class Signless(Few):\n    @staticmethod\n    def backward(ctx, g):\n        return g, g\n"
    )
    (tmp_path / "few_gradients.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    tensors = ["f32[3]", "f32[3]", "--transform", "backward", "--size", "3", "--dtype", "f32", "--layout", "step 2"]
    assert main(["check", "few_gradients:Few", *tensors]) == 2
    assert "nothing was compared: eager raises RuntimeError" in capsys.readouterr().out
    assert main(["check", "few_gradients:Signless", *tensors]) == 0
    assert "backward is not the derivative of forward" in capsys.readouterr().out
    assert main(["check", "few_gradients:Signless", *tensors, "--expect-derivative", "yes"]) == 2
    assert main(["check", "few_gradients:Signless", *tensors, "--expect-derivative", "no"]) == 0
    assert "derivative" not in capsys.readouterr().out.splitlines()[-1]


class UnpacksTwice(torch.autograd.Function):
    """Eager's non-reentrant checkpoint raises where saved tensors are unpacked a second time."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ctx.saved_tensors[0].exp() + 0 * x


def test_a_checkpoint_that_eager_refuses_is_compared_with_a_plain_backward() -> None:
    only: Any = {"transforms": ["checkpoint"], "dtypes": [], "layouts": [], "sizes": [], "quiet": True}
    report = fusegrad.check(UnpacksTwice, "f32[4]", **only)
    (row,) = [r for r in report.rows if r.mode == "checkpoint"]
    assert report.ok and row.result == "ok" and "eager raises CheckpointError" in row.detail
