"""A disk cache of one user: key -> named files. A broken, foreign or missing cache costs time, never a wrong result.

    <root>/v1/entries/ab/ab12.../{manifest.json, kernel.cubin, ...}   published by one rename, verified on every read
    <root>/v1/{tmp,locks,swept}

Owner, mode and SHA-256 sums are checked on read; nothing is unpickled; what does not verify is deleted and made again.
Where the directory cannot be used, entries live in memory and one warning says so. docs/cache.md has the rules.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..settings import logs
from . import eviction
from .disk_entries import DiskEntries
from .location import default_root
from .locks import FileLock
from .private_folder import Damaged

LIMIT = 2 << 30
"""Bytes on disk, where FUSEGRAD_CACHE_LIMIT does not say otherwise."""
SWEEP_EVERY = 256
LOCK_SECONDS = 120.0
IMPATIENT_SECONDS = 1.0
"""Seconds that a lock is waited for by a process that has once waited in vain."""
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def key_of(*parts: object) -> str:
    """SHA-256 over the parts' texts, each with its length in front, so that no two lists of parts collide."""
    digest = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode(errors="surrogatepass")
        digest.update(f"{len(content)}:".encode() + content)
    return digest.hexdigest()


@dataclass(frozen=True)
class Entry:
    """An entry on disk. bytes: that it takes there. used: seconds since the epoch. what: kernels and files by name."""

    key: str
    bytes: int
    used: float
    what: str


