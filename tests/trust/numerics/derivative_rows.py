"""Derivatives where functions bend, jump or end: beside torch's own, sign of zero apart.

Of the primitives by the rules of `linearize`, of functions through kernels under the interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from accuracy import Errors, compared
from dense import everything, pairs, specials
from harness import Input, graph_of
from primitive_rows import body_of

import fusegrad
from fusegrad.ir.prims import BINARY, UNARY
from fusegrad.ir.transforms.linearize import jvp_rules, linearize
from fusegrad.runtime.execution.aten import reference
from fusegrad.runtime.functorch.batching.op_rules import OP_RULES

Tensor = torch.Tensor
F = torch.nn.functional
INF, NAN = math.inf, math.nan

SINGULAR: dict[str, tuple[Callable[..., Tensor], Sequence[Sequence[float]]]] = {
    "relu": (torch.relu, [[0.0, -0.0, 1.0, -1.0, NAN, INF, -INF]]),
    "relu6": (F.relu6, [[0.0, -0.0, 6.0, 7.0, 3.0, NAN]]),
    "leaky_relu": (F.leaky_relu, [[0.0, -0.0, 1.0, -1.0, NAN, -INF]]),
    "elu": (F.elu, [[0.0, -0.0, 1.0, -1.0, -100.0, 100.0, NAN, -INF]]),
    "clamp": (lambda x: torch.clamp(x, -1.0, 1.0), [[-1.0, 1.0, 0.0, 2.0, -2.0, NAN, INF]]),
    "clamp by tensors": (torch.clamp, [[-1.0, 1.0, 2.0, 0.5], [-1.0, 0.0, 0.0, 0.5], [1.0, 1.0, 1.0, 0.5]]),
    "hardtanh": (F.hardtanh, [[-1.0, 1.0, 0.0, 2.0, NAN]]),
    "where": (lambda x: torch.where(x > 0, torch.log(x), 0.0), [[1.0, 2.0, 3.0]]),
    "where, NaN aside": (lambda x: torch.where(x > 0, torch.sqrt(x), x), [[1.0, 4.0, -1.0, -2.0]]),
    "masked_fill": (lambda x: (1 / x).masked_fill(x == 0, 7.0), [[1.0, 2.0, -4.0]]),
    "amax, ties": (lambda x: x.amax(0), [[1.0, 3.0, 3.0, 2.0, 3.0]]),
    "amin, ties": (lambda x: x.amin(0), [[1.0, 3.0, 1.0]]),
    "max, ties": (lambda x: x.max(), [[1.0, 3.0, 3.0, 2.0]]),
    "max along": (lambda x: x.max(0).values, [[1.0, 3.0, 3.0, 2.0]]),
    "maximum, ties": (torch.maximum, [[1.0, 2.0, NAN, 0.0, -0.0, INF], [1.0, 1.0, 1.0, -0.0, 0.0, INF]]),
    "minimum, ties": (torch.minimum, [[1.0, 2.0, NAN, 0.0, -0.0, INF], [1.0, 1.0, 1.0, -0.0, 0.0, INF]]),
    "norm at zero": (lambda x: torch.linalg.vector_norm(x), [[0.0, 0.0, 0.0]]),
    "norm": (lambda x: torch.linalg.vector_norm(x), [[3.0, 0.0, -4.0]]),
    "1-norm": (lambda x: torch.linalg.vector_norm(x, 1), [[0.0, 2.0, -3.0]]),
    "inf-norm, ties": (lambda x: torch.linalg.vector_norm(x, INF), [[3.0, 0.0, -3.0]]),
    "inf-norm at zero": (lambda x: torch.linalg.vector_norm(x, INF), [[0.0, 0.0]]),
    "prod, one zero": (lambda x: x.prod(), [[2.0, 0.0, 3.0]]),
    "prod, two zeros": (lambda x: x.prod(), [[0.0, 0.0, 3.0]]),
    "xlogy": (torch.xlogy, [[0.0, 0.0, 1.0, 0.0, 2.0], [0.0, 1.0, 2.0, NAN, 0.5]]),
    "pow": (torch.pow, [[0.0, 0.0, 0.0, 2.0, -2.0, -2.0, 1.0, INF], [0.0, 1.0, 2.0, 0.0, 2.0, 3.0, 5.0, 0.0]]),
    "pow 0": (lambda x: x**0, [[0.0, 1.0, -1.0, INF, NAN]]),
    "pow 0.5": (lambda x: x**0.5, [[0.0, 1.0, 4.0, INF]]),
    "pow 2": (lambda x: x**2, [[0.0, 1.0, -3.0, INF]]),
    "pow 3": (lambda x: x**3, [[0.0, 1.0, -3.0]]),
    "pow -1": (lambda x: x**-1, [[0.0, 1.0, -3.0, INF]]),
    "2 ** x": (lambda x: 2.0**x, [[0.0, 1.0, -3.0]]),
    "0 ** x": (lambda x: 0.0**x, [[0.0, 1.0, 3.0]]),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.5), [[1.0, 2.0, INF], [3.0, 2.0, 1.0]]),
    "logsumexp": (lambda x: torch.logsumexp(x, 0), [[-INF, 0.0, 1.0]]),
    "softmax": (lambda x: torch.softmax(x, 0), [[-INF, 0.0, 1.0]]),
    "softmax of nothing": (lambda x: torch.softmax(x, 0), [[-INF, -INF]]),
    "log_softmax": (lambda x: torch.log_softmax(x, 0), [[-INF, 0.0, 1.0]]),
    "logaddexp": (torch.logaddexp, [[0.0, -100.0, 5.0, 80.0], [0.0, 100.0, 5.0, -80.0]]),
    "softplus": (F.softplus, [[0.0, 20.0, 21.0, -100.0, NAN]]),
    "logsigmoid": (F.logsigmoid, [[0.0, 100.0, -100.0, 20.0]]),
    "gelu": (F.gelu, [[0.0, -0.0, 10.0, -10.0, NAN]]),
    "silu": (F.silu, [[0.0, -0.0, 100.0, -100.0, NAN]]),
    "frac": (torch.frac, [[0.0, 1.5, -1.5, 2.0]]),
    "round": (torch.round, [[0.5, 1.5, -2.5]]),
    "remainder": (lambda x: torch.remainder(x, 1.5), [[0.0, 3.0, -3.0, 4.0]]),
    "hypot": (torch.hypot, [[3.0, 0.0, 1e-30, 1e30], [4.0, 2.0, 1e-30, 1e30]]),
    "atan2": (torch.atan2, [[0.0, 1.0, -1.0, 0.0, -0.0], [1.0, 0.0, 0.0, -1.0, -1.0]]),
    "sqrt at zero": (torch.sqrt, [[0.0, 4.0, INF]]),
    "abs": (torch.abs, [[0.0, -0.0, 1.0, -1.0, INF, NAN]]),
    "copysign": (torch.copysign, [[0.0, 1.0, -1.0, 2.0], [1.0, -1.0, 1.0, -0.0]]),
    "var": (lambda x: x.var(), [[1.0, 1.0, 1.0]]),
    "std of equals": (lambda x: x.std(), [[1.0, 1.0, 1.0]]),
    "cumsum": (lambda x: x.cumsum(0), [[1.0, INF, 1.0]]),
}  # fmt: skip
"""What is differentiated, and where."""


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(21))


VALUES: dict[str, tuple[Callable[..., Any], Callable[[], Sequence[Tensor]]]] = {
    "var of a large mean": (lambda x: x.var(1), lambda: [_noise(6, 900) + 1e4]),
    "std_mean of a large mean": (lambda x: torch.stack(torch.std_mean(x, 1)), lambda: [_noise(6, 900) * 1e-2 + 100]),
    "layer_norm of a large mean": (lambda x: F.layer_norm(x, (900,)), lambda: [_noise(6, 900) + 1e3]),
    "var of one": (lambda x: x.var(1), lambda: [_noise(6, 1)]),
    "mean of none": (lambda x: x.mean(1), lambda: [_noise(3, 0)]),
    "logsumexp of -inf": (lambda x: torch.logsumexp(x, 1), lambda: [torch.tensor([[-INF] * 3, [INF, 0.0, 1.0]])]),
    "logsumexp far out": (lambda x: torch.logsumexp(x, 1), lambda: [_noise(6, 50) * 1e4]),
    "softmax of -inf": (lambda x: torch.softmax(x, 1), lambda: [torch.tensor([[-INF] * 3, [-INF, 0.0, 1.0]])]),
    "softmax with inf": (lambda x: torch.softmax(x, 1), lambda: [torch.tensor([[INF, 0.0], [NAN, 0.0]])]),
    "log_softmax": (lambda x: torch.log_softmax(x, 1), lambda: [torch.cat([_noise(4, 50) * 30, _noise(4, 50) / 9])]),
    "cumsum of 100000": (lambda x: x.cumsum(1), lambda: [_noise(1, 100_000).abs()]),
    "cumprod": (lambda x: x.cumprod(1), lambda: [1 + _noise(6, 200) / 50]),
    "logcumsumexp": (lambda x: torch.logcumsumexp(x, 1), lambda: [_noise(6, 200) * 9]),
    "norm that overflows": (lambda x: torch.linalg.vector_norm(x, dim=1), lambda: [_noise(6, 50) * 1e30]),
    "argmax of ties and NaN": (
        lambda x: x.argmax(1), lambda: [torch.tensor([[1.0, 3.0, 3.0], [NAN, 5.0, NAN], [-INF] * 3])],
    ),
    "argmin of ties and NaN": (
        lambda x: x.argmin(1), lambda: [torch.tensor([[3.0, 1.0, 1.0], [5.0, NAN, 1.0], [INF] * 3])],
    ),
    "sort of NaN": (
        lambda x: torch.sort(x, dim=1, stable=True).values, lambda: [torch.tensor([[1.0, NAN, -INF, 1.0, -0.0, 0.0]])],
    ),
    "complex abs and quotient": (
        lambda x, y: torch.view_as_real(torch.complex(x, y) / torch.complex(y, x)),
        lambda: [torch.tensor([1e30, 1.0, 0.0, INF]), torch.tensor([1e30, 2.0, 0.0, 1.0])],
    ),
    "frexp": (lambda x: torch.frexp(x).mantissa, lambda: [everything(torch.float32, 1 << 8)]),
    "ldexp": (lambda x: torch.ldexp(x, torch.full_like(x, 3, dtype=torch.int32)), lambda: [_noise(99)]),
    "nextafter": (torch.nextafter, lambda: pairs(torch.float32, 1 << 8)),
    "lerp at a half": (lambda x, y: torch.lerp(x, y, 0.5), lambda: pairs(torch.float32, 1 << 8)),
    "lerp below a half": (lambda x, y: torch.lerp(x, y, 0.25), lambda: pairs(torch.float32, 1 << 8)),
}  # fmt: skip
"""What functions of several operations are, where it is hard to be right."""


def forward(name: str) -> Errors:
    """A function compiled, as kernels under the interpreter and calls between them, and torch's own."""
    function, values = VALUES[name]
    fast = fusegrad.compile(lambda *xs: function(*xs), backend="interpret", fullgraph=True)
    found, eager, exact = (
        _flat(f(*[v.to(t) for v in values()]))
        for f, t in ((fast, torch.float32), (function, torch.float32), (function, torch.float64))
    )
    truth = exact.double().numpy() if eager.is_floating_point() else eager.double().numpy()
    return compared(found, eager, truth, local=False)


