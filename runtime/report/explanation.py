"""The result of `fusegrad.explain`: facts for programs, and a report for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

from ...codegen import Kernel
from ...codegen.devices import device_of
from ...codegen.proofs import Proof
from ...ir import Graph, Program, ValueRef
from ...ir.codes import code_of, fix_of
from ...ir.errors import FusegradError, UnsupportedBackendError
from ..compiled.variants import Variant
from ..fallback.records import OpaqueCall, Record, needs_a_fix
from ..kernels.cross_compile.pool import Binary
from ..kernels.machine_code.model import model_figures
from ..kernels.proofs import proof_line, proofs_of
from ..settings.config import settings
from ..values.sizes import Sizes
from .directions import DirectionReport, KernelReport
from .residuals import AGAIN, AS_WRITTEN, ResidualRow
from .size_names import size_names
from .walks import made_again

SCHEMA = 2


class NothingCapturedError(FusegradError):
    """A graph of a method was asked for that falls back to eager."""

    message = (
        "{function}.{method} has no graph: {reason}\n  at:   {where}\n"
        "  fix:  ask for a method that is compiled, or make this one traceable."
    )


@dataclass
class Explanation:
    """The result of `explain`. Prints as a report; `to_dict()` for programs."""

    name: str
    """The class's name."""
    target: str
    """What kernels are generated for: "cuda:90", "hip:gfx942", or "cpu"."""
    methods: dict[str, Record]
    """The state of each method by its name: "forward", "setup_context", "backward", "jvp", "vmap"; further rows are of
    what calls met."""
    directions: dict[str, DirectionReport]
    """The figures of "forward" and "backward": launches, bytes, fusion breaks; without one that falls back to eager."""
    saved_bytes: int
    """The bytes of all tensors that forward saves for backward."""
    residuals: tuple[ValueRef, ...] = ()
    """Where each tensor that backward reads comes from: an input, an output, or a further output of forward."""
    user_outputs: int = 0
    """The number of tensors that forward returns."""
    opaque: list[OpaqueCall] = field(default_factory=list)
    """Calls and lines that are not traceable and run in eager between compiled segments."""
    sizes: Sizes = field(default_factory=dict)
    """The numbers of the symbolic sizes, at the arguments that were given."""
    kept: list[ResidualRow] = field(default_factory=list)
    """The saved tensors, one by one, and what is computed again instead of being saved."""
    variants: list[Variant] = field(default_factory=list)
    """The specializations that calls have made of the class so far."""
    numerics: str = "eager"
    """Where kernels round: "eager" (as your operations do) or "fast"."""
    device: str = ""
    """The device or target as it was asked for: "4090", say, whose target is "cuda:89"."""

    @property
    def kernels(self) -> list[KernelReport]:
        """Every launch, forward first."""
        return [launch for report in self.directions.values() for launch in report.launches]

    @property
    def kernel_records(self) -> list[Kernel]:
        """The generated kernels as the compiler has them, for writers of export formats."""
        return [k for report in self.directions.values() for ks in report.kernels for k in ks.kernels]

    def made_again(self, direction: str) -> list[str]:
        """The matrices that are never in memory and that several kernels form.

        Args:
            direction: "forward" or "backward".

        Returns:
            A line for each: its name in your source, and the kernels of this direction that form it once more.
        """
        walks = {d: [(k.name, k.walk) for ks in r.kernels for k in ks.kernels if k.walk is not None]
                 for d, r in self.directions.items()}  # fmt: skip
        return list(made_again(walks.get("forward", []) if direction == "backward" else [], walks.get(direction, [])))

    def _saved_as_written(self) -> str:
        """What the user's own choice of saved tensors holds, where it holds another number of bytes."""
        own = sum(row.bytes for row in self.kept if row.how in (AS_WRITTEN, AGAIN))
        return "" if all(row.how == AS_WRITTEN for row in self.kept) else f"; as written: {own:,}"

    @property
    def size_names(self) -> dict[sympy.Symbol, str]:
        """The name of each size that may vary, as kernels and exported files have it: M, N."""
        return size_names(self.kernel_records, (report.graph for report in self.directions.values()))

    @property
    def proofs(self) -> list[Proof]:
        """Whether the accesses of each generated kernel are in range for all sizes; takes some 0.1 s for each."""
        return [p for report in self.directions.values() for p in proofs_of(report.groups_with_kernels())]

    @property
    def module(self) -> str:
        """The Triton module that holds every generated kernel."""
        from ... import codegen

        return codegen.module(self.kernel_records)

    def graph(self, direction: str = "forward") -> Graph:
        """The graph after the passes.

        Args:
            direction: "forward" or "backward".

        Returns:
            A graph of the IR, which prints as text.

        Raises:
            NothingCapturedError: for a method that falls back to eager.
        """
        if direction in self.directions:
            return self.directions[direction].graph
        record = self.methods[direction]
        raise NothingCapturedError(
            function=self.name, method=direction, reason=record.reason or record.status, where=record.where or "unknown"
        )

    @property
    def program(self) -> Program:
        """Both graphs after the passes, and where backward's residuals come from; only where forward is compiled."""
        backward = {(True,) * self.user_outputs: self.graph("backward")} if "backward" in self.directions else {}
        return Program(self.name, self.graph(), self.residuals, self.user_outputs, dict(backward))

    def binaries(self, *targets: str) -> dict[str, dict[str, Binary]]:
        """The kernels compiled in worker processes, without a GPU.

        Args:
            targets: "cuda:80", "cuda:90", "hip:gfx942" ..; by default the explanation's own.

        Returns:
            By kernel and target: `{kernel: {target: Binary}}`. A Binary has `asm` (ptx and cubin, or amdgcn and hsaco),
            registers, spills and shared memory (bytes), access widths, or an error.

        Raises:
            UnsupportedBackendError: the text has assembly of another vendor than a target's.
        """
        from ..kernels.cross_compile.pool import compile_for

        wanted, module = list(targets) or [self.target], self.module
        for target in wanted:
            self._require_vendor(target, module)
        return compile_for(self.kernel_records, module, wanted)

    def _require_vendor(self, target: str, module: str) -> None:
        """The text is of one vendor where it has assembly: another's compiler does not read that."""
        vendors = [name.partition(":")[0] for name in (target, self.target)]
        if "inline_asm" in module and vendors[0] != vendors[1]:
            raise UnsupportedBackendError(
                backend="triton", what=f"{self.name} on {target}",
                reason=f"its text was generated for {self.target} and has assembly of it",
                fix=f"generate it for that target: explain(..., target={target!r}).binaries()",
            )  # fmt: skip

    def metrics(self, target: str | None = None) -> dict[str, dict[str, Any]]:
        """Figures of the machine code for a target, compiled now, in worker processes, without a GPU.

        Args:
            target: "cuda:80", "hip:gfx942" ..; by default the explanation's own.

        Returns:
            By kernel: `registers`, `spills` (bytes) per thread, `shared` bytes per program, `accesses` by bytes each,
            `error`
                (why there is no binary), `model`: the fields of `LaunchModel` at this explanation's sizes, on the
                explained device or the first of the table (`codegen/devices.py`) that runs the target. `model` is None
                where `not_modelled` says why: not compiled, or machine code that is not read (AMD's, or without a
                disassembler).
        """
        device = device_of(target or self.device or self.target)
        target = target or self.target
        binaries = {name: by_target[target] for name, by_target in self.binaries(target).items()}
        modelled = {
            k.name: model_figures(k, binaries[k.name], self.sizes, device) for k in self.kernel_records
        }
        return {name: {**binary_figures(binary), **modelled[name]} for name, binary in binaries.items()}

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain values that json can write; keys are added, never renamed, within a schema."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "target": self.target,
            "numerics": self.numerics,
            "methods": {name: _method_facts(record) for name, record in self.methods.items()},
            "kernels": [vars(k) | {} for k in self.kernels],
            "launches": {d: sum(k.times for k in self._launches(d)) for d in ("forward", "backward")},
            "bytes": self._bytes(),
            "eager": {d: r.eager.to_dict() for d, r in self.directions.items() if r.eager is not None},
            "peak_memory": {d: r.memory.to_dict() for d, r in self.directions.items() if r.memory is not None},
            "saved_bytes": self.saved_bytes,
            "kept": [k.to_dict() for k in self.kept],
            "groups": {d: [g.to_dict() for g in report.groups] for d, report in self.directions.items()},
            "cuts": {d: [c.to_dict() for c in report.cuts] for d, report in self.directions.items()},
            "opaque": [
                {**vars(o), "code": code_of(o.reason_of_method), "fix": fix_of(o.reason_of_method)} for o in self.opaque
            ],
            "products": {d: report.products for d, report in self.directions.items()},
            "slabs": {d: [s.to_dict() for s in report.slabs.values()] for d, report in self.directions.items()},
            "made_again": {d: self.made_again(d) for d in self.directions},
            "segments": {d: report.segments for d, report in self.directions.items()},
            "variants": [v.to_dict() for v in self.variants],
        }

    def _launches(self, direction: str) -> list[KernelReport]:
        return self.directions[direction].launches if direction in self.directions else []

    def _bytes(self) -> dict[str, int]:
        moved = {d: sum(k.bytes_read + k.bytes_written for k in self._launches(d)) for d in ("forward", "backward")}
        least = {f"minimal_{d}": self.directions[d].minimal if d in self.directions else 0 for d in moved}
        return {**moved, **least}

    def __str__(self) -> str:
        rounding = "" if self.numerics == "eager" else f', numerics="{self.numerics}"'
        lines = [f"{self.name} on {self.target}{rounding}"]
        lines += [_method_line(name, record) for name, record in self.methods.items()]
        for direction, report in self.directions.items():
            lines += [f"  {direction}: {report.summary}"]
            lines += [f"    {report.memory}"] if report.memory is not None else []
            lines += [line for k in self._launches(direction) for line in _kernel_lines(k)]
            lines += [f"    {cut}" for cut in report.cuts]
            lines += [f"    {line}" for line in (*report.products, *self.made_again(direction))]
            lines += [f"    {found}" for found in report.slabs.values()]
            lines += [f"    {call}" for call in self.opaque if call.method == direction]
        lines.append(f"  saved tensors: {self.saved_bytes:,} bytes{self._saved_as_written()}")
        lines += [f"    {value}" for value in self.kept]
        lines += [f"  {proof_line(proof)}" for proof in self.proofs] if settings().debug else []
        return "\n".join([*lines, *_variant_lines(self.variants)])

    __repr__ = __str__

    def to_html(self) -> str:
        """A page without scripts or requests: costs, methods, launches, saved tensors, kernels, drawings.

        Returns:
            The text of the page.
        """
        from .page.explanation_page import as_page

        return as_page(self)

    def _repr_html_(self) -> str:
        from .page.explanation_page import as_fragment

        return as_fragment(self)


