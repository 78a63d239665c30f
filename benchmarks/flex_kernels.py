"""FlexAttention's kernels for the cases of `stream_functions`, as Inductor emits them for an H100. Not run.

Its templates are lowered at the tile that Inductor takes without tuning, forward and backward in one graph. Runs in a
process of its own: `inductor.pretend_gpu` puts a pretended GPU behind torch.cuda.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fusegrad.runtime.values.tensor_specs import is_spec, parse_spec

from . import inductor
from .attention_peers import MODIFIED, Modified, _block_mask
from .peer_instructions import compiled_by_inductor, launches_of
from .plans import DIRECTIONS, TARGET
from .stream_functions import STREAMS
from .stream_kernels import need_of

FLEXED = [name for name, (_, case, _) in STREAMS.items() if case.function in MODIFIED]
"""The cases that it can express."""
OPTIONS = {
    "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False, "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False,
}  # fmt: skip
"""What flex_attention asks of its templates, unless it is told otherwise."""
TEMPLATE = "_tem_"
"""What Inductor calls kernels that are made of a template."""


def flex_kernels(name: str) -> dict[str, Any]:
    """A row like those of `stream_kernels.streams`, for sm_90 alone; with "error" where Inductor has no kernels."""
    _, case, scores = STREAMS[name]
    row: dict[str, Any] = {"case": f"FlexAttention: {name}", "beside": name, "scores": scores, "targets": {}}
    try:
        launches = launches_of(_text(case.function, case.args))
        needs = (_need(kernel, source) for kernel, source, _ in launches if TEMPLATE in kernel)
        found = {f"flex_attention {d}": {"direction": d, **need} for d, need in zip(DIRECTIONS, needs, strict=True)}
    except Exception as error:  # whatever Inductor or the pretended GPU stumbles over is reported as that
        return {**row, "error": f"{type(error).__name__}: {error}"[:300]}
    return {**row, "targets": {TARGET: found}}


# ------------------------------------------------------------------ lowering
def _text(function: type, arguments: Sequence[Any]) -> str:
    """What Inductor makes of forward and backward."""
    mode, module = FakeTensorMode(allow_non_fake_inputs=True), sys.modules["torch._higher_order_ops.flex_attention"]
    with mode, mock.patch.object(module, "_permute_strides", _permuted):
        args = [inductor._on_gpu(*parse_spec(a)) if is_spec(a) else a for a in arguments]
        call = MODIFIED[function](*args)
        mask, q = _mask_of(call), call.q
        tensors = [t for t in mask if isinstance(t, Tensor)]
        grad = torch.empty(*q.shape[:-1], call.v.shape[-1], dtype=q.dtype, device="cuda")
        joint = _joint(call)

        def both(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *rest: Tensor) -> list[Tensor]:
            from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

            buffers, given = rest[: len(call.buffers)], iter(rest[len(call.buffers) :])
            blocks = tuple(next(given) if isinstance(m, Tensor) else m for m in mask)
            score, scale = call.score or _as_it_is, call.scale
            out, lse, _ = flex_attention(q, k, v, score, blocks, scale, OPTIONS, buffers, ())
            saved = (q, k, v, out, lse, grad, None)
            found = flex_attention_backward(*saved, score, joint, blocks, scale, OPTIONS, buffers, ())
            return [out, *found[:3], *(found[3] if call.is_learned else ())]

        return inductor.lowered(both, [q, call.k, call.v, grad, *call.buffers, *tensors], mode)[0]


def _as_it_is(score: Any, *places: Any) -> Any:
    return score


def _mask_of(call: Modified) -> tuple[Any, ...]:
    """The blocks, found on the CPU; their tensors without data on the GPU."""
    from torch.nn.attention.flex_attention import _create_empty_block_mask
    from torch.utils._python_dispatch import _disable_current_modes

    rows, columns = call.q.shape[-2], call.k.shape[-2]
    with _disable_current_modes():
        if call.allowed is not None:
            mask = _block_mask(call.allowed, rows, columns, "cpu")
        else:
            mask = _create_empty_block_mask(*(torch.empty(1, 1, n, 1) for n in (rows, columns)))
        parts = mask.as_tuple()
    return tuple(torch.empty_like(p, device="cuda") if isinstance(p, Tensor) else p for p in parts)


def _joint(call: Modified) -> Any:
    """The gradient of a score, traced on the CPU: autograd asks for a device."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch._higher_order_ops.flex_attention import create_fw_bw_graph

    score = torch.empty((), dtype=call.q.dtype, requires_grad=True)
    places = (torch.empty((), dtype=torch.int32) for _ in range(4))
    buffers = tuple(torch.empty(b.shape, dtype=b.dtype, requires_grad=call.is_learned) for b in call.buffers)
    with TransformGetItemToIndex():
        _, joint = create_fw_bw_graph(call.score or _as_it_is, (score, *places), buffers)
    return joint


def _permuted(out: Tensor, strides: Sequence[int]) -> Tensor:
    """The type of a result, without a copy on the device."""
    order = sorted(range(out.ndim), key=lambda axis: strides[axis], reverse=True)
    shape = [out.shape[a] for a in order]
    back = sorted(range(out.ndim), key=order.__getitem__)
    assert isinstance(out, FakeTensor)
    return torch.empty(shape, dtype=out.dtype, device=out.device).permute(back)


# ------------------------------------------------------------------ kernels
def _need(name: str, source: str) -> dict[str, Any]:
    (found,) = compiled_by_inductor(name, source).compile_results
    return need_of(found.kernel.asm, found.kernel.metadata)
