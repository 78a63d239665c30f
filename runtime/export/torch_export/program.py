"""`export(.., path="name.pt2")`: programs of torch.export, forward in one file and the user's backward in another.

torch.export (2.13) keeps no custom backward: traced as it is, forward would silently be differentiated by ATen's rules.
Here its results require no gradient, and backward is a program of its own: (arguments, gradients) -> gradients.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from ....ir.errors import FusegradError
from ....tracer.sizes import hint_of
from ....tracer.torch_private import plain_tensors
from ...capture.captured import present_residuals
from ...capture.captured_backward import predicted_kinds
from ...capture.outputs import rebuild_output, tensor_at
from ...specialize.specialization import Specialization
from ..bundle.archive import write_file
from ..gather.gathered import ExportError, capture_for_export, has_backward

Tensor = torch.Tensor
NOTE = "fusegrad.json"
READABLE = (int, type(None))
"""Results besides tensors that torch reads back from a program."""


class ProgramError(FusegradError):
    """torch.export does not make a program of what was captured."""

    message = "export({function}): torch.export refuses its {method}: {reason}\n  at:   {where}\n  fix:  {fix}"


def as_program(
    target_class: Any, args: tuple[Any, ...], path: Path, target: str | None, targets: Sequence[str] = ()
) -> str:
    """Writes name.pt2, and name.backward.pt2 where there is a backward; says what each of them keeps."""
    compiler, spec, stand_ins = capture_for_export(target_class, args)
    source = spec.captured.backward_place()
    # Refused before torch is asked: its own error would name a line of torch's.
    reason = _refusal(spec)
    if reason is not None:
        fix = "use the class through fusegrad."
        raise ExportError(function=spec.captured.name, reason=reason, where=source, fix=fix)
    with_backward = has_backward(compiler, stand_ins)
    # Both programs are traced before either is written.
    with plain_tensors():
        examples = [_example(f) for f in spec.captured.forward.fakes]
        programs = {path: _program(spec, "forward", _Forward(spec), examples)}
        if with_backward:
            gradients = [_example(f) for f in _moving_outputs(spec)]
            programs[backward_path(path)] = _program(spec, "backward", _Backward(spec), [*examples, *gradients])
    statement = _statement(spec, path, with_backward)
    for place, program in programs.items():
        write_file(place, _content(program, {"function": spec.captured.name, "source": source, "kept": statement}))
    return statement


def backward_path(path: Path) -> Path:
    """fast.pt2 -> fast.backward.pt2"""
    return path.with_name(f"{path.stem}.backward{path.suffix}")


def _refusal(spec: Specialization) -> str | None:
    if spec.captured.writes_inputs:
        return "forward writes to an argument"
    outputs = spec.captured.forward.outputs
    objects = [o.value for o in outputs if o.kind == "object" and not isinstance(o.value, READABLE)]
    return (
        f"forward returns a {type(objects[0]).__name__}, which a program of torch.export does not" if objects else None
    )


def _statement(spec: Specialization, path: Path, with_backward: bool) -> str:
    captured = spec.captured
    lines = [f"{path.name}: the values of {captured.name}.forward, for any sizes that its trace holds for."]
    lines.append("Kept: the operations of forward, as traced. torch.export keeps no custom backward in a program,")
    lines.append("and ATen's derivative would be another one: the results are detached, they require no gradient.")
    if with_backward:
        inputs = ", ".join([*(captured.names[i] for i in captured.slots), "gradients of the outputs"])
        lines.append(f"{backward_path(path).name}: {captured.name}.backward, ({inputs}) -> gradients.")
    return "\n".join(lines)


def _content(program: ExportedProgram, note: dict[str, str]) -> bytes:
    """The file's bytes, without the example inputs: they would make a hundred megabytes of a dozen kilobytes."""
    file = io.BytesIO()
    program.example_inputs = None
    torch.export.save(program, file, extra_files={NOTE: json.dumps(note, indent=1)})
    return file.getvalue()


# ------------------------------------------------------------------ tracing
def _program(spec: Specialization, method: str, module: torch.nn.Module, examples: Sequence[Tensor]) -> ExportedProgram:
    captured = spec.captured
    fakes = [*captured.forward.fakes, *_moving_outputs(spec)][: len(examples)]
    dims = tuple({a: Dim.AUTO for a, n in enumerate(f.shape) if not isinstance(n, int)} for f in fakes)
    try:
        return torch.export.export(module, tuple(examples), dynamic_shapes=(dims,), strict=False)
    except Exception as error:
        facts = {"reason": str(error).strip().splitlines()[0], "fix": "export another format."}
        raise ProgramError(function=captured.name, method=method, where=captured.backward_place(), **facts) from error


def _example(fake: Tensor) -> Tensor:
    """A tensor of the sizes that were exported; its memory is not touched."""
    shape, strides = ([int(hint_of(n)) for n in ns] for ns in (fake.shape, fake.stride()))
    return torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device)


def _moving_outputs(spec: Specialization) -> list[Tensor]:
    """forward's outputs whose gradients backward reads."""
    captured = spec.captured
    kinds = [k for k, o in zip(predicted_kinds(captured), captured.forward.outputs, strict=True) if o.kind != "object"]
    return [f for f, k in zip(captured.forward.fake_outputs, kinds, strict=True) if k is not None]


WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def detached(value: Tensor) -> Tensor:
    """The same memory, by way of its bits: torch drops `detach` where it decomposes a program."""
    if value.is_complex():
        return torch.view_as_complex(detached(torch.view_as_real(value)))
    if not value.is_floating_point():
        return value
    return value.view(WHOLE_NUMBERS[value.element_size()]).view(value.dtype)


class _Forward(torch.nn.Module):
    """The captured forward, returning what the user's returns."""

    def __init__(self, spec: Specialization) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, *tensors: Tensor) -> Any:
        """tensor arguments -> outputs"""
        captured = self.spec.captured
        results = captured.forward.trace.graph_module(*tensors)
        visible = results[: len(captured.forward.fake_outputs)]
        return rebuild_output(captured, [detached(r) for r in visible], tensors, (), captured.binder.read(tensors))


class _Backward(torch.nn.Module):
    """The captured backward, after the forward that it needs."""

    def __init__(self, spec: Specialization) -> None:
        super().__init__()
        self.spec = spec
        self.entry = spec.backward.entry(predicted_kinds(spec.captured))

    def forward(self, *values: Tensor) -> tuple[Any, ...]:
        """(tensor arguments, gradients of the outputs) -> gradients of the tensor arguments, None for none"""
        spec = self.spec
        tensors, gradients = values[: len(spec.captured.slots)], values[len(spec.captured.slots) :]
        results = spec.captured.forward.trace.graph_module(*tensors)
        n, sizes = len(spec.captured.forward.fake_outputs), spec.captured.binder.read(tensors)
        residuals = [tensor_at(p, tensors, results[:n], results[n:]) for p in present_residuals(spec.captured)]
        symbols = [sizes[s] for s in spec.captured.backward_symbols]
        results_of = self.entry.trace.graph_module(*residuals, *symbols, *gradients)
        return tuple(None if results_of[i] is None else detached(results_of[i]) for i in spec.captured.slots)
