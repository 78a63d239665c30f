"""Python text is parsed right in many threads, in which CPython 3.11 may lose count."""

from __future__ import annotations

import ast
import gc
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import fusegrad
from fusegrad.ir.text import syntax_trees

PACKAGE = Path(fusegrad.__file__).parent
MISMATCH = "AST constructor recursion depth mismatch (before=18, after=14)"


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[SystemError]:
    """What `ast.parse` raises before it parses."""
    errors: list[SystemError] = []
    own = ast.parse

    def parse(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return own(*args, **kwargs)

    monkeypatch.setattr(ast, "parse", parse)
    return errors


def test_what_another_thread_disturbed_is_parsed_again(refusals: list[SystemError]) -> None:
    refusals += [SystemError(MISMATCH)] * 3
    assert ast.unparse(syntax_trees.parse("a  +  b")) == "a + b" and not refusals


def test_the_source_of_a_class_is_read_again(refusals: list[SystemError]) -> None:
    refusals += [SystemError(MISMATCH)] * 2
    assert syntax_trees.source_of(Finalized).startswith("class Finalized") and not refusals
    refusals += [SystemError(MISMATCH)] * 2
    assert syntax_trees.source_lines(Finalized)[1] > 0 and not refusals


def test_another_error_is_raised(refusals: list[SystemError]) -> None:
    refusals += [SystemError("unknown opcode")]
    with pytest.raises(SystemError, match="unknown opcode"):
        syntax_trees.parse("a + b")
    with pytest.raises(SyntaxError):
        syntax_trees.parse("a +")


class Finalized:
    """In a circle with itself, so that the collector runs its finalizer, in whatever parses just then."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        for _ in range(300):
            pass


def test_in_threads_whose_collector_runs_finalizers() -> None:
    text, wrong = (PACKAGE / "ir/graph.py").read_text(encoding="utf-8"), []
    expected = ast.dump(ast.parse(text))

    def work() -> None:
        for _ in range(4):
            for _ in range(20):
                Finalized()
            try:
                wrong.extend(["another tree"] * (ast.dump(syntax_trees.parse(text)) != expected))
            except SystemError as error:
                wrong.append(str(error))

    interval, threads = sys.getswitchinterval(), [threading.Thread(target=work) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        gc.collect()
    assert wrong == []


def test_nothing_else_of_the_package_parses() -> None:
    folders = ("ir", "tracer", "codegen", "runtime")
    files = [p for folder in folders for p in (PACKAGE / folder).rglob("*.py") if p.name != "syntax_trees.py"]
    assert [p for p in files if "ast.parse(" in p.read_text(encoding="utf-8")] == []
