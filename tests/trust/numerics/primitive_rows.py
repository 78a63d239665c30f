"""Every primitive that codegen emits, in every dtype, under Triton's interpreter: beside torch, and the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accuracy import Errors, compared
from dense import everything, integer_pairs, integers, pairs
from harness import INTERPRET, Input, T, graph_of, run

from fusegrad.codegen import Target, generate, module
from fusegrad.codegen.emit.mathematics import rules
from fusegrad.ir import emit, evaluate
from fusegrad.ir.prims import PRIMS, UNARY
from fusegrad.runtime.execution.aten import reference
from fusegrad.tracer.dtypes import TO_TORCH

Tensor = torch.Tensor
FLOATS = ("f16", "bf16", "f32", "f64")
WHOLE = ("b1", "u8", "i8", "i16", "i32", "i64")
ON_BITS = ("and", "or", "xor", "shl", "shr", "not")
ON_FLOATS_ALONE = frozenset(
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "sigmoid erf lgamma reciprocal div atan2 hypot isnan isinf signbit".split()
)
"""Primitives that ATen's rules emit on floats alone: integers are converted before."""
NOT_ON_BOOLEANS = frozenset("neg sub rem fmod floordiv pow sign shl shr abs floor ceil round trunc".split())
DIVISIONS = ("rem", "fmod", "floordiv")


def elementwise() -> list[str]:
    """The names of all elementwise primitives that compute and have a rule, `cast` aside: an index is only checked."""
    return [n for n, p in PRIMS.items() if p.family == "elementwise" and n in rules and n != "check_index"]


def dtypes_of(name: str) -> tuple[str, ...]:
    if name in ON_BITS:
        return WHOLE[:1] * (name not in ("shl", "shr")) + WHOLE[1:]
    if name in ON_FLOATS_ALONE:
        return FLOATS
    return (*FLOATS, *(d for d in WHOLE if d != "b1" or name not in NOT_ON_BOOLEANS))


def body_of(name: str) -> Callable[..., Any]:
    return lambda *xs: T(emit(name, *(x.v for x in xs)))


def interpreted(body: Callable[..., Any], inputs: Sequence[Tensor], target: Target = INTERPRET) -> Tensor:
    """What the kernel of a body makes of these inputs."""
    names = {v: k for k, v in TO_TORCH.items()}
    given = {f"x{i}": Input(names[x.dtype], tuple(x.shape)) for i, x in enumerate(inputs)}
    graph = graph_of(body, **given)
    kernels = generate(graph, target=target, hints={}, name="body")
    (result,) = run(kernels, module(kernels.kernels), graph, list(inputs), {})
    return result


def through_torch(body: Callable[..., Any], inputs: Sequence[Tensor]) -> Tensor:
    names = {v: k for k, v in TO_TORCH.items()}
    graph = graph_of(body, **{f"x{i}": Input(names[x.dtype], tuple(x.shape)) for i, x in enumerate(inputs)})
    (result,) = reference.run(graph, list(inputs), {})
    assert result is not None
    return result


def truth(name: str, inputs: Sequence[Tensor]) -> np.ndarray:
    """In float64, and of float64 in what the machine has beyond it; functions that numpy lacks in float64."""
    wide = np.longdouble if inputs[0].dtype == torch.float64 else np.float64
    arrays = [x.double().numpy().astype(wide) for x in inputs]
    function = (evaluate.UNARY | evaluate.BINARY)[name]
    with np.errstate(all="ignore"):
        try:
            return np.asarray(function(*arrays)).astype(wide)
        except (ValueError, OverflowError):
            return through_torch(body_of(name), [x.double() for x in inputs]).numpy().astype(wide)


def operands(name: str, dtype: str, count: int) -> tuple[Tensor, ...]:
    kind = TO_TORCH[dtype]
    if name == "where":
        x, y = pairs(kind, count) if dtype in FLOATS else integer_pairs(kind, count)
        return (torch.arange(x.numel()) % 3 == 0, x, y)
    if name in UNARY:
        return (everything(kind, count) if dtype in FLOATS else integers(kind, count),)
    x, y = pairs(kind, count) if dtype in FLOATS else integer_pairs(kind, count)
    if dtype in FLOATS or name not in DIVISIONS:
        return (x, y)
    kept = (y != 0) & ~((x == torch.iinfo(kind).min) & (y.to(torch.int64) == -1))  # both end the process or raise
    return (x[kept], y[kept])


def measured(name: str, dtype: str, count: int = 1 << 14) -> Errors:
    """One elementwise primitive in one dtype, on dense operands."""
    inputs = operands(name, dtype, count)
    eager, found = through_torch(body_of(name), inputs), interpreted(body_of(name), inputs)
    exact = eager.is_floating_point() and name != "where"
    reference_ = truth(name, inputs) if exact else eager.double().numpy()
    return compared(found, eager, reference_, inputs, local=True)


def casts(source: str, count: int = 1 << 14) -> Iterator[tuple[str, Errors]]:
    """To every other dtype; floats that an integer cannot hold are torch's to choose, and are left out."""
    kind = TO_TORCH[source]
    whole = everything(kind, count) if source in FLOATS else integers(kind, count)
    for target in (*FLOATS, *WHOLE):
        if target == source:
            continue
        x = whole[_fits(whole, TO_TORCH[target])] if source in FLOATS and target in WHOLE[1:] else whole
        body = lambda v, t=target: T(emit("cast", v.v, dtype=t))  # noqa: E731
        eager, found = x.to(TO_TORCH[target]), interpreted(body, (x,))
        yield target, compared(found, eager, eager.double().numpy(), (x,), local=True)


def _fits(x: Tensor, kind: torch.dtype) -> Tensor:
    limits, wide = torch.iinfo(kind), x.double()
    return (wide.trunc() >= limits.min) & (wide.trunc() <= min(limits.max, 2**62)) & wide.isfinite()
