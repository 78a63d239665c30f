"""How Python sources that are written at run time are told in a traceback."""

from __future__ import annotations

STRAIGHT = "<fusegrad straight"
"""How the names of its files begin."""
NODE = "return node"
"""How the line begins that calls a generated Function."""