def _flat(result: Any) -> Tensor:
    each = result if isinstance(result, (tuple, list)) else [result]
    return torch.cat([r.reshape(-1) for r in each])


def of_primitives() -> list[str]:
    """The elementwise primitives of floats with a derivative, which torch has under some name."""
    return [n for n in (*UNARY, *BINARY) if n in jvp_rules and n in reference.UNARY | reference.BINARY]


def singular(name: str) -> Errors:
    function, values = SINGULAR[name]
    return differentiated(function, [torch.tensor(v) for v in values])


def primitive(name: str) -> Errors:
    """The rule of a primitive at what is special, and in between: the tangent of each operand by itself."""
    x, y = pairs(torch.float32, 1 << 10)
    if name in UNARY:
        x = torch.cat([torch.tensor(specials(torch.float32)), everything(torch.float32, 1 << 10)])
    values = [x] if name in UNARY else [x, y]
    function = (reference.UNARY | reference.BINARY)[name]
    found = torch.cat([_by_rule(name, values, i) for i in range(len(values))])
    eager, exact = (_gradients(function, [v.to(t) for v in values], 1.0) for t in (torch.float32, torch.float64))
    shown = (x,) if name in UNARY else (torch.cat([x, x]), torch.cat([y, y]))
    return compared(found + 0.0, eager + 0.0, exact.numpy(), shown)


