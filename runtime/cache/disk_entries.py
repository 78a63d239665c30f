"""The entries below one folder of this user: each read, published, listed and removed through checked descriptors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from ..settings import logs
from . import locks
from .entry_files import FORMAT, Foreign, describe, publish_entry, sizes_of_entries, verified_files
from .private_folder import BUSY, Damaged, Folder, make_private


class DiskEntries:
    """The folder of our format below `place`, made. Raises OSError, ValueError or Damaged where it cannot be used."""

    def __init__(self, place: Path) -> None:
        self.root = Path(os.path.realpath(place), f"v{FORMAT}")
        with ExitStack() as folders:
            for name in ("entries", "tmp", "locks"):
                self.folder(folders, name, make=True)

    # ------------------------------------------------------------------ folders
    def top(self, folders: ExitStack, make: bool = False) -> Folder:
        """The folder of our format. It and the one around it are never removed: they may be another program's."""
        if make:
            make_private(self.root)
        parent = folders.enter_context(Folder(self.root.parent))
        top = folders.enter_context(Folder(self.root.name, parent))
        if top.mode != 0o700:
            os.fchmod(top.fd, 0o700)
        return top

    def folder(self, folders: ExitStack, *names: str, make: bool = False) -> Folder:
        """A folder below, each on the way opened and checked. Raises FileNotFoundError, Damaged or OSError."""
        opened = self.top(folders, make)
        for name in names:
            opened = folders.enter_context(opened.child(name, make))
        return opened

    def _buckets(self) -> list[str]:
        with suppress(OSError, Damaged), ExitStack() as folders:
            return self.folder(folders, "entries").names()
        return []

    def _in_bucket(self, start: str, act: Callable[[Folder], object]) -> None:
        with suppress(OSError, Damaged), ExitStack() as folders:
            act(self.folder(folders, "entries", start))

    # ------------------------------------------------------------------ one entry
    def read(self, key: str) -> dict[str, bytes] | None:
        """The files of an entry, verified. Raises OSError or Damaged where the folders cannot be used."""
        try:
            with ExitStack() as folders:
                return self._read(self.folder(folders, "entries", key[:2]), key)
        except FileNotFoundError:
            return None

    def _read(self, bucket: Folder, key: str) -> dict[str, bytes] | None:
        try:
            with Folder(key, bucket) as directory:
                files = verified_files(directory, key)
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

    def publish(self, key: str, files: Mapping[str, bytes]) -> bool:
        """Write an entry where there is none; whether one is there now."""
        with ExitStack() as folders:
            bucket = self.folder(folders, "entries", key[:2], make=True)
            tmp = self.folder(folders, "tmp", make=True)
            return publish_entry(tmp, bucket, key, files) or self._read(bucket, key) is not None

    def fault(self, key: str) -> str | None:
        """Say why an entry does not verify; None where it does. It stays where it is."""
        try:
            with ExitStack() as folders:
                bucket = self.folder(folders, "entries", key[:2])
                verified_files(folders.enter_context(Folder(key, bucket)), key)
        except (OSError, Damaged) as error:
            return str(error) or type(error).__name__
        return None

    def describe(self, key: str) -> str:
        """Describe what an entry holds."""
        with suppress(OSError, ValueError, Damaged), ExitStack() as folders:
            bucket = self.folder(folders, "entries", key[:2])
            return describe(folders.enter_context(Folder(key, bucket)))
        return "unreadable"

    def lock(self, key: str, seconds: float) -> locks.FileLock | None:
        """The lock of an entry, waited for at most so long."""
        with ExitStack() as folders:
            return locks.claim(self.folder(folders, "locks", make=True), key, seconds)

    # ------------------------------------------------------------------ many entries
    def entries(self) -> list[tuple[float, int, str]]:
        """(time of last use, bytes, name) of every entry, the one used longest ago first."""
        entries: list[tuple[float, int, str]] = []
        for start in self._buckets():
            self._in_bucket(start, lambda bucket: entries.extend(sizes_of_entries(bucket)))
        return sorted(entries)

    def drop(self, key: str) -> None:
        """Delete an entry."""
        self._in_bucket(key[:2], lambda bucket: self._discard(bucket, key))

    def clear(self) -> None:
        """Delete every entry."""

        def empty(bucket: Folder) -> None:
            for name in bucket.names():
                self._discard(bucket, name)

        for start in self._buckets():
            self._in_bucket(start, empty)

    def _discard(self, bucket: Folder, name: str) -> None:
        try:
            with ExitStack() as folders:
                bucket.remove_atomically(name, self.folder(folders, "tmp", make=True))
        except (OSError, Damaged):
            bucket.remove(name)
