"""Proofs about emitted text: every access in range, every offset wide enough, no two programs at one place."""

from .accesses import dimensions_of, prove, prove_kernel
from .claims import Claim, Fault, Proof
from .in_place import may_overwrite

__all__ = ["Claim", "Fault", "Proof", "dimensions_of", "may_overwrite", "prove", "prove_kernel"]
