"""The exported module: it runs without fusegrad, its own test can fail, and what it cannot hold is refused by name."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import venv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch.autograd import Function

import fusegrad
from fusegrad.benchmarks import functions as f
from fusegrad.examples.gallery.attention import Attention
from fusegrad.runtime.export.export import ExportFormatError
from fusegrad.runtime.export.gather.gathered import ExportError
from fusegrad.runtime.specialize.linearity import NonLinearBackward
from fusegrad.runtime.values.tensor_specs import parse_spec

CASES: dict[str, tuple[Any, ...]] = {
    "rms_norm": (f.RMSNorm, "bf16[48,64]", "bf16[64]", 1e-6),
    "swiglu": (f.SwiGLU, "bf16[64,128]", "bf16[64,128]"),
    "cross_entropy": (f.CrossEntropy, "f32[32,100]", "i64[32]", -100),
    "chunks_and_products": (f.FusedLinearCrossEntropy, "f32[64,32]", "f32[80,32]", "i64[64]", 32),
    "attention": (Attention.__base__, "bf16[2,4,64,16]", "bf16[2,2,64,16]", "bf16[2,2,64,16]", 0.25, True),
    "rope": (f.RoPE, "bf16[2,32,4,16]", "bf16[32,8]", "bf16[32,8]"),
}
RUN = """
import importlib.util, runpy, sys
assert importlib.util.find_spec("fusegrad") is None
for path in sys.argv[1:]:
    runpy.run_path(path, run_name="__main__")
"""


class Stack(Function):
    """Two outputs, one of them an argument as it came; a constant of every kind; no gradient for one argument."""

    @staticmethod
    def forward(x, y, scales, name, offset=None):
        return x, (x * scales[0] + y.sin()) * scales[1], name

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])
        ctx.scales = inputs[2]

    @staticmethod
    def backward(ctx, gx, g, _):
        (y,) = ctx.saved_tensors
        a, b = ctx.scales
        return gx + g * a * b, g * b * y.cos(), None, None, None


class Product(Function):
    """A product of matrices with something before and after it, and a transposed one in backward."""

    @staticmethod
    def forward(ctx, x, w):
        z = x.relu() @ w
        ctx.save_for_backward(x, w)
        return z.tanh()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        h = g * (1 - (x.relu() @ w).tanh() ** 2)
        return (h @ w.t()) * (x > 0), x.relu().t() @ h


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a new virtual environment that has what this one has, but for fusegrad."""
    home = tmp_path_factory.mktemp("fresh")
    venv.create(home, symlinks=True)
    (room,) = home.glob("lib/python*/site-packages")
    for folder in {Path(m.__file__).parents[1] for m in (torch, np, triton)}:
        for item in folder.iterdir():
            if not any(word in item.name for word in ("fusegrad", "__editable__")) and not (room / item.name).exists():
                (room / item.name).symlink_to(item)
    return str(home / "bin" / "python")


