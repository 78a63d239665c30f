"""`fusegrad.export`: what a Function was compiled to, as a file: vendored code, a graph for programs, or a picture."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...ir.errors import FusegradError
from ..explain import explain
from .drawing import as_html, as_svg
from .gathered import gathered
from .graphs import as_dot, as_graphml, as_json
from .module import module_text


class ExportFormatError(FusegradError, ValueError):
    """A format, or the suffix of a path, that export does not know; or neither was given."""

    message = "export(path={path!r}, format={format!r}): {reason}\n  at:   {where}\n  fix:  one of {known}"


Writer = Callable[[Any, tuple[Any, ...], "str | None"], str]


def _explained(draw: Callable[[Any], str]) -> Writer:
    return lambda target_class, args, target: draw(explain(target_class, *args, target=target))


FORMATS: dict[str, Writer] = {
    "py": lambda target_class, args, target: module_text(gathered(target_class, args, target)),
    "json": _explained(as_json),
    "graphml": _explained(as_graphml),
    "dot": _explained(as_dot),
    "svg": _explained(as_svg),
    "html": _explained(as_html),
}


DERIVATIVES = ("jvp",)


def export(
    target_class: Any,
    /,
    *args: Any,
    path: str | os.PathLike[str] | None = None,
    format: str | None = None,
    target: str | None = None,
    derivatives: Sequence[str] = (),
) -> str:
    """The compiled Function as text, also written to `path`.

    args: tensors (real or meta), specifications such as "bf16[8192,4096]", or any other argument of the Function.
    format: "py" (a Triton module that runs without fusegrad), "json", "graphml", "dot" (the graphs), "svg", "html"
    (pictures); by default the suffix of `path`.
    target: the GPU to choose block sizes for: "cuda:80", "cuda:90" (the default), "cuda:100", "hip:gfx942".
    derivatives: what a "py" module has besides forward and backward: "jvp" (yours, or the transpose of your backward).
    Raises ExportError where a file could not hold what the Function does (opaque methods, tensors from outside, ..),
    ExportFormatError, SpecError, UnknownTargetError. A file is written whole or not at all.
    """
    word = _format(path, format)
    if not derivatives:
        text = FORMATS[word](target_class, args, target)
    else:
        text = module_text(gathered(target_class, args, target, _derivatives(path, word, derivatives)))
    if path is not None:
        _write(Path(path), text)
    return text


def _format(path: Any, format: str | None) -> str:
    known = ", ".join(FORMATS)
    if format is None and path is None:
        raise ExportFormatError(path=path, format=format, reason="give a path or a format", known=known)
    word = format if format is not None else Path(path).suffix.removeprefix(".")
    if word not in FORMATS:
        raise ExportFormatError(path=path, format=format, reason=f"there is no format {word!r}", known=known)
    return word


def _derivatives(path: Any, word: str, asked: Sequence[str]) -> tuple[str, ...]:
    names = (asked,) if isinstance(asked, str) else tuple(asked)
    if word != "py" or not set(names) <= set(DERIVATIVES):
        reason = f"derivatives={names!r} are for the format py alone, and of {', '.join(DERIVATIVES)}"
        raise ExportFormatError(path=path, format=word, reason=reason, known=", ".join(FORMATS))
    return names


def _write(path: Path, text: str) -> None:
    """Through a neighbour and one rename: a reader sees the old file or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
