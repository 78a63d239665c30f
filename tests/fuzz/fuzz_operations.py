"""What a random program is made of: templates as text, with what they take. A template that raises is left out.

A slot is `{kind}` or `{kind:name}`: f a floating value, g another that broadcasts with the first, v any value,
i a whole number tensor, b a boolean one, m a matrix-like floating value, axis an axis of the first value, k a keepdim,
c a small constant; of arguments that are no tensors n is a number, t a flag, o None, u a word. The same name is the
same choice.
"""

from __future__ import annotations

UNARY = (
    "torch.exp(-{f}.abs())", "torch.tanh({f})", "torch.sigmoid({f})", "torch.relu({f})", "{f}.abs()", "-{f}",
    "{f}.square()", "torch.sqrt({f}.abs() + 0.5)", "torch.log1p({f}.abs())", "torch.log({f}.abs() + {c})",
    "torch.erf({f})", "torch.sin({f})", "torch.cos({f})", "torch.rsqrt({f} * {f} + 1)", "F.silu({f})", "F.gelu({f})",
    "F.gelu({f}, approximate='tanh')", "F.softplus({f})", "F.leaky_relu({f}, 0.1)", "F.elu({f})", "F.hardtanh({f})",
    "F.hardswish({f})", "F.mish({f})", "F.selu({f})", "F.logsigmoid({f})", "torch.expm1({f}.clamp(max=2))",
    "{f}.clamp(-1, {c})", "{f}.clamp_min(0.25)", "{f}.reciprocal().clamp(-3, 3)", "torch.atan({f})",
    "torch.sinh({f}.clamp(-2, 2))", "torch.nan_to_num({f})", "{f} * {c}", "{f} + {c}", "{c} - {f}", "{f} / {c}",
    "{f} ** 2", "{f}.abs() ** 0.5", "2.0 ** {f}.clamp(-2, 2)", "{f}.float()", "{f}.double()",
    "{f}.to(torch.bfloat16)", "{f}.detach()", "{f}.clone()", "{f}.sign()", "{f}.round()", "{f}.floor()",
    "{f}.trunc()", "torch.threshold({f}, 0.1, 0.0)", "F.softsign({f})", "F.relu6({f})", "F.hardsigmoid({f}.float())",
    "F.tanhshrink({f})", "F.softshrink({f})", "torch.log2({f}.abs() + 1)", "{f}.frac()", "torch.asinh({f})",
    "torch.erfc({f})", "torch.special.expit({f})", "torch.xlogy({f}, {f}.abs() + 1)", "F.celu({f}, 1.5)",
    "F.hardshrink({f})", "torch.deg2rad({f})", "torch.acos({f}.clamp(-0.9, 0.9))", "torch.asin({f}.clamp(-0.9, 0.9))",
    "torch.atanh({f}.clamp(-0.9, 0.9))", "torch.tan({f}.clamp(-1, 1))", "torch.cosh({f}.clamp(-2, 2))",
    "torch.acosh({f}.abs() + 1.5)", "torch.exp2({f}.clamp(max=3))", "torch.log10({f}.abs() + 1)", "torch.sinc({f})",
    "torch.sgn({f})", "torch.ceil({f})", "{f}.half()", "{f}.type_as({g})", "torch.positive({f})",
    "torch.logit({f}.sigmoid())",
)  # fmt: skip
BINARY = (
    "{f} + {g}", "{f} - {g}", "{f} * {g}", "{f} / ({g}.abs() + 0.5)", "torch.maximum({f}, {g})",
    "torch.minimum({f}, {g})", "torch.where({f} > {g}, {f}, {c})", "torch.where({f} > 0, {f}, {g})",
    "torch.atan2({f}, {g}.abs() + 0.5)", "torch.hypot({f}, {g})", "torch.lerp({f}, {g}, 0.3)",
    "torch.addcmul({f}, {f}, {g}, value=0.5)", "torch.addcdiv({f}, {g}, {g}.abs() + 1)",
    "({f}.abs() + 0.5) ** {g}.clamp(-2, 2)", "torch.copysign({f}, {g})", "torch.fmod({f}, {g}.abs() + 0.5)",
    "torch.remainder({f}, {g}.abs() + 0.5)", "torch.logaddexp({f}, {g})", "{f} * ({g} > 0)",
    "{f}.masked_fill({g} < 0, {c})", "torch.sub({f}, {g}, alpha=2)", "torch.fmax({f}, {g})",
    "torch.heaviside({f}, {g})", "torch.where({b}, {f}, {g})", "{f} + {v}", "{f} * {v}",
    "{f}.div({g}.abs() + 1, rounding_mode='floor')", "torch.clamp({f}, {g} - 1, {g} + 1)", "torch.fmin({f}, {g})",
    "F.l1_loss({f}, {g}.expand_as({f}), reduction='none')", "F.mse_loss({f}, {g}.expand_as({f}))",
    "F.glu(torch.cat([{f}, {f}], -1))", "F.smooth_l1_loss({f}, {g}.expand_as({f}))", "torch.dist({f}, {g})",
    "F.prelu({f}, {f}.mean())", "torch.where({f} > {g}, {f}, {g}.double())", "{f}.eq({g}).float()",
    "torch.isclose({f}, {g}).float()", "torch.outer({f}.flatten()[:9], {g}.flatten()[:9])",
)  # fmt: skip
REDUCED = (
    "{f}.sum({axis}, keepdim={k})", "{f}.mean({axis}, keepdim={k})", "{f}.amax({axis}, keepdim={k})",
    "{f}.amin({axis}, keepdim={k})", "{f}.sum()", "{f}.mean()", "{f}.amax()",
    "{f}.var({axis}, keepdim={k}, unbiased=False)", "{f}.std({axis}, keepdim={k}, unbiased=False)",
    "torch.logsumexp({f}, {axis}, keepdim={k})", "torch.softmax({f}, {axis})", "torch.log_softmax({f}, {axis})",
    "{f}.norm(dim={axis}, keepdim={k})", "torch.linalg.vector_norm({f}, dim={axis}, keepdim={k})",
    "{f}.cumsum({axis})", "{f}.sum(dim=tuple(range({f}.dim())), keepdim=True)",
    "{f}.clamp(0.5, 1.2).prod({axis}, keepdim={k})", "{f}.max({axis}, keepdim={k})[0]", "{f}.cummax({axis})[0]",
    "F.normalize({f}, dim={axis})", "({f} - {f}.mean({axis}, keepdim=True)).square().mean({axis}, keepdim={k})",
    "{f}.sum({axis}, keepdim={k}, dtype=torch.float32)", "{f}.flip({axis}).cumsum({axis}).flip({axis})",
    "{f}.count_nonzero({axis}).float()", "({f} > 0).sum({axis}, keepdim={k}) * 0.5",
    "({f} > 0).any({axis}, keepdim={k}).float()", "{f}.abs().topk(1, {axis})[0]", "{f}.sort({axis})[0]",
    "F.layer_norm({f}, {f}.shape[-1:])", "F.softmin({f}, {axis})", "{f}.logcumsumexp({axis})",
    "{f}.argmax({axis}, keepdim={k}).float()", "{f}.nansum({axis}, keepdim={k})", "torch.aminmax({f}, dim={axis})[1]",
    "{f}.cumprod({axis}).clamp(-3, 3)", "{f}.median({axis})[0]", "{f}.min({axis}, keepdim={k})[0]",
    "torch.var_mean({f}, {axis}, unbiased=False)[1]", "F.rms_norm({f}, {f}.shape[-1:])",
    "torch.std({f}, unbiased=False)", "{f}.kthvalue(1, {axis})[0]", "({f} > 0).all({axis}, keepdim={k}).float()",
    "torch.diff({f}, dim={axis})", "F.cosine_similarity({f}, {f} + 1, dim={axis})",
)  # fmt: skip
LAID_OUT = (
    "{v}.transpose(0, -1)", "{v}.flatten()", "{v}.reshape(-1)", "{v}.unsqueeze({axis})", "{v}.squeeze()",
    "{v}.flip({axis})", "{v}.roll(1, {axis})", "torch.cat([{v}, {v}], {axis})", "torch.stack([{f}, {f} * 2], {axis})",
    "torch.cat([{f}, {g}.expand_as({f})], {axis})", "{v}.select({axis}, 0)", "{v}.narrow({axis}, 0, 1)",
    "{v}[..., ::2]", "{v}[..., 1:]", "{v}[..., :-1]", "{v}.chunk(2, {axis})[0]", "{v}.chunk(2, {axis})[-1]",
    "{v}.tril()", "{v}.triu(1)", "{v}.diagonal(dim1=-2, dim2=-1)", "{v}.repeat_interleave(2, {axis})",
    "{v}.unbind({axis})[0]", "{v}.contiguous()", "{v}.expand(2, *{v}.shape)", "{v}.movedim(0, -1)",
    "{v}.permute(*reversed(range({v}.dim())))", "{v}[None]", "{v}[..., None]", "F.pad({f}, (1, 2))",
    "{v}.view({v}.shape)", "{v}.mT", "{v}.unflatten(-1, (-1, 1))", "{v}.tile((2,))",
    "{v}.swapaxes(0, -1).contiguous()", "torch.hstack([{f}, {f}])", "torch.broadcast_to({v}, (2, *{v}.shape))",
    "{v}.as_strided({v}.shape, {v}.stride())", "torch.rot90({m}, 1, (-2, -1))", "{v}.split(2, {axis})[0]",
    "{v}.tensor_split(2, {axis})[1]", "{v}.ravel()", "{v}.view_as({v})", "{v}.unfold({axis}, 1, 1)",
    "{v}.flatten(0, -1)[::3]", "torch.meshgrid({v}.flatten()[:5], {v}.flatten()[:7], indexing='ij')[0]",
    "torch.diag_embed({v})", "F.pad({f}, (0, 1), value={c})",
)  # fmt: skip
MATRICES = (
    "{m} @ {m}.mT", "{m}.mT @ {m}", "torch.einsum('...ij,...kj->...ik', {m}, {m})",
    "({m}.unsqueeze(-1) * {m}.unsqueeze(-2)).sum(-1)", "torch.matmul({m}, {m}.sum(-2))",
    "F.linear({m}, {m}.reshape(-1, {m}.shape[-1]))", "({m} * {m}.amax(-1, keepdim=True)).sum(-2)",
    "torch.softmax({m} @ {m}.mT * 0.2, -1) @ {m}", "torch.tril({m} @ {m}.mT)",
)  # fmt: skip
INDEXED = (
    "{f}.gather({axis}, {f}.argsort({axis}))", "{f}.index_select({axis}, torch.arange({f}.shape[{axis}]).flip(0))",
    "torch.zeros_like({f}).scatter({axis}, {f}.argsort({axis}), {f})",
    "torch.zeros_like({f}).index_add({axis}, torch.arange({f}.shape[{axis}]), {f})",
    "{f}[{i}.reshape(-1) % {f}.shape[0]]", "F.one_hot({i} % 3, 3) * {c}",
    "{f}.take_along_dim({f}.argmax({axis}, keepdim=True), {axis})",
    "torch.zeros_like({f}).scatter_add({axis}, torch.zeros_like({f}, dtype=torch.long), {f})",
    "{f}.reshape(-1)[{i}.reshape(-1) % {f}.numel()]", "torch.where(torch.arange({f}.shape[-1]) % 2 == 0, {f}, -{f})",
    "{f}[..., torch.tensor([0, 0])]", "torch.where({b}, {f}, 0.5).masked_fill({b}, {c})",
    "{f}.index_fill({axis}, torch.tensor([0]), {c})", "torch.take({f}, torch.arange({f}.numel()).flip(0))",
    "{f}.index_copy({axis}, torch.arange({f}.shape[{axis}]), {f} * 2)",
    "F.nll_loss(F.log_softmax({m}, -1).flatten(0, -2), {m}.argmax(-1).flatten())",
    "torch.bucketize({f}, torch.arange(3.0))", "F.cross_entropy({m}.flatten(0, -2), {m}.argmax(-1).flatten())",
    "{f}.scatter({axis}, {f}.argsort({axis}), {c})",
    "torch.zeros_like({f}).scatter_reduce({axis}, {f}.argsort({axis}), {f}, 'amax')",
    "torch.searchsorted(torch.arange(4.0), {f})", "{f} + torch.arange({f}.shape[{axis}]).sum()",
    "F.embedding({i} % {m}.shape[-2], {m}.reshape(-1, {m}.shape[-1]))",
)  # fmt: skip
WHOLE = (
    "{i} + 1", "{i} * {i}", "{i} // 2", "{i} % 3", "{i} & 5", "{i} | 2", "{i} ^ 1", "{i} << 1", "{i} >> 1", "-{i}",
    "{i}.clamp(-2, 3)", "{i}.float()", "{i} > 1", "{i}.sum()", "{i}.cumsum({axis})", "{i}.to(torch.int32)", "{i} / 2",
    "{i} // -3", "{i} % -3", "{i}.abs()", "{f}.long()", "{f} > {c}", "{f} <= {g}", "~{b}", "{b} & ({f} > 0)",
    "{b}.float()", "{f}.isfinite()", "({f} * 3).to(torch.int32)", "{i}.bool()", "{f}.argmin({axis})",
    "torch.bitwise_not({i})", "{i}.amax({axis})", "torch.div({i}, 2, rounding_mode='trunc')",
)  # fmt: skip
INPLACE = (
    "{f}.clone().mul_({c})", "{f}.clone().add_({f}, alpha=2)", "{f}.clone().clamp_(-1, 1)", "{f}.clone().fill_({c})",
    "{f}.exp().neg_()", "torch.empty_like({f}).copy_({g})", "{f}.clone().zero_().add_({g})",
    "{f}.clone().masked_fill_({f} > 0, 0.5)", "{f}.tanh().sub_({g})", "{f}.clone().relu_()",
    "{f}.clone().div_(2).exp_()", "torch.zeros_like({f}).index_add_({axis}, torch.arange({f}.shape[{axis}]), {f})",
    "{f}.clone().transpose(0, -1).mul_(2)", "torch.zeros_like({f}).index_put_((torch.arange({f}.shape[0]),), {f})",
    "{f}.clone().addcmul_({f}, {f})", "{f}.clone().lerp_({f}, 0.2)",
)  # fmt: skip
NUMBERS = (
    "{f} * {n}", "{f} + {n}", "{n} - {f}", "{f} / {n}", "torch.clamp({f}, max={n})", "{f}.abs().pow({n})",
    "({f} if {o} is None else {f} * {o})", "({f}.tanh() if {t} else {f})",
    "({f}.mean() if {u} == 'mean' else {f}.sum())", "torch.where({f} > {n}, {f}, {n})", "F.leaky_relu({f}, {n})",
    "{i} + {n}", "{f}.sum({axis}, keepdim={t})", "torch.full_like({f}, {n})",
)  # fmt: skip
"""Of arguments that are no tensors."""
RANDOM = (
    "{f} * torch.rand_like({f})", "{f} + torch.randn({f}.shape)", "F.dropout({f}, 0.5)", "{f} * torch.rand(())",
    "torch.bernoulli(torch.sigmoid({f}))", "torch.where(torch.rand({f}.shape) < 0.5, {f}, 0.0)",
    "torch.empty_like({f}).normal_()", "{f} + torch.randint(0, 5, {f}.shape)", "{f}.clone().uniform_(-1, 1) * {f}",
    "{f} + torch.randperm({f}.shape[-1])",
)  # fmt: skip
DIRTY = (
    "{x}.mul_(1.5)", "{x}.add_(1)", "{x}.tanh_()", "{x}.clamp_(-1, 1)", "{x}.neg_()", "{x}.sub_({x}.mean())",
)  # fmt: skip
"""Writes to an argument."""
FORWARD = ((UNARY, 8), (BINARY, 8), (REDUCED, 5), (LAID_OUT, 4), (MATRICES, 1), (INDEXED, 1), (WHOLE, 2), (INPLACE, 1))
"""Tables of templates with how often each is drawn."""
LINEAR = (
    "{g} * {s}", "{g} * {s}", "{g} * {s}.sigmoid()", "{g} * {c}", "{g} + {h}", "{g} - {h}", "-{g}",
    "{g} / ({s}.abs() + 0.5)", "{g}.sum({axis}, keepdim={k})", "{g}.mean({axis}, keepdim={k})",
    "torch.where({s} > 0, {g}, 0.0)", "{g}.masked_fill({s} < 0, 0)", "{g} * ({s} > 0)", "{g}.cumsum({axis})",
    "{g}.flip({axis})", "{g}.clone()", "{g} * {s}.exp().clamp(max=3)", "{g} - ({g} * {s}).mean({axis}, keepdim=True)",
    "{g} @ {s}.mT", "{s}.mT @ {g}", "{g}.transpose(0, -1)", "{g}.unsqueeze({axis})", "{g}.sum()", "{g}[..., :1]",
    "{g} * torch.tanh({s})", "{g}.float()", "{g}.to({s}.dtype)", "F.pad({g}, (1, 0))", "{g} * {s}.softmax({axis})",
    "{g} * ctx_k", "torch.addcmul({g}, {g}, {s})", "{g}.clone().mul_({s})", "{g}.expand(2, *{g}.shape).sum(0)",
    "{g}.contiguous()", "({g} * {s}).sum({axis}, keepdim=True) * {s}", "{g}.tril()",
    "{g}.index_select({axis}, torch.arange({g}.shape[{axis}]).flip(0))", "{g} * {n}", "{g}.roll(1, {axis})",
    "{g}.triu()", "torch.cat([{g}, {h}], -1)", "{g}.reshape(-1)", "{g}.double()",
    "{g}.clone().masked_fill_({s} > 1, 0)", "torch.lerp({g}, {h}, 0.25)", "{g}.select({axis}, 0)",
    "{g}.diagonal(dim1=-2, dim2=-1)", "torch.zeros_like({s}).index_add({axis}, torch.arange({s}.shape[{axis}]), {g})",
    "{g}.expand_as({s})", "{g}.sum_to_size({s}.shape)",
)  # fmt: skip
"""Of a backward: g and h carry a gradient, in which each is linear; s was saved."""
