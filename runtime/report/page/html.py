"""The parts of a page: templates, tables, drawings, highlighted code. Light or dark, without scripts or requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from ..terminal import is_number

INK, GREY, RULE = "#111827", "#6b7280", "#e5e7eb"  # of drawings, which a dark page inverts
SMALLEST = 2 / 3  # of its size, at which a drawing can still be read
WIDTH = 1240  # pixels that a page takes at most, so that a window of 1280 shows all of it
TEMPLATES = ("style.css", "document.html", "fragment.html", "explanation.html")


@cache
def _environment() -> Any:
    """The templates beside this file. jinja2 is imported by the first page, not with the package."""
    from jinja2 import DictLoader, Environment

    texts = {name: files(__package__).joinpath(name).read_text(encoding="utf-8") for name in TEMPLATES}
    environment = Environment(loader=DictLoader(texts), autoescape=lambda name: name != "style.css")
    environment.filters |= {"anchor": anchor, "code": lambda text: _safe(code(text))}
    return environment


def render(template: str, facts: Mapping[str, Any]) -> str:
    """A template with facts put in; texts are escaped, but for parts of pages (`safe`)."""
    return str(_environment().get_template(template).render(facts))


def _safe(html: str) -> Any:
    from markupsafe import Markup

    return Markup(html)


def safe(parts: Mapping[str, str]) -> dict[str, Any]:
    """Facts that are HTML already."""
    return {name: _safe(html) for name, html in parts.items()}


def document(title: str, body: str) -> str:
    """A whole document around a body."""
    return render("document.html", {"title": title, "width": WIDTH, "body": _safe(body)})


def fragment(body: str) -> str:
    """A body for a page that is another's, such as a notebook, with its style."""
    return render("fragment.html", {"body": _safe(body)})


def page(title: str, *sections: str) -> str:
    """A document with the title as its heading, then the sections, which are HTML already."""
    return document(title, "\n".join([f"<h1>{escape(title)}</h1>", *sections]))


# ------------------------------------------------------------------ parts
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


def picture(svg: str) -> str:
    """A frame around a drawing that fits it: made smaller to two thirds at most, beyond that it scrolls."""
    width = float(svg.split(' width="', 1)[1].split('"', 1)[0])
    return f'<div class="picture"><div style="min-width: {SMALLEST * width:.0f}px">{svg}</div></div>'


def code(text: str) -> str:
    """Python with its words in colours."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    return f"<pre>{highlight(text.rstrip(), PythonLexer(), HtmlFormatter(nowrap=True))}</pre>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of numbers to the right; columns that are empty everywhere are left out. A wide one scrolls."""
    columns = [i for i in range(len(head)) if any(row[i] for row in rows if i < len(row))]
    full = [[*row, *[""] * (len(head) - len(row))] for row in rows]
    numbers = {i: all(is_number(r[i]) for r in full if r[i]) for i in columns}
    lines = [("th", head), *(("td", row) for row in full)]
    cells = (
        "".join(f"<{tag}{' class=number' * numbers[i]}>{escape(row[i])}</{tag}>" for i in columns)
        for tag, row in lines
    )
    return '<div class="scroll"><table>\n' + "".join(f"<tr>{row}</tr>\n" for row in cells) + "</table></div>"
