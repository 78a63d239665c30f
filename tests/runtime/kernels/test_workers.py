"""Compiler processes: four targets without a GPU, crashes, hangs, the cache, and what is left behind (nothing)."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton_samples as k

from fusegrad.ir.errors import UnsupportedBackendError
from fusegrad.runtime.cache import store as cache
from fusegrad.runtime.kernels import launch
from fusegrad.runtime.kernels.cross_compile import pool as workers
from fusegrad.runtime.kernels.cross_compile.pool import compile_for

TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")

NUMBER = iter(range(10**6))


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def own_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[workers.Pool]:
    """One worker that a test may kill."""
    made = workers.Pool(1)
    monkeypatch.setattr(workers, "pool", lambda: made)
    yield made
    made.close()


def unseen() -> str:
    """A module whose kernel `k` no test has compiled before."""
    return k.elementwise(f"y = x * {next(NUMBER)}.5")


def record(text: str) -> object:
    return k.kernel("k", text, {"x_ptr": "f32", "y_ptr": "bf16"}, ("n",), BLOCK=1024)


def test_one_kernel_for_all_targets() -> None:
    found = compile_for([k.softmax(4096, 4096)], k.SOFTMAX, TARGETS)["softmax"]
    assert list(found) == list(TARGETS)
    for target, binary in found.items():
        assert binary.error is None, binary.error
        assert 16 < binary.registers < 128 and binary.spills == 0 and 0 < binary.shared < 1024
        assert set(binary.accesses) == {16}, "an aligned row of bf16 is moved in 16-byte accesses"
        assert isinstance(binary.asm["hsaco" if target.startswith("hip") else "cubin"], bytes)
    assert ".target sm_90" in str(found["cuda:90"].asm["ptx"])
    assert "gfx942" in str(found["hip:gfx942"].asm["amdgcn"])


def test_argument_types_reach_the_compiler() -> None:
    """Eight-bit floats do so as bytes."""
    pointers = {"a": "b1", "b": "u8", "c": "i64", "d": "f64", "e": "f8e5m2", "f": "f16"}
    body = "".join(
        f"    tl.static_assert({p}.dtype.element_ty == tl.{t})\n"
        for p, t in zip(pointers, ("int1", "uint8", "int64", "float64", "uint8", "float16"), strict=True)
    )
    text = k.HEADER + f"@triton.jit\ndef k({', '.join(pointers)}, n, N: tl.constexpr):\n{body}    tl.store(c, n + N)\n"
    (found,) = compile_for([k.kernel("k", text, pointers, ("n",), N=3)], text, ["cuda:90"])["k"].values()
    assert found.error is None and found.accesses == {8: 1}


def test_a_kernel_that_spills_says_so() -> None:
    body = "y = x\n" + "\n".join(f"t{i} = tl.load(x_ptr + {i} * BLOCK + lane)" for i in range(24))
    body += "\ntl.debug_barrier()\n" + "\n".join(f"y += tl.exp(t{i} * y)" for i in range(24))
    text = k.elementwise(body)
    spilling = k.kernel("k", text, {"x_ptr": "f32", "y_ptr": "f32"}, ("n",), num_warps=1, BLOCK=1024)
    (found,) = compile_for([spilling], text, ["cuda:90"])["k"].values()
    assert found.registers == 255 and found.spills > 100


def test_too_much_shared_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = dataclasses.replace(workers.TARGETS["cuda:80"], shared=8)
    monkeypatch.setitem(workers.TARGETS, "cuda:80", tiny)
    (found,) = compile_for([k.softmax(4096, 4096)], k.SOFTMAX, ["cuda:80"])["softmax"].values()
    assert found.error == f"needs {found.shared} bytes of shared memory, cuda:80 has 8"


def test_compile_errors_are_on_record_and_not_cached(tmp_path: Path) -> None:
    text = k.elementwise("y = tl.no_such_function(x)")
    found = compile_for([record(text)], text, ["cuda:90", "hip:gfx942"])["k"]  # type: ignore[list-item]
    assert all("no_such_function" in (binary.error or "") for binary in found.values())
    assert not list((tmp_path / "cache").glob("v1/entries/*/*"))


def test_known_results_need_no_worker(own_pool: workers.Pool) -> None:
    text = unseen()
    first = compile_for([record(text)], text, ["cuda:90"])  # type: ignore[list-item]
    own_pool.close()
    assert compile_for_in_a_closed_pool(own_pool, text) == first


def compile_for_in_a_closed_pool(pool: workers.Pool, text: str) -> object:
    job = workers.job_of(record(text), text, "cuda:90")  # type: ignore[arg-type]
    return {"k": {"cuda:90": workers._binary(pool, job)}}


def test_other_kernels_of_the_module_do_not_matter() -> None:
    text = unseen()
    other = text + "\n\n@triton.jit\ndef other(a):\n    return a\n"
    assert workers.reachable(text, "k") == workers.reachable(other, "k")
    assert "def larger" in workers.reachable(k.SOFTMAX, "softmax")
    assert "def unused" not in workers.reachable(k.SOFTMAX, "softmax")


def test_constants_and_options_are_part_of_the_key() -> None:
    base = k.kernel("softmax", k.SOFTMAX, {"x_ptr": "bf16", "y_ptr": "bf16"}, ("rows",), N=64, BLOCK=64)
    wide = k.kernel("softmax", k.SOFTMAX, {"x_ptr": "bf16", "y_ptr": "bf16"}, ("rows",), num_warps=8, N=64, BLOCK=64)
    jobs = [workers.job_of(kernel, k.SOFTMAX, t) for kernel in (base, wide, k.softmax(63, 64)) for t in TARGETS[:2]]
    assert len({str(job) for job in jobs}) == 6


def test_killed_worker_is_replaced_and_the_job_done(own_pool: workers.Pool) -> None:
    text = unseen()
    compile_for([record(text)], text, ["cuda:90"])  # type: ignore[list-item]
    (worker,) = own_pool.workers
    os.kill(worker.process.pid, signal.SIGKILL)
    text = unseen()
    found = compile_for([record(text)], text, ["cuda:90"])["k"]["cuda:90"]  # type: ignore[list-item]
    assert found.error is None and found.registers > 0
    assert worker not in own_pool.workers and own_pool.started == 2


def test_worker_killed_in_the_middle_of_a_job(own_pool: workers.Pool) -> None:
    compile_for([record(unseen())], unseen(), [])  # type: ignore[list-item]

    def kill_the_first() -> None:
        while not own_pool.workers:
            time.sleep(0.01)
        next(iter(own_pool.workers)).process.kill()

    thread = threading.Thread(target=kill_the_first)
    thread.start()
    text = unseen()
    found = compile_for([record(text)], text, ["cuda:90"])["k"]["cuda:90"]  # type: ignore[list-item]
    thread.join()
    assert found.error is None and own_pool.started == 2


def test_a_job_that_always_kills_is_an_error_with_last_words(own_pool: workers.Pool) -> None:
    text = unseen() + "import os, sys\nprint('LLVM ERROR: last words', file=sys.stderr, flush=True)\nos.abort()\n"
    found = compile_for([record(text)], text, ["cuda:90"])["k"]["cuda:90"]  # type: ignore[list-item]
    assert found.error and "last words" in found.error and "-6" in found.error
    assert own_pool.started == 2 and not own_pool.workers


def test_hung_worker_is_ended(own_pool: workers.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    text = unseen()
    compile_for([record(text)], text, ["cuda:90"])  # type: ignore[list-item]
    monkeypatch.setattr(workers, "TIMEOUT", 0.3)
    text = unseen() + "import time\ntime.sleep(100)\n"
    found = compile_for([record(text)], text, ["cuda:90"])["k"]["cuda:90"]  # type: ignore[list-item]
    assert found.error and "did not finish" in found.error and not own_pool.workers


@pytest.mark.parametrize("call", ["mkdtemp", "mkdir"])
def test_no_room_for_files_is_an_error_on_record(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    made = None if call == "mkdtemp" else workers.Pool(1)
    monkeypatch.setattr(workers, "pool", (lambda: made) if made else workers._pool.__wrapped__)
    monkeypatch.setattr(workers.tempfile if call == "mkdtemp" else Path, call, refuse)
    text = unseen()
    found = compile_for([record(text)], text, ["cuda:90"])["k"]["cuda:90"]  # type: ignore[list-item]
    assert found.error and "No space left" in found.error
    monkeypatch.undo()
    if made:
        made.close()


def test_prints_of_the_compiler_do_not_disturb() -> None:
    text = unseen() + "import os\nos.write(1, b'noise')\nprint('more noise')\n"
    assert compile_for([record(text)], text, ["cuda:90"])["k"]["cuda:90"].error is None  # type: ignore[list-item]


def test_triton_switches_of_the_user_do_not_reach_the_worker(
    own_pool: workers.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    text = unseen()
    assert compile_for([record(text)], text, ["cuda:90"])["k"]["cuda:90"].error is None  # type: ignore[list-item]


@pytest.mark.parametrize("target", ["interpret", "cpu"])
def test_only_gpus_can_be_compiled_for(target: str) -> None:
    with pytest.raises(UnsupportedBackendError, match="hip:gfx942"):
        compile_for([k.softmax(64, 64)], k.SOFTMAX, [target])


def test_without_triton_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedBackendError, match="pip install triton"):
        compile_for([k.softmax(64, 64)], k.SOFTMAX, TARGETS)


def test_interpretation_and_compilation_of_one_text_in_one_process() -> None:
    import torch

    x = torch.randn(3, 50).bfloat16()
    y = torch.empty_like(x)
    launch.launcher(k.softmax(50, 64), k.SOFTMAX, "interpret")([x, y, 3], 1)
    assert compile_for([k.softmax(50, 64)], k.SOFTMAX, ["cuda:90"])["softmax"]["cuda:90"].error is None


def test_damaged_binaries_are_compiled_again() -> None:
    text = unseen()
    first = compile_for([record(text)], text, ["cuda:90"])  # type: ignore[list-item]
    root = cache.default().root
    assert root
    for path in root.glob("entries/*/*/cubin"):
        path.write_bytes(path.read_bytes()[:100])
    assert compile_for([record(text)], text, ["cuda:90"]) == first  # type: ignore[list-item]


SLEEPING = """
import threading, time
sleeping = [k.kernel("k", text, {"x_ptr": "f32"}, ("n",)) for text in [k.HEADER + "import time\\ntime.sleep(100)\\n"]]
threading.Thread(target=workers.compile_for, args=(sleeping, sleeping[0].source, ["cuda:90"])).start()
time.sleep(0.5)
"""


@pytest.mark.parametrize("work", ["", SLEEPING])
@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"])
def test_no_process_and_no_file_is_left(work: str, end: str, tmp_path: Path) -> None:
    if work and not end:
        end = "workers.pool().close()"
    script = (
        "import os, triton_samples as k\nfrom fusegrad.runtime.kernels.cross_compile import pool as workers\n"
        "workers.compile_for([k.softmax(64, 64)], k.SOFTMAX, ['cuda:90'])\n"
        f"print(*(w.process.pid for w in workers.pool().workers), flush=True)\n{work}\n{end}\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    pids = [int(pid) for pid in done.stdout.split()]
    assert pids, done.stderr
    deadline = time.monotonic() + 5
    while (any(map(alive, pids)) or any(tmp_path.glob("fusegrad-*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))
    assert not any(tmp_path.glob("fusegrad-*"))


def test_a_forked_child_has_workers_of_its_own() -> None:
    script = (
        "import os, triton_samples as k\nfrom fusegrad.runtime.kernels.cross_compile import pool as workers\n"
        "def compiled(n):\n"
        "    return workers.compile_for([k.softmax(n, 64)], k.SOFTMAX, ['cuda:90'])['softmax']['cuda:90']\n"
        "assert compiled(64).error is None\nchild = os.fork()\n"
        "if child == 0: os._exit(0 if compiled(63).error is None else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0 and compiled(62).error is None\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=40, env=environment)
    assert done.returncode == 0, done.stderr


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie that nobody has waited for does not)."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
