"""Settings: environment variables, `config.patch(...)` over them, the argument of `compile` under both."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any

from ...ir import switches
from ...ir.errors import FusegradError
from .logs import set_logs

BACKENDS = ("auto", "triton", "interpret", "reference", "inductor")
NUMERICS = ("eager", "fast")
FAST = {"triton": "triton fast", "interpret": "interpret fast"}
"""What a call's backend is where its kernels are generated for numerics="fast": others, under keys of their own."""
KERNEL_BACKENDS = (*FAST, *FAST.values())
"""The backends that run generated Triton text."""
ROLLED_BACKENDS = ("reference", *KERNEL_BACKENDS)
"""The backends that run a loop over a size as a loop; to the others all its steps are given, one by one."""
AS_TRACED = "as traced"
"""What a call's backend is where nothing but the captured operations, one by one, has the bits that it needs."""


class ConfigError(FusegradError, ValueError):
    """A setting that does not exist, or a value that it cannot have."""

    message = "{detail}\n  at:   {where}\n  fix:  {fix}"


@dataclass(frozen=True)
class Settings:
    """The settings that `config.patch` and the environment change."""

    backend: str | None = None
    """The backend of every compiled class; None leaves it to `compile`."""
    check: bool = True
    """Compare each first call with the user's own method."""
    check_bytes: int = 16 << 20
    """Above this many bytes of intermediates, that comparison runs on inputs cut to a few elements."""
    debug: bool = False
    """Verify every graph after every step; tracebacks show fusegrad's own frames. Slow."""
    tune: bool = False
    """On a GPU, time up to three configurations of every kernel at its first sizes and keep the fastest, on disk."""
    store: bool = True
    """Keep traces on disk, for the first call of another process."""
    disable: tuple[str, ...] = ()
    """Steps that are left out, by name (`ir/switches.py`): results stay right, with more launches."""
    numerics: str | None = None
    """The numerics of every compiled class, "eager" or "fast"; None leaves them to `compile`."""
    slab_bytes: int | None = None
    """The bytes of memory of a slab (`compile`), for every compiled class; None leaves them to `compile`."""


_patched: ContextVar[Settings | None] = ContextVar("fusegrad_settings", default=None)


def settings() -> Settings:
    """The settings in force here and now."""
    patched = _patched.get()
    return patched if patched is not None else _from_environment()


def handed_over() -> tuple[Settings, switches.SwitchState] | None:
    """The settings that a patch has put in force here, for backward's thread, which has no patch; None without one."""
    patched = _patched.get()
    return None if patched is None else (patched, switches.switch_state())


@contextlib.contextmanager
def taken_over(handed: tuple[Settings, switches.SwitchState] | None) -> Iterator[None]:
    """Within the block what was handed over is in force, unless a patch is already."""
    if handed is None or _patched.get() is not None:
        yield
        return
    token = _patched.set(handed[0])
    try:
        with switches.use_switch_state(handed[1]):
            yield
    finally:
        _patched.reset(token)


def backend_name(requested: str) -> str:
    """The backend to use where `compile` was asked for `requested`."""
    return settings().backend or requested


def with_numerics(backend: str, requested: str) -> str:
    """The backend with the numerics in force, where `compile` was asked for `requested`."""
    return FAST.get(backend, backend) if numerics(requested) == "fast" else backend


def is_interpreted(backend: str) -> bool:
    """True where its kernels run under Triton's interpreter."""
    return backend in ("interpret", FAST["interpret"])


def numerics(requested: str) -> str:
    """The numerics to use where `compile` was asked for `requested`."""
    return settings().numerics or requested


