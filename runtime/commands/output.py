"""Files that commands write: the option that names them, and in words what keeps one from being written."""

from __future__ import annotations

import argparse
import errno
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...ir.errors import FusegradError
from ..settings.suggestions import meant


class OutputError(FusegradError):
    """A file of a command cannot be written, or one that it needs cannot be read."""

    message = "{path} {fact}\n  at:   {where}\n  fix:  {fix}"


ELSEWHERE = "name a file in a folder that you may write to."
FACTS = {
    errno.ENOENT: ("there is no folder {folder}", "mkdir -p {folder}"),
    errno.ENOTDIR: ("{folder} is a file, not a folder", "name a file in a folder."),
    errno.EISDIR: ("it is a folder", "name a file in it."),
    errno.EEXIST: ("it is there already, and no folder", "name another one."),
    errno.EACCES: ("permission is denied", ELSEWHERE),
    errno.EPERM: ("permission is denied", ELSEWHERE),
    errno.EROFS: ("its file system is read-only", ELSEWHERE),
    errno.ENOSPC: ("the disk is full", "make room there, or name a file on another disk."),
    errno.EDQUOT: ("your quota of the disk is used up", "make room there, or name a file on another disk."),
    errno.ENAMETOOLONG: ("its name is too long", "give it a shorter one."),
}
"""By the system's number of an error: the fact, and the way out."""


# ------------------------------------------------------------------ the option
def add_output(parser: argparse.ArgumentParser, what: str, suffixes: tuple[str, ...]) -> None:
    """-o/--output, more than once; `--html` is a name that it had. The suffix is the format."""
    parser.add_argument(
        "-o", "--output", action="append", type=Path, default=[], metavar="FILE",
        help=f"{what}: {', '.join(suffixes)}; more than once",
    )  # fmt: skip
    parser.add_argument("--html", dest="output", action="append", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(suffixes=suffixes)


def outputs(options: argparse.Namespace) -> Iterator[Path]:
    """The files and folders that a command line names for what it writes."""
    given: Any = getattr(options, "output", None) or []
    yield from map(Path, given if isinstance(given, list) else [given])


def require_outputs(options: argparse.Namespace) -> None:
    """Raise OutputError before a command begins its work, where a file could not be written after it."""
    suffixes = getattr(options, "suffixes", None)
    for path in outputs(options) if suffixes is not None else ():
        if suffixes and not path.name.endswith(suffixes):
            fact = f"there is no format {path.suffix}" if path.suffix else "its suffix is the format, and it has none"
            fix = f"{meant(path.suffix, suffixes)}end it in {', '.join(suffixes)}."
            raise OutputError(path=path, fact=f"cannot be written: {fact}", fix=fix)
        if (number := _hindrance(path, bool(suffixes))) is not None:
            raise _in_words(path, number, "")


def _hindrance(path: Path, is_file: bool) -> int | None:
    """The number of the error that writing it would raise, as far as looking tells."""
    if not path.parent.exists():
        below = next(p for p in path.parents if p.exists())
        return errno.ENOENT if below.is_dir() else errno.ENOTDIR
    if not path.parent.is_dir():
        return errno.ENOTDIR
    if is_file and path.is_dir():
        return errno.EISDIR
    return None if os.access(path if path.exists() else path.parent, os.W_OK) else errno.EACCES


# ------------------------------------------------------------------ in words
def described(options: argparse.Namespace, error: OSError) -> OutputError:
    """An error of the system as one of ours: of the file that a command line names, where it is that one's."""
    named = list(outputs(options))
    path = _path_of(error, named)
    if error.errno == errno.ENOENT and path not in named and path.parent.is_dir():
        return OutputError(path=path, fact="cannot be read: there is no such file", fix="give a file that there is.")
    return _in_words(path, error.errno or 0, error.strerror or str(error))


def _path_of(error: OSError, named: list[Path]) -> Path:
    """The file of an error; a neighbour, through which a file is written, stands for the file itself."""
    if error.filename is None:
        return named[0] if named else Path("the standard output")
    path = Path(os.fsdecode(error.filename))
    return next((p for p in named if p.parent.absolute() == path.parent.absolute()), path)


def _in_words(path: Path, number: int, text: str) -> OutputError:
    fact, fix = FACTS.get(number, (text, ELSEWHERE))
    folder = next((p for p in path.parents if p.exists() and not p.is_dir()), path.parent)
    facts = {"folder": folder}
    return OutputError(path=path, fact=f"cannot be written: {fact.format(**facts)}", fix=fix.format(**facts))


# ------------------------------------------------------------------ writing
def write_outputs(options: argparse.Namespace, texts: Mapping[str, str]) -> list[str]:
    """Write each file that was asked for, as the text of its suffix; a line for each. Other suffixes are left out."""
    lines = []
    for path in outputs(options):
        if (text := texts.get(path.suffix)) is not None:
            path.write_text(text, encoding="utf-8")
            lines.append(f"wrote {path}")
    return lines


def write_beside(name: str, text: str) -> Path:
    """Write a file into the working folder where that can be, else where temporary files are; its path."""
    for folder in (Path(), Path(tempfile.gettempdir())):
        try:
            (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            trouble = error
            continue
        return folder / name
    raise trouble


def write_reproducer(options: argparse.Namespace, function: str, script: str) -> Path:
    """The script of a difference, in the .py files that were asked for, else beside; the (first) file."""
    if write_outputs(options, {".py": script}):
        return next(p for p in outputs(options) if p.suffix == ".py")
    name = re.sub(r"\W+", "_", function)
    return write_beside(f"fusegrad-{options.command}-{name}.py", script)