def bytes_of(text: str) -> int:
    """ "200M" -> 209715200. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+)\s*([KMG]?)i?B?\s*", text, re.I)
    if match is None:
        raise ValueError(text)
    return int(match[1]) * UNITS[match[2].upper()]


def in_words(trouble: object) -> str:
    """An error of the system without its number, and what to do about the folder; anything else as it is."""
    if not isinstance(trouble, OSError) or not trouble.strerror:
        return str(trouble)
    name = f"{trouble.filename}: " if trouble.filename else ""
    return f"{name}{trouble.strerror}; FUSEGRAD_CACHE_DIR names another folder"


# ------------------------------------------------------------------ one entry

class MemoryEntries:
    """The newest entries, where the disk cannot be used."""

    def __init__(self, limit: int = 512) -> None:
        self.limit = limit
        self.entries: OrderedDict[str, dict[str, bytes]] = OrderedDict()
        self.lock = threading.Lock()

    def put(self, key: str, files: Mapping[str, bytes]) -> None:
        with self.lock:
            self.entries[key] = dict(files)
            self.entries.move_to_end(key)
            while len(self.entries) > self.limit:
                self.entries.popitem(last=False)

    def drop(self, key: str) -> None:
        with self.lock:
            self.entries.pop(key, None)

    def get(self, key: str) -> dict[str, bytes] | None:
        with self.lock:
            return self.entries.get(key)


# ------------------------------------------------------------------ the cache
class Cache:
    """The cache below `root` (None: in memory only), of at most about `limit` bytes."""

    def __init__(self, root: Path | None, limit: int | None = None) -> None:
        self.memory = MemoryEntries()
        self.puts = 0
        self.warned = False
        self.patience = LOCK_SECONDS
        self.trouble: object = "there is no home directory"
        self.limit = _limit_of_environment() if limit is None else limit
        self.disk: DiskEntries | None = None
        if root is not None:
            try:
                self.disk = DiskEntries(root)
            except (OSError, ValueError, Damaged) as error:
                self.trouble = error

    @property
    def root(self) -> Path | None:
        """The folder of our format; None where entries live in memory alone."""
        return self.disk.root if self.disk else None

    @property
    def reason(self) -> str:
        """The reason why the disk is not used, in words."""
        return in_words(self.trouble)

    def directory(self, key: str) -> Path | None:
        """The folder in which the entry is, or will be, on disk."""
        return self.disk.root / "entries" / key[:2] / key if self.disk else None

    def _warn(self, reason: object) -> None:
        if not self.warned:
            self.warned = True
            message = f"fusegrad keeps compiled kernels in memory only: {in_words(reason)}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    # ------------------------------------------------------------------ reading and writing
    def get(self, key: str) -> dict[str, bytes] | None:
        """The files of an entry, verified; None if there is none. What does not verify is deleted."""
        files = self._from_disk(key)
        if files is not None:
            logs.cache.info("hit: %s", key[:16])
            return files
        files = self.memory.get(key)
        logs.cache.info("%s: %s", "miss" if files is None else "hit in memory", key[:16])
        return files

    def _from_disk(self, key: str) -> dict[str, bytes] | None:
        if self.disk is None:
            self._warn(self.trouble)
            return None
        try:
            return self.disk.read(key)
        except (OSError, Damaged, MemoryError) as error:
            self._warn(error)
            return None

    def put(self, key: str, files: Mapping[str, bytes]) -> None:
        """Publish an entry by one rename; an entry that is already there stays. Never raises for the disk's sake."""
        try:
            if self.disk is not None:
                is_written = self.disk.publish(key, files)
                self.puts += 1
                logs.cache.debug("written: %s: %s", key[:16], ", ".join(files))
                if eviction.is_due(self.disk, always=self.puts % SWEEP_EVERY == 0):
                    self.sweep()
                if is_written:
                    return
            reason = self.trouble if self.disk is None else None
        except (OSError, Damaged) as error:
            reason = error
        self.memory.put(key, files)
        if reason is not None:
            self._warn(reason)

    def get_or_make(self, key: str, make: Callable[[], Mapping[str, bytes]]) -> dict[str, bytes]:
        """The files of an entry; where there is none, one process and thread makes it while the others wait."""
        files = self.get(key)
        if files is None:
            with self.claimed(key):
                files = self.get(key)
                if files is None:
                    files = dict(make())
                    self.put(key, files)
        return files

    def drop(self, key: str) -> None:
        """Delete an entry."""
        self.memory.drop(key)
        if self.disk is not None:
            self.disk.drop(key)

    def clear(self) -> None:
        """Delete every entry."""
        if self.disk is not None:
            self.disk.clear()

    def sweep(self, limit: int | None = None) -> None:
        """Delete the entries used longest ago until the rest fits, and what killed processes left."""
        if self.disk is not None:
            eviction.sweep(self.disk, self.limit if limit is None else limit)

    # ------------------------------------------------------------------ inspection
    def listed(self) -> list[Entry]:
        """Every entry on disk, the one used longest ago first."""
        if (disk := self.disk) is None:
            return []
        return [Entry(name, size, last_used, disk.describe(name)) for last_used, size, name in disk.entries()]

    def fault(self, key: str) -> str | None:
        """Say why an entry does not verify; None where it does. It stays where it is."""
        return str(self.trouble) if self.disk is None else self.disk.fault(key)

    # ------------------------------------------------------------------ one at a time
    def claim(self, key: str, seconds: float) -> FileLock | None:
        """The right to make an entry, where it can be had in time."""
        if self.disk is None:
            return None
        began, seconds = time.monotonic(), min(seconds, self.patience)
        with suppress(OSError, Damaged):
            lock = self.disk.lock(key, seconds)
            if lock is None and seconds and time.monotonic() - began >= seconds:
                self.patience = min(IMPATIENT_SECONDS, self.patience)
            return lock
        return None

    @contextmanager
    def claimed(self, key: str) -> Iterator[None]:
        """Make an entry in one process at a time. A lock that cannot be had in time costs double work, nothing else."""
        lock = self.claim(key, self.patience)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()


def _limit_of_environment() -> int:
    value = os.environ.get("FUSEGRAD_CACHE_LIMIT")
    try:
        return bytes_of(value) if value else LIMIT
    except ValueError:
        message = f"FUSEGRAD_CACHE_LIMIT={value!r} is no size such as 500M or 2G; {LIMIT >> 30}G is taken"
        warnings.warn(message, RuntimeWarning, stacklevel=4)
        return LIMIT


# ------------------------------------------------------------------ the default one
_caches: dict[Path | None, Cache] = {}
_caches_lock = threading.Lock()


def default() -> Cache:
    """The cache that the environment names now."""
    root = default_root()
    cache = _caches.get(root)
    if cache is None:
        with _caches_lock:
            cache = _caches[root] = _caches.get(root) or Cache(root)
    return cache


def get(key: str) -> dict[str, bytes] | None:
    """The files of an entry of the default cache, or None."""
    return default().get(key)


def drop(key: str) -> None:
    """Delete an entry of the default cache that verifies, but is not what it should be."""
    default().drop(key)


def put(key: str, files: Mapping[str, bytes]) -> None:
    """Publish an entry in the default cache."""
    default().put(key, files)
