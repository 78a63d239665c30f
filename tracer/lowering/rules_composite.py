"""Ops written as formulas in torch, lowered op by op; and which of torch's own decompositions are used beside them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._ops import OpOverload

from ..sizes import hint_of
from .rules import LOW_TORCH, axes_of, composite, in_float32, overloads

_SQRT_HALF = math.sqrt(0.5)
_TANH_SCALE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715


def _wide(x: Any) -> Any:
    return x.float() if x is not None and x.dtype in LOW_TORCH else x


def _tanh_inner(x: Any) -> Any:
    return _TANH_SCALE * (x + _TANH_CUBE * (x * x * x))


def _gelu(x: Any, *, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(_tanh_inner(x)))
    return x * 0.5 * (1 + torch.erf(x * _SQRT_HALF))


def _gelu_backward(g: Any, x: Any, *, approximate: str = "none") -> Any:
    if approximate == "tanh":
        t = torch.tanh(_tanh_inner(x))
        return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (_TANH_SCALE * (1 + 3 * _TANH_CUBE * (x * x))))
    density = torch.exp(-0.5 * (x * x)) * (1 / math.sqrt(2 * math.pi))
    return g * (0.5 * (1 + torch.erf(x * _SQRT_HALF)) + x * density)


def _silu_backward(g: Any, x: Any) -> Any:
    s = torch.sigmoid(x)
    return g * s * (1 + x * (1 - s))


def _elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    return torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale))


def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    return torch.where(x * beta > threshold, x, torch.log1p(torch.exp(x * beta)) / beta)


def _elu_backward(g: Any, alpha: float, scale: float, input_scale: float, is_result: bool, x: Any) -> Any:
    """What is not chosen is finite: the transpose multiplies it by zero."""
    if is_result:
        return torch.where(x <= 0, g * input_scale * (x + alpha * scale), g * scale)
    falling = g * input_scale * (alpha * scale) * torch.exp(torch.clamp(x, max=0) * input_scale)
    return torch.where(x <= 0, falling, g * scale)


def _softplus_backward(g: Any, x: Any, beta: float, threshold: float) -> Any:
    """What is not chosen is finite: the transpose multiplies it by zero."""
    z = torch.exp(torch.clamp(x * beta, max=threshold))
    return torch.where(x * beta > threshold, g, g * z / (z + 1))


def _mish(x: Any) -> Any:
    return x * torch.tanh(_softplus(x))


def _log_sigmoid(x: Any) -> Any:
    return torch.clamp(x, max=0) - torch.log1p(torch.exp(-torch.abs(x)))


def _logaddexp(x: Any, y: Any) -> Any:
    """Of an infinity there is no difference to take; it is not asked whether operands are equal, which would compare
    what is made again bit by bit."""
    larger = torch.maximum(x, y)
    return torch.where(torch.isinf(larger), larger, larger + torch.log1p(torch.exp(-torch.abs(x - y))))


def _rounded_to(x: Any, *, decimals: int) -> Any:
    """By a power of ten that is whole, as its reciprocal is not exact."""
    scale = 10.0 ** abs(decimals)
    return torch.round(x * scale) / scale if decimals >= 0 else torch.round(x / scale) * scale


elementwise: dict[str, Callable[..., Any]] = {
    "gelu": _gelu,
    "gelu_backward.default": _gelu_backward,
    "silu": lambda x: x * torch.sigmoid(x),
    "silu_backward.default": _silu_backward,
    "elu": _elu,
    "elu_backward.default": _elu_backward,
    "mish": _mish,
    "softplus": _softplus,
    "softplus_backward.default": _softplus_backward,
    "leaky_relu": lambda x, slope=0.01: torch.where(x > 0, x, x * slope),
    "hardtanh": lambda x, lo=-1, hi=1: torch.clamp(x, lo, hi),
    "sigmoid_backward.default": lambda g, y: g * (y * (1 - y)),
    "tanh_backward.default": lambda g, y: g * (1 - y * y),
    "threshold_backward.default": lambda g, x, limit: torch.where(x <= limit, 0.0, g),
    "softshrink_backward.default": lambda g, x, limit: torch.where((x >= -limit) & (x <= limit), 0.0, g),
    "hardshrink_backward.default": lambda g, x, limit: torch.where((x >= -limit) & (x <= limit), 0.0, g),
    "logaddexp": _logaddexp,
    "lerp.Scalar": lambda x, y, weight: x + weight * (y - x) if abs(weight) < 0.5 else y - (y - x) * (1 - weight),
    "lerp.Tensor": lambda x, y, w: torch.where(torch.abs(w) < 0.5, x + w * (y - x), y - (y - x) * (1 - w)),
    "addcmul": lambda x, a, b, *, value=1: x + (value * a if value != 1 else a) * b,
    "addcdiv": lambda x, a, b, *, value=1: x + (value * a if value != 1 else a) / b,
    "round.decimals": _rounded_to,
    "frac": lambda x: x - torch.trunc(x),
    "square": lambda x: x * x,
}  # fmt: skip
"""On low floats these compute in float32 and round once."""

for _names, _formula in elementwise.items():
    composite(_names)(in_float32(_formula))


@composite("copysign.Tensor")
def _copysign(x: Any, y: Any) -> Any:
    """A float always, of the operands' common dtype."""
    common = torch.result_type(x, y)
    size = torch.abs(x.to(common if common.is_floating_point else torch.get_default_dtype()))
    return torch.where(torch.signbit(y), -size, size)


