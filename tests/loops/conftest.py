"""Makes the tables importable as `loops.recurrences`, `loops.unrolled`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
