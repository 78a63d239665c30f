"""The tool that changes the sources: its changes are real, one at a time, and tests that fail are seen to."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
from pathlib import Path

import mutant_runs
import pytest
from mutant_runs import ROOT, Record, Verdict, modules, unnoticed
from mutation_sites import Mutant, mutants

SAMPLE = '''"""A docstring: 1 < 2."""

__all__ = ["f"]


def f(x: int = 0, y: "int | None" = None) -> int:
    """Not this: 1 + 1."""
    if x < 1 and not y:
        raise ValueError(f"{x} == 1")
    return [a + 1 for a in (x, y) if a is not None][1:]
'''


def test_every_change_is_one_change_and_none_is_of_words_for_people(tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text(SAMPLE, encoding="utf-8")
    made = mutants(tmp_path / "sample.py", tmp_path)
    changes = {(m.was, m.now) for m in made}
    assert {("x < 1", "(x <= 1)"), ("not y", "(y)"), ("a + 1", "(a - 1)"), ("a is not None", "(True)")} <= changes
    assert ("x < 1 and not y", "(x < 1 or not y)") in changes and ("1", "2") in changes
    for mutant in made:
        assert ast.dump(ast.parse(mutant.text)) != ast.dump(ast.parse(SAMPLE))
        assert mutant.line >= 8 and mutant.line != 9, "in the body, and not in the message of an error"


def test_a_module_has_hundreds_of_mutants() -> None:
    assert len(list(modules(plans=False))) > 25
    made = mutants(ROOT / "ir" / "passes" / "simplify.py", ROOT)
    assert len(made) > 150 and len({m.text for m in made}) > 0.98 * len(made)


@pytest.mark.parametrize("text", ["raise RuntimeError('never imported')", None])
def test_a_broken_module_is_noticed_and_a_whole_one_is_not(text: str | None) -> None:
    path = Path("ir/rewrite.py")
    whole = Mutant(path, 1, "", "", (ROOT / path).read_text(encoding="utf-8"))
    found = unnoticed(whole if text is None else dataclasses.replace(whole, text=text), ["tests/ir/test_rewrite.py"])
    assert (found == "") == (text is None)


def test_a_run_goes_on_where_another_one_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutant_runs.outcome, "RESULTS", tmp_path)
    asked = argparse.Namespace(seed=0, plans=False, json=True, resume=True)
    for name, killed in (("a", True), ("b", False), ("c", False), ("b", True)):
        Record("mutants", asked).add(Verdict(f"codegen/x.py:1: {name}", killed, "", 1.0))
    told = json.loads((tmp_path / "mutants.json").read_text())
    assert (told["killed"], told["of"], len(told["verdicts"])) == (2, 3, 3)
    Record("mutants", asked).forget_but({"codegen/x.py:1: a"})
    left = [v["mutant"][-1] for v in Record("mutants", asked).verdicts]
    assert left == ["a", "b"], "c lived in code that is gone"
    assert Record("mutants", argparse.Namespace(**{**vars(asked), "resume": False})).verdicts == []
