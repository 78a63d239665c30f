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
from ...codegen.proofs import Fault, Proof, dimensions_of, prove, prove_kernel
from ...ir import Graph
from ...ir.passes.fuse import Group
from ...ir.types import Size
from ..settings import logs


def proofs_of(groups: Iterable[tuple[Group, Kernels]]) -> list[Proof]:
    """Of every kernel of some groups."""
    return [proof for group, own in groups for proof in prove(group.graph, own)]


def proof_line(proof: Proof) -> str:
    """kernel: accesses: 12 proved in range for all sizes, offsets 64-bit where 32 bits are too few"""
    parts = [f"{proof.count('proved')} proved in range for all sizes"]
    if asserted := sum(claim.asserted for claim in proof.claims):
        parts.append(f"{asserted} of them by what is asserted of an index")
    if groups := proof.count("group"):
        parts.append(f"{groups} in 16-byte groups of an aligned tensor")
    parts += [f"{len(accesses)} where {condition}" for condition, accesses in _conditions(proof).items()]
    parts.append("offsets 64-bit where 32 bits are too few")
    text = f"{proof.kernel}: accesses: {', '.join(parts)}"
    return text if proof.proved else f"{text}; NOT PROVED: {'; '.join(map(str, proof.faults))}"


def _conditions(proof: Proof) -> dict[str, list[str]]:
    accesses: dict[str, list[str]] = {}
    for claim in proof.claims:
        if claim.answer == "data":
            accesses.setdefault(claim.condition, []).append(claim.text)
    return accesses


def log_proofs(group: Group, kernels: Kernels) -> None:
    """The proofs of kernels that were generated just now, in the log; what is not proved is a warning there."""
    for proof in prove(group.graph, kernels):
        (logs.codegen.info if proof.proved else logs.codegen.warning)("%s", proof_line(proof))


# ------------------------------------------------------------------ before a launch
MOST_ANSWERS = 4096
_answers: OrderedDict[Any, bool] = OrderedDict()
"""True where all was proved, by everything that a proof looks at."""


def are_proved(graph: Graph, kernels: Kernels, assumed: Sequence[sympy.Basic] = ()) -> bool:
    """True where every access is in range, and every offset wide enough, for all sizes under guards and assumptions."""
    key = _key(graph, kernels, assumed)
    if (proved := _answers.get(key)) is None:
        under = [replace(k, guards=(*k.guards, *assumed)) for k in kernels.kernels]
        dimensions = dimensions_of(graph)
        proved = _answers[key] = not any(_faults(k, graph, kernels, dimensions) for k in under)
        while len(_answers) > MOST_ANSWERS:
            _answers.popitem(last=False)
    return proved


def unproved_at(graph: Graph, kernels: Kernels, sizes: Mapping[sympy.Symbol, int]) -> str:
    """Say what is not proved at these sizes, either; "" where everything is."""
    dimensions = dimensions_of(graph)
    for kernel in kernels.kernels:
        if faults := _faults(replace(kernel, pinned={**kernel.pinned, **sizes}), graph, kernels, dimensions):
            return f"{kernel.name}: {faults[0]}"
    return ""


def _faults(kernel: Kernel, graph: Graph, kernels: Kernels, dimensions: Sequence[Size]) -> Sequence[Fault]:
    try:
        return prove_kernel(kernel, graph, kernels, apart=False, dimensions=dimensions).faults
    except Exception as error:  # a mistake of the prover proves nothing, and breaks no call
        return (Fault("text", 0, f"{type(error).__name__}: {error}"),)


def _key(graph: Graph, kernels: Kernels, assumed: Sequence[sympy.Basic]) -> Any:
    shapes = [(v.shape, v.params["strides"]) for v in graph.inputs]
    results = [(v.shape, s) for v, s in zip(graph.outputs, graph.output_strides, strict=True) if v is not None]
    inner = {n for v in graph.order() for t in v.avals for n in t.shape}
    each = [
        (k.source, k.arguments, k.grid, _hashable(k.constants), _hashable(k.pinned), k.guards, k.scratch, k.aligned)
        for k in kernels.kernels
    ]
    return (*shapes, *results, frozenset(inner), *each, kernels.temporaries, *assumed)


def _hashable(values: Mapping[Any, Any]) -> tuple[Any, ...]:
    return tuple((k, type(v), str(v)) for k, v in values.items())
