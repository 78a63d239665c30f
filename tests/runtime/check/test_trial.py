"""fusegrad.check: it passes on what is compiled right, and finds every kind of mistake that is put into the runtime."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function
from torch.testing._internal.two_tensor import TwoTensor

import fusegrad
from fusegrad.__main__ import main
from fusegrad.runtime.autograd import node as runtime_node
from fusegrad.runtime.capture import outputs
from fusegrad.runtime.check import reproducer
from fusegrad.runtime.check.modes import MODES
from fusegrad.runtime.check.subject import CheckArgumentError
from fusegrad.runtime.compiled import backward
from fusegrad.runtime.functorch import unit as runtime_unit
from fusegrad.runtime.functorch.batching import batched_unit
from fusegrad.runtime.functorch.rules import forward_mode
from fusegrad.runtime.specialize.specialization import Specialization

sys.path.insert(0, str(Path(__file__).parents[2] / "suite"))
from functions import CASES

Tensor = torch.Tensor
QUICK: dict[str, Any] = {
    "transforms": ["forward", "backward"],
    "dtypes": ["bf16"],
    "layouts": ["transposed"],
    "sizes": [0, 17],
}


class Scaled(Function):
    """Two tensors; the gradient of w is a sum."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.sin() * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w * x.cos(), (g * x.sin()).sum_to_size(w.shape)


