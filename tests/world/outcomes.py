"""A pytest plugin: the outcome of each test as a line of JSON in the file $WORLD_OUTCOMES. It imports no pytest."""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any


def pytest_runtest_setup(item: Any) -> None:
    """Tests that draw without a seed draw the same in each run: some fail by what they draw."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


def pytest_runtest_logreport(report: Any) -> None:
    """A test counts once: by its call, or by a setup or teardown that did not pass."""
    if report.when != "call" and report.outcome == "passed":
        return
    expected = hasattr(report, "wasxfail")
    outcome = ("xfailed" if report.outcome == "skipped" else "xpassed") if expected else report.outcome
    _put(report.nodeid, outcome, last_line(report.longrepr) if report.outcome == "failed" else "")


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be collected."""
    if report.outcome == "failed":
        _put(report.nodeid, "not collected", last_line(report.longrepr))


def last_line(text: Any) -> str:
    """The error of a traceback: its last line that begins with E, or its last line."""
    lines = [line for line in str(text).splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors or lines or [""])[0 if errors else -1][:200]


def _put(test: str, outcome: str, why: str) -> None:
    with open(os.environ["WORLD_OUTCOMES"], "a", encoding="utf-8") as file:
        file.write(json.dumps([test, outcome, why]) + "\n")
