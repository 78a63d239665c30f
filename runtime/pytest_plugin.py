"""`pytest -p fusegrad.runtime.pytest_plugin --fusegrad=auto`: the name under which pytest finds the plugin."""

from .integrations.pytest_plugin import (
    pytest_addoption,
    pytest_configure,
    pytest_terminal_summary,
    pytest_unconfigure,
)

__all__ = ["pytest_addoption", "pytest_configure", "pytest_terminal_summary", "pytest_unconfigure"]