class Partial(Function):
    """w has no gradient; the second output is not differentiable; the third is a view of x."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        sign = x.sign() * w
        ctx.mark_non_differentiable(sign)
        return x * w, sign, x[:1]

    @staticmethod
    def backward(ctx, g, _, h):
        (w,) = ctx.saved_tensors
        return g * w + torch.nn.functional.pad(h, (0, 0, 0, g.shape[0] - 1)), None


class Roots(Function):
    @staticmethod
    def forward(x):
        return x.sqrt()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, g):
        return g / (2 * ctx.saved_tensors[0])


def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 2)


def w() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(2)


# ------------------------------------------------------------------ what is right passes
SAMPLES = ("Silu", "PRelu")


@pytest.mark.parametrize("name", SAMPLES)
def test_functions_of_the_suite_pass(name: str) -> None:
    case = next(c for c in CASES if c.name == name)
    torch.manual_seed(0)
    some: dict[str, Any] = {"layouts": ["transposed"], "sizes": [0, 3], "dtypes": ["bf16"]}
    report = fusegrad.check(fusegrad.compile(case.cls), *case.make(4), quiet=True, **some)
    assert report.ok and report.counts["ok"] > 10 and report.counts["derived"] > 8, str(report)
    assert {r.mode for r in report.rows} == set(MODES)
    assert {r.runs for r in report.rows} == {"compiled"}


def test_both_backends_and_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    report = fusegrad.check(fusegrad.compile(Scaled), x(), w(), backends=["reference", "interpret"], **QUICK)
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0] == "check(Scaled)" and lines[1].split() == ["backend", "mode", "case", "ulp", "eager", "result"]
    assert "grad_output transposed" in shown and "only w requires grad" in shown and "size 3 -> 0" in shown
    assert {r.backend for r in report.rows} == {"reference", "interpret"}
    facts = report.to_dict()
    assert facts["ok"] and len(facts["rows"]) == len(report.rows) and sum(facts["counts"].values()) == len(report.rows)


def test_a_text_stands_once_below_the_table() -> None:
    class Counting(Function):
        @staticmethod
        def forward(ctx, a, b):
            if a.shape[0] in (7, 17):
                raise ValueError("three rows")
            seen.append(len(seen))
            return a + b if seen else a

        @staticmethod
        def backward(ctx, g):
            return g, g

    seen: list[int] = []
    report = fusegrad.check(Counting, x(), x(), quiet=True, **{**QUICK, "sizes": [7, 17]})
    lines = str(report).splitlines()
    assert lines[0].startswith("check(Counting) on ") and lines[1].split()[:3] == ["mode", "case", "runs"]
    counted = [line for line in lines if "ValueError: three rows" in line]
    assert counted == ["[2] 2 x eager raises ValueError: three rows"], str(report)
    assert sum("forward as written" in line for line in lines) == 1, str(report)
    assert sum("in part [1]" in line for line in lines) > 3, str(report)


def test_what_does_not_apply_is_counted_as_such() -> None:
    class Fixed(Function):
        @staticmethod
        def forward(ctx, a, b):
            if a.shape[0] not in (3, 0):
                raise ValueError("three rows")
            return a + b

        @staticmethod
        def backward(ctx, g):
            return g, g

    report = fusegrad.check(Fixed, x(), x(), **QUICK)
    rows = [r for r in report.rows if r.case == "size 3 -> 17"]
    assert [r.result for r in rows] == ["not applicable"] and "ValueError: three rows" in rows[0].detail
    assert report.counts["not applicable"] == 1 + sum(r.case == "0-d" for r in report.rows)


def test_specifications_keywords_and_objects() -> None:
    class Gather(Function):
        @staticmethod
        def forward(a, index, exponent=2, options=None):
            return a[index] ** exponent * options["by"]

        @staticmethod
        def setup_context(ctx, inputs, output):
            a, index, ctx.exponent, ctx.options = inputs
            ctx.save_for_backward(a, index)

        @staticmethod
        def backward(ctx, g):
            a, index = ctx.saved_tensors
            grad = g * ctx.exponent * a[index] ** (ctx.exponent - 1) * ctx.options["by"]
            return torch.zeros_like(a).index_add(0, index, grad), None, None, None

    if hasattr(Function, "boxed_grads_call"):
        report = fusegrad.check(Gather, "f32[5,4]", "i64[3]", exponent=3, options={"by": 2.0}, **QUICK)
    else:  # `apply` of torch 2.11 takes no keywords
        report = fusegrad.check(Gather, "f32[5,4]", "i64[3]", 3, {"by": 2.0}, **QUICK)
    assert report.ok and report.counts["ok"] > 4


def test_a_plain_function_and_a_random_one() -> None:
    @fusegrad.compile
    def f(a: Tensor, b: Tensor) -> Any:
        return (a * b).tanh(), a.sum()

    assert fusegrad.check(f, x(), w(), quiet=True, **QUICK).ok

    class Noise(Function):
        @staticmethod
        def forward(ctx, a):
            mask = torch.rand_like(a) > 0.5
            ctx.save_for_backward(mask)
            return a * mask

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    assert fusegrad.check(Noise, x(), quiet=True, **QUICK).ok


def test_nested_arguments() -> None:
    class Nested(Function):
        @staticmethod
        def forward(ctx, params, a):
            ctx.save_for_backward(params["w"], a)
            return {"y": a * params["w"]}

        @staticmethod
        def backward(ctx, grads):
            w, a = ctx.saved_tensors
            return {"w": (grads["y"] * a).sum(0)}, grads["y"] * w

    fast = fusegrad.compile(Nested, pytree=True)
    report = fusegrad.check(fast, {"w": w()}, x(), quiet=True, **{**QUICK, "transforms": ["backward", "vmap(grad)"]})
    assert report.ok and "only params['w'] requires grad" in {r.case for r in report.rows}
    assert {r.result for r in report.rows if r.mode == "vmap(grad)"} == {"derived"}
    # The call without compilation, as a reproducer of nested arguments writes it.
    names: dict[str, Any] = {"fast": fast.apply, "subject": Nested}
    exec(compile(reproducer.NESTED, "<nested>", "exec"), names)
    params, a = {"w": w()}, x()
    assert torch.equal(names["theirs"](params, a)["y"], a * params["w"])


class TreeJvp(Function):
    """A jvp alone, over dicts."""

    @staticmethod
    def forward(x, params):
        return {"y": x * params["w"].sin()}

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_forward(inputs[0], inputs[1]["w"])

    @staticmethod
    def jvp(ctx, t, tangents):
        a, b = ctx.saved_tensors
        return {"y": t * b.sin() + a * b.cos() * tangents["w"]}


def test_a_jvp_alone_over_dicts_is_compared_with_its_transpose() -> None:
    modes = {"transforms": ["backward", "checkpoint", "jvp"]}
    report = fusegrad.check(fusegrad.compile(TreeJvp, pytree=True), x(), {"w": w()}, quiet=True, **{**QUICK, **modes})
    assert report.ok and {r.mode for r in report.rows} == set(modes["transforms"])


def test_a_fallback_is_in_the_table() -> None:
    class Data(Scaled):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            seen.append(len(seen))
            return a.sin() * b if seen else a

    seen: list[int] = []
    report = fusegrad.check(Data, x(), w(), quiet=True, **QUICK)
    assert report.ok and any("forward as written" in r.runs for r in report.rows)


def test_arguments_that_eager_refuses_and_unknown_names() -> None:
    with pytest.raises(CheckArgumentError, match="eager itself raises"):
        fusegrad.check(Scaled, torch.randn(3), torch.randn(2))
    with pytest.raises(CheckArgumentError, match=r"transforms: there is no 'vmpa'(.|\n)*vmap in_dims=0"):
        fusegrad.check(Scaled, x(), w(), transforms=["vmpa"])


def test_tensor_subclasses_are_refused_by_name() -> None:
    with pytest.raises(CheckArgumentError, match=r"an argument is a TwoTensor(.|\n)*give plain tensors"):
        fusegrad.check(Scaled, TwoTensor(torch.randn(3), torch.randn(3)), torch.randn(3))


# ------------------------------------------------------------------ what is wrong is found
Results = Any


def mutated(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """`change(result, self, *args)` in place of what a method of the runtime returns."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(original(self, *args, **kwargs), self, *args)

    monkeypatch.setattr(owner, name, method)


