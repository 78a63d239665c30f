"""Random Functions as people write them: a few in each run of the tests, more with `make fuzz-habits`."""

from __future__ import annotations

import pytest
from fuzz_habits import FORMS, HABITS, PLAIN, Fragment, Habitual, source
from habits import WAYS, Call, arguments, difference, loaded, told
from habits import tested as tried

import fusegrad

PLAIN_CLASS = Habitual("Habitual", "ctx", (4, 5), "float32", (PLAIN[0],), (PLAIN[0],))
STORY = (Call("backward", 0), Call("double", 1), Call("backward", 2))


@pytest.mark.parametrize("seed", (*range(50000, 50008), 215, 550))
def test_a_class_with_habits(seed: int) -> None:
    found = tried(seed)
    assert not found.faults, f"`make fuzz-habits SEED={seed} N=1`\n{found.faults[0]['text']}"


@pytest.mark.parametrize("habit", HABITS, ids=lambda f: f.name)
def test_every_habit_is_valid(habit: Fragment) -> None:
    """Eager runs a class with it, so that a story is not one of errors."""
    forward = () if habit.only == "backward" else (habit,)
    after = Fragment(habit.name, habit.used) if habit.kept else habit
    backward = (after,) if habit.kept or habit.only == "backward" else ()
    p = Habitual("Habitual", "ctx", (4, 5), "float32", forward, backward)
    module = loaded(p)
    (facts,) = told(p, module, module[p.name].apply, (Call("backward", 0),))
    assert facts[0][0] == "output"
    assert any(name == "gradient 0" for name, _ in facts), source(p)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_valid(form: str) -> None:
    p = Habitual("Habitual", "ctx", (4, 5), "float32", (PLAIN[0],), (PLAIN[0],), form=form)
    module = loaded(p)
    told_of = told(p, module, module[p.name].apply, tuple(Call(way, 0) for way in WAYS))
    assert all(facts[0][0] != "raises" for facts in told_of), source(p)


def test_a_story_notices_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself: a class whose results are doubled is found out."""
    assert difference(PLAIN_CLASS, STORY, "reference") is None
    honest = fusegrad.compile

    class Doubled:
        def __init__(self, cls: type) -> None:
            self.fast = honest(cls, backend="reference")

        def apply(self, *args: object) -> object:
            return self.fast.apply(*args) * 2

    monkeypatch.setattr(fusegrad, "compile", lambda cls, backend: Doubled(cls))
    assert "output" in (difference(PLAIN_CLASS, STORY, "reference") or "")


def test_numbers_change_sign() -> None:
    """So that branches on data turn in a story."""
    signs = {bool((arguments(PLAIN_CLASS, Call("backward", n))[0] > 0).all()) for n in range(3)}
    assert signs == {True, False}
