"""One page of HTML for people, light and self-contained: no scripts, no requests. The export and the profile use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .terminal import is_number

INK, GREY, RULE, PAPER = "#111827", "#6b7280", "#e5e7eb", "#ffffff"
SMALLEST = 2 / 3  # of its size, at which a drawing can still be read
WIDTH = 1240  # pixels that a page takes at most, so that a window of 1280 shows all of it


def page(title: str, *sections: str) -> str:
    """A whole document: the title as its heading, then the sections, which are HTML already."""
    return PAGE.format(title=escape(title), style=STYLE, body="\n".join(sections))


def section(heading: str, *parts: str) -> str:
    """A heading that can be linked to, and what stands under it."""
    return f'<h2 id="{anchor(heading)}">{escape(heading)}</h2>\n' + "\n".join(parts)


def anchor(heading: str) -> str:
    """Graphs after the passes -> graphs-after-the-passes"""
    return "-".join("".join(c if c.isalnum() else " " for c in heading.lower()).split())


def contents(*headings: str) -> str:
    """Links to the sections of this page."""
    links = " · ".join(f'<a href="#{anchor(h)}">{escape(h)}</a>' for h in headings)
    return f'<p class="note">{links}</p>'


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def picture(svg: str, width: float) -> str:
    """A frame around a drawing that fits it: made smaller to two thirds at most, beyond that it scrolls."""
    return f'<div class="picture"><div style="min-width: {SMALLEST * width:.0f}px">{svg}</div></div>'


def code(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


@dataclass(frozen=True)
class TableStyle:
    """The attributes of a table, of its cells, and of its cells with numbers."""

    table: str = ""
    cell: str = ""
    number: str = " class=number"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], style: TableStyle = TableStyle()) -> str:
    """Columns of numbers to the right; columns that are empty everywhere are left out."""
    columns = [i for i in range(len(head)) if any(row[i] for row in rows if i < len(row))]
    full = [[*row, *[""] * (len(head) - len(row))] for row in rows]
    attributes = {i: style.number if all(is_number(r[i]) for r in full if r[i]) else style.cell for i in columns}
    lines = [("th", head), *(("td", row) for row in full)]
    cells = (("".join(f"<{tag}{a}>{escape(row[i])}</{tag}>" for i, a in attributes.items())) for tag, row in lines)
    return f"<table{style.table}>\n" + "".join(f"<tr>{row}</tr>\n" for row in cells) + "</table>"


STYLE = f"""
:root {{ color-scheme: only light; }}
body {{ margin: 24px auto; padding: 0 20px; max-width: {WIDTH}px; font: 14px/1.5 system-ui, sans-serif;
  color: {INK}; background: {PAPER}; }}
h1 {{ font-size: 22px; overflow-wrap: anywhere; }} h2 {{ font-size: 17px; margin-top: 32px; }} h3 {{ font-size: 14px; }}
table {{ border-collapse: collapse; margin: 8px 0 16px; }}
td, th {{ padding: 3px 18px 3px 0; text-align: left; vertical-align: top; border-bottom: 1px solid {RULE};
  overflow-wrap: anywhere; }}
.number {{ text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }}
.note {{ color: {GREY}; }} a {{ color: #1d4ed8; }}
.beside {{ display: flex; flex-wrap: wrap; gap: 0 48px; }}
.picture {{ overflow-x: auto; border: 1px solid {RULE}; border-radius: 6px; padding: 8px; }}
pre {{ overflow-x: auto; padding: 12px; background: #f8fafc; border: 1px solid {RULE}; border-radius: 6px; }}
svg {{ display: block; max-width: 100%; height: auto; }}
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="only light">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""
