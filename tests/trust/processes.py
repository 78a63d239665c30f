"""Processes: forks at any moment, spawned and forked workers, data loaders, killed compilers, ends in the middle.

    python tests/trust/processes.py --rounds 10 --json

Each scenario runs in a process of its own under a time limit, and says on its last line what it counted. A scenario is
right when nothing hangs, every result is eager's, no process and no file is left, and nothing unexpected is on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import outcome

HERE = Path(__file__).resolve().parent

PATIENCE = 240.0
"""Seconds after which a process counts as hung, on a machine that does other things as well."""

PRELUDE = """
import faulthandler, multiprocessing, os, pickle, random, signal, sys, threading, time, traceback
import torch
import fusegrad, trust_functions as functions
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

def right(fast, cls, shape=(3, 8), seed=0):
    args = functions.arguments(cls, *shape, seed)
    pairs = zip(functions.run(fast, args), functions.run(cls, args), strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)

def forked(work, seconds=120):
    # Exit status of a child that runs `work`: 0 where that is true.
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(seconds, exit=True)  # of a child that hangs
        status = 3
        try:
            status = 0 if work() else 1
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]

def tell(**numbers):
    import json
    print(json.dumps(numbers), flush=True)
"""

SCENARIOS: dict[str, str] = {
    "fork after use": """
        fast = {c: fusegrad.compile(c, backend=b) for c in functions.ALL for b in ("reference", "interpret")}
        assert all(right(f, c) for c, f in fast.items())
        def work():
            known = all(right(f, c) for c, f in fast.items())
            other_sizes = all(right(f, c, (5, 6)) for c, f in fast.items())
            first = all(right(fusegrad.compile(c), c) for c in functions.ALL)
            grad = torch.func.vmap(torch.func.grad(lambda x: fast[functions.Softmax].apply(x).sin().sum()))
            x = torch.ones(2, 3)
            return known and other_sizes and first and grad(x).shape == x.shape
        statuses = [forked(work) for _ in range(ROUNDS)]
        assert all(right(f, c) for c, f in fast.items())
        tell(forks=len(statuses), bad=sum(map(bool, statuses)))
    """,
    "fork while threads compile": """
        ended, backends = threading.Event(), ("reference", "interpret")
        def compiling():
            at = 0
            while not ended.is_set():
                cls = functions.ALL[at % len(functions.ALL)]
                assert right(fusegrad.compile(cls, backend=backends[at // 8 % 2]), cls, (2 + at % 3, 4), at)
                at += 1
        threads = [threading.Thread(target=compiling) for _ in range(3)]
        [t.start() for t in threads]
        known = fusegrad.compile(functions.SwiGLU)
        right(known, functions.SwiGLU)
        def work():
            return (right(known, functions.SwiGLU) and right(fusegrad.compile(functions.Softmax), functions.Softmax)
                    and right(fusegrad.compile(functions.RMSNorm, backend="interpret"), functions.RMSNorm))
        statuses = []
        for at in range(ROUNDS):
            time.sleep(random.Random(at).random() / 5)
            statuses.append(forked(work))
        ended.set()
        [t.join() for t in threads]
        tell(forks=len(statuses), bad=sum(map(bool, statuses)))
    """,
    "fork while every lock is taken in turn": """
        from fusegrad.tracer import locks
        bad = 0
        for rank, lock in locks._known:
            gate = threading.Barrier(2)
            def hold():
                with lock:
                    gate.wait()
                    time.sleep(0.05)
            thread = threading.Thread(target=hold)
            thread.start()
            gate.wait()
            bad += bool(forked(lambda: right(fusegrad.compile(functions.Softmax), functions.Softmax)))
            thread.join()
        assert right(fusegrad.compile(functions.Softmax), functions.Softmax)
        tell(forks=len(locks._known), bad=bad)
    """,
    "fork while a lock is never let go": """
        from fusegrad.tracer import locks
        from fusegrad.tracer.capture.capture import capture_lock
        locks.PATIENCE, gate, done = 0.2, threading.Barrier(2), threading.Event()
        def hold():
            with capture_lock:
                gate.wait()
                done.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        gate.wait()
        bad = bool(forked(lambda: right(fusegrad.compile(functions.Softmax), functions.Softmax)))
        done.set()
        thread.join()
        assert right(fusegrad.compile(functions.Softmax), functions.Softmax)
        tell(forks=1, bad=int(bad))
    """,
    "spawned and forked workers": """
        import trust_workers
        if __name__ == "__main__":
            bad = tried = 0
            for method in ("fork", "forkserver", "spawn"):
                with multiprocessing.get_context(method).Pool(2) as workers:
                    found = workers.map(trust_workers.compute, range(4))
                tried, bad = tried + len(found), bad + sum(not ok for ok in found)
            tell(calls=tried, bad=bad)
    """,
    "data loaders": """
        import trust_workers
        if __name__ == "__main__":
            data, bad, tried = trust_workers.Data(), 0, 0
            assert data[3].equal(trust_workers.expected(3))
            for method in ("fork", "spawn"):
                loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context=method)
                for at, batch in enumerate(loader):
                    wanted = torch.stack([trust_workers.expected(i) for i in range(4 * at, 4 * at + 4)])
                    tried, bad = tried + 1, bad + (not torch.allclose(batch, wanted, rtol=1e-5))
            tell(batches=tried, bad=bad)
    """,
    "pickles": """
        import copy, functools
        import trust_workers as w
        partial = functools.partial(w.Fast.apply, torch.ones(2, 3))
        things = [w.Fast, w.Fast.apply, partial, w.use, w.Module(), w.fast_plain]
        bad = 0
        for thing in things:
            try:
                again, copied = pickle.loads(pickle.dumps(thing)), copy.deepcopy(thing)
            except Exception as error:
                bad += 1
                print(type(error), error, thing, file=sys.stderr)
        bad += pickle.loads(pickle.dumps(w.Fast)) is not w.Fast
        bad += pickle.loads(pickle.dumps(w.Norm)) is not w.Norm  # its name finds the class that it was compiled from
        bad += not pickle.loads(pickle.dumps(w.Module()))(torch.ones(2, 3)).equal(w.Module()(torch.ones(2, 3)))
        tell(things=len(things), bad=bad)
    """,
    "interrupts": """
        class Late(Exception):
            pass
        def interrupt(number, frame):
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, interrupt)
        bad, landed, draw = 0, 0, random.Random(SEED)
        for at in range(10 * ROUNDS):
            cls = functions.ALL[at % len(functions.ALL)]
            fast = fusegrad.compile(cls, backend=("reference", "interpret")[at // 8 % 2])
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.001, 0.3))
                for _ in range(200):
                    right(fast, cls)
            except KeyboardInterrupt:
                landed += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            try:
                ok = right(fast, cls) and right(fusegrad.compile(cls), cls, (4, 5))
            except Exception as error:
                ok = False
                print(at, cls.__name__, file=sys.stderr)
            traceback.print_exc()
            bad += not ok
        tell(interrupts=landed, bad=bad)
    """,
}  # fmt: skip

KERNELS = """
from fusegrad.codegen.kernel import Kernel, Pointer, Ref, Scalar
from fusegrad.runtime.kernels.cross_compile import pool as workers

def kernel(at, busy=""):
    text = f'''import triton
import triton.language as tl
{busy}

@triton.jit
def k(x_ptr, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(x_ptr + lane, tl.load(x_ptr + lane) * {at}.5, mask=lane < n)
'''
    return Kernel("k", text, (Pointer("x_ptr", Ref("input", 0), "f32"), Scalar("n", 4)), {"BLOCK": 8}, 1, 1)

def compiled(at, busy=""):
    made = kernel(at, busy)
    return workers.compile_for([made], made.source, ["cuda:90", "hip:gfx942"])["k"]

def started():  # once the compiler processes run, their numbers are told
    while not workers.pool().workers:
        time.sleep(0.01)
    time.sleep(0.3)
    print("ready", *(w.process.pid for w in workers.pool().workers), flush=True)
SLEEPS = "import time" + chr(10) + "time.sleep(100)"
"""

KILLED = KERNELS + """
bad, errors, killed, draw, ended = 0, 0, 0, random.Random(SEED), threading.Event()
def killing():
    global killed
    while not ended.is_set():
        time.sleep(draw.uniform(0.2, 3))
        for worker in list(workers.pool().workers)[:1]:
            worker.process.kill()
            killed += 1
thread = threading.Thread(target=killing)
thread.start()
for at in range(3 * ROUNDS):
    for binary in compiled(at).values():
        errors += binary.error is not None
        bad += binary.error is not None and "status -9" not in binary.error
ended.set()
thread.join()
bad += any(binary.error for binary in compiled(1000).values())
tell(kernels=6 * ROUNDS, killed=killed, errors_on_record=errors, bad=bad)
"""


# ------------------------------------------------------------------ ends
CAPTURING = """
import atexit
stop = threading.Event()

def busy():
    at = 0
    while not stop.is_set():
        right(fusegrad.compile(functions.ALL[at % len(functions.ALL)], backend=("reference", "interpret")[at % 2]),
              functions.ALL[at % len(functions.ALL)], (2 + at % 3, 4))
        at += 1
        if at == 2:
            print("ready", flush=True)
"""
COMPILING = KERNELS + """
def busy():
    threading.Thread(target=started, daemon=True).start()
    compiled(0, SLEEPS)
"""
IN_A_THREAD = """
threading.Thread(target=busy, daemon=True).start()
"""
JOINED = """
thread = threading.Thread(target=busy, daemon=True)
thread.start()
atexit.register(lambda: (stop.set(), thread.join()))
"""
"""A daemon thread that is still in torch when the interpreter ends aborts the process, with eager classes as well."""
EXITS = """
def leave(number, frame):
    sys.exit(7)
signal.signal(signal.SIGTERM, leave)
busy()
"""
ENDS: dict[str, tuple[str, str, Any, tuple[int, ...], str]] = {
    # name: (how it is busy, what the main thread does, the signal that ends it, exit statuses, what stderr may say)
    "sys.exit while a thread captures": (CAPTURING, JOINED + "time.sleep(2)\nsys.exit(5)", None, (5,), ""),
    "an exception while a thread captures": (
        CAPTURING, JOINED + "time.sleep(2)\nraise ValueError('mine')", None, (1,), "ValueError: mine"),
    "os._exit while a thread captures": (CAPTURING, IN_A_THREAD + "time.sleep(2)\nos._exit(6)", None, (6,), ""),
    "SIGINT in a capture": (CAPTURING, "busy()", signal.SIGINT, (-2, 130), "KeyboardInterrupt"),
    "SIGTERM in a capture": (CAPTURING, "busy()", signal.SIGTERM, (-15,), ""),
    "SIGTERM that exits, in a capture": (CAPTURING, EXITS, signal.SIGTERM, (7,), ""),
    "sys.exit while a thread waits for compilers": (
        COMPILING, IN_A_THREAD + "started()\nsys.exit(5)", None, (5,), ""),
    "os._exit while a thread waits for compilers": (
        COMPILING, IN_A_THREAD + "started()\nos._exit(6)", None, (6,), ""),
    "SIGINT while compilers work": (COMPILING, "busy()", signal.SIGINT, (-2, 130), "KeyboardInterrupt"),
    "SIGTERM while compilers work": (COMPILING, "busy()", signal.SIGTERM, (-15,), ""),
    "SIGTERM that exits, while compilers work": (COMPILING, EXITS, signal.SIGTERM, (7,), ""),
}  # fmt: skip


# ------------------------------------------------------------------ running them
@dataclass
class Found:
    """What became of a scenario."""

    numbers: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.wrong


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    own = {"PYTHONPATH": path, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "FUSEGRAD_WARN": "0"}
    return {**os.environ, **own, "FUSEGRAD_CACHE_DIR": str(folder / "cache")}


def started(script: str, folder: Path) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(PRELUDE + script, encoding="utf-8")
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, str(folder / "script.py")], stdout=pipe, stderr=pipe, text=True,
                            env=environment(folder), cwd=folder, start_new_session=True)  # fmt: skip


def run(script: str, rounds: int, seed: int = 0) -> Found:
    """A script that tells its numbers; `bad` among them counts what was wrong."""
    found = Found()
    with tempfile.TemporaryDirectory() as name:
        process = started(f"ROUNDS, SEED = {rounds}, {seed}\n" + textwrap.dedent(script), Path(name))
        try:
            out, err = process.communicate(timeout=PATIENCE)
            found.numbers = json.loads(out.strip().splitlines()[-1]) if process.returncode == 0 else {}
            found.wrong += [] if process.returncode == 0 else [f"status {process.returncode}: {err[-2000:]}"]
            found.wrong += [f"{found.numbers} {err[-3000:]}"] if found.numbers.get("bad") else []
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            found.wrong.append("hung")
    return found


def end(name: str) -> Found:
    """One way to end in the middle of something."""
    busy, main, number, statuses, said = ENDS[name]
    found = Found()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        process = started(busy + main, folder)
        assert process.stdout is not None
        try:
            pids = _pids(process, number is not None or "started()" in main)
            began = time.monotonic()
            if number is not None:
                time.sleep(0.1)
                os.kill(process.pid, number)
            _, err = process.communicate(timeout=PATIENCE)
            found.numbers = {"seconds": round(time.monotonic() - began, 2)}
            found.wrong += _oddities(process.returncode, statuses, err, said) + _remains(pids, folder)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            found.wrong.append("hung")
    return found


def _pids(process: subprocess.Popen[str], waits: bool) -> list[int]:
    """The compiler processes, once the process is busy."""
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()[1:]] if waits else []


def _oddities(status: int, statuses: tuple[int, ...], err: str, said: str) -> list[str]:
    """What is unexpected about an end."""
    lines = err.strip().splitlines()
    told = [] if status in statuses else [f"status {status}, not {statuses}: {err[-1500:]}"]
    if (lines and not said) or (said and (not lines or not lines[-1].startswith(said))):
        told.append(f"on stderr: {err[-1500:]}")
    if "Exception ignored" in err or "Fatal Python error" in err:
        told.append(f"noise: {err[-1500:]}")
    return told


def _remains(pids: list[int], folder: Path) -> list[str]:
    """Processes and files that are left after a moment."""
    deadline = time.monotonic() + 15
    while (any(map(alive, pids)) or any(folder.glob("fusegrad-*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [f"process {pid} is left" for pid in pids if alive(pid)]
    return left + [f"{path.name} is left: {sorted(path.rglob('*'))[:9]}" for path in folder.glob("fusegrad-*")]


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie that nobody has waited for does not)."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def scenarios(rounds: int, seed: int = 0) -> dict[str, Callable[[], Found]]:
    """Every scenario by its name."""
    many: dict[str, Callable[[], Found]] = {n: lambda s=s: run(s, rounds, seed) for n, s in SCENARIOS.items()}  # type: ignore[misc]
    many["a compiler killed again and again"] = lambda: run(KILLED, rounds, seed)
    return many | {name: lambda n=name: end(n) for name in ENDS}  # type: ignore[misc]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", default="", help="a part of the scenarios' names")
    options.add_argument("--json", action="store_true", help="write benchmarks/results/trust/processes.json")
    chosen = options.parse_args()
    told, began = {}, time.perf_counter()
    for name, scenario in scenarios(chosen.rounds, chosen.seed).items():
        if chosen.only in name:
            found = scenario()
            told[name] = {**found.numbers, "ok": found.ok}
            print(f"{name:45} {told[name]}", *(f"\n   {w}" for w in found.wrong), flush=True)
    if chosen.json:
        seconds = round(time.perf_counter() - began, 1)
        print(outcome.write("processes", {"seed": chosen.seed, "seconds": seconds, "scenarios": told}))
    return int(not all(n["ok"] for n in told.values()))


if __name__ == "__main__":
    sys.exit(main())
