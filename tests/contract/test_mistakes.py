"""A beginner's mistakes: what is said, at which line, in how many lines, beside eager. No frame of ours in between."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad
from fusegrad.ir.errors import NotTraceableError, SpecError
from fusegrad.tracer.frames import TORCH, is_user_file
from fusegrad.tracer.gradients import GradientCountError, GradientShapeError, GradientWarning

Tensor = torch.Tensor


class Product(Function):
    """The class that is right."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, g * x


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


# ------------------------------------------------------------------ mistakes that eager raises for, too
def a_typo(compiled: Any) -> None:
    class Typo(Product):
        @staticmethod
        def forward(ctx, x, w):
            return torch.sigmoidd(x) * w  # HERE

    compiled(Typo).apply(t(4), t(4))


def a_typo_in_backward(compiled: Any) -> None:
    class Typo(Product):
        @staticmethod
        def backward(ctx, g):
            return torch.sigmoidd(g), g  # HERE

    compiled(Typo).apply(t(4), t(4)).sum().backward()


def an_attribute_that_is_not_there(compiled: Any) -> None:
    class Scaled(Product):
        @staticmethod
        def forward(ctx, x, w):
            return x * ctx.scale * w  # HERE

    compiled(Scaled).apply(t(4), t(4))


def sizes_that_do_not_fit(compiled: Any) -> None:
    compiled(Product).apply(t(4), t(5))


def sizes_of_a_matmul(compiled: Any) -> None:
    class Mat(Product):
        @staticmethod
        def forward(ctx, x, w):
            return x @ w  # HERE

    compiled(Mat).apply(t(4, 5), t(4, 4))


def dtypes_that_do_not_fit(compiled: Any) -> None:
    class Mat(Product):
        @staticmethod
        def forward(ctx, x, w):
            return x @ w  # HERE

    compiled(Mat).apply(t(4, 4), t(4, 4, dtype=torch.bfloat16))


def two_devices(compiled: Any) -> None:
    compiled(Product).apply(t(4), torch.randn(4, device="meta"))


def a_missing_argument(compiled: Any) -> None:
    compiled(Product).apply(t(4))


def a_surplus_argument(compiled: Any) -> None:
    compiled(Product).apply(t(4), t(4), 3)


def a_number_that_is_saved(compiled: Any) -> None:
    class Saves(Product):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, 2.0)
            return x * w

    compiled(Saves).apply(t(4), t(4))


def a_dict_that_is_returned(compiled: Any) -> None:
    class Returns(Product):
        @staticmethod
        def forward(ctx, x, w):
            return {"y": x * w}

    compiled(Returns).apply(t(4), t(4))["y"].sum().backward()


def an_error_of_the_users(compiled: Any) -> None:
    class Refuses(Product):
        @staticmethod
        def forward(ctx, x, w):
            try:
                {}["key"]
            except KeyError as error:
                raise ValueError("no such key") from error  # HERE

    compiled(Refuses).apply(t(4), t(4))


AS_EAGER: dict[Callable[[Any], None], tuple[type[Exception], str]] = {
    a_typo: (AttributeError, "no attribute 'sigmoidd'"),
    a_typo_in_backward: (AttributeError, "no attribute 'sigmoidd'"),
    an_attribute_that_is_not_there: (AttributeError, "scale"),
    sizes_that_do_not_fit: (RuntimeError, r"tensor a \(4\) must match the size of tensor b \(5\)"),
    sizes_of_a_matmul: (RuntimeError, r"cannot be multiplied \(4x5 and 4x4\)"),
    dtypes_that_do_not_fit: (RuntimeError, "same dtype"),
    two_devices: (RuntimeError, "device meta is not on the expected device cpu"),
    a_missing_argument: (TypeError, "missing 1 required positional argument: 'w'"),
    a_surplus_argument: (TypeError, "takes 3 positional arguments but 4 were given"),
    a_number_that_is_saved: (TypeError, "argument 1 is of type float"),
    a_dict_that_is_returned: (RuntimeError, "does not require grad"),
    an_error_of_the_users: (ValueError, "no such key"),
}


def raised(mistake: Callable[[Any], None], compiled: Any) -> Exception:
    try:
        mistake(compiled)
    except Exception as error:
        return error
    raise AssertionError(f"{mistake.__name__} raises nothing")


def frames_of_ours(error: BaseException | None) -> list[str]:
    """The frames of this package in what is printed of an error, and of those that led to it."""
    found: list[str] = []
    while error is not None:
        files = [step.filename for step in traceback.extract_tb(error.__traceback__)]
        found += [f for f in files if not is_user_file(f) and not f.startswith((TORCH, "<frozen"))]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


