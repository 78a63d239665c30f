"""Everything that the code of methods depends on besides their arguments, as a text that means the same in every
process.

Everything reached has to be on a list of what can be told with certainty: code, defaults, closures and globals of the
user's own functions, constants, torch's pure operators. Anything else raises NotKeyed, and nothing is kept on disk.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import sympy
import torch

from ..frames import OURS, ROOMS, TORCH
from ..torch_private import bindings_file, is_binding, is_operator, python_implementations, torch_namespaces
from .attributes import cells_of
from .bytecode import ATTRIBUTE, instructions_of
from .value_keys import SCALARS

_ROWS = (tuple, list)
_FOLDERS = tuple(OURS + room + os.sep for room in ROOMS)
_STDLIB = os.path.dirname(os.__file__) + os.sep
_MARKS = getattr(sys.modules.get("typing_extensions"), "__file__", None)  # of what torch is about to drop
_PACKAGES = ("site-packages", "dist-packages")

TORCH_FILES = tuple(os.path.join(TORCH, *path.split("/")) for path in (
    "nn/functional.py", "functional.py", "_jit_internal.py", "autograd/function.py", "amp/autocast_mode.py",
    "_tensor.py",
))  # fmt: skip
"""Python files of torch whose functions ask for nothing but their arguments and what `torch_flags` tells."""
OUR_FILES = tuple(OURS + name for name in ("runtime/execution/aten/random.py", "runtime/execution/aten/philox.py"))
UNSURE = {"einsum", "scaled_dot_product_attention", "multi_head_attention_forward", "has_torch_function"}
"""torch's functions that choose by what is installed, or by switches of their own."""
PURE_MODULES = ("math", "_operator", "operator")
STATE = {"get_default_dtype", "is_grad_enabled"}
"""Functions of torch's bindings whose answer is part of every key."""
TYPES = (torch.Tensor, torch.finfo, torch.iinfo, torch.no_grad, torch.enable_grad, torch.Size)
PLAIN_BUILTINS = {
    *("abs", "all", "any", "bool", "bytes", "callable", "complex", "dict", "divmod", "enumerate", "filter", "float"),
    *("frozenset", "getattr", "hasattr", "int", "isinstance", "iter", "len", "list", "map", "max", "min", "next"),
    *("pow", "property", "range", "reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "type", "zip"),
}
_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_KNOWN = (*_LOADS, *ATTRIBUTE, "LOAD_FAST", "LOAD_CONST", "LOAD_CLOSURE", "LOAD_ASSERTION_ERROR", "LOAD_SMALL_INT",
          "LOAD_COMMON_CONSTANT")  # fmt: skip


class NotKeyed(Exception):
    """Something was reached of which it is not certain what it will be in another process (internal: not kept)."""


def fingerprint(functions: Sequence[Callable[..., Any]]) -> list[str]:
    """All that the functions depend on, one line for each part. Raises NotKeyed with the reason."""
    require_torch_itself()
    walk = _Walk()
    for function in functions:
        walk.function("method", function)
    return walk.parts


def value_text(path: str, value: Any) -> str:
    """The text of a constant. Raises NotKeyed for anything else."""
    if type(value) in SCALARS:
        return f"{type(value).__name__}:{value!r}"
    if type(value) in _ROWS:
        return f"{type(value).__name__}({','.join(value_text(path, v) for v in value)})"
    if type(value) is dict:
        return f"dict({','.join(f'{value_text(path, k)}={value_text(path, v)}' for k, v in value.items())})"
    if type(value) is slice:
        return f"slice{value_text(path, (value.start, value.stop, value.step))}"
    raise NotKeyed(f"`{path}` is a {type(value).__name__}, which is not known to be the same in another process")


class _Walk:
    """Follows names through functions, each function once."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.visited: dict[int, Any] = {}
        self.files: set[str] = set()

    # ------------------------------------------------------------------ functions
    def function(self, path: str, function: Any) -> None:
        """A function with its code, defaults, attributes and what it reads."""
        if id(function) in self.visited:
            self.parts.append(f"{path}: function {list(self.visited).index(id(function))}")
            return
        if not isinstance(function, types.FunctionType):
            raise NotKeyed(f"`{path}` is a {type(function).__name__}, no function")
        if getattr(function, "__builtins__", None) is not vars(builtins):
            raise NotKeyed(f"`{path}` has builtins of its own")
        # Noted before what it reads is followed: functions may read each other.
        self.visited[id(function)] = function
        code = function.__code__
        self.parts.append(f"{path}: {function.__module__}.{function.__qualname__} {code_sum(code)}")
        self.value(f"{path}.__defaults__", function.__defaults__)
        self.value(f"{path}.__kwdefaults__", function.__kwdefaults__)
        for name, attribute in sorted(vars(function).items()):
            self.value(f"{path}.{name}", attribute)
        if _is_library(code.co_filename):
            self._cells(path, function)
        else:
            self._file(path, code.co_filename)
            self._names(path, code, function.__globals__, cells_of(function))

    def _file(self, path: str, filename: str) -> None:
        """Kernels show lines of the user's source: they are as they were, too."""
        if filename in self.files:
            return
        self.files.add(filename)
        try:
            with open(filename, "rb") as file:
                self.parts.append(f"{filename} {hashlib.sha256(file.read()).hexdigest()}")
        except (OSError, ValueError):  # a name that no file can have is a ValueError
            raise NotKeyed(f"the source of `{path}` is in no file") from None

    def _cells(self, path: str, function: types.FunctionType) -> None:
        """A wrapper of a library: what it was made around."""
        for name, cell in cells_of(function).items():
            self.value(f"{path}.<{name}>", cell.cell_contents)

    def _names(self, path: str, code: types.CodeType, env: dict[str, Any], cells: dict[str, Any]) -> None:
        instructions = instructions_of(code)
        for at, instruction in enumerate(instructions):
            if instruction.opname.startswith(("IMPORT_", "LOAD_")) and not instruction.opname.startswith(_KNOWN):
                raise NotKeyed(f"`{path}` has a {instruction.opname}")
            if instruction.opname in _LOADS:
                self._name(path, instruction, instructions[at + 1 :], env, cells)
        for nested in code.co_consts:
            if isinstance(nested, types.CodeType):
                self._names(path, nested, env, cells)

    def _name(
        self, path: str, load: dis.Instruction, following: Sequence[dis.Instruction], env: dict[str, Any], cells: Any
    ) -> None:
        name, is_global = load.argval, load.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        if is_global and name not in env:
            _require_builtin(path, name)
            return
        if not is_global and name not in cells:
            return  # a variable of a function around this one, within the same code
        try:
            value = env[name] if is_global else cells[name].cell_contents
        except ValueError:
            raise NotKeyed(f"`{name}` has no value yet") from None
        self._chain(f"{path} {name}", value, following)

    def _chain(self, path: str, value: Any, following: Sequence[dis.Instruction]) -> None:
        """Follow `a.b.c` through modules and classes, then take what stands at the end."""
        for instruction in following:
            if instruction.opname not in ATTRIBUTE or not _has_parts(value):
                break
            path, value = f"{path}.{instruction.argval}", self._part(path, value, instruction.argval)
        self.value(path, value)

    def _part(self, path: str, owner: Any, name: str) -> Any:
        if isinstance(owner, type(torch.ops)) or type(owner).__name__ == "_OpNamespace":
            raise NotKeyed(f"`{path}.{name}` may be an operator that is defined elsewhere")
        try:
            return getattr(owner, name)
        except AttributeError:
            raise NotKeyed(f"`{path}` has no `{name}`") from None

    # ------------------------------------------------------------------ values
    def value(self, path: str, value: Any) -> None:
        """The value at the end of a path, or within it."""
        if isinstance(value, types.FunctionType):
            _require_pure(path, value)
            self.function(path, value)
        elif type(value) in _ROWS:
            self.parts.append(f"{path}: {type(value).__name__} of {len(value)}")
            for index, item in enumerate(value):
                self.value(f"{path}[{index}]", item)
        elif isinstance(value, types.BuiltinFunctionType):
            self.parts.append(f"{path}: {_builtin_text(path, value)}")
        elif isinstance(value, type):
            self.parts.append(f"{path}: {_type_text(path, value)}")
        elif type(value) is functools.partial:
            for name, part in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
                self.value(f"{path}.{name}", part)
        else:
            self.parts.append(f"{path}: {value_text(path, value)}")


def code_sum(code: types.CodeType) -> str:
    """A digest of code with its constants, names and lines, and of all code within it."""
    digest = hashlib.sha256()
    for part in _code_parts(code):
        digest.update(f"{len(part)}:".encode() + part)
    return digest.hexdigest()


def _code_parts(code: types.CodeType) -> Iterator[bytes]:
    yield from (code.co_code, code.co_linetable, getattr(code, "co_exceptiontable", b""))
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_firstlineno)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_name, code.co_filename)
    yield repr((counts, names)).encode()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield b"code"
            yield from _code_parts(constant)
        else:
            yield f"{type(constant).__name__}:{_constant_text(constant)}".encode()


