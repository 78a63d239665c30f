"""docs/troubleshooting.md's mistakes, made again: `python docs/site/mistakes.py` renews what eager and fusegrad say.

Each is a small program in docs/site/mistakes.txt. It runs twice, in eager and compiled; what is raised or warned is
written below it, with the number of lines that Python prints of it. A test compares.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import textwrap
import traceback
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fusegrad

SITE = Path(__file__).resolve().parent
PAGE, PROGRAMS = SITE.parent / "troubleshooting.md", SITE / "mistakes.txt"
FILE = "model.py"
MOST, WIDEST = 8, 110
"""Lines of a message that are shown, and columns of a line."""


@dataclass(frozen=True)
class Mistake:
    """One row: what went wrong, what fusegrad used to say, and the program."""

    title: str
    before: str
    code: str


@dataclass(frozen=True)
class Said:
    """What a run says: the messages, and how many lines Python prints of them."""

    text: str
    lines: int


def mistakes() -> list[Mistake]:
    parts = re.split(r"^== ", PROGRAMS.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    heads = (part.split("\n", 2) for part in parts)
    return [Mistake(title, before.removeprefix("-- "), code.strip("\n") + "\n") for title, before, code in heads]


# ------------------------------------------------------------------ runs
EAGER = types.SimpleNamespace(
    compile=lambda target=None, **options: target or (lambda cls: cls),
    explain=lambda *args: types.SimpleNamespace(opaque=[], kept=[]),
)
"""What stands for the package in eager."""


def run(mistake: Mistake, package: Any) -> Said:
    """The program as a file of a user's, with torch, Function and x at hand."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / FILE
        file.write_text(mistake.code, encoding="utf-8")
        return run_program(compile(mistake.code, str(file), "exec"), package)


def run_program(program: types.CodeType, package: Any) -> Said:
    torch.manual_seed(0)
    scope = {"__name__": "model", "torch": torch, "Function": torch.autograd.Function, "fusegrad": package}
    scope["x"] = torch.randn(4, requires_grad=True)
    error: Exception | None = None
    recorded = warnings.catch_warnings(record=True)
    with contextlib.redirect_stdout(io.StringIO()) as output, recorded as warned, fusegrad.config.patch(store=False):
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        try:
            exec(program, scope)
        except Exception as raised:
            error = raised
    return said(output.getvalue(), warned or [], error)


def said(output: str, warned: list[warnings.WarningMessage], error: Exception | None) -> Said:
    messages = [line for line in output.splitlines() if line]
    messages += [f"{Path(str(w.filename)).name}:{w.lineno}: {w.category.__name__}: {w.message}" for w in warned]
    printed = [line for message in messages for line in message.splitlines()]
    if error is not None:
        trace = error.__traceback__ and error.__traceback__.tb_next  # without this file's own frame
        messages += ["".join(traceback.format_exception_only(error)).rstrip()]
        printed += "".join(traceback.format_exception(type(error), error, trace)).splitlines()
    return Said("\n".join(messages), len(printed))


# ------------------------------------------------------------------ the page
def rows() -> Iterator[str]:
    for mistake in mistakes():
        eager, ours = run(mistake, EAGER), run(mistake, fusegrad)
        yield f"### {mistake.title}\n"
        yield f"```python title=\"{FILE}\"\n{mistake.code}```\n"
        yield f"Eager{counted(eager)}:\n" if eager.text else "Eager says nothing.\n"
        yield from block(eager)
        yield f"fusegrad, before: {mistake.before}\n"
        yield f"fusegrad, now{counted(ours)}:\n" if ours.text else "fusegrad, now: nothing, as eager.\n"
        yield from block(ours)


def counted(said: Said) -> str:
    return f" ({said.lines} line{'s' * (said.lines != 1)})"


def block(said: Said) -> Iterator[str]:
    if said.text:
        lines = list(wrapped(re.sub(r"(?<![\w:/])(?:/[\w.+-]+)+/(?:site-packages/)?", "", said.text)))
        rest = [f"... {len(lines) - MOST} more lines"] if len(lines) > MOST + 1 else lines[MOST:]
        yield "```text\n" + "\n".join([*lines[:MOST], *rest]) + "\n```\n"


def wrapped(text: str) -> Iterator[str]:
    """The lines of a text, those that are too wide for a page broken between words."""
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        yield from textwrap.wrap(line, WIDEST, subsequent_indent=indent, break_long_words=False) or [""]


def renewed(page: str) -> str:
    """The page with its rows written anew."""
    marks = re.compile(r"(<!-- mistakes: [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
    text = "\n".join(rows())
    return marks.sub(lambda found: f"{found[1]}\n{text}\n{found[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
