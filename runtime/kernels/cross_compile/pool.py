"""Compile kernels for named targets in worker processes: in parallel, without a GPU, at no risk to the user's process.

A worker that crashes is replaced and its job tried once more; what fails then, or hangs, is an error on record. Workers
live until the process ends, since their first import takes seconds. Known results come from the disk cache.
"""

from __future__ import annotations

import ast
import atexit
import functools
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....codegen.kernel import TARGETS, Kernel, Pointer
from ....ir.errors import UnsupportedBackendError
from ....ir.text.syntax_trees import parse
from ....tracer.locks import INNER, lock_of
from ...cache import entry_files
from ...cache import store as cache
from ...settings.counters import count
from ..triton_module import TRITON_DTYPE, require_triton

SIZE = 4
TIMEOUT = 120.0
"""Seconds for one kernel and target, before the compiler counts as hung."""

UNLIMITED = 1 << 30
TEXT_FILES = ("ttir", "ttgir", "ptx", "amdgcn")


@dataclass(frozen=True)
class Binary:
    """A kernel compiled for one target, or the reason why there is none."""

    asm: dict[str, str | bytes] = field(default_factory=dict)
    """Machine code and its steps by kind: "ptx" and "cubin", or "amdgcn" and "hsaco"."""
    registers: int = -1
    """Per thread; -1 where unknown."""
    spills: int = -1
    """Bytes of registers spilled to memory, per thread; -1 where unknown."""
    shared: int = 0
    """Bytes of shared memory per program."""
    accesses: dict[int, int] = field(default_factory=dict)
    """Loads and stores of device memory, by their width in bytes."""
    workspace: int = 0
    """Bytes of device memory that each program keeps descriptors in: whoever launches it gives it to the kernel."""
    error: str | None = None
    """Why there is no binary; None where there is one."""


# -- what to compile --------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _statements(module_text: str) -> tuple[tuple[frozenset[str], frozenset[str], ast.stmt], ...]:
    """(names defined, names used, statement) for each statement of a module."""
    return tuple((frozenset(_defined_names(s)), frozenset(_names(s)), s) for s in parse(module_text).body)


def _defined_names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef):
        yield statement.name
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (name for target in targets for name in _names(target))


def _names(node: ast.AST) -> Iterator[str]:
    return (n.id for n in ast.walk(node) if isinstance(n, ast.Name))


def reachable(module_text: str, name: str) -> str:
    """The part of a module that a kernel depends on: other kernels beside it do not change what is compiled."""
    statements, names, size = _statements(module_text), {name}, 0
    while len(names) > size:
        size = len(names)
        names = names.union(*(uses for defined, uses, _ in statements if not defined or defined & names))
    body = [s for defined, _, s in statements if not defined or defined & names]
    return ast.unparse(ast.Module(body, [])) + "\n"


def job_of(kernel: Kernel, module_text: str, target: str) -> dict[str, Any]:
    """Everything that determines a binary."""
    types = {a.name: "*" + TRITON_DTYPE[a.dtype] if isinstance(a, Pointer) else "i32" for a in kernel.arguments}
    return {
        "name": kernel.name,
        "text": reachable(module_text, kernel.name),
        "types": types,
        "constants": kernel.constants,
        "target": target,
        "options": kernel.options(target.split(":")[0]),
    }


# -- one worker -------------------------------------------------------------------------------------------------------


class WorkerDied(Exception):
    """The compiler process ended without an answer."""


class WorkerHung(Exception):
    """The compiler process did not answer in time."""


