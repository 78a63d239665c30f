"""A bundle in place of the class: the same results, gradients and refusals, in a process that never saw the class."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bundled as f
import pytest
import torch

import fusegrad
from fusegrad.runtime.export.bundle.interpreter import BundleCallError
from fusegrad.runtime.export.gather.gathered import ExportError

Tensor = torch.Tensor
CALLS: dict[str, tuple[Any, ...]] = {
    "Norm": ("f32[6,8]", "f32[8]", 1e-6),
    "Scaled": ("f32[6,8]", "f32[6,8]"),
    "Partial": ("f32[6,8]",),
    "Dirty": ("f32[6,8]", "f32[6,8]"),
    "Viewed": ("f32[6,8]",),
    "Asks": ("f32[6,8]", "f32[8,4]"),
    "OwnJvp": ("f32[6,8]",),
    "Drawn": ("f32[6,8]",),
    "Halves": ("f32[6,8]",),
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """name -> a bundle of it, made once: some are directories, some are zip files."""
    root, known = tmp_path_factory.mktemp("some bundles"), dict[str, Path]()

    def bundle(name: str) -> Path:
        if name not in known:
            known[name] = root / (f"{name}.zip" if len(name) % 2 == 0 else name)
            fusegrad.export(getattr(f, name), *CALLS[name], path=known[name], format="bundle")
        return known[name]

    return bundle


@pytest.fixture(scope="module")
def loaded(bundles: Callable[[str], Path]) -> Callable[[str], Any]:
    """name -> the class of a bundle of it, made once."""
    known: dict[str, Any] = {}

    def load(name: str) -> Any:
        if name not in known:
            known[name] = fusegrad.load(bundles(name))
        return known[name]

    return load


@pytest.fixture(autouse=True)
def nothing_falls_back() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusegrad.FallbackWarning)
        yield


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def seen(cls: Any, name: str, story: Callable[[Any], Any]) -> None:
    theirs, mine = story(getattr(f, name)), story(cls)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            assert a.requires_grad == b.requires_grad and a._is_view() == b._is_view()
        else:
            assert a == b and type(a) is type(b)


def gradients(results: Any, inputs: Any, create_graph: bool = False) -> list[Any]:
    live = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    weights = [torch.randn(r.shape, generator=torch.Generator().manual_seed(i)) for i, r in enumerate(live)]
    return list(torch.autograd.grad(live, inputs, weights, allow_unused=True, create_graph=create_graph))


def test_norm_at_other_sizes_layouts_and_twice(loaded: Any) -> None:
    cls = loaded("Norm")
    for rows, columns in ((17, 5),):
        for gradient in (torch.randn(columns, rows).t(), torch.tensor(1.5).expand(rows, columns),
                         torch.randn(rows, 2 * columns)[:, ::2]):  # fmt: skip

            def story(c: Any, at: Any = (rows, columns), g: Any = gradient) -> list[Any]:
                x, w = leaf(*at), leaf(at[1], seed=1)
                out = c.apply(x, w, 1e-6)
                return [out, *torch.autograd.grad(out, (x, w), g)]

            seen(cls, "Norm", story)

    def some_gradients(c: Any) -> list[Any]:
        x, w = leaf(6, 8), leaf(8, seed=1)
        first = c.apply(x, w.detach(), 1e-6)
        second = c.apply(x.detach(), w, 1e-6)
        return [*gradients([first], [x]), *gradients([second], [w]), c.apply(x.detach(), w.detach(), 1e-6)]

    seen(cls, "Norm", some_gradients)


def test_gradients_of_gradients_and_transforms(loaded: Any) -> None:
    x, w = leaf(6, 8), leaf(8, seed=1)
    mine, theirs = loaded("Norm"), fusegrad.compile(f.Norm)

    def twice(c: Any) -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a saved value in between: the second derivative is eager's, in part
            return gradients(gradients([c.apply(x, w, 1e-6)], [x, w], create_graph=True), [x, w])

    for a, b in zip(twice(mine), twice(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for transform in (
        lambda c: torch.func.jvp(lambda a: c.apply(a, w.detach(), 1e-6), (x.detach(),), (torch.ones_like(x),))[1],
        lambda c: torch.func.vmap(lambda a: c.apply(a, w.detach(), 1e-6))(torch.stack([x.detach()] * 3)),
    ):
        torch.testing.assert_close(transform(mine), transform(theirs), rtol=1e-4, atol=1e-5)


TAKES_KEYWORDS = hasattr(torch.autograd.Function, "boxed_grads_call")
"""Whether `apply` of torch itself takes keywords: not in 2.11."""


def test_keywords_defaults_constants_and_the_backward_that_was_written(loaded: Any) -> None:
    def story(c: Any) -> list[Any]:
        x, y = leaf(6, 8), leaf(6, 8, seed=1)
        by_name = TAKES_KEYWORDS or c is not f.Scaled
        out = c.apply(x, y=y, name="a") if by_name else c.apply(x, y, (2.0, 0.5), "a")
        return [out[0], out[1], out[2], *gradients(out, [x, y])]

    seen(loaded("Scaled"), "Scaled", story)
    assert loaded("Scaled").__name__ == "Scaled" and "deliberately wrong" in loaded("Scaled").__doc__


def test_missing_gradients(loaded: Any) -> None:
    for used in ((0, 1), (0,), (1,)):

        def story(c: Any, used: Any = used) -> list[Any]:
            x = leaf(6, 8)
            out = c.apply(x)
            return [*out, *gradients([out[i] for i in used], [x])]

        seen(loaded("Partial"), "Partial", story)


def test_marks_views_and_identities(loaded: Any) -> None:
    def dirty(c: Any) -> list[Any]:
        x, y = leaf(6, 8), leaf(6, 8, seed=1)
        given = x.clone()
        out = c.apply(given, y.detach())
        return [out, out is given, given._version, *gradients([out], [x])]

    def viewed(c: Any) -> list[Any]:
        x = leaf(6, 8)
        out = c.apply(x)
        return [*out, out[1] is out[2], out[0].stride(), out[0].data_ptr() == x[1:].data_ptr(), *gradients(out, [x])]

    def halves(c: Any) -> list[Any]:
        x = leaf(7, 8)
        out = c.apply(x)
        memory = [o.untyped_storage().data_ptr() for o in out]
        alike = (memory[0] == memory[1], memory[2] == memory[3], memory[0] == memory[2])
        return [*out, alike, *(o.stride() for o in out), *gradients([o * 1 for o in out], [x])]

    seen(loaded("Halves"), "Halves", halves)
    seen(loaded("Dirty"), "Dirty", dirty)
    seen(loaded("Viewed"), "Viewed", viewed)
    x = leaf(6, 8)
    (first,) = torch.autograd.grad(loaded("Viewed").apply(x)[1], x, leaf(6, 8, seed=1), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_which_gradients_are_asked_for_is_known_to_the_methods(loaded: Any) -> None:
    for needs in ((True, True), (True, False), (False, True), (False, False)):

        def story(c: Any, needs: Any = needs) -> list[Any]:
            args = [leaf(6, 8).detach().requires_grad_(needs[0]), leaf(8, 4, seed=1).detach().requires_grad_(needs[1])]
            out = c.apply(*args)
            moving = [a for a in args if a.requires_grad]
            return [out, *(gradients([out], moving) if moving else ())]

        seen(loaded("Asks"), "Asks", story)


def test_library_calls_and_kernels(loaded: Any) -> None:
    def story(c: Any) -> list[Any]:
        x = leaf(7, 10)
        out = c.apply(x)
        return [out, *gradients([out], [x])]

    def norm(c: Any) -> list[Any]:
        args = [leaf(5, 8), leaf(8, seed=1)]
        out = c.apply(*args, 1e-6)
        return [out, *gradients([out], args)]

    seen(loaded("Drawn"), "Drawn", story)
    with fusegrad.config.patch(backend="interpret"):
        seen(loaded("Norm"), "Norm", norm)
    records = loaded("Norm")._fusegrad.ledger.records
    assert {m: r.status for m, r in records.items()} == {"forward": "compiled", "backward": "compiled"}


def test_a_rule_that_is_not_in_the_bundle_is_never_replaced(loaded: Any) -> None:
    with warnings.catch_warnings(), pytest.raises(BundleCallError, match="jvp that its author wrote is not in it"):
        warnings.simplefilter("ignore")
        torch.func.jvp(loaded("OwnJvp").apply, (leaf(6, 8).detach(),), (torch.ones(6, 8),))


def test_calls_outside_of_what_was_exported(loaded: Any) -> None:
    norm, x, w = loaded("Norm"), torch.randn(6, 8), torch.randn(8)
    for args, said in (
        ((x.double(), w, 1e-6), "x is torch.float64 with 2 axes; it was exported for f32 with 2"),
        ((x[0], w, 1e-6), "x is torch.float32 with 1 axes"),
        ((x.t(), w, 1e-6), r"x has the strides \(1, 8\)"),
        ((torch.randn(8, 6).t(), w, 1e-6), r"fix:  give x.contiguous\(\)"),
        ((x, w[:5], 1e-6), r"weight has the shape \(5\); it was exported for \(s37\), where s25 = 6, s37 = 8"),
        ((x[:1], w, 1e-6), r"x.shape\[0\] is 1; it was exported for at least 2"),
        ((x, w, 1e-5), "eps was exported as the constant 1e-06, not as 1e-05"),
        ((x, w, 1), "eps was exported as the constant 1e-06, not as 1"),
        ((x, None, 1e-6), "weight was exported as a tensor, not as None"),
        ((x, w), r"it takes 3 arguments \(x, weight, eps\), not 2"),
        ((x.to_sparse(), w, 1e-6), "x was exported as a tensor, not as"),
    ):
        with pytest.raises(BundleCallError, match=said) as caught:
            norm.apply(*args)
        assert "test_load.py" in str(caught.value)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(BundleCallError, match="under autocast to"):
        norm.apply(x, w, 1e-6)


def test_gradients_that_were_not_asked_for_at_the_export(tmp_path: Path) -> None:
    path, x, y = tmp_path / "scaled.zip", leaf(6, 8), leaf(6, 8, seed=1)
    fusegrad.export(f.Scaled, x, y.detach(), path=path)
    with pytest.raises(BundleCallError, match="not exported for gradients of just y"):
        fusegrad.load(path).apply(x.detach(), y)


FRESH = """
import json, sys, warnings
import torch, fusegrad
warnings.simplefilter("error", fusegrad.FallbackWarning)
cls = fusegrad.load(sys.argv[1])
x = torch.arange(48.0).reshape(6, 8).sin().requires_grad_()
w = torch.arange(8.0).cos().requires_grad_()
out = cls.apply(x, w, 1e-6)
grads = torch.autograd.grad(out, (x, w), torch.ones(6, 8))
print(json.dumps([t.tolist() for t in (out, *grads)]))
assert "bundled" not in sys.modules
"""


def test_a_fresh_process_without_the_class(bundles: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FRESH, bundles("Norm")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr
    x = torch.arange(48.0).reshape(6, 8).sin().requires_grad_()
    w = torch.arange(8.0).cos().requires_grad_()
    out = f.Norm.apply(x, w, 1e-6)
    expected = (out, *torch.autograd.grad(out, (x, w), torch.ones(6, 8)))
    for mine, theirs in zip(json.loads(done.stdout), expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine), theirs.detach())


def test_what_is_in_the_bundle(tmp_path: Path) -> None:
    path = tmp_path / "mul"
    fusegrad.export(f.Viewed, "f32[6,8]", path=path, format="bundle")
    text = fusegrad.export(f.Viewed, "f32[6,8]", path=path)  # a directory with a bundle in it is replaced
    assert text == (path / "manifest.json").read_text()
    manifest = json.loads(text)
    assert manifest["function"]["name"] == "Viewed" and {"torch", "triton", "python"} <= set(manifest["versions"])
    found = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()} - {"manifest.json"}
    assert found == set(manifest["files"]) and {"module.py", "graphs/forward.json", "graphs/backward.json"} <= found
    assert [p.name for p in tmp_path.iterdir()] == ["mul"]
    assert "@triton.jit" in (path / "module.py").read_text()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    with pytest.raises(fusegrad.BundleError, match="nothing that an export wrote"):
        fusegrad.export(f.Viewed, "f32[6,8]", path=tmp_path / "mine")
    assert (tmp_path / "mine" / "diary.txt").read_text() == "dear diary"


def test_trust_imports_the_module(bundles: Any, loaded: Any) -> None:
    trusted = fusegrad.load(bundles("Norm"), trust=True)
    assert trusted.__name__ == "Norm" and not hasattr(trusted, "_fusegrad") and loaded("Norm")._fusegrad


# ------------------------------------------------------------------ refused at export
OUTSIDE = torch.ones(3)


class ByLayout(f.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2 if grad.is_contiguous() else grad * 3


class ReadsATensor(f.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * OUTSIDE

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * OUTSIDE


class Prints(f.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        print(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


class TakesAList(f.Function):
    @staticmethod
    def forward(ctx: Any, xs: Any) -> Any:
        return xs[0] * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("cls", "args", "said"),
    [
        (ByLayout, ("f32[3,4]",), "depends on the layout of its gradients"),
        (ReadsATensor, ("f32[3]",), "reads a tensor from outside"),
        (Prints, ("f32[3]",), "it calls `print`"),
        (TakesAList, ([torch.ones(3)],), "takes tensors inside a container"),
        (f.Norm, ("f32[6,8]", "f32[8]", 1j), "its argument eps is a complex"),
        (f.Lazy, ("f32[6,8]",), "a view with another dtype"),
    ],
)
def test_what_a_bundle_cannot_hold(cls: Any, args: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=said) as caught:
        fusegrad.export(cls, *args, path=tmp_path / "no.zip")
    assert "fix:" in str(caught.value) and not list(tmp_path.iterdir())
