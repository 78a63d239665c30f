"""A compiler process: jobs come on stdin as lines of JSON, answers go to stdout. Run by path, without fusegrad.

first   {"path"}                                                                 -> {"version"} | {"error"}
then    {"name", "text", "types", "constants", "target", "options", "out"}       -> {"files", "metrics"} | {"error"}
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import linecache
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

WARP = {"cuda": 32, "hip": 64}
KEPT = ("ttir", "ttgir", "ptx", "cubin", "amdgcn", "hsaco")
ERROR_CHARACTERS = 4000


def _neighbour(name: str) -> ModuleType:
    """A module of this folder, without its package."""
    spec = importlib.util.spec_from_file_location(f"_fusegrad_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _function(text: str, name: str) -> Any:
    """Execute the text; Triton reads the source back through linecache."""
    path = f"{name}.py"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    namespace: dict[str, Any] = {"__name__": "_fusegrad_kernels"}
    exec(compile(text, path, "exec"), namespace)
    return namespace[name]


def _compile(job: dict[str, Any]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = _function(job["text"], job["name"])
    positions = {name: (i,) for i, name in enumerate(function.arg_names)}
    types = {name: job["types"].get(name, "constexpr") for name in positions}
    # Pointers begin at multiples of 16 bytes, which launches see to: accesses may be as wide.
    kind, arch = job["target"].split(":")
    source = ASTSource(
        fn=function,
        signature=types,
        constexprs={positions[name]: value for name, value in job["constants"].items()},
        attrs={positions[name]: [["tt.divisibility", 16]] for name, type in types.items() if type.startswith("*")},
    )
    target = GPUTarget(kind, int(arch) if arch.isdigit() else arch, WARP[kind])
    return triton.compile(source, target=target, options=job["options"])


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Compile, write the files into the folder that the job names, measure."""
    import triton

    compiled = _compile(job)
    asm = {kind: compiled.asm[kind] for kind in KEPT if kind in compiled.asm}
    for kind, content in asm.items():
        Path(job["out"], kind).write_bytes(content if isinstance(content, bytes) else content.encode())
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    shared, workspace = compiled.metadata.shared, getattr(compiled.metadata, "global_scratch_size", 0)
    metrics = _neighbour("metrics").measure(asm, job["target"], shared, tools, workspace)
    return {"files": sorted(asm), "metrics": dataclasses.asdict(metrics)}


def greet(hello: dict[str, Any]) -> dict[str, Any]:
    """Import Triton from where the parent would."""
    sys.path[:] = hello["path"]
    import triton

    return {"version": triton.__version__}


def _safely(function: Callable[[dict[str, Any]], dict[str, Any]], line: str) -> str:
    try:
        return json.dumps(function(json.loads(line)))
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]})
    finally:
        shutil.rmtree(os.environ["TRITON_CACHE_DIR"], ignore_errors=True)


def _remove_files() -> None:
    """Remove this process's folder, and the pool's folder around it when it was the last."""
    directory = Path(os.environ["TMPDIR"])
    shutil.rmtree(directory, ignore_errors=True)
    with suppress(OSError):
        directory.parent.rmdir()


def _leave_with(parent: int) -> None:
    """End this process when its parent is gone, before it began or in the middle of a compilation."""
    while os.getppid() == parent:
        time.sleep(1)
    _remove_files()
    os._exit(1)


def main() -> None:
    """Greet once, then answer until stdin closes. The compiler's own prints go to stderr."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    threading.Thread(target=_leave_with, args=(int(sys.argv[1]),), daemon=True).start()
    act: Callable[[dict[str, Any]], dict[str, Any]] = greet
    with suppress(BrokenPipeError):  # no process is left that would read it
        for line in sys.stdin:
            replies.write(_safely(act, line) + "\n")
            act = answer
    _remove_files()


if __name__ == "__main__":
    main()