def _environment(directory: Path) -> dict[str, str]:
    """The user's environment without Triton's switches (the paths of its tools stay), all files below `directory`."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_") or k.endswith("_PATH")}
    private = {"TRITON_CACHE_DIR": str(directory / "triton"), "TRITON_ALWAYS_COMPILE": "1", "TMPDIR": str(directory)}
    return {**inherited, **private}


class Worker:
    """A compiler process with its pipes and a folder of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700)
        with open(directory / "stderr", "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("worker.py")), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=_environment(directory),
                cwd=directory,
                bufsize=0,
                start_new_session=True,  # an interrupt at the user's terminal is not meant for the compiler
            )

    def greet(self) -> None:
        """Let the worker import Triton from where this process would."""
        self.ask({"path": [os.path.abspath(p) for p in sys.path if p]}, TIMEOUT)

    def ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """One line there, one line back."""
        try:
            self._send(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise WorkerDied(self._last_words()) from error
        return dict(json.loads(self._line(time.monotonic() + timeout)))

    def _send(self, line: bytes) -> None:
        assert self.process.stdin
        while line:
            line = line[self.process.stdin.write(line) :]

    def _line(self, deadline: float) -> bytes:
        assert self.process.stdout
        descriptor, received = self.process.stdout.fileno(), b""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not received.endswith(b"\n"):
            if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
                raise WorkerHung
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise WorkerDied(self._last_words())
            received += part
        return received

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        stderr = ""
        with suppress(OSError):  # the folder goes with the process that asks
            stderr = (self.directory / "stderr").read_bytes()[-1000:].decode(errors="replace").strip()
        return f"the compiler process ended with status {self.process.returncode}" + (f": {stderr}" if stderr else "")

    def kill(self) -> None:
        """With the assembler, which is a process of its own in the worker's group."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process and the tools that it has started, whatever they do, and remove its files."""
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()
        shutil.rmtree(self.directory, ignore_errors=True)


# -- the pool ---------------------------------------------------------------------------------------------------------


class Pool:
    """At most `size` workers, started when first needed."""

    def __init__(self, size: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fusegrad-"))
        self.executor = ThreadPoolExecutor(size, thread_name_prefix="fusegrad-compile")
        self.idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        self.started = 0
        self.workers: set[Worker] = set()
        self.waiting: list[threading.Thread] = []  # for results
        self.closed = False
        for _ in range(size):
            self.idle.put(None)

    def compile(self, job: Mapping[str, Any]) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Files and answer for a job; a job whose worker dies is tried once more."""
        try:
            return self._once(job)
        except WorkerDied:
            if self.closed:
                raise
            return self._once(job)

    def _once(self, job: Mapping[str, Any]) -> tuple[dict[str, bytes], dict[str, Any]]:
        # A place in the pool is taken before a worker is started in it, and given back whatever happens.
        worker = self.idle.get()
        try:
            worker = worker or self._start()
            out = Path(tempfile.mkdtemp(dir=worker.directory))
            answer = worker.ask({**job, "out": str(out)}, TIMEOUT)
            files = {name: (out / name).read_bytes() for name in answer.get("files", ())}
            shutil.rmtree(out, ignore_errors=True)
            return files, answer
        except BaseException as error:
            self._end(worker)
            worker = None
            if self.closed and isinstance(error, OSError):  # its folder is gone
                raise WorkerDied("the process is ending") from error
            raise
        finally:
            self.idle.put(worker)

    def _start(self) -> Worker:
        if self.closed:
            raise WorkerDied("the process is ending")
        self.started += 1
        worker = Worker(self.directory / str(self.started))
        self.workers.add(worker)
        try:
            worker.greet()
        except BaseException:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: Worker | None) -> None:
        if worker:
            self.workers.discard(worker)
            worker.close()

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Within the block a thread waits for results; where it is not to wait any more, no thread is left to."""
        self.waiting.append(threading.current_thread())
        try:
            yield
        except BaseException:  # an interrupt, or what a signal's handler raises
            self.close()
            _pool.cache_clear()
            raise
        finally:
            self.waiting.remove(threading.current_thread())

    def leave(self) -> None:
        """The process ends, but for threads that it waits for: the rest's jobs need not be finished."""
        if all(thread.daemon for thread in self.waiting):
            self.close()

    def close(self) -> None:
        """End all workers. Jobs that still wait fail."""
        self.closed = True
        self.executor.shutdown(wait=False, cancel_futures=True)
        for worker in tuple(self.workers):
            worker.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def pool() -> Pool:
    """The process's workers."""
    with _lock:
        return _pool()


_lock = lock_of(INNER)


@functools.cache
def _pool() -> Pool:
    pool, owner = Pool(min(SIZE, os.cpu_count() or 1)), os.getpid()
    atexit.register(lambda: pool.close() if os.getpid() == owner else None)
    if hasattr(threading, "_register_atexit"):  # before the executor's own, which lets all jobs run to their end
        with suppress(RuntimeError):  # the process is ending already
            threading._register_atexit(lambda: pool.leave() if os.getpid() == owner else None)
    return pool


_parents: list[Pool] = []  # kept, so that a child does not finalise processes that are not its own


def _forget_in_child() -> None:
    """A child has its parent's pipes, which are not for it."""
    if _pool.cache_info().currsize:
        _parents.append(_pool())
    _pool.cache_clear()


os.register_at_fork(after_in_child=_forget_in_child)


# -- compiling --------------------------------------------------------------------------------------------------------


def compile_for(kernels: Sequence[Kernel], module_text: str, targets: Sequence[str]) -> dict[str, dict[str, Binary]]:
    """Every kernel of a module for every target. -> {kernel: {target: Binary}}; failures are in `Binary.error`."""
    require_triton("triton", "kernels")
    _require_gpus(targets)
    try:
        workers = pool()
    except OSError as error:
        return {k.name: {target: _without_files(error) for target in targets} for k in kernels}
    with workers.waited_for():
        waiting = {
            (kernel.name, target): workers.executor.submit(_binary, workers, job_of(kernel, module_text, target))
            for kernel in kernels
            for target in targets
        }
        return {k.name: {target: _result(waiting[k.name, target]) for target in targets} for k in kernels}


def _require_gpus(targets: Sequence[str]) -> None:
    for target in targets:
        if target.partition(":")[0] not in ("cuda", "hip"):
            fix = f"name one of {', '.join(name for name in TARGETS if ':' in name)}."
            raise UnsupportedBackendError(backend="triton", what=f"for {target!r}", reason="it is not a GPU", fix=fix)


def _without_files(error: OSError) -> Binary:
    return Binary(error=f"the compiler processes have no room for their files: {error}")


def _result(future: Future[Binary]) -> Binary:
    try:
        return future.result()
    except OSError as error:
        return _without_files(error)
    except WorkerDied as error:
        return Binary(error=str(error))
    except CancelledError:
        return Binary(error="the compiler processes were ended")
    except WorkerHung:
        return Binary(error=f"the compiler did not finish within {TIMEOUT:g} seconds")


@functools.cache
def _recipe() -> str:
    """Changes with the code that makes a cached binary from a job."""
    return cache.key_of(*(Path(__file__).with_name(name).read_bytes() for name in ("worker.py", "metrics.py")))


def _binary(workers: Pool, job: Mapping[str, Any]) -> Binary:
    """From the cache, or made by one worker of one process, and cached."""
    key = cache.key_of("binary", _recipe(), *entry_files.versions().items(), json.dumps(job, sort_keys=True))
    store = cache.default()
    files = store.get(key)
    if files:
        count("cache_hits")
        return _read(files, job["target"])
    # One process compiles; another that waited for it finds the files.
    with store.claimed(key):
        files = store.get(key)
        if files is None:
            files, answer = workers.compile(job)
            if "error" in answer:
                return Binary(error=answer["error"])
            files["metrics.json"] = json.dumps(answer["metrics"]).encode()
            store.put(key, files)
    return _read(files, job["target"])


def _read(files: Mapping[str, bytes], target: str) -> Binary:
    metrics = json.loads(files["metrics.json"])
    asm = {name: c.decode() if name in TEXT_FILES else c for name, c in files.items() if name != "metrics.json"}
    shared, limit = metrics["shared"], TARGETS[target].shared if target in TARGETS else UNLIMITED
    return Binary(
        asm=asm,
        registers=metrics["registers"],
        spills=metrics["spills"],
        shared=shared,
        accesses={int(width): count for width, count in metrics["accesses"].items()},
        workspace=metrics["workspace"],
        error=f"needs {shared} bytes of shared memory, {target} has {limit}" if shared > limit else None,
    )
