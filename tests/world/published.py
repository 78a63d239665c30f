"""Finding the Function classes of installed packages: modules are imported under guard, subclasses are walked.

    python tests/world/published.py < packages

A package is a line of JSON: package. The answer has its classes, [module, name] each, and the modules that could not be
imported, with the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from supervised import answer
from torch.autograd.function import Function

MENTIONS = re.compile(r"\bautograd\b|\bFunction\b")
TESTS = re.compile(r"(^|\.)(tests?|testing|conftest|examples?|benchmarks?)(\.|$)")


class TooLong(TimeoutError):
    """A limit of time was reached."""


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises `TooLong` in the block after so many seconds of the processor; what sleeps is for the parent to kill."""

    def over(*_: Any) -> None:
        raise TooLong(f"{seconds:g} s")

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def sources(package: str) -> Iterator[tuple[str, Path]]:
    """The modules of a package whose text mentions autograd, by name."""
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    if spec is not None and not places and spec.origin:
        yield package, Path(spec.origin)
    for place in map(Path, places):
        for path in sorted(place.rglob("*.py")):
            parts = (package, *path.relative_to(place).with_suffix("").parts)
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if all(part.isidentifier() for part in name.split(".")) and not TESTS.search(name):
                yield name, path


def mentions(path: Path) -> bool:
    return MENTIONS.search(path.read_text(encoding="utf-8", errors="replace")) is not None


def imported(name: str, seconds: float) -> str | None:
    """None, or why a module cannot be imported."""
    try:
        with limit(seconds), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"
    return None


def found(package: str) -> list[tuple[str, str]]:
    """The Function classes that the modules of a package define and that are there by their name."""
    return sorted({(c.__module__, c.__qualname__) for c in _below(Function) if _belongs(c, package)})


def _belongs(cls: Any, package: str) -> bool:
    module = cls.__module__
    inside = module == package or module.startswith(f"{package}.")
    return inside and "forward" in dir(cls) and class_named(module, cls.__qualname__) is cls


def class_named(module: str, name: str) -> Any:
    """The class of a module by its qualified name; None where it cannot be found again."""
    here: Any = sys.modules.get(module)
    for part in name.split("."):
        here = getattr(here, part, None)
    return here


def _below(cls: type) -> Iterator[type]:
    for below in type.__subclasses__(cls):
        yield below
        yield from _below(below)


def survey(package: str, seconds: float = 60.0) -> dict[str, Any]:
    """Imports what mentions autograd, and says which classes are there and what failed."""
    failed = {}
    for name in (name for name, path in sources(package) if mentions(path)):
        if (why := imported(name, seconds)) is not None:
            failed[name] = why
    return {"classes": found(package), "failed": failed}


if __name__ == "__main__":
    answer(lambda asked: [survey(asked["package"])])
