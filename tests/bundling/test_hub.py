"""The tree for Hugging Face's kernels package: imported as that does, in a process without fusegrad."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import bundled as f
import pytest
import torch

import fusegrad
from fusegrad.runtime.export.export import ExportFormatError

IMPORTED = """
import importlib.util, json, sys
from pathlib import Path
sys.modules["fusegrad"] = None  # importing it is an error
import torch

def kernel(variant, name):  # as kernels 0.17 imports a variant: under the id of its metadata
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

variant = Path(sys.argv[1]) / "build" / "torch-universal"
metadata = json.loads((variant / "metadata.json").read_text())
found = []
old = kernel(variant / metadata["name"].replace("-", "_"), "older")
for module in (kernel(variant, metadata["id"]), old):
    x = torch.arange(48.0).reshape(6, 8).sin().requires_grad_()
    w = torch.arange(8.0).cos().requires_grad_()
    out = module.norm(x, w, 1e-6)
    grads = torch.autograd.grad(out, (x, w), torch.ones(6, 8))
    found.append([t.tolist() for t in (out, *grads)])
assert module.__all__ == ["Norm", "norm"]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hub") / "fast-norm"
    card = fusegrad.export(f.Norm, "f32[6,8]", "f32[8]", 1e-6, path=path, format="hf-kernels")
    assert card == (path / "README.md").read_text()
    return path


def test_it_runs_without_fusegrad(tree: Path, tmp_path: Path) -> None:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", IMPORTED, tree]
    done = subprocess.run(command, capture_output=True, text=True, env=clean, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    x = torch.arange(48.0).reshape(6, 8).sin().requires_grad_()
    w = torch.arange(8.0).cos().requires_grad_()
    out = f.Norm.apply(x, w, 1e-6)
    expected: tuple[Any, ...] = (out.detach(), *torch.autograd.grad(out, (x, w), torch.ones(6, 8)))
    for found in json.loads(done.stdout):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(mine), theirs, rtol=1e-5, atol=1e-5)


def test_what_the_package_and_its_builder_read(tree: Path) -> None:
    variant = tree / "build" / "torch-universal"
    metadata = json.loads((variant / "metadata.json").read_text())
    build = tomllib.loads((tree / "build.toml").read_text())
    assert metadata["name"] == build["general"]["name"] == "fast-norm" and metadata["python-depends"] == []
    assert metadata["id"].startswith("_fast_norm_universal_")
    assert metadata["backend"]["type"] in build["general"]["backends"]
    assert {"torch-noarch", "general"} == set(build)
    for name in ("__init__.py", "fast_norm.py"):
        assert (tree / "torch-ext" / "fast_norm" / name).read_bytes() == (variant / name).read_bytes()
    card = (tree / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: kernels\n") and "Holds for: x: f32[M, N], weight: f32[N], eps" in card


def test_another_export_replaces_it_and_nothing_else(tree: Path, tmp_path: Path) -> None:
    fusegrad.export(f.Viewed, "f32[6,8]", path=tree, format="hf-kernels")
    assert not (tree / "torch-ext" / "fast_norm").exists() and (tree / "torch-ext" / "fast_viewed").exists()
    (tmp_path / "diary.txt").write_text("dear diary")
    with pytest.raises(fusegrad.BundleError, match="nothing that an export wrote"):
        fusegrad.export(f.Viewed, "f32[6,8]", path=tmp_path, format="hf-kernels")
    for asked in ({"targets": ("cuda:90",), "path": tree}, {}):
        with pytest.raises(ExportFormatError, match="fix:  one of"):
            fusegrad.export(f.Viewed, "f32[6,8]", format="hf-kernels", **asked)
