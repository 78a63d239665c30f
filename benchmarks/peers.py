"""What a Function is timed beside: eager, torch.compile, Liger's kernels or torch's attention where they compute the
same, a plain copy.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

import fusegrad

from . import functions as f
from .attention_peers import ATTENTION
from .suite import Case

Apply = Callable[..., Any]
OURS, AGAIN = "fusegrad", "fusegrad again"
COMPILED = {
    "compile": {"dynamic": False},
    "max-autotune": {"dynamic": False, "mode": "max-autotune-no-cudagraphs"},
}
PEERS = (OURS, AGAIN, "eager", *COMPILED, "liger")
NOT_TUNED = (f.FusedLinearCrossEntropy,)
"""Their time is that of library products, and tuning those takes longer than everything else."""


def appliers(case: Case, names: tuple[str, ...], backend: str) -> dict[str, Apply]:
    """How to call each peer with the arguments of the case; those that cannot do it are not among them."""
    found: dict[str, Apply] = {}
    fast = fusegrad.compile(case.function, backend=backend, fullgraph=True)
    for name in names:
        if name in (OURS, AGAIN):
            found[name] = fast.apply
        elif name == "eager":
            found[name] = case.function.apply  # type: ignore[attr-defined]
        elif name in COMPILED and not (name == "max-autotune" and case.function in NOT_TUNED):
            found[name] = torch.compile(case.function.apply, **COMPILED[name])  # type: ignore[attr-defined, call-overload]
        elif case.function in ATTENTION.get(name, {}):
            found[name] = ATTENTION[name][case.function]
        elif name == "liger" and case.function in LIGER and has_liger():
            found[name] = LIGER[case.function]
    return found


def has_liger() -> bool:
    """Whether `liger-kernel` is installed."""
    return importlib.util.find_spec("liger_kernel") is not None


# ------------------------------------------------------------------ Liger
def _liger(module: str, name: str) -> Apply:
    return importlib.import_module(f"liger_kernel.ops.{module}").__dict__[f"Liger{name}Function"].apply  # type: ignore[no-any-return]


LIGER: dict[type, Apply] = {
    f.SwiGLU: lambda gate, up: _liger("swiglu", "SiLUMul")(gate, up),
    f.GeGLU: lambda gate, up: _liger("geglu", "GELUMul")(gate, up),
    f.SquaredReLU: lambda x: _liger("relu_squared", "ReLUSquared")(x),
    f.RMSNorm: lambda x, w, eps: _liger("rms_norm", "RMSNorm")(x, w, eps, 0.0, "llama", False),
    f.AddRMSNorm: lambda x, r, w, eps: _liger("fused_add_rms_norm", "FusedAddRMSNorm")(
        x, r, w, eps, 0.0, "llama", False
    ),
    f.LayerNorm: lambda x, w, b, eps: _liger("layer_norm", "LayerNorm")(x, w, b, eps),
    f.DyT: lambda x, a, g, b: _liger("dyt", "DyT")(x, a, g, b),
    f.GroupNorm: lambda x, w, b, groups, eps: _liger("group_norm", "GroupNorm")(x, w, b, x.shape[1], groups, eps),
    f.PolyNorm: lambda x, w, b, eps: _liger("poly_norm", "PolyNorm")(x, w, b, eps, False),
    f.Softmax: lambda x: _liger("softmax", "Softmax")(x),
    f.CrossEntropy: lambda x, t, ignored: _liger("cross_entropy", "CrossEntropy")(x, t, None, ignored)[0],
    f.SmoothedCrossEntropy: lambda x, t, smoothing, z, cap: _liger("cross_entropy", "CrossEntropy")(
        x, t, None, -100, z, smoothing, "mean", cap
    )[0],
    f.KLDivergence: lambda x, t: _liger("kl_div", "KLDivLoss")(x, t, "batchmean", False),
    f.JSDivergence: lambda x, y, beta: _liger("jsd", "JSD")(x, y, None, beta),
    f.TotalVariation: lambda p, q: _liger("tvd", "TVDLoss")(p, q, None, "batchmean"),
    f.FusedLinearCrossEntropy: lambda x, w, t, chunk: _liger(
        "fused_linear_cross_entropy", "FusedLinearCrossEntropy")(x, w, t)[0],
}  # fmt: skip
"""By positional arguments, as liger-kernel 0.8 has them. Its cross-entropies write the gradient over the logits; its
total variation has a gradient for one argument alone: less work than the others do."""