def here(mistake: Callable[[Any], None]) -> int:
    """The line of a mistake that is marked."""
    lines, start = inspect.getsourcelines(mistake)
    return start + next(i for i, line in enumerate(lines) if "# HERE" in line)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mistake", AS_EAGER, ids=lambda m: m.__name__)
def test_an_error_of_the_users_is_no_longer_than_eagers(mistake: Callable[[Any], None]) -> None:
    kind, text = AS_EAGER[mistake]
    eager, ours = raised(mistake, lambda cls: cls), raised(mistake, fusegrad.compile)
    assert type(ours) is type(eager) is kind and re.search(text, str(ours)), ours
    assert frames_of_ours(ours) == []
    shown, eagers = ("".join(traceback.format_exception(e)).splitlines() for e in (ours, eager))
    assert len(shown) <= len(eagers), "\n".join(shown)
    if "# HERE" in inspect.getsource(mistake):
        steps = traceback.extract_tb(ours.__traceback__)
        assert (__file__, here(mistake)) in {(s.filename, s.lineno) for s in steps}


@pytest.mark.filterwarnings("ignore")
def test_a_users_own_chain_stays() -> None:
    ours = raised(an_error_of_the_users, fusegrad.compile)
    assert isinstance(ours.__cause__, KeyError) and ours.__cause__.__context__ is None


@pytest.mark.filterwarnings("ignore")
def test_debug_shows_every_frame() -> None:
    with fusegrad.config.patch(debug=True):
        assert len(frames_of_ours(raised(a_typo, fusegrad.compile))) > 5


