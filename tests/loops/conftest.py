"""Makes the tables importable as `loops.recurrences`, `loops.unrolled`, and the programs as `fuzz_loops`."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
