"""`export(.., path="x.zip")`: all files of a bundle, put together and published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...report.explain import compiler_of
from ..gather.gathered import ExportError, export_error, gather_function
from ..python.module import module_text
from .archive import MANIFEST, BundleError, seal, write_directory, write_file, zip_of
from .binaries import target_files
from .load import contents
from .write import CapturedBundle, capture_bundle

MODULE = "module.py"


def bundle_files(
    target_class: Any, args: Sequence[Any], target: str | None = None, targets: Sequence[str] = ()
) -> dict[str, bytes]:
    """Every file of a bundle by name. Raises ExportError, UnknownTargetError."""
    function = capture_bundle(target_class, args)
    _require_readable(target_class, function)
    module, reason = _module(target_class, args, target)
    files = {**function.graphs, **module}
    for name in dict.fromkeys(targets):
        files |= target_files(target_class, args, name)
    return seal({**function.manifest, "module": reason, "targets": list(targets)}, files)


def _require_readable(target_class: Any, captured: CapturedBundle) -> None:
    """Require that the bundle can be read back: sizes are not too involved, nothing is too large."""
    try:
        contents(captured.manifest["function"], captured.graphs, "the bundle")
    except BundleError as error:
        reason = f"a bundle cannot hold it: {error.facts['file']}: {error.facts['fact']}"
        raise export_error(compiler_of(target_class), reason) from error


def _module(target_class: Any, args: Sequence[Any], target: str | None) -> tuple[dict[str, bytes], str | None]:
    """The Triton module, or why there is none."""
    try:
        return {MODULE: module_text(gather_function(target_class, args, target, any_row=True)).encode()}, None
    except ExportError as error:
        return {}, str(error.facts.get("reason", error))


def as_bundle(
    target_class: Any, args: Sequence[Any], path: Path, target: str | None = None, targets: Sequence[str] = ()
) -> str:
    """Publish a zip file, where the path ends so, or a directory; whole or not at all. -> the manifest"""
    files = bundle_files(target_class, args, target, targets)
    if path.suffix == ".zip":
        write_file(path, zip_of(files))
    else:
        write_directory(path, files, MANIFEST)
    return files[MANIFEST].decode()
