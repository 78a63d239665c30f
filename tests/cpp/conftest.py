"""Builds the C++ Functions once a run: a folder of the run, shared by the workers of pytest-xdist under a file lock."""

import os
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from torch.utils import cpp_extension

sys.path.insert(0, str(Path(__file__).parent))  # `import classes`
SOURCE = Path(__file__).parent / "functions.cpp"


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory) -> Path:
    """A folder that is the same for every worker of this run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def extension(run_folder):
    """The extension module; loading it registers the operators `torch.ops.fusegrad_cpp`."""
    folder = run_folder / "cpp"
    folder.mkdir(exist_ok=True)
    with FileLock(run_folder / "cpp.lock"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # where pip puts ninja
        return cpp_extension.load(
            "fusegrad_test_cpp", [str(SOURCE)], extra_cflags=["-O0", "-g0", "-w"], build_directory=str(folder)
        )
