"""What was proved of the accesses of generated kernels, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..codegen import Kernels
from ..codegen.proofs import Proof, prove
from ..ir.passes.fuse import Group, Step
from . import logs


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


def record(group: Group, kernels: Kernels) -> None:
    """The proofs of kernels that were generated just now, in the log; what is not proved is a warning there."""
    for proof in prove(group.graph, kernels):
        (logs.codegen.info if proof.proved else logs.codegen.warning)("%s", line_of(proof))
