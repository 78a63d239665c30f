"""Residuals in bytes: values that forward saves for backward, and those that backward computes again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ...ir import Value
from ...ir.passes.programs.recompute import CHOICE, Choice, hidden_values
from ...ir.program import ValueRef
from ...ir.text.source_names import made_name
from ...ir.types import TensorType
from ...tracer.dtypes import TO_TORCH
from ..capture.captured import name_at
from ..specialize.residuals import DerivedResidualPlan, ResidualPlan
from ..specialize.specialization import Specialization
from ..values.sizes import Sizes, number

AS_WRITTEN, INSTEAD, BESIDES, AGAIN = "saved as written", "saved instead", "saved besides", "computed again"
SHORT = {dtype: name for name, dtype in TO_TORCH.items()}


@dataclass(frozen=True)
class ResidualRow:
    """One value on its way to backward."""

    name: str
    """The value's name in your source, or the operation that makes it, and of what."""
    type: str
    """Its dtype and shape, "f32[8192,1]"."""
    bytes: int
    """Its size in bytes."""
    how: str
    """What happens to it.

    - "saved as written".
    - "saved instead" of other values, because it is smaller.
    - "saved besides", where backward would compute it again.
    - "computed again" in backward, and not saved.
    """

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values that json can write."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.name:<20} {self.type:<18} {self.bytes:>16,} bytes  {self.how}"


def residual_rows(spec: Specialization, plan: ResidualPlan | None, sizes: Sizes) -> list[ResidualRow]:
    """Each tensor once: what the user saved, then what a minimum cut chose otherwise."""
    hidden = set() if plan is None else {id(p) for p in spec.captured.residual_places if p and p.kind == "hidden"}
    own = [p for p in dict.fromkeys(spec.captured.residual_places) if p is not None and id(p) not in hidden]
    rows = [_saved_row(spec, place, sizes) for place in own]
    return [*rows, *(_chosen_rows(plan, sizes) if plan is not None else ())]


def _saved_row(spec: Specialization, place: ValueRef, sizes: Sizes) -> ResidualRow:
    fake: Any = spec.captured.forward.fake_at(place)
    shape = [n if isinstance(n, int) else number(n.node.expr, sizes) for n in fake.shape]
    kind = f"{SHORT[fake.dtype]}[{','.join(map(str, shape))}]"
    return ResidualRow(name_at(spec.captured, place), kind, fake.element_size() * math.prod(shape), AS_WRITTEN)


def _chosen_rows(plan: ResidualPlan, sizes: Sizes) -> Iterator[ResidualRow]:
    """The values in between that the user had saved, and those that are saved now."""
    if isinstance(plan, DerivedResidualPlan):
        kept: Choice | None = plan.program.attributes.get(CHOICE)
        yield from (_value_row(v, sizes, BESIDES, kept.type_of(v) if kept else None) for v in plan.saved)
        return
    choice: Choice = plan.program.attributes[CHOICE]
    users = hidden_values(plan.captured)
    for value in choice.saved:
        how = AS_WRITTEN if value in users else INSTEAD if users else BESIDES
        yield _value_row(value, sizes, how, choice.type_of(value), value in choice.inverted)
    yield from (_value_row(v, sizes, AGAIN) for v in users if v not in choice.saved)


def _value_row(
    value: Value, sizes: Sizes, how: str, handed_over: TensorType | None = None, is_inverted: bool = False
) -> ResidualRow:  # fmt: skip
    aval = handed_over or value.aval
    shape = ",".join(str(number(n, sizes)) for n in aval.shape)
    name = f"1 / {made_name(value)}" if is_inverted else made_name(value)
    return ResidualRow(name, f"{aval.dtype}[{shape}]", number(aval.nbytes, sizes), how)
