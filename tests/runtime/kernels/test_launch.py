"""Text -> module -> launch: what can be tested without a GPU, and a real launch where there is one."""

from __future__ import annotations

import builtins
import inspect
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton_samples as k

from fusegrad.ir.errors import UnsupportedBackendError
from fusegrad.runtime.kernels import launch, triton_module


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path / "cache"))
    triton_module.load.cache_clear()
    triton_module.jit_function.cache_clear()


def test_module_has_a_readable_file_and_its_source() -> None:
    module = triton_module.load(k.SOFTMAX)
    assert Path(module.__file__ or "").read_text() == k.SOFTMAX
    assert "def softmax" in inspect.getsource(module.softmax.fn)
    assert triton_module.load(k.SOFTMAX) is module


def test_tampered_file_is_never_run() -> None:
    path = Path(triton_module.load(k.SOFTMAX).__file__ or "")
    path.write_text("raise SystemExit('foreign code ran')")
    triton_module.load.cache_clear()
    module = triton_module.load(k.SOFTMAX)
    assert "def softmax" in inspect.getsource(module.softmax.fn)
    assert Path(module.__file__ or "").read_text() == k.SOFTMAX


def test_without_a_usable_cache_directory_the_module_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(RuntimeWarning, match="in memory only"):
        module = triton_module.load(k.SOFTMAX)
    assert not Path(module.__file__ or "").exists()
    assert "def softmax" in inspect.getsource(module.softmax.fn)


def test_where_triton_cannot_write_it_gets_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs
    from triton.runtime.cache import get_cache_manager

    from fusegrad.runtime.kernels.triton_install import ensure_cache_folder

    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path / "file" / "below")
        ensure_cache_folder.cache_clear()
        with pytest.warns(RuntimeWarning, match="Triton cannot use its cache"):
            ensure_cache_folder()
        assert knobs.cache.dir.startswith(str(tmp_path / "fusegrad-triton-"))
        path = Path(get_cache_manager("ab" * 32).put(b"text", "kernel.txt"))
        assert path.read_bytes() == b"text" and path.is_relative_to(knobs.cache.dir)


def test_where_triton_can_write_nothing_changes(tmp_path: Path) -> None:
    from triton import knobs

    from fusegrad.runtime.kernels.triton_install import ensure_cache_folder

    with knobs.cache.scope(), warnings.catch_warnings():
        warnings.simplefilter("error")
        knobs.cache.dir = str(tmp_path / "of" / "triton")
        ensure_cache_folder.cache_clear()
        ensure_cache_folder()
        assert knobs.cache.dir == str(tmp_path / "of" / "triton")
    ensure_cache_folder.cache_clear()


def test_sizes_are_not_specialised() -> None:
    function = triton_module.jit_function(k.SOFTMAX, "softmax", ("rows",))
    assert {p.name for p in function.params if p.do_not_specialize} == {"rows"}
    assert [p.name for p in function.params if p.is_constexpr] == ["N", "BLOCK"]


class Recorder:
    """Stands in for a jit function: records how it is launched."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.calls.append((grid, args, kwargs))


def test_arguments_in_order_and_constants_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, devices = Recorder(), []
    monkeypatch.setattr(launch, "jit_function", lambda *_: recorder)
    monkeypatch.setattr(torch.cuda, "device", lambda device: devices.append(device) or torch.no_grad())
    run = launch.launcher(k.softmax(50, 64), k.SOFTMAX, "triton", "cuda:1")
    x, y = torch.zeros(2), torch.zeros(2)
    run([x, y, 7], 3)
    run([x, y, 0], 0)
    ((grid, arguments, named),) = recorder.calls
    assert grid == (3,) and arguments[0] is x and arguments[1] is y and arguments[2] == 7
    exactly = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
    assert named == {"N": 50, "BLOCK": 64, "num_warps": 4, "num_stages": 1, **exactly}
    assert devices == [torch.device("cuda:1")]


class Compiled:
    """What Triton's look-up gives back: a kernel with its launcher."""

    function, packed_metadata = "handle", "metadata"

    def __init__(self, launcher: Any) -> None:
        self.run = launcher


