"""The memory that one kernel reads and writes: pointers by name and dtype, scratch, pointers that must be aligned."""

from __future__ import annotations

from collections.abc import Sequence

from ....ir.text.source_names import variable_name
from ....ir.types import Size
from ...kernel import Buffer, Pointer, Ref
from ...program.axes import Program, Sink, Term
from ..context import name_of
from ..names import Names, identifier
from ..statements import Expr, name

ORDER = {"input": 0, "temporary": 1, "output": 2, "scratch": 3}
"""Of pointers among the arguments of a kernel."""


def _wish(item: Term | Sink) -> str | None:
    """The user's name; of maxima and sums without one, what they are of."""
    return variable_name(item.node) if item.node is not None and item.node.prim != "input" else name_of(item)


class Buffers:
    """`aligned`: pointers that have to be multiples of 16 bytes."""

    def __init__(self, program: Program, names: Names) -> None:
        self._names = names
        self.labels: dict[Ref, str] = {}
        self.scratch: list[Buffer] = []
        self.aligned: set[str] = set()
        self._dtypes: dict[Ref, str] = {}
        wishes: dict[Ref, tuple[str | None, str]] = {}
        for load in (t for t in program.terms if t.op == "load" and t.param.ref not in wishes):
            wishes[load.param.ref] = _wish(load), load.dtype
        for sink in (s for s in program.sinks if s.ref not in wishes):
            wishes[sink.ref] = _wish(sink), sink.dtype
        for ref in sorted(wishes, key=lambda r: (ORDER[r.kind], r.index)):
            wish, dtype = wishes[ref]
            self._add(ref, names.fresh(f"{identifier(wish) or ref.kind}_ptr"), dtype)

    def _add(self, ref: Ref, label: str, dtype: str) -> None:
        self.labels[ref], self._dtypes[ref] = label, dtype

    def stem(self, ref: Ref) -> str:
        """The name of a buffer without the ending of pointers."""
        return self.labels[ref].removesuffix("_ptr")

    def pointers(self) -> Sequence[Pointer]:
        """The pointer arguments of the kernel."""
        return [Pointer(label, ref, self._dtypes[ref]) for ref, label in self.labels.items()]

    def add_partial_sums(self, label: str, dtype: str, slots: Size) -> str:
        """Scratch for the partial sums of a final reduction; returns the name of its pointer."""
        return self.add_scratch(f"{label}_partial", dtype, slots)

    def add_scratch(self, label: str, dtype: str, slots: Size) -> str:
        """Memory for what programs tell each other; returns the name of its pointer."""
        pointer = self._names.fresh(f"{label}_ptr")
        return self._allocate(pointer.removesuffix("_ptr"), pointer, dtype, slots)

    def add_zeroed_words(self, label: str, count: Size) -> Expr:
        """Scratch words that are zero before and after every launch."""
        return name(self._allocate(label, self._names.fresh(f"{label}_ptr"), "i32", count, zeroed=True))

    def _allocate(self, label: str, pointer: str, dtype: str, count: Size, zeroed: bool = False) -> str:
        self._add(Ref("scratch", len(self.scratch)), pointer, dtype)
        self.scratch.append(Buffer(label, dtype, (count,), (1,), zeroed=zeroed))
        return pointer
