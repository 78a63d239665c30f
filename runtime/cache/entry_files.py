"""One entry on disk: files and a manifest with their sums, published by one rename, verified when read."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from .private_folder import BUSY, Damaged, Folder

FORMAT = 1
STALE_SECONDS = 3600.0
BLOCK = 4096
"""The space that a file takes on disk is a multiple of it."""
MANIFEST = "manifest.json"
MANIFEST_BYTES = 1 << 20
FILE_BYTES = 1 << 28


@functools.cache
def versions() -> dict[str, str]:
    """The versions that a cached file depends on besides its key's parts; "" for what is not installed."""
    names = ("fusegrad", "torch", "triton")
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    return {**machine, **{name: installed_version(name) or "" for name in names}}


def installed_version(name: str) -> str | None:
    """The version of a package; None for what is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


OTHER_VERSION = "another version or format"


class Foreign(Damaged):
    """An entry of another fusegrad, torch or format (internal: it is left alone, and the caller sees a miss)."""


def sha256(content: bytes) -> str:
    """The sum by which a manifest knows a file."""
    return hashlib.sha256(content).hexdigest()


def _write_files(directory: Folder, key: str, files: Mapping[str, bytes]) -> None:
    sums = {name: sha256(content) for name, content in files.items()}
    manifest = {"format": FORMAT, "key": key, "versions": versions(), "files": sums}
    for name, content in {**files, MANIFEST: json.dumps(manifest, sort_keys=True, indent=1).encode()}.items():
        directory.write(name, content)


def verified_files(directory: Folder, key: str) -> dict[str, bytes]:
    """The files of an entry. Raises Damaged, or OSError where nothing could be opened that may be whole."""
    try:
        return _verified_by_manifest(directory, key)
    except OSError as error:
        if error.errno in BUSY:
            raise
        raise Damaged(str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"no manifest: {error}") from error


def _verified_by_manifest(directory: Folder, key: str) -> dict[str, bytes]:
    manifest = json.loads(directory.read(MANIFEST, MANIFEST_BYTES), object_pairs_hook=_each_once)
    if manifest["key"] != key:
        raise Damaged("the entry of another key")
    if (manifest["format"], manifest["versions"]) != (FORMAT, versions()):
        raise Foreign(OTHER_VERSION)
    names = set(directory.names()) - {MANIFEST}
    if names != set(manifest["files"]):
        raise Damaged("files were added or are missing")
    files = {name: directory.read(name, FILE_BYTES) for name in names}
    if any(sha256(content) != manifest["files"][name] for name, content in files.items()):
        raise Damaged("a file does not have the sum in the manifest")
    return files


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without a name that is there twice, of which readers take one or the other."""
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name is there twice")
    return dict(pairs)


def publish_entry(tmp: Folder, bucket: Folder, key: str, files: Mapping[str, bytes]) -> bool:
    """Write an entry beside, then rename it; False where another was first."""
    name = secrets.token_hex(8)
    try:
        with tmp.child(name, make=True) as entry:
            _write_files(entry, key, files)
        tmp.move(name, bucket, key)
        return True
    except FileExistsError:
        return False
    finally:
        tmp.remove(name)


def time_of(folder: Folder, name: str) -> float:
    """The time of the last change, or use, of a file; 0 where it is not there."""
    try:
        return folder.stat(name).st_mtime
    except FileNotFoundError:
        return 0.0


def sizes_of_entries(bucket: Folder) -> Iterator[tuple[float, int, str]]:
    """(time of last use, bytes on disk, name) of what is in a bucket; a time in the future counts as long ago."""
    for name in bucket.names():
        size, last_used = 0, 0.0
        with suppress(OSError, Damaged):
            last_used = time_of(bucket, name)
            with Folder(name, bucket) as directory:
                size = sum(-(-directory.stat(part).st_size // BLOCK) * BLOCK for part in directory.names())
        yield last_used if last_used <= time.time() + STALE_SECONDS else 0.0, size, name


def describe(directory: Folder) -> str:
    """Describe an entry by its files: the kernels of a module, a binary's formats, a choice."""
    names = [name for name in directory.names() if name != MANIFEST]
    texts = [directory.read(n, FILE_BYTES).decode(errors="replace") for n in names if n.endswith((".py", "ptx"))]
    kernels = dict.fromkeys(a or b for text in texts for a, b in _KERNEL.findall(text))
    return f"{', '.join(kernels)} ({', '.join(names)})" if kernels else ", ".join(names)


_KERNEL = re.compile(r"@triton\.jit\s+def (\w+)\(\w+_ptr|\.entry (\w+)")
