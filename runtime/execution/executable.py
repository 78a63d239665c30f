"""Executing one captured graph on one backend: what to allocate, launch and call, looked up by the sizes at hand."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import sympy
import torch

from ...codegen import TARGETS, Buffer, Kernel, Kernels, Pointer, Ref, Scalar, Target
from ...codegen.schedule.neighbours import candidates, leaner
from ...ir import Graph, Value
from ...ir.errors import InternalError, LoweringError, Unfusible, UnsupportedBackendError
from ...ir.once import once
from ...ir.passes.fuse import Extern, Group, Step, View
from ...ir.passes.place import Place, Places
from ...ir.switches import allowed, in_force, takes, under
from ...ir.types import Size
from ...tracer.capture.capture import assumed_of, capture_lock
from ...tracer.dtypes import TO_TORCH
from ...tracer.opaque.opaque import opaque_of
from ...tracer.torch_private import (
    dispatch_modes,
    function_modes,
    is_batched,
    memory_of,
    transforms_active,
)
from ...tracer.trace import Trace
from ..kernels import autotune as tune
from ..kernels import launch, proofs
from ..kernels.arrival_counters import Counters
from ..kernels.launch_errors import Refusal, refusal
from ..kernels.launch_metadata import remember
from ..settings import logs
from ..settings.config import FAST, KERNEL_BACKENDS, is_interpreted, settings
from ..settings.counters import count
from ..settings.internal_errors import prepared
from .aten import reference
from .aten.concat_in_place import product_into, room_for
from .aten.replay import straight
from .intermediates import intermediate_bytes
from .pipeline import ProductsBy, generate, graph_of, kernels_of, text_of

Tensor = torch.Tensor
Sizes = Mapping[sympy.Symbol, int]
ALIGNED = 16
"""Kernels for sizes that are multiples of this make wide accesses."""
LARGE = 1 << 16
"""Bytes of a tensor from which on a fresh one costs more than the further operations that write into what there is."""
LIBRARY = "the library's product"
OPERATION_BY_OPERATION = "runs operation by operation"
MOST_PROGRAMS = (1 << 31) - 1
RECORDS = 512
"""Distinct size tuples that a plan remembers; older ones are evaluated again."""


def number(expr: Size, sizes: Sizes) -> int:
    """The value of a size expression."""
    if isinstance(expr, int):
        return expr
    if isinstance(expr, sympy.Symbol):
        return sizes[expr]
    return int(expr.xreplace(sizes))


def numbers(exprs: Sequence[Size], sizes: Sizes) -> tuple[int, ...]:
    return tuple(number(e, sizes) for e in exprs)


class BoundSizes(dict[sympy.Symbol, int]):
    """The symbols' values at one call; `key` is made once."""

    @once
    def key(self) -> tuple[int, ...]:
        return tuple(n for n in self.values() if type(n) is not float)

    def learn(self, more: Mapping[sympy.Symbol, int]) -> None:
        """Symbols that an opaque node brought."""
        self.update(more)
        self.__dict__.pop("key", None)


class Binder:
    """Reads the values of a session's symbols off the real inputs of a graph: off sizes rather than strides.

    kinds: ("size",) for what was saved: a hook may return it in another layout.
    """

    def __init__(self, fakes: Sequence[Any], kinds: Sequence[str] = ("size", "stride")) -> None:
        self.sources: dict[sympy.Symbol, tuple[int, str, int]] = {}
        for position, fake in enumerate(fakes):
            if isinstance(fake, torch.SymInt | torch.SymFloat):
                self._offer(fake.node.expr, position, "value", 0)
        for kind in kinds:
            for position, fake in enumerate(fakes):
                if isinstance(fake, Tensor):
                    for axis, size in enumerate(getattr(fake, kind)()):
                        self._offer(getattr(getattr(size, "node", None), "expr", None), position, kind, axis)

    @classmethod
    def reading(cls, sources: Mapping[sympy.Symbol, tuple[int, str, int]]) -> Binder:
        """A binder that knows where each symbol is to be read: (position, "size" | "stride" | "value", axis)."""
        made = cls(())
        made.sources.update(sources)
        return made

    def _offer(self, expr: Any, position: int, kind: str, axis: int) -> None:
        if isinstance(expr, sympy.Symbol):
            self.sources.setdefault(expr, (position, kind, axis))

    def __call__(self, inputs: Sequence[Any]) -> BoundSizes:
        return BoundSizes(self.read(inputs))

    def read(self, inputs: Sequence[Any]) -> dict[sympy.Symbol, Any]:
        """The same from tensors that are being traced: symbols as the tracer's own numbers."""
        return {s: _read(inputs[at], kind, axis) for s, (at, kind, axis) in self.sources.items()}


def _read(value: Any, kind: str, axis: int) -> Any:
    if kind == "value":
        return value
    return value.shape[axis] if kind == "size" else value.stride(axis)


