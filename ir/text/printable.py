"""Names, places and lines of other people's source as text that stays where it is put: in a comment, a docstring."""

from __future__ import annotations


def printable(text: str) -> str:
    """On one line: whatever a terminal, an editor or a compiler could take for more than a letter is escaped.

    A file's name may hold line ends, quotes, halves of surrogate pairs and marks that turn the direction of text.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def in_docstring(text: str) -> str:
    '''Lines for between two \"\"\": none of them ends the string or begins an escape.'''
    lines = (printable(line).replace("\\", "\\\\").replace('"""', '\\"\\"\\"') for line in text.split("\n"))
    text_block = "\n".join(lines)
    return text_block[:-1] + '\\"' if text_block.endswith('"') else text_block


def in_line_comment(text: str) -> str:
    """For after `//`: one line, which a backslash at its end does not join to the next."""
    return printable(text).rstrip("\\ \t")