class Jit(Recorder):
    """A jit function that compiles nothing and launches nothing, and tells which way a launch went."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__()
        self.direct: list[Any] = []
        self.refuses = refuses
        self.params = [type("Parameter", (), {"name": n}) for n in ("x_ptr", "y_ptr", "rows", "N", "BLOCK")]

    def launch(self, *arguments: Any) -> None:
        if self.refuses:
            raise TypeError("function takes exactly 99 arguments")
        self.direct.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        looked_up = super().__getitem__(grid)
        return lambda *args, **kwargs: looked_up(*args, **kwargs) or Compiled(self.launch)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(a launch on cuda:0, what stands in for Triton) without a GPU."""

    def make(**options: Any) -> Any:
        jit = Jit(**options)
        monkeypatch.setattr(launch, "jit_function", lambda *_: jit)
        monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
        monkeypatch.setattr(launch, "current_device", lambda: 0)
        monkeypatch.setattr(launch, "current_stream", lambda index: 7000 + index)
        return launch.launcher(k.softmax(50, 64), k.SOFTMAX, "triton", "cuda:0"), jit

    return make


def test_a_kernel_is_looked_up_once_for_each_kind_of_arguments(bound: Any) -> None:
    run, jit = bound()
    x, y = torch.zeros(64), torch.zeros(64)
    for rows in (7, 8, 9):
        run([x, y, rows], 3)
    assert len(jit.calls) == 1
    assert [d[:9] for d in jit.direct] == [(3, 1, 1, 7000, "handle", "metadata", None, None, None)] * 2
    assert [d[11:] for d in jit.direct] == [(8, 50, 64), (9, 50, 64)] and jit.direct[0][9] is x
    run([x[1:], y, 7], 3)  # another alignment
    run([x, y, 1 << 40], 3)  # an integer of 64 bits
    assert len(jit.calls) == 3
    run([x[1:], y, 7], 3)
    run([x[5:], y, 7], 0)
    assert len(jit.calls) == 3 and len(jit.direct) == 3


