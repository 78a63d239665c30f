"""backend="inductor": the captured graphs through Inductor's C++ backend, where there is a C++ compiler."""

from __future__ import annotations

import pytest
import torch
from function_samples import RMSNorm, Softmax, assert_same, leaf, run, status

import fusegrad
from fusegrad.runtime.execution import inductor


@pytest.mark.slow
def test_inductor_runs_forward_and_backward() -> None:
    if inductor.cpp_compiler() is None:
        pytest.skip("no C++ compiler")
    fast = fusegrad.compile(Softmax, backend="inductor")
    for rows in (3, 3, 5):
        assert_same(run(fast, leaf(rows, 4)), run(Softmax, leaf(rows, 4)), tolerance=1e-5)
    assert status(fast) == status(fast, "backward") == "compiled"


def test_without_a_compiler_the_reference_runs_with_a_warning(monkeypatch) -> None:
    monkeypatch.setattr(inductor, "cpp_compiler", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fast = fusegrad.compile(RMSNorm, backend="inductor")
    with pytest.warns(UserWarning, match=r"needs a C\+\+ compiler"):
        mine = run(fast, leaf(3, 4), leaf(4))
    assert_same(mine, run(RMSNorm, leaf(3, 4), leaf(4)), bitwise=True)


@pytest.mark.parametrize(("variable", "there", "expected"), [
    ("my-cxx", {"my-cxx", "g++"}, "/bin/my-cxx"),
    ("missing", {"g++"}, "/bin/g++"),
    ("", {"clang++"}, "/bin/clang++"),
    ("", set(), None),
])  # fmt: skip
def test_which_compiler(monkeypatch, variable, there, expected) -> None:
    monkeypatch.setenv("CXX", variable)
    monkeypatch.setattr(inductor.shutil, "which", lambda name: f"/bin/{name}" if name in there else None)
    inductor.cpp_compiler.cache_clear()
    try:
        assert inductor.cpp_compiler() == expected
    finally:
        inductor.cpp_compiler.cache_clear()
