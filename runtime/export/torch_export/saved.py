"""Programs of torch.export that call operators of ours: saved with what is needed to make these again, and loaded.

An operator is not in such a file: it stands there by its name, which tells what it computes. Loading the file imports
the module that decorates the class, captures it for the same arguments, and has to end with the same name.
"""

from __future__ import annotations

import importlib
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ....ir.errors import FusegradError, ParseError
from ...capture.graph_mode import outside_graph
from ...dynamo.forward_operator import OperatorRules, Origin, Root, unit_operator
from ...dynamo.operators import NAMESPACE, known
from ...execution.aten import random
from ...functorch.unit import TransformableGraph
from ...persistence.literals import NoLiteral, constant_document, constant_from
from ...persistence.stored_specialization import example_of as described

Tensor = torch.Tensor
Doc = dict[str, Any]
FILE = "fusegrad_operators.json"
FORMAT = 1


class SavedProgramError(FusegradError):
    """A program whose operators cannot be written down, or cannot be made again from what was."""

    message = "{path}: operator {operator}: {fact}\n  at:   {where}\n  fix:  {fix}"


def save_program(program: torch.export.ExportedProgram, path: str | os.PathLike[str]) -> None:
    """`torch.export.save`, with what `load_program` needs to make fusegrad's operators again.

    Args:
        program: A program that calls compiled Functions. Their classes have to be where another process can import
            them.
        path: The file to write.

    Raises:
        SavedProgramError: where a class cannot be imported by its name.
    """
    documents = [_document(name, str(path)) for name in sorted(set(_called_operators(program.graph_module)))]
    text = json.dumps({"format": FORMAT, "operators": documents})
    torch.export.save(program, os.fspath(path), extra_files={FILE: text})


def load_program(path: str | os.PathLike[str]) -> torch.export.ExportedProgram:
    """`torch.export.load`, once the operators that the program calls are there: imports the modules of their classes.

    The operator of `fusegrad.random` needs none. So the file is to be trusted as those modules are.

    Args:
        path: A file that `save_program` wrote.

    Returns:
        The program.

    Raises:
        SavedProgramError: where a class is no longer what it was.
    """
    for document in _operators(str(path)):
        if document["name"] not in known:
            _register_operator(document, str(path))
    return torch.export.load(os.fspath(path))


def _called_operators(module: torch.fx.GraphModule) -> Iterator[str]:
    for inner in module.modules():
        graph = getattr(inner, "graph", None)
        for node in graph.nodes if isinstance(graph, torch.fx.Graph) else ():
            if getattr(node.target, "namespace", None) == NAMESPACE and node.target is not random.OPERATOR:
                yield node.target._schema.name.split("::")[1]


# ------------------------------------------------------------------ write
def _document(name: str, path: str) -> Doc:
    origin: Origin = known[name].origin
    root, spec = origin.root, origin.root.spec
    fakes = iter(spec.captured.forward.fakes)
    try:
        arguments = [
            {"tensor": described(next(fakes), spec.captured)} if i in spec.captured.slots else constant_document(a)
            for i, a in enumerate(spec.captured.arguments)
        ]
        steps = constant_document(origin.steps)
    except NoLiteral as error:
        raise _program_error(path, name, f"an argument is {error}", "pass numbers, texts, dtypes or None.") from None
    examples = [{"tensor": _layout(e)} if isinstance(e, Tensor) else e for e in origin.examples]
    return {
        "name": name, "class": _qualified_place(root, path, name), "arguments": arguments, "backend": root.backend,
        "copies": root.copies, "steps": steps, "examples": examples,
    }  # fmt: skip


def _layout(tensor: Tensor) -> list[Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [list(tensor.shape), list(tensor.stride()), dtype, str(tensor.device), tensor.requires_grad]


def _qualified_place(root: Root, path: str, name: str) -> str:
    """ "module:qualname", where another process finds the compiled class or function."""
    cls = root.compiler.user.original
    module, qualname = cls.__module__, (root.compiler.user.plain_function or cls).__qualname__
    if module == "__main__" or "<locals>" in qualname or _compiler_at(module, qualname) is not root.compiler:
        fix = "decorate it in a module, under its own name, so that the loading process can import it from there."
        raise _program_error(path, name, f"{module}.{qualname} cannot be imported by another process", fix)
    return f"{module}:{qualname}"


def _compiler_at(module: str, qualname: str) -> Any:
    """The compiler of what is found there; None where there is nothing of ours."""
    try:
        owner: Any = importlib.import_module(module)
        for part in qualname.split("."):
            owner = getattr(owner, part)
    except (ImportError, AttributeError):
        return None
    return getattr(owner, "_fusegrad", None)


def _program_error(path: str, operator: str, fact: str, fix: str) -> SavedProgramError:
    return SavedProgramError(path=os.path.basename(path), operator=operator, fact=fact, fix=fix)


# ------------------------------------------------------------------ read
def _operators(path: str) -> list[Doc]:
    """The operators that `save_program` wrote; none for a program that calls no operator of ours."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.split("/")[-1] == FILE]
        table: Doc = json.loads(archive.read(names[0])) if names else {"format": FORMAT, "operators": []}
    if table.get("format") != FORMAT:
        raise _program_error(
            path, "", f"format {table.get('format')!r} is not {FORMAT}", "save it with the same fusegrad."
        )
    return list(table["operators"])


def _register_operator(document: Doc, path: str) -> None:
    name, place = document["name"], document["class"]
    compiler = _compiler_at(*place.split(":"))
    if compiler is None:
        raise _program_error(
            path, name, f"{place} is no compiled Function", "import path and versions as when it was saved."
        )
    try:
        arguments = [_value(a, name) for a in document["arguments"]]
        examples = [_value(e, name) for e in document["examples"]]
        steps = constant_from(document["steps"], {}, name)
    except (ParseError, TypeError, ValueError) as error:
        raise _program_error(path, name, f"it cannot be read: {error}", "save the program again.") from error
    # Capturing again registers the operator, under a name that says what it computes.
    with outside_graph():
        spec = compiler.specialization(arguments)
    if spec is not None:
        forward = OperatorRules(compiler, spec, document["backend"], document["copies"], recorded=True, alone=True)
        if steps:
            unit_operator(unit_of(forward, steps), examples)
    if name not in known:
        fix = "load it with the sources, the globals and the torch that it was saved with, or export it again."
        raise _program_error(path, name, f"{place} is no longer what it was when the program was saved", fix)


def _value(data: Any, at: str) -> Any:
    if not isinstance(data, dict) or "tensor" not in data:
        return constant_from(data, {}, at)
    shape, strides, dtype, device, needs = data["tensor"]
    tensor = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device=device)
    return tensor.zero_().requires_grad_(needs)


def unit_of(forward: OperatorRules, steps: Sequence[Any]) -> TransformableGraph:
    """The unit that these steps derive."""
    unit, remaining = forward.unit(steps)
    for kind, *facts in remaining:
        unit = unit.derive(kind, *facts)
    return unit


__all__ = ["SavedProgramError", "load_program", "save_program"]