@composite("_trilinear")
def _trilinear(
    a: Any, b: Any, c: Any, expand1: Any, expand2: Any, expand3: Any, sumdim: Any, unroll_dim: int = 1
) -> Any:
    """The product of three tensors, each with axes put in, summed."""
    for axes in (sorted(expand1), sorted(expand2), sorted(expand3)):
        a, b, c = b, c, functools.reduce(torch.unsqueeze, axes, a)
    return torch.sum(a * b * c, list(sumdim))


@composite("fmax")
def _fmax(x: Any, y: Any) -> Any:
    return torch.where(torch.isnan(x), y, torch.where(torch.isnan(y), x, torch.maximum(x, y)))


@composite("fmin")
def _fmin(x: Any, y: Any) -> Any:
    return torch.where(torch.isnan(x), y, torch.where(torch.isnan(y), x, torch.minimum(x, y)))


@composite("log_sigmoid_forward.default")
def _log_sigmoid_forward(x: Any) -> Any:
    """(result, buffer); the buffer is empty on accelerators and exp(-|x|) on CPUs."""
    wide = _wide(x)
    buffer = x.new_zeros((0,)) if x.is_cuda else torch.exp(-torch.abs(wide)).to(x.dtype)
    return _log_sigmoid(wide).to(x.dtype), buffer


# ---------------------------------------------------------------------------------------------- statistics
def _dims(x: Any, dim: Any) -> list[int]:
    return list(axes_of(dim, x.dim()))


def _var_mean(
    x: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False, compensated: bool = True
) -> tuple[Any, Any]:
    """Two passes. compensated: what rounding left in the mean is taken back, which tells where the mean is large."""
    dims = _dims(x, dim)
    n = math.prod((x.shape[d] for d in dims), start=1)
    mean = torch.mean(x, dims, keepdim=True) if dims else x
    centered = x - mean
    total = torch.sum(centered * centered, dims, keepdim=True) if dims else centered * centered
    if dims and compensated:
        remainder = torch.sum(centered, dims, keepdim=True)
        total = total - remainder * (remainder / n)
    free = n - (1 if correction is None else correction)
    free = max(free, 0) if isinstance(free, (int, float)) else free
    if keepdim or not dims:
        return total / free, mean
    return torch.squeeze(total / free, dims), torch.squeeze(mean, dims)


