"""Kernels compiled ahead of time, without a GPU: per target their text, their binaries, and what a launch needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ....codegen import TARGETS, Buffer, Kernel, Kernels, Pointer, Ref, Scalar
from ....codegen import module as module_of
from ....ir import Value
from ....ir.passes.fuse import Group
from ....ir.text.document import size_document, sizes_document
from ....ir.text.relations import relation_document, relations
from ...kernels.cross_compile.pool import Binary, compile_for
from ...kernels.triton_module import TRITON_DTYPE
from ..gather.gathered import Gathered, Part, export_error, gather_function
from .archive import BINARIES, canonical

NOTE = (
    "arguments are passed in this order, then one null pointer for each hidden parameter, but for the first where "
    "workspace_bytes, of each program, is not 0: memory of so many bytes times the grid; sizes are 32-bit integers; "
    "scratch that is zeroed is left at zero; of steps with one number the first whose conditions hold is meant; "
    "a kernel is in the files of its symbol; backward reads what residuals names, then the gradients"
)


def target_files(target_class: Any, args: Sequence[Any], target: str) -> dict[str, bytes]:
    """The files below `targets/<name>`: kernels.py, launch.json, and the binaries. Raises ExportError."""
    exported = gather_function(target_class, args, target)
    folder = f"targets/{target.replace(':', '_')}"
    steps = list(_steps(exported))
    # All kernels of the Function are compiled together: one text, one module.
    kernels = list({k.name: k for _, _, _, version in steps for k in version.kernels}.values())
    text = module_of(kernels)
    binaries = compile_for(kernels, text, [target])
    files = {f"{folder}/kernels.py": text.encode()}
    for kernel in kernels:
        files |= _binaries(exported, folder, kernel, binaries[kernel.name][target])
    steps_data = [
        _step(exported, *step, binaries={k.name: binaries[k.name][target] for k in step[3].kernels}) for step in steps
    ]
    # The rest of what a host needs: memory, arguments and the calls that are no kernels.
    launch = {
        "target": target,
        "note": NOTE,
        "residuals": [[p.kind, p.index] for p in exported.residuals],
        "between": [call for part in exported.parts for call in _calls(part)],
        "steps": steps_data,
    }
    return {**files, f"{folder}/launch.json": canonical(launch)}


def _calls(part: Part) -> Iterator[dict[str, Any]]:
    """The steps that are no kernels: library calls and views of what is there."""
    for at, step in enumerate(part.steps):
        if not isinstance(step, Group):
            operation = step.value.params.get("op", step.value.prim)
            yield {"method": part.method, "step": at, "operation": operation}


Step = tuple[str, int, Group, Kernels]


def _steps(exported: Gathered) -> Iterator[Step]:
    """(method, number, group, version of its kernels); of several versions the first whose conditions hold is meant."""
    for part in exported.parts:
        for at, versions in part.kernels.items():
            group = part.steps[at]
            assert isinstance(group, Group)
            yield from ((part.method, at, group, version.kernels) for version in versions)


def _binaries(exported: Gathered, folder: str, kernel: Kernel, binary: Binary) -> dict[str, bytes]:
    if binary.error is not None:
        reason = f"its kernel {kernel.name} does not compile for {exported.target}: {binary.error.splitlines()[0]}"
        raise export_error(exported.compiler, reason)
    published = {kind: content for kind, content in binary.asm.items() if f".{kind}" in BINARIES}
    return {
        f"{folder}/{kernel.name}.{kind}": content if isinstance(content, bytes) else content.encode()
        for kind, content in published.items()
    }


def _step(
    exported: Gathered, method: str, at: int, group: Group, version: Kernels, binaries: dict[str, Binary]
) -> dict[str, Any]:
    outputs = zip(group.graph.outputs, group.graph.output_strides, strict=True)
    return {
        "method": method,
        "step": at,
        "inputs": [_memory(outer, own, own.params["strides"]) for outer, own in
                   zip(group.inputs, group.graph.inputs, strict=True)],
        "outputs": [_memory(outer, own, strides) for outer, (own, strides) in zip(group.outputs, outputs, strict=True)
                    if own is not None],
        "temporaries": [_buffer(b) for b in version.temporaries],
        "kernels": [_kernel(exported, k, binaries[k.name]) for k in version.kernels],
    }  # fmt: skip


def _memory(outer: Value, own: Value, strides: Any) -> dict[str, Any]:
    name = outer.params["name"] if outer.prim == "input" else outer.origin.name or f"v{outer.id}"
    return {"name": name, "dtype": own.dtype, "shape": sizes_document(own.shape), "strides": sizes_document(strides)}


def _buffer(buffer: Buffer) -> dict[str, Any]:
    layout = {"shape": sizes_document(buffer.shape), "strides": sizes_document(buffer.strides)}
    return {"name": buffer.name, "dtype": buffer.dtype, **layout, "zeroed": buffer.zeroed}


def _kernel(exported: Gathered, kernel: Kernel, binary: Binary) -> dict[str, Any]:
    """The facts that a host without Triton needs to launch a kernel."""
    warp = TARGETS[exported.target].warp
    return {
        "symbol": kernel.name,
        "grid": [size_document(kernel.grid), 1, 1],
        "block": [kernel.num_warps * warp, 1, 1],
        "warps": kernel.num_warps,
        "stages": kernel.num_stages,
        "shared_bytes": binary.shared,
        "workspace_bytes": binary.workspace,
        "registers": binary.registers,
        "spilled_bytes": binary.spills,
        "arguments": [_argument(a) for a in kernel.arguments],
        "hidden_pointers": _hidden(kernel, binary),
        "aligned_to_16_bytes": [a.name for a in kernel.arguments if isinstance(a, Pointer)],
        "constants": kernel.constants,
        "scratch": [_buffer(b) for b in kernel.scratch],
        "compiled_for_sizes": {s.name: value for s, value in kernel.pinned.items()},
        "conditions": [relation_document(c) for c in relations(list(kernel.guards))],
    }


def _argument(argument: Pointer | Scalar) -> dict[str, Any]:
    match argument:
        case Pointer(name=name, buffer=Ref(kind=kind, index=index), dtype=dtype):
            return {"name": name, "type": f"*{TRITON_DTYPE[dtype]}", "memory": [kind, index]}
        case Scalar(name=name, value=value):
            return {"name": name, "type": "i32", "value": size_document(value)}


def _hidden(kernel: Kernel, binary: Binary) -> int:
    """The number of parameters that the compiler added behind the arguments: scratch memory, unused here."""
    ptx, amd = binary.asm.get("ptx"), binary.asm.get("amdgcn")
    if isinstance(ptx, str):
        head = ptx.split(".entry", 1)[1].split(")", 1)[0]
        return head.count(".param") - len(kernel.arguments)
    assert isinstance(amd, str)
    metadata = amd.split(".amdgpu_metadata", 1)[-1].split(".end_amdgpu_metadata", 1)[0]
    return len(re.findall(r"\.value_kind:\s+(?:global_buffer|by_value)", metadata)) - len(kernel.arguments)
