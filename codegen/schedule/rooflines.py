"""The best that devices can do, from their data sheets: dense products, no sparsity, without TF32 for float32."""

from __future__ import annotations

from ...ir.passes.products import Machine
from ..kernel import Target


def _machine(bandwidth: float, low: float, single: float) -> Machine:
    return Machine(bandwidth, {"f16": low, "bf16": low, "f32": single})


MACHINES = {
    "cuda:80": _machine(2.0e12, 312e12, 19.5e12),
    "cuda:89": _machine(0.9e12, 165e12, 82e12),
    "cuda:90": _machine(3.35e12, 989e12, 67e12),
    "cuda:100": _machine(8.0e12, 2250e12, 80e12),
    "hip:gfx942": _machine(5.3e12, 1307e12, 163e12),
}


def machine_of(target: Target) -> Machine:
    """The device, or the newest one that is not newer; the interpreter is taken for a GPU, so that it runs the same."""
    if str(target) in MACHINES:
        return MACHINES[str(target)]
    if target.kind == "hip":
        return MACHINES["hip:gfx942"]
    arch = int(target.arch) if target.arch.isdigit() else 90
    older = [n for n in MACHINES if n.startswith("cuda:") and int(n.removeprefix("cuda:")) <= arch]
    return MACHINES[older[-1] if older else "cuda:80"]