def _moments(finish: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A formula of (variance, mean); low floats compute in float32 and round once."""

    def apply(x: Any, dim: Any = None, **options: Any) -> Any:
        wide = _wide(x)
        result = finish(*_var_mean(wide, dim, **options, compensated=wide is x))
        return tuple(r.to(x.dtype) for r in result) if isinstance(result, tuple) else result.to(x.dtype)

    return apply


composite("var.correction")(_moments(lambda var, mean: var))
composite("std.correction")(_moments(lambda var, mean: torch.sqrt(var)))
composite("var_mean.correction")(_moments(lambda var, mean: (var, mean)))
composite("std_mean.correction")(_moments(lambda var, mean: (torch.sqrt(var), mean)))

norms: dict[float, Callable[[Any, Any, bool], Any]] = {
    0: lambda x, d, k: torch.sum((x != 0).to(x.dtype), d, keepdim=k),
    1: lambda x, d, k: torch.sum(torch.abs(x), d, keepdim=k),
    2: lambda x, d, k: torch.sqrt(torch.sum(x * x, d, keepdim=k)),
    math.inf: lambda x, d, k: torch.amax(torch.abs(x), d, keepdim=k),
    -math.inf: lambda x, d, k: torch.amin(torch.abs(x), d, keepdim=k),
}


@composite("linalg_vector_norm")
def _vector_norm(x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    result = dtype or x.dtype
    wide = x.to(torch.promote_types(result, torch.float32))
    dims = _dims(x, dim)
    if not dims:
        return torch.abs(wide).to(result) if ord != 0 else (wide != 0).to(result)
    if ord in norms:
        return norms[ord](wide, dims, keepdim).to(result)
    return torch.pow(torch.sum(torch.pow(torch.abs(wide), ord), dims, keepdim=keepdim), 1 / ord).to(result)


@composite("logsumexp")
def _logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Any:
    """An infinite maximum is subtracted as 0."""
    dims = _dims(x, dim)
    wide = _wide(x) if x.is_floating_point() else x.to(torch.get_default_dtype())
    dtype = x.dtype if x.is_floating_point() else wide.dtype
    if not dims:
        return wide.to(dtype)
    if any(isinstance(x.shape[d], int) and x.shape[d] == 0 for d in dims):
        return torch.log(torch.sum(torch.exp(wide), dims, keepdim=keepdim)).to(dtype)
    # relative to the extreme itself, as softmax's sum is: a backward that asks for that has this one
    top = torch.amax(wide, dims, keepdim=True)
    result = torch.log(torch.sum(torch.exp(wide - top), dims, keepdim=True)) + top
    result = torch.where(torch.abs(top) == math.inf, top, result)
    return (result if keepdim else torch.squeeze(result, dims)).to(dtype)


@composite("_softmax_backward_data.default")
def _softmax_backward(g: Any, y: Any, dim: int, dtype: Any) -> Any:
    """The mean gradient leaves before the product, so that nothing cancels that was rounded."""
    g, y = _wide(g), _wide(y)
    return (y * (g - torch.sum(g * y, dim, keepdim=True))).to(dtype)


# ---------------------------------------------------------------------------------------------- norms
def _statistic(x: Any, like: Any) -> Any:
    """A saved mean or rstd: float32 for low floats, but on CPUs in the dtype of the input."""
    return x.to(like.dtype) if like.device.type == "cpu" else x


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * _wide(weight)
    return x if bias is None else x + _wide(bias)


@composite("native_layer_norm.default")
def _layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    wide, dims = _wide(x), list(range(x.dim() - len(shape), x.dim()))
    var, mean = _var_mean(wide, dims, correction=0, keepdim=True, compensated=wide is x)
    rstd = torch.rsqrt(var + eps)
    y = _affine((wide - mean) * rstd, weight, bias)
    return y.to(x.dtype), _statistic(mean, x), _statistic(rstd, x)


@composite("native_group_norm.default")
def _group_norm(x: Any, weight: Any, bias: Any, n: Any, c: Any, inner: Any, groups: int, eps: float) -> Any:
    wide = _wide(x).reshape(n, groups, c // groups, inner)
    var, mean = _var_mean(wide, [2, 3], correction=0, keepdim=True, compensated=x.dtype not in LOW_TORCH)
    rstd = torch.rsqrt(var + eps)
    w, b = (None if p is None else p.reshape(1, groups, c // groups, 1) for p in (weight, bias))
    y = _affine((wide - mean) * rstd, w, b)
    mean, rstd = (_statistic(s.reshape(n, groups), x) for s in (mean, rstd))
    return y.reshape(x.shape).to(x.dtype), mean, rstd


@composite("_native_batch_norm_legit_no_training.default")
def _batch_norm_eval(x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> Any:
    """With the running statistics; nothing is saved."""
    column = [-1, *[1] * (x.dim() - 2)]
    mean, var, weight, bias = (p if p is None else _wide(p).reshape(column) for p in (mean, var, weight, bias))
    y = _affine((_wide(x) - mean) * torch.rsqrt(var + eps), weight, bias)
    return y.to(x.dtype), x.new_zeros((0,)), x.new_zeros((0,))


@composite("_fused_rms_norm.default")
def _rms_norm(x: Any, shape: Any, weight: Any, eps: float | None) -> Any:
    wide, dims = _wide(x), list(range(x.dim() - len(shape), x.dim()))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    rstd = torch.rsqrt(torch.mean(wide * wide, dims, keepdim=True) + eps)
    return _affine(wide * rstd, weight, None).to(x.dtype), rstd


# ---------------------------------------------------------------------------------------------- losses
@composite("nll_loss_backward.default")
def _nll_loss_backward(
    g: Any, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int, total_weight: Any
) -> Any:
    """-g*w at the target's class, 0 elsewhere: a comparison with the class index, no scatter."""
    axis = 1 if x.dim() == 2 else 0
    at, is_counted = target.unsqueeze(axis), (target != ignore_index).unsqueeze(axis)
    classes = (
        torch.arange(x.shape[axis], device=x.device).unsqueeze(0) if axis else torch.arange(x.shape[0], device=x.device)
    )
    g = g / total_weight if reduction == 1 else g
    g = g.unsqueeze(axis) if g.dim() else g
    w = 1.0 if weight is None else weight.unsqueeze(0) if axis else weight
    return torch.where((classes == at) & is_counted, -(g * w), 0.0).to(x.dtype)


# ---------------------------------------------------------------------------------------------- searching
MOST_BOUNDARIES = 64
"""So many boundaries are compared with each element sooner than a pass over memory takes."""


@composite("bucketize.Tensor")
def _bucketize(x: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    return _searchsorted(boundaries, x, out_int32=out_int32, right=right)


@composite("searchsorted.Tensor")
def _searchsorted(
    boundaries: Any, x: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None,
    sorter: Any = None,
) -> Any:  # fmt: skip
    """As many of a few sorted numbers as an element is behind; NaN is behind all."""
    if sorter is not None or hint_of(boundaries.shape[-1]) > MOST_BOUNDARIES:
        return NotImplemented
    rows = boundaries if boundaries.dim() == 1 else boundaries.unsqueeze(-2)
    is_before = rows > x.unsqueeze(-1) if right or side == "right" else rows >= x.unsqueeze(-1)
    return (~is_before).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


# ---------------------------------------------------------------------------------------------- torch's own
_EXTRA = """
    _softmax.default _log_softmax.default _softmax_backward_data.default _log_softmax_backward_data.default
    native_layer_norm_backward native_group_norm_backward native_batch_norm_backward batch_norm_backward
    _native_batch_norm_legit_functional _native_batch_norm_legit.no_stats _batch_norm_with_update_functional
    _batch_norm_no_update _fused_rms_norm_backward nll_loss_forward.default nll_loss2d_forward.default
    nll_loss2d_backward.default mse_loss mse_loss_backward smooth_l1_loss huber_loss binary_cross_entropy
    binary_cross_entropy_with_logits embedding_dense_backward index_add index_copy index_fill
    special_entr special_xlog1py _prelu_kernel _prelu_kernel_backward rms_norm ldexp linspace dist
    upsample_nearest2d.vec pixel_shuffle pixel_unshuffle trace nan_to_num heaviside std_mean var_mean aminmax.default
    isposinf isneginf
"""
_NOT_DECOMPOSED = "split split_with_sizes unbind stack repeat tril triu select_scatter special_log_ndtr"
"""Ops that torch decomposes into more than is wanted, or less accurately than it computes itself."""


@functools.cache
def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """torch's decompositions for what has no rule: the core table and a few more, none that draws random numbers."""
    table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    table.update(get_decompositions(list(overloads(_EXTRA))))
    for op in overloads(_NOT_DECOMPOSED):
        table.pop(op, None)
    return {op: f for op, f in table.items() if isinstance(op, OpOverload) and _is_deterministic(op)}


def _is_deterministic(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded not in op.tags
