"""Binaries for four GPUs, made without one: real code objects, and a launch that says what their headers say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad
from fusegrad.runtime.export.bundle.archive import BundleWarning
from fusegrad.runtime.export.gather.gathered import ExportError

TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
AMD, NVIDIA = 224, 190  # machines of ELF files


class Doubled(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("binaries") / "doubled"
    fast = fusegrad.compile(Doubled, dynamic=False)  # one version of each kernel
    fusegrad.export(fast, "f32[64,8]", path=path, format="bundle", targets=TARGETS)
    return path


@pytest.mark.parametrize("target", TARGETS)
def test_code_objects_and_their_launch(bundle: Path, target: str) -> None:
    folder = bundle / "targets" / target.replace(":", "_")
    launch = json.loads((folder / "launch.json").read_text())
    kernels = [k for step in launch["steps"] for k in step["kernels"]]
    assert [k["symbol"] for k in kernels] == ["Doubled_forward", "Doubled_backward"] and launch["target"] == target
    for kernel in kernels:
        kind, text = ("cubin", "ptx") if target.startswith("cuda") else ("hsaco", "amdgcn")
        binary = (folder / f"{kernel['symbol']}.{kind}").read_bytes()
        machine = int.from_bytes(binary[18:20], "little")
        assert binary[:4] == b"\x7fELF" and machine == (NVIDIA if kind == "cubin" else AMD)
        assert kernel["symbol"].encode() in binary
        source = (folder / f"{kernel['symbol']}.{text}").read_text()
        if text == "ptx":
            assert f".target sm_{target[5:]}" in source and f".entry {kernel['symbol']}(" in source
            parameters = source.split(".entry", 1)[1].split(")", 1)[0].count(".param")
            assert f".reqntid {kernel['block'][0]}" in source
            assert parameters == len(kernel["arguments"]) + kernel["hidden_pointers"]
        assert kernel["grid"][0] >= 1 and kernel["shared_bytes"] >= 0 and kernel["warps"] >= 1
        assert [a["memory"] for a in kernel["arguments"] if "memory" in a] == [["input", 0], ["output", 0]]
        assert f"def {kernel['symbol']}(" in (folder / "kernels.py").read_text()


def test_a_bundle_with_damaged_binaries_still_loads(bundle: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(bundle, copied)
    (copied / "targets" / "cuda_90" / "Doubled_forward.cubin").write_bytes(b"\x7fELF and nothing more")
    (copied / "targets" / "hip_gfx942" / "Doubled_backward.hsaco").unlink()
    with pytest.warns(BundleWarning, match=r"Doubled_forward.cubin, targets/hip_gfx942/Doubled_backward.hsaco"):
        cls: Any = fusegrad.load(copied)
    x = torch.randn(64, 8, requires_grad=True)
    cls.apply(x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 2))
    (copied / "targets" / "cuda_80" / "launch.json").write_bytes(b"{}")
    with pytest.raises(fusegrad.BundleError, match=r"targets/cuda_80/launch.json: it has 2 bytes"):
        fusegrad.load(copied)


def test_a_gpu_that_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises((ExportError, ValueError), match="there is no such target"):
        fusegrad.export(Doubled, "f32[64,8]", path=tmp_path / "no.zip", targets=("cuda:42",))
    assert not list(tmp_path.iterdir())