@dataclass
class Prepared:
    """One group at one size tuple: everything a launch needs as plain numbers."""

    kernels: Kernels
    launches: list[tuple[Kernel, Callable[..., None], list[tuple[str, int]], int, list[Any]]]
    outputs: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    temporaries: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    settled: bool = False  # whether it is what its sizes keep: nothing is left to be timed
    called: bool = False  # whether the library's product between kernels was faster than a kernel of products


@dataclass
class Variant:
    """Kernels of one group that hold for the pinned symbols and under the guards."""

    kernels: Kernels
    pinned: dict[sympy.Symbol, int]
    guards: tuple[sympy.Basic, ...]
    text: str
    launchers: list[Callable[..., None]] = field(default_factory=list)
    proved: bool | None = None  # whether all accesses are, for all sizes under `assumed`; None: nobody asked
    assumed: tuple[sympy.Basic, ...] = ()

    @property
    def aligned(self) -> bool:
        """Whether it is for sizes that are multiples only."""
        return are_for_multiples(self.guards)

    def admits(self, sizes: Sizes) -> bool:
        return all(sizes[s] == v for s, v in self.pinned.items()) and all(bool(g.xreplace(sizes)) for g in self.guards)


def are_for_multiples(guards: Iterable[sympy.Basic]) -> bool:
    """Whether kernels under these guards are for sizes that are multiples of ALIGNED only."""
    return any(g.has(sympy.Mod) for g in guards)