def test_torch_logs_nothing_of_fake_tensors(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        raised(sizes_of_a_matmul, fusegrad.compile)
    assert capfd.readouterr().err == ""


def test_a_wrong_backend_in_the_environment_is_told_in_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGRAD_BACKEND", "nope")
    ours = raised(lambda compiled: compiled(Product).apply(t(4), t(4)), fusegrad.compile)
    assert "there is no backend 'nope'" in str(ours) and frames_of_ours(ours) == [] and ours.__context__ is None


# ------------------------------------------------------------------ gradients
def gradients_of(returned: Callable[..., Any]) -> Any:
    class Wrong(Product):
        backward = staticmethod(returned)

    return fusegrad.compile(Wrong)


def too_few(ctx, g):
    return g  # a comment


def too_many(ctx, g):
    return g, g, g


def nothing(ctx, g):
    g * 2


def too_short(ctx, g):
    return g[:2], g


def of_two_returns(ctx, g):
    if ctx.saved_tensors:
        return g
    return None


GRADIENTS: dict[Callable[..., Any], tuple[type[Exception], str, int]] = {
    too_few: (GradientCountError, r"\(expected 2, got 1\): none for `w`", 1),
    too_many: (GradientCountError, r"\(expected 2, got 3\): more than it has arguments", 1),
    nothing: (GradientCountError, r"\(expected 2, got 1\): it has no `return`", 0),
    too_short: (GradientShapeError, r"got \[2\] but expected shape compatible with \[4\]: .* gradient of `x`", 1),
    of_two_returns: (GradientCountError, "none for `w`", 0),
}


@pytest.mark.parametrize("returned", GRADIENTS, ids=lambda f: f.__name__)
def test_a_wrong_gradient_is_told_with_its_argument_and_its_return(returned: Callable[..., Any]) -> None:
    kind, text, line = GRADIENTS[returned]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = raised(lambda compiled: gradients_of(returned).apply(t(4), t(4)).sum().backward(), None)
    assert type(ours) is kind and re.search(text, str(ours)), ours
    assert f"at:   {__file__}:{returned.__code__.co_firstlineno + line}\n" in str(ours)
    assert "fix:  return " in str(ours) and frames_of_ours(ours) == [] and ours.code == "FG216"


class NoReturn(Function):
    @staticmethod
    def forward(ctx, x):
        x * 2

    @staticmethod
    def backward(ctx, g):
        return g


class NoGradient(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        g * 2


class Unmarked(Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class InADict(Function):
    @staticmethod
    def forward(ctx, x):
        return {"y": x * 2}

    @staticmethod
    def backward(ctx, g):
        return 2 * g


def call(cls: Any) -> None:
    fusegrad.compile(cls).apply(t(4).clone())


def call_and_differentiate(cls: Any) -> None:
    fusegrad.compile(cls).apply(t(4)).sum().backward()


SLIPS = {
    "forward": (NoReturn, call, "NoReturn.forward has no `return`: the call gives None"),
    "backward": (NoGradient, call_and_differentiate, "NoGradient.backward has no `return`: no gradient reaches `x`"),
    "dict": (InADict, call, r"returns a dict, and autograd does not track the tensors in it: `compile\(pytree=True\)`"),
    "mark_dirty": (Unmarked, call, r"writes to `x`, which requires a gradient, without `ctx.mark_dirty\(x\)`"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_what_eager_passes_over_is_told_at_the_users_line(slip: str) -> None:
    cls, run, text = SLIPS[slip]
    with pytest.warns(GradientWarning, match=text) as told:
        run(cls)
    assert len(told) == 1 and told[0].filename == __file__
    assert told[0].lineno == run.__code__.co_firstlineno + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(cls) if slip != "mark_dirty" else None  # once a class


def test_a_buffer_may_be_written_to() -> None:
    class Counts(Function):
        @staticmethod
        def forward(ctx, x, seen):
            seen.add_(1)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return 2 * g, None

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fusegrad.compile(Counts).apply(t(4), torch.zeros(()))


# ------------------------------------------------------------------ what compiled calls alone refuse
def test_a_warning_points_at_the_users_line() -> None:
    fast = fusegrad.compile(Product)
    with pytest.warns(fusegrad.FallbackWarning, match="not strided") as told:
        fast.apply(torch.eye(3).to_sparse(), torch.eye(3).to_sparse())
    line = test_a_warning_points_at_the_users_line.__code__.co_firstlineno + 3
    assert [(w.filename, w.lineno) for w in told] == [(__file__, line)]


def test_fullgraph_of_torch_compile_gives_our_reason_first() -> None:
    class Branch(Product):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            if x.sum() > 0:
                return x * w
            return x * w * 2

    fast = fusegrad.compile(Branch)
    program = torch.compile(lambda x, w: fast.apply(x, w) + 1, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        program(t(4), t(4))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("Branch.apply cannot be in a graph of torch.compile: its control flow depends on")
    assert lines[1].startswith(f"  at:   {__file__}:") and lines[2].startswith("  fix:  ")
    assert "file an issue" not in str(caught.value) and "FakeTensor" not in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_fullgraph_is_told_in_four_lines() -> None:
    class Leaves(Product):
        @staticmethod
        def forward(ctx, x, w):
            return torch.from_numpy(x.detach().numpy() * 2)

    ours = raised(lambda compiled: compiled(Leaves, fullgraph=True).apply(t(4), t(4)), fusegrad.compile)
    assert type(ours) is NotTraceableError and frames_of_ours(ours) == [] and ours.__cause__ is None
    assert len(str(ours).splitlines()) == 3


@pytest.mark.parametrize("text", ["f32[4,8", "bf16[4", "f32[M,N", "float32[4,"])
def test_a_specification_that_is_not_closed_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="not a tensor specification"):
        fusegrad.explain(fusegrad.compile(Product), text, "f32[4]")


def test_the_command_refuses_what_does_not_bind(tmp_path: Path) -> None:
    from fusegrad.__main__ import main

    target = f"{__file__}:Product"
    assert main(["explain", target, "f32[4,8", "f32[4]"]) == 1
    assert main(["explain", target, "f32[8]"]) == 1
    assert main(["explain", target, "f32[8]", "f32[8]", "f32[8]"]) == 1


def test_sizes_that_do_not_fit_are_told_in_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    from fusegrad.__main__ import main

    assert main(["explain", f"{__file__}:Product", "f32[8]", "f32[9]"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "forward raises RuntimeError: " in lines[0] and "9" in lines[0] and "[8]" in lines[0] and len(lines) == 3
    assert f"{__file__}:{Product.forward.__code__.co_firstlineno + 3}" in lines[1]


def test_a_script_ends_with_the_users_lines_alone(tmp_path: Path) -> None:
    script = tmp_path / "typo.py"
    source = Path(__file__).read_text(encoding="utf-8")
    product = source[source.index("class Product") : source.index("def t(")]
    script.write_text(
        "import torch, fusegrad\nfrom torch.autograd import Function\n\n\n" + product
        + "class Typo(Product):\n    @staticmethod\n    def forward(ctx, x, w):\n"
        + "        return torch.sigmoidd(x) * w\n\n"
        + "\nfusegrad.compile(Typo).apply(torch.ones(4), torch.ones(4))\n"
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    lines = result.stderr.splitlines()
    assert result.returncode == 1 and result.stdout == "" and len(lines) == 8, result.stderr
    assert lines[0] == "Traceback (most recent call last):" and lines[-1].startswith("AttributeError: module 'torch'")
