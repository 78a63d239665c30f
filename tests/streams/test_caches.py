"""New keys behind those of a cache, heads in groups: launches and bytes at usual sizes."""

from __future__ import annotations

import sys
from pathlib import Path

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from concatenated_functions import Cache, described


def test_usual_sizes() -> None:
    """Kernels read the keys once for each group of heads; no gradient of a piece is copied out of that of the whole."""
    explained = fusegrad.explain(fusegrad.compile(Cache), *described(Cache, 2048), target="cuda:90")
    forward, backward = explained.directions.values()
    assert not forward.reasons and not backward.reasons
    assert len(forward.launches) == 3 and len(backward.launches) == 2
    moved = [sum(launch.bytes_read + launch.bytes_written for launch in d.launches) for d in (forward, backward)]
    assert moved[0] < 1.3 * forward.minimal and moved[1] < 1.6 * backward.minimal