def _constant_text(constant: Any) -> str:
    """Sets of constants have another order in another process."""
    if isinstance(constant, frozenset):
        return repr(sorted(f"{type(c).__name__}:{c!r}" for c in constant))
    return repr(tuple(map(_constant_text, constant))) if isinstance(constant, tuple) else repr(constant)


def _is_library(filename: str) -> bool:
    return filename.startswith((TORCH, *_FOLDERS)) or _is_stdlib(filename) or filename == _MARKS


def _is_stdlib(filename: str) -> bool:
    return filename.startswith(_STDLIB) and not any(f"{os.sep}{p}{os.sep}" in filename for p in _PACKAGES)


def _has_parts(value: Any) -> bool:
    """True if an attribute of the value is to be followed: of constants and functions it is told with them."""
    return not isinstance(value, (*SCALARS, *_ROWS, dict, slice, torch.Tensor, types.FunctionType))


def _require_builtin(path: str, name: str) -> None:
    value: Any = getattr(builtins, name, None)
    own = isinstance(value, types.BuiltinFunctionType | type) and value.__module__ == "builtins"
    own = own and value.__name__ == name  # and no other in its place
    error = isinstance(value, type) and issubclass(value, BaseException)
    if not own or (name not in PLAIN_BUILTINS and not error):
        raise NotKeyed(f"`{path}` uses the builtin `{name}`")


