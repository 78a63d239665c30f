"""Captures kept on disk: what a first call found out, for the first call of another process.

A stored specialisation serves plain calls out of tables; whatever else is asked of it (torch.func, another gradient
layout, a second derivative) is captured again then, at the sizes of the stored capture, and has to agree with it.
"""

from .keeper import lookup

__all__ = ["lookup"]
