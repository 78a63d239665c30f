"""Whose code something is: the package of the class that is compiled, or another one that is installed.

What is installed (Python's own library, site-packages) counts by identity and is not looked into, as torch is; but for
the package in which the compiled class itself lives.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types
from collections.abc import Iterable
from typing import Any

from .attributes import instance_dict, is_a, module_of

_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_STANDARD = tuple({os.path.realpath(p) + os.sep for p in (sysconfig.get_path("stdlib"), os.path.dirname(os.__file__))})


def top_of(module: Any) -> str:
    """The outermost package of a module's name."""
    return module.split(".")[0] if type(module) is str else ""


def home_of(value: Any) -> str:
    """The outermost package of a function, a class or a module."""
    if is_a(value, types.FunctionType):
        return top_of(value.__globals__.get("__name__"))
    if is_a(value, types.MethodType):
        return home_of(value.__func__)
    return top_of(instance_dict(value).get("__name__") if is_a(value, types.ModuleType) else module_of(value))


def homes_of(functions: Iterable[Any]) -> frozenset[str]:
    """The packages that functions are part of, and those of what they wrap."""
    homes = set()
    for function in functions:
        for _ in range(8):
            homes.add(home_of(function))
            inner = instance_dict(function).get("__wrapped__") if is_a(function, types.FunctionType) else None
            if inner is None:
                break
            function = inner
    return frozenset(homes - {""})


def is_foreign(value: Any, homes: frozenset[str]) -> bool:
    """True if something is of an installed package that is none of these."""
    if is_a(value, types.MethodType):
        value = value.__func__
    if home_of(value) in homes:
        return False
    if is_a(value, types.FunctionType):
        return is_installed_file(value.__code__.co_filename)
    name = instance_dict(value).get("__name__") if is_a(value, types.ModuleType) else module_of(value)
    return is_installed(top_of(name))


@functools.lru_cache(maxsize=4096)
def is_installed_file(filename: str) -> bool:
    """True if a source file belongs to Python itself or to an installed package."""
    packaged = any(part in filename for part in _INSTALLED)
    return packaged or filename.startswith("<frozen ") or os.path.realpath(filename).startswith(_STANDARD)


@functools.lru_cache(maxsize=4096)
def is_unknown(filename: str) -> bool:
    """True if a source file is of an installed package of which nothing is known; torch calls some that are."""
    part = next((part for part in _INSTALLED if part in filename), None)
    return part is not None and filename.split(part)[-1].split(os.sep)[0].removesuffix(".py") not in _KNOWN


_KNOWN = {"torch", "numpy", "sympy", "mpmath", "networkx", "triton", "fusegrad", "typing_extensions", "functorch",
          "_pytest", "pytest", "pluggy", "jinja2", "fsspec", "filelock"}  # fmt: skip


def is_cached(value: Any) -> bool:
    """True if Python keeps what a function returns (`functools.cache`)."""
    return is_a(value, functools._lru_cache_wrapper)


def is_of_unknown(value: Any) -> bool:
    """True if calling something may run Python code of such a package."""
    function: Any = value.__func__ if is_a(value, types.MethodType) else value
    function = instance_dict(function).get("__wrapped__") if is_cached(function) else function
    if is_a(function, types.FunctionType):
        return is_unknown(function.__code__.co_filename)
    named = value if is_a(value, types.ModuleType | type) else type(value)
    file = instance_dict(sys.modules.get(home_of(named))).get("__file__")
    return type(file) is str and is_unknown(file)


def is_installed(package: str) -> bool:
    """True if an outermost package is Python's own or installed."""
    if package in sys.stdlib_module_names and package != "__main__":
        return True
    namespace = instance_dict(sys.modules.get(package))
    file = namespace.get("__file__")
    return type(file) is str and is_installed_file(file)