@contextlib.contextmanager
def patch(**changes: Any) -> Iterator[Settings]:
    """Change settings for a block of code, in this thread or task only: `with
    fusegrad.config.patch(backend="interpret"):`.

    Args:
        changes: Settings by name: the fields of `Settings`.

    Yields:
        The settings in force within the block.

    Raises:
        ConfigError: for a setting that does not exist, or a value that it cannot have; nothing is changed then.
    """
    names = {f.name for f in fields(Settings)}
    for name in changes.keys() - names:
        fix = f"{_meant(name, names)}use one of {', '.join(sorted(names))}"
        raise ConfigError(f"config.patch: there is no setting {name!r}", fix=fix)
    if changes.get("backend") is not None:
        valid_backend(changes["backend"])
    if "disable" in changes:
        changes["disable"] = valid_switches(changes["disable"])
    if changes.get("numerics") is not None:
        valid_numerics(changes["numerics"])
    if changes.get("slab_bytes") is not None:
        valid_slab_bytes(changes["slab_bytes"])
    # Valid as a whole before anything is changed.
    token = _patched.set(replace(settings(), **changes))
    dropped = False
    try:
        with switches.switched_off(settings().disable), switches.with_slab_bytes(settings().slab_bytes, anew=True):
            try:
                yield settings()
            except GeneratorExit:  # entered by hand, never left: nothing changes when its memory is collected
                dropped = True
    finally:
        if not dropped:
            _patched.reset(token)


def _meant(name: str, known: Iterable[str]) -> str:
    from .suggestions import meant  # not at import, which is to be quick

    return meant(name, known)


def valid_backend(name: Any, **place: str) -> str:
    """The name, if it is a backend's; raises ConfigError otherwise. place: `where`, if it is no line of a program."""
    if name not in BACKENDS:
        fix = f"{_meant(str(name), BACKENDS)}use one of {', '.join(BACKENDS)}"
        raise ConfigError(f"there is no backend {name!r}", fix=fix, **place)
    return name  # type: ignore[no-any-return]


def valid_switches(names: str | Iterable[str], **place: str) -> tuple[str, ...]:
    """Names of steps, sorted; "a,b" is taken for two. Raises ConfigError for one that does not exist."""
    requested = {n.strip() for n in (names.split(",") if isinstance(names, str) else names)} - {""}
    for name in sorted(requested - switches.SWITCHES.keys()):
        fix = f"{_meant(name, switches.SWITCHES)}use some of {', '.join(switches.SWITCHES)}"
        raise ConfigError(f"disable: there is no step {name!r}", fix=fix, **place)
    return tuple(sorted(requested))


def valid_numerics(name: Any, **place: str) -> str:
    """The name, if it is one of the two numerics; raises ConfigError otherwise."""
    if name not in NUMERICS:
        fix = f"{_meant(str(name), NUMERICS)}use one of {', '.join(NUMERICS)}"
        raise ConfigError(f"there are no numerics {name!r}", fix=fix, **place)
    return name  # type: ignore[no-any-return]


