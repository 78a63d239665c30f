"""`fusegrad.export`: what a Function was compiled to, as a file: vendored code, a graph for programs, or a picture."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...ir.errors import FusegradError
from ..report.explain import explain
from ..report.explanation import Explanation
from ..report.page.listing import as_svg
from ..settings.suggestions import meant
from ..values.named_sizes import with_numbers
from .bundle.archive import write_file
from .bundle.bundle import as_bundle
from .bundle.hub import as_hf_kernels
from .cpp.module import as_pair, pair
from .graph_formats import as_dot, as_graphml, as_json
from .python.module import DERIVED, module_with
from .torch_export.program import as_program


class ExportFormatError(FusegradError, ValueError):
    """A format, or the suffix of a path, that export does not know; or neither was given."""

    message = "export(path={path!r}, format={format!r}): {reason}\n  at:   {where}\n  fix:  {hint}one of {known}"

    def __init__(self, detail: str = "", hint: str = "", **facts: Any) -> None:
        super().__init__(detail, hint=hint, **facts)


Writer = Callable[[Any, tuple[Any, ...], "str | None"], str]
"""(class, arguments, target) -> the text"""


def from_explanation(draw: Callable[[Explanation], str]) -> Writer:
    """A format that is drawn from an explanation."""
    return lambda target_class, args, target: draw(explain(target_class, *args, target=target))


FORMATS: dict[str, Writer] = {
    "py": lambda target_class, args, target: module_with(target_class, args, target, (), {}),
    "json": from_explanation(as_json),
    "graphml": from_explanation(as_graphml),
    "dot": from_explanation(as_dot),
    "svg": from_explanation(as_svg),
    "html": from_explanation(Explanation.to_html),
    "cpp": lambda target_class, args, target: pair(target_class, args, target)["cpp"],
    "h": lambda target_class, args, target: pair(target_class, args, target)["h"],
}
"""Formats of one file. Another one is a row here, and a row of the table in docs/export.md."""
Publisher = Callable[[Any, tuple[Any, ...], Path, "str | None", Sequence[str]], str]
TREES: dict[str, Publisher] = {
    "zip": as_bundle,
    "bundle": as_bundle,
    "hf-kernels": as_hf_kernels,
    "pt2": as_program,
}
"""Formats of several files, which need a path."""


def export(
    target_class: Any,
    /,
    *args: Any,
    path: str | os.PathLike[str] | None = None,
    format: str | None = None,
    target: str | None = None,
    derivatives: Sequence[str] = (),
    targets: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
) -> str:
    """The compiled Function as text, also written to `path`, whole or not at all.

    Args:
        target_class: A Function class or a function, compiled or not yet.
        args: Of one call: tensors (real or meta), specifications such as "bf16[8192,4096]" or "bf16[M,N]", or any other
            argument of the Function. Sizes are examples, for which block sizes are chosen: a "py" module serves any,
            rows up to a limit that it states. A name stands for any size, the same wherever it stands, and has a usual
            value as an example.
        path: The file or directory to write; None only returns the text.
        format: By default the suffix of `path`, or "bundle" for a directory that is there.

            - "py": a Triton module that runs without fusegrad.
            - "zip", "bundle": a zip file, or a directory, that `fusegrad.load` makes a class of: graphs as JSON with
              their guards, the Triton module, a manifest with sums. The text is the manifest.
            - "cpp", "h": a C++ source and its header, both are written: a torch::autograd::Function that launches the
              kernels, which are in it as machine code for one GPU.
            - "hf-kernels": a directory that Hugging Face's `kernels` package loads, without fusegrad. The text is its
              card.
            - "pt2": a program of torch.export with forward's values, and beside it one with your backward. The text
              says what is kept.
            - "json", "graphml", "dot": the graphs. "svg", "html": pictures and a report.
        target: The GPU to choose block sizes for: "cuda:80", "cuda:90" (the default), "cuda:100", "hip:gfx942".
        derivatives: What a "py" module has besides forward and backward: "jvp" (yours, or the transpose of your
            backward), "vmap" (forward, backward and jvp over a batch, for torch.func.vmap of any depth, inside grad and
            around it).
        targets: Of a bundle, the GPUs to compile its kernels for, without one at hand: PTX and cubin, or AMD's, with
            what a launch of each needs. What is loaded does not depend on them.
        sizes: `{"N": 4096}`: sizes that a "py" module is made for alone, which are numbers in its kernels; by the names
            of the specifications, or by those that the file has (M, N). Elsewhere the values of names in
            specifications.

    Returns:
        The text.

    Raises:
        ExportError: where a file could not hold what the Function does: methods that are not traceable, tensors from
            outside ..
        ExportFormatError: for another format, or options that a format does not have.
        SpecError: for a specification that cannot be read.
        SizeError: for a size that is none of the Function's.
        UnknownTargetError: for another target.
    """
    # Options that a format does not have are refused before anything is captured.
    word = _format_of(path, format)
    if targets and word not in ("zip", "bundle"):
        reason, formats = f"targets={targets!r} are for bundles", "zip, bundle"
        raise ExportFormatError(path=path, format=word, reason=reason, known=formats)
    known = sizes or {}
    numbered = with_numbers(args, known)
    if unknown := [name for name in known if word != "py" and name not in numbered.places]:
        reason = f"sizes={dict(known)}: no specification names {', '.join(unknown)}, by which {word} could know it"
        raise ExportFormatError(path=path, format=word, reason=reason, known='py, or write "bf16[M,N]"')
    # Formats of several files write these themselves; the others are one text, written at the end.
    if word in TREES and not derivatives:
        return TREES[word](target_class, numbered.args, _required_path(path, format), target, targets)
    if word in ("cpp", "h") and path is not None and not derivatives:
        return as_pair(target_class, numbered.args, target, Path(path), word)
    derived = _valid_derivatives(path, word, derivatives) if derivatives else ()
    if word == "py":
        text = module_with(target_class, args, target, derived, known)
    else:
        text = FORMATS[word](target_class, numbered.args, target)
    if path is not None:
        write_file(Path(path), text.encode())
    return text


def _format_of(path: Any, format: str | None) -> str:
    formats = ", ".join((*FORMATS, *TREES))
    if format is None and path is None:
        raise ExportFormatError(path=path, format=format, reason="give a path or a format", known=formats)
    by_suffix = "" if path is None else "bundle" if Path(path).is_dir() else Path(path).suffix.removeprefix(".")
    word = format if format is not None else by_suffix
    if word not in FORMATS and word not in TREES:
        reason = f"there is no format {word!r}" if word else "a suffix is the format, and it has none"
        hint = meant(word, (*FORMATS, *TREES))
        raise ExportFormatError(path=path, format=format, reason=reason, known=formats, hint=hint)
    return word


def _valid_derivatives(path: Any, word: str, derivatives: Sequence[str]) -> tuple[str, ...]:
    names = (derivatives,) if isinstance(derivatives, str) else tuple(derivatives)
    for name in names:
        if name not in DERIVED:
            reason, hint = f"derivatives={names!r}: there is no derivative {name!r}", meant(name, DERIVED)
            raise ExportFormatError(path=path, format=word, reason=reason, known=", ".join(DERIVED), hint=hint)
    if word != "py":
        reason = f"derivatives={names!r} are for the format py alone"
        raise ExportFormatError(path=path, format=word, reason=reason, known="py")
    return names


def _required_path(path: Any, format: str | None) -> Path:
    """The path of a format of several files; raises without one."""
    if path is None:
        reason, formats = f"{format} is several files: give a path", ", ".join(FORMATS)
        raise ExportFormatError(path=path, format=format, reason=reason, known=f"{formats} without a path")
    return Path(path)
