"""Names for sizes in specifications, "bf16[M,N]": one name is one size, with a value of its own or a made-up one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...ir.errors import FusegradError
from .tensor_specs import is_spec

USUAL = {1: (4096,), 2: (8192, 4096), 3: (8, 1024, 4096), 4: (8, 16, 512, 128)}
"""Values of names by rank, for which block sizes are chosen where nothing else is said."""
FEW = 4
"""Of each axis where there are more."""
_INSIDE = re.compile(r"\[([^\]]*)\]\s*$")


class SizeError(FusegradError, ValueError):
    """A size that nothing has, or a value that no size has."""

    message = "sizes={sizes}: {detail}\n  at:   {where}\n  fix:  {fix}"


@dataclass(frozen=True)
class NamedSizes:
    """Arguments whose specifications are numbers alone. places: (argument, axis) for each name that they had."""

    args: tuple[Any, ...]
    places: Mapping[str, Sequence[tuple[int, int]]]


def with_numbers(args: Sequence[Any], sizes: Mapping[str, int]) -> NamedSizes:
    """The arguments with a number for each name: that of `sizes`, or a usual one. Raises SizeError."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            fix = "give whole numbers from 1 on: sizes={'N': 4096}, --sizes N=4096"
            raise SizeError(sizes=dict(sizes), detail=f"{name} is {value!r}", fix=fix)
    values: dict[str, int] = dict(sizes)
    places: dict[str, list[tuple[int, int]]] = {}
    for at, axis, word, rank in _words(args):
        if word.isidentifier():
            values.setdefault(word, USUAL.get(rank, (FEW,) * rank)[axis])
            places.setdefault(word, []).append((at, axis))
    return NamedSizes(tuple(_numbered(a, values) if places and is_spec(a) else a for a in args), places)


def _words(args: Sequence[Any]) -> Iterator[tuple[int, int, str, int]]:
    """(argument, axis, size, rank) of every size in a specification."""
    for at, spec in enumerate(args):
        if is_spec(spec) and (inside := _INSIDE.search(spec)) is not None:
            words = [w.strip() for w in inside[1].split(",")]
            yield from ((at, axis, word, len(words)) for axis, word in enumerate(words))


def _numbered(spec: str, values: Mapping[str, int]) -> str:
    """ "bf16[M, N]" -> "bf16[8192, 4096]" """
    return _INSIDE.sub(lambda m: re.sub(r"[^\W\d]\w*", lambda w: str(values.get(w[0], w[0])), m[0]), spec)
