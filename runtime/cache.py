"""A disk cache of one user: key -> named files. A broken, foreign or missing cache costs time, never a wrong result.

    <root>/v1/entries/ab/ab12.../{manifest.json, kernel.cubin, ...}   published by one rename, verified on every read
    <root>/v1/{tmp,locks}

Owner, mode and SHA-256 sums are checked on read; nothing is unpickled; what does not verify is deleted and made again.
Where the directory cannot be used at all, entries live in memory and one warning says so.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import stat
import tempfile
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from . import logs

FORMAT = 1
LIMIT = 1 << 30
SWEEP_EVERY = 256
STALE_SECONDS = 3600.0
LOCK_SECONDS = 120.0
MANIFEST = "manifest.json"


def key_of(*parts: object) -> str:
    """SHA-256 over the parts' texts, each with its length in front, so that no two lists of parts collide."""
    digest = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode()
        digest.update(f"{len(content)}:".encode() + content)
    return digest.hexdigest()


@functools.cache
def versions() -> dict[str, str]:
    """What a cached file depends on besides its key's parts; "" for what is not installed."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("fusegrad", "torch", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


class DamagedEntry(Exception):
    """An entry does not verify (internal: it is deleted, and the caller sees a miss)."""


OTHER_VERSION = "another key, version or format"
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, DamagedEntry)


@dataclass(frozen=True)
class Entry:
    """An entry on disk. used: seconds since the epoch. what: kernels and files by name."""

    key: str
    bytes: int
    used: float
    what: str


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _private(path: Path) -> None:
    """Raise unless `path` is a directory of ours that nobody else can write to; a link is not one."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise DamagedEntry(f"{path} is not a private directory")


