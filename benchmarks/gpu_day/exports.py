"""What was exported, used on the GPU without fusegrad's own launcher: Triton module, bundle, its binaries, C++ pair."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusegrad

from .. import functions
from ..correctness import results
from .launching import apart
from .machine import known_launch, only_driven, run_python, target

SEED = 3
NORM: dict[str, tuple[Any, ...]] = {
    "cuda": (functions.RMSNorm, "bf16[4096,1024]", "bf16[1024]", 1e-6),
    "pretended": (functions.RMSNorm, "bf16[48,64]", "bf16[64]", 1e-6),
}
Found = Iterator[str]


def exported(unit: str, kind: str) -> dict[str, Any]:
    """One of the forms below."""
    with tempfile.TemporaryDirectory() as folder:
        return {"faults": list(FORMS[unit](kind, Path(folder)))}


def arguments(specs: Sequence[Any], device: str = "cuda") -> list[Any]:
    """Random tensors for specifications, the same for the same ones."""
    from fusegrad.runtime.values.tensor_specs import is_spec, parse_spec

    numbers = torch.Generator().manual_seed(SEED)

    def drawn(spec: str) -> Tensor:
        dtype, shape = parse_spec(spec)
        return torch.randn(shape, generator=numbers).to(device, dtype).requires_grad_()

    return [drawn(s) if is_spec(s) else s for s in specs]


def _beside(function: Any, written: Any, args: Sequence[Any]) -> Found:
    ours, theirs = (results(f.apply, args, SEED) for f in (function, written))
    yield from apart("exported", ours, theirs)  # type: ignore[arg-type]


# ------------------------------------------------------------------ forms
def module(kind: str, folder: Path) -> Found:
    """The Triton module, imported; launched by Triton's own launcher."""
    path = folder / "rms_norm_exported.py"
    fusegrad.export(*NORM[kind], path=path, target=target())
    spec = importlib.util.spec_from_file_location("rms_norm_exported", path)
    assert spec and spec.loader
    imported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imported)
    args = arguments(NORM[kind][1:])
    with only_driven(kind) as names:
        if names is None:
            yield from _beside(imported.RMSNorm, functions.RMSNorm, args)
            return
        results(imported.RMSNorm.apply, args, SEED)
    if len(names) < 2:
        yield f"not launched in both directions: {names}"


def bundle(kind: str, folder: Path) -> Found:
    """A bundle with binaries for this GPU, loaded again."""
    path = folder / "rms_norm.zip"
    fusegrad.export(*NORM[kind], path=path, targets=(target(),))
    loaded: Any = fusegrad.load(path)
    yield from _beside(loaded, functions.RMSNorm, arguments(NORM[kind][1:]))


def binaries(kind: str, folder: Path) -> Found:
    """The bundle's binaries, loaded and launched through the driver by what its launch.json says alone."""
    if torch.version.hip:
        yield from ()
        return
    shape = NORM[kind][1]
    fast = fusegrad.compile(functions.SwiGLU, dynamic=False)
    fusegrad.export(fast, shape, shape, path=folder / "b", format="bundle", targets=(target(),))
    inside = folder / "b" / "targets" / target().replace(":", "_")
    gate, up, grad = (a.detach() for a in arguments((shape, shape, shape)))
    steps = json.loads((inside / "launch.json").read_text())["steps"]
    explained = fusegrad.explain(fast, shape, shape, target=target())
    made: list[Tensor] = []
    for step in steps:
        made += _launched(kind, inside, step, {"gate": gate, "up": up}, grad, explained)
    torch.cuda.synchronize()
    yield from apart("binaries", made, _by_hand(gate, up, grad))


def _by_hand(gate: Tensor, up: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (gate, up)]
    y = functions.SwiGLU.apply(*leaves)  # type: ignore[no-untyped-call]
    return [y, *torch.autograd.grad(y, leaves, grad)]


