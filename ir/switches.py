"""Switches: the steps that make a program cheaper without changing its results, each by a name, each can be off.

    with switched_off(("fuse", "algebra")): ...

Code generated after its capture (backward, another size) is generated under the switches of the capture: see
`switch_state` and `use_switch_state`. A `Watch` may refuse any step: bisection finds a wrong one so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

GRAPHS: dict[str, str] = {
    "assertions": "what is asserted of all of an index is a check where it is read",
    "cse": "what is computed twice from the same values is one node",
    "constants": "arithmetic on constants is done once, as the device would",
    "algebra": "exact identities: x * 1, -(-x), where(c, y, y)",
    "numbers": "powers, quotients and casts that have a cheaper exact form",
    "layout": "permutes, reshapes and broadcasts in normal form; computing on the small shape",
    "regions": "parts of a tensor that are written, y[a:b] += v: each place is asked for once",
    "contract": "the sum of a broadcast product is a matmul",
    "motion": "products and sums that no step of a loop waits for are taken for all steps at once",
    "pieces_of_loops": "what is made of concatenated steps of a loop is made of its pieces",
    "neighbours": "what a step reads of the steps before it is carried to it",
    "handover": "what a loop hands to another one is chosen by a minimum cut",
    "picked_steps": "single steps of a loop that something is made of are carried to its end",
    "summed_steps": "sums over the steps of a loop are carried along",
    "longer_loops": "a step behind a loop that is one of its steps is the last of the loop",
    "recompute": "what backward needs of forward is chosen by a minimum cut",
    "exchange": "a sum over a large product is taken from a product of forward that has summed it already",
    "overlap": "a derived backward takes over values of forward",
    "fuse": "operations share kernels; off: one kernel each",
    "siblings": "operations that read the same value share a kernel",
    "duplicate": "cheap values are computed again instead of being written to memory",
    "lifetimes": "groups that would hold memory for long are not joined",
    "streams": "matmuls larger than their operands are summed tile by tile and never in memory, where that is faster",
    "slabs": "matmuls larger than their operands that would fill memory are made and summed a slab of rows at a time",
    "products": "matmuls with elementwise neighbours are one kernel where memory is the limit",
    "index_checks": "indices that are data are asserted to be in range; off: they read other memory where they are not",
    "place": "products write their parts of a concatenation in place",
}
"""Passes over graphs, and their division into kernels (ir/passes): the meaning of each name."""

KERNELS: dict[str, str] = {
    "merge": "neighbouring axes that every access walks alike are one",
    "whole_sums": "sums of little are held whole by one kernel; off: each is complete before what reads it",
    "nested_sums": "a sum over rows and columns adds the row sums that there are",
    "resident": "a row that fits is held in registers; off: it is read in chunks",
    "tails": "a row as long as two powers of two are together is two tiles; off: one, with lanes outside",
    "packed": "wide 16-bit rows stay packed in registers",
    "online": "the sum of a softmax rides along with its maximum",
    "row_parts": "rows whose halves are read are reduced and stored by halves; off: they are read whole as well",
    "partials": "sums that keep a part of a long row are stored per item",
    "pieces": "programs share the passes over one long column, where there are few columns",
    "strips": "long rows are divided among programs that share their reductions",
    "splits": "a stream is divided among programs, where its rows alone are too few for the device",
    "prologues": "sums of rows are made and stored by a walk that has the rows; off: by a kernel of their own",
    "boundary": "rows at odd places are read from the 16-byte boundary below",
    "pairs": "every other element: two accesses become one wide one",
    "hoist": "weights stay in registers from row to row",
    "multiples": "kernels of their own for sizes that are multiples of 16",
    "at_once": "many steps of a linear recurrence are one scan; off: step by step",
    "chunks_of_time": "few long recurrences in chunks of time, whose programs look back; off: as one chunk",
    "side_by_side": "loops that read the same go through time together",
    "scattered_steps": "steps of a loop that an index adds up are summed by place in its kernel; off: by the library",
    "round_trips": "a loop and one that goes back over the same lanes share a kernel",
    "blocks_of_steps": "what such a loop hands to the other is made again in blocks of steps",
    "descriptors": "tiles are copied by the tensor memory accelerator, where threads would copy much; off: by threads",
    "stages": "several loads of a loop are in flight",
}
"""Decisions in the kernels of a group (codegen)."""

CALLS: dict[str, str] = {
    "binding": "operations are called past torch's boxing",
    "reuse": "results are written into memory that is read no more",
    "ready": "a call that came often is written out as straight Python",
    "loops": "a loop over a size is captured once for all lengths; off: step by step, for one length",
    "patience": "a class of many graphs, or whose traces fail, is tried for further kinds of calls that come often",
}
"""Decisions in calls of compiled code (runtime)."""

SWITCHES: dict[str, str] = GRAPHS | KERNELS | CALLS


class Watch(Protocol):
    """An observer: allows or refuses each step before it is taken, and sees each execution with its arguments."""

    def allows(self, step: str, subject: str, detail: Any = None) -> bool: ...

    def observe(self, executed: Any, inputs: Sequence[Any], sizes: Any = None) -> None: ...


SLAB_BYTES = 256 << 20
"""The memory of a slab where nothing says otherwise."""


class SwitchState(NamedTuple):
    """The steps that are off, the watch, and the memory of slabs; None leaves that to the class."""

    off: frozenset[str] = frozenset()
    watch: Watch | None = None
    slab_bytes: int | None = None

    def __bool__(self) -> bool:
        return bool(self.off) or self.watch is not None or self.slab_bytes is not None

    def __repr__(self) -> str:
        """Text that is the same in every process: it is part of keys on disk."""
        slabs = [] if self.slab_bytes is None else [f"slabs of {self.slab_bytes}"]
        return ", ".join([*sorted(self.off), *slabs]) or "nothing"


_default = SwitchState()
_state: ContextVar[SwitchState | None] = ContextVar("fusegrad_switches", default=None)


def set_default(off: Iterable[str], slab_bytes: int | None = None) -> None:
    """Switch these steps off for the process, and bound slabs, wherever no block says otherwise."""
    global _default
    _default = SwitchState(frozenset(off), slab_bytes=slab_bytes)


def switch_state() -> SwitchState:
    """The switches in force in this thread or task."""
    state = _state.get()
    return _default if state is None else state


def is_on(name: str) -> bool:
    """True if the step may be taken."""
    assert name in SWITCHES, name
    return name not in switch_state().off


def slab_bytes() -> int:
    """The bytes that a region of products may hold in memory; one that would hold more is walked in slabs."""
    given = switch_state().slab_bytes
    return SLAB_BYTES if given is None else given


def bounds_slabs() -> bool:
    """True where the memory of slabs is bounded by a setting, and not by default."""
    return switch_state().slab_bytes is not None


def should_run(name: str, subject: str) -> bool:
    """True if the step is taken on this graph: it is on, and the watch allows it."""
    return (name not in SWITCHES or is_on(name)) and watch_allows(name, subject)


def watch_allows(step: str, subject: str, detail: Any = None) -> bool:
    """True unless a watch refuses the step, which need not be a switch (a capture, the kernels of a group)."""
    watch = switch_state().watch
    return watch is None or watch.allows(step, subject, detail)


def show_to_watch(result: Any, *inputs: Any) -> None:
    """Show a result, and the inputs of the step that made it, to the watch."""
    if (watch := switch_state().watch) is not None:
        watch.observe(result, inputs)


@contextlib.contextmanager
def use_switch_state(state: SwitchState) -> Iterator[None]:
    """Within the block, the switches that `switch_state` returned before."""
    token = _state.set(state)
    try:
        yield
    finally:
        _state.reset(token)


def switched_off(names: Iterable[str]) -> contextlib.AbstractContextManager[None]:
    """Within the block, exactly these steps are off."""
    return use_switch_state(switch_state()._replace(off=frozenset(names)))


def without(name: str) -> contextlib.AbstractContextManager[None]:
    """Within the block, one step more is off."""
    state = switch_state()
    return use_switch_state(state._replace(off=state.off | {name}))


def with_slab_bytes(bound: int | None, anew: bool = False) -> contextlib.AbstractContextManager[None]:
    """Within the block, the memory of slabs is bounded so; anew: whatever bounded it before."""
    state = switch_state()
    given = bound is None or (state.slab_bytes is not None and not anew)
    return contextlib.nullcontext() if given else use_switch_state(state._replace(slab_bytes=bound))


def use_watch(watch: Watch) -> contextlib.AbstractContextManager[None]:
    """Within the block, `watch` allows or refuses every step."""
    return use_switch_state(switch_state()._replace(watch=watch))
