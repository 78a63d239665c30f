"""The device of a process: a GPU, or a pretended one, where the two are not asked in the same way."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Results = list[torch.Tensor]


def captured(call: Callable[[], Results]) -> tuple[Callable[[], Any], Results]:
    """(a replay of the call's launches, the tensors that it writes to). The call has to read the same memory again."""
    aside: Any = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph.replay, results


@contextlib.contextmanager
def only_driven(kind: str) -> Iterator[list[str] | None]:
    """Within the block Triton's own launcher, or another, is at work, not fusegrad's.

    None on a GPU; on the pretended one nothing computes then, and it is the kernels that were launched.
    """
    if kind == "cuda":
        yield None
        return
    import launches  # type: ignore[import-not-found]
    from pretending import driver

    names: list[str] = []

    @launches._Callback  # type: ignore[untyped-decorator]
    def on_launch(config: Any, function: Any, parameters: Any) -> int:
        name = function.contents.name.decode()
        names.append(f"{name}({len(launches.interface_of(function.contents.image, name).sizes)})")
        return 0

    driver.pretend_launch(on_launch)
    try:
        yield names
    finally:
        driver.pretend_launch(launches._on_launch)


@contextlib.contextmanager
def known_launch(kind: str, kernel: Any, text: str, arguments: Sequence[Any], grid: int) -> Iterator[None]:
    """Within the block one kernel is launched through the driver: the pretended one hears which, and interprets it."""
    if kind == "cuda":
        yield
        return
    import launches

    launches._given.now = kernel, text, arguments, grid
    try:
        yield
    finally:
        launches._given.now = None


def target() -> str:
    """The name that the GPU has as a target of exports: of its compute capability, or the last one before it."""
    from fusegrad.codegen import TARGETS

    if torch.version.hip:
        return "hip:gfx942"
    major, minor = torch.cuda.get_device_capability()
    known = [int(name[5:]) for name in TARGETS if name.startswith("cuda:")]
    return f"cuda:{max(n for n in known if n <= 10 * major + minor)}"


def surroundings(unit: str, kind: str) -> dict[str, Any]:
    """What results depend on; "absent": why there is no GPU."""
    from ..__main__ import machine

    if reason := _absent():
        return {"absent": reason, **machine()}
    properties: Any = torch.cuda.get_device_properties(0)
    name = properties.name if kind == "cuda" else "pretended"
    capability = torch.cuda.get_device_capability()
    return {
        "device": name, "capability": ".".join(map(str, capability)), "units": properties.multi_processor_count,
        "memory": properties.total_memory, "l2": getattr(properties, "L2_cache_size", None),
        "cuda": torch.version.cuda or torch.version.hip, "driver": _driver(kind), **machine(),
    }  # fmt: skip


def _absent() -> str:
    if torch.cuda.is_available():
        return ""
    if not (torch.version.cuda or torch.version.hip):
        return f"torch {torch.__version__} is built for the CPU"
    return f"torch {torch.__version__}, built for CUDA or ROCm, sees no device"


def _driver(kind: str) -> str:
    if kind != "cuda":
        return "none"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def run_python(*arguments: str, timeout: float, **more: Any) -> subprocess.CompletedProcess[str]:
    """A process of this Python, its output as text."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, **more)
