"""A kernel's text in lines that a reader's editor shows whole: long signatures and statements folded, remarks above."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..text.scope import fold_words

WIDTH = 120
_REMARK = re.compile(r"^(?P<code>.*\S)  # (?P<remark>.+)$")
_NOWHERE = re.compile(r"  # <[^>]*>:\d+.*$")
"""Places that no reader can look up: generated code."""
_OPERATORS = ("+ ", "- ", "* ", "/ ", "& ", "| ")


def tidy(source: str) -> str:
    """The same program in lines of at most WIDTH, as far as one fold takes them."""
    return "\n".join(line for line_in in source.split("\n") for line in _lines(_NOWHERE.sub("", line_in)))


def _lines(line: str) -> Iterator[str]:
    indent = line[: len(line) - len(line.lstrip())]
    remark = _REMARK.match(line) if len(line) > WIDTH else None
    if remark is not None:
        yield from _remark(indent, remark["remark"])
        line = remark["code"]
    yield from [line] if len(line) <= WIDTH else _folded(indent, line.strip())


def _remark(indent: str, remark: str) -> Iterator[str]:
    room = WIDTH - len(indent) - 2
    yield f"{indent}# {remark if len(remark) <= room else remark[: room - 4] + ' ...'}"


def _folded(indent: str, code: str) -> Iterator[str]:
    """The lines of a statement, opened at the bracket of its call or put into brackets of its own."""
    signature, assigned = re.match(r"(def \w+\()(.*)(\):)$", code), re.match(r"(\w+ [-+*/]?= )(.*)$", code)
    to, value = (assigned[1], assigned[2]) if assigned else ("", code)
    opened = signature.groups() if signature else _opened(value)
    if opened:
        head, inside, tail = opened
        words = fold_words(_arguments(inside), WIDTH - len(indent) - 6)
        yield from (f"{indent}{to}{head}", *(f"{indent}    {w}" for w in words), f"{indent}{tail}")
    elif assigned:
        parts = _parts(value, WIDTH - len(indent) - 4)
        yield from (f"{indent}{to}(", *(f"{indent}    {part}" for part in parts), f"{indent})")
    else:
        yield indent + code


def _opened(text: str) -> tuple[str, str, str] | None:
    """(before, inside, after) of the bracket of a call that is the whole expression, methods after it included."""
    if not re.match(r"[\w.]+\(", text):
        return None
    at = text.index("(") + 1
    depths = list(_depths(text))
    end = next((i for i in range(at, len(text)) if depths[i] == 0), len(text))
    return (text[:at], text[at:end], text[end:]) if text[end + 1 : end + 2] in ("", ".") and depths[-1] == 0 else None


def _depths(text: str) -> Iterator[int]:
    """The number of open brackets after each letter."""
    depth = 0
    for letter in text:
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(letter, 0)
        yield depth


def _arguments(text: str) -> Iterator[str]:
    """The parts between commas that are in no bracket."""
    start = 0
    for i, depth in enumerate(_depths(text)):
        if depth == 0 and text[i : i + 2] == ", ":
            yield text[start:i]
            start = i + 2
    yield text[start:]


def _parts(text: str, room: int) -> Iterator[str]:
    """An expression in lines, each of which but the first begins with an operator that is in no bracket."""
    while len(text) > room and (at := _last_operator(text[: room + 1])):
        yield text[:at].rstrip()
        text = text[at:]
    yield text


def _last_operator(text: str) -> int:
    places = [i for i, depth in enumerate(_depths(text)) if depth == 0 and text[i : i + 2] in _OPERATORS]
    return next((i for i in reversed(places) if i and text[i - 1] == " "), 0)
