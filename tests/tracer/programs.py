"""Small programs that lowering must know: (name, function, inputs, how many `aten` nodes remain)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class Program(NamedTuple):
    name: str
    function: Callable[..., Any]
    inputs: Callable[[], list[torch.Tensor]]
    aten: int = 0


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def positive(*shape: int) -> torch.Tensor:
    return x(*shape).abs() + 0.1


def ints(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high), dtype=dtype)


def mask(*shape: int) -> torch.Tensor:
    return x(*shape) > 0


BF16, F16, F64, I32 = torch.bfloat16, torch.float16, torch.float64, torch.int32

UNARY = (
    "neg exp exp2 expm1 sin cos tan atan sinh cosh tanh asinh sigmoid erf floor ceil round trunc abs sign relu square "
    "isnan isinf isfinite reciprocal frac sgn deg2rad"
).split()
POSITIVE = "log log2 log1p log10 sqrt rsqrt lgamma acosh".split()
UNIT = "asin acos atanh".split()
BINARY = "add sub mul div maximum minimum fmax fmin atan2 hypot logaddexp eq ne lt le gt ge".split()
ACTIVATIONS = (
    "silu gelu mish softplus elu leaky_relu hardtanh hardswish hardsigmoid relu6 selu celu logsigmoid softsign "
    "tanhshrink softshrink hardshrink"
).split()

elementwise = [
    *(Program(n, getattr(torch, n), lambda: [x(4, 6)]) for n in UNARY),
    *(Program(n, getattr(torch, n), lambda: [positive(4, 6) + 1]) for n in POSITIVE),
    *(Program(n, getattr(torch, n), lambda: [torch.tanh(x(4, 6)) * 0.9]) for n in UNIT),
    *(Program(n, getattr(torch, n), lambda: [x(4, 6), x(6)]) for n in BINARY),
    *(Program(n, getattr(F, n), lambda: [x(4, 6)]) for n in ACTIVATIONS),
    *(
        Program(f"{n}_bf16", getattr(F, n), lambda: [x(4, 6, dtype=BF16)])
        for n in ("silu", "gelu", "mish", "softplus", "elu")
    ),
    Program("gelu_tanh", lambda a: F.gelu(a, approximate="tanh"), lambda: [x(4, 6)]),
    Program("glu", lambda a: F.glu(a, -1), lambda: [x(4, 6)]),
    Program("prelu", F.prelu, lambda: [x(4, 6), x(6)]),
    Program("threshold", lambda a: F.threshold(a, 0.1, 20.0), lambda: [x(4, 6)]),
    Program("sigmoid_int", torch.sigmoid, lambda: [ints(5, 4)]),
    Program("floor_int", torch.floor, lambda: [ints(5, 4)]),
    Program("add_alpha", lambda a, b: torch.add(a, b, alpha=0.3), lambda: [x(4, 6, dtype=BF16), x(6, dtype=BF16)]),
    Program("rsub", lambda a: 1 - a, lambda: [x(4, 6)]),
    Program("scalars_bf16", lambda a: a * 0.1 + 0.3, lambda: [x(4, 6, dtype=BF16)]),
    Program("scalars_f16", lambda a: (a - 0.1) / 3, lambda: [x(4, 6, dtype=F16)]),
    Program("div_int", lambda a, b: a / (b + 1), lambda: [ints(9, 4), ints(3, 4)]),
    Program("div_floor", lambda a, b: torch.div(a, b, rounding_mode="floor"), lambda: [x(4, 6), positive(6)]),
    Program("div_floor_int", lambda a, b: (a - 5) // (b + 1), lambda: [ints(9, 4), ints(3, 4)]),
    Program("div_trunc", lambda a, b: torch.div(a, b, rounding_mode="trunc"), lambda: [x(4, 6) * 9, positive(6)]),
    Program(
        "div_trunc_int", lambda a, b: torch.div(a - 5, b + 1, rounding_mode="trunc"), lambda: [ints(9, 4), ints(3, 4)]
    ),
    Program("remainder", lambda a, b: (a % 3, torch.fmod(a, b)), lambda: [x(4, 6), positive(6)]),
    Program("remainder_int", lambda a: ((a - 5) % 3, torch.fmod(a - 5, 3)), lambda: [ints(9, 7)]),
    Program("pow_small", lambda a: (a**2, a**3, a**-1, a**-2, a**0, a**1), lambda: [x(4, 6)]),
    Program("pow_root", lambda a: (a**0.5, a**-0.5, a**1.7, 2**a), lambda: [positive(4, 6)]),
    Program("pow_tensor", torch.pow, lambda: [positive(4, 6), x(6)]),
    Program("pow_int", lambda a: (a**2, a**3), lambda: [ints(5, 4)]),
    Program("pow_bf16", lambda a: (a**2, a**3), lambda: [x(4, 6, dtype=BF16)]),
    Program("mixed_dtypes", lambda a, b: a + b, lambda: [x(4, 6, dtype=BF16), x(6)]),
    Program("mixed_int_float", lambda a, b: (a * b, a + 1.5, b < a), lambda: [ints(5, 4, 6), x(6)]),
    Program("mixed_widths", lambda a, b: (a + b, a == b), lambda: [ints(5, 4, dtype=I32), ints(3, 4)]),
    Program("compare_mixed", lambda a, b: (a < b, b >= a, a == 1.0), lambda: [x(4, 6, dtype=F16), x(6)]),
    Program("zero_dim_f64", lambda a, b: a * b, lambda: [x(4, 6), x(dtype=F64)]),
    Program("bool_ops", lambda a, b: (a & b, a | b, a ^ b, ~a, a + b, a * b), lambda: [mask(4, 6), mask(6)]),
    Program("bit_ops", lambda a, b: (a & b, a | b, a ^ b, ~a, a << 2, a >> 1), lambda: [ints(9, 4, 6), ints(9, 6)]),
    Program(
        "logical",
        lambda a, b: (torch.logical_and(a, b), torch.logical_not(a), torch.logical_xor(a, b)),
        lambda: [x(4, 6), ints(2, 6)],
    ),
    Program("clamp", lambda a: (a.clamp(-0.5, 0.5), a.clamp(min=0), a.clamp(max=0.1)), lambda: [x(4, 6)]),
    Program("clamp_tensor", lambda a, b: (torch.clamp(a, b), torch.clamp(a, max=b)), lambda: [x(4, 6), x(6)]),
    Program(
        "clamp_nan",
        lambda a, b: (torch.clamp(a, b), a.clamp(0, 1)),
        lambda: [x(4, 3), torch.tensor([0.0, float("nan"), 1.0])],
    ),
    Program(
        "where",
        lambda a, b: (torch.where(a > 0, a, b), torch.where(a > 0, 1.0, b), torch.where(a > 0, a, 0)),
        lambda: [x(4, 6), x(6)],
    ),
    Program(
        "masked_fill",
        lambda a, m: (a.masked_fill(m, -1e9), a.masked_fill(m, float("-inf"))),
        lambda: [x(4, 6), mask(6)],
    ),
    Program(
        "addcmul",
        lambda a, b: (torch.addcmul(a, b, b, value=0.5), torch.addcdiv(a, b, b)),
        lambda: [x(4, 6), positive(6)],
    ),
    Program("lerp", lambda a, b: (torch.lerp(a, b, 0.3), torch.lerp(a, b, b)), lambda: [x(4, 6), x(6)]),
    Program("nan_to_num", torch.nan_to_num, lambda: [torch.tensor([1.0, float("nan"), float("inf")])]),
    Program("casts", lambda a: (a.bfloat16(), a.half(), a.double(), a.int(), a.bool()), lambda: [x(4, 6)]),
    Program(
        "nan_max",
        lambda a, b: (torch.maximum(a, b), torch.minimum(a, b)),
        lambda: [torch.tensor([1.0, float("nan"), 2.0]), torch.tensor([float("nan"), 0.0, 3.0])],
    ),
    Program("xlogy", torch.xlogy, lambda: [x(4, 6), positive(4, 6)]),
    Program("erfc", torch.erfc, lambda: [x(4, 6)], 1),
    Program("digamma", torch.digamma, lambda: [positive(4)], 1),
]

reductions = [
    Program("sum", lambda a: (a.sum(), a.sum(0), a.sum((0, 2), keepdim=True), a.sum(-1)), lambda: [x(3, 4, 5)]),
    Program("sum_bf16", lambda a: (a.sum(), a.sum(0), a.sum(-1, dtype=torch.float32)), lambda: [x(3, 40, dtype=BF16)]),
    Program("sum_int", lambda a: (a.sum(), (a > 1).sum(0)), lambda: [ints(5, 3, 4, dtype=I32)]),
    Program("sum_empty", lambda a: (a.sum(), a.sum(0), a.prod(0), a.sum(1)), lambda: [x(0, 4)]),
    Program("sum_scalar", lambda a: (a.sum(), a.mean(), a.amax(), a.prod()), lambda: [x()]),
    Program("mean", lambda a: (a.mean(), a.mean(0), a.mean((0, 2), keepdim=True)), lambda: [x(3, 4, 5)]),
    Program("mean_bf16", lambda a: (a.mean(), a.mean(-1)), lambda: [x(3, 40, dtype=BF16)]),
    Program("prod", lambda a: (a.prod(), a.prod(0), a.prod(1, keepdim=True)), lambda: [x(3, 4)]),
    Program("amax", lambda a: (a.amax(), a.amax(0), a.amin((0, 1), keepdim=True), a.max(), a.min()), lambda: [x(3, 4)]),
    Program("max_values", lambda a: (a.max(-1, keepdim=True).values, a.min(0)[0]), lambda: [x(3, 4)]),
    Program("max_both", lambda a: (*a.max(-1), *a.min(0, keepdim=True)), lambda: [x(3, 4)]),
    Program("max_both_computed", lambda a: (*(a * 2).max(-1), *(a > 0).max(0)), lambda: [x(3, 4)]),
    Program("argmax", lambda a: (a.argmax(), a.argmax(0), a.argmin(1, keepdim=True)), lambda: [x(3, 4)]),
    Program(
        "argmax_ties",
        lambda a: (a.argmax(1), a.argmin(1)),
        lambda: [torch.tensor([[1.0, 2.0, 2.0], [0.0, float("nan"), 5.0]])],
    ),
    Program(
        "any_all", lambda a: (a.any(), a.any(0), a.all(), a.all(1, keepdim=True), (a * 2).any(1)), lambda: [mask(3, 4)]
    ),
    Program("any_u8", lambda a: (a.any(), a.all(0)), lambda: [ints(2, 3, 4, dtype=torch.uint8)]),
    Program(
        "var",
        lambda a: (a.var(), a.var(0), a.var(1, unbiased=False, keepdim=True), a.std(), a.std(-1)),
        lambda: [x(3, 4)],
    ),
    Program("var_mean", lambda a: (*torch.var_mean(a, 0), *torch.std_mean(a, 1, correction=0)), lambda: [x(3, 4)]),
    Program("var_bf16", lambda a: (a.var(0), a.std(1)), lambda: [x(3, 40, dtype=BF16)]),
    Program(
        "norm",
        lambda a: (
            a.norm(),
            a.norm(dim=1),
            a.norm(p=1, dim=0),
            a.norm(p=3, dim=1),
            a.norm(float("inf"), dim=1, keepdim=True),
        ),
        lambda: [x(3, 4)],
    ),
    Program(
        "vector_norm", lambda a: (torch.linalg.vector_norm(a), torch.linalg.vector_norm(a, 0, dim=1)), lambda: [x(3, 4)]
    ),
    Program("logsumexp", lambda a: (a.logsumexp(1), a.logsumexp((0, 1), keepdim=True)), lambda: [x(3, 4)]),
    Program(
        "logsumexp_inf", lambda a: a.logsumexp(1), lambda: [torch.tensor([[-float("inf")] * 2, [0.0, float("inf")]])]
    ),
    Program("cumsum", lambda a: (a.cumsum(0), a.cumsum(-1)), lambda: [x(3, 4)]),
    Program("cumsum_int", lambda a: (a > 1).cumsum(0), lambda: [ints(4, 3, 4)]),
    Program("softmax", lambda a: (F.softmax(a, -1), F.log_softmax(a, 0)), lambda: [x(3, 4)]),
    Program(
        "softmax_bf16",
        lambda a: (F.softmax(a, -1), F.log_softmax(a, 0), F.softmax(a, 0, dtype=torch.float32)),
        lambda: [x(3, 40, dtype=BF16)],
    ),
    Program(
        "softmax_by_hand",
        lambda a: (e := torch.exp(a - a.max(-1, keepdim=True).values)) / e.sum(-1, keepdim=True),
        lambda: [x(3, 4)],
    ),
    Program("softmin", lambda a: F.softmin(a, -1), lambda: [x(3, 4)]),
    Program("cosine_similarity", lambda a, b: F.cosine_similarity(a, b), lambda: [x(3, 4), x(3, 4) + 1]),
    Program("normalize", lambda a: F.normalize(a, dim=-1), lambda: [x(3, 4)]),
    Program("aminmax", lambda a: tuple(torch.aminmax(a, dim=1)), lambda: [x(3, 4)]),
    Program("count_nonzero", lambda a: torch.count_nonzero(a, dim=0), lambda: [ints(2, 3, 4)]),
    Program("cumprod", lambda a: a.cumprod(0), lambda: [x(3, 4)]),
    Program("sort", lambda a: tuple(a.sort(-1)), lambda: [x(3, 4)], 1),
    Program("topk", lambda a: tuple(a.topk(2)), lambda: [x(3, 4)], 1),
    Program("cummax", lambda a: tuple(a.cummax(0)), lambda: [x(3, 4)], 1),
]

norms = [
    Program("layer_norm", lambda a, w, b: F.layer_norm(a, (a.shape[-1],), w, b), lambda: [x(3, 8), x(8), x(8)]),
    Program("layer_norm_2d", lambda a: F.layer_norm(a, a.shape[1:]), lambda: [x(3, 4, 5)]),
    Program(
        "layer_norm_bf16",
        lambda a, w: F.layer_norm(a, (a.shape[-1],), w),
        lambda: [x(3, 40, dtype=BF16), x(40, dtype=BF16)],
    ),
    Program(
        "layer_norm_stats", lambda a: torch.native_layer_norm(a, (a.shape[-1],), None, None, 1e-5), lambda: [x(3, 8)]
    ),
    Program("rms_norm", lambda a, w: F.rms_norm(a, (a.shape[-1],), w, 1e-6), lambda: [x(3, 8), x(8)]),
    Program(
        "rms_norm_bf16",
        lambda a, w: F.rms_norm(a, (a.shape[-1],), w),
        lambda: [x(3, 40, dtype=BF16), x(40, dtype=BF16)],
    ),
    Program("group_norm", lambda a, w, b: F.group_norm(a, 3, w, b), lambda: [x(2, 6, 5), x(6), x(6)]),
    Program("instance_norm", lambda a: F.instance_norm(a), lambda: [x(2, 3, 5)]),
    Program(
        "batch_norm", lambda a, w, b: F.batch_norm(a, None, None, w, b, training=True), lambda: [x(5, 3, 4), x(3), x(3)]
    ),
    Program(
        "batch_norm_running", lambda a, m, v: F.batch_norm(a, m, v, training=True), lambda: [x(5, 3), x(3), positive(3)]
    ),
    Program("batch_norm_eval", lambda a, m, v: F.batch_norm(a, m, v), lambda: [x(5, 3), x(3), positive(3)]),
]


def _loss(name: str, **options: Any) -> Callable[..., Any]:
    return lambda a, b: getattr(F, name)(a, b, **options)


losses = [
    Program("cross_entropy", F.cross_entropy, lambda: [x(4, 7), ints(7, 4)]),
    Program("cross_entropy_ignore", F.cross_entropy, lambda: [x(4, 7), torch.tensor([1, -100, 3, 0])]),
    Program("cross_entropy_none", _loss("cross_entropy", reduction="none"), lambda: [x(4, 7), ints(7, 4)]),
    Program("cross_entropy_smooth", _loss("cross_entropy", label_smoothing=0.1), lambda: [x(4, 7), ints(7, 4)]),
    Program("cross_entropy_soft", F.cross_entropy, lambda: [x(4, 7), F.softmax(x(4, 7), -1)]),
    Program(
        "cross_entropy_weight", lambda a, t, w: F.cross_entropy(a, t, w), lambda: [x(4, 7), ints(7, 4), positive(7)]
    ),
    Program("cross_entropy_2d", F.cross_entropy, lambda: [x(2, 5, 3, 4), ints(5, 2, 3, 4)]),
    Program("nll_loss", F.nll_loss, lambda: [x(4, 7), ints(7, 4)]),
    *(
        Program(n, _loss(n), lambda: [x(4, 6), x(4, 6) * 2])
        for n in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
    ),
    Program("mse_none", _loss("mse_loss", reduction="none"), lambda: [x(4, 6), x(4, 6) * 2]),
    Program("bce", F.binary_cross_entropy, lambda: [torch.sigmoid(x(4, 6)), torch.sigmoid(x(4, 6) + 1)]),
    Program("bce_logits", F.binary_cross_entropy_with_logits, lambda: [x(4, 6), torch.sigmoid(x(4, 6))]),
    Program(
        "kl_div", _loss("kl_div", reduction="batchmean"), lambda: [F.log_softmax(x(4, 6), -1), F.softmax(x(4, 6), -1)]
    ),
    Program("soft_margin", F.soft_margin_loss, lambda: [x(4, 6), torch.sign(x(4, 6))]),
]

_ops = torch.ops.aten
backwards = [
    Program(
        "gelu_backward",
        lambda g, a: (_ops.gelu_backward(g, a), _ops.gelu_backward(g, a, approximate="tanh")),
        lambda: [x(4, 6), x(4, 6) * 2],
    ),
    Program("silu_backward", _ops.silu_backward, lambda: [x(4, 6), x(4, 6) * 2]),
    Program(
        "sigmoid_backward",
        lambda g, y: (_ops.sigmoid_backward(g, y), _ops.tanh_backward(g, y)),
        lambda: [x(4, 6), torch.sigmoid(x(4, 6))],
    ),
    Program("threshold_backward", lambda g, a: _ops.threshold_backward(g, a, 0), lambda: [x(4, 6), x(4, 6) * 2]),
    Program("softplus_backward", lambda g, a: _ops.softplus_backward(g, a, 1.0, 20.0), lambda: [x(4, 6), x(4, 6) * 2]),
    Program(
        "leaky_relu_backward", lambda g, a: _ops.leaky_relu_backward(g, a, 0.1, False), lambda: [x(4, 6), x(4, 6) * 2]
    ),
    Program("elu_backward", lambda g, a: _ops.elu_backward(g, 1.0, 1.0, 1.0, False, a), lambda: [x(4, 6), x(4, 6) * 2]),
    Program(
        "softmax_backward",
        lambda g, y: _ops._softmax_backward_data(g, y, -1, g.dtype),
        lambda: [x(4, 6), F.softmax(x(4, 6), -1)],
    ),
    Program(
        "log_softmax_backward",
        lambda g, y: _ops._log_softmax_backward_data(g, y, -1, g.dtype),
        lambda: [x(4, 6), F.log_softmax(x(4, 6), -1)],
    ),
    Program(
        "layer_norm_backward",
        lambda g, a, w, b: _ops.native_layer_norm_backward(
            g, a, (a.shape[-1],), *torch.native_layer_norm(a, (a.shape[-1],), w, b, 1e-5)[1:], w, b, [True] * 3
        ),
        lambda: [x(3, 8), x(3, 8) * 2, x(8), x(8)],
    ),
    Program(
        "group_norm_backward",
        lambda g, a, w, b: _ops.native_group_norm_backward(
            g, a, *torch.native_group_norm(a, w, b, 2, 6, 5, 3, 1e-5)[1:], w, 2, 6, 5, 3, [True] * 3
        ),
        lambda: [x(2, 6, 5), x(2, 6, 5) * 2, x(6), x(6)],
    ),
    Program(
        "nll_loss_backward",
        lambda g, a, t: _ops.nll_loss_backward(
            g, a, t, None, 1, -100, torch.ops.aten.nll_loss_forward(a, t, None, 1, -100)[1]
        ),
        lambda: [x(), x(4, 7), torch.tensor([1, -100, 3, 0])],
    ),
    Program("mse_backward", lambda g, a, b: _ops.mse_loss_backward(g, a, b, 1), lambda: [x(), x(4, 6), x(4, 6) * 2]),
    Program(
        "embedding_backward",
        lambda g, i: _ops.embedding_dense_backward(g, i, 5, 1, False),
        lambda: [x(3, 4, 6), ints(5, 3, 4)],
    ),
    Program("slice_backward", lambda g: _ops.slice_backward(g, [g.shape[0], 9], 1, 1, 7, 1), lambda: [x(4, 6)]),
]

layout = [
    Program("view", lambda a: (a.view(-1), a.view(a.shape[0], 2, -1), a.reshape(-1, a.shape[0])), lambda: [x(4, 6)]),
    Program("flatten", lambda a: (a.flatten(1), a.unflatten(1, (2, -1)), a.flatten()), lambda: [x(3, 4, 5)]),
    Program("squeeze", lambda a: (a.squeeze(1), a.unsqueeze(0), a[:, None], a.squeeze()), lambda: [x(3, 1, 4)]),
    Program("transpose", lambda a: (a.t(), a.transpose(0, 1), a.mT, a.T * 2), lambda: [x(3, 4)]),
    Program("permute", lambda a: (a.permute(2, 0, 1), a.movedim(0, -1), a.swapaxes(0, 2)), lambda: [x(3, 4, 5)]),
    Program("expand", lambda a: (a.expand(3, -1, 5), a.broadcast_to(2, 4, 5)), lambda: [x(4, 1)]),
    Program("slices", lambda a: (a[1:], a[:, :-1], a[::2], a[1:3, 2:5], a[-2:], a[..., 1:-1:2]), lambda: [x(4, 7)]),
    Program("selects", lambda a: (a[0], a[-1], a[:, 2], a[1, 2], a.select(1, -2)), lambda: [x(4, 7)]),
    Program("narrow", lambda a: (a.narrow(0, 1, 2), a.narrow(1, 0, a.shape[1] - 1)), lambda: [x(4, 7)]),
    Program(
        "flip_roll",
        lambda a: (a.flip(0), a.flip(0, 1), a.roll(1), a.roll((1, -2), (0, 1)), torch.rot90(a)),
        lambda: [x(4, 6)],
    ),
    Program(
        "cat_stack",
        lambda a, b: (torch.cat([a, b]), torch.stack([a, a], 1), torch.cat([a, a * 2], -1), torch.hstack([a, a])),
        lambda: [x(4, 6), x(2, 6)],
    ),
    Program("cat_mixed", lambda a, b: torch.cat([a, b, torch.empty(0)]), lambda: [x(4, 6), ints(3, 2, 6)]),
    Program("split", lambda a: (*a.split(2), *a.chunk(2, 1), *a.split([1, 3], 0)), lambda: [x(4, 6)]),
    Program("unbind", lambda a: a.unbind(0), lambda: [x(3, 4)]),
    Program(
        "pad",
        lambda a: (
            F.pad(a, (1, 2)),
            F.pad(a, (0, 1, 2, 0), value=3.0),
            F.pad(a, (-1, 2)),
            F.pad(a, (-1, -1), value=1.0),
        ),
        lambda: [x(4, 6)],
    ),
    Program("tril", lambda a: (a.tril(), a.triu(1), a.tril(-1)), lambda: [x(2, 4, 5)]),
    Program("diagonal", lambda a: (a.diagonal(), a.diagonal(1), a.diagonal(-1), torch.trace(a)), lambda: [x(4, 6)]),
    Program("diagonal_swapped", lambda a: (a.diagonal(1, 2, 0), a.diagonal(-1, 0, 2)), lambda: [x(4, 3, 6)]),
    Program(
        "fill_diagonal", lambda a: ((a * 2).fill_diagonal_(3), (a.t() + 1).contiguous().fill_diagonal_(-9.5)),
        lambda: [x(4, 6)],
    ),
    Program(
        "diagonal_scatter", lambda a: (
            (a[:, None] * a).diagonal_scatter(a.mT.exp(), 0, 0, 1), (a[:, None] * a).diagonal_scatter(a.mT, 0, 1, 0),
            (a[:, None] * a).mT.diagonal_scatter(a.mT, 0, 2, 0), (a @ a.mT).diagonal_scatter(a[:, 0]),
            (a @ a.mT).diagonal_scatter(a[1:, 0], 1), a.diagonal_scatter(a[0], -1),
        ),
        lambda: [x(4, 3)],
    ),
    Program("diag_embed", lambda a: torch.diag_embed(a), lambda: [x(2, 3)]),
    Program(
        "repeat", lambda a: (a.repeat(2, 3), a.repeat(2, 1, 1), a.tile(2), a.repeat_interleave(3, 1)), lambda: [x(2, 3)]
    ),
    Program("unfold", lambda a: (a.unfold(1, 3, 2), a.unfold(0, 2, 1)), lambda: [x(4, 7)]),
    Program(
        "as_strided of rows of two lengths",
        lambda a, b: torch.nn.functional.pad(a, (b.shape[0] - 1, 0)).as_strided(
            (a.shape[0], a.shape[1], b.shape[0]), (a.shape[1] + b.shape[0] - 1, 1, 1)
        ),
        lambda: [x(3, 7), x(4)],
    ),
    Program(
        "as_strided",
        lambda a: (torch.as_strided(a, (3, 2), (2, 1), 1), torch.as_strided(a, (2, 3), (1, 1))),
        lambda: [x(4, 6)],
    ),
    Program(
        "factories",
        lambda a: (
            torch.arange(a.shape[0]),
            torch.arange(1, 9, 2),
            torch.full((2, 2), 3.0),
            a.new_zeros(2),
            torch.eye(3),
            torch.ones_like(a),
        ),
        lambda: [x(4, 6)],
    ),
    Program(
        "arange_float",
        lambda a: (torch.arange(0, 1, 0.25), torch.linspace(0, 1, 5), torch.arange(a.shape[0], dtype=torch.float32)),
        lambda: [x(4)],
    ),
    Program(
        "size_as_value",
        lambda a: (a * a.shape[0], a / a.shape[1], a * (a.shape[1] ** -0.5), a + a.numel()),
        lambda: [x(4, 6)],
    ),
    Program("meshgrid", lambda a, b: torch.meshgrid(a, b, indexing="ij"), lambda: [x(3), x(4)]),
    Program("pixel_shuffle", lambda a: F.pixel_shuffle(a, 2), lambda: [x(2, 8, 3, 3)]),
    Program("contiguous", lambda a: (a.t().contiguous(), a.clone(), a.detach()), lambda: [x(4, 6)]),
    Program("transposed_input", lambda a: (a * 2, a.sum(0), a.reshape(-1)), lambda: [x(6, 4).t()]),
    Program("empty", lambda a: (a * 2, a + 1, a.reshape(4, 0), torch.cat([a, a])), lambda: [x(0, 4)]),
    Program("size_one", lambda a, b: (a + b, a.expand(3, 6), (a * b).sum(0)), lambda: [x(1, 6), x(5, 1)]),
]

products = [
    Program("matmul", lambda a, b: (a @ b, b.t() @ a.t()), lambda: [x(4, 5), x(5, 6)]),
    Program("matmul_batched", lambda a, b: a @ b, lambda: [x(2, 3, 4, 5), x(5, 6)]),
    Program("matmul_vectors", lambda a, b: (a @ b, b @ b, torch.dot(b, b), torch.outer(b, b)), lambda: [x(4, 5), x(5)]),
    Program("bmm", torch.bmm, lambda: [x(2, 4, 5), x(2, 5, 6)]),
    Program("linear", F.linear, lambda: [x(2, 4, 5), x(6, 5), x(6)]),
    Program("linear_bf16", F.linear, lambda: [x(4, 5, dtype=BF16), x(6, 5, dtype=BF16), x(6, dtype=BF16)]),
    Program(
        "addmm",
        lambda c, a, b: (torch.addmm(c, a, b, beta=0.5, alpha=2), torch.addmm(c, a, b, beta=0)),
        lambda: [x(6), x(4, 5), x(5, 6)],
    ),
    Program("baddbmm", torch.baddbmm, lambda: [x(2, 4, 6), x(2, 4, 5), x(2, 5, 6)]),
    Program("einsum", lambda a, b: torch.einsum("bhid,bhjd->bhij", a, b), lambda: [x(2, 3, 4, 5), x(2, 3, 6, 5)]),
    Program("einsum_sum", lambda a, b: torch.einsum("ij,jk->", a, b), lambda: [x(4, 5), x(5, 6)]),
    Program(
        "attention",
        lambda q, k, v: F.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, -1) @ v,
        lambda: [x(2, 4, 8), x(2, 5, 8), x(2, 5, 8)],
    ),
    Program("bilinear", F.bilinear, lambda: [x(3, 4), x(3, 5), x(2, 4, 5)]),
    Program("convolution", lambda a, w: F.conv2d(a, w, padding=1), lambda: [x(2, 3, 5, 5), x(4, 3, 3, 3)], 1),
]

indexing = [
    Program("embedding", lambda w, i: F.embedding(i, w), lambda: [x(7, 4), ints(7, 2, 3)]),
    Program("embedding_i32", lambda w, i: F.embedding(i, w), lambda: [x(7, 4), ints(7, 3, dtype=I32)]),
    Program("gather", lambda a, i: (a.gather(1, i), a.gather(0, i[:, :1])), lambda: [x(4, 6), ints(4, 4, 3)]),
    Program(
        "gather_one",
        lambda a, i: ((a * 2).gather(1, i[:, None]), a.gather(1, i[:, None])),
        lambda: [x(4, 6), ints(6, 4)],
    ),
    Program("index", lambda a, i: (a[i], a[:, i], a[i, i], a[i - 2]), lambda: [x(4, 6), ints(4, 3)]),
    Program(
        "index_mixed",
        lambda a, i, j: (a[:, i, j], a[i, :, j], a[i[:, None], j]),
        lambda: [x(3, 4, 5), ints(3, 2), ints(3, 2)],
    ),
    Program(
        "index_select",
        lambda a, i: (a.index_select(0, i), a.index_select(1, i), a.take_along_dim(i[:, None], 0)),
        lambda: [x(4, 6), ints(4, 3)],
    ),
    Program(
        "index_put",
        lambda a, i, v: (a.index_put((i,), v), a.index_put((i,), v, accumulate=True)),
        lambda: [x(4, 6), torch.tensor([0, 2, -1]), x(3, 6)],
    ),
    Program(
        "index_add",
        lambda a, i, v: (a.index_add(0, i, v), a.index_copy(0, i, v), a.index_fill(1, i, 2.0)),
        lambda: [x(4, 6), torch.tensor([0, 2, 1]), x(3, 6)],
    ),
    Program(
        "scatter_add",
        lambda a, i, v: (a.scatter_add(1, i, v), a.scatter_add(0, i, v)),
        lambda: [x(4, 6), ints(4, 3, 2), x(4, 6)],
    ),
    Program(
        "scatter",
        lambda a, i, v: (a.scatter(1, i, v), a.scatter(1, i, 2.0)),
        lambda: [x(4, 6), torch.tensor([[0, 2], [1, 5]]), x(2, 2)],
    ),
    Program("one_hot", lambda i: (i[:, None] == torch.arange(5)).float(), lambda: [ints(5, 4)]),
    Program("one_hot_scatter", lambda i: torch.zeros(i.shape[0], 5).scatter(1, i[:, None], 1.0), lambda: [ints(5, 4)]),
    Program("mask_put", lambda a, m: a.index_put((m,), torch.tensor(2.0)), lambda: [x(4, 6), mask(4, 6)]),
    Program(
        "select_scatter",
        lambda a, b: (torch.select_scatter(a, b, 0, -1), torch.slice_scatter(a, b[None], 0, 1, 2)),
        lambda: [x(4, 6), x(6)],
    ),
    Program(
        "bucketize",
        lambda a, b: (torch.bucketize(a, b), torch.bucketize(a, b, right=True), torch.searchsorted(b, a, side="right")),
        lambda: [x(4, 6).round(), torch.tensor([-1.0, 0.0, 1.0])],
    ),
    Program("buckets of NaN", torch.bucketize, lambda: [torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0])]),
    Program(
        "searchsorted by rows",
        lambda b, a: torch.searchsorted(b, a, out_int32=True),
        lambda: [x(4, 5).sort().values, x(4, 6)],
    ),
    Program("buckets, many", torch.bucketize, lambda: [x(4, 6), torch.arange(100.0)], 1),
    Program(
        "scatter_reduce",
        lambda a, i, v: a.scatter_reduce(1, i, v, "amax"),
        lambda: [x(4, 6), ints(6, 4, 2), x(4, 2)],
        1,
    ),
]


def _writes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = a * 2
    y[:, 0] = 3
    y[1].mul_(b)
    y[1:3, 2:] += 1
    y[:, ::2] -= b[::2]
    return y


def _views(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = a.clone()
    v = y.view(-1)
    v[3:5] = 0
    w = y.t()
    w.add_(1)
    return y, v, w


def _bits(a: torch.Tensor) -> torch.Tensor:
    m = a > 0
    m &= a < 1
    m |= a > 2
    m ^= a == 0
    return m


def _builds(a: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(a)
    out.copy_(a.t().contiguous().t())
    out[0].fill_(1)
    out.diagonal().zero_()
    return out.masked_fill_(out > 1, 0.5)


def _constants(a: torch.Tensor) -> torch.Tensor:
    return (
        a[:, :3] * torch.tensor([0.2, 0.3, 0.5])
        + torch.tensor(1.5)
        + torch.tensor([0, 1, 2])
        + torch.tensor([2.0, 2.0, 2.0])
    )


def _mutates(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.mul_(2)
    b[0] = 1
    b.t().add_(1)
    return a + 1


in_place = [
    Program("writes", _writes, lambda: [x(4, 6), x(6)]),
    Program("views", _views, lambda: [x(4, 6)]),
    Program("bits", _bits, lambda: [x(4, 6)]),
    Program("builds", _builds, lambda: [x(4, 4)]),
    Program("constants", _constants, lambda: [x(4, 6)]),
    Program("mutates", _mutates, lambda: [x(4, 6), x(3, 5)]),
    Program("index_write", lambda a, i: a.clone().index_put_((i,), a[i] * 2), lambda: [x(4, 6), torch.tensor([0, 3])]),
    Program("scatter_write", lambda a, i: torch.zeros_like(a).scatter_add_(1, i, a), lambda: [x(4, 6), ints(6, 4, 6)]),
]

TABLE: list[Program] = [
    *elementwise, *reductions, *norms, *losses, *backwards, *layout, *products, *indexing, *in_place,
]  # fmt: skip
