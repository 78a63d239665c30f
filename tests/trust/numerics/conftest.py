"""Makes this folder's modules importable, and the graphs of tests/codegen."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "codegen")]