def test_on_amd_more_than_two_gigabytes_are_another_kind(bound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles for what lies within 2 GB: a kernel that was bound with little is not launched on more."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    run, jit = bound()
    small, large = torch.zeros(4, dtype=torch.uint8), torch.empty(2**31 + 64, dtype=torch.uint8)  # never touched
    for x in (small, small, large[:4], large[:4]):
        run([x, small, 7], 1)
    assert len(jit.calls) == 2 and len(jit.direct) == 2


def test_another_device_and_a_profiler_go_through_triton(bound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    run, jit = bound()
    x = torch.zeros(64)
    run([x, x, 7], 3)
    with monkeypatch.context() as patch:
        patch.setattr(launch, "current_device", lambda: 1)
        run([x, x, 7], 3)
    assert (len(jit.calls), len(jit.direct)) == (2, 0)
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(print)
    try:
        run([x, x, 7], 3)
    finally:
        hook.remove(print)
    assert (len(jit.calls), len(jit.direct)) == (3, 0)
    run([x, x, 7], 3)
    assert (len(jit.calls), len(jit.direct)) == (3, 1)


def test_a_launcher_that_takes_other_arguments_is_left_alone(bound: Any) -> None:
    run, jit = bound(refuses=True)
    x = torch.zeros(64)
    for _ in range(3):
        run([x, x, 7], 3)
    assert len(jit.calls) == 3 and not run.binds


def test_this_triton_launches_as_assumed() -> None:
    """`JITFunction.run` ends with the very call that is made past it."""
    from triton.backends.amd.driver import HIPLauncher
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime.jit import JITFunction

    text = " ".join(inspect.getsource(JITFunction.run).split())
    assert "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_" in text
    assert text.endswith("*bound_args.values()) return kernel")
    for cls in (CudaLauncher, HIPLauncher):
        names = list(inspect.signature(cls.__call__).parameters)
        assert names[-1] == "args" and (len(names) == 11 or names[6] == "args")


def test_empty_grid_is_skipped_by_the_interpreter() -> None:
    launch.launcher(k.softmax(50, 64), k.SOFTMAX, "interpret")([torch.zeros(0), torch.zeros(0), 0], 0)


@pytest.mark.parametrize(("backend", "device"), [("triton", "cpu"), ("nonsense", None)])
def test_impossible_backends_are_refused(backend: str, device: str | None) -> None:
    with pytest.raises(UnsupportedBackendError, match=backend):
        launch.launcher(k.softmax(50, 64), k.SOFTMAX, backend, device)


@pytest.mark.parametrize("backend", ["triton", "interpret"])
def test_without_triton_the_error_says_so(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_triton(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "triton":
            raise ImportError("No module named 'triton'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_triton)
    with pytest.raises(UnsupportedBackendError, match=r"triton cannot be imported.*\n.*\n.*pip install triton"):
        launch.launcher(k.softmax(50, 64), k.SOFTMAX, backend, "cuda")


def test_the_modules_can_be_imported_without_triton() -> None:
    modules = "fusegrad.runtime.kernels.interpreter, fusegrad.runtime.kernels.cross_compile.pool"
    script = f"import sys; sys.modules['triton'] = None; import {modules}"
    assert subprocess.run([sys.executable, "-c", script], timeout=100).returncode == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_real_launch_compiles_once_for_all_batch_sizes() -> None:
    run = launch.launcher(k.softmax(50, 64), k.SOFTMAX, "triton", "cuda")
    for rows in (1, 5, 16, 17):
        x = torch.randn(rows, 50, device="cuda", dtype=torch.bfloat16)
        y = torch.empty_like(x)
        run([x, y, rows], 4)
        torch.testing.assert_close(y, x.softmax(-1))
    function = triton_module.jit_function(k.SOFTMAX, "softmax", ("rows",))
    assert sum(len(per_device[0]) for per_device in function.device_caches.values()) == 1


# ------------------------------------------------------------------ Triton's own name for its installation
@pytest.fixture
def installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for Triton's folder, with files in the places that Triton hashes."""
    from fusegrad.runtime.kernels import triton_install as private

    root = tmp_path / "triton"
    for name in ("_C/libtriton.so", "runtime/cache.py", "compiler/compiler.py", "backends/nvidia/driver.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("1")
    (root / "language").mkdir()
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(private.triton, "__file__", str(root / "__init__.py"))
    return root


def _installation_as_known(monkeypatch: pytest.MonkeyPatch, answer: str) -> str:
    from fusegrad.runtime.kernels import triton_install as private

    monkeypatch.setattr(private.triton_cache, "triton_key", lambda: answer)
    private.cache_installation_key.__wrapped__()
    return str(private.triton_cache.triton_key())


def test_triton_hashes_its_installation_once(installation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _installation_as_known(monkeypatch, "first") == "first"
    assert _installation_as_known(monkeypatch, "never asked") == "first"


@pytest.mark.parametrize("name", ["_C/libtriton.so", "runtime/cache.py", "backends/nvidia/driver.py"])
def test_a_changed_installation_is_hashed_again(installation: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _installation_as_known(monkeypatch, "first")
    os.utime(installation / name, ns=(1, 1))
    assert _installation_as_known(monkeypatch, "second") == "second"


def test_an_added_file_is_another_installation(installation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _installation_as_known(monkeypatch, "first")
    (installation / "compiler" / "more.py").write_text("2")
    assert _installation_as_known(monkeypatch, "second") == "second"
