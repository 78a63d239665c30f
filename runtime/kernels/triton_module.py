"""Generated Triton text as a module, and the functions in it."""

from __future__ import annotations

import functools
import linecache
from types import ModuleType
from typing import Any

from ...ir.errors import UnsupportedBackendError
from ...ir.types import FLOAT8
from ..cache import entry_files
from ..cache import store as cache

TRITON_DTYPE = {
    "b1": "i1", "f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64",
    **{name: name for name in ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")},
    **dict.fromkeys(FLOAT8, "u8"),
}  # fmt: skip
"""The IR's dtypes by Triton's names. Eight-bit floats are bytes: kernels convert them alike on every target."""


def require_triton(backend: str, what: str) -> None:
    """Raise UnsupportedBackendError where triton cannot be imported."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        reason, fix = f"triton cannot be imported ({error})", "pip install triton, or use backend='reference'."
        raise UnsupportedBackendError(backend=backend, what=what, reason=reason, fix=fix) from error


def _path(key: str, module_text: str) -> str:
    """A file with the text, for people; where the disk cannot be used, a name that only linecache knows."""
    name = f"fusegrad_kernels_{key[:16]}.py"
    store = cache.default()
    store.get_or_make(key, lambda: {name: module_text.encode(errors="replace")})
    directory = store.directory(key)
    return str(directory / name) if directory and directory.is_dir() else name


@functools.lru_cache(maxsize=1024)
def load(module_text: str) -> ModuleType:
    """Execute the text as a module of its own. Triton reads the source of its functions back through linecache."""
    require_triton("triton", "kernels")
    key = cache.key_of("module", *entry_files.versions().items(), module_text)
    path = _path(key, module_text)
    module = ModuleType(f"fusegrad_kernels_{key[:16]}")
    module.__file__ = path
    linecache.cache[path] = (len(module_text), None, module_text.splitlines(keepends=True), path)
    exec(compile(module_text, path, "exec"), module.__dict__)
    return module


@functools.lru_cache(maxsize=1024)
def jit_function(module_text: str, name: str, scalars: tuple[str, ...]) -> Any:
    """The @triton.jit function of a kernel. Sizes are not specialised on: a new batch size compiles nothing."""
    import triton

    from .triton_install import cache_installation_key, ensure_cache_folder

    cache_installation_key()
    ensure_cache_folder()
    return triton.jit(getattr(load(module_text), name).fn, do_not_specialize=list(scalars))
