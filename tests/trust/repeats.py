"""The same inputs give the same bits: over repeats, other calls in between, threads, recycled memory and processes.

    python tests/trust/repeats.py [REPEATS] [--json PATH]     prints digests of the results and of the emitted text
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import outcome
import torch
from torch.autograd import Function

import fusegrad
from fusegrad.codegen import Kernels
from fusegrad.runtime.execution import graph_to_kernels as pipeline

Tensor = torch.Tensor
FACTORS = ("gate", "value", "shift")


class Normed(Function):
    """Rows are reduced, forward and backward; a weight's gradient is a sum over all rows."""

    @staticmethod
    def forward(ctx, x, w, eps=1e-6):
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, w, scale)
        return x * scale * w

    @staticmethod
    def backward(ctx, g):
        x, w, scale = ctx.saved_tensors
        normed = x * scale
        gw = g * w
        return (gw - normed * (gw * normed).mean(-1, keepdim=True)) * scale, (g * normed).sum(0), None


class Picked(Function):
    """An embedding: its backward adds rows to one place."""

    @staticmethod
    def forward(ctx, table, ids):
        ctx.save_for_backward(ids)
        ctx.rows = table.shape[0]
        return table[ids] * 2

    @staticmethod
    def backward(ctx, g):
        (ids,) = ctx.saved_tensors
        return g.new_zeros(ctx.rows, g.shape[-1]).index_put((ids,), g * 2, accumulate=True), None


class Parts(Function):
    """Values in a dict, and sums that run along an axis."""

    @staticmethod
    def forward(ctx, x):
        parts = {name: x * len(name) for name in FACTORS}
        ctx.save_for_backward(x)
        return parts["gate"] + parts["value"], parts["shift"].cumsum(-1)

    @staticmethod
    def backward(ctx, a, b):
        (x,) = ctx.saved_tensors
        return a * x + b.flip(-1).cumsum(-1).flip(-1)


def arguments(cls: type) -> list[Any]:
    numbers = torch.Generator().manual_seed(3)
    x = torch.randn(37, 65, generator=numbers).requires_grad_()
    more = {
        Normed: [torch.randn(65, generator=numbers).requires_grad_()],
        Picked: [torch.randint(0, 37, (200,), generator=numbers)],
    }
    return [x, *more.get(cls, [])]


CLASSES = (Normed, Picked, Parts)


def results(apply: Callable[..., Any], cls: type) -> list[Tensor]:
    """What a call gives, forward and backward."""
    args = arguments(cls)
    outputs = apply(*args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [a for a in args if a.requires_grad]
    given = [torch.arange(o.numel()).reshape(o.shape).to(o.dtype).cos() for o in outputs]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, wanted, given)]


def digest(tensors: Sequence[Tensor]) -> str:
    """Of all bits."""
    found = hashlib.sha256()
    for t in tensors:
        found.update(f"{t.dtype} {tuple(t.shape)} {t.stride()}".encode() + t.contiguous().numpy().tobytes())
    return found.hexdigest()


@contextmanager
def emitted() -> Iterator[list[Kernels]]:
    """All kernels that are generated within the block."""
    found: list[Kernels] = []
    plain = pipeline.kernels_of

    def kept(*args: Any, **options: Any) -> Kernels:
        found.append(plain(*args, **options))
        return found[-1]

    with mock.patch.object(pipeline, "kernels_of", kept):
        yield found


def everything(backend: str) -> dict[str, str]:
    """Digests of results and of text, by class."""
    found = {}
    for cls in CLASSES:
        fast: Any = fusegrad.compile(cls, backend=backend)
        with emitted() as kernels:
            found[cls.__name__] = digest(results(fast.apply, cls))
        text = "".join(pipeline.text_of(k) for k in kernels)
        assert text, "nothing was generated"
        found[f"{cls.__name__}, text"] = hashlib.sha256(text.encode()).hexdigest()
    return found


def again(repeats: int, backend: str) -> int:
    """How many of the repeats gave other bits than the first call, with other calls and memory in between."""
    fast: dict[type, Any] = {cls: fusegrad.compile(cls, backend=backend) for cls in CLASSES}
    first = {cls: digest(results(fast[cls].apply, cls)) for cls in CLASSES}
    different, kept = 0, []
    for number in range(repeats):
        cls = CLASSES[number % len(CLASSES)]
        kept.append(torch.empty(number % 4099 + 1).fill_(float("nan")))
        if number % 7 == 0:
            kept.clear()
        if number % 97 == 0:
            gc.collect()
            fast[Normed].apply(torch.ones(number % 5 + 1, 65), torch.ones(65))
        different += digest(results(fast[cls].apply, cls)) != first[cls]
    return different


def in_threads(count: int, repeats: int, backend: str) -> set[str]:
    """The digests that some threads get of one class."""
    fast: Any = fusegrad.compile(Normed, backend=backend)
    found: set[str] = set()

    def work() -> None:
        for _ in range(repeats):
            found.add(digest(results(fast.apply, Normed)))

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def of_a_process(seed: int, backend: str) -> dict[str, str]:
    """`everything` of a new process with this hash seed."""
    code = (
        f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import repeats\n"
        f"print(json.dumps(repeats.everything({backend!r})))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "FUSEGRAD_STORE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repeats", type=int, nargs="?", default=1000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--json")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    processes = [of_a_process(seed, "interpret") for seed in range(asked.processes)]
    found = {
        "repeats": asked.repeats,
        "different on reference": again(asked.repeats, "reference"),
        "different on interpret": again(asked.repeats, "interpret"),
        "digests in 8 threads": len(in_threads(8, 20, "reference")),
        "processes": asked.processes,
        "digests of results and text in processes": len({json.dumps(p, sort_keys=True) for p in processes}),
    }
    print(json.dumps(found, indent=1))
    if asked.json:
        Path(asked.json).parent.mkdir(parents=True, exist_ok=True)
        Path(asked.json).write_text(json.dumps(outcome.surroundings() | found, indent=1) + "\n")
    wrong = [v for k, v in found.items() if k.startswith("different")]
    return 2 if any(wrong) or found["digests in 8 threads"] != 1 or len({*map(str, processes)}) != 1 else 0


if __name__ == "__main__":
    sys.exit(main())
