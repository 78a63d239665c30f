"""Triton's own name for its installation, without hashing all of it in each process, and a folder for its cache.

Import it lazily: it imports triton."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import triton
from triton.runtime import cache as triton_cache

from ..cache import entry_files
from ..cache import store as cache


@functools.cache
def cache_installation_key() -> None:
    """Triton's own name for its installation, which it hashes in each process (a third of a second), kept on disk.

    It is asked for again where any file that it is made of has another size or time.
    """
    root = Path(triton.__file__).parent
    made_by = getattr(triton_cache, "triton_key", None)
    if made_by is None:
        return
    # The name belongs to these very files: an installation that changed is hashed again.
    try:
        key = cache.key_of("triton", root, *entry_files.versions().items(), *_files_of(root))
    except OSError:
        return
    entry = cache.default().get_or_make(key, lambda: {"installation": made_by().encode()})
    name = entry["installation"].decode()
    triton_cache.triton_key = lambda: name


@functools.cache
def ensure_cache_folder() -> None:
    """Triton raises where it cannot write to its cache: there, it gets a folder that ends with the process."""
    if triton.knobs.cache.manager_class is not None:
        return
    try:
        os.makedirs(triton.knobs.cache.dir, exist_ok=True)
        tempfile.TemporaryFile(dir=triton.knobs.cache.dir).close()
    except OSError as error:
        with suppress(OSError):
            folder = tempfile.mkdtemp(prefix="fusegrad-triton-")
            atexit.register(_remove_by, os.getpid(), folder)
            triton.knobs.cache.dir = folder
            message = f"Triton cannot use its cache, and compiles in every process: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _remove_by(owner: int, folder: str) -> None:
    """At the end of the process that made it, not of one forked from it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _files_of(root: Path) -> Iterator[tuple[str, int, int]]:
    """Every file that Triton's compiler consists of, with its size and time."""
    yield from _sources_in(str(root), False)
    for part in ("_C", "runtime", "compiler", "backends", "language"):
        yield from _sources_in(str(root / part), part not in ("_C", "runtime"))


def _sources_in(folder: str, below: bool) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            if entry.name.endswith((".py", ".so", ".pyd")):
                facts = entry.stat()
                yield entry.path, facts.st_size, facts.st_mtime_ns
            elif below and entry.name != "__pycache__" and entry.is_dir():
                yield from _sources_in(entry.path, True)