def _require_pure(path: str, function: types.FunctionType) -> None:
    """A function of a library has to be one of those that ask for nothing but their arguments."""
    filename = function.__code__.co_filename
    if filename.startswith(TORCH):
        fit = filename in TORCH_FILES and function.__name__ not in UNSURE
    else:
        fit = filename in OUR_FILES or not _is_library(filename)
    if not fit:
        raise NotKeyed(f"`{path}` is a function of a library that may ask for more than its arguments")


def _builtin_text(path: str, function: types.BuiltinFunctionType) -> str:
    """A function without code: one of torch's operators, or of Python's mathematics."""
    owner, name = function.__self__, function.__name__
    module = owner.__name__ if isinstance(owner, types.ModuleType) else ""
    own = module in PURE_MODULES or (module == "builtins" and name in PLAIN_BUILTINS)
    if name in UNSURE or not (own or is_operator(function) or (is_binding(function) and name in STATE)):
        raise NotKeyed(f"`{path}` is a compiled function of which it is not known what it reads")
    return f"builtin {module}.{name}"


def _type_text(path: str, value: type) -> str:
    if value in TYPES or (value.__module__ == "builtins" and getattr(builtins, value.__name__, None) is value):
        return f"type {value.__module__}.{value.__qualname__}"
    raise NotKeyed(f"`{path}` is a class of its own")


# ------------------------------------------------------------------ torch itself
def require_torch_itself() -> None:
    """Raises NotKeyed where the user put functions of their own into torch."""
    for namespace, names in torch_namespaces():
        for name, value in names.items():
            if _is_foreign(value):
                raise NotKeyed(f"`{namespace}.{name}` is not torch's own")


def _is_foreign(value: Any) -> bool:
    """True if the value is a function that neither torch nor another library has written."""
    return isinstance(value, types.FunctionType) and not _is_library(value.__code__.co_filename)


def replaced_in_torch() -> dict[str, Any]:
    """The functions in torch's namespaces that are not torch's own, or other ones since fusegrad was imported.

    Operations are decomposed by Python code of torch's, which calls functions by name. `torch.nn.functional`, into
    which libraries put kernels of theirs, is not among what it calls; nor is a name that torch did not have.
    """
    replaced = {}
    for namespace, names in torch_namespaces():
        for name, value in names.items() if namespace in _CALLED else ():
            before = _OWN[namespace].get(name)
            is_other = before is not None and before is not value and getattr(value, "__name__", None) != name
            if is_other or (before is not None and _is_foreign(value)):
                replaced[f"`{namespace}.{name}`"] = value
    return replaced


_CALLED = ("torch", "torch.Tensor", "torch.special", "torch.linalg", "torch.fft")
_OWN = {
    where: {n: v for n, v in names.items() if isinstance(v, types.BuiltinFunctionType | types.FunctionType)}
    for where, names in torch_namespaces()
    if where in _CALLED
}


def torch_flags() -> list[str]:
    """Switches of torch that decide which operations a call becomes, beyond those that are compared at every call."""
    backends, attention = torch.backends, cast(Any, torch.backends.cuda)
    flags = (
        torch.get_float32_matmul_precision(), backends.cudnn.enabled, backends.cudnn.benchmark,
        backends.cudnn.deterministic, backends.mkldnn.enabled, torch.is_grad_enabled(),
        attention.flash_sdp_enabled(), attention.math_sdp_enabled(), attention.mem_efficient_sdp_enabled(),
    )  # fmt: skip
    return [repr(flags), *_other_names(), *sorted(python_implementations())]


def _other_names() -> Iterator[str]:
    """Where torch has a function under another name than its own: `Tensor.sigmoid = Tensor.tanh` adds one."""
    for namespace, names in torch_namespaces():
        for name, value in names.items():
            if callable(value) and (own := getattr(value, "__name__", name)) != name:
                yield f"{namespace}.{name} is {own}"


def sources_of_ours() -> Iterator[str]:
    """fusegrad's own sources by size and time: a checkout that is worked on is another version at every change."""
    for room in ROOMS:
        for folder, folders, files in os.walk(OURS + room):
            folders[:] = sorted(f for f in folders if f != "__pycache__")
            for name in sorted(files):
                if name.endswith(".py"):
                    stat = os.stat(os.path.join(folder, name))
                    yield f"{folder}/{name} {stat.st_size} {stat.st_mtime_ns}"


def torch_installation() -> list[str]:
    """Which torch and sympy these are."""
    stats = [os.stat(f) for f in (torch.__file__, bindings_file(), sympy.__file__) if f]
    return [torch.__version__, str(torch.version.git_version), *(f"{s.st_size} {s.st_mtime_ns}" for s in stats)]
