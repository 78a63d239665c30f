"""Every refusal names the call, the fact, the user's line and a way out. Other errors say whose words they are."""

from __future__ import annotations

import importlib
import pkgutil
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from side_by_side import leaf, plain
from torch.autograd import Function
from torch.func import jvp, vmap

import fusegrad
from fusegrad.ir.errors import FusegradError, InternalError

Tensor = torch.Tensor


class Doubled(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Reads(Function):
    @staticmethod
    def forward(ctx, x):
        return x * x.sum().item()

    @staticmethod
    def backward(ctx, g):
        return g


class WritesLater(Doubled):
    is_traceable = False

    @staticmethod
    def forward(ctx, x):
        CALLS.append(1)
        return x.clone() if len(CALLS) == 1 else x.add_(1).clone()


CALLS: list[int] = []


class Around(Doubled):
    @staticmethod
    def forward(ctx, x):
        return WritesLater.apply(x) * 2


def writing_later() -> None:
    CALLS.clear()
    fast, x = fusegrad.compile(Around), plain(3)
    fast.apply(x)
    fast.apply(x)


class Squares(Doubled):
    @staticmethod
    def backward(ctx, g):
        return g * g


class SquaredTangent(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def jvp(ctx, t):
        return t * t


class InNumpy(Function):
    @staticmethod
    def forward(x):
        return torch.from_numpy(x.numpy() * 2)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def jvp(ctx, t):
        return t * 2


class CallsNumpy(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_forward(x)
        return x * x

    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * InNumpy.apply(x)


def pushed(f):
    return lambda x: jvp(f, (x,), (x,))[1]


class Accumulates(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.mark_dirty(x)
        return x.add_(y)

    @staticmethod
    def backward(ctx, g):
        return g, g


class Declared(Doubled):
    is_traceable = "yes"


class Nested(Function):
    @staticmethod
    def forward(ctx, tree):
        return tree["a"] * 2

    @staticmethod
    def backward(ctx, g):
        return {"b": g}


def by_keyword(x: Tensor, *, k: float = 2.0) -> Tensor:
    return x * k


def patched(**changes: Any) -> None:
    with fusegrad.config.patch(**changes):
        pass


REFUSALS: dict[str, tuple[Callable[[], Any], str, str]] = {
    # the call, what the text says of the call, what it says of the fact
    "not a class": (lambda: fusegrad.compile(3), r"fusegrad\.compile\(3\)", "neither a Function class nor a function"),
    "not a Function": (lambda: fusegrad.compile(int), r"fusegrad\.compile\(int\)", "no torch.autograd.Function"),
    "no such backend": (lambda: fusegrad.compile(Doubled, backend="cuda"), "backend", "no backend 'cuda'"),
    "no such setting": (lambda: patched(speed=5), r"config\.patch", "no setting 'speed'"),
    "not a bool": (lambda: fusegrad.compile(Declared), "Declared", "must be exactly a bool, not str"),
    "no such role": (lambda: fusegrad.compile(Doubled, traceable={"fwd": True}), "traceable", "unknown key 'fwd'"),
    "a nested write": (writing_later, "Around", "changed an argument in place, which it did not when traced"),
    "not traceable": (
        lambda: fusegrad.compile(Reads, fullgraph=True).apply(leaf(3)), r"Reads\.forward", "reads the data of a tensor",
    ),
    "an argument without a key": (
        lambda: fusegrad.compile(fullgraph=True)(Keyless).apply(leaf(3), threading.Lock()),
        r"Keyless\.forward", "an argument holds a lock",
    ),
    "not linear": (
        lambda: jvp(fusegrad.compile(Squares).apply, (plain(3),), (plain(3),)), r"jvp\(Squares\)", "not linear",
    ),
    "no linear jvp": (
        lambda: fusegrad.compile(SquaredTangent).apply(leaf(3)).sum().backward(), r"backward\(Sq", "not linear",
    ),
    "no such jvp": (
        lambda: fusegrad.compile(Doubled, derive_jvp="reverse"), r"compile\(derive_jvp='reverse'\)", "none of",
    ),
    "a specification": (
        lambda: fusegrad.explain(fusegrad.compile(Doubled), "f99[8]"), "explain", "not a tensor specification",
    ),
    "other arguments": (
        lambda: fusegrad.explain(Doubled, "f32[8]", 2.0), r"explain\(Doubled, \.\.\.\)", "too many positional",
    ),
    "a target": (
        lambda: fusegrad.explain(fusegrad.compile(Doubled), "f32[8]", target="tpu"), "explain", "no such target",
    ),
    "no graph": (
        lambda: fusegrad.explain(fusegrad.compile(Reads), "f32[8]").graph("forward"), r"Reads\.forward", "has no graph",
    ),
    "no GPU": (
        lambda: fusegrad.compile(Doubled, backend="triton").apply(leaf(3)), "backend='triton'", "cannot run",
    ),
    "keyword-only": (lambda: fusegrad.compile(by_keyword)(plain(3), k=3.0), "by_keyword", "no keyword-only arguments"),
    "a transform to check": (
        lambda: fusegrad.check(Doubled, leaf(3), transforms=["vmpa"]), r"check\(Doubled\)", "there is no 'vmpa'",
    ),
    "an export": (lambda: fusegrad.export(Reads, "f32[8]", format="py"), r"export\(Reads\)", "cannot be traced"),
    "a format": (lambda: fusegrad.export(Doubled, "f32[8]", format="doc"), r"format='doc'", "there is no format"),
    "a baseline": (
        lambda: fusegrad.profile(Doubled, plain(8), baselines=("jax",)), r"profile\(Doubled\)", "no baseline 'jax'",
    ),
    "a device": (lambda: fusegrad.profile(Doubled, plain(8), device="tpu"), r"device='tpu'", "no such device"),
    "two levels of forward mode": (
        lambda: pushed(pushed(pushed(fusegrad.compile(CallsNumpy).apply)))(plain(1)),
        r"jvp\(CallsNumpy\)", "torch drops the outer",
    ),
    "a write by every lane": (
        lambda: vmap(lambda x, y: fusegrad.compile(Accumulates).apply(x.clone(), y), (None, 0))(plain(3), plain(2, 3)),
        r"vmap\(Accumulates\)", "which has no batch axis",
    ),
    "a structure": (
        lambda: fusegrad.compile(Nested, pytree=True).apply({"a": leaf(3)}).sum().backward(), r"Nested\.", "expected",
    ),
    "a swap": (
        lambda: fusegrad.swap(torch.nn.ReLU(), {torch.nn.GELU: torch.nn.SiLU}), r"swap\(ReLU\)", "exactly a GELU",
    ),
}  # fmt: skip


class Keyless(Function):
    @staticmethod
    def forward(ctx, x, lock):
        with lock:
            return x + 1

    @staticmethod
    def backward(ctx, g):
        return g, None


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_call_fact_line_and_way_out(name) -> None:
    call, who, fact = REFUSALS[name]
    if name == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(FusegradError) as found:
        call()
    text = str(found.value)
    assert re.search(who, text.splitlines()[0]) and fact in text
    place = re.search(r"\n  at:   (.+):(\d+)", text)
    assert place is not None and place.group(1) == __file__, text
    with open(__file__, encoding="utf-8") as source:
        assert 1 < int(place.group(2)) <= len(source.readlines())
    assert re.search(r"\n  fix:  \S.{8,}", text), text
    assert found.value.speaks == "to the user" and type(found.value) is not FusegradError


def every_error() -> list[type[FusegradError]]:
    """All error classes of the package, the modules that define them imported."""
    for module in pkgutil.walk_packages(fusegrad.__path__, "fusegrad."):
        if module.name.split(".")[1] in ("ir", "tracer", "codegen", "runtime") and "worker" not in module.name:
            importlib.import_module(module.name)
    found, waiting = [], [FusegradError]
    while waiting:
        inner = waiting.pop().__subclasses__()
        found += [c for c in inner if c.__module__.startswith("fusegrad.")]
        waiting += inner
    return sorted(set(found), key=lambda c: c.__name__)


def test_every_error_of_the_package_has_place_and_way_out_or_says_whose_words_it_speaks() -> None:
    errors = every_error()
    assert len(errors) > 15
    for error in errors:
        if error.speaks == "to the user":
            assert "\n  at:   {" in error.message and "\n  fix:  " in error.message, error.__name__
        else:
            assert error.speaks in ("torch", "inside"), error.__name__


def test_every_public_error_is_triggered_here() -> None:
    public = {e.__name__ for e in every_error() if e.speaks == "to the user"}
    triggered = {type(outcome_of(call)).__name__ for call, *_ in REFUSALS.values()}
    elsewhere = {
        "NoTextError",
        "OutputError",
        "NonLinearError",
        "NoRuleError",
        "CheckError",
        "BundleError",
        "FaultError",
        "NotLaunchedError",
        "BundleCallError",
        "LogsError",
        "OuterGraphError",
        "OuterTransformError",
        "VersionError",
        "ProgramError",
        "SavedProgramError",
        "TargetError",
        "BenchmarksMissing",
        "DemoMissing",
        "MixedTensorsError",
        "MeshesDifferError",
        "PlacementError",
        "RanksFailedError",
        "NothingComparedError",
        "DerivativeError",
        "GradientCountError",
        "GradientShapeError",
        "IndexOutOfRangeError",
        "NoListingError",
        "SizeError",
    }  # no sources; transforms of a graph; a bug; tests of bundling, distributed, interop, mistakes, runtime
    missing = public - triggered - elsewhere
    assert not missing or (torch.cuda.is_available() and missing == {"UnsupportedBackendError"})


def outcome_of(call: Callable[[], Any]) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except Exception as error:
            return error


def test_an_internal_error_asks_for_a_report() -> None:
    text = str(InternalError("no step computes %3"))
    assert "fusegrad bug" in text and __file__ in text


def test_errors_that_repeat_torchs_words_repeat_them() -> None:
    class Short(Doubled):
        @staticmethod
        def backward(ctx, g):
            return g, g

    def told(c: Any) -> Any:
        c.apply(leaf(3)).sum().backward()

    mine, theirs = (outcome_of(lambda c=c: told(c)) for c in (fusegrad.compile(Short), Short))
    assert isinstance(mine, type(theirs))
    assert str(mine).startswith(f"{theirs}: more than it has arguments [FG216]\n  at:")
