"""The exported C++ pair: its Function is the class's on the CPU, and it launches what the Triton module launches."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

import fusegrad
from fusegrad.benchmarks import functions as f
from fusegrad.examples.gallery.catalogue import CATALOGUE
from fusegrad.examples.gallery.cross_entropy import CrossEntropy
from fusegrad.examples.gallery.rope import RoPE
from fusegrad.runtime.export.gather.gathered import ExportError, gather_function
from fusegrad.runtime.export.python.module import module_text
from fusegrad.runtime.values.tensor_specs import parse_spec

ENTRIES = {entry.name: entry for entry in CATALOGUE}
ALL = os.environ.get("FUSEGRAD_TESTS") == "all"


class Marked(torch.autograd.Function):
    """A product of matrices between kernels, an output without a gradient, two arguments that are no tensors."""

    is_traceable = True

    @staticmethod
    def forward(ctx, x, w, scale, flag=True):
        z = x.relu() @ w
        sign = (z > 0).to(z.dtype)
        ctx.save_for_backward(x, w, z)
        ctx.mark_non_differentiable(sign)
        return z.tanh() * scale, sign

    @staticmethod
    def backward(ctx, g, _):
        x, w, z = ctx.saved_tensors
        h = 7 * g * (1 - z.tanh() ** 2)
        return (h @ w.t()) * (x > 0), x.relu().t() @ h, None, None


class BiasResidual(torch.autograd.Function):
    """A product whose tiles are read by descriptors."""

    is_traceable = True

    @staticmethod
    def forward(ctx, x, w, b, r):
        ctx.save_for_backward(x, w, b)
        return torch.relu(x @ w.mT + b) + r

    @staticmethod
    def backward(ctx, g):
        x, w, b = ctx.saved_tensors
        kept = torch.where(x @ w.mT + b > 0, g, 0.0)
        return kept @ w, kept.mT @ x, kept.sum(0), g


CASES: dict[str, tuple[Any, ...]] = {
    "cross_entropy": (f.CrossEntropy, "f32[32,96]", "i64[32]", -100),
    "rms_norm": (f.RMSNorm, "bf16[48,64]", "bf16[64]", 1e-6),
    "marked": (Marked, "f32[24,16]", "f32[16,40]", 2.5, True),
    "bias_residual": (BiasResidual, "bf16[192,128]", "bf16[64,128]", "bf16[64]", "bf16[192,64]"),
}
BUILT = list(CASES) if ALL else ["cross_entropy"]  # a build takes a quarter of a minute
RUN = """
import json, sys, torch
library, arguments, name, out = sys.argv[1:]
torch.ops.load_library(library)
args = [a.requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a for a in torch.load(arguments)]
results = getattr(getattr(torch.ops, name), name)(*args)
results = [results] if torch.is_tensor(results) else list(results)
moving = [a for a in args if torch.is_tensor(a) and a.requires_grad]
kept = [r for r in results if r.requires_grad]
gradients = torch.autograd.grad(kept, moving, [r.detach().cos() for r in kept], create_graph=True)
said = []
def attempt(call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        said.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
attempt(lambda: gradients[0].sum().backward())
attempt(lambda: getattr(getattr(torch.ops, name), name)(*(a.double() if a is moving[0] else a for a in args)))
meta = getattr(getattr(torch.ops, name), name)(*(a.detach().to("meta") if torch.is_tensor(a) else a for a in args))
shapes = [list(m.shape) for m in ([meta] if torch.is_tensor(meta) else meta)]
torch.save({"results": results, "gradients": gradients}, out)
json.dump({"said": said, "shapes": shapes, "inputs": [a.data_ptr() for a in args if torch.is_tensor(a)],
           "outputs": [r.data_ptr() for r in (*results, *gradients)]}, open(out + ".json", "w"))
"""


def build(folder: Path, name: str, *flags: str) -> Path:
    library = folder / f"{name}.so"
    inside = [word for path in cpp_extension.include_paths() for word in ("-isystem", path)]
    (lib,) = cpp_extension.library_paths()[:1]
    links = [f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch_cpu", "-ltorch", "-lc10", "-ldl"]
    plain = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unused-function", *flags]
    done = subprocess.run(
        [*plain, *inside, str(folder / f"{name}.cpp"), "-o", str(library), *links],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return library


@functools.cache
def arguments(name: str) -> list[Any]:
    """Values for a case, of other sizes than it was exported for where these may vary."""
    torch.manual_seed(0)
    made: list[Any] = list(CASES[name][1:])
    for i, spec in enumerate(made):
        if isinstance(spec, str):
            dtype, shape = parse_spec(spec)
            shape = (29, *shape[1:]) if shape[0] in (24, 32, 48) else shape
            made[i] = torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(0, 4, shape)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cpp")


@functools.cache
def library(folder: Path, name: str) -> Path:
    text = fusegrad.export(*CASES[name], path=folder / f"{name}.cpp")
    assert (folder / f"{name}.cpp").read_text() == text
    return build(folder, name, "-DKERNELS_ON_CPU_TENSORS")


def run(folder: Path, name: str, **environment: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors, facts) of a process without fusegrad that loads the library."""
    torch.save(arguments(name), folder / f"{name}.args")
    out = folder / f"{name}.out"
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [
        sys.executable,
        "-P",
        "-W",
        "ignore",
        "-c",
        RUN,
        str(library(folder, name)),
        str(folder / f"{name}.args"),
        name,
    ]
    done = subprocess.run(
        [*command, str(out)], capture_output=True, text=True, env={**clean, **environment}, cwd=folder, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(out), json.loads(out.with_name(f"{out.name}.json").read_text())


@pytest.mark.parametrize("name", BUILT)
def test_on_the_cpu_it_is_the_class(folder: Path, name: str) -> None:
    found, facts = run(folder, name)
    args = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments(name)]
    results = CASES[name][0].apply(*args)
    results = list(results) if isinstance(results, tuple) else [results]
    kept = [r for r in results if r.requires_grad]
    moving = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    gradients = torch.autograd.grad(kept, moving, [r.detach().cos() for r in kept])
    for ours, theirs in zip([*found["results"], *found["gradients"]], [*results, *gradients], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2 if theirs.dtype == torch.bfloat16 else 1e-5, atol=1e-5)
        assert ours.stride() == theirs.stride()
    assert [r.requires_grad for r in found["results"]] == [r.requires_grad for r in results]
    assert facts["shapes"] == [list(r.shape) for r in results]
    second, other = facts["said"]
    assert second == f"RuntimeError: derivative for {name}::backward is not implemented"
    assert other.startswith("ValueError: ") and "is Double" in other and "export them for this too" in other


@functools.cache
def driver(folder: Path) -> Path:
    """A folder with a libcuda.so.1 that takes notes."""
    source, made = Path(__file__).with_name("driver.c"), folder / "driver"
    made.mkdir()
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(made / "libcuda.so.1")], check=True)
    return made


