"""The content of a module with some sizes compiled in, by the names that specifications or the file give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....codegen.emit.names import Names
from ....tracer.methods import method_place
from ...values.named_sizes import SizeError, with_numbers
from ...values.tensor_specs import is_spec
from ..gather.gathered import Gathered, Source, gather_function
from ..gather.unit_sizes import resized
from .scope import symbol_names


def gathered_at(
    target_class: Any, args: Sequence[Any], target: str | None, derivatives: Sequence[str], sizes: Mapping[str, int]
) -> Gathered:
    """Rows of any length, but for the sizes that are given. Raises SizeError for a name that nothing has."""
    named = with_numbers(args, sizes)
    tensors = [i for i, a in enumerate(args) if is_spec(a) or isinstance(a, torch.Tensor)]
    places = [(place, n) for name, n in sizes.items() for place in named.places.get(name, ())]
    fixed: dict[Source, int] = {(tensors.index(at), "size", axis): n for (at, axis), n in places}
    exported = gather_function(target_class, named.args, target, derivatives, True, fixed)
    others = {name: n for name, n in sizes.items() if name not in named.places}
    return exported if not others else _at_names_of_file(exported, target_class, derivatives, fixed, others)


def _at_names_of_file(
    exported: Gathered, target_class: Any, derivatives: Sequence[str], fixed: Mapping[Source, int],
    sizes: Mapping[str, int],
) -> Gathered:  # fmt: skip
    """The same again, at sizes that the file has names for."""
    names = names_of_sizes(exported)
    by_name = {name: symbol for symbol, name in names.items() if isinstance(name, str) and symbol in exported.sources}
    for name in sizes:
        if name not in by_name:
            place = method_place(exported.cls.forward)  # type: ignore[attr-defined]
            fix = f"give one of {', '.join(sorted(by_name))}" if by_name else "all sizes are compiled in as they are"
            raise SizeError(sizes=dict(sizes), detail=f"{exported.name} has no size {name}", where=place, fix=fix)
    values = {by_name[name]: n for name, n in sizes.items()}
    args = resized(exported.specialization, exported.args, values)
    told = {exported.sources[symbol]: n for symbol, n in values.items()}
    return gather_function(target_class, args, exported.device, derivatives, True, {**fixed, **told})


def names_of_sizes(exported: Gathered) -> dict[Any, str | int]:
    """The names of sizes in the file: M, N, .., or the number that is compiled in."""
    return symbol_names(exported, Names(["torch", "triton", "tl", *exported.names]))
