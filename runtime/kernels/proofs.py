"""Proofs that the accesses of generated kernels are in bounds: in words, and before they may run.

Kernels are proved once, for all sizes. What is left open is asked again at the sizes of a call, in numbers, and what is
open then does not run: the call goes through torch. Programs that may meet at a place are for `make proofs` to find.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy

from ...codegen import Kernel, Kernels
from ...codegen.proofs import Fault, Proof, prove, prove_kernel
from ...ir import Graph
from ...ir.passes.fuse import Group, Step
from ..settings import logs


def proofs_of(steps: Sequence[Step], kernels: Iterable[Kernels]) -> list[Proof]:
    """Of every kernel of a direction; its groups have their kernels in the same order."""
    groups = [step for step in steps if isinstance(step, Group)]
    return [proof for group, own in zip(groups, kernels, strict=True) for proof in prove(group.graph, own)]


def line_of(proof: Proof) -> str:
    """kernel: accesses: 12 proved in range for all sizes, offsets 64-bit where 32 bits are too few"""
    parts = [f"{proof.count('proved')} proved in range for all sizes"]
    if groups := proof.count("group"):
        parts.append(f"{groups} in 16-byte groups of an aligned tensor")
    parts += [f"{len(found)} where {condition}" for condition, found in _conditions(proof).items()]
    parts.append("offsets 64-bit where 32 bits are too few")
    text = f"{proof.kernel}: accesses: {', '.join(parts)}"
    return text if proof.proved else f"{text}; NOT PROVED: {'; '.join(map(str, proof.faults))}"


def _conditions(proof: Proof) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for claim in proof.claims:
        if claim.answer == "data":
            found.setdefault(claim.condition, []).append(claim.text)
    return found


def log_proofs(group: Group, kernels: Kernels) -> None:
    """The proofs of kernels that were generated just now, in the log; what is not proved is a warning there."""
    for proof in prove(group.graph, kernels):
        (logs.codegen.info if proof.proved else logs.codegen.warning)("%s", line_of(proof))


# ------------------------------------------------------------------ before a launch
KEPT = 4096
_known: OrderedDict[Any, bool] = OrderedDict()
"""Whether all was proved, by everything that a proof looks at."""


def are_proved(graph: Graph, kernels: Kernels, assumed: Sequence[sympy.Basic] = ()) -> bool:
    """Whether every access is in range, and every offset wide enough, for all sizes under guards and assumptions."""
    key = _key(graph, kernels, assumed)
    if (found := _known.get(key)) is None:
        under = [replace(k, guards=(*k.guards, *assumed)) for k in kernels.kernels]
        found = _known[key] = not any(_faults(k, graph, kernels) for k in under)
        while len(_known) > KEPT:
            _known.popitem(last=False)
    return found


def unproved_at(graph: Graph, kernels: Kernels, sizes: Mapping[sympy.Symbol, int]) -> str:
    """Say what is not proved at these sizes, either; "" where everything is."""
    for kernel in kernels.kernels:
        if faults := _faults(replace(kernel, pinned={**kernel.pinned, **sizes}), graph, kernels):
            return f"{kernel.name}: {faults[0]}"
    return ""


def _faults(kernel: Kernel, graph: Graph, kernels: Kernels) -> Sequence[Fault]:
    try:
        return prove_kernel(kernel, graph, kernels, apart=False).faults
    except Exception as error:  # a mistake of the prover proves nothing, and breaks no call
        return (Fault("text", 0, f"{type(error).__name__}: {error}"),)


def _key(graph: Graph, kernels: Kernels, assumed: Sequence[sympy.Basic]) -> Any:
    shapes = [(v.shape, v.params["strides"]) for v in graph.inputs]
    results = [(v.shape, s) for v, s in zip(graph.outputs, graph.output_strides, strict=True) if v is not None]
    inner = {n for v in graph.order() for t in v.avals for n in t.shape}
    each = [
        (k.source, k.arguments, k.grid, _fixed(k.constants), _fixed(k.pinned), k.guards, k.scratch, k.aligned)
        for k in kernels.kernels
    ]
    return (*shapes, *results, frozenset(inner), *each, kernels.temporaries, *assumed)


def _fixed(values: Mapping[Any, Any]) -> tuple[Any, ...]:
    return tuple((k, type(v), str(v)) for k, v in values.items())