def valid_slab_bytes(number: Any, **place: str) -> int:
    """The number of bytes, a positive whole number; raises ConfigError otherwise."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        fix = "use a positive whole number of bytes, such as 256 << 20; disable=\"slabs\" is for none"
        raise ConfigError(f"slab_bytes cannot be {number!r}", fix=fix, **place)
    return number


KEEPS_MEMORY = "GLIBC_TUNABLES=glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=1073741824"
"""The variable that has glibc keep freed blocks up to a gigabyte within the process."""


def recycle_memory(on: bool = True) -> None:
    """Deprecated, does nothing: the allocator is the process's own. GLIBC_TUNABLES in its environment sets it.

    Args:
        on: Ignored.
    """
    _warn_of_recycling("fusegrad.config.recycle_memory()", stacklevel=3)


def _warn_of_recycling(option: str, stacklevel: int) -> None:
    message = f"{option} does nothing any more, and will be removed: start the process with {KEEPS_MEMORY}"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)


def logs(wanted: str | None = None) -> None:
    """Choose what is told on stderr from now on, as FUSEGRAD_LOGS does: `config.logs("trace,+codegen")`.

    Args:
        wanted: Names with commas between them: trace, fusion, codegen, guards, recompiles, autotune, cache, all; "+"
            before one for every detail, "-" to leave it out; "help" lists what each tells; "" for nothing. None is what
            the environment says.

    Raises:
        LogsError: for another name.
    """
    set_logs(wanted)


def warns() -> bool:
    """True where a method that runs in eager says so once; FUSEGRAD_WARN=0 leaves it to `explain`."""
    return os.environ.get("FUSEGRAD_WARN") != "0"


def _from_environment() -> Settings:
    return _settings_of(os.environ.get("FUSEGRAD_BACKEND"))


def in_force() -> list[tuple[str, Any, Any]]:
    """The sources of the settings at present, as conditions on two objects: how to ask, and the answer."""
    conditions = [("{}() is {}", _patched.get, _patched.get())]
    variables, key = getattr(os.environ, "_data", None), getattr(os.environ, "encodekey", None)
    if isinstance(variables, dict) and key is not None:  # a look-up here takes a thirtieth of one in os.environ
        get = functools.partial(variables.get, key("FUSEGRAD_BACKEND"))
    else:
        get = functools.partial(os.environ.get, "FUSEGRAD_BACKEND")
    return [*conditions, ("{}() == {}", get, get())]


@functools.lru_cache(maxsize=16)
def _settings_of(backend: str | None) -> Settings:
    place = "FUSEGRAD_{}={} in the environment"
    valid = valid_backend(backend, where=place.format("BACKEND", backend)) if backend else None
    rounding = valid_numerics(_NUMERICS, where=place.format("NUMERICS", _NUMERICS)) if _NUMERICS else None
    disable = valid_switches(_DISABLE, where=place.format("DISABLE", _DISABLE))
    slabs = _slab_bytes(where=place.format("SLAB_BYTES", _SLAB_BYTES))
    return Settings(
        valid, debug=_DEBUG, tune=_TUNE, store=_STORE, disable=disable, numerics=rounding, slab_bytes=slabs
    )


def _slab_bytes(**place: str) -> int | None:
    """What the environment says about the memory of a slab. Raises ConfigError."""
    if not _SLAB_BYTES:
        return None
    return valid_slab_bytes(int(_SLAB_BYTES) if _SLAB_BYTES.isdecimal() else _SLAB_BYTES, **place)


VARIABLES = (
    "BACKEND", "WARN", "DEBUG", "STORE", "DISABLE", "NUMERICS", "SLAB_BYTES", "TUNE", "CACHE_DIR", "CACHE_LIMIT",
    "RECYCLE_MEMORY", "LOGS", "TESTS",
)  # fmt: skip
"""The variables of the environment that there are, each behind FUSEGRAD_."""


def misspelt_variables() -> dict[str, str]:
    """Variables FUSEGRAD_.. that are none, and those that they look like."""
    prefix = "FUSEGRAD_"
    given = [name for name in os.environ if name.startswith(prefix) and name.removeprefix(prefix) not in VARIABLES]
    if not given:
        return {}
    from .suggestions import suggestion

    near = {name: suggestion(name.removeprefix(prefix), VARIABLES) for name in given}
    return {name: prefix + known for name, known in near.items() if known}


for _name, _known in misspelt_variables().items():
    warnings.warn(f"{_name} in the environment sets nothing; did you mean {_known}?", stacklevel=2)
_DEBUG = os.environ.get("FUSEGRAD_DEBUG", "0") not in ("", "0")
_TUNE = os.environ.get("FUSEGRAD_TUNE", "0") not in ("", "0")
_STORE = os.environ.get("FUSEGRAD_STORE", "1") not in ("", "0")
_DISABLE = os.environ.get("FUSEGRAD_DISABLE", "")
_SLAB_BYTES = os.environ.get("FUSEGRAD_SLAB_BYTES", "")
with contextlib.suppress(ConfigError):  # the first use of the settings raises it, where it can be told well
    switches.set_default(valid_switches(_DISABLE), _slab_bytes())
_NUMERICS = os.environ.get("FUSEGRAD_NUMERICS") or None

if os.environ.get("FUSEGRAD_RECYCLE_MEMORY", "0") not in ("", "0"):
    _warn_of_recycling("FUSEGRAD_RECYCLE_MEMORY", stacklevel=2)
