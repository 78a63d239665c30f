"""Functions of libraries, by their names, that tell of the process or change it.

A function that is in neither table asks for nothing but its arguments.
"""

from __future__ import annotations

import contextvars
import threading
import types
from collections.abc import Callable
from typing import Any

from ..torch_private import is_engine
from .attributes import bound_to, instance_dict, is_a, is_torchs, module_of

ANSWERS = {
    *("get_num_threads", "get_num_interop_threads", "get_float32_matmul_precision", "get_deterministic_debug_mode"),
    *("are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled", "is_anomaly_enabled"),
    *("is_anomaly_check_nan_enabled", "initial_seed", "get_default_device", "is_warn_always_enabled", "is_available"),
    *("current_device", "device_count", "is_initialized", "is_built", "flash_sdp_enabled", "math_sdp_enabled"),
    *("mem_efficient_sdp_enabled", "cudnn_sdp_enabled", "get_rank", "get_world_size", "is_autocast_cache_enabled"),
    *("is_current_stream_capturing", "preferred_linalg_library", "preferred_blas_library"),
}
"""Called without arguments: their answer is compared at every call."""
EFFECTS = {
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "fork_rng", "get_rng_state", "set_rng_state"),
    "backward",
    *("save", "load", "get_rng_state_all", "set_rng_state_all", "use_deterministic_algorithms", "clear_autocast_cache"),
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "mem_get_info"),
    *("memory_stats", "empty_cache", "utilization", "temperature", "clock_rate"),
}
"""They change the process, or tell of it what differs from call to call."""
PURE_SETTERS = {"set_grad_enabled"}
IMPURE = {"time", "random", "os", "sys", "io", "logging", "datetime", "uuid", "secrets", "posix", "_random",
          "numpy.random", "warnings", "_warnings", "importlib"}  # fmt: skip
"""Modules of which nothing can be captured, by name or by the beginning of it."""


DRAWN = ("time", "random", "datetime", "uuid", "secrets", "_random", "numpy.random")
"""Those that give other answers at every call, wherever they are called from."""


def answer_of(owner: Any, name: str, value: Any) -> Callable[[], Any] | None:
    """The function that asks one of torch's for what it tells of the process; None where it tells nothing.

    A device that was never used is not woken up for an answer.
    """
    module = _torch_module(owner)
    if name not in ANSWERS or not module or not callable(value):
        return None

    def ask() -> Any:
        awake = getattr(owner, "is_initialized", None)
        if name == "current_device" and (awake is None or not awake()):
            return None
        return getattr(owner, name)()

    return ask


def effect_of(owner: Any, name: str, value: Any) -> str | None:
    """The reason why a name that was found in a library, or what stands under it, cannot be part of a graph."""
    module = _torch_module(owner)
    if not module:
        return None
    sets = name.startswith("set_") and name not in PURE_SETTERS
    return f"it calls `{name}` of {module}" if callable(value) and (name in EFFECTS or sets) else None


def _torch_module(owner: Any) -> str:
    """The name of a module of torch's, else empty."""
    name = instance_dict(owner).get("__name__") if is_a(owner, types.ModuleType) else None
    return name if type(name) is str and is_torchs(name) else ""


def why_impure(value: Any) -> str | None:
    """The reason that makes a thing unfit for capture: a clock, a generator of random numbers, the system, autograd's
    engine."""
    owner = bound_to(value)
    if is_engine(value) or is_engine(owner):
        return "it uses the engine of autograd"
    if is_a(value, types.ModuleType):
        name = instance_dict(value).get("__name__")
    elif owner is not None and not is_a(owner, types.ModuleType):
        name = module_of(owner if is_a(owner, type) else type(owner))  # of a class: `datetime.now`, `date.today`
    else:
        name = module_of(value)
    return f"it uses the module `{name}`" if type(name) is str and _is_impure(name) else None


def why_moving(value: Any) -> str | None:
    """The reason why an object from outside is another at each use, and nothing shows it: an iterator, a file, a
    thread's own.

    Iterators that are written in Python show what they hold.
    """
    kind = type(value)
    is_visible = kind is threading.local  # what it holds in this thread; a subclass runs code at the first look
    is_of_thread = not is_visible and is_a(value, (threading.local, contextvars.ContextVar))
    steps = getattr(kind, "__next__", None)
    if is_of_thread or (steps is not None and not is_a(steps, types.FunctionType) and not is_a(value, type)):
        return f"it uses a {kind.__name__} from outside, whose state no graph has"
    return None


def _is_impure(module: str) -> bool:
    return module in IMPURE or module.startswith("numpy.random.") or module.split(".")[0] in IMPURE