def grown(results: Results, by: float = 1.01) -> Results:
    return tuple(r if r is None else r * by for r in results)


def transposed_gradient(results: Results, of: Any, call: Any) -> Results:
    return grown(results) if any(g is not None and not g.is_contiguous() for g in call.gradients) else results


def empty(results: Results, of: Any, call: Any) -> Results:
    return tuple(r if r is None else r + 1 for r in results) if call.gradients[0].numel() == 0 else results


def narrow(results: Results, *_: Any) -> Results:
    return tuple(r * 1.1 if r is not None and r.dtype is torch.bfloat16 else r for r in results)


def wider(results: Results, *_: Any) -> Results:
    outputs, hidden = results
    return [o.float() if o.dtype is torch.bfloat16 else o for o in outputs], hidden


def zeros_for_none(results: Results, of: Any, call: Any) -> Results:
    return tuple(torch.zeros_like(call.residuals[0]) if r is None else r for r in results)


def argument_written(results: Results, spec: Any, args: Any, *_: Any) -> Results:
    args[0].data.mul_(1.5)
    return results


def argument_touched(results: Results, spec: Any, args: Any, *_: Any) -> Results:
    args[0].add_(0)
    return results


def nan_to_zero(results: Results, *_: Any) -> Results:
    return [o.nan_to_num() for o in results[0]], results[1]


def contiguous(results: Results, *_: Any) -> Results:
    return [o.contiguous() for o in results[0]], results[1]


def copies(results: Results, *_: Any) -> Results:
    return [o.clone() for o in results]


def one_tensor_twice(results: Results, of: Any, call: Any) -> Results:
    residuals = call.residuals
    same = len(residuals) == 2 and residuals[0].data_ptr() == residuals[1].data_ptr() and residuals[0].numel()
    return grown(results, 2.0) if same else results


def fails_at_17(results: Results, spec: Any, args: Any, *_: Any) -> Results:
    if 17 in args[0].shape:
        raise ValueError("seventeen")
    return results


def stale(results: Results, spec: Any, args: Any, *_: Any) -> Results:
    first = spec.__dict__.setdefault("first", {}).setdefault(args[0].shape, [o.detach().clone() for o in results[0]])
    return [o.clone() for o in first], results[1]


def second_axis(results: Results, unit: Any, *_: Any) -> Results:
    return [r.flip(0) for r in results] if 1 in unit.in_dims else results


def doubled_tangents(results: Results, *_: Any) -> Results:
    return grown(results, 2.0)


