"""Traces cached on disk: what a first call found out, for the first call of another process.

A stored specialisation serves plain calls out of tables; whatever else is asked of it (torch.func, another gradient
layout, a second derivative) recompiles then, at the sizes of the stored trace, and has to agree with it.
"""

from .keeper import lookup

__all__ = ["lookup"]
