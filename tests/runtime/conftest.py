"""Makes the samples of this folder importable by its tests, and those in some tests by the tests of other rooms."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE / room) for room in ("specialize", "compiled", "kernels", "functorch"))]
sys.path.insert(0, str(HERE.parent / "ir" / "loops"))
