"""A disk cache of one user: key -> named files. A broken, foreign or missing cache costs time, never a wrong result.

    <root>/v1/entries/ab/ab12.../{manifest.json, kernel.cubin, ...}   published by one rename, verified on every read
    <root>/v1/{tmp,locks,swept}

Owner, mode and SHA-256 sums are checked on read; nothing is unpickled; what does not verify is deleted and made again.
Where the directory cannot be used, entries live in memory and one warning says so. docs/cache.md has the rules.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import sys
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..settings import logs
from . import locks as claims
from .locks import Claim
from .private_folder import BUSY, Damaged, Folder, make_private

FORMAT = 1
LIMIT = 2 << 30
"""Bytes on disk, where FUSEGRAD_CACHE_LIMIT does not say otherwise."""
SWEEP_EVERY = 256
SWEEP_SECONDS = 3600.0
STALE_SECONDS = 3600.0
LOCK_SECONDS = 120.0
IMPATIENT_SECONDS = 1.0
"""How long is waited for a lock by a process that has once waited in vain."""
BLOCK = 4096
"""What a file takes on disk is a multiple of it."""
MANIFEST = "manifest.json"
SWEPT = "swept"
MANIFEST_BYTES = 1 << 20
FILE_BYTES = 1 << 28
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def key_of(*parts: object) -> str:
    """SHA-256 over the parts' texts, each with its length in front, so that no two lists of parts collide."""
    digest = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode(errors="surrogatepass")
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


OTHER_VERSION = "another version or format"


class Foreign(Damaged):
    """An entry of another fusegrad, torch or format (internal: it is left alone, and the caller sees a miss)."""


@dataclass(frozen=True)
class Entry:
    """An entry on disk. bytes: that it takes there. used: seconds since the epoch. what: kernels and files by name."""

    key: str
    bytes: int
    used: float
    what: str


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def bytes_of(text: str) -> int:
    """ "200M" -> 209715200. Raises ValueError."""
    found = re.fullmatch(r"\s*(\d+)\s*([KMG]?)i?B?\s*", text, re.I)
    if found is None:
        raise ValueError(text)
    return int(found[1]) * UNITS[found[2].upper()]


# ------------------------------------------------------------------ one entry
def _write(directory: Folder, key: str, files: Mapping[str, bytes]) -> None:
    sums = {name: _sha256(content) for name, content in files.items()}
    manifest = {"format": FORMAT, "key": key, "versions": versions(), "files": sums}
    for name, content in {**files, MANIFEST: json.dumps(manifest, sort_keys=True, indent=1).encode()}.items():
        directory.write(name, content)


def _verified(directory: Folder, key: str) -> dict[str, bytes]:
    """The files of an entry. Raises Damaged, or OSError where nothing could be opened that may be whole."""
    try:
        return _matched(directory, key)
    except OSError as error:
        if error.errno in BUSY:
            raise
        raise Damaged(str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"no manifest: {error}") from error