def _launched(
    kind: str, folder: Path, step: Any, known: dict[str, Tensor], grad: Tensor, explained: Any
) -> list[Tensor]:
    """The outputs of one step's kernels. What is no argument of the Function is the gradient."""
    inputs = [known.get(i["name"], grad) for i in step["inputs"]]
    outputs = [torch.empty_like(grad) for _ in step["outputs"]]
    memory = {"input": inputs, "output": outputs}
    records = {record.name: record for record in explained.kernel_records}
    for kernel in step["kernels"]:
        given = [memory[a["memory"][0]][a["memory"][1]] if "memory" in a else a["value"] for a in kernel["arguments"]]
        words = [ctypes.c_void_p(g.data_ptr()) if isinstance(g, Tensor) else ctypes.c_int32(g) for g in given]
        hidden = [ctypes.c_void_p(0)] * kernel["hidden_pointers"]
        with known_launch(kind, records[kernel["symbol"]], explained.module, given, kernel["grid"][0]):
            _launch((folder / f"{kernel['symbol']}.cubin").read_bytes(), kernel, [*words, *hidden])
    return outputs


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


_loaded: list[Any] = []
"""Images that modules were loaded from."""


def _launch(image: bytes, kernel: Any, arguments: Sequence[Any]) -> None:
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *given: Any) -> None:
        if code := getattr(driver, name)(*given):
            raise RuntimeError(f"{name} of {kernel['symbol']}: the driver's error {code}")

    buffer = ctypes.create_string_buffer(image, len(image))
    _loaded.append(buffer)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), buffer)
    call("cuModuleGetFunction", ctypes.byref(function), module, kernel["symbol"].encode())
    if kernel["shared_bytes"] > 48 << 10:
        call("cuFuncSetAttribute", function, 8, kernel["shared_bytes"])
    stream: Any = torch.cuda.current_stream()
    config = _Config(*kernel["grid"], *kernel["block"], kernel["shared_bytes"], stream.cuda_stream, None, 0)
    pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.cast(ctypes.byref(a), ctypes.c_void_p) for a in arguments])
    call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)


# ------------------------------------------------------------------ C++
RUN = """
import sys, torch
library, given, out = sys.argv[1:]
torch.ops.load_library(library)
args, cotangent = torch.load(given)
args = [a.requires_grad_() if torch.is_tensor(a) else a for a in args]
y = torch.ops.rms_norm.rms_norm(*args)
moving = [a for a in args if torch.is_tensor(a)]
torch.save([y.detach().cpu(), *(g.cpu() for g in torch.autograd.grad(y, moving, cotangent))], out)
"""


def cpp(kind: str, folder: Path) -> Found:
    """The C++ pair, built here and loaded by a process without fusegrad; on the CPU's tensors where there is no GPU."""
    fusegrad.export(*NORM[kind], path=folder / "rms_norm.cpp", target=target())
    _build(folder, "rms_norm")
    device = "cuda" if kind == "cuda" else "cpu"
    args = arguments(NORM[kind][1:], device)
    cotangent = torch.randn(args[0].shape, generator=torch.Generator().manual_seed(SEED)).to(device, args[0].dtype)
    torch.save(([a.detach() if isinstance(a, Tensor) else a for a in args], cotangent), folder / "given")
    names = [str(folder / name) for name in ("rms_norm.so", "given", "out")]
    done = run_python("-P", "-W", "ignore", "-c", RUN, *names, timeout=100)
    if done.returncode:
        yield f"the process ended with {done.returncode}: {done.stderr[-600:]}"
        return
    y = functions.RMSNorm.apply(*args)  # type: ignore[no-untyped-call]
    expected = [y, *torch.autograd.grad(y, [a for a in args if isinstance(a, Tensor)], cotangent)]
    yield from apart("C++", torch.load(folder / "out"), [t.cpu() for t in expected])


def _build(folder: Path, name: str) -> None:
    from torch.utils import cpp_extension

    inside = [word for path in cpp_extension.include_paths() for word in ("-isystem", path)]
    (library,) = cpp_extension.library_paths()[:1]
    links = [f"-L{library}", f"-Wl,-rpath,{library}", "-ltorch_cpu", "-ltorch", "-lc10", "-ldl"]
    command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", *inside, str(folder / f"{name}.cpp")]
    done = subprocess.run([*command, "-o", str(folder / f"{name}.so"), *links], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"g++: {done.stderr[-600:]}")


FORMS: dict[str, Callable[[str, Path], Found]] = {
    "module": module, "bundle": bundle, "binaries": binaries, "C++ pair": cpp,
}  # fmt: skip
