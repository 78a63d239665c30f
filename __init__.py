"""fusegrad: custom `torch.autograd.Function` classes, compiled to fused Triton kernels.

@fusegrad.compile                 a Function class, or a plain function of tensors
fusegrad.explain(Fast, *args)     what it becomes: kernels, launches, bytes, and why a method is not compiled
fusegrad.check(Fast, *args)       whether it is what you wrote, over transforms, dtypes, layouts and sizes
fusegrad.stats()                  counters of this process
fusegrad.config.patch(...)        settings for a block of code
"""

from .ir.errors import FusegradError, NotTraceableError
from .runtime import config, random
from .runtime.checking.trial import CheckError, check
from .runtime.explain import explain
from .runtime.function import FallbackWarning, compile
from .runtime.stats import stats

__all__ = [
    "CheckError",
    "FallbackWarning",
    "FusegradError",
    "NotTraceableError",
    "check",
    "compile",
    "config",
    "explain",
    "random",
    "stats",
]
__version__ = "0.1.0"