def counterpart_sizes(sizes: Sizes, pinned: Collection[sympy.Symbol], aligned: bool) -> dict[sympy.Symbol, int] | None:
    """Sizes to generate the counterpart of some kernels for: odd ones beside multiples, multiples beside the others.

    None where every size is compiled in, so that there is no counterpart.
    """
    free = {s: n for s, n in sizes.items() if s not in pinned and n > 0}
    hints = {s: -(-n // ALIGNED) * ALIGNED + (1 if aligned else 0) for s, n in free.items()}
    return {**sizes, **hints} if free else None


class GroupRunner:
    """A fused group: variants by pinned sizes, launches by all sizes."""

    def __init__(
        self, group: Group, name: str, backend: str, target: Target, device: torch.device,
        report: Callable[[str], None], assumed: Sequence[sympy.Basic] = (),
    ) -> None:  # fmt: skip
        self.group, self.name, self.backend, self.target, self.device = group, name, backend, target, device
        self.assumed = tuple(assumed)  # of sizes, by the capture; what a proof takes from it is asked at every size
        self.unproved: dict[tuple[int, ...], str] = {}  # sizes at which no kernel may run, and why
        self.report, self.switches = report, in_force()
        self.one_by_one = False  # where the generator refuses at sizes met later
        self.variants: list[Variant] = []
        self.prepared: OrderedDict[tuple[int, ...], Prepared] = OrderedDict()
        self.counters = Counters.on(device)

    def __call__(self, inputs: Sequence[Tensor], sizes: Sizes, key: tuple[int, ...]) -> list[Tensor]:
        if (watch := self.switches.watch) is not None:
            watch.saw(self, inputs, sizes)
        ready = self.prepared.get(key) or self._prepared(sizes, key)
        if ready is None:
            return self._through_torch(inputs, sizes)
        try:
            if not ready.settled:
                ready = self.prepared[key] = self._settled(ready, inputs, sizes)
            return self.between(inputs, sizes) if ready.called else self._launched(ready, inputs)
        except Exception as error:
            refused = refusal(error)
            if refused is None:
                raise
        return self._otherwise(refused, ready, inputs, sizes, key)  # the error, and the memory that it held, are gone

    def recovered(self, error: Exception, inputs: Sequence[Tensor], sizes: Sizes, key: tuple[int, ...]) -> list[Tensor]:
        """The group's results after an error of its kernels, another way; raises it again where there is none."""
        refused = refusal(error)
        if refused is None:
            raise error
        ready = self.prepared.get(key)
        if self.one_by_one or ready is None:
            return self._through_torch(inputs, sizes)
        return self._otherwise(refused, ready, inputs, sizes, key)

    def _otherwise(
        self, refused: Refusal, ready: Prepared, inputs: Sequence[Tensor], sizes: Sizes, key: tuple[int, ...]
    ) -> list[Tensor]:
        """By kernels that need less, else operation by operation: for this call where memory lacked, else for good.

        Running again is safe: a group writes to memory of its own alone, and counters are left at zero or untouched.
        """
        if refused.lacks == "memory":
            self.report(f"{self.name} ran operation by operation: {refused.reason}")
            return self._through_torch(inputs, sizes)
        for name, kernels in leaner(ready.kernels, self.target, partial(self._emitted, sizes)):
            variant = self.ready(kernels)
            if not variant.admits(sizes) or self._open_at(variant, sizes):
                continue
            other = self._made(variant, sizes)
            try:
                results = self._launched(other, inputs)
            except Exception as error:
                if refusal(error) is None:
                    raise
                continue
            other.settled, self.prepared[key] = True, other
            self.variants.insert(0, variant)
            self.report(f"{self.name} runs with {name}: {refused.reason}")
            return results
        self._give_up(refused.reason)
        return self._through_torch(inputs, sizes)

    def is_launched(self, key: tuple[int, ...]) -> bool:
        """Whether at these sizes it is launches of kernels, and nothing else."""
        return key in self.prepared and not self.one_by_one and not self.prepared[key].called

    def _launched(self, ready: Prepared, inputs: Sequence[Tensor]) -> list[Tensor]:
        memory = self._memory(ready, inputs)
        self._launch(ready, memory)
        return memory["output"]

    def _memory(self, ready: Prepared, inputs: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        outputs = [torch.empty_strided(*o[:2], dtype=o[2], device=self.device) for o in ready.outputs]
        temporaries = [torch.empty_strided(*t[:2], dtype=t[2], device=self.device) for t in ready.temporaries]
        return {"input": list(inputs), "output": outputs, "temporary": temporaries}

    def _launch(self, ready: Prepared, memory: dict[str, list[Tensor]]) -> None:
        for kernel, run, arguments, grid, scratch in ready.launches:
            if grid:
                memory["scratch"] = [self.scratch(kernel, i, s) for i, s in enumerate(scratch)]
                run([value if kind == "number" else memory[kind][value] for kind, value in arguments], grid)

    def _settled(self, ready: Prepared, inputs: Sequence[Tensor], sizes: Sizes) -> Prepared:
        """What these sizes keep: the schedule's own kernels, or where tuning is on the fastest version of them."""
        asked = tuning(self.backend)
        if asked and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return ready
        ready.settled = True
        return self._tuned(ready, inputs, sizes) if asked and any(g for *_, g, _ in ready.launches) else ready

    def _tuned(self, ready: Prepared, inputs: Sequence[Tensor], sizes: Sizes) -> Prepared:
        """The fastest of the scheduled kernels and their neighbours; all read and write memory of their own."""
        rivals = {LIBRARY: replace(ready, called=True)} if self.multiplies else {}
        emitted = partial(self._emitted, sizes)
        found = candidates(ready.kernels, self.target, emitted, tune.MOST - len(rivals))
        ours = {n: self.ready(k) for n, k in found.items() if k is not ready.kernels}
        made = {n: self._made(v, sizes) for n, v in ours.items() if not self._open_at(v, sizes)}
        made = {n: ready if k is ready.kernels else made[n] for n, k in found.items() if n in made or n not in ours}
        launches: dict[str, tune.Launch] = {n: partial(self.between, inputs, sizes) for n in rivals}
        launches = {n: partial(self._launch, p, self._memory(p, inputs)) for n, p in made.items()} | launches
        if len(launches) == 1:
            return ready
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.target)
        given = [v for *_, arguments, grid, _ in ready.launches for v in (grid, *_numbers_in(arguments))]
        chosen = (made | rivals)[tune.fastest(name, self.name, text_of(ready.kernels), given, launches)]
        chosen.settled = True
        return chosen

    def _emitted(self, sizes: Sizes, target: Target) -> Kernels:
        return kernels_of(self.group, target, dict(sizes), self.name)

    @once
    def multiplies(self) -> bool:
        """Whether a product of matrices is in the group."""
        return any(v.prim == "dot" for v in self.group.graph.order())

    @once
    def between(self) -> Callable[[Sequence[Tensor], Sizes], list[Any]]:
        """The group with its product as a call, between kernels for the rest."""
        name = f"{self.name}_apart"
        return KernelPlan(self.group.graph, name, self.backend, self.device, self.report, "library", self.assumed)

    def _prepared(self, sizes: Sizes, key: tuple[int, ...]) -> Prepared | None:
        if self.one_by_one or key in self.unproved:
            return None
        with capture_lock:
            return self.prepared.get(key) or self._newly_prepared(sizes, key)

    def _newly_prepared(self, sizes: Sizes, key: tuple[int, ...]) -> Prepared | None:
        try:
            with under(self.switches):
                build = partial(self._prepare, sizes, key)
                found = prepared(build, self.report, f"{self.name} {OPERATION_BY_OPERATION}")
        except Unfusible as error:
            self._give_up(str(error))
            return None
        self.one_by_one = found is None and key not in self.unproved
        return found

    def _give_up(self, why: str) -> None:
        self.one_by_one = True
        self.report(f"{self.name} {OPERATION_BY_OPERATION}: {why}")

    def _through_torch(self, inputs: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        graph = self.group.graph
        results = reference.run(graph, inputs, sizes)
        pairs = zip(results, graph.output_strides, strict=True)
        return [own_memory(r, numbers(s, sizes), set()) for r, s in pairs if r is not None and s is not None]

    def scratch(self, kernel: Kernel, index: int, spec: Any) -> Tensor:
        """Memory that a kernel needs besides its results."""
        shape, dtype, zeroed = spec
        if not zeroed:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return self.counters((kernel.name, index), shape, dtype)

    def _prepare(self, sizes: Sizes, key: tuple[int, ...]) -> Prepared | None:
        variant = self._fitting(sizes) or self._generate(sizes)
        if why := self._open_at(variant, sizes):
            self._do_without(key, why)
            return None
        self.prepared[key] = ready = self._made(variant, sizes)
        if len(self.prepared) > RECORDS:
            self.prepared.popitem(last=False)
        return ready

    def _open_at(self, variant: Variant, sizes: Sizes) -> str:
        """What is not proved of these kernels: for all sizes, which is asked once, nor at those of this call."""
        graph, kernels = self.group.graph, variant.kernels
        if variant.proved is None:
            variant.proved = proofs.are_proved(graph, kernels)
            if not variant.proved and self.assumed:
                variant.proved, variant.assumed = proofs.are_proved(graph, kernels, self.assumed), self.assumed
        if variant.proved and all(bool(a.xreplace(sizes)) for a in variant.assumed):
            return ""
        return proofs.open_at(graph, kernels, sizes)

    def _do_without(self, key: tuple[int, ...], why: str) -> None:
        if why not in self.unproved.values():
            self.report(f"{self.name} goes through torch at some sizes: not proved to stay in its tensors: {why}")
        if len(self.unproved) >= RECORDS:
            self.unproved.clear()
        self.unproved[key] = why

    def _made(self, variant: Variant, sizes: Sizes) -> Prepared:
        graph = self.group.graph
        return Prepared(
            kernels=variant.kernels,
            launches=[_launch(k, f, sizes) for k, f in zip(variant.kernels.kernels, variant.launchers, strict=True)],
            outputs=[
                (numbers(o.shape, sizes), numbers(s, sizes), TO_TORCH[o.dtype])
                for o, s in zip(graph.outputs, graph.output_strides, strict=True)
                if o is not None and s is not None
            ],
            temporaries=[
                (numbers(b.shape, sizes), numbers(b.strides, sizes), TO_TORCH[b.dtype])
                for b in variant.kernels.temporaries
            ],
        )

    def _fitting(self, sizes: Sizes) -> Variant | None:
        return next((v for v in self.variants if v.admits(sizes)), None)

    def _generate(self, sizes: Sizes) -> Variant:
        log_generated_again(self, sizes)
        self.add(kernels_of(self.group, self.target, dict(sizes), self.name), sizes)
        fitting = self._fitting(sizes)
        assert fitting is not None, "kernels generated for these sizes do not admit them"
        return fitting

    def add(self, kernels: Kernels, sizes: Sizes) -> None:
        """Kernels generated for these sizes, and their counterpart: wide accesses where sizes allow, any size else.

        Both at once, so that neither the order in which sizes come nor a new batch size decides what is compiled.
        """
        variant = self.ready(kernels)
        self.variants.append(variant)
        log_admission(self, variant)
        hints = counterpart_sizes(sizes, variant.pinned, variant.aligned)
        if hints is None:
            return
        counterpart = self.ready(kernels_of(self.group, self.target, hints, self.name))
        if counterpart.aligned != variant.aligned and counterpart.pinned == variant.pinned:
            self.variants.insert(len(self.variants) - (not variant.aligned), counterpart)
            log_admission(self, counterpart)

    def ready(self, kernels: Kernels) -> Variant:
        """Kernels with their launchers."""
        text = text_of(kernels)
        pinned = {s: v for k in kernels.kernels for s, v in k.pinned.items()}
        guards = tuple(dict.fromkeys(g for k in kernels.kernels for g in k.guards))
        variant = Variant(kernels, pinned, guards, text)
        variant.launchers = [launch.launcher(k, text, self.backend, self.device) for k in kernels.kernels]
        return variant


def _launch(kernel: Kernel, run: Callable[..., None], sizes: Sizes) -> Any:
    arguments: list[tuple[str, int]] = []
    for argument in kernel.arguments:
        match argument:
            case Pointer(buffer=Ref(kind=kind, index=index)):
                arguments.append((kind, index))
            case Scalar(value=value):
                arguments.append(("number", number(value, sizes)))
    scratch, grid = [_scratch_spec(b, sizes) for b in kernel.scratch], number(kernel.grid, sizes)
    if grid > MOST_PROGRAMS:
        raise Unfusible(kernel.name, f"a launch of {grid} programs")
    remember(kernel, [value for kind, value in arguments if kind == "number"], grid, sizes)
    return kernel, run, arguments, grid, scratch


def _numbers_in(arguments: Sequence[tuple[str, int]]) -> list[int]:
    return [value for kind, value in arguments if kind == "number"]


def _scratch_spec(buffer: Buffer, sizes: Sizes) -> tuple[tuple[int, ...], torch.dtype, bool]:
    return numbers(buffer.shape, sizes), TO_TORCH[buffer.dtype], buffer.zeroed


def tuning(backend: str) -> bool:
    """Whether kernels are timed at the sizes that they meet first."""
    return backend.startswith("triton") and (settings().tune or tune.is_asked_for())


class KernelPlan:
    """A lowered graph on a GPU or under the interpreter. It is cut into steps at the first call, for its sizes."""

    def __init__(
        self,
        graph: Graph,
        name: str,
        backend: str,
        device: torch.device,
        report: Callable[[str], None] = lambda why: None,
        products: ProductsBy | None = None,
        assumed: Sequence[sympy.Basic] = (),
    ) -> None:
        self.graph, self.name, self.backend, self.device, self.report = graph, name, backend, device, report
        self.assumed = tuple(assumed)
        self.products: ProductsBy = products or ("clock" if tuning(backend) else "model")
        self.switches = in_force()
        self.target = target_for(backend, device)
        self.steps: list[Step] | None = None
        self.runners: dict[int, GroupRunner] = {}
        self.last_use: dict[int, list[int]] = {}
        self.places = Places()

    def __call__(self, inputs: Sequence[Tensor], sizes: Sizes) -> list[Tensor | None]:
        key = _key(sizes)
        steps = self.steps if self.steps is not None else self.cut(sizes)
        memory: dict[int, Any] = {
            v.id: expected_layout(t, v, sizes) for v, t in zip(self.graph.inputs, inputs, strict=True)
        }
        for at, step in enumerate(steps):
            self._run(at, step, memory, sizes, key)
            if is_opaque(step):
                key = _key(sizes)
            for dead in self.last_use.get(at, ()):
                memory.pop(dead, None)
        outputs = self._outputs(memory, inputs, sizes)
        self._write_back(memory, inputs)
        return outputs

    def cut(self, sizes: Sizes) -> list[Step]:
        """The steps, with the kernels of each group generated for these sizes."""
        with capture_lock, under(self.switches):
            if self.steps is not None:  # another thread was first
                return self.steps
            sizes = {**self._hints(), **sizes}
            made = generate(self.graph, self.target, sizes, self.name, self.products)
            for reason in made.reasons:
                self.report(f"an operation runs between the kernels: {reason}")
            for at, step in enumerate(made.steps):
                if isinstance(step, Group):
                    self.runners[at] = self._runner(step, made.names[at], made.kernels.get(at), sizes)
            self.last_use = last_uses(made.steps)
            self.places = made.places
            self.steps = made.steps
        return made.steps

    def _runner(self, group: Group, name: str, kernels: Kernels | None, sizes: Sizes) -> GroupRunner:
        """A group with its kernels; None: it runs operation by operation."""
        runner = GroupRunner(group, name, self.backend, self.target, self.device, self.report, self.assumed)
        if kernels is None:
            runner.one_by_one = True
        else:
            runner.add(kernels, sizes)
        return runner

    def _hints(self) -> dict[sympy.Symbol, int]:
        """The sizes that opaque nodes returned when the graph was captured."""
        return {s: n for v in self.graph if (node := opaque_of(v)) is not None for s, n in node.hints.items()}

    def _write_back(self, memory: dict[int, Any], inputs: Sequence[Tensor]) -> None:
        """Values that forward wrote to its arguments; all are known before the first is written."""
        held = {memory_of(t) for t in inputs}
        values = {i: _value(memory, v) for i, v in self.graph.mutations.items()}
        safe = {i: v.clone() if memory_of(v) in held else v for i, v in values.items()}
        for index, value in safe.items():
            inputs[index].copy_(value)

    def _run(self, at: int, step: Step, memory: dict[int, Any], sizes: Sizes, key: tuple[int, ...]) -> None:
        match step:
            case Group():
                given = zip(step.inputs, step.graph.inputs, strict=True)
                results = self.runners[at]([_for_group(memory, v, own, sizes) for v, own in given], sizes, key)
                memory.update({v.id: t for v, t in zip(step.outputs, results, strict=True)})
            case Extern(value=value) if (place := self.places.get(value.id)) is not None:
                room = room_of(place)
                if room not in memory:
                    memory[room] = room_for(place, sizes, self.device)
                operands = [_value(memory, a) for a in value.args]
                memory[value.id] = product_into(value, place, sizes, memory[room], *operands)
            case View(value=value) if is_filled(self.places, value):
                memory[value.id] = memory.pop(room_of(self.places[value.args[0].id]))
            case Extern(value=value) | View(value=value):
                operands = [_value(memory, a) for a in value.args]
                memory[value.id] = reference.call_node(value, operands, sizes, None if operands else self.device)

    def _outputs(self, memory: dict[int, Any], inputs: Sequence[Tensor], sizes: Sizes) -> list[Tensor | None]:
        taken = {memory_of(t) for t in inputs}
        outputs: list[Tensor | None] = []
        for value, strides in zip(self.graph.outputs, self.graph.output_strides, strict=True):
            if value is None or strides is None:
                outputs.append(None)
                continue
            tensor = own_memory(_value(memory, value), numbers(strides, sizes), taken)
            taken.add(memory_of(tensor))
            outputs.append(tensor)
        return outputs


def room_of(place: Place) -> int:
    """Under which number the memory of a concatenation is known while its parts are computed."""
    return -1 - place.whole.id


def is_filled(places: Places, value: Value) -> bool:
    """Whether a value is a concatenation whose parts were written where they belong."""
    return value.prim == "cat" and value.args[0].id in places and places[value.args[0].id].whole == value


def is_opaque(step: Step) -> bool:
    """Whether a step runs the user's own body of a nested call."""
    return isinstance(step, Extern) and opaque_of(step.value) is not None


def _key(sizes: Sizes) -> tuple[int, ...]:
    return sizes.key if isinstance(sizes, BoundSizes) else tuple(sizes.values())


def last_uses(steps: Sequence[Step]) -> dict[int, list[int]]:
    """Per step, the values that nothing later reads: their memory is free for what comes next. Results stay."""
    last: dict[int, int] = {}
    for at, step in enumerate(steps):
        for value in step.inputs if isinstance(step, Group) else step.value.args:
            while value.prim == "pick":
                value = value.args[0]
            last[value.id] = at
    graph = next((s.value.graph if not isinstance(s, Group) else None for s in steps), None)
    kept = _results(steps, graph)
    freed: dict[int, list[int]] = {}
    for value_id, at in last.items():
        if value_id not in kept:
            freed.setdefault(at, []).append(value_id)
    return freed


def _results(steps: Sequence[Step], graph: Graph | None) -> set[int]:
    source = graph or next((v.graph for s in steps if isinstance(s, Group) for v in (*s.inputs, *s.outputs)), None)
    if source is None:
        return set()
    kept: set[int] = set()
    for value in source.results:
        while value.prim == "pick":
            value = value.args[0]
        kept.add(value.id)
    return kept


def _value(memory: Mapping[int, Any], value: Value) -> Any:
    if value.id in memory:
        return memory[value.id]
    if value.prim == "pick":
        return _value(memory, value.args[0])[value.params["index"]]
    raise InternalError(f"no step computes {value!r} = {value.prim}")


def _for_group(memory: Mapping[int, Any], value: Value, own: Value, sizes: Sizes) -> Tensor:
    """What a kernel reads as its input `own`: graph inputs are laid out already, the rest as the group was told."""
    tensor: Tensor = _value(memory, value)
    return tensor if value.prim == "input" else expected_layout(tensor, own, sizes)


def expected_layout(tensor: Tensor, value: Value, sizes: Sizes) -> Tensor:
    """The tensor in the layout that the graph was captured with (a hook may have handed back another one)."""
    strides = numbers(value.params["strides"], sizes)
    return tensor if _same_layout(tensor, strides) else _restrided(tensor, strides)


def _same_layout(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    actual = tensor.stride()
    return actual == strides or same_strides(tensor.shape, actual, strides)


def same_strides(shape: Sequence[int], actual: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two layouts of one shape are the same places in memory."""
    return 0 in shape or all(a == b or n <= 1 for a, b, n in zip(actual, strides, shape, strict=True))


def _restrided(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    if 0 in strides and tensor.numel():
        return tensor.as_strided(
            tensor.shape, tensor.stride()
        )  # an expanded fake of a tensor that is not: read as it is
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def own_memory(tensor: Tensor, strides: tuple[int, ...], taken: set[int]) -> Tensor:
    """An output must not share memory with an input or another output, and has eager's strides."""
    if memory_of(tensor) in taken or not _same_layout(tensor, strides):
        distinct = tensor[tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)]  # one element per stride 0
        own = torch.empty_strided(distinct.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(distinct)
        return own if own.shape == tensor.shape else own.expand(tensor.shape).detach()
    return tensor.detach() if tensor._is_view() else tensor  # of memory that nobody else sees


def target_for(backend: str, device: torch.device) -> Target:
    """What to generate for: the interpreter, or the GPU at hand with its own number of units and its L2."""
    return replace(_target_for(backend, device), fast=backend in FAST.values())


def named_target(name: str, numerics: str) -> Target:
    """A device by its name, to generate for with these numerics."""
    return replace(TARGETS[name], fast=numerics == "fast")


def _target_for(backend: str, device: torch.device) -> Target:
    if is_interpreted(backend):
        return TARGETS["interpret"]
    if device.type != "cuda":
        raise UnsupportedBackendError(
            backend=backend, what=f"{device.type} tensors", reason="Triton needs a GPU",
            fix='use backend="reference", or backend="interpret" to run the generated text without a GPU',
        )  # fmt: skip
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        base = TARGETS["hip:gfx942"]
        return Target("hip", arch, properties.multi_processor_count, base.l2, base.shared, 64)
    l2 = getattr(properties, "L2_cache_size", 40 << 20)
    shared = getattr(properties, "shared_memory_per_block_optin", 163 << 10)
    arch = f"{properties.major}{properties.minor}"
    return Target("cuda", arch, properties.multi_processor_count, l2, shared)


# ------------------------------------------------------------------ one captured graph, any backend
Run = Callable[[Sequence[Any], Sequence[Tensor], "Sizes | None"], list[Any]]


class Executable:
    """Calls a trace on real inputs: `(tensors and ints) -> outputs`. `skip`: outputs that the caller makes himself.

    `graph`: a program to run in place of the trace's own, on a kernel backend; `why_not`: why there are no kernels.
    `sizes`: the symbols' values where the inputs alone do not tell them.
    """

    def __init__(
        self,
        trace: Trace,
        name: str,
        backend: str,
        skip: frozenset[int] = frozenset(),
        report: Callable[[str], None] | None = None,
        graph: Graph | None = None,
        why_not: str = "",
    ) -> None:
        self.trace, self.name, self.backend, self.skip, self.why_not = trace, name, backend, skip, why_not
        self.graph, self.switches = graph, in_force()
        self.report = report or (lambda why: None)
        self.binder = Binder(trace.fakes)
        self.plans: dict[torch.device, KernelPlan] = {}
        self.without: set[torch.device] = set()  # devices for which we failed to make a plan
        self.otherwise: Run = self._replay
        self.run = self._choose()

    def __call__(self, inputs: Sequence[Any], lifted: Sequence[Tensor], sizes: Sizes | None = None) -> list[Any]:
        if (watch := self.switches.watch) is not None:
            watch.saw(self, [*inputs, *lifted], sizes)
        return self.run(inputs, lifted, sizes)

    @once
    def replay(self) -> Callable[..., Any]:
        """The captured operations, on whatever stands in for tensors."""
        with under(self.switches):
            return straight(self.trace.graph_module, self.name)

    @once
    def thrifty(self) -> Callable[..., Any]:
        """The same on plain tensors that autograd does not follow, with no more memory than is needed at a time."""
        with under(self.switches):
            return straight(self.trace.graph_module, self.name, takes("reuse", self.name))

    def replay_of(self, values: Sequence[Any]) -> Callable[..., Any]:
        """The quicker one of the two on plain tensors like these."""
        return self.thrifty if any(isinstance(v, Tensor) and v.nbytes >= LARGE for v in values) else self.replay

    @property
    def replays(self) -> bool:
        """Whether it runs the captured operations one by one, and nothing else."""
        return self.run == self._replay

    @property
    def results(self) -> int:
        """How many results it has, those that are skipped included."""
        if self.graph is not None:
            return len(self.graph.outputs)
        (made,) = self.trace.graph_module.graph.find_nodes(op="output")[0].args
        return len(made)

    def _choose(self) -> Run:
        if self.backend in KERNEL_BACKENDS:
            return self._kernels()
        count("compiles")
        if self.backend == "inductor":
            return self._inductor()
        return self._contracted() if has_outer_product(self.trace) else self._replay

    def _replay(self, inputs: Sequence[Any], lifted: Sequence[Tensor], sizes: Sizes | None) -> list[Any]:
        """The captured ATen operations as they are: bitwise what the user's method computes."""
        values = (*inputs, *lifted)
        run = self.replay_of(values) if is_plain_call(values) else self.replay
        return list(run(*values))

    def _contracted(self) -> Run:
        """The lowered graph through torch, where a broadcast product would otherwise fill memory."""
        try:
            graph = graph_of(self.trace, self.name)
        except LoweringError:
            return self._replay
        helps = any(v.prim == "dot" for v in graph.order()) and not graph.mutations
        return self._where_it_fills_memory(self.through_torch(graph)) if helps else self._replay

    def _where_it_fills_memory(self, contracted: Run) -> Run:
        """The captured operations, which have eager's bits, at sizes at which their results are small enough."""
        fills: dict[tuple[int, ...], bool] = {}

        def run(inputs: Sequence[Any], lifted: Sequence[Tensor], sizes: Sizes | None) -> list[Any]:
            known = self.binder(inputs) if sizes is None else sizes
            key = _key(known)
            if key not in fills:
                if len(fills) >= RECORDS:
                    fills.clear()
                fills[key] = fills_memory(self.trace, known)
            return (contracted if fills[key] else self._replay)(inputs, lifted, known)

        return run

    def through_torch(self, graph: Graph) -> Run:
        """A program in place of the trace's own, operation by operation; it writes to no input."""

        def run(inputs: Sequence[Any], lifted: Sequence[Tensor], sizes: Sizes | None) -> list[Any]:
            tensors = [t for t in (*inputs, *lifted) if isinstance(t, Tensor)]
            known = self.binder(inputs) if sizes is None else sizes
            results = reference.run(graph, tensors, known)
            taken, own = {memory_of(t) for t in tensors}, list[Any]()
            for r, s in zip(results, graph.output_strides, strict=True):
                own.append(None if r is None or s is None else own_memory(r, numbers(s, known), taken))
                taken |= set() if own[-1] is None else {memory_of(own[-1])}
            return own

        return run

    def _kernels(self) -> Run:
        if self.why_not:
            self.report(f"no kernels, the captured ATen operations run one by one: {self.why_not}")
            return self._replay
        try:
            graph = self.graph or prepared(partial(graph_of, self.trace, self.name), self.report)
        except LoweringError as error:
            self.report(f"no kernels, the captured ATen operations run one by one: {error}")
            return self._replay
        if graph is None:
            return self._replay
        self.otherwise = self._replay if self.graph is None else self.through_torch(graph)
        self.graph = graph
        graph.outputs = [None if i in self.skip else o for i, o in enumerate(graph.outputs)]
        return self._planned if allowed("divide", self.name) else self.through_torch(graph)

    def _planned(self, inputs: Sequence[Any], lifted: Sequence[Tensor], sizes: Sizes | None) -> list[Any]:
        """The program's kernels, by the plan of the device at hand."""
        tensors = [t for t in (*inputs, *lifted) if isinstance(t, Tensor)]
        device = tensors[0].device if tensors else self._made_on()
        if device not in self.plans and device not in self.without:
            with capture_lock:
                self._add_plan(device, self.binder(inputs) if sizes is None else sizes)
        if device in self.without:
            return self.otherwise(inputs, lifted, sizes)
        return self.plans[device](tensors, self.binder(inputs) if sizes is None else sizes)

    def _made_on(self) -> torch.device:
        """Where the results of a program without tensors as arguments are."""
        (made,) = self.trace.graph_module.graph.find_nodes(op="output")[0].args
        found = [n.meta["val"].device for n in made if isinstance(n, torch.fx.Node) and "val" in n.meta]
        return found[0] if found else torch.device("cpu")

    def _add_plan(self, device: torch.device, sizes: Sizes) -> None:
        if device in self.plans or device in self.without:  # another thread was first
            return
        made = prepared(partial(self._plan, device, sizes), self.report)
        (self.without.add(device) if made is None else self.plans.update({device: made}))

    def _plan(self, device: torch.device, sizes: Sizes) -> KernelPlan:
        assert self.graph is not None
        with under(self.switches):
            assumed = assumed_of(self.trace.fakes, self.binder.sources)
            plan = KernelPlan(self.graph, self.name, self.backend, device, self.report, assumed=assumed)
            plan.cut(sizes)
        return plan

    def _inductor(self) -> Run:
        from .inductor import compiled

        fast = compiled(self.trace.graph_module)
        return lambda inputs, lifted, sizes: fast(inputs, lifted)


def is_plain_call(values: Sequence[Any]) -> bool:
    """Whether values are written to and read as memory: no transform, mode or recording stands before them."""
    if transforms_active() or dispatch_modes() or function_modes():
        return False
    tensors = [v for v in values if isinstance(v, Tensor)]
    followed = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return not followed and not any(map(is_batched, tensors))


def fills_memory(trace: Trace, sizes: Sizes) -> bool:
    """Whether what the operations of a trace make is too much to be made, and to be compared with."""
    return intermediate_bytes(trace.graph_module, sizes) > settings().check_bytes


def has_outer_product(trace: Trace) -> bool:
    """A product larger than both its operands, somewhere in the graph: the only case in which `contract` can help."""
    for node in trace.graph_module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.name != "aten::mul":
            continue
        operands = [a.meta["val"] for a in node.args if isinstance(a, torch.fx.Node) and "val" in a.meta]
        operands = [v for v in operands if isinstance(v, Tensor)]
        if len(operands) == 2 and all(_hint(node.meta["val"].numel()) > _hint(v.numel()) for v in operands):
            return True
    return False


def _hint(size: Any) -> int:
    return int(size) if isinstance(size, int) else int(size.node.hint or 0)


def log_admission(runner: GroupRunner, variant: Variant) -> None:
    """Kernels of a group are ready, for these sizes."""
    if logs.guards.isEnabledFor(logging.INFO):
        pinned = [f"{symbol} = {value}" for symbol, value in variant.pinned.items()]
        held = ", ".join([*pinned, *map(str, variant.guards)]) or "every size"
        logs.guards.info("%s holds for %s", runner.name, _with_names(runner, held))


def log_generated_again(runner: GroupRunner, sizes: Any) -> None:
    """No kernels of a group admit these sizes."""
    if not runner.variants or not logs.recompiles.isEnabledFor(logging.INFO):
        return
    last = runner.variants[-1]
    pinned = [f"{s}: {n} -> {sizes[s]}" for s, n in last.pinned.items() if sizes[s] != n]
    failed = [f"not {g}" for g in last.guards if not bool(g.xreplace(sizes))]
    logs.recompiles.info("%s is generated again: %s", runner.name, _with_names(runner, "; ".join([*pinned, *failed])))


def _with_names(runner: GroupRunner, text: str) -> str:
    """s37 = 16  ->  x.shape[1] = 16"""
    shapes = [(v.params["name"], axis, n) for v in runner.group.graph.inputs for axis, n in enumerate(v.shape)]
    names = {str(n): f"{name}.shape[{axis}]" for name, axis, n in reversed(shapes)}
    return re.sub(r"\bs\d+\b", lambda found: names.get(found[0], found[0]), text)
