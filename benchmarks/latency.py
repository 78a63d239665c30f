"""The first call: in a fresh process after its imports, with empty and with filled disk caches; and new batch sizes.

A filled cache holds what another process left: captures with their kernels, and what Triton compiled of them.
Without a GPU a launch stands for what it costs before it can start: the kernel's text is loaded as at any launch and
Triton compiles it for `TARGET`, or finds it in its own disk cache; loading the binary into a device is not part of it.

    python -m fusegrad.benchmarks.latency PROBE FUNCTION       one measurement, in this process, as a line of JSON
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

FUNCTIONS = ("SwiGLU", "RMSNorm", "Softmax")
SHAPE = "4096,4096"
TARGET = "cuda:90"
BATCHES = 100
REPEATS = {"triton": 2}
"""Fresh processes of which the quickest counts: another process on the machine only ever adds time."""
TIMEOUT = 600
CACHES = ("FUSEGRAD_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


# ------------------------------------------------------------------ from outside
def latency(function: str) -> dict[str, Any]:
    """Every probe of a Function, each in fresh processes."""
    found = {peer: _quickest(peer, function) for peer in ("triton", "reference", "compile")}
    with tempfile.TemporaryDirectory(prefix="fusegrad-") as caches:
        return {"function": function, **found, "batches": _probe("batches", function, caches)}


def _quickest(peer: str, function: str) -> dict[str, Any]:
    found = [_cold_and_warm(peer, function) for _ in range(REPEATS.get(peer, 1))]
    return {s: min((f[s] for f in found), key=lambda t: t.get("forward", float("inf"))) for s in ("cold", "warm")}


def _cold_and_warm(peer: str, function: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fusegrad-") as caches:
        return {state: _probe(peer, function, caches) for state in ("cold", "warm")}


def _probe(probe: str, function: str, caches: str) -> dict[str, Any]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FUSEGRAD_", "TRITON_", "TORCHINDUCTOR_"))}
    environment = {**kept, **{name: os.path.join(caches, name.lower()) for name in CACHES}, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, probe, function]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment)
    if done.returncode:
        return {"error": done.stderr.strip().rpartition("\n")[2][:300]}
    return dict(json.loads(done.stdout.strip().rpartition("\n")[2]))


# ------------------------------------------------------------------ inside
def first_call(peer: str, name: str) -> dict[str, float]:
    """Milliseconds of the first forward and backward (and on the processor), and of the second ones; what was made."""
    import fusegrad

    with compiling_launches() if peer == "triton" else _nothing():
        apply = _compiled(peer, name)
        args = _arguments(name, 64 if peer != "triton" else None)
        first, second = _timed(apply, args), _timed(apply, args)
    made = {name: fusegrad.stats()[name] for name in ("captures", "from_disk")}
    times = {"forward": first[0], "backward": first[1], "processor": first[2], "processor_backward": first[3]}
    return {**times, "again": sum(second[:2]), **made}


def new_batches(name: str) -> dict[str, float]:
    """Forward and backward at `BATCHES` other batch sizes: compilations, captures, milliseconds for each."""
    import fusegrad

    with compiling_launches() as compiled:
        apply = _compiled("triton", name)
        _timed(apply, _arguments(name, None))
        before, kernels = fusegrad.stats(), len(compiled)
        start = time.perf_counter()
        for batch in range(BATCHES):
            _timed(apply, _arguments(name, 512 + 37 * batch))
        each = (time.perf_counter() - start) / BATCHES * 1e3
    after = fusegrad.stats()
    return {
        **{name: after[name] - before[name] for name in ("compiles", "captures")},
        "kernels": len(compiled) - kernels,
        "first": kernels,
        "milliseconds": each,
    }


def _compiled(peer: str, name: str) -> Callable[..., Any]:
    import torch

    import fusegrad

    from . import functions

    function = getattr(functions, name)
    if peer == "compile":
        return torch.compile(function.apply)
    return fusegrad.compile(function, backend=peer).apply  # type: ignore[attr-defined,no-any-return]


def _arguments(name: str, rows: int | None) -> list[Any]:
    """Tensors of the case at `SHAPE` whose memory nothing has touched; with another number of rows if one is given."""
    import torch

    from fusegrad.runtime.values.tensor_specs import is_spec, parse_spec

    from .suite import CASES

    case = next(c for c in CASES if c.function.__name__ == name and c.shape == SHAPE)
    specs = [parse_spec(a) if is_spec(a) else a for a in case.args]
    return [_empty(torch, *s, rows) if isinstance(s, tuple) else s for s in specs]


def _empty(torch: Any, dtype: Any, shape: tuple[int, ...], rows: int | None) -> Any:
    taller = (rows or shape[0], *shape[1:]) if len(shape) > 1 else shape
    return torch.empty(taller, dtype=dtype).requires_grad_()


def _timed(apply: Callable[..., Any], args: Sequence[Any]) -> tuple[float, float, float, float]:
    """Milliseconds of forward, of backward, and of both on the processor: what a busy machine does not add to."""
    import torch

    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    busy, start = _processor_time(), time.perf_counter()
    result = apply(*args)
    middle, busy = time.perf_counter(), _processor_time() - busy
    gradient = torch.empty_like(result)
    resumed, again = time.perf_counter(), _processor_time()
    torch.autograd.grad(result, wanted, gradient)
    backward, again = time.perf_counter() - resumed, _processor_time() - again
    return (middle - start) * 1e3, backward * 1e3, busy * 1e3, again * 1e3


def _processor_time() -> float:
    """Seconds of this process and of those that it started and waited for: assemblers."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@contextmanager
