"""Modules whose rows have any length: right at each, with a limit that they state, or made for one on demand."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch

import fusegrad
from fusegrad.benchmarks import functions as f
from fusegrad.codegen import Kernel, Scalar
from fusegrad.ir.passes.fuse import Group
from fusegrad.runtime.execution.graph_to_kernels import kernels_of
from fusegrad.runtime.export.export import ExportFormatError
from fusegrad.runtime.export.gather import any_length
from fusegrad.runtime.export.gather.gathered import Gathered, Part, gather_function
from fusegrad.runtime.export.gather.versions import Version
from fusegrad.runtime.kernels import proofs
from fusegrad.runtime.values.named_sizes import SizeError, with_numbers

WIDTHS = (1, 7, 100, 512, 2048, 4096, 4097)
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "rms_norm": (f.RMSNorm, "{}[M,N]", "{}[N]", 1e-6),
    "add_rms_norm": (f.AddRMSNorm, "{}[M,N]", "{}[M,N]", "{}[N]", 1e-6),
    "layer_norm": (f.LayerNorm, "{}[M,N]", "{}[N]", "{}[N]", 1e-5),
    "softmax": (f.Softmax, "{}[M,N]"),
    "swiglu": (f.SwiGLU, "{}[M,N]", "{}[M,N]"),
    "cross_entropy": (f.CrossEntropy, "{}[M,N]", "i64[M]", -100),
    "dropout": (f.DropoutBiasResidual, "{}[M,N]", "{}[N]", "{}[M,N]", "i64[]", 0.25),
}
RMS_NORM = FUNCTIONS["rms_norm"]
BESIDE_EAGER = """
import os, runpy, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.modules["fusegrad"] = None
import torch
path, name, kept = sys.argv[1:]
function = runpy.run_path(path)[name]
for width, args, weights, expected, limit in torch.load(kept):
    moving = [a for a in args if torch.is_tensor(a) and a.requires_grad]
    results = function.apply(*args)
    results = [*(results if isinstance(results, tuple) else (results,))]
    found = [*results, *torch.autograd.grad(results, moving, weights)]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, (width, ours, theirs)
        a, b = ours.detach().double(), theirs.detach().double()
        error = (a - b).abs().max().item() / max(b.abs().max().item(), 1e-3)
        assert error <= limit, (width, error, ours, theirs)
    print("right at", width)
"""


def filled(case: Sequence[Any], dtype: str) -> tuple[Any, ...]:
    return tuple(a.format(dtype) if isinstance(a, str) else a for a in case)


def arguments(specs: Sequence[Any], rows: int, width: int) -> list[Any]:
    torch.manual_seed(width)
    sizes, made = {"M": rows, "N": width}, []
    for spec in specs:
        if not isinstance(spec, str):
            made.append(spec)
            continue
        word, inside = re.fullmatch(r"(\w+)\[(.*)\]", spec).groups()
        shape = [sizes[s] for s in inside.split(",") if s]
        if word == "i64":
            made.append(torch.randint(0, width, shape))
        else:
            made.append(torch.randn(shape).to({"f32": torch.float32, "bf16": torch.bfloat16}[word]).requires_grad_())
    return made


def beside_eager(cls: Any, specs: Sequence[Any], dtype: str) -> Iterator[tuple[Any, ...]]:
    """(width, arguments, weights of the results, results and gradients in eager, tolerance)"""
    for width in WIDTHS:
        args = arguments(specs, 5, width)
        results = cls.apply(*args)
        results = [*(results if isinstance(results, tuple) else (results,))]
        weights = [torch.randn(r.shape).to(r.dtype) for r in results]
        moving = [a for a in args if torch.is_tensor(a) and a.requires_grad]
        gradients = torch.autograd.grad(results, moving, weights)
        expected = [t.detach() for t in (*results, *gradients)]
        yield width, args, weights, expected, 2e-2 if dtype == "bf16" else 1e-4


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_file_is_right_at_every_width(name: str, dtype: str, tmp_path: Path) -> None:
    cls, *specs = filled(FUNCTIONS[name], dtype)
    path, kept = tmp_path / f"{name}.py", tmp_path / "expected.pt"
    fusegrad.export(cls, *specs, path=path)
    torch.save(list(beside_eager(cls, specs, dtype)), kept)
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", "-c", BESIDE_EAGER, str(path), cls.__name__, str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right at") == len(WIDTHS)


# ------------------------------------------------------------------ what a file says
def vendored(text: str, folder: Path) -> dict[str, Any]:
    path = folder / "vendored.py"
    path.write_text(text, encoding="utf-8")
    return runpy.run_path(str(path))


def test_a_limit_is_stated_and_checked(tmp_path: Path) -> None:
    text = fusegrad.export(*filled(RMS_NORM, "bf16"), format="py")
    assert "N is any up to 16384; for longer rows export it again, with --sizes N=.." in text.split('"""')[1]
    assert "BLOCK_N = max(16, triton.next_power_of_2(N))" in text
    assert "N // MULTIPLE_N * MULTIPLE_N" in text and " N: tl.constexpr" not in text
    x, weight = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((2, 16385), (16385,)))
    with pytest.raises(ValueError, match=r"up to 16384: export it again with --sizes N=16385"):
        vendored(text, tmp_path)["RMSNorm"].apply(x, weight, 1e-6)


def test_longer_rows_are_exported_for_themselves() -> None:
    text = fusegrad.export(*filled(RMS_NORM, "bf16"), format="py", sizes={"N": 32768})
    assert "x: bf16[M, 32768]" in text and "is any up to" not in text