MUTANTS: dict[str, tuple[Any, str, Callable[..., Any], Any, str]] = {
    "transposed gradients": (backward, "run", transposed_gradient, Scaled, "grad_output transposed"),
    "empty": (backward, "run", empty, Scaled, "size 3 -> 0"),
    "bf16": (backward, "run", narrow, Scaled, "bf16"),
    "dtype": (Specialization, "run_forward", wider, Scaled, "dtype is torch.float32, in eager torch.bfloat16"),
    "none as zeros": (backward, "run", zeros_for_none, Partial, "gradient 1: is a tensor"),
    "argument written": (Specialization, "run_forward", argument_written, Scaled, "argument 0 after the call"),
    "version bumped": (Specialization, "run_forward", argument_touched, Scaled, "version of argument 0"),
    "nan": (Specialization, "run_forward", nan_to_zero, Roots, "nan in one and not in the other"),
    "strides": (Specialization, "run_forward", contiguous, Scaled, "strides are"),
    "aliasing": (outputs, "alias_outputs", copies, Partial, "memory of output 2"),
    "one tensor twice": (backward, "run", one_tensor_twice, Scaled, "w is x"),
    "an error": (Specialization, "run_forward", fails_at_17, Scaled, "raises ValueError: seventeen, eager does not"),
    "stale": (Specialization, "run_forward", stale, Scaled, "second call"),
    "vmap in_dims=1": (batched_unit.BatchedUnit, "execute", second_axis, Scaled, "vmap in_dims=1"),
    "tangents": (forward_mode, "jvp", doubled_tangents, Scaled, "jvp"),
    "double backward": (runtime_unit.TransformableGraph, "pullback", doubled_tangents, Scaled, "double backward"),
}
MODES_OF = {
    "stale": ["backward", "second call"],
    "vmap in_dims=1": ["vmap in_dims=0", "vmap in_dims=1"],
    "tangents": ["grad", "jvp"],
    "double backward": ["backward", "double backward"],
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found_and_reproduced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, change, cls, told = MUTANTS[name]
    mutated(monkeypatch, owner, method, change)
    args = (x(),) if cls is Roots else (x(), x() * 1.5) if name == "one tensor twice" else (x(), w())
    options = {**QUICK, "transforms": MODES_OF.get(name, QUICK["transforms"])}
    with pytest.raises(fusegrad.CheckError) as caught:
        fusegrad.check(fusegrad.compile(cls), *args, quiet=True, **options)
    error = caught.value
    assert told in str(error).split("\n  at:")[0], str(error)
    assert "test_trial.py:" in str(error) and not error.report.ok
    assert any(r.result == "ok" for r in error.report.rows) or name in ("argument written", "version bumped", "nan")
    with pytest.raises((AssertionError, ValueError)):
        exec(compile(error.reproducer, f"<{name}>", "exec"), {"__name__": "reproducer"})
    monkeypatch.undo()
    exec(compile(error.reproducer, f"<{name}, right>", "exec"), {"__name__": "reproducer"})


def test_a_lost_mark_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = runtime_node._marks_of
    monkeypatch.setattr(runtime_node, "_marks_of", lambda forward: original(forward)[:2])
    with pytest.raises(fusegrad.CheckError, match="output 1: requires_grad is True, in eager False"):
        fusegrad.check(Partial, x(), w(), quiet=True, **QUICK)


def test_a_difference_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    mutated(monkeypatch, backward, "run", lambda results, *_: grown(results))
    with pytest.raises(fusegrad.CheckError) as caught:
        fusegrad.check(Scaled, torch.randn(64, 48), torch.randn(48), quiet=True, **QUICK)
    assert "(1, 1)" in caught.value.reproducer and len(caught.value.reproducer) < 12_000


def test_tolerances_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    mutated(monkeypatch, backward, "run", lambda results, *_: grown(results, 1 + 1e-5))
    quick = {**QUICK, "transforms": ["backward"], "dtypes": [], "layouts": [], "sizes": []}
    assert fusegrad.check(Scaled, x(), w(), quiet=True, rtol=1e-3, atol=1e-6, **quick).ok
    with pytest.raises(fusegrad.CheckError, match="gradient 0"):
        fusegrad.check(Scaled, x(), w(), quiet=True, **quick)


# ------------------------------------------------------------------ the command
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    source = (
        "from torch.autograd import Function\n\n\nclass Cube(Function):\n"
        "    @staticmethod\n    def forward(ctx, x, k):\n        ctx.save_for_backward(x)\n        ctx.k = k\n"
        "        return x**3 * k\n\n"
        "    @staticmethod\n    def backward(ctx, g):\n        return 3 * ctx.saved_tensors[0] ** 2 * g * ctx.k, None\n"
    )
    (tmp_path / "cubes_of_mine.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    few = ["--dtype", "f32", "--layout", "step 2", "--size", "3"]
    assert main(["check", "cubes_of_mine:Cube", "f32[3,2]", "2.5", "--transform", "grad", *few]) == 0
    assert "derived" in capsys.readouterr().out
    assert main(["check", "cubes_of_mine:Square", "f32[3]"]) == 1
    assert "cannot be imported" in capsys.readouterr().err
    mutated(monkeypatch, backward, "run", lambda results, *_: grown(results))
    assert main(["check", "cubes_of_mine:Cube", "f32[3,2]", "2.5", "--transform", "backward", *few]) == 2
    found = capsys.readouterr().out
    assert "DIFFERS" in found and "from cubes_of_mine import Cube" not in found and len(found.splitlines()) < 30
    assert "wrote fusegrad-check-Cube.py" in found
    assert "from cubes_of_mine import Cube" in (tmp_path / "fusegrad-check-Cube.py").read_text()