def compiling_launches() -> Iterator[list[str]]:
    """`backend="triton"` takes CPU tensors; a launch compiles its kernel once and runs nothing. Yields what was."""
    from fusegrad.codegen import TARGETS
    from fusegrad.runtime.execution import targets
    from fusegrad.runtime.kernels import launch
    from fusegrad.runtime.settings import config

    done: list[str] = []

    def launcher(kernel: Any, text: str, backend: str, device: Any = None) -> Any:
        def run(arguments: Sequence[Any], grid: int) -> None:
            if kernel not in kept:
                kept.append(kernel)
                done.append(kernel.name)
                _compile(kernel, text)

        kept: list[Any] = []
        return run

    with (
        mock.patch.object(launch, "launcher", launcher),
        mock.patch.object(targets, "target_for", lambda backend, device: TARGETS[TARGET]),
        config.patch(check=False),  # there is nothing to compare
    ):
        yield done


def _compile(kernel: Any, text: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fusegrad.codegen.kernel import Pointer
    from fusegrad.runtime.kernels.triton_module import TRITON_DTYPE, jit_function

    scalars = tuple(a.name for a in kernel.arguments if not isinstance(a, Pointer))
    function = jit_function(text, kernel.name, scalars)
    types = {a.name: "*" + TRITON_DTYPE[a.dtype] if isinstance(a, Pointer) else "i32" for a in kernel.arguments}
    positions = {name: (i,) for i, name in enumerate(function.arg_names)}
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "constexpr") for name in positions},
        constexprs={positions[name]: value for name, value in kernel.constants.items()},
        attrs={positions[name]: [["tt.divisibility", 16]] for name, type in types.items() if type.startswith("*")},
    )
    options = kernel.options("cuda")
    return triton.compile(source, target=GPUTarget("cuda", int(TARGET[5:]), 32), options=options)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("probe", choices=("triton", "reference", "compile", "batches"))
    parser.add_argument("function")
    options = parser.parse_args()
    import torch
    import triton.compiler  # noqa: F401

    import fusegrad  # noqa: F401

    torch.set_num_threads(1)
    found = new_batches(options.function) if options.probe == "batches" else first_call(options.probe, options.function)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
