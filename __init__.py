"""fusegrad: custom `torch.autograd.Function` classes, compiled to fused Triton kernels.

@fusegrad.compile                 a Function class, or a plain function of tensors
fusegrad.explain(Fast, *args)     what it becomes: kernels, launches, bytes, and why a method is not compiled
fusegrad.export(Fast, *args, path="fast.py")   what it became: a Triton module without fusegrad, graphs, pictures
fusegrad.load("fast.zip")         the Function class of a bundle that export wrote; nothing in it is executed
fusegrad.save_program(program, "model.pt2")   a program of torch.export that calls compiled Functions; load_program
fusegrad.check(Fast, *args)       whether it is what you wrote, over transforms, dtypes, layouts and sizes
fusegrad.bisect(Fast, *args)      which step of the compiler makes the difference, where there is one
fusegrad.profile(Fast, *args)     how long it takes here, beside eager, and what a GPU would need at least
fusegrad.swap(model, {...})       modules of a model with other methods, in place, and back
fusegrad.stats()                  counters of this process
fusegrad.config.patch(...)        settings for a block of code
"""

from .ir import versions as _versions  # refuses a torch that is too old, ahead of what imports it

try:
    from .ir.errors import FusegradError, NotTraceableError
    from .runtime.api import compile
    from .runtime.bisect.search import bisect
    from .runtime.check.check import CheckError, check
    from .runtime.execution.aten import random
    from .runtime.export.bundle.archive import BundleError
    from .runtime.export.bundle.load import load
    from .runtime.export.export import export
    from .runtime.export.torch_export.saved import load_program, save_program
    from .runtime.fallback.records import FallbackWarning
    from .runtime.profile.profile import profile
    from .runtime.report.explain import explain
    from .runtime.settings import config
    from .runtime.settings.counters import stats
    from .runtime.swap.swap import swap
except (ImportError, AttributeError) as _error:  # torch or triton lacks a name
    raise _versions.explain_import_error(_error) from None

__all__ = [
    "BundleError",
    "CheckError",
    "FallbackWarning",
    "FusegradError",
    "NotTraceableError",
    "bisect",
    "check",
    "compile",
    "config",
    "explain",
    "export",
    "load",
    "load_program",
    "profile",
    "random",
    "save_program",
    "stats",
    "swap",
]
__version__ = "0.1.0"
