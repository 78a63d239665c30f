"""Processes that use an empty or half-written cache at once, or are killed: forked from one that has imported fusegrad.

Each is the head of a session of its own and is named in its compile workers' environment, so that none goes unseen.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from kept_functions import CLASSES, results

import fusegrad
from fusegrad.runtime.cache import store as cache
from fusegrad.runtime.kernels.cross_compile import pool as workers
from fusegrad.runtime.settings import config

TOKEN = "TRUST_RUN_OF_FUSEGRAD"
TARGET = "cuda:90"


# ------------------------------------------------------------------ what each process does
class Work:
    """Call the classes forward and backward and compile kernels; tell what came of it and what that took."""

    def __init__(self, classes: Sequence[Any] = CLASSES, kernels: bool = True) -> None:
        self.classes = classes
        with config.patch(store=False):
            found = [fusegrad.explain(cls, "f32[5,8]", "f32[5,8]") for cls in classes] if kernels else []
        self.modules = [(f.kernel_records, f.module) for f in found]

    def __call__(self) -> dict[str, Any]:
        written, compiled, before = watched_writes(), watched_compilers(), fusegrad.stats()
        with config.patch(store=True), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            tensors = [results(fusegrad.compile(cls, backend="interpret")) for cls in self.classes]
            binaries = [workers.compile_for(records, module, [TARGET]) for records, module in self.modules]
        return {
            "tensors": [[t.tolist() for t in each] for each in tensors],
            "binaries": [digest(b[TARGET]) for each in binaries for b in each.values()],
            "captures": fusegrad.stats()["captures"] - before["captures"], "written": written, "compiled": compiled,
            "warnings": [str(w.message) for w in told if "fusegrad" in str(w.message)],
        }  # fmt: skip


def digest(binary: workers.Binary) -> str:
    """Of all that was compiled; the reason where there is none."""
    return binary.error or hashlib.sha256(repr((sorted(binary.asm.items()), binary.registers)).encode()).hexdigest()


def watched_writes() -> list[str]:
    """Grows by the key of each entry that this process writes from now on."""
    written: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if str(record.msg).startswith("written") and isinstance(record.args, tuple):
                written.append(f"{record.args[0]} {record.args[1]}")

    logger = logging.getLogger("fusegrad.cache")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(Heard())
    return written


def watched_compilers() -> list[str]:
    """Grows by the name of each kernel that this process has compiled from now on."""
    compiled: list[str] = []
    original = workers.Pool.compile

    def counted(self: workers.Pool, job: Any) -> Any:
        compiled.append(job["name"])
        return original(self, job)

    workers.Pool.compile = counted  # type: ignore[method-assign]
    return compiled


# ------------------------------------------------------------------ processes
class Forked:
    """A process that does `act` on the cache at `root` and leaves the answer in a file."""

    def __init__(
        self, act: Callable[[], dict[str, Any]], root: Path, token: str, gate: tuple[int, int] | None = None
    ) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=root.parent)
        os.close(handle)
        self.answer_file, self.token = Path(name), token
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setsid()
                if gate is not None:
                    os.close(gate[1])
                    os.read(gate[0], 1)  # until nobody has the other end
                self._act(act, root)
                status = 0
            except BaseException:
                self.answer_file.write_text(json.dumps({"error": traceback.format_exc()}))
            os._exit(status)

    def _act(self, act: Callable[[], dict[str, Any]], root: Path) -> None:
        os.environ.update({"FUSEGRAD_CACHE_DIR": str(root / "cache"), TOKEN: self.token, "TMPDIR": str(root)})
        tempfile.tempdir = None
        cache._caches.clear()
        found = act()
        if workers._pool.cache_info().currsize:
            workers.pool().close()
        self.answer_file.write_text(json.dumps(found))

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> int | None:
        """The exit status; None where it did not end in time, and was ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        self.kill()
        os.waitpid(self.pid, 0)
        return None

    def answer(self) -> dict[str, Any] | None:
        """What it found; None where it was killed before that."""
        text = self.answer_file.read_text()
        return json.loads(text) if text else None


def running(token: str) -> list[int]:
    """Processes that were started with the token in their environment, and still run."""
    mark, found = f"{TOKEN}={token}\0".encode(), []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and mark in Path("/proc", entry, "environ").read_bytes():
                found.append(int(entry))
        except OSError:
            continue
    return found


def left_after(token: str, seconds: float) -> list[int]:
    """The processes that still run after so long."""
    deadline = time.monotonic() + seconds
    while (found := running(token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
