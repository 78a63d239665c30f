"""The user's class as source that stands alone, for the self-test of an exported module."""

from __future__ import annotations

import ast
import builtins
import sys
import textwrap
from collections.abc import Iterator
from symtable import SymbolTable, symtable
from types import FunctionType, ModuleType
from typing import Any

import torch

from ....ir.text.syntax_trees import parse, source_of

PACKAGE = __name__.split(".")[0]
LITERALS = (int, float, bool, str, type(None))
LIBRARIES = ("torch", "math", "typing", "functools", "collections", "operator", "itertools")
FUTURE = "from __future__ import annotations\n"


class SourceMissing(Exception):
    """The text of a class cannot be read, or reads what cannot be written down; the argument says why."""


def as_written(cls: type, name: str) -> str:
    """The class under another name, after everything of its module that it reads. Raises SourceMissing."""
    definition = _definition(cls)
    assert isinstance(definition, ast.ClassDef)
    undecorated = "\n".join(_source(cls).splitlines()[definition.lineno - 1 :])
    text = undecorated.replace(f"class {cls.__name__}", f"class {name}", 1)
    needed = dict(_read_by(definition, cls, {cls.__name__, "torch"}))
    lines = [_bound(word, value) for word, value in needed.items()]
    imports = sorted(line for line in lines if line.startswith(("import ", "from ")))
    constants = [line for line in lines if "\n" not in line and line not in imports]
    functions = [line for line in lines if "\n" in line]
    module = "\n\n\n".join(part for part in ("\n".join([*imports, *constants]), *functions, text.rstrip()) if part)
    _require_standing(module, name)
    return module


def _source(item: Any) -> str:
    try:
        return textwrap.dedent(source_of(item))
    except (OSError, TypeError) as error:
        raise SourceMissing(f"the source of {item.__name__} cannot be read") from error


def _definition(item: Any) -> ast.stmt:
    return parse(_source(item)).body[0]


def _read_by(definition: ast.stmt, owner: Any, visited: set[str]) -> Iterator[tuple[str, Any]]:
    """The names that a definition reads from its module, with their values; what a function reads comes before it."""
    space, read = vars(sys.modules[owner.__module__]), _globals(symtable(ast.unparse(definition), "<source>", "exec"))
    own = [*definition.bases, *definition.body] if isinstance(definition, ast.ClassDef) else [definition]
    for node in (n for part in own for n in ast.walk(part)):
        if not isinstance(node, ast.Name) or node.id in visited or node.id not in read & space.keys():
            continue
        visited.add(node.id)
        value = space[node.id]
        if isinstance(value, FunctionType) and not _of_library(value):
            yield from _read_by(_definition(value), value, visited)
        yield node.id, value


def _globals(table: SymbolTable) -> set[str]:
    """The names that are of the module where they are read, and not of the language."""
    is_module = table.get_type() == "module"
    own = {s.get_name() for s in table.get_symbols() if s.is_referenced() and (is_module or s.is_global())}
    return {n for n in own.union(*map(_globals, table.get_children())) if not hasattr(builtins, n)}


def _of_library(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).split(".")[0] in LIBRARIES


def _bound(name: str, value: Any) -> str:
    """A line, or a definition, that binds the name."""
    if isinstance(value, ModuleType) and value.__name__.split(".")[0] == PACKAGE:
        raise SourceMissing(f"it reads {name}, which the file is to do without")
    if isinstance(value, ModuleType):
        return f"import {name}" if value.__name__ == name else f"import {value.__name__} as {name}"
    if isinstance(value, LITERALS) or (isinstance(value, tuple) and all(isinstance(v, LITERALS) for v in value)):
        return f"{name} = {value!r}"
    if isinstance(value, torch.dtype):
        return f"{name} = {value}"
    if _of_library(value) and hasattr(value, "__name__"):
        alias = "" if value.__name__ == name else f" as {name}"
        return f"from {value.__module__} import {value.__name__}{alias}"
    if isinstance(value, FunctionType) and value.__name__ == name and not value.__closure__:
        return _source(value).rstrip()
    raise SourceMissing(f"it reads {name}, which is a {type(value).__name__}")


def _require_standing(text: str, name: str) -> None:
    """The text has to run by itself."""
    space: dict[str, Any] = {"torch": torch, "__name__": "as_written"}
    try:
        exec(compile(FUTURE + text, "<as written>", "exec"), space)
    except Exception as error:
        raise SourceMissing(f"its source does not run by itself: {error}") from error
    if not isinstance(space.get(name), type):
        raise SourceMissing("its source does not define it")
