"""The output of commands: tables and lines, by rich in a terminal, as plain text everywhere else.

In a pipe, on a dumb terminal, or where rich was left out, the same words come as plain text. rich honours NO_COLOR.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

WIDEST = 60
"""A column is as wide as its widest cell below this; longer ones reach out of it."""


@dataclass(frozen=True)
class Table:
    """Rows under a head. Numbers stand to the right, words to the left."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[object]]


Block = str | Table


def show(blocks: Iterable[Block], file: TextIO | None = None) -> None:
    """Print them to stdout, or to `file`: a table with a title has a blank line before it."""
    stream = file or sys.stdout
    console = console_of(stream)
    for number, block in enumerate(blocks):
        if number and isinstance(block, Table) and block.title:
            print(file=stream)
        if console is None:
            print(plain(block), file=stream)
        elif isinstance(block, Table):
            console.print(_rich_table(block))
        else:
            console.print(block, markup=False, highlight=False, soft_wrap=True)


def plain(block: Block) -> str:
    """A block as text."""
    if isinstance(block, str):
        return block
    lines = list(table_lines(block.head, [[str(c) for c in row] for row in block.rows]))[not any(block.head) :]
    return "\n".join([block.title, *lines] if block.title else lines)


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table, two blanks before each and between columns."""
    full = [list(head), *([*row, *[""] * (len(head) - len(row))] for row in rows)]
    widths = [max((len(row[i]) for row in full if len(row[i]) < WIDEST), default=0) for i in range(len(head))]
    for row in full:
        cells = [c.rjust(w) if is_number(c) else c.ljust(w) for c, w in zip(row, widths, strict=True)]
        yield f"  {'  '.join(cells)}".rstrip()


def is_number(text: str) -> bool:
    """1,234.5 is one, and 64.0 ms."""
    return re.fullmatch(r"\d[\d,.]*( (us|ms|s))?", text) is not None


# ------------------------------------------------------------------ a terminal
def is_terminal(stream: Any) -> bool:
    """True for a terminal that can move a cursor."""
    return bool(getattr(stream, "isatty", lambda: False)()) and os.environ.get("TERM") != "dumb"


def console_of(stream: Any) -> Any:
    """rich's Console on a terminal; None where there is no terminal, or no rich."""
    if not is_terminal(stream):
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False)


def _rich_table(block: Table) -> Any:
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(title=block.title or None, title_justify="left", header_style="bold", show_header=any(block.head))
    rows = [[str(c) for c in row] for row in block.rows]
    for i, name in enumerate(block.head):
        numbers = [row[i] for row in rows if i < len(row) and row[i]]
        right = bool(numbers) and all(map(is_number, numbers))
        table.add_column(Text(name), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


Advance = Callable[[str], None]


@contextmanager
def progress(total: int, fact: str, wanted: bool | None = None) -> Iterator[Advance]:
    """`advance(step)` before each of `total` steps: a bar on stderr, where that is a terminal (or `wanted` says so)."""
    visible = is_terminal(sys.stderr) if wanted is None else wanted
    console = console_of(sys.stderr) if visible else None
    if console is None:
        yield _count_on_stderr(total, fact) if visible else lambda step: None
        return
    # rich's bar: imported here, since most processes never show one.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(fact, total=total)
        begun = iter(range(total))

        def advance(step: str) -> None:
            bar.update(task, completed=next(begun, total), description=f"{fact}: {step}")

        yield advance


def _count_on_stderr(total: int, fact: str) -> Advance:
    numbers = iter(range(1, total + 1))
    return lambda step: print(f"{fact} {next(numbers, total)}/{total}: {step}", file=sys.stderr, flush=True)
