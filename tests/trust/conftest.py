"""Makes the long runs importable by the tests of this folder, which take a slice of each."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
