"""Runs a fused group at the sizes of a call: kernels where they are proved, the fastest of them, or torch instead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import sympy
import torch

from ...codegen import Kernels, Target
from ...codegen.kernel_partition import is_streamed
from ...codegen.proofs import may_overwrite
from ...codegen.schedule.tuning_candidates import LEANINGS, OF_STREAMS, candidates, smaller_candidates
from ...ir.errors import Unfusible
from ...ir.lazy_attribute import lazy_attribute
from ...ir.passes.fuse import Group
from ...ir.switches import switch_state, use_switch_state
from ...tracer.capture.capture import capture_lock
from ..kernels import autotune as tune
from ..kernels.launch_errors import LaunchFailure, launch_failure
from ..settings.internal_errors import or_fall_back
from ..values.sizes import Sizes, numbers
from ..values.tensors import records_launches
from . import targets
from .aten import reference
from .bound_group import BoundGroup
from .graph_to_kernels import text_of
from .layouts import own_memory
from .variants import Variants

Tensor = torch.Tensor
RunGroup = Callable[[Sequence[Tensor], Sizes], list[Any]]
LIBRARY = "the library's product"
OPERATION_BY_OPERATION = "runs operation by operation"
UNPROVED = "goes through torch at some sizes: not proved to stay in its tensors"
RECORDS = 512
"""Distinct size tuples that a group remembers; older ones are evaluated again."""


class GroupRunner:
    """A fused group: its variants, and what is launched, by all sizes.

    with_library: makes a plan of the group in which its product of matrices is a call, between kernels for the rest.
    """

    def __init__(
        self, group: Group, name: str, backend: str, target: Target, device: torch.device,
        report: Callable[[str], None], assumed: Sequence[sympy.Basic], with_library: Callable[[], RunGroup],
    ) -> None:  # fmt: skip
        self.group, self.name, self.backend, self.device = group, name, backend, device
        self.variants = Variants(group, name, backend, target, device, assumed)
        self.with_library = with_library
        self.unproved: dict[tuple[int, ...], str] = {}  # sizes at which no kernel may run, and why
        self.report, self.switches = report, switch_state()
        self.one_by_one = False  # where the generator refuses at sizes met later
        self.multiplies = any(v.prim == "dot" for v in group.graph.order())
        self.overwrites: tuple[int, int] | None = None  # a result, and the input whose memory it takes
        self.overwriting: list[tuple[Kernels, bool]] = []  # whether kernels are proved to read that first
        self.called: dict[tuple[int, ...], str] = {}  # sizes at which it refuses a group with products, and why
        self.bound: OrderedDict[tuple[int, ...], BoundGroup] = OrderedDict()

    def __call__(
        self, inputs: Sequence[Tensor], sizes: Sizes, key: tuple[int, ...], into: Sequence[Tensor | None] = ()
    ) -> list[Tensor]:
        """The group's results; into: memory for some of them, which kernels may take."""
        if (watch := self.switches.watch) is not None:
            watch.observe(self, inputs, sizes)
        bound = self.bound.get(key) or self._bound_at(sizes, key)
        if bound is None:
            return self._without_kernels(inputs, sizes, key)
        try:
            if not bound.settled:
                bound = self.bound[key] = self._settle(bound, inputs, sizes)
            if bound.uses_library:
                return self.through_library(inputs, sizes)
            return bound(inputs, self._over(bound, inputs, into))
        except Exception as error:
            refused = launch_failure(error)
            if refused is None:
                raise
        # Out of the block above: the error is gone, and the memory that it held.
        return self._run_otherwise(refused, bound, inputs, sizes, key)

    def _over(
        self, bound: BoundGroup, inputs: Sequence[Tensor], into: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Memory for results: besides what is given that of an input, where kernels are proved to read it first."""
        if (taken := self.memory_taken(bound)) is None:
            return into
        given = list(into) or [None] * len(self.group.outputs)
        given[taken[0]] = inputs[taken[1]]
        return given

    def memory_taken(self, bound: BoundGroup) -> tuple[int, int] | None:
        """The number of a result, and of the input whose memory it takes."""
        if self.overwrites is None or self.switches.watch is not None:
            return None
        result, product = self.overwrites
        return self.overwrites if self._may_overwrite(bound.kernels, product, result) else None

    def _may_overwrite(self, kernels: Kernels, product: int, result: int) -> bool:
        """Asked once for the same kernels, whatever the sizes."""
        known = next((answer for asked, answer in self.overwriting if asked is kernels), None)
        if known is None:
            known = may_overwrite(self.group.graph, kernels, product, result)
            self.overwriting.append((kernels, known))
        return known

    def is_launched(self, key: tuple[int, ...]) -> bool:
        """True where at these sizes it is launches of kernels, and nothing else."""
        return key in self.bound and not self.one_by_one and not self.bound[key].uses_library

    # ------------------------------------------------------------------ what is launched at these sizes
    def _bound_at(self, sizes: Sizes, key: tuple[int, ...]) -> BoundGroup | None:
        """Launches at sizes that are new; None where no kernels may run."""
        if self.one_by_one or key in self.unproved or key in self.called:
            return None
        with capture_lock:
            return self.bound.get(key) or self._newly_bound(sizes, key)

    def _newly_bound(self, sizes: Sizes, key: tuple[int, ...]) -> BoundGroup | None:
        try:
            with use_switch_state(self.switches):
                build = partial(self._bind, sizes, key)
                bound = or_fall_back(build, self.report, f"{self.name} {OPERATION_BY_OPERATION}")
        except Unfusible as error:
            self._give_up(str(error))
            return None
        self.one_by_one = bound is None and key not in self.unproved and key not in self.called
        return bound

    def _bind(self, sizes: Sizes, key: tuple[int, ...]) -> BoundGroup | None:
        try:
            variant = self.variants.admitting(sizes)
        except Unfusible as error:
            if not self.multiplies:
                raise
            # which products need no memory is a matter of sizes: at these the library multiplies
            _remember(self.called, key, str(error))
            return None
        if why := self.variants.unproved_at(variant, sizes):
            self._do_without(key, why)
            return None
        self.bound[key] = bound = self.variants.bind(variant, sizes)
        if len(self.bound) > RECORDS:
            self.bound.popitem(last=False)
        return bound

    def _do_without(self, key: tuple[int, ...], why: str) -> None:
        if why not in self.unproved.values():
            self.report(f"{self.name} {UNPROVED}: {why}")
        _remember(self.unproved, key, why)

    def _settle(self, bound: BoundGroup, inputs: Sequence[Tensor], sizes: Sizes) -> BoundGroup:
        """Return what these sizes keep: the schedule's own kernels, or where tuning is on the fastest version."""
        tuned = targets.is_tuned(self.backend)
        if tuned and records_launches(self.device):
            return bound
        bound.settled = True
        if not tuned or not any(launch.grid for launch in bound.launches):
            return bound
        return fastest_version(self, bound, inputs, sizes)

    @lazy_attribute
    def through_library(self) -> RunGroup:
        """The group with its product as a call, between kernels for the rest."""
        return self.with_library()

    # ------------------------------------------------------------------ what runs instead
    def recover(self, error: Exception, inputs: Sequence[Tensor], sizes: Sizes, key: tuple[int, ...]) -> list[Tensor]:
        """The group's results after an error of its kernels, another way; raises it again where there is none."""
        refused = launch_failure(error)
        if refused is None:
            raise error
        bound = self.bound.get(key)
        if self.one_by_one or bound is None:
            return self._without_kernels(inputs, sizes, key)
        return self._run_otherwise(refused, bound, inputs, sizes, key)

    def _run_otherwise(
        self, refused: LaunchFailure, bound: BoundGroup, inputs: Sequence[Tensor], sizes: Sizes, key: tuple[int, ...]
    ) -> list[Tensor]:
        """Run by kernels that need less, else operation by operation: for this call where memory lacked, else for good.

        Running again is safe: a group writes to memory of its own alone, and counters are left at zero or untouched.
        """
        if refused.lacks == "memory":
            self.report(f"{self.name} ran operation by operation: {refused.reason}")
            return self._through_torch(inputs, sizes)
        # The other candidates, those that need less before the rest; the first that runs is kept for these sizes.
        generated = partial(self.variants.generate_kernels, sizes)
        for name, kernels in smaller_candidates(bound.kernels, self.variants.target, generated):
            variant = self.variants.with_launchers(kernels)
            if not variant.admits(sizes) or self.variants.unproved_at(variant, sizes):
                continue
            smaller = self.variants.bind(variant, sizes)
            try:
                results = smaller(inputs)
            except Exception as error:
                if launch_failure(error) is None:
                    raise
                continue
            smaller.settled, self.bound[key] = True, smaller
            self.variants.ordered.insert(0, variant)
            self.report(f"{self.name} runs with {name}: {refused.reason}")
            return results
        self._give_up(refused.reason)
        return self._through_torch(inputs, sizes)

    def _give_up(self, why: str) -> None:
        self.report(f"{self.name} {OPERATION_BY_OPERATION}: {why}")  # which raises where kernels were asked for
        self.one_by_one = True

    def _without_kernels(self, inputs: Sequence[Tensor], sizes: Sizes, key: tuple[int, ...]) -> list[Tensor]:
        run = self.through_library if key in self.called else self._through_torch
        return run(inputs, sizes)

    def _through_torch(self, inputs: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        graph = self.group.graph
        results = reference.run(graph, inputs, sizes)
        pairs = zip(results, graph.output_strides, strict=True)
        return [own_memory(r, numbers(s, sizes), set()) for r, s in pairs if r is not None and s is not None]


def _remember(reasons: dict[tuple[int, ...], str], key: tuple[int, ...], why: str) -> None:
    if len(reasons) >= RECORDS:
        reasons.clear()
    reasons[key] = why


def fastest_version(runner: GroupRunner, bound: BoundGroup, inputs: Sequence[Tensor], sizes: Sizes) -> BoundGroup:
    """The fastest of the scheduled kernels and their neighbours; all read and write memory of their own."""
    variants = runner.variants
    rivals = {LIBRARY: replace(bound, uses_library=True)} if runner.multiplies else {}
    # The scheduled kernels are bound already; a neighbour that is not proved at these sizes does not compete.
    generate = partial(variants.generate_kernels, sizes)
    most, leanings = (tune.MOST_OF_STREAMS, OF_STREAMS) if is_streamed(runner.group.graph) else (tune.MOST, LEANINGS)
    neighbours = candidates(bound.kernels, variants.target, generate, most - len(rivals), leanings)
    competing: dict[str, BoundGroup] = {}
    for name, kernels in neighbours.items():
        if kernels is bound.kernels:
            competing[name] = bound
        elif not variants.unproved_at(variant := variants.with_launchers(kernels), sizes):
            competing[name] = variants.bind(variant, sizes)
    launches: dict[str, tune.Launch] = {n: partial(b.launch, b.memory(inputs)) for n, b in competing.items()}
    launches |= {name: partial(runner.through_library, inputs, sizes) for name in rivals}
    if len(launches) == 1:
        return bound
    device = runner.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(variants.target)
    launch_numbers = [v for launch in bound.launches for v in (launch.grid, *launch.numbers)]
    fastest = (competing | rivals)[tune.fastest(name, runner.name, text_of(bound.kernels), launch_numbers, launches)]
    fastest.settled = True
    return fastest
