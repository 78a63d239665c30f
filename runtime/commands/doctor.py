"""`fusegrad doctor`: what this machine can do, what was tried on it, and what to install for the rest.

Every backend runs a tiny Function, forward and backward, and is compared with eager: what works is seen, not guessed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.autograd import Function

from ...ir import versions
from ..api import compile as compiled
from ..cache import entry_files
from ..cache import store as cache
from ..report.command_result import CommandResult
from ..report.terminal import Block, Table
from ..settings.config import BACKENDS, settings
from .cache import bytes_text

TESTED = {"Python": "3.11", "torch": "2.13.0", "triton": "3.7.1"}
"""The versions of constraints.txt; a test compares them."""
LEAST = {"Python": "3.11", **versions.LEAST}
EXTRAS = {
    "rich": "tables and progress bars in a terminal: pip install rich",
    "matplotlib": "the picture of `fusegrad bench`: pip install 'fusegrad[bench]'",
    "ninja": "the C++ export's test: pip install ninja",
}
ON_GPU = ("triton",)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. state: "ok", "missing", "note" or "fault"; fix: what to do about it."""

    what: str
    found: str
    state: str = "ok"
    fix: str = ""


class _Tiny(Function):
    """Elementwise work and a sum along rows: enough for a kernel with a reduction."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x).sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * s.sum(-1, keepdim=True) + (grad * x).sum(-1, keepdim=True) * s * (1 - s)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="try no backend")


def run(options: argparse.Namespace) -> CommandResult:
    """Everything, part by part."""
    parts = {name: list(look()) for name, look in PARTS.items() if not (options.quick and look is backends)}
    facts = {name: [asdict(f) for f in findings] for name, findings in parts.items()}
    rows = {
        n: [(f.what, f.found, "" if f.state == "ok" else f.state) for f in findings] for n, findings in parts.items()
    }
    blocks: list[Block] = [Table(name, ("", "", ""), each) for name, each in rows.items()]
    advice = list(dict.fromkeys(f"  {f.what}: {f.fix}" for findings in parts.values() for f in findings if f.fix))
    return CommandResult(facts, [*blocks, "\n".join(["to do:", *advice]) if advice else "nothing is missing"])


# ------------------------------------------------------------------ what is installed
def installed() -> Iterator[Finding]:
    """Python, torch and triton: whether they are the versions that are tested."""
    packages = {n: entry_files.installed_version(n) for n in ("torch", "triton", "fusegrad")}
    versions_here = {"Python": platform.python_version(), **packages}
    for name, version in versions_here.items():
        yield _version_finding(name, version)


def _version_finding(name: str, version: str | None) -> Finding:
    if version is None:
        fix = f"pip install '{name}>={LEAST.get(name)}'"
        return Finding(name, "not installed", "missing", fix) if name in LEAST else Finding(name, "not a package")
    tested = TESTED.get(name)
    if tested is None or any(_numbers(version)[: len(_numbers(t))] == _numbers(t) for t in _versions_tried(name)):
        return Finding(name, f"{version}, tested" if tested else version)
    if _numbers(version) < _numbers(LEAST[name]):
        return Finding(name, version, "fault", f"at least {LEAST[name]} is needed; {tested} is tested")
    return Finding(name, f"{version}, not tested ({tested} is)", "note")


def _versions_tried(name: str) -> list[str]:
    """The versions that the tests were run with."""
    at = {"torch": 0, "triton": 1}.get(name)
    return [TESTED[name], *([] if at is None else [pair[at] for pair in versions.TRIED])]


def _numbers(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13, 0)"""
    parts = version.partition("+")[0].split(".")
    return tuple(int(digits) for part in parts if (digits := "".join(c for c in part if c.isdigit())))


def extras() -> Iterator[Finding]:
    """Optional packages."""
    for name, fix in EXTRAS.items():
        version = entry_files.installed_version(name)
        yield Finding(name, version) if version else Finding(name, "not installed", "note", fix)


# ------------------------------------------------------------------ the machine
def machine() -> Iterator[Finding]:
    """Processor, GPUs, compilers."""
    yield Finding("system", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
                  f"{torch.get_num_threads()} torch threads")  # fmt: skip
    yield from _gpus()
    compiler = next((c for c in (os.environ.get("CXX"), "g++", "clang++") if c and shutil.which(c)), None)
    missing = Finding("C++ compiler", "none", "note", "install g++ for backend='inductor' on CPU tensors")
    yield Finding("C++ compiler", str(shutil.which(compiler))) if compiler else missing


