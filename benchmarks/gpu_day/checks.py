"""Right or not: Functions at real sizes on the device, forward and backward, beside eager and float64."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import fusegrad
from fusegrad.examples.gallery.catalogue import CATALOGUE

from ..correctness import faults, results
from ..gpu import poisoned
from ..inputs import as_list, cotangents, differentiable, real, reduced
from ..stream_functions import STREAMS
from ..suite import CASES, Case

SEEDS = (11, 12)
BATCHES = {"cuda": 512, "pretended": 2}
"""How many times a Function of the gallery gets its sample batch."""
COUNTING = 100.0
"""Seconds after which no further case is begun under the sanitizer, in which everything takes its time."""
THROUGH_TORCH = "FG105"
NO_KERNELS = ("gradient_reversal", "soft_rank", "soft_sort")
"""Of the gallery: a backward of one operation of torch's, or library calls alone."""


def case_named(name: str, kind: str) -> Case:
    """A case of the suite, or of what multiplies matrices, small where the device is pretended."""
    case = STREAMS[name][1] if name in STREAMS else next(c for c in CASES if c.name == name)
    return case if kind == "cuda" else reduced(case)


# ------------------------------------------------------------------ units
def suite(unit: str, kind: str) -> dict[str, Any]:
    """A case: two draws of its inputs, memory poisoned before each."""
    case = case_named(unit, kind)
    fast: Any = fusegrad.compile(case.function, backend="triton", fullgraph=True)
    found: list[str] = []
    for seed in SEEDS:
        more, equal = beside_eager(fast, case.function, real(case, seed, "cuda"), seed)
        found += more
    return {"faults": [*found, *through_torch(fast)], "equal": equal}


def gallery(unit: str, kind: str) -> dict[str, Any]:
    """A Function of the gallery over its sample batch many times, and its second derivative at the sample."""
    entry = next(e for e in CATALOGUE if e.name == unit)
    fast: Any = fusegrad.compile(entry.written, backend="triton")
    found, equal = beside_eager(fast, entry.written, large(entry, BATCHES[kind]), SEEDS[0])
    found += second_derivative(fast, entry.written, on_device(entry.arguments(torch.float64)))
    return {"faults": [*found, *(() if unit in NO_KERNELS else through_torch(fast))], "equal": equal}


# ------------------------------------------------------------------ arguments
def on_device(values: Sequence[Any]) -> list[Any]:
    """Tensors as leaves on the device."""
    return [
        v.detach().to("cuda").requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in values
    ]


def large(entry: Any, times: int) -> list[Any]:
    """The entry's arguments with so many times the batch."""
    single = {*entry.weights, *entry.shared}

    def repeated(at: int, value: Any) -> Any:
        if at in single or not isinstance(value, Tensor):
            return value
        whole = value.detach().repeat(times, *[1] * (value.dim() - 1))
        return whole.requires_grad_(value.requires_grad)

    return on_device([repeated(at, value) for at, value in enumerate(entry.arguments())])


# ------------------------------------------------------------------ comparisons
def beside_eager(fast: Any, written: Any, args: Sequence[Any], seed: int) -> tuple[list[str], list[float]]:
    """What is wrong, and of every output and gradient the share that equals eager's bit for bit."""
    with poisoned("cuda", 4 * sum(a.nbytes for a in args if isinstance(a, Tensor)), fill=True):
        ours = results(fast.apply, args, seed)
    eager = results(written.apply, args, seed)
    equal = [_equal(a, b) for a, b in zip(ours, eager, strict=True) if a is not None and b is not None]
    if all(share == 1.0 for share in equal) and len(equal) == len(ours):
        return [], equal
    return faults(ours, eager, _judge(written, args, eager, seed)), equal


def _equal(ours: Tensor, eager: Tensor) -> float:
    """1.0 for all elements alone: what is equal is not judged."""
    if (ours.shape, ours.dtype) != (eager.shape, eager.dtype) or not ours.numel():
        return float(ours.shape == eager.shape and ours.dtype == eager.dtype)
    if ours.is_floating_point() and ours.dtype.itemsize == 1:  # no GPU compares these
        ours, eager = ours.float(), eager.float()
    same = (ours == eager) | ((ours != ours) & (eager != eager))
    return int(same.sum()) / same.numel()


def _judge(written: Any, args: Sequence[Any], eager: Sequence[Tensor | None], seed: int) -> Sequence[Tensor | None]:
    """The same in float64; eager itself where that has no room, or the class takes no float64."""
    try:
        return results(written.apply, args, seed, wide=True)
    except (torch.OutOfMemoryError, TypeError, ValueError, RuntimeError):
        torch.cuda.synchronize()  # an error of the device is none of these
        return [t if t is None else t.double() for t in eager]


def second_derivative(fast: Any, written: Any, args: Sequence[Any]) -> Iterator[str]:
    """The gradient of the squares of the gradients; what eager cannot differentiate is not asked for."""
    try:
        expected = _second(written, args)
    except (RuntimeError, NotImplementedError):
        return
    for at, (a, b) in enumerate(zip(_second(fast, args), expected, strict=True)):
        if (a is None) != (b is None):
            yield f"second derivative {at}: {'nothing' if a is None else 'a tensor'}, eager has the other"
        elif a is not None and not torch.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True):  # type: ignore[arg-type]
            yield f"second derivative {at}: off by {(a - b).abs().max().item():.3g}"  # type: ignore[operator]


def _second(function: Any, args: Sequence[Any]) -> Sequence[Tensor | None]:
    ends, leaves = differentiable(as_list(function.apply(*args))), differentiable(args)
    first = torch.autograd.grad(ends, leaves, cotangents(ends, SEEDS[0]), create_graph=True, allow_unused=True)
    squares = [g.square().sum() for g in first if g is not None and g.requires_grad]
    if not squares:
        return (None,) * len(leaves)
    return torch.autograd.grad(sum(squares), leaves, allow_unused=True)  # type: ignore[arg-type]


def through_torch(fast: Any) -> Iterator[str]:
    """Methods that did not run as kernels: on a GPU that is a fault, however right the values are."""
    for name, record in fast._fusegrad.ledger.records.items():
        if record.status == "opaque" or THROUGH_TORCH in str(getattr(record, "code", "")):
            yield f"{name} did not run as kernels: {record.status}: {record.reason}"


# ------------------------------------------------------------------ arrival counters
def counting(unit: str, kind: str) -> dict[str, Any]:
    """The kernels with arrival counters, several times each, at a size at which the sanitizer ends: memcheck, say."""
    began, wrong, done = time.monotonic(), [], []
    for case in (c for c in CASES if c.shape == "512,1024" and has_counters(c)):
        wrong += [f"{case.name}: {fault}" for fault in suite(case.name, kind)["faults"]]
        done.append(case.name)
        if time.monotonic() - began > COUNTING or (kind == "pretended" and len(done) == 2):
            break
    return {"faults": wrong, "cases": done}


def has_counters(case: Case) -> bool:
    """Whether a kernel of the case counts the programs that arrive."""
    records = fusegrad.explain(case.function, *case.args).kernel_records
    return any(buffer.zeroed for kernel in records for buffer in kernel.scratch)
