"""A pytest plugin: every Function class that a test run defines is compiled, and the tests do not know.

    pytest -p fusegrad.runtime.pytest_plugin --fusegrad=auto third_party/tests

It imports no pytest: the hooks are found by their names.
"""

from __future__ import annotations

import os
from typing import Any

from .compile_everything import Everywhere, summary

_everywhere = Everywhere()
_WARN = "FUSEGRAD_WARN"
_outside = os.environ.get(_WARN)


def pytest_addoption(parser: Any) -> None:
    """`--fusegrad`. The first hook of all, before any conftest is imported: classes are met from here on."""
    parser.getgroup("fusegrad").addoption(
        "--fusegrad",
        default=None,
        metavar="BACKEND",
        help="compile every torch.autograd.Function class as it is defined, on this backend (auto, interpret, ...)",
    )
    _everywhere.turn_on()


def pytest_configure(config: Any) -> None:
    """Without the option nothing is changed."""
    backend = config.getoption("--fusegrad")
    if backend is None:
        _everywhere.turn_off()
        return
    _everywhere.use(backend)
    os.environ[_WARN] = "0"  # what runs as written is told at the end, and must not count as a warning of the tests


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """Print what was compiled, and what ran as written and why."""
    if config.getoption("--fusegrad") is not None:
        terminalreporter.section("fusegrad")
        terminalreporter.write_line(summary(_everywhere))


def pytest_unconfigure() -> None:
    """Everything as it was."""
    _everywhere.turn_off()
    if _outside is None:
        os.environ.pop(_WARN, None)
    else:
        os.environ[_WARN] = _outside
