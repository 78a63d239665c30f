"""The Triton module with vmap: beside the class one over lanes, with kernels of its own, which any depth of vmap calls.

    vmap(RMSNorm) -> RMSNormBatched on [lanes, ..]        vmap(vmap(RMSNorm)) -> RMSNormBatched on [A * B, ..]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....codegen.emit.names import Names
from ..gather.batched import LANES, Batched, over_lanes
from ..gather.gathered import Gathered, gathered
from .boilerplate import INSIDE_VMAP, LANES_TEST
from .module import Module, indented, module_text

CALLS_INSIDE = "\n\n\ndef inside("
"""What the class `Inside` of a file ends before."""


def module_with(derivatives: Sequence[str], target_class: Any, args: Sequence[Any], target: str | None) -> str:
    """The text of the file with these derivatives."""
    found = gathered(target_class, args, target, derivatives)
    return ModuleWithVmap(found, over_lanes(found)).text() if "vmap" in derivatives else module_text(found)


class BatchedClass(Module):
    """The class over lanes, with the names that sizes have in the class of one."""

    def __init__(self, found: Batched, known: Mapping[Any, str | int]) -> None:
        self.known = {**known, **found.constants}
        super().__init__(found)

    def _symbols(self, names: Names) -> dict[Any, str | int]:
        taken = Names([*self.found.names, *map(str, self.known.values())])
        return {**self.known, LANES: taken.fresh("lanes")}

    def _doc(self) -> str:
        return f"{self.found.cls.__name__} over lanes, the first axis of every tensor."

    def _class(self) -> str:
        return self.found.name

    def _vmap(self) -> Iterator[str]:
        yield from _rule(f"lanes_of_lanes({self.found.name}.apply)")

    def _is_behind_wrappers(self) -> bool:
        return True

    def _by_source(self) -> dict[Any, Any]:
        """Without anything saved, a gradient tells how many lanes there are."""
        told, gradients = super()._by_source(), self.backward.inputs
        if told[LANES] == self.symbols[LANES]:
            told[LANES] = f"next(g for g in ({', '.join(gradients)}) if g is not None).shape[0]"
        return told


class ModuleWithVmap(Module):
    """The whole file."""

    def __init__(self, found: Gathered, many: Batched) -> None:
        super().__init__(found)
        self.constants = many.constants
        self.batched = BatchedClass(many, self.symbols)
        self.own, self.launchers = self.launchers, [*self.launchers, *self.batched.launchers]

    def _rules(self) -> list[str]:
        return [*super()._rules(), "vmap"]

    def _counts(self) -> Iterator[str]:
        yield from super()._counts()
        yield f"vmap holds for: {', '.join(self.batched._argument_types())}."
        yield from (f"vmap of {line}" for line in self.batched._counts())

    def _head(self, body: str) -> str:
        return super()._head(body).replace("import os\n", "import os\nfrom functools import partial\n", 1)

    def _helpers(self, body: str) -> list[str]:
        texts = super()._helpers(body)
        return [t.replace(CALLS_INSIDE, f"\n{INSIDE_VMAP.rstrip()}{CALLS_INSIDE}") for t in texts]

    def _is_behind_wrappers(self) -> bool:
        return True

    def _vmap(self) -> Iterator[str]:
        yield from _rule(f"{self.batched.found.name}.apply")

    def _function(self) -> Iterator[str]:
        yield from super()._function()
        yield from ("", "")
        yield from self.batched._function()
        pairs = zip(self.own[1:], self.batched.launchers[1:], strict=True)
        if inner := [f"{one.function}: {many.function}," for one, many in pairs]:
            yield from ("", "", "BATCHED = {", *indented(iter(inner), 4), "}")
            yield '"""Launches inside backward or jvp, with the same over lanes."""'

    def _test_sizes(self) -> tuple[dict[Any, int], dict[Any, int]]:
        exported, small = super()._test_sizes()
        return exported, exported if self.constants else small

    def _forward_mode(self) -> str:
        name = self.found.name
        return super()._forward_mode() + LANES_TEST.format(name=name, written=f"{name}AsWritten")


def _rule(call: str) -> Iterator[str]:
    yield from ("", "@staticmethod", "def vmap(info, in_dims, *args):")
    yield f"    return over_lanes({call}, info.batch_size, in_dims, args)"
