"""Captured graphs as operators of torch.library: the calls of a graph that another tracer makes
(torch.compile, torch.export).

An operator takes tensors and sizes and returns tensors with memory of their own. Its name tells what it computes: the
same graph has the same name in every process.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...ir.errors import InternalError
from ...tracer.capture.capture import capture_lock
from ...tracer.torch_private import (
    above_autograd,
    below_autograd,
    custom_function_call,
    direct_apply,
    dual_level,
    memory_of,
    pushes_tangents,
)
from ..capture.graph_mode import with_fake_results_for

Tensor = torch.Tensor
NAMESPACE = "fusegrad"
_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_numbers = itertools.count()
known: dict[str, Operator] = {}
"""The operators of this process, by name."""


@dataclass
class Operator:
    """run: on memory. likes: of the same arguments without any, (shape, strides, dtype, device) per result.

    takes: per argument "Tensor" or "SymInt". function: a Function whose forward calls the operator, and whose backward,
    jvp and vmap are its rules; spread: what it is given for these arguments, Nones and constants among them. draws:
    whether it draws random numbers, so that no pass may run it twice for once, or once for twice: each call has a
    number, since passes that merge equal calls (torch 2.13) know torch's own random operations alone.
    """

    name: str
    takes: tuple[str, ...]
    results: int
    run: Callable[[Sequence[Any]], Sequence[Tensor]]
    likes: Callable[[Sequence[Any]], Sequence[Any]]
    function: Callable[[], Any]
    spread: Callable[[Sequence[Any]], Sequence[Any]]
    origin: Any
    draws: bool = False

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        """The operator, as a graph calls it."""
        results = self.overload(*args, next(_numbers)) if self.draws else self.overload(*args)
        return (results,) if self.results == 1 else tuple(results)

    @property
    def overload(self) -> Any:
        """torch's own object."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default

    def schema(self) -> str:
        """The declaration for torch.library."""
        arguments = ", ".join([*(f"{kind} a{i}" for i, kind in enumerate(self.takes)), *["int call"] * self.draws])
        returns = "Tensor" if self.results == 1 else f"({', '.join(['Tensor'] * self.results)})"
        return f"{self.name}({arguments}) -> {returns}"

    def _returned(self, results: Sequence[Any]) -> Any:
        return results[0] if self.results == 1 else tuple(results)

    def _given(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[:-1] if self.draws else args

    # ------------------------------------------------------------------ its implementations
    def on_memory(self, *args: Any) -> Any:
        """The results, laid out as was promised and with memory of their own."""
        args = self._given(args)
        with above_autograd(), torch.no_grad():
            values = self.run(args)
        promised = self.likes(args)
        if len(values) != len(promised):
            raise InternalError(f"{self.name} made {len(values)} results, and promised {len(promised)}")
        memories = {memory_of(a) for a in args if isinstance(a, Tensor)}
        results = list[Tensor]()
        for value, like in zip(values, promised, strict=True):
            results.append(_settled(value, like, memories))
            memories.add(memory_of(results[-1]))
        return self._returned(results)

    def without_memory(self, *args: Any) -> Any:
        """The results' metadata."""
        promised = self.likes(self._given(args))
        return self._returned([torch.empty_strided(s, t, dtype=d, device=v) for s, t, d, v in promised])

    def with_history(self, keyset: Any, *args: Any) -> Any:
        """Through its Function where something is differentiated."""
        tracked = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        if tracked or (dual_level() >= 0 and pushes_tangents()):
            with with_fake_results_for(args):
                return self._returned(direct_apply(self.function())(*self.spread(self._given(args))))
        return below_autograd(self.overload, keyset, args)

    def under_transforms(self, *args: Any) -> Any:
        """Where torch.func transforms are active: they meet its Function, as they do outside of a graph."""
        with with_fake_results_for(args):
            return self._returned(custom_function_call(self.function(), *self.spread(self._given(args))))


def _settled(value: Tensor, like: Any, memories: set[int]) -> Tensor:
    shape, strides, dtype, device = like
    if memory_of(value) not in memories and _is_laid_out(value, shape, strides) and value.dtype == dtype:
        return value
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).copy_(value)


def _is_laid_out(value: Tensor, shape: Sequence[int], strides: Sequence[int]) -> bool:
    steps = zip(value.shape, value.stride(), strides, strict=True)
    return tuple(value.shape) == tuple(shape) and all(a == b for n, a, b in steps if n > 1)


def named(kind: str, *facts: Any) -> str:
    """A name for what these facts say: the same in every process.

    swi_glu_forward_3f2a91c0d4
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    return f"{re.sub(r'[^a-z0-9_]', '_', words)}_{digest[:10]}"


def registered(operator: Operator) -> Operator:
    """The operator of this name that comes from the same: this one, unless there is one."""
    with capture_lock:
        first, count = operator.name, 0
        while operator.name in known and not known[operator.name].origin.agrees(operator.origin):
            count += 1  # the same graph so far, of a class that reads something else
            operator.name = f"{first}_{count}"
        if operator.name not in known:
            _register(operator)
            known[operator.name] = operator
    return known[operator.name]


def _register(operator: Operator) -> None:
    name, draws = operator.name, (torch.Tag.nondeterministic_seeded,) if operator.draws else ()
    _library.define(operator.schema(), tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides, *draws))
    _library.impl(name, operator.on_memory, "CompositeExplicitAutograd")
    _library.impl(name, operator.with_history, "Autograd", with_keyset=True)
    _library.impl(name, operator.under_transforms, "FuncTorchDynamicLayerFrontMode")
    torch.library.register_fake(f"{NAMESPACE}::{name}", operator.without_memory, lib=_library)