def _gpus() -> Iterator[Finding]:
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties: Any = torch.cuda.get_device_properties(i)
        arch = properties.gcnArchName if torch.version.hip else f"sm_{properties.major}{properties.minor}"
        yield Finding(f"GPU {i}", f"{properties.name}, {arch}, {bytes_text(properties.total_memory)}")
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        fix = "" if built else "this torch is built for the CPU; on a machine with a GPU install a CUDA or ROCm build"
        yield Finding("GPU", "none: kernels are generated, interpreted and cross-compiled, not run", "note", fix)


# ------------------------------------------------------------------ what works
def backends() -> Iterator[Finding]:
    """Each backend on a tiny Function."""
    for name in BACKENDS:
        yield _try_backend(name)
    yield _try_cross_compiling()


def _try_backend(backend: str) -> Finding:
    if backend in ON_GPU and not torch.cuda.is_available():
        return Finding(backend, "needs a GPU", "note")
    device = "cuda" if backend != "interpret" and torch.cuda.is_available() else "cpu"
    began = time.perf_counter()
    try:
        same = _agrees_with_eager(backend, device)
    except Exception as error:
        return Finding(backend, f"{type(error).__name__}: {error}".splitlines()[0], "fault", FIXES.get(backend, ""))
    seconds = f"{time.perf_counter() - began:.1f} s for its first kernels on {device}"
    return Finding(backend, f"works ({seconds})") if same else Finding(backend, "differs from eager", "fault", REPORT)


REPORT = "please report it with the output of `fusegrad doctor --json`"
FIXES = {
    "triton": "pip install triton",
    "interpret": "pip install triton",
    "inductor": "install g++ (CPU) or a triton that fits this torch (GPU)",
}


def _agrees_with_eager(backend: str, device: str) -> bool:
    """Forward and backward against eager."""
    x = torch.linspace(-2, 2, 24, device=device).view(4, 6)
    results = []
    for function in (compiled(_Tiny, backend=backend, fullgraph=True), _Tiny):
        leaf = x.clone().requires_grad_()
        output = function.apply(leaf)  # type: ignore[no-untyped-call]
        results.append((output.detach(), *torch.autograd.grad(output.sum(), leaf)))
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*results, strict=True))


def _try_cross_compiling() -> Finding:
    from ..report.explain import explain

    try:
        metrics = explain(_Tiny, "f32[64,64]").metrics("cuda:90")
    except Exception as error:
        return Finding("cross-compiling", f"{type(error).__name__}: {error}".splitlines()[0], "fault", FIXES["triton"])
    failed = next((f["error"] for f in metrics.values() if f["error"]), None)
    works = Finding("cross-compiling", f"works: {len(metrics)} kernels for cuda:90, without a GPU")
    return works if failed is None else Finding("cross-compiling", failed, "fault", REPORT)


# ------------------------------------------------------------------ what is kept
def cache_state() -> Iterator[Finding]:
    """The cache folder and its health, and the settings."""
    store = cache.default()
    if store.root is None:
        yield Finding("cache", "in memory only", "fault", "set FUSEGRAD_CACHE_DIR to a folder that is yours alone")
    else:
        yield from _health(store)
    changed = {k: v for k, v in asdict(settings()).items() if v}
    yield Finding("settings", ", ".join(f"{k}={v}" for k, v in changed.items()))


def _health(store: cache.Cache) -> Iterator[Finding]:
    entries = store.listed()
    text = f"{store.root}: {len(entries)} entries, {bytes_text(sum(e.bytes for e in entries))}"
    yield Finding("cache", f"{text} of at most {bytes_text(store.limit)}")
    reasons = (store.fault(entry.key) for entry in entries[-SAMPLE:])
    faults = [reason for reason in reasons if reason not in (None, entry_files.OTHER_VERSION)]
    if faults:
        yield Finding("cache entries", f"{len(faults)} damaged: {faults[0]}", "fault", "fusegrad cache verify")
    assert store.root is not None
    free = shutil.disk_usage(store.root).free
    if free < LEAST_FREE:
        yield Finding("disk", f"{bytes_text(free)} free", "fault", "make room, or point FUSEGRAD_CACHE_DIR elsewhere")


SAMPLE = 64
"""Entries, the newest, whose sums are compared."""
LEAST_FREE = 256 << 20

PARTS: dict[str, Callable[[], Iterator[Finding]]] = {
    "versions": installed, "machine": machine, "backends": backends, "state": cache_state, "extras": extras,
}  # fmt: skip
