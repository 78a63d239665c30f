"""Makes the table importable as `compose.functions`: other folders have a `functions` too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
