"""The Function of an exported file: a scope for each of its launch functions, and its tensors by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....ir.lazy_attribute import lazy_attribute
from ....ir.program import ValueRef
from ...capture.captured_backward import predicted_kinds
from ..gather.gathered import Gathered, Part
from .scope import Scope, Symbols

MakeScope = Callable[[Gathered, Part, Symbols], Scope]


class FunctionScopes:
    """One Function at one key. `outputs` names what forward returns, hidden tensors last."""

    def __init__(self, exported: Gathered, symbols: Symbols, launch_scope: MakeScope) -> None:
        self.exported, self.symbols = exported, symbols
        self.all = [launch_scope(exported, part, symbols) for part in exported.parts]
        self.by_method = {scope.part.method: scope for scope in self.all}
        self.tensors = [exported.names[i] for i in exported.slots]

    @property
    def forward(self) -> Scope:
        return self.all[0]

    @property
    def visible(self) -> int:
        """The number of tensors that the user's forward returns."""
        return len(self.exported.specialization.captured.forward.fake_outputs)

    @lazy_attribute
    def gradient_kinds(self) -> list[Any]:
        """The layout of each output's gradient; None for no gradient."""
        return list(predicted_kinds(self.exported.specialization.captured))

    def place_name(self, outputs: list[str], place: ValueRef) -> str:
        """The name of an argument or of an output, hidden ones included."""
        if place.kind == "input":
            return self.tensors[place.index]
        return outputs[place.index + (self.visible if place.kind == "hidden" else 0)]

    def argument_types(self, scope: Scope) -> list[str]:
        """ "x: f32[M, N]", "eps = 1e-06" """
        types = dict(zip(self.tensors, map(scope.type_text, self.exported.forward.graph.inputs), strict=False))
        return [
            f"{n}: {types[n]}" if n in types else f"{n} = {a!r}"
            for n, a in zip(self.exported.names, self.exported.args, strict=True)
        ]
