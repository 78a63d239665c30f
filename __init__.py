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

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .ir import versions as _versions  # refuses a torch that is too old, ahead of what imports it
from .ir.errors import FusegradError, NotTraceableError
from .runtime.settings import config  # the variables of the environment are read here

# What it does as the process ends comes after what users register from here on.
from .tracer import locks as _locks  # noqa: F401

if TYPE_CHECKING:
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
    from .runtime.settings.counters import stats
    from .runtime.swap.swap import swap

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

_HOMES = {
    "BundleError": "runtime.export.bundle.archive:BundleError",
    "CheckError": "runtime.check.check:CheckError",
    "FallbackWarning": "runtime.fallback.records:FallbackWarning",
    "bisect": "runtime.bisect.search:bisect",
    "check": "runtime.check.check:check",
    "compile": "runtime.api:compile",
    "explain": "runtime.report.explain:explain",
    "export": "runtime.export.export:export",
    "load": "runtime.export.bundle.load:load",
    "load_program": "runtime.export.torch_export.saved:load_program",
    "profile": "runtime.profile.profile:profile",
    "random": "runtime.execution.aten.random",
    "save_program": "runtime.export.torch_export.saved:save_program",
    "stats": "runtime.settings.counters:stats",
    "swap": "runtime.swap.swap:swap",
}
"""Where each name is: imported when it is first asked for, torch with it, so that `import fusegrad` costs nothing."""
_ROOMS = ("ir", "tracer", "codegen", "runtime")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _imported(_HOMES[name])
    return value


def _imported(home: str) -> Any:
    module, _, attribute = home.partition(":")
    try:
        found = importlib.import_module(f"{__name__}.{module}")
        return getattr(found, attribute) if attribute else found
    except (ImportError, AttributeError) as error:  # torch or triton lacks a name
        raise _versions.explain_import_error(error) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