def binary_figures(binary: Any) -> dict[str, Any]:
    """A binary's figures without its machine code."""
    names = ("registers", "spills", "shared", "accesses", "error")
    return {n: getattr(binary, n, None) for n in names}


def _method_line(name: str, record: Record) -> str:
    reason = f": {record.reason}" if record.reason else ""
    reason += f" ({record.where})" if record.reason and record.where else ""
    line = f"  {name:<14} {record.status}{reason}"
    return f"{line} [{record.code}]\n  {'':<14} fix: {fix_of(record.reason)}" if needs_a_fix(record) else line


def _method_facts(record: Record) -> dict[str, str | None]:
    fix = fix_of(record.reason) if needs_a_fix(record) else None
    return {"status": record.status, "reason": record.reason, "where": record.where, "code": record.code, "fix": fix}


def _variant_lines(variants: Sequence[Variant]) -> list[str]:
    """The variants that the class was traced for so far."""
    lines = [f"  traced for {len(variants)} specialization{'s' * (len(variants) > 1)}:"] if variants else []
    for number_, variant in enumerate(variants, 1):
        facts = variant.difference or "; ".join(f"{name}: {fact}" for name, fact in variant.facts.items())
        lines.append(f"    {number_}. {facts}")
        lines += [f"       if {' and '.join(variant.conditions)}"] if variant.conditions else []
        lines += [f"       {kernel}" for kernel in variant.kernels]
        lines += [f"       {variant.disk}"] if variant.disk else []
    return lines


def _kernel_lines(kernel: KernelReport) -> Iterator[str]:
    again = f"  again from L2 {kernel.bytes_cached:,}" if kernel.bytes_cached else ""
    again += f"  in {kernel.times} launches" if kernel.times > 1 else ""
    moved = f"reads {kernel.bytes_read:,}  writes {kernel.bytes_written:,}{again}"
    yield f"    {kernel.name:<32} {kernel.kind:<7} {moved}"
    if kernel.walk:
        yield f"    {'':<32} {kernel.walk}"
