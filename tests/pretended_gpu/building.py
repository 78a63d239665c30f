"""Builds the two libraries of the pretended GPU with the compilers at hand, once for a torch, a triton and a source."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
DRIVER, TENSORS = "libcuda.so.1", "libpretended_tensors.so"


def lacks() -> str:
    """What this machine lacks for it; "" where nothing does."""
    for tool in ("gcc", "g++"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"there is no {package}"
    return "" if (folder_of("triton") / "backends/nvidia/include/cuda.h").exists() else "this triton has no cuda.h"


def folder_of(package: str) -> Path:
    """Where a package is installed: nothing of it is imported."""
    found = importlib.util.find_spec(package)
    assert found and found.origin
    return Path(found.origin).parent


@functools.cache
def libraries() -> Path:
    """The folder with both libraries, built now unless they are there."""
    sources = b"".join((HERE / name).read_bytes() for name in ("driver.c", "tensors.cpp"))
    places = f"{folder_of('torch')} {folder_of('triton')} {version('torch')}"
    key = hashlib.sha256(sources + places.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"fusegrad-pretended-gpu-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
        folder = Path(tempfile.mkdtemp())  # somebody else's: what is in it is not loaded
    if not (folder / key).is_dir():
        built = Path(tempfile.mkdtemp(dir=folder))
        try:
            _build(built)
            with suppress(OSError):  # another process was first
                built.rename(folder / key)
        finally:
            shutil.rmtree(built, ignore_errors=True)
    return folder / key


def _build(folder: Path) -> None:
    torch, shared = folder_of("torch"), ["-shared", "-fPIC"]
    cuda = folder_of("triton") / "backends/nvidia/include"
    driver = ["gcc", *shared, "-O1", f"-Wl,-soname,{DRIVER}", f"-I{cuda}", str(HERE / "driver.c")]
    _run([*driver, "-o", str(folder / DRIVER)])
    headers = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    linked = [f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    tensors = ["g++", "-std=c++20", *shared, "-O0", *(f"-I{h}" for h in headers), str(HERE / "tensors.cpp"), *linked]
    _run([*tensors, "-o", str(folder / TENSORS)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
