"""`make fuzz N=1000 SEED=0`: random programs, compiled, against eager. `--help` says more."""

import sys

from fuzz_runs import main

if __name__ == "__main__":
    sys.exit(main())
