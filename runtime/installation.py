"""Triton's own name for its installation, without hashing all of it in each process.

Import it lazily: it imports triton."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import triton
from triton.runtime import cache as triton_cache

from . import cache


@functools.cache
def know_installation() -> None:
    """Triton's own name for its installation, which it hashes in each process (a third of a second), kept on disk.

    It is asked for again where any file that it is made of has another size or time.
    """
    root = Path(triton.__file__).parent
    made_by = getattr(triton_cache, "triton_key", None)
    if made_by is None:
        return
    try:
        key = cache.key_of("triton", root, *cache.versions().items(), *_files_of(root))
    except OSError:
        return
    kept = cache.default().made(key, lambda: {"installation": made_by().encode()})
    name = kept["installation"].decode()
    triton_cache.triton_key = lambda: name


def _files_of(root: Path) -> Iterator[tuple[str, int, int]]:
    """Every file that Triton's compiler consists of, with its size and time."""
    yield from _listed(str(root), False)
    for part in ("_C", "runtime", "compiler", "backends", "language"):
        yield from _listed(str(root / part), part not in ("_C", "runtime"))


def _listed(folder: str, below: bool) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as found:
        for entry in sorted(found, key=lambda e: e.name):
            if entry.name.endswith((".py", ".so", ".pyd")):
                facts = entry.stat()
                yield entry.path, facts.st_size, facts.st_mtime_ns
            elif below and entry.name != "__pycache__" and entry.is_dir():
                yield from _listed(entry.path, True)
