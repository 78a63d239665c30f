"""Registers behind the keys: values, the gradients of each piece, and launches."""

from __future__ import annotations

import sys
from pathlib import Path

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from beside_eager import differences, transposed_heads
from concatenated_functions import Behind, arguments, described


def test_beside_eager() -> None:
    """One that is alone is read at its only place, and not beyond the end."""
    fast = fusegrad.compile(Behind, backend="interpret", fullgraph=True)
    for n, r in ((50, 1), (17, 3)):
        given = [transposed_heads(a) for a in arguments(Behind, 2, 2, n, 16, r)]
        assert not differences(fast.apply, Behind.apply, given, transposed_heads)


def test_usual_sizes() -> None:
    """No scores in memory, and no gradient of a piece is copied out of that of the whole."""
    explained = fusegrad.explain(fusegrad.compile(Behind), *described(Behind, 16), target="cuda:90")
    forward, backward = explained.directions.values()
    assert not forward.reasons and not backward.reasons
    assert len(forward.launches) == 1 and len(backward.launches) == 2
    moved = sum(launch.bytes_read + launch.bytes_written for launch in backward.launches)
    assert moved < 2.2 * backward.minimal