def _by_rule(name: str, values: Sequence[Tensor], wrt: int) -> Tensor:
    graph = graph_of(body_of(name), **{f"x{i}": Input("f32", tuple(v.shape)) for i, v in enumerate(values)})
    (tangent,) = reference.run(linearize(graph, (wrt,), OP_RULES), [*values, torch.ones_like(values[wrt])], {})
    return torch.zeros_like(values[wrt]) if tangent is None else tangent


def differentiated(function: Callable[..., Any], values: Sequence[Tensor]) -> Errors:
    """The gradients of a plain function compiled, and torch's; zeros may differ in sign, as torch adds them."""
    fast = fusegrad.compile(lambda *xs: function(*xs), backend="interpret", fullgraph=True)
    found, eager, exact = (
        _gradients(f, [v.to(t) for v in values])
        for f, t in ((fast, torch.float32), (function, torch.float32), (function, torch.float64))
    )
    truth = exact.double().numpy()
    largest = np.full(truth.shape, np.abs(truth[np.isfinite(truth)]).max(initial=0.0))
    return compared(found + 0.0, eager + 0.0, truth, (torch.cat(list(values)),), local=False, size=largest)


def _gradients(function: Callable[..., Any], values: Sequence[Tensor], first: float = 0.5) -> Tensor:
    leaves = [v.clone().requires_grad_() for v in values]
    result = function(*leaves)
    weights = torch.linspace(first, 2 - first, result.numel()).reshape(result.shape).to(result.dtype)
    found = torch.autograd.grad(result, leaves, weights, allow_unused=True)
    flat = [torch.zeros_like(v) if g is None else g for g, v in zip(found, leaves, strict=True)]
    return torch.cat([g.reshape(-1) for g in flat])