def test_names_are_examples_like_numbers() -> None:
    by_name = fusegrad.export(*filled(RMS_NORM, "bf16"), format="py")
    by_number = fusegrad.export(f.RMSNorm, "bf16[8192,4096]", "bf16[4096]", 1e-6, format="py")
    assert by_name == by_number
    assert "bf16[M, N]" in fusegrad.explain(f.SwiGLU, "bf16[T,C]", "bf16[T,C]").to_html()


def test_sizes_are_compiled_in_by_either_name(tmp_path: Path) -> None:
    of_spec = fusegrad.export(f.RMSNorm, "bf16[T,C]", "bf16[C]", 1e-6, format="py", sizes={"C": 512, "T": 8192})
    of_file = fusegrad.export(f.RMSNorm, "bf16[64,32]", "bf16[32]", 1e-6, format="py", sizes={"N": 512, "M": 8192})
    assert of_spec == of_file and "x: bf16[8192, 512], weight: bf16[512]" in of_spec
    x, weight = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((8192, 256), (256,)))
    with pytest.raises(ValueError, match=r"the kernels were exported for torch.bfloat16\[8192, 512\]"):
        vendored(of_spec, tmp_path)["RMSNorm"].apply(x, weight, 1e-6)


def test_sizes_that_nothing_has_are_refused_by_name() -> None:
    with pytest.raises(SizeError, match=r"RMSNorm has no size K(.|\n)*give one of M, N"):
        fusegrad.export(*filled(RMS_NORM, "bf16"), format="py", sizes={"K": 3})
    with pytest.raises(SizeError, match="N is 0"):
        fusegrad.export(*filled(RMS_NORM, "bf16"), format="py", sizes={"N": 0})
    with pytest.raises(ExportFormatError, match="no specification names K, by which json could know it"):
        fusegrad.export(*filled(RMS_NORM, "bf16"), format="json", sizes={"K": 3})
    numbered = with_numbers(("bf16[T, C]", "i64[T]", 7), {"C": 96})
    assert numbered.args == ("bf16[8192, 96]", "i64[8192]", 7)
    assert numbered.places == {"T": [(0, 0), (1, 0)], "C": [(0, 1)]}


def test_derivatives_have_any_width_too(tmp_path: Path) -> None:
    path = tmp_path / "rms_norm.py"
    text = fusegrad.export(*filled(RMS_NORM, "bf16"), path=path, derivatives=("jvp", "vmap"))
    assert "x: bf16[lanes, M, N]" in text and "for length in (1, 7, 100, 512, 4096, 4097)" in text
    path.write_text(text.replace("(1, 7, 100, 512, 4096, 4097)", "(1, 7, 600)"))
    done = subprocess.run([sys.executable, "-W", "ignore", str(path)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "RMSNorm: agrees" in done.stdout, done.stdout + done.stderr


# ------------------------------------------------------------------ what is proved
def gathered() -> Gathered:
    return gather_function(f.LayerNorm, ("bf16[8192,4096]", "bf16[4096]", "bf16[4096]", 1e-5), any_row=True)


def test_rows_end_where_a_proof_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def up_to_1024(graph: Any, kernels: Any, assumed: Any = ()) -> bool:
        return all(k.constants.get("BLOCK_N", 0) <= 1024 for k in kernels.kernels)

    monkeypatch.setattr(proofs, "are_proved", up_to_1024)
    assert set(gathered().limits.values()) == {1024}
    monkeypatch.setattr(proofs, "are_proved", lambda *_: False)
    pinned = gathered()
    assert not pinned.rows and 4096 in pinned.pinned.values()


def at(size: Any, block: int, version: Version) -> Any:
    columns = {symbol: column.values[block] for symbol, column in version.columns.items()}
    return sympy.sympify(size).subs({**columns, version.row.block: block})


def options(kernel: Kernel) -> dict[str, Any]:
    return {**kernel.constants, "num_warps": kernel.num_warps, "num_stages": kernel.num_stages}


def parts_and_groups(exported: Gathered) -> Iterator[tuple[Part, Group, list[Version]]]:
    for part in exported.parts:
        for number, versions in part.kernels.items():
            step = part.steps[number]
            assert isinstance(step, Group)
            yield part, step, versions


def test_a_version_is_the_kernels_of_each_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[tuple[str, int, bool], Any] = {}

    def noting(group: Any, target: Any, hints: Any, name: str, bounded: bool) -> Any:
        kernels = kernels_of(group, target, hints, name, bounded)
        block = max(k.constants["BLOCK_N"] for k in kernels.kernels)
        return made.setdefault((name, block, any(g.has(sympy.Mod) for k in kernels.kernels for g in k.guards)), kernels)

    monkeypatch.setattr(any_length, "kernels_of", noting)
    exported, checked = gathered(), 0
    for part, _, versions in parts_and_groups(exported):
        least = any_length.LEAST
        for version in versions:
            most = next(c.rhs for c in version.conditions if isinstance(c, sympy.Le))
            for block in (1 << n for n in range(4, 19) if least <= 1 << n <= most):
                (kernel,), (own,) = version.kernels.kernels, made[f"LayerNorm_{part.method}", block, False].kernels
                words = {**options(kernel), **version.words[kernel.name]}
                for name, value in options(own).items():
                    odd = {s: 3 for s in exported.sources}
                    assert at(words[name], block, version).subs(odd) == value, (block, name)
                assert sympy.simplify(at(kernel.grid, block, version) - own.grid) == 0
                for a, b in zip(kernel.arguments, own.arguments, strict=True):
                    assert not isinstance(a, Scalar) or sympy.simplify(at(a.value, block, version) - b.value) == 0
                for a, b in zip(kernel.scratch, own.scratch, strict=True):
                    assert [at(n, block, version) for n in a.shape] == [*b.shape]
                checked += 1
            least = 2 * int(most)
    assert checked >= 2 * 10
