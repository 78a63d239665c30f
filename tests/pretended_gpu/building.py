"""Builds the libraries of the pretended GPUs with the compilers at hand, once for a torch, a triton and a source."""

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
DRIVERS = {"nvidia": "libcuda.so.1", "amd": "libamdhip64.so"}
TENSORS = "libpretended_tensors.so"


def lacks() -> str:
    """What this machine lacks for it; "" where nothing does."""
    for tool in ("gcc", "g++"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"there is no {package}"
    headers = ("nvidia/include/cuda.h", "amd/include/hip/hip_runtime_api.h")
    missing = [name for name in headers if not (folder_of("triton") / "backends" / name).exists()]
    return f"this triton has no {' and no '.join(missing)}" if missing else ""


def folder_of(package: str) -> Path:
    """Where a package is installed: nothing of it is imported."""
    found = importlib.util.find_spec(package)
    assert found and found.origin
    return Path(found.origin).parent


@functools.cache
def libraries() -> Path:
    """The folder with the libraries, built now unless they are there."""
    sources = b"".join((HERE / name).read_bytes() for name in ("driver.c", "hip_driver.c", "tensors.cpp"))
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
    for vendor, source in (("nvidia", "driver.c"), ("amd", "hip_driver.c")):
        include = folder_of("triton") / "backends" / vendor / "include"
        driver = ["gcc", *shared, "-O1", f"-Wl,-soname,{DRIVERS[vendor]}", f"-I{include}", str(HERE / source)]
        _run([*driver, "-o", str(folder / DRIVERS[vendor])])
    headers = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    linked = [f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    tensors = ["g++", "-std=c++20", *shared, "-O0", *(f"-I{h}" for h in headers), str(HERE / "tensors.cpp"), *linked]
    _run([*tensors, "-o", str(folder / TENSORS)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
