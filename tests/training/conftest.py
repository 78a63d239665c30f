"""Makes this folder's modules, and `side_by_side` of the contract, importable by name."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "contract")]
