"""A row as two tiles: what is written of its lanes is written twice, of 4096 columns and of the 1024 behind them.

    col = tl.arange(0, BLOCK_N)         col_tail = BLOCK_N + tl.arange(0, TAIL_N)
    x = tl.load(x_ptr + at + col)       x_tail = tl.load(x_ptr + at + col_tail)
    total = tl.sum(joined(both(x), tl.sum, 128, 8), 0)   ->   total = tl.sum(joined(x, x_tail, tl.sum, 128, 8), 0)

Tiles have powers of two of lanes. Everything is emitted as if one could have 5120; reductions alone, which say `both`,
know that there are two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..context import Context
from ..statements import Accumulate, Assert, Expr, For, If, Let, Statement, Store, call

BOTH = "both"


def both(value: Expr) -> Expr:
    """A value as two arguments: of the first tile, and of the second."""
    return call(BOTH, value)


def in_two_tiles(context: Context, body: Sequence[Statement], block: str) -> list[Statement]:
    """The statements of a kernel whose blocks have so many lanes as two tiles."""
    constants, tail = context.sizes.constants, context.names.fresh(block.replace("BLOCK", "TAIL"))
    constants[block], constants[tail] = context.plan.lanes - context.plan.tail, context.plan.tail
    return list(_Twice(context, block, {block: tail}).statements(body))


@dataclass(eq=False)
class _Twice:
    """`tails`: names that vary along the row, and those of their second tiles."""

    context: Context
    block: str
    tails: dict[str, str] = field(default_factory=dict)

    def statements(self, body: Sequence[Statement]) -> Iterator[Statement]:
        for statement in body:
            if isinstance(statement, (For, If)):
                statement.body = list(self.statements(statement.body))
                yield statement
            elif isinstance(statement, (Let, Accumulate)):
                yield from self._named(statement)
            elif isinstance(statement, Store):
                yield from self._store(statement)
            elif isinstance(statement, Assert):
                yield from self._assertion(statement)
            else:
                yield statement

    def _named(self, line: Let | Accumulate) -> Iterator[Statement]:
        yield replace(line, value=self._first(line.value))
        if self._varies(line.value):
            second = replace(line, value=self._second(line.value), comment="")
            if line.name not in self.tails:
                self.tails[line.name] = self.context.names.fresh(f"{line.name}_tail")
            second.name = self.tails[line.name]
            yield second

    def _store(self, line: Store) -> Iterator[Statement]:
        yield _changed(line, self._first)
        if any(map(self._varies, (line.pointer, line.value))):
            second = _changed(line, self._second)
            second.lanes, second.comment = frozenset(self.tails.get(n, n) for n in line.lanes), ""
            yield second

    def _assertion(self, line: Assert) -> Iterator[Statement]:
        for change in (self._first, *([self._second] if self._varies(line.condition) else [])):
            yield replace(line, condition=change(line.condition), mask=change(line.mask) if line.mask else None)

    # ------------------------------------------------------------------ expressions
    def _varies(self, value: Expr) -> bool:
        """Whether it has lanes along the row, other than those that it folds."""
        return any(self._renamed(text) != text for text in _apart(value.text)[::2])

    def _first(self, value: Expr) -> Expr:
        return self._rewritten(value, lambda text: text)

    def _second(self, value: Expr) -> Expr:
        return self._rewritten(value, self._renamed)

    def _rewritten(self, value: Expr, outside: Callable[[str], str]) -> Expr:
        """`outside`: what becomes of the text that is not folded."""
        apart = _apart(value.text)
        pairs = [f"{text}, {self._renamed(text)}" for text in apart[1::2]]
        texts = [outside(text) for text in apart[::2]]
        text = "".join(a + b for a, b in zip(texts, [*pairs, ""], strict=True))
        known = value.names | frozenset(self.tails.values())
        return replace(value, text=text, names=known & frozenset(NAME.findall(text)))

    def _renamed(self, text: str) -> str:
        """The text of the second tile; the first lane of it comes behind the last one of the first."""
        renamed = NAME.sub(lambda name: self.tails.get(name[0], name[0]), text)
        lanes = f"tl.arange(0, {self.tails[self.block]})"
        return renamed.replace(lanes, f"{self.block} + {lanes}")


NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*(?!\w)(?!=(?!=))")
"""A name that is read: neither a keyword of a call nor an attribute."""


def _changed(line: Store, change: Callable[[Expr], Expr]) -> Store:
    mask = change(line.mask) if line.mask else None
    return replace(line, pointer=change(line.pointer), value=change(line.value), mask=mask)


def _apart(text: str) -> list[str]:
    """Text outside of `both(..)`, then inside, outside, ..."""
    apart, mark = [], f"{BOTH}("
    while (begin := text.find(mark)) >= 0:
        end = _closing(text, begin + len(mark))
        apart += [text[:begin], text[begin + len(mark) : end]]
        text = text[end + 1 :]
    return [*apart, text]


def _closing(text: str, place: int) -> int:
    """Where the bracket closes that was open before this place."""
    depth = 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        place += 1
    return place - 1