def _matched(directory: Folder, key: str) -> dict[str, bytes]:
    manifest = json.loads(directory.read(MANIFEST, MANIFEST_BYTES), object_pairs_hook=_each_once)
    if manifest["key"] != key:
        raise Damaged("the entry of another key")
    if (manifest["format"], manifest["versions"]) != (FORMAT, versions()):
        raise Foreign(OTHER_VERSION)
    names = set(directory.names()) - {MANIFEST}
    if names != set(manifest["files"]):
        raise Damaged("files were added or are missing")
    files = {name: directory.read(name, FILE_BYTES) for name in names}
    if any(_sha256(content) != manifest["files"][name] for name, content in files.items()):
        raise Damaged("a file does not have the sum in the manifest")
    return files


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without a name that is there twice, of which readers take one or the other."""
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name is there twice")
    return dict(pairs)


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


# ------------------------------------------------------------------ the cache
class Cache:
    """The cache below `root` (None: in memory only), of at most about `limit` bytes."""

    def __init__(self, root: Path | None, limit: int | None = None) -> None:
        self.memory = Memory()
        self.puts = 0
        self.warned = False
        self.patience = LOCK_SECONDS
        self.trouble: object = "there is no home directory"
        self.limit = self._limit() if limit is None else limit
        self.root = self._usable(root) if root else None

    def _limit(self) -> int:
        asked = os.environ.get("FUSEGRAD_CACHE_LIMIT")
        try:
            return bytes_of(asked) if asked else LIMIT
        except ValueError:
            message = f"FUSEGRAD_CACHE_LIMIT={asked!r} is no size such as 500M or 2G; {LIMIT >> 30}G is taken"
            warnings.warn(message, RuntimeWarning, stacklevel=4)
            return LIMIT

    def _usable(self, chosen: Path) -> Path | None:
        """The folder of our format, made; None, with the trouble on record, where it cannot be used at all."""
        try:
            self.root = Path(os.path.realpath(chosen), f"v{FORMAT}")
            with ExitStack() as folders:
                for name in ("entries", "tmp", "locks"):
                    self._folder(folders, name, make=True)
            return self.root
        except (OSError, ValueError, Damaged) as error:
            self.trouble = error
            return None

    def _tell(self, reason: object) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(f"fusegrad keeps compiled kernels in memory only: {reason}", RuntimeWarning, stacklevel=4)

    # ------------------------------------------------------------------ folders
    def _top(self, folders: ExitStack, make: bool = False) -> Folder:
        """The folder of our format. It and the one around it are never removed: they may be somebody's."""
        assert self.root
        if make:
            make_private(self.root)
        around = folders.enter_context(Folder(self.root.parent))
        top = folders.enter_context(Folder(self.root.name, around))
        if top.mode != 0o700:
            os.fchmod(top.fd, 0o700)
        return top

    def _folder(self, folders: ExitStack, *names: str, make: bool = False) -> Folder:
        """A folder below, each on the way opened and checked. Raises FileNotFoundError, Damaged or OSError."""
        found = self._top(folders, make)
        for name in names:
            found = folders.enter_context(found.child(name, make))
        return found

    def directory(self, key: str) -> Path | None:
        """Where the entry is or will be on disk."""
        return self.root / "entries" / key[:2] / key if self.root else None

    # ------------------------------------------------------------------ reading
    def get(self, key: str) -> dict[str, bytes] | None:
        """The files of an entry, verified; None if there is none. What does not verify is deleted."""
        files = self._from_disk(key)
        if files is None:
            return self._from_memory(key)
        logs.cache.info("hit: %s", key[:16])
        return files

    def _from_disk(self, key: str) -> dict[str, bytes] | None:
        if self.root is None:
            self._tell(self.trouble)
            return None
        try:
            with ExitStack() as folders:
                return self._read(self._folder(folders, "entries", key[:2]), key)
        except FileNotFoundError:
            return None
        except (OSError, Damaged, MemoryError) as error:
            self._tell(error)
            return None

    def _read(self, bucket: Folder, key: str) -> dict[str, bytes] | None:
        try:
            with Folder(key, bucket) as directory:
                files = _verified(directory, key)
                with suppress(OSError):
                    os.utime(directory.fd)
                return files
        except FileNotFoundError:
            return None
        except Foreign as error:
            logs.cache.info("ignored: %s: %s", key[:16], error)
        except (OSError, Damaged) as error:
            if isinstance(error, OSError) and error.errno in BUSY:
                raise
            logs.cache.info("damaged, deleted: %s: %s", key[:16], error)
            self._discard(bucket, key)
        return None

    def _from_memory(self, key: str) -> dict[str, bytes] | None:
        found = self.memory.get(key)
        logs.cache.info("%s: %s", "miss" if found is None else "hit in memory", key[:16])
        return found

    # ------------------------------------------------------------------ writing
    def put(self, key: str, files: Mapping[str, bytes]) -> None:
        """Publish an entry by one rename; an entry that is already there stays. Never raises for the disk's sake."""
        try:
            if self.root is not None and self._publish(key, files):
                return
            reason = self.trouble if self.root is None else None
        except (OSError, Damaged) as error:
            reason = error
        self.memory.put(key, files)
        if reason is not None:
            self._tell(reason)

    def _publish(self, key: str, files: Mapping[str, bytes]) -> bool:
        """Whether the entry is on disk now."""
        with ExitStack() as folders:
            bucket = self._folder(folders, "entries", key[:2], make=True)
            around = self._folder(folders, "tmp", make=True)
            is_written = _published(around, bucket, key, files) or self._read(bucket, key) is not None
        self.puts += 1
        logs.cache.debug("written: %s: %s", key[:16], ", ".join(files))
        self._sweep_in_time()
        return is_written

    def made(self, key: str, make: Callable[[], Mapping[str, bytes]]) -> dict[str, bytes]:
        """The files of an entry; where there is none, one process and thread makes it while the others wait."""
        found = self.get(key)
        if found is None:
            with self.claimed(key):
                found = self.get(key)
                if found is None:
                    found = dict(make())
                    self.put(key, found)
        return found

    def drop(self, key: str) -> None:
        """Delete an entry."""
        self.memory.entries.pop(key, None)
        self._each_in_bucket(key[:2], lambda bucket: self._discard(bucket, key))

    def clear(self) -> None:
        """Delete every entry."""
        for start in self._buckets():
            self._each_in_bucket(start, self._discard_all)

    def _buckets(self) -> list[str]:
        with suppress(OSError, Damaged), ExitStack() as folders:
            return self._folder(folders, "entries").names() if self.root else []
        return []

    def _each_in_bucket(self, start: str, act: Callable[[Folder], object]) -> None:
        if self.root is not None:
            with suppress(OSError, Damaged), ExitStack() as folders:
                act(self._folder(folders, "entries", start))

    def _discard_all(self, bucket: Folder) -> None:
        for name in bucket.names():
            self._discard(bucket, name)

    def _discard(self, bucket: Folder, name: str) -> None:
        try:
            with ExitStack() as folders:
                bucket.bury(name, self._folder(folders, "tmp", make=True))
        except (OSError, Damaged):
            bucket.remove(name)

    # ------------------------------------------------------------------ keeping it small
    def _sweep_in_time(self) -> None:
        """Once an hour for all processes together, and whenever this one has written much."""
        with suppress(OSError, Damaged), ExitStack() as folders:
            top = self._top(folders)
            if self.puts % SWEEP_EVERY and abs(time.time() - _time_of(top, SWEPT)) < SWEEP_SECONDS:
                return
            top.remove(SWEPT)
            top.write(SWEPT, b"")
            self.sweep()

    def sweep(self, limit: int | None = None) -> None:
        """Delete the entries used longest ago until the rest fits, and what killed processes left."""
        limit = self.limit if limit is None else limit
        entries = self._entries()
        total = sum(size for _, size, _ in entries)
        for _, size, name in entries:
            if total <= limit:
                break
            logs.cache.info("evicted: %s, %d bytes", name[:16], size)
            self._each_in_bucket(name[:2], lambda bucket, name=name: self._discard(bucket, name))  # type: ignore[misc]
            total -= size
        self._remove_stale()

    def _remove_stale(self) -> None:
        if self.root is None:
            return
        with suppress(OSError, Damaged), ExitStack() as folders:
            tmp = self._folder(folders, "tmp", make=True)
            for name in tmp.names():
                if abs(time.time() - _time_of(tmp, name)) > STALE_SECONDS:
                    tmp.remove(name)
            claims.remove_stale(self._folder(folders, "locks", make=True), STALE_SECONDS)

    def _entries(self) -> list[tuple[float, int, str]]:
        """(time of last use, bytes, name) of every entry, the one used longest ago first."""
        found: list[tuple[float, int, str]] = []
        for start in self._buckets():
            self._each_in_bucket(start, lambda bucket: found.extend(_sizes(bucket)))
        return sorted(found)

    # ------------------------------------------------------------------ for people
    def listed(self) -> list[Entry]:
        """Every entry on disk, the one used longest ago first."""
        return [Entry(name, size, used, self._described(name)) for used, size, name in self._entries()]

    def _described(self, name: str) -> str:
        with suppress(OSError, ValueError, Damaged), ExitStack() as folders:
            bucket = self._folder(folders, "entries", name[:2])
            return described(folders.enter_context(Folder(name, bucket)))
        return "unreadable"

    def fault(self, key: str) -> str | None:
        """Why an entry does not verify; None where it does. It stays where it is."""
        if self.root is None:
            return str(self.trouble)
        try:
            with ExitStack() as folders:
                bucket = self._folder(folders, "entries", key[:2])
                _verified(folders.enter_context(Folder(key, bucket)), key)
        except (OSError, Damaged) as error:
            return str(error) or type(error).__name__
        return None

    # ------------------------------------------------------------------ one at a time
    def claim(self, key: str, seconds: float) -> Claim | None:
        """The right to make an entry, where it can be had in time."""
        if self.root is None:
            return None
        began, seconds = time.monotonic(), min(seconds, self.patience)
        with suppress(OSError, Damaged), ExitStack() as folders:
            found = claims.claim(self._folder(folders, "locks", make=True), key, seconds)
            if found is None and seconds and time.monotonic() - began >= seconds:
                self.patience = min(IMPATIENT_SECONDS, self.patience)
            return found
        return None

    @contextmanager
    def claimed(self, key: str) -> Iterator[None]:
        """Make an entry in one process at a time. A lock that cannot be had in time costs double work, nothing else."""
        held = self.claim(key, self.patience)
        try:
            yield
        finally:
            if held is not None:
                held.let_go()