def _content(path: Path) -> bytes:
    """The bytes of a regular file of ours, opened without following a link or blocking on a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise DamagedEntry(f"{path} is not a file of ours")
        return file.read()


def _write(directory: Path, key: str, files: Mapping[str, bytes]) -> None:
    sums = {name: _sha256(content) for name, content in files.items()}
    manifest = {"format": FORMAT, "key": key, "versions": versions(), "files": sums}
    for name, content in {**files, MANIFEST: json.dumps(manifest, sort_keys=True, indent=1).encode()}.items():
        (directory / name).write_bytes(content)


def _verified(directory: Path, key: str) -> dict[str, bytes]:
    """The files of an entry, or DamagedEntry."""
    _private(directory)
    manifest = json.loads(_content(directory / MANIFEST))
    if (manifest["format"], manifest["key"], manifest["versions"]) != (FORMAT, key, versions()):
        raise DamagedEntry(OTHER_VERSION)
    names = {path.name for path in directory.iterdir()} - {MANIFEST}
    if names != set(manifest["files"]):
        raise DamagedEntry("files were added or are missing")
    files = {name: _content(directory / name) for name in names}
    if any(_sha256(content) != manifest["files"][name] for name, content in files.items()):
        raise DamagedEntry("a file does not have the sum in the manifest")
    return files


class Memory:
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

    def get(self, key: str) -> dict[str, bytes] | None:
        with self.lock:
            return self.entries.get(key)


class Cache:
    """The cache below `root` (None: in memory only), of at most about `limit` bytes."""

    def __init__(self, root: Path | None, limit: int = LIMIT) -> None:
        self.limit = limit
        self.memory = Memory()
        self.puts = 0
        self.warned = False
        self.root = self._usable(root / f"v{FORMAT}") if root else None
        if root is None:
            self._warn("there is no home directory")

    def _usable(self, root: Path) -> Path | None:
        try:
            root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            root.mkdir(mode=0o700, exist_ok=True)
            _private(root.parent.resolve())
            _private(root)
            for name in ("entries", "tmp", "locks"):
                (root / name).mkdir(mode=0o700, exist_ok=True)
                _private(root / name)
            return root
        except (OSError, DamagedEntry) as error:
            self._warn(error)
            return None

    def _warn(self, reason: object) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(f"fusegrad keeps compiled kernels in memory only: {reason}", RuntimeWarning, stacklevel=3)

    def directory(self, key: str) -> Path | None:
        """Where the entry is or will be on disk."""
        return self.root / "entries" / key[:2] / key if self.root else None

    def get(self, key: str) -> dict[str, bytes] | None:
        """The files of an entry, verified; None if there is none. What does not verify is deleted."""
        directory = self.directory(key)
        if directory is None or not os.path.lexists(directory):
            return self._from_memory(key)
        try:
            files = _verified(directory, key)
        except UNREADABLE as error:
            logs.cache.info("damaged, deleted: %s: %s", key[:16], error)
            self._discard(directory)
            return self._from_memory(key)
        logs.cache.info("hit: %s", key[:16])
        with suppress(OSError):
            os.utime(directory)
        return files

    def _from_memory(self, key: str) -> dict[str, bytes] | None:
        found = self.memory.get(key)
        logs.cache.info("%s: %s", "miss" if found is None else "hit in memory", key[:16])
        return found

    def put(self, key: str, files: Mapping[str, bytes]) -> None:
        """Publish an entry by one rename; an entry that is already there stays."""
        directory = self.directory(key)
        if directory is None or self.root is None:
            return self.memory.put(key, files)
        try:
            self._publish(self.root, directory, key, files)
        except OSError as error:
            self._warn(error)
            self.memory.put(key, files)

    def _publish(self, root: Path, directory: Path, key: str, files: Mapping[str, bytes]) -> None:
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=root / "tmp"))
        try:
            _write(made, key, files)
            with suppress(FileExistsError):
                _rename(made, directory)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        self.puts += 1
        logs.cache.debug("written: %s: %s", key[:16], ", ".join(files))
        if self.puts % SWEEP_EVERY == 1:
            self.sweep()

    def drop(self, key: str) -> None:
        """Delete an entry."""
        directory = self.directory(key)
        self.memory.entries.pop(key, None)
        if directory is not None and os.path.lexists(directory):
            self._discard(directory)

    def _discard(self, directory: Path) -> None:
        """Delete whatever is at `directory`: first out of sight by a rename, so that nobody reads half of it."""
        assert self.root
        with suppress(OSError):
            grave = Path(tempfile.mkdtemp(dir=self.root / "tmp"))
            os.rename(directory, grave / "entry")
            shutil.rmtree(grave, ignore_errors=True)

    def sweep(self, limit: int | None = None) -> None:
        """Delete the entries used longest ago until the rest fits, and what killed processes left in tmp."""
        assert self.root
        limit = self.limit if limit is None else limit
        entries = sorted(self._entries(self.root), key=lambda entry: entry[0])
        total = sum(size for _, size, _ in entries)
        for _, size, directory in entries:
            if total <= limit:
                break
            logs.cache.info("evicted: %s, %d bytes", directory.name[:16], size)
            self._discard(directory)
            total -= size
        _remove_stale(self.root / "tmp")

    def _entries(self, root: Path) -> Iterator[tuple[float, int, Path]]:
        """(time of last use, bytes, directory) of every entry."""
        for directory in (root / "entries").glob("*/*"):
            with suppress(OSError):
                size = sum(path.lstat().st_size for path in directory.iterdir())
                yield directory.lstat().st_mtime, size, directory

    # ------------------------------------------------------------------ for people
    def listed(self) -> list[Entry]:
        """Every entry on disk, the one used longest ago first."""
        if self.root is None:
            return []
        found = sorted(self._entries(self.root), key=lambda entry: entry[0])
        return [Entry(path.name, size, used, described(path)) for used, size, path in found]

    def fault(self, key: str) -> str | None:
        """Why an entry does not verify; None where it does. It stays where it is."""
        directory = self.directory(key)
        assert directory is not None
        try:
            _verified(directory, key)
        except UNREADABLE as error:
            return str(error) or type(error).__name__
        return None

    def clear(self) -> None:
        """Delete every entry."""
        for directory in (self.root / "entries").glob("*/*") if self.root else ():
            self._discard(directory)

    @contextmanager
    def claimed(self, key: str) -> Iterator[None]:
        """Make an entry in one process at a time. A lock that cannot be had in time costs double work, nothing else."""
        if self.root is None:
            yield
            return
        try:
            descriptor = os.open(self.root / "locks" / key[:2], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield
            return
        try:
            _lock(descriptor, time.monotonic() + LOCK_SECONDS)
            yield
        finally:
            os.close(descriptor)  # which unlocks


def described(directory: Path) -> str:
    """What an entry holds, from its files: the kernels of a module, a binary's formats, a choice."""
    with suppress(OSError, ValueError):
        names = sorted(path.name for path in directory.iterdir() if path.name != MANIFEST)
        texts = [(directory / n).read_text(errors="replace") for n in names if n.endswith((".py", "ptx"))]
        kernels = dict.fromkeys(a or b for text in texts for a, b in _KERNEL.findall(text))
        return f"{', '.join(kernels)} ({', '.join(names)})" if kernels else ", ".join(names)
    return "unreadable"


_KERNEL = re.compile(r"@triton\.jit\s+def (\w+)\(\w+_ptr|\.entry (\w+)")


def _rename(made: Path, directory: Path) -> None:
    try:
        os.rename(made, directory)
    except OSError as error:
        if os.path.lexists(directory):
            raise FileExistsError(directory) from error
        raise


def _remove_stale(directory: Path) -> None:
    for path in directory.iterdir():
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _lock(descriptor: int, deadline: float) -> None:
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:  # a file system without locks
            return


def default_root() -> Path | None:
    """FUSEGRAD_CACHE_DIR, else fusegrad in XDG_CACHE_HOME or ~/.cache; None without a home directory."""
    chosen = os.environ.get("FUSEGRAD_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "fusegrad"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "fusegrad" if os.path.isabs(home) else None


@functools.cache
def _cache_at(root: Path | None) -> Cache:
    return Cache(root)


def default() -> Cache:
    """The cache that the environment names now."""
    return _cache_at(default_root())


def get(key: str) -> dict[str, bytes] | None:
    """The files of an entry of the default cache, or None."""
    return default().get(key)


def drop(key: str) -> None:
    """Delete an entry of the default cache that verifies, but is not what it should be."""
    default().drop(key)


def put(key: str, files: Mapping[str, bytes]) -> None:
    """Publish an entry in the default cache."""
    default().put(key, files)
