"""A directory that is ours alone, used through its descriptor: what was checked is what is read, whatever its name is.

Links are never followed and pipes never waited for. What is not ours, or can be written to by others, is Damaged.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

OTHERS_WRITE = 0o022
_UNFOLLOWED = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _UNFOLLOWED
_READ = os.O_RDONLY | _UNFOLLOWED
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _UNFOLLOWED
_PART = 1 << 20
BUSY = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR))
"""Errors that say nothing of a file: the process or the machine has too much open."""
NO_FOLDER = (errno.ENOTDIR, errno.ELOOP)


class Damaged(Exception):
    """A file or folder is not what was written (internal: it is removed, and the caller sees nothing there)."""


class Folder:
    """An open directory. Raises Damaged where it is not ours alone, OSError where there is none that can be opened."""

    def __init__(self, name: str | Path, parent: Folder | None = None) -> None:
        self.fd: int = os.open(name, _DIRECTORY, dir_fd=parent.fd if parent else None)
        status = os.fstat(self.fd)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & OTHERS_WRITE:
            os.close(self.fd)
            raise Damaged(f"{name} is not a private directory")
        self.mode = stat.S_IMODE(status.st_mode)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    # ------------------------------------------------------------------ folders
    def make(self, name: str) -> None:
        """A directory with mode 0700 whatever the umask, unless something of that name is there."""
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.fd)
            os.chmod(name, 0o700, dir_fd=self.fd)

    def child(self, name: str, make: bool = False) -> Folder:
        """A folder of this one. What else has its name is removed: in a folder of ours alone it can only be litter."""
        if make:
            self.make(name)
        try:
            return Folder(name, self)
        except PermissionError:
            self._unlock(name)
        except (OSError, Damaged) as error:
            if isinstance(error, OSError) and error.errno not in NO_FOLDER:
                raise
            self.remove(name)
        if make:
            self.make(name)
        return Folder(name, self)

    def names(self) -> list[str]:
        """The names of what is in it, sorted."""
        return sorted(os.listdir(self.fd))

    def stat(self, name: str) -> os.stat_result:
        """The facts of a file; of a link its own."""
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    # ------------------------------------------------------------------ files
    def read(self, name: str, most: int) -> bytes:
        """The bytes of a regular file of ours that is no longer than `most`."""
        descriptor = os.open(name, _READ, dir_fd=self.fd)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & OTHERS_WRITE:
                raise Damaged(f"{name} is not a file of ours alone")
            if status.st_size > most:
                raise Damaged(f"{name} is longer than {most} bytes")
            return _all_of(descriptor)
        finally:
            os.close(descriptor)

    def write(self, name: str, content: bytes) -> None:
        """A file that was not there before, with mode 0600 whatever the umask."""
        descriptor = os.open(name, _CREATE, 0o600, dir_fd=self.fd)
        try:
            os.fchmod(descriptor, 0o600)
            remaining = memoryview(content)
            while remaining:
                remaining = remaining[os.write(descriptor, remaining[:_PART]) :]
        finally:
            os.close(descriptor)

    # ------------------------------------------------------------------ moving and removing
    def move(self, name: str, to: Folder, name_there: str) -> None:
        """Move by one rename. Raises FileExistsError where there is a folder with content."""
        try:
            os.rename(name, name_there, src_dir_fd=self.fd, dst_dir_fd=to.fd)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(name_there) from error
            raise

    def remove_atomically(self, name: str, trash: Folder) -> None:
        """Remove what other processes may be reading: out of sight by a rename first, so that none reads half of it."""
        name_there = secrets.token_hex(8)
        try:
            self._unlock(name)
            self.move(name, trash, name_there)
        except OSError:
            self.remove(name)
        else:
            trash.remove(name_there)

    def remove(self, name: str) -> None:
        """Remove a file, a link or a folder with all that it holds, as far as it can be removed."""
        with suppress(OSError):
            if stat.S_ISDIR(self.stat(name).st_mode):
                self._unlock(name)
                shutil.rmtree(name, ignore_errors=True, dir_fd=self.fd)
            else:
                os.unlink(name, dir_fd=self.fd)

    def _unlock(self, name: str) -> None:
        """A folder that was made unreadable cannot be moved or emptied before it is readable."""
        status = self.stat(name)
        if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o700 != 0o700:
            os.chmod(name, 0o700, dir_fd=self.fd)


def _all_of(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, _PART):
        parts.append(part)
    return b"".join(parts)


def make_private(path: Path) -> None:
    """Make a folder and whatever is missing above it, each with mode 0700, whatever the umask."""
    missing = [p for p in (path, *path.parents) if not os.path.lexists(p)]
    for folder in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
            os.chmod(folder, 0o700)


__all__ = ["BUSY", "Damaged", "Folder", "make_private"]
