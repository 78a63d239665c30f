"""The calls of torch that a bundle may hold: functions of tensors, of torch's own operators, that check what they read.

A stranger's graph names operators. One that opens files, writes in place, trusts its caller about sizes, or belongs to
a library outside torch is refused, when a bundle is written and when it is read.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from ....ir import Value

REFUSED = re.compile(
    r"^(from_file|.*unsafe.*|.*storage.*|record_stream|set_.*|resize.*|.*pin_memory.*|.*sparse.*|.*quant.*|nested_.*|"
    r".*mkldnn.*|item|.*numpy.*)$"
)
INNER = frozenset(
    "_conj _neg_view _fft_r2c _fft_c2r _fft_c2c _linalg_det _linalg_slogdet _linalg_eigh _linalg_svd _linalg_solve_ex "
    "_cdist_forward _cdist_backward _pdist_forward _to_copy _unsafe_view _softmax _log_softmax "
    "_softmax_backward_data _log_softmax_backward_data _adaptive_avg_pool2d _adaptive_avg_pool2d_backward "
    "_adaptive_avg_pool3d _scaled_dot_product_flash_attention_for_cpu _native_batch_norm_legit".split()
)
"""Operators that begin with an underscore and check their arguments all the same."""
CHECKS = ("aten._assert_async.default", "aten._assert_async.msg")
"""Operators without a result, which raise where a tensor is false."""


def why_not_portable(value: Value) -> str | None:
    """The reason why a node cannot be part of a bundle, or None."""
    if value.prim == "call":
        return "it calls another Function, which stays as it is written"
    if "op" not in value.params:
        return None
    name = value.params["op"]
    return None if is_portable(name) else f"it calls {str(name)[:80]}, which a bundle cannot name"


def is_portable(name: Any) -> bool:
    """True where "aten.sort.default" names an operator that a bundle may call."""
    if name in CHECKS:
        return True
    if not isinstance(name, str) or re.fullmatch(r"aten\.[a-z_0-9A-Z]{1,80}\.[a-z_0-9A-Z]{1,60}", name) is None:
        return False
    _, packet, overload = name.split(".")
    allowed = packet in INNER or not (packet.startswith("_") or REFUSED.match(packet))
    operator = getattr(torch.ops.aten, packet, None) if allowed else None
    if not isinstance(operator, torch._ops.OpOverloadPacket) or overload not in operator.overloads():  # type: ignore[no-untyped-call]
        return False
    schema = getattr(operator, overload)._schema
    takes_tensors = any("Tensor" in str(a.type) for a in schema.arguments)
    returns_tensors = any("Tensor" in str(r.type) for r in schema.returns)
    return not schema.is_mutable and takes_tensors and returns_tensors