def run(python: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    command = [python, "-W", "ignore", "-c", RUN, *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, env=clean, cwd=paths[0].parent, timeout=280)


@pytest.mark.parametrize("part", range(4))
def test_modules_run_without_fusegrad(part: int, fresh: str, tmp_path: Path) -> None:
    every = {**CASES, "stack": (Stack, "f32[20,8]", "f32[20,8]", (2.0, 0.5), "a", None),
             "product": (Product, "f32[24,16]", "f32[16,40]")}  # fmt: skip
    cases = dict([*every.items()][part::4])
    paths = [tmp_path / f"{name}.py" for name in cases]
    for path, (cls, *args) in zip(list(paths), cases.values(), strict=True):
        text = fusegrad.export(cls, *args, path=path)
        assert path.read_text(encoding="utf-8") == text
        assert max(map(len, text.split("# ---- The class as it was written")[0].splitlines())) <= 130
        assert "fusegrad" not in text.split('"""', 2)[2], "beyond the docstring the file stands alone"
        if cls in (f.RMSNorm, f.CrossEntropy):
            paths.append(path.with_stem(f"{path.stem}_of_one"))
            text, found = re.subn(r"^    M = \d+.*$", "    M = 1", text, flags=re.M)
            assert found == 1
            paths[-1].write_text(text, encoding="utf-8")
    done = run(fresh, *paths)
    assert done.returncode == 0, done.stdout + done.stderr
    changed = sum(cls in (f.RMSNorm, f.CrossEntropy) for cls, *_ in cases.values())
    assert done.stdout.count("agrees with the class as it was written") == len(paths) == len(cases) + changed


def test_heads_in_another_ratio_are_refused(tmp_path: Path) -> None:
    """Kernels of backward sum over two heads of queries for one of keys; the file has none for four."""
    path = tmp_path / "attention.py"
    cls, *args = CASES["attention"]
    fusegrad.export(cls, *args, path=path)
    q, k, v = (torch.randn(2, heads, 37, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2))
    with pytest.raises(ValueError, match=r"exported for sizes with .* and K == 2 \* K_2"):
        runpy.run_path(str(path))["attention"](q, k, v)


class Pushes(Function):
    """A jvp of its own, wrong by a factor of ten, which nobody may mend; one output that has no tangent."""

    @staticmethod
    def forward(x, k, y):
        return x * y * k, (x > 0).long(), y.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.k, y = inputs
        ctx.save_for_backward(x, y)
        ctx.save_for_forward(x, y)

    @staticmethod
    def backward(ctx, g, _, h):
        x, y = ctx.saved_tensors
        return g * y * ctx.k, None, g * x * ctx.k + h * y.cos()

    @staticmethod
    def jvp(ctx, a, _, b):
        x, y = ctx.saved_tensors
        return 10 * (a * y + x * b) * ctx.k, None, b * y.cos()


FORWARD_MODE = """
import runpy, sys, torch
for path in sys.argv[1:]:
    args, moving, expected = torch.load(path + ".pt")
    function = next(v for k, v in runpy.run_path(path).items() if k + ".py" == path.rsplit("/")[-1])
    def call(*moved):
        supply = iter(moved)
        return function.apply(*(next(supply) if i in moving else a for i, a in enumerate(args)))
    def pushed(values, tangents):
        results = torch.func.jvp(call, values, tangents)[1]
        return results if isinstance(results, tuple) else (results,)
    values = tuple(args[i] for i in moving)
    tangents = tuple(v.cos() for v in values)
    for only, wanted in expected.items():
        there = tuple(t if only in (None, i) else torch.zeros_like(t) for i, t in enumerate(tangents))
        torch.testing.assert_close(pushed(values, there), wanted, rtol=2e-2, atol=2e-2)
    if len(values) > 1:  # an argument that does not move
        found = torch.func.jvp(lambda v: call(v, *values[1:]), values[:1], tangents[:1])[1]
        torch.testing.assert_close(found if isinstance(found, tuple) else (found,), expected[0], rtol=2e-2, atol=2e-2)
"""


def test_forward_mode_is_the_compiled_one(fresh: str, tmp_path: Path) -> None:
    cases = {**{k: CASES[k] for k in ("rms_norm", "cross_entropy")}, "pushes": (Pushes, "f32[20,8]", 3, "f32[20,8]")}
    paths = []
    for cls, *specs in cases.values():
        paths.append(tmp_path / f"{cls.__name__}.py")
        text = fusegrad.export(cls, *specs, path=paths[-1], derivatives=("jvp",))
        assert "def jvp(ctx" in text and "and jvp." in text.splitlines()[0]
        torch.save(_pushed_by_the_compiled(cls, specs), f"{paths[-1]}.pt")
    own_test = run(fresh, *paths)
    assert own_test.stdout.count("agrees with the class as it was written") == 3, own_test.stdout + own_test.stderr
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ""}
    command = [fresh, "-W", "ignore", "-c", FORWARD_MODE, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def _pushed_by_the_compiled(cls: Any, specs: Any) -> tuple[Any, ...]:
    """Arguments, which of them move, and by which of them moves (None: all) the tangents of the compiled class."""
    torch.manual_seed(0)
    args = list(specs)
    for i, spec in enumerate(specs):
        if isinstance(spec, str):
            dtype, shape = parse_spec(spec)
            args[i] = torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(0, 4, shape)
    moving = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_floating_point()]
    fast, values = fusegrad.compile(cls), tuple(args[i] for i in moving)

    def call(*moved: Any) -> Any:
        supply = iter(moved)
        return fast.apply(*(next(supply) if i in moving else a for i, a in enumerate(args)))

    expected = {}
    for only in (None, *range(len(values))):
        tangents = tuple(v.cos() if only in (None, i) else torch.zeros_like(v) for i, v in enumerate(values))
        found = torch.func.jvp(call, values, tangents)[1]
        expected[only] = found if isinstance(found, tuple) else (found,)
    return args, moving, expected


class Clips(Function):
    """Not linear in its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-1, 1)


def test_a_backward_without_a_transpose_has_no_jvp() -> None:
    with pytest.raises(NonLinearBackward, match="at:"):
        fusegrad.export(Clips, "f32[20,8]", format="py", derivatives=("jvp",))
    with pytest.raises(ExportError, match="an output is an argument"):
        fusegrad.export(Stack, "f32[20,8]", "f32[20,8]", (2.0, 0.5), "a", None, format="py", derivatives="jvp")
    with pytest.raises(ExportFormatError, match="derivatives"):
        fusegrad.export(Clips, "f32[20,8]", format="py", derivatives=("hessian",))


class AsksForOne(Function):
    """Another program where there is one row, once by an `if` and once by `squeeze`."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x)
        return x * (2 if x.shape[0] == 1 else 3), y.sin().squeeze(0)

    @staticmethod
    def backward(ctx, g, h):
        return g * 3, None