def _published(around: Folder, bucket: Folder, key: str, files: Mapping[str, bytes]) -> bool:
    """Write an entry beside, then rename it; False where another was first."""
    name = secrets.token_hex(8)
    try:
        with around.child(name, make=True) as made:
            _write(made, key, files)
        around.move(name, bucket, key)
        return True
    except FileExistsError:
        return False
    finally:
        around.remove(name)


def _time_of(folder: Folder, name: str) -> float:
    """When it was last changed, or used; 0 where it is not there."""
    try:
        return folder.stat(name).st_mtime
    except FileNotFoundError:
        return 0.0


def _sizes(bucket: Folder) -> Iterator[tuple[float, int, str]]:
    """(time of last use, bytes on disk, name) of what is in a bucket; a time in the future counts as long ago."""
    for name in bucket.names():
        size, used = 0, 0.0
        with suppress(OSError, Damaged):
            used = _time_of(bucket, name)
            with Folder(name, bucket) as directory:
                size = sum(_on_disk(directory.stat(part).st_size) for part in directory.names())
        yield used if used <= time.time() + STALE_SECONDS else 0.0, size, name


def _on_disk(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def described(directory: Folder) -> str:
    """What an entry holds, from its files: the kernels of a module, a binary's formats, a choice."""
    names = [name for name in directory.names() if name != MANIFEST]
    texts = [directory.read(n, FILE_BYTES).decode(errors="replace") for n in names if n.endswith((".py", "ptx"))]
    kernels = dict.fromkeys(a or b for text in texts for a, b in _KERNEL.findall(text))
    return f"{', '.join(kernels)} ({', '.join(names)})" if kernels else ", ".join(names)


_KERNEL = re.compile(r"@triton\.jit\s+def (\w+)\(\w+_ptr|\.entry (\w+)")


# ------------------------------------------------------------------ the place
def default_root() -> Path | None:
    """FUSEGRAD_CACHE_DIR, else a folder of this user by the platform's rules; None without a home directory.

    Linux: `$XDG_CACHE_HOME/fusegrad`, else `~/.cache/fusegrad`. macOS: the same where XDG_CACHE_HOME is set, else
    `~/Library/Caches/fusegrad`. Windows: `%LOCALAPPDATA%\\fusegrad\\Cache`. Never a temporary folder.
    """
    chosen = os.environ.get("FUSEGRAD_CACHE_DIR")
    if chosen:
        return Path(os.path.abspath(chosen))
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA", "")
        return Path(local, "fusegrad", "Cache") if os.path.isabs(local) else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "fusegrad"
    home = _home()
    below = ("Library", "Caches") if sys.platform == "darwin" else (".cache",)
    return home.joinpath(*below, "fusegrad") if home else None


def _home() -> Path | None:
    """The home directory if there is one: it is not for us to make."""
    home = os.environ.get("HOME") or _home_of_user()
    return Path(home) if os.path.isabs(home) and os.path.isdir(home) else None


def _home_of_user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


_caches: dict[Path | None, Cache] = {}
_caches_lock = threading.Lock()


def default() -> Cache:
    """The cache that the environment names now."""
    root = default_root()
    found = _caches.get(root)
    if found is None:
        with _caches_lock:
            found = _caches[root] = _caches.get(root) or Cache(root)
    return found


def get(key: str) -> dict[str, bytes] | None:
    """The files of an entry of the default cache, or None."""
    return default().get(key)


def drop(key: str) -> None:
    """Delete an entry of the default cache that verifies, but is not what it should be."""
    default().drop(key)


def put(key: str, files: Mapping[str, bytes]) -> None:
    """Publish an entry in the default cache."""
    default().put(key, files)
