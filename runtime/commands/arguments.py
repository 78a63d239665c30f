"""The arguments of commands: a class by module or file, and its arguments as specifications or Python literals.

module:Class "bf16[8192,4096]" 1e-6         file.py:Class --args "bf16[8192,4096]" None
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...ir.errors import FusegradError
from ...tracer.frames import where_raised
from ..settings.suggestions import suggestion
from ..values.tensor_specs import is_spec

HERE = "the command line"
FLOATS = {"inf", "-inf", "nan"}


class TargetError(FusegradError, ValueError):
    """A class that a command was given cannot be found, or cannot be imported."""

    message = "{target}: {detail}\n  at:   {where}\n  fix:  {fix}"


def add_target(parser: argparse.ArgumentParser) -> None:
    """The class and its arguments, after it or behind --args."""
    parser.add_argument("target", help="module:Class or file.py:Class, compiled or not")
    help_ = 'tensors as "f32[64,128]" (for export and explain "f32[M,N]", too), anything else as a Python literal: 1e-6'
    parser.add_argument("arguments", nargs="*", help=help_)
    parser.add_argument("--args", nargs="+", default=[], metavar="ARG", help="the same, behind an option")


DEVICE = 'of the kernels: a device ("h100", "4090", "mi300x") or a target ("cuda:80", "hip:gfx942")'


def add_device(parser: argparse.ArgumentParser, default: str | None = None, more: str = "") -> None:
    """--target; `--gpu` and `--device` are names that it had."""
    parser.add_argument(
        "--target", "--gpu", "--device", dest="device", metavar="TARGET", default=default, help=DEVICE + more
    )


def call_of(options: argparse.Namespace) -> tuple[Any, list[Any]]:
    """The class (or function) and the arguments that a command was given."""
    return load_target(options.target), [parse_argument(a) for a in (*options.arguments, *options.args)]


def parse_argument(text: str) -> Any:
    """A specification stays one; a literal is what Python reads; `torch.float16` a dtype; other words are text."""
    text = text.strip()
    if is_spec(text):
        return text
    if text in FLOATS:
        return float(text)
    if text.startswith("torch.") and isinstance(dtype := getattr(torch, text[6:], None), torch.dtype):
        return dtype
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# ------------------------------------------------------------------ the class
def load_target(target: str) -> Any:
    """Load what `module:Class` or `file.py:Class` names. Raises TargetError, with what may have been meant."""
    place, colon, attribute = target.rpartition(":")
    if not colon or not place or not attribute:
        raise _target_error(target, "it names no class in a module", f"write {_with_colon(target)}")
    value: Any = _module(target, place)
    for name in attribute.split("."):
        if not hasattr(value, name):
            kind = "module" if isinstance(value, ModuleType) else "class"
            detail = f"cannot be imported: the {kind} {value.__name__} has no {name!r}"
            raise _target_error(target, detail, _suggest_class(value, name))
        value = getattr(value, name)
    return value


def _with_colon(target: str) -> str:
    module, dot, name = target.strip(":").rpartition(".")
    return f"{module}:{name}" if dot and name != "py" else f"{target.strip(':')}:Class"


def _module(target: str, place: str) -> ModuleType:
    try:
        return _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise _import_error(target, error) from error
        detail = f"cannot be imported: there is no module {error.name!r} here"
        raise _target_error(target, detail, _suggest_module(error.name)) from error
    except FileNotFoundError as error:
        folder = next((p for p in Path(place).parents if p.is_dir()), Path())
        fix = _meant(Path(place).name, (p.name for p in folder.glob("*.py")))
        raise _target_error(target, f"cannot be imported: there is no file {place}", fix) from error
    except Exception as error:
        raise _import_error(target, error) from error


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    """A file as the module that a script beside it would import."""
    if not path.is_file():
        raise FileNotFoundError(path)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    loaded = sys.modules.get(path.stem)
    if loaded is not None and Path(getattr(loaded, "__file__", None) or "").resolve() == path.resolve():
        return loaded
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if path.stem not in sys.stdlib_module_names:
        sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------ what may have been meant
def _import_error(target: str, error: Exception) -> TargetError:
    place = where_raised(error)
    fact = f"importing it raises {type(error).__name__}: {error} ({place})"
    return _target_error(target, fact, "run the file with python; it has to import without errors")


def _target_error(target: str, detail: str, fix: str) -> TargetError:
    return TargetError(target=target, detail=detail, fix=fix, where=HERE)


def _suggest_class(value: Any, name: str) -> str:
    functions = [n for n, v in vars(value).items() if isinstance(v, type) and issubclass(v, torch.autograd.Function)]
    candidates = [n for n, v in vars(value).items() if callable(v) and not n.startswith("_")]
    return _meant(name, dict.fromkeys([*functions, *candidates]), functions)


def _suggest_module(missing: str) -> str:
    parent, _, last = missing.rpartition(".")
    paths = importlib.import_module(parent).__path__ if parent else None
    names = [m.name for m in pkgutil.iter_modules(paths)]
    near = suggestion(last, set(names) - sys.stdlib_module_names, alike=0.8)
    prefix = f"{parent}." if parent else ""
    return f"did you mean {prefix}{near}?" if near else "write module:Class, importable from here, or file.py:Class"


def _meant(name: str, candidates: Iterable[str], listed: Sequence[str] = ()) -> str:
    """The nearest of some names, and a few of those that there are."""
    near = suggestion(name, candidates)
    choices = f"there are {', '.join(sorted(listed)[:8])}" if listed else "write module:Class or file.py:Class"
    return f"did you mean {near}?" + (f" ({choices})" if listed else "") if near else choices
