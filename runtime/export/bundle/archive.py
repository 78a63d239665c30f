"""The files of a bundle: written whole or not at all, read with the suspicion that a stranger's file deserves.

A bundle is a directory or a zip file with `manifest.json`, which names every other file with its SHA-256 and length,
and carries a seal over itself. Nothing is extracted, nothing is executed; what is read is bounded before it is read.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ....ir.errors import FusegradError
from ...cache.entry_files import sha256

MANIFEST = "manifest.json"
FORMAT = "fusegrad bundle"
SCHEMA = 1
MOST_FILES = 2000
MOST_BYTES = 1 << 29
MOST_IN_A_FILE = 1 << 27
MOST_JSON = 1 << 24
DEEPEST = 60
BINARIES = (".ptx", ".cubin", ".amdgcn", ".hsaco")
"""Files that can be made again: damage to them alone is no reason to refuse a bundle."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}){0,3}", re.ASCII)
_ZIP_FAULTS = (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, OSError, EOFError, ValueError, NotImplementedError,
               RuntimeError, OverflowError)  # fmt: skip


class BundleError(FusegradError, ValueError):
    """A bundle that is damaged, foreign, hostile or of another schema, or that cannot be written where it should."""

    message = "bundle {path}: {file}: {fact}\n  at:   {where}\n  fix:  {fix}"


class BundleWarning(UserWarning):
    """Part of a bundle is damaged that can be done without."""


def bundle_error(
    path: Any, file: str, fact: str, fix: str = "export the bundle again, or get it again."
) -> BundleError:
    """The error that names a file of a bundle and what is wrong with it."""
    return BundleError(path=str(path)[:200], file=_escaped(file), fact=fact, fix=fix)


def _escaped(name: str) -> str:
    return ascii(name)[1:-1][:100] or "(no name)"