class Noted:
    """A Triton kernel that takes notes of its launches."""

    def __init__(self, name: str, notes: list[Any]) -> None:
        self.name, self.notes = name, notes

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, num_warps, num_stages, **constants: self.notes.append((self.name, grid, num_warps, args))


def launched_by_the_module(folder: Path, name: str) -> list[Any]:
    """The launches of the Triton module with the same row lengths compiled in: (kernel, grid, warps, arguments)."""
    path = folder / f"{name}.py"
    cls, *args = CASES[name]
    text = module_text(gather_function(cls, args))
    path.write_text(text)  # Triton reads its functions there
    space: dict[str, Any] = {"__name__": "vendored"}
    exec(compile(text, str(path), "exec"), space)
    notes: list[Any] = []
    kernels = [k for k, v in space.items() if hasattr(v, "do_not_specialize") or type(v).__name__ == "JITFunction"]
    space.update({k: Noted(k, notes) for k in kernels})
    args = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments(name)]
    results = space[CASES[name][0].__name__].apply(*args)
    results = [r for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad]
    moving = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    torch.autograd.grad(results, moving, [r.detach().cos() for r in results])
    return notes


@pytest.mark.parametrize("name", BUILT)
def test_launches_are_those_of_the_triton_module(folder: Path, name: str) -> None:
    """With a driver that only takes notes: kernels, grids, blocks, numbers, and which memory goes where."""
    expected = launched_by_the_module(folder, name)
    needs = dict(re.findall(r'Kernel \w+{"(\w+)", \w+, (\d+, \d+, \d+)}', texts(folder, name)[1]))
    kinds = {
        k: "".join("p" if isinstance(a, torch.Tensor) else "n" for a in args) + "w" * (not needs[k].endswith(" 0"))
        for k, _, _, args in expected
    }
    notes = folder / f"{name}.notes"
    told = {
        "NOTES": str(notes),
        "CAPABILITY": "90",
        "KERNELS_ON_CPU_TENSORS": "1",
        "LD_LIBRARY_PATH": str(driver(folder)),
    }
    _, facts = run(folder, name, **told, **kinds)
    lines = [line.split() for line in notes.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == len(expected) > 1
    assert any(kind.endswith("w") for kind in kinds.values()) == (name == "bias_residual")
    places: dict[int, int] = {}  # memory there -> memory here, one to one
    for (kernel, grid, block, shared, *given), (wanted, programs, warps, args) in zip(lines, expected, strict=True):
        assert (kernel, grid, block) == (wanted, f"{programs[0]},1,1", f"{32 * warps},1,1")
        assert needs[kernel].startswith(f"{32 * warps}, {shared}, ")
        assert len(given) == len(args)
        for text, argument in zip(given, args, strict=True):
            if isinstance(argument, torch.Tensor):
                assert places.setdefault(argument.data_ptr(), int(text)) == int(text)
            else:
                assert int(text) == argument
    inputs = [a.data_ptr() for a in arguments(name) if isinstance(a, torch.Tensor)]
    assert [places[i] for i in inputs if i in places] == [
        v for i, v in zip(inputs, facts["inputs"], strict=True) if i in places
    ]
    by_kernels = len(facts["outputs"]) - (name == "marked")  # one is a product of matrices, by a library
    assert len(set(facts["outputs"]) & set(places.values())) == by_kernels


REFUSALS = {"80": "was compiled for compute capability 90, this device has 80", "": "the CUDA driver cannot be opened"}


@pytest.mark.parametrize("capability", REFUSALS if ALL else ["80"])
def test_another_gpu_is_refused_by_name(folder: Path, capability: str) -> None:
    where = {"LD_LIBRARY_PATH": str(driver(folder)), "CAPABILITY": capability} if capability else {}
    with pytest.raises(AssertionError, match=REFUSALS[capability]):
        run(folder, BUILT[0], KERNELS_ON_CPU_TENSORS="1", NOTES=os.devnull, **where)


@pytest.mark.skipif(not ALL, reason="one more build; FUSEGRAD_TESTS=all has it")
def test_it_builds_without_the_switch_for_tests(folder: Path) -> None:
    fusegrad.export(*CASES["marked"], path=folder / "plain.h")
    build(folder, "plain")


# ------------------------------------------------------------------ the text
@functools.cache
def texts(folder: Path, name: str) -> tuple[str, str]:
    fusegrad.export(*CASES[name], path=folder / f"read_{name}.h")
    return (folder / f"read_{name}.h").read_text(), (folder / f"read_{name}.cpp").read_text()


def test_the_flag_is_as_declared(folder: Path) -> None:
    class Traceable(f.SwiGLU):
        is_traceable = True

    fusegrad.export(Traceable, "bf16[64,128]", "bf16[64,128]", path=folder / "traceable.cpp")
    assert "static constexpr bool is_traceable = true;" in (folder / "traceable.h").read_text()
    header, source = texts(folder, "marked")
    assert "static constexpr bool is_traceable = false;" in header, "a C++ node with marks cannot be traceable"
    assert "ctx->mark_non_differentiable({sign});" in source and "at::matmul(" in source
    assert "double scale = 2.5, bool flag = true" in header


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 2


def test_what_cpp_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="writes to an argument"):
        fusegrad.export(Writes, "f32[8,8]", path=tmp_path / "no.cpp")
    with pytest.raises(ExportError, match="not on hip:gfx942"):
        fusegrad.export(*CASES["rms_norm"], path=tmp_path / "no.cpp", target="hip:gfx942")
    assert list(tmp_path.iterdir()) == []


def test_sizes_are_divided_in_cpp() -> None:
    """torch prints its floor division as Python's `//`, where a comment would begin."""
    text = fusegrad.export(RoPE, *ENTRIES["rope"].arguments(), format="cpp")
    conditions = [line for line in text.splitlines() if "TORCH_CHECK_VALUE(" in line and ">= 2 &&" in line]
    assert conditions and all("/" in line and "//" not in line for line in conditions)


def test_what_aten_has_no_function_for_runs_on_the_gpu_alone() -> None:
    """A number that is a quotient of sizes, which another operation reads."""
    text = fusegrad.export(CrossEntropy, *ENTRIES["cross_entropy"].arguments(), format="cpp")
    assert "// backward has operations that ATen has no function for: it runs on the GPU alone" in text