def test_one_is_refused_where_the_program_is_another() -> None:
    text = fusegrad.export(AsksForOne, "f32[20,8]", "f32[20,8]", format="py")
    x, y = re.search(r"if not \((.*)\):", text).group(1), re.findall(r"(\w+) = (x|y).shape\[(.)\]", text)
    names = {(tensor, axis): name for name, tensor, axis in y}
    for tensor, axis, least in (("x", "0", 2), ("x", "1", 1), ("y", "0", 2)):
        assert f"{names[tensor, axis]} >= {least}" in x


def test_its_own_test_finds_a_wrong_kernel(fresh: str, tmp_path: Path) -> None:
    text = fusegrad.export(*CASES["rms_norm"], format="py", sizes={"N": 64})
    assert "* 0.015625" in text
    path = tmp_path / "mutant.py"
    path.write_text(text.replace("* 0.015625", "* 0.03125"), encoding="utf-8")
    done = run(fresh, path)
    assert done.returncode != 0 and "AssertionError" in done.stderr


def test_other_sizes_and_constants_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rms_norm.py"
    fusegrad.export(*CASES["rms_norm"], path=path)
    space: dict[str, Any] = {"__name__": "vendored"}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), space)
    x, w = torch.randn(4, 64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    for args, said in [
        ((torch.randn(4, 32, dtype=torch.bfloat16), w, 1e-6), "weight is torch.bfloat16"),
        ((x.float(), w, 1e-6), "x is torch.float32"),
        ((x, w, 1e-5), "eps = 1e-06, not 1e-05"),
        ((x[:0], w, 1e-6), "M >= 1"),
    ]:
        with pytest.raises(ValueError, match=said):
            space["RMSNorm"].apply(*args)


# ------------------------------------------------------------------ refusals
OUTSIDE = torch.ones(3)


class Opaque(Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(np.sort(x.detach().numpy()))

    @staticmethod
    def backward(ctx, g):
        return g


class ReadsATensor(Function):
    @staticmethod
    def forward(ctx, x):
        return x * OUTSIDE

    @staticmethod
    def backward(ctx, g):
        return g * OUTSIDE


class TakesAnObject(Function):
    @staticmethod
    def forward(ctx, x, unit):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2, None


@pytest.mark.parametrize(
    ("cls", "args", "said"),
    [
        (Opaque, ("f32[3]",), "cannot be traced"),
        (ReadsATensor, ("f32[3]",), "tensor from outside"),
        (TakesAnObject, ("f32[3]", 1j), "argument unit is a complex"),
    ],
)
def test_what_a_file_cannot_hold(cls: Any, args: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "no.py"
    path.write_text("before", encoding="utf-8")
    with pytest.raises(ExportError, match=said) as caught:
        fusegrad.export(cls, *args, path=path)
    assert "test_module.py" in str(caught.value) and "fix:" in str(caught.value)
    assert path.read_text() == "before" and [p.name for p in tmp_path.iterdir()] == ["no.py"]


@pytest.mark.parametrize("asked", [{}, {"path": "x.exe"}, {"format": "pdf"}, {"path": "x"}])
def test_unknown_formats(asked: dict[str, Any]) -> None:
    with pytest.raises(ExportFormatError, match="one of py, json"):
        fusegrad.export(*CASES["swiglu"], **asked)


class Picked(Function):
    """A row looked up by an index, and a kernel without any."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(x)
        return x[index] * 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return x * g.sum(), None


def test_an_index_is_checked_in_the_module_too(tmp_path: Path) -> None:
    path = tmp_path / "picked.py"
    fusegrad.export(fusegrad.compile(Picked), "f32[32,48]", "i64[7]", path=path)
    text = path.read_text()
    launches = re.findall(r"^ +(\w+)\[\(.*?^ +\)$", text, re.M | re.S)
    checked = [m[1] for m in re.finditer(r"^ +(\w+)\[\((?:(?!^ +\)$).)*?\*\*CHECKED,", text, re.M | re.S)]
    assert text.count("tl.device_assert((0 <= ") == 2 and '"debug": True, "sanitize_overflow": False' in text
    assert checked == ["Picked_forward", "Picked_forward_any_size"] and len(launches) > 2
    with fusegrad.config.patch(disable="index_checks"):
        fusegrad.export(fusegrad.compile(Picked), "f32[32,48]", "i64[7]", path=path)
    assert "device_assert" not in path.read_text() and "CHECKED" not in path.read_text()