# ------------------------------------------------------------------ JSON
def canonical(data: Any) -> bytes:
    """The one text of some data."""
    return (json.dumps(data, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def parse_json(content: bytes, path: Any, file: str) -> Any:
    """Data from JSON of bounded size, depth and numbers, without a name twice. Raises BundleError."""
    try:
        if len(content) > MOST_JSON:
            raise ValueError(f"it is longer than {MOST_JSON} bytes")
        text = content.decode("utf-8")
        _require_shallow(text)
        return json.loads(text, object_pairs_hook=_unique_names, **_NUMBERS)
    except (ValueError, RecursionError) as error:
        raise bundle_error(path, file, f"it is no JSON of a bundle: {error}"[:300]) from error


def _require_shallow(text: str) -> None:
    depth = 0
    for bracket in re.findall(r'"(?:[^"\\]|\\.)*"|[\[{\]}]', text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(bracket, 0)
        if depth > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST}")


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        raise ValueError("a name occurs twice in one object")
    return names


def _integer(text: str) -> int:
    if len(text) > 20:
        raise ValueError("a number is larger than 64 bits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0:
        raise ValueError(f"{text[:20]} is no number of JSON")
    return number


_NUMBERS: dict[str, Any] = {"parse_int": _integer, "parse_float": _finite, "parse_constant": _finite}


# ------------------------------------------------------------------ seal
def seal(manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, bytes]:
    """All files of a bundle: these, and a manifest that lists them."""
    table = {name: {"sha256": sha256(content), "bytes": len(content)} for name, content in files.items()}
    unsealed = {"format": FORMAT, "schema": SCHEMA, **manifest, "files": table}
    return {**files, MANIFEST: canonical({**unsealed, "seal": sha256(canonical(unsealed))})}


def _manifest(content: bytes, path: Any) -> dict[str, Any]:
    """The manifest, if it is what was written."""
    manifest = parse_json(content, path, MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise bundle_error(
            path, MANIFEST, "it is no manifest of a bundle", "give what fusegrad.export(path='x.zip') wrote."
        )
    if type(manifest.get("schema")) is not int or manifest["schema"] != SCHEMA:
        fact = f"it has schema {str(manifest.get('schema'))[:20]}, and this version of fusegrad reads {SCHEMA}"
        raise bundle_error(
            path, MANIFEST, fact, "load it with the version that it was exported with, or export it again."
        )
    unsealed = {k: v for k, v in manifest.items() if k != "seal"}
    if manifest.get("seal") != sha256(canonical(unsealed)) or canonical(manifest) != content:
        raise bundle_error(path, MANIFEST, "it was altered: its seal does not fit")
    return manifest


# ------------------------------------------------------------------ read
Damage = str
Content = bytes | Damage
"""The bytes of a file, or the reason why these cannot be read."""


def read_bundle(path: Any) -> tuple[dict[str, Any], dict[str, bytes], list[str]]:
    """(manifest, files that are what the manifest says, binaries that are damaged or missing). Raises BundleError."""
    # The manifest first: what it does not list is refused before anything else is looked at.
    place = Path(path)
    read = _from_directory if place.is_dir() else _from_zip
    contents = read(place)
    content = contents.pop(MANIFEST, None)
    if not isinstance(content, bytes):
        raise bundle_error(path, MANIFEST, content or "it is missing", "give what fusegrad.export(path='x.zip') wrote.")
    manifest = _manifest(content, path)
    table = _table(manifest, path)
    for extra in sorted(set(contents) - set(table)):
        raise bundle_error(path, extra, "the manifest does not list it")
    # Damage to binaries alone is no reason to refuse: these can be made again.
    faults = {name: reason for name, sums in table.items() if (reason := _fault(contents.get(name), sums)) is not None}
    for name in sorted(n for n in faults if not n.endswith(BINARIES)):
        raise bundle_error(path, name, faults[name])
    verified = {name: c for name, c in contents.items() if isinstance(c, bytes) and name not in faults}
    return manifest, verified, sorted(faults)


def _table(manifest: dict[str, Any], path: Any) -> dict[str, dict[str, Any]]:
    table = manifest.get("files")
    if not isinstance(table, dict) or not all(map(_is_a_name, table)) or MANIFEST in table:
        raise bundle_error(path, MANIFEST, "its list of files is none")
    for name, sums in table.items():
        if not isinstance(sums, dict) or set(sums) != {"sha256", "bytes"}:
            raise bundle_error(path, name, "the manifest gives no sum and length of it")
    return table


def _fault(content: Content | None, sums: Mapping[str, Any]) -> str | None:
    if content is None:
        return "it is missing"
    if isinstance(content, str):
        return content
    if len(content) != sums["bytes"]:
        return f"it has {len(content)} bytes, and the manifest says {str(sums['bytes'])[:20]}"
    return None if sha256(content) == sums["sha256"] else "its SHA-256 is not the one in the manifest"


def _is_a_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def _from_directory(root: Path) -> dict[str, Content]:
    contents: dict[str, Content] = {}
    total = 0
    for name, length, open_file in _entries(root, root, ""):
        total += length
        _require_bounded(root, name, length, total, len(contents))
        contents[name] = open_file()
    return contents


def _entries(root: Path, folder: Path, prefix: str) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    """(name, length, how to read it) of every file below a directory; nothing else may be there, no links either."""
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        name = f"{prefix}{entry.name}"
        if not _is_a_name(name):
            raise bundle_error(root, name, "that is no name of a file of a bundle")
        facts = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(facts.st_mode):
            yield from _entries(root, Path(entry.path), f"{name}/")
        elif stat.S_ISREG(facts.st_mode):
            yield name, facts.st_size, lambda: _bytes_of(root, name, Path(entry.path))  # noqa: B023  # called at once
        else:
            raise bundle_error(root, name, "it is a link, or no file")


def _bytes_of(root: Path, name: str, path: Path) -> bytes:
    """Opened without following a link or blocking on a pipe; no more than may be in one file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise bundle_error(root, name, "it is no file")
            return file.read(MOST_IN_A_FILE + 1)
    except OSError as error:
        raise bundle_error(root, name, f"it cannot be read: {error.strerror}") from error


def _require_bounded(path: Any, name: str, length: int, total: int, count: int) -> None:
    if count >= MOST_FILES:
        raise bundle_error(path, name, f"there are more than {MOST_FILES} files")
    if length > MOST_IN_A_FILE or total > MOST_BYTES:
        raise bundle_error(path, name, f"it is too large ({length} bytes, {total} with those before it)")


def _from_zip(path: Path) -> dict[str, Content]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise bundle_error(path, path.name, f"it is longer than {MOST_BYTES} bytes")
        with zipfile.ZipFile(io.BytesIO(_bytes_of(path, path.name, path))) as archive:
            return _read_entries(path, archive)
    except FileNotFoundError as error:
        raise bundle_error(path, path.name, "there is no such file", "give what fusegrad.export wrote.") from error
    except BundleError:
        raise
    except _ZIP_FAULTS as error:
        raise bundle_error(path, path.name, f"it is no zip file that can be read: {error}"[:200]) from error


def _read_entries(path: Path, archive: zipfile.ZipFile) -> dict[str, Content]:
    contents: dict[str, Content] = {}
    total = 0
    for entry in archive.infolist():
        name, total = entry.orig_filename, total + entry.file_size
        if (reason := _entry_fault(entry)) is not None or (
            reason := "it occurs twice" if name in contents else None
        ) is not None:
            raise bundle_error(path, name, reason)
        _require_bounded(path, name, entry.file_size, total, len(contents))
        contents[name] = _inflated(archive, entry)
    return contents


def _entry_fault(entry: zipfile.ZipInfo) -> str | None:
    if entry.orig_filename != entry.filename or not _is_a_name(entry.filename):
        return "that is no name of a file of a bundle"
    if entry.flag_bits & 0x1:
        return "it is encrypted"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "it is compressed in a way that bundles are not"
    mode = entry.external_attr >> 16
    return None if not mode or stat.S_ISREG(mode) else "it is a link, or no file"


def _inflated(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Content:
    """The bytes of an entry, at most as many as it says that it has."""
    try:
        with archive.open(entry) as file:
            content = file.read(entry.file_size + 1)
    except _ZIP_FAULTS as error:
        return f"it cannot be unpacked: {error}"[:200]
    return content if len(content) == entry.file_size else "it is not as long as the zip file says"


# ------------------------------------------------------------------ write
def zip_of(files: Mapping[str, bytes]) -> bytes:
    """A zip file: the same for the same files, whenever it is made."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in sorted(files, key=lambda n: (n != MANIFEST, n)):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, (stat.S_IFREG | 0o644) << 16
            archive.writestr(entry, files[name])
    return out.getvalue()


def write_file(path: Path, content: bytes) -> None:
    """Write a file through a neighbour and one rename: a reader sees the old file or the new one.

    Raises OSError of the file itself, whichever of both it was.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o666 & ~_mask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_directory(path: Path, files: Mapping[str, bytes], mark: str = MANIFEST) -> None:
    """A directory that holds these files and nothing else, put in place by a rename. One with `mark` in it, or an empty
    one, is replaced; any other raises BundleError."""
    if os.path.lexists(path) and not _may_be_replaced(path, mark):
        raise bundle_error(
            path, path.name, "it exists, and is nothing that an export wrote", "give a path that is free."
        )
    # Whole in a neighbour, then put in place by renames: a reader sees the old directory or the new one.
    staging = Path(tempfile.mkdtemp(dir=path.absolute().parent, prefix=f".{path.name}."))
    try:
        for name, content in files.items():
            (staging / "new" / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / "new" / name).write_bytes(content)
        _exchange(staging / "new", path, staging / "old")
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _exchange(new: Path, path: Path, backup: Path) -> None:
    """`new` becomes `path`; what was there is at `backup`, and goes back where that fails."""
    if path.exists():
        os.rename(path, backup)
    try:
        os.rename(new, path)
    except OSError:
        if backup.exists():
            os.rename(backup, path)
        raise


def _may_be_replaced(path: Path, mark: str) -> bool:
    return path.is_dir() and not path.is_symlink() and ((path / mark).is_file() or not any(path.iterdir()))
