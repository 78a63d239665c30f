"""Proofs about emitted text: every access in range, every offset wide enough, no two programs at one place."""

from .accesses import prove, prove_kernel
from .claims import Claim, Fault, Proof

__all__ = ["Claim", "Fault", "Proof", "prove", "prove_kernel"]
