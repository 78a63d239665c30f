"""What the Functions of the gallery become at sizes of practice: launches, and bytes over the least possible.

    python -m fusegrad.examples.gallery.figures           # the table of docs/gallery.md
    python -m fusegrad.examples.gallery.figures rms_norm

Counted from the generated kernels, for sm_90; nothing is timed and no GPU is needed.
"""

from __future__ import annotations

import sys
from typing import Any

import fusegrad

from .catalogue import CATALOGUE

ROWS, WIDE, ROW = "bf16[8192,4096]", "bf16[4096,14336]", "bf16[4096]"
LOGITS, LABELS = "bf16[4096,32000]", "i64[4096]"
PROBABILITIES = "f32[4096,32000]"
SIZES: dict[str, tuple[Any, ...]] = {
    "rms_norm": (ROWS, ROW, 1e-6),
    "layer_norm": (ROWS, ROW, ROW, 1e-5),
    "group_norm": ("bf16[16,512,64,64]", "bf16[512]", "bf16[512]", 32, 1e-5),
    "add_rms_norm": (ROWS, ROWS, ROW, 1e-6),
    "gated_rms_norm": (ROWS, ROWS, ROW, 1e-6),
    "dynamic_tanh": (ROWS, "f32[1]", ROW, ROW),
    "poly_norm": (ROWS, "f32[3]", "f32[]", 1e-6),
    "swiglu": (WIDE, WIDE),
    "geglu": (WIDE, WIDE),
    "gelu": (WIDE,),
    "reglu": (WIDE, WIDE),
    "squared_relu": (WIDE,),
    "cross_entropy": (LOGITS, LABELS, -100, 0.1, 1e-4),
    "fused_linear_cross_entropy": ("bf16[4096,4096]", "bf16[32000,4096]", LABELS, -100),
    "kl_divergence": (PROBABILITIES, PROBABILITIES),
    "js_divergence": (PROBABILITIES, PROBABILITIES, 0.5),
    "total_variation": (PROBABILITIES, PROBABILITIES),
    "focal_loss": ("f32[8192,1024]", "bool[8192,1024]", 0.25, 2.0),
    "dpo_loss": ("f32[4096]", "f32[4096]", "f32[4096]", "f32[4096]", 0.1),
    "clipped_policy_loss": ("f32[512,4096]", "f32[512,4096]", "f32[512,4096]", "bool[512,4096]", 0.2, 0.2),
    "tversky_loss": ("f32[64,65536]", "f32[64,65536]", 0.3, 0.7, 1.0),
    "info_nce": ("bf16[16384,64]", "bf16[16384,64]", 0.07),
    "attention": ("bf16[4,32,4096,128]", "bf16[4,8,4096,128]", "bf16[4,8,4096,128]", 128**-0.5, True),
    "rope": ("bf16[4,32,4096,128]", "bf16[4096,64]", "bf16[4096,64]"),
    "masked_softmax": ("bf16[2,16,2048,2048]", "bool[2048,2048]"),
    "sink_softmax": ("bf16[2,16,2048,2048]", "bf16[16]"),
    "sparsemax": ("f32[8192,4096]",),
    "entmax15": ("f32[8192,4096]",),
    "soft_sort": ("f32[512,512]", 1.0),
    "soft_rank": ("f32[512,512]", 1.0),
    "learned_step": ("f32[4096,4096]", "f32[]", 4),
    "fake_quantize": ("f32[4096,4096]", "f32[4096]", "f32[4096]", -8, 7),
    "int8_rows": (ROWS,),
    "ternary": ("f32[4096,4096]",),
    "straight_through": (ROWS, 0.25, 4),
    "sign": (ROWS,),
    "hard_choice": ("f32[8192,1024]", "f32[8192,1024]", 0.7),
    "gradient_reversal": (ROWS, 0.3),
    "poisson_residual": ("f32[16,1024,1024]", "f32[16,1024,1024]", 0.1),
    "burgers_residual": ("f32[16,1024,1024]", 0.1, 0.1, 0.01),
}
"""Arguments as specifications, by the names of the catalogue."""


def figures(name: str) -> dict[str, str]:
    """Forward then backward: launches, those of them that are library calls, bytes over the least; bytes saved."""
    function = next(entry.function for entry in CATALOGUE if entry.name == name)
    told = fusegrad.explain(function, *SIZES[name]).to_dict()
    return {
        "launches": _pair(str(told["launches"][d]) for d in DIRECTIONS),
        "library": _pair(str(_calls(told, d)) for d in DIRECTIONS),
        "bytes": _pair(_ratio(told["bytes"][d], told["bytes"][f"minimal_{d}"]) for d in DIRECTIONS),
    }


DIRECTIONS = ("forward", "backward")


def _pair(values: Any) -> str:
    return " + ".join(values)


def _calls(told: dict[str, Any], direction: str) -> int:
    called = [k for k in told["kernels"] if k["direction"] == direction and k["kind"] != "triton"]
    return sum(kernel["times"] for kernel in called)


def _ratio(moved: int, least: int) -> str:
    return f"{moved / least:.2f}" if least and moved else "0"


def row(name: str) -> str:
    """One row of the table, as Markdown."""
    found = figures(name)
    sizes = ", ".join(str(size) for size in SIZES[name] if isinstance(size, str))
    return f"| `{name}` | {sizes} | {found['launches']} | {found['library']} | {found['bytes']} |"


if __name__ == "__main__":
    for asked in sys.argv[1:] or [entry.name for entry in CATALOGUE]:
        print(row(asked), flush=True)
