"""Steps that make a program cheaper and no step of its meaning: each by a name, and each can be left out.

    with without(("fuse", "algebra")): ...

What is generated later than it was asked for (backward, another size) is generated under what was in force then: see
`in_force` and `under`. A `Watch` sees every step before it is taken, and may leave it out: so is a wrong one found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

GRAPHS: dict[str, str] = {
    "cse": "what is computed twice from the same values is one node",
    "constants": "arithmetic on constants is done once, as the device would",
    "algebra": "exact identities: x * 1, -(-x), where(c, y, y)",
    "numbers": "powers, quotients and casts that have a cheaper exact form",
    "layout": "permutes, reshapes and broadcasts in normal form; computing on the small shape",
    "contract": "the sum of a broadcast product is a matrix product",
    "recompute": "what backward needs of forward is chosen by a minimum cut",
    "overlap": "a derived backward takes over values of forward",
    "fuse": "operations share kernels; off: one kernel each",
    "siblings": "operations that read the same value share a kernel",
    "duplicate": "cheap values are computed again instead of being written to memory",
    "lifetimes": "groups that would hold memory for long are not joined",
    "products": "matrix products with elementwise neighbours are one kernel where memory is the limit",
    "place": "products write their parts of a concatenation in place",
}
"""Passes over graphs, and how these are divided (ir/passes): what each name stands for."""

KERNELS: dict[str, str] = {
    "merge": "neighbouring axes that every access walks alike are one",
    "nested_sums": "a sum over rows and columns adds the row sums that there are",
    "resident": "a row that fits is held in registers; off: it is read in chunks",
    "packed": "wide 16-bit rows stay packed in registers",
    "online": "the sum of a softmax rides along with its maximum",
    "partials": "sums that keep a part of a long row are stored per item",
    "strips": "long rows are divided among programs that share their reductions",
    "boundary": "rows at odd places are read from the 16-byte boundary below",
    "pairs": "every other element: two accesses become one wide one",
    "hoist": "weights stay in registers from row to row",
    "multiples": "kernels of their own for sizes that are multiples of 16",
    "stages": "several loads of a loop are in flight",
}
"""How the kernels of a group are written (codegen)."""

CALLS: dict[str, str] = {
    "binding": "operations are called past torch's boxing",
    "reuse": "results are written into memory that is read no more",
    "ready": "a call that came often is written out as straight Python",
    "patience": "a class of many graphs, or whose captures fail, is tried for further kinds of calls that come often",
}
"""How what was compiled is called (runtime)."""

SWITCHES: dict[str, str] = GRAPHS | KERNELS | CALLS


class Watch(Protocol):
    """Is asked before a step is taken, and shown what runs, with what it is given."""

    def allows(self, step: str, subject: str, detail: Any = None) -> bool: ...

    def saw(self, what: Any, given: Sequence[Any], sizes: Any = None) -> None: ...


class InForce(NamedTuple):
    """What is left out, and who watches."""

    off: frozenset[str] = frozenset()
    watch: Watch | None = None

    def __bool__(self) -> bool:
        return bool(self.off) or self.watch is not None

    def __repr__(self) -> str:
        """The same in every process: it is part of keys on disk."""
        return ", ".join(sorted(self.off)) or "nothing"


_always = InForce()
_in_force: ContextVar[InForce | None] = ContextVar("fusegrad_switches", default=None)


def always(off: Iterable[str]) -> None:
    """What the process leaves out wherever nothing else is said."""
    global _always
    _always = InForce(frozenset(off))


def in_force() -> InForce:
    """What holds here and now."""
    found = _in_force.get()
    return _always if found is None else found


def is_on(name: str) -> bool:
    """Whether the step may be taken."""
    assert name in SWITCHES, name
    return name not in in_force().off


def takes(name: str, subject: str) -> bool:
    """Whether the step is taken on this graph: it is on, and whoever watches lets it pass."""
    return (name not in SWITCHES or is_on(name)) and allowed(name, subject)


def allowed(step: str, subject: str, detail: Any = None) -> bool:
    """Whether whoever watches lets a step pass, which need not be a switch (a capture, the kernels of a group)."""
    watch = in_force().watch
    return watch is None or watch.allows(step, subject, detail)


def shown(what: Any, *given: Any) -> None:
    """Shows what was made to whoever watches."""
    if (watch := in_force().watch) is not None:
        watch.saw(what, given)


@contextlib.contextmanager
def under(chosen: InForce) -> Iterator[None]:
    """Within the block, what was in force then."""
    token = _in_force.set(chosen)
    try:
        yield
    finally:
        _in_force.reset(token)


def without(names: Iterable[str]) -> contextlib.AbstractContextManager[None]:
    """Within the block exactly these are left out."""
    return under(in_force()._replace(off=frozenset(names)))


def watched(watch: Watch) -> contextlib.AbstractContextManager[None]:
    """Within the block, `watch` is asked before every step."""
    return under(in_force()._replace(watch=watch))
