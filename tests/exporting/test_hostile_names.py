"""Names, file names and constants that try to leave their place in a text: the text's tree stays what it should be."""

from __future__ import annotations

import ast
import linecache
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import fusegrad

Tensor = torch.Tensor
PLANTED = "planted_by_a_name"
"""What a name that got out of its place would bind."""
HOSTILE = [
    "quo'te", 'dou"ble', '"""', "'''", f"new\nline\n{PLANTED} = 1\n#", f"cr\r{PLANTED} = 1", "{", "}", "brace{x}", "%s",
    "tl", "triton", "class", "x" * 10_000, "\x1b[31m", "\x0c", "#", "\\", "\\n", "\u202e", "\u2028", "日本", "", " ",
    f'"""\n{PLANTED} = 1\n"""', "*/", "//", "?\\", "</script><script>alert(1)</script>", "$(x)", "../../x", "\ud800",
]  # fmt: skip
ARGUMENTS = [
    "tl", "triton", "torch", "range", "print", "self", "float", "min", "acc", "pid", "BLOCK_N", "PROGRAMS", "first",
    "row", "N", "x_ptr", "_", "__", "日本", "mask", "grid", "exec", "match", "type", "int", "at", "std", "auto",
    "x" * 3000,
]  # fmt: skip
SOURCE = '''
import torch


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward({x}, w, mode):
        return ({x} * w).sigmoid() + {constant}

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        s = (x * w).sigmoid()
        d = g * s * (1 - s)
        return d * w, (d * x).sum(0), None
'''


def scaled(name: str = "Scaled", x: str = "x", file: str = "hostile.py", constant: str = "1.0") -> Any:
    """The class, as a file of this name would define it."""
    text = SOURCE.format(x=x, constant=constant)
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    module = types.ModuleType("hostile_names_module")
    sys.modules[module.__name__] = module
    exec(compile(text, file, "exec"), vars(module))
    module.Scaled.__name__ = module.Scaled.__qualname__ = name
    return module.Scaled


def arguments(mode: str = "mean") -> tuple[Any, ...]:
    torch.manual_seed(0)
    return torch.randn(5, 7, requires_grad=True), torch.randn(7, requires_grad=True), mode


def emitted(cls: Any, *given: Any) -> str:
    """The kernels for a GPU, after the calls gave what the class gives."""
    fast, given = fusegrad.compile(cls, backend="interpret"), given or arguments()
    for made, expected in zip(results(fast, given), results(cls, given), strict=True):
        torch.testing.assert_close(made, expected, equal_nan=True)
    return fusegrad.explain(fast, *given).module


def results(function: Any, given: tuple[Any, ...]) -> list[Tensor]:
    y = function.apply(*given)
    return [y.detach(), *torch.autograd.grad(y.sum(), given[:2])]


def tree(text: str) -> list[str]:
    """A text's tree, names by the order in which a function has them: what it does, not what it is called."""
    return [_numbered(statement) for statement in ast.parse(text).body]


def _numbered(statement: ast.stmt) -> str:
    names: dict[str, str] = {}
    for node in ast.walk(statement):
        if isinstance(node, ast.keyword):
            continue  # the word of a function that is called, not a name of ours
        for field in ("id", "arg", "name", "attr"):
            if isinstance(value := getattr(node, field, None), str):
                setattr(node, field, names.setdefault(value, f"name{len(names)}"))
    return ast.dump(statement)


PLAIN = tree(emitted(scaled()))
OTHER_NAMES = ("first", "second", "a_name_that_leaves_no_room_on_its_line", "long" * 750)
OTHERWISE_NAMED = [tree(emitted(scaled(x=x))) for x in OTHER_NAMES]
"""Where forward's name for it is not backward's; how long it is decides what stands on a line of its own."""


def exported(cls: Any, path: Path, *given: Any) -> str:
    fusegrad.export(fusegrad.compile(cls, backend="interpret"), *(given or arguments()), path=path)
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_class_name_stays_a_name(name: str, tmp_path: Path) -> None:
    try:
        cls = scaled(name)
    except (ValueError, UnicodeEncodeError):
        return  # Python itself refuses it
    assert tree(emitted(cls)) == PLAIN
    try:
        text = exported(cls, tmp_path / "out.py")
    except fusegrad.FusegradError as error:
        assert not name.isidentifier() or name in ("tl", "triton", "class"), error
        return
    assert name.isidentifier() and f"class {name}(" in text
    ast.parse(text)


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_file_name_stays_in_its_comment(name: str, tmp_path: Path) -> None:
    cls = scaled(file=f"{name}.py")
    text = emitted(cls)
    assert tree(text) == PLAIN and all(line.isprintable() for line in text.split("\n"))
    module = exported(cls, tmp_path / "out.py")
    assert not any(isinstance(n, ast.Name) and n.id == PLANTED for n in ast.walk(ast.parse(module)))
    assert "<script>alert" not in exported(cls, tmp_path / "out.html")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_name_stays_a_name(name: str, tmp_path: Path) -> None:
    cls = scaled(x=name)
    assert tree(emitted(cls)) in OTHERWISE_NAMED
    try:
        ast.parse(exported(cls, tmp_path / "out.py"))
    except fusegrad.FusegradError:
        assert name in ("tl", "triton", "torch")


@pytest.mark.parametrize("mode", HOSTILE, ids=ascii)
def test_a_string_argument_stays_in_its_quotes(mode: str, tmp_path: Path) -> None:
    given = arguments(mode)
    assert tree(emitted(scaled(), *given)) == PLAIN
    module = ast.parse(exported(scaled(), tmp_path / "out.py", *given))
    assert not any(isinstance(n, ast.Name) and n.id == PLANTED for n in ast.walk(module))


@pytest.mark.parametrize(
    "constant", ["float('nan')", "float('inf')", "-float('inf')", "-0.0", "1e-45", "1e308", "5e-324", "2**40", "True"]
)
def test_constants_of_every_kind(constant: str) -> None:
    ast.parse(emitted(scaled(constant=constant)))
