"""The driver of `make world` and its page, on a made-up package in a temporary folder, without network."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import suites
import torch
import tried
import world
import world_page
from comparison import Verdict, judged
from constructors import Maker
from packages import Suite
from proposals import first_that_works
from published import found, limit, sources, survey
from scenes import SCENES
from supervised import Child
from surroundings import placeless
from table import Row, rows
from worker import Row as Subject
from worker import drive, nothing

HERE = Path(__file__).resolve().parent
PACKAGE = {
    "__init__.py": "",
    "kernels.py": """
        import torch
        from torch.autograd import Function

        class Twice(Function):
            @staticmethod
            def forward(ctx, x, by=2.0):
                ctx.by = by
                return x * by

            @staticmethod
            def backward(ctx, grad):
                return grad * ctx.by, None

        class Counted(Function):
            calls = 0

            @staticmethod
            def forward(ctx, x):
                Counted.calls += 1
                return x + 1

            @staticmethod
            def backward(ctx, grad):
                return grad

        class Outer:
            class Inner(Function):
                @staticmethod
                def forward(ctx, x, index):
                    ctx.save_for_backward(index)
                    return x[index]

                @staticmethod
                def backward(ctx, grad):
                    index, = ctx.saved_tensors
                    return grad.new_zeros(4).index_add(0, index, grad), None

        class Kills(Function):
            @staticmethod
            def forward(ctx, x):
                import os
                os._exit(3)
        """,
    "broken.py": "import torch.autograd, nowhere_to_be_found",
    "slow.py": "import torch.autograd\nwhile True: pass",
    "plain.py": "raise RuntimeError('never imported: it has nothing to do with it')",
    "tests/__init__.py": "",
    "tests/test_twice.py": """
        import torch
        from madeup.kernels import Twice

        def test_value():
            assert float(Twice.apply(torch.tensor(3.0))) == 6.0

        def test_that_fails_anyhow():
            assert False, "it does"

        def test_of_the_class_itself():
            assert "apply" not in Twice.__dict__
        """,
}


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in PACKAGE.items():
        path = tmp_path / "madeup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0] == "madeup"]:
        del sys.modules[name]


def told(row: Row, backends: tuple[str, ...] = ("reference",)) -> dict[str, Any]:
    child = Child([sys.executable, str(HERE / "worker.py")], 120)
    fact = world.merged({}, row, child, list(backends))
    child.end()
    return fact


# ------------------------------------------------------------------ finding
def test_classes_are_found_where_modules_can_be_imported(made_up: Path) -> None:
    report = survey("madeup", 1.0)
    assert [name for _, name in report["classes"]] == ["Counted", "Kills", "Outer.Inner", "Twice"]
    assert set(report["failed"]) == {"madeup.broken", "madeup.slow"}
    assert "nowhere_to_be_found" in report["failed"]["madeup.broken"]
    assert report["failed"]["madeup.slow"].startswith("TooLong")


def test_tests_of_a_package_are_not_imported(made_up: Path) -> None:
    modules = {name.removeprefix("madeup") for name, _ in sources("madeup")}
    assert modules == {"", ".kernels", ".broken", ".slow", ".plain"}


def test_a_class_of_another_package_is_not_counted(made_up: Path) -> None:
    survey("madeup", 1.0)
    assert found("made") == []


def test_a_limit_of_time_ends_what_computes() -> None:
    with pytest.raises(TimeoutError), limit(0.05):
        while True:
            pass


# ------------------------------------------------------------------ arguments
def test_the_same_text_makes_the_same_arguments() -> None:
    (a, b), (c, d) = Maker(1)("normal(4, 5), 2.0"), Maker(1)("normal(4, 5), 2.0")
    assert torch.equal(a, c) and b == d == 2.0 and a.requires_grad
    assert not torch.equal(a, Maker(2)("normal(4, 5)")[0])


def test_words_that_are_no_constructors_are_refused() -> None:
    with pytest.raises(NameError):
        Maker()("open('/')")


def test_arguments_are_guessed_from_the_signature(made_up: Path) -> None:
    survey("madeup", 1.0)
    kernels = sys.modules["madeup.kernels"]
    assert first_that_works(kernels.Twice) == ("normal(4, 5), 2.0", 2)
    text, worth = first_that_works(kernels.Outer.Inner)
    assert worth == 2 and "integers" in str(text)


def test_rows_of_a_table() -> None:
    text = "# words\n[madeup]\nmadeup.kernels:Outer.Inner    normal(4), integers(4, 3)\nmadeup.kernels:Twice\n"
    first, second = rows(text)
    assert first == Row("madeup", "madeup.kernels", "Outer.Inner", "normal(4), integers(4, 3)")
    assert second.arguments == ""
    with pytest.raises(ValueError, match="line 1"):
        rows("no row")


def test_every_row_of_the_table_names_constructors_that_there_are() -> None:
    table = rows()
    assert len({row.name for row in table}) == len(table)
    for row in table:
        compile(f"({row.arguments},)", row.name, "eval")


# ------------------------------------------------------------------ driving
def test_a_class_that_is_right_is_right_in_every_scene(made_up: Path) -> None:
    fact = told(Row("madeup", "madeup.kernels", "Twice", "normal(4, 5), 3.0"), ("reference", "interpret"))
    for backend in ("reference", "interpret"):
        found = fact["backends"][backend]
        assert list(found["scenes"]) == list(SCENES)
        assert world_page.words(found) == []
        assert world_page.capture_of(found) == "captured"


def test_a_class_that_writes_to_itself_is_split(made_up: Path) -> None:
    fact = told(Row("madeup", "madeup.kernels", "Counted", "normal(4, 5)"))
    assert world_page.capture_of(fact["backends"]["reference"]) == "split"


def test_a_worker_that_ends_is_one_row(made_up: Path) -> None:
    child = Child([sys.executable, str(HERE / "worker.py")], 120)
    lost = world.merged({}, Row("madeup", "madeup.kernels", "Kills", "normal(4)"), child, ["reference"])
    assert "3" in lost["backends"]["reference"]["lost"]
    fact = world.merged({}, Row("madeup", "madeup.kernels", "Twice", "normal(4)"), child, ["reference"])
    child.end()
    assert "lost" not in fact["backends"]["reference"] and len(fact["backends"]["reference"]["scenes"]) == len(SCENES)


def test_a_mistake_of_the_driver_costs_its_question_alone() -> None:
    code = "from supervised import answer; answer(lambda asked: [{'half': 1 // asked['by']}])"
    child = Child([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(HERE)!r}); {code}"], 60)
    assert list(child.ask({"by": 0})) == [{"lost": "ZeroDivisionError: integer division or modulo by zero"}]
    assert list(child.ask({"by": 1})) == [{"half": 1}, {"done": True}]
    child.end()


def test_a_silent_child_is_ended() -> None:
    child = Child([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    assert list(child.ask({})) == [{"lost": "silent for 0.2 s"}]


def test_a_class_that_is_not_there(made_up: Path) -> None:
    assert list(drive({"module": "madeup.kernels", "class": "Nobody", "arguments": "", "backends": []})) == [
        {"absent": "no such class"}
    ]


class Shifty:
    """An `apply` that is not what it is compared with."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def apply(self, x: torch.Tensor) -> Any:
        return self.change(x)


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def boom(x: torch.Tensor) -> Any:
    raise KeyError("u0")


FAULTS = {
    "values": lambda x: Same.apply(x + 1e-3),
    "facts": lambda x: Same.apply(x).t().contiguous().t(),
    "raises here": boom,
}


@pytest.mark.parametrize("word", FAULTS)
def test_a_fault_has_its_word(word: str) -> None:
    subject = Subject(Same, "normal(4, 5)")
    assert subject.verdict(Shifty(FAULTS[word]), "backward", "reference").word == word
    assert subject.verdict(Same, "backward", "reference") == Verdict("same")


def test_other_bits_are_told_from_the_same() -> None:
    eager = [("output 0", torch.tensor([1.0, 2.0]))]
    ours = [("output 0", torch.tensor([1.0, 2.0000002]))]
    wide = [("output 0", torch.tensor([1.0, 2.0000001], dtype=torch.float64))]
    assert judged(ours, eager, True, lambda: wide, nothing).word == "rounds"
    assert judged(ours, eager, False, lambda: wide, nothing).word == "same"


class RoundsInside(torch.autograd.Function):
    """Computes in float32 whatever it is given."""

    @staticmethod
    def forward(ctx, x):
        return x.float().exp().to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        return g


class Exact(torch.autograd.Function):
    """Computes in the dtype that it is given."""

    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        return g


def test_in_float64_a_class_that_casts_down_is_held_to_what_it_casts_to() -> None:
    for cls, rounding in ((RoundsInside, torch.finfo(torch.float32).eps), (Exact, torch.finfo(torch.float64).eps)):
        subject = Subject(cls, "normal(4, 5)")
        assert subject._unit(SCENES["float64"]) == rounding
        assert subject._unit(SCENES["bfloat16"]) == 0.0
    eager = [("output 0", torch.tensor([1.0, 2.0], dtype=torch.float64))]
    ours = [("output 0", eager[0][1] + 1e-7)]
    assert judged(ours, eager, False, lambda: None, nothing).word == "values"
    assert judged(ours, eager, False, lambda: None, nothing, lambda: 2.0**-23).word == "same"


def test_bytes_that_stand_for_floats_are_compared_as_numbers() -> None:
    eager, ours = (torch.tensor([1.0, float("nan"), last]).to(torch.float8_e4m3fn) for last in (2.0, 448.0))
    assert judged([("output 0", eager)], [("output 0", eager)], True, nothing, nothing).word == "same"
    assert judged([("output 0", ours)], [("output 0", eager)], True, nothing, nothing).word == "values"


def test_a_derived_result_is_compared_with_single_calls() -> None:
    right = [("output 0", torch.ones(3))]
    assert judged(right, RuntimeError("no rule"), True, nothing, lambda: right).word == "derives"
    wrong = [("output 0", torch.zeros(3))]
    assert judged(wrong, RuntimeError("no rule"), True, nothing, lambda: right).word == "wrong derivation"


def test_errors_are_compared_by_type() -> None:
    assert judged(ValueError("a"), ValueError("b"), True, nothing, nothing).word == "raises"
    assert judged(KeyError("a"), ValueError("b"), True, nothing, nothing).word == "refuses"


# ------------------------------------------------------------------ going on, suites, page
def test_folders_of_a_machine_are_not_written_down() -> None:
    told = {"why": ["ImportError: no 'tanh' (/home/me/.venv/lib/math.py)", "tests/math/test_a.py::test_b 1/2"]}
    assert placeless(told) == {"why": ["ImportError: no 'tanh' (math.py)", told["why"][1]]}


def test_a_second_run_goes_on_where_the_first_stopped(made_up: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made_up / "world.json"
    table = [Row("madeup", "madeup.kernels", "Twice", "normal(4, 5)")]
    world.driven(world.Results(path), table, ["reference"], False)
    assert "Twice: reference right" in capsys.readouterr().out
    again = world.Results(path)
    assert list(again.told["classes"]) == ["madeup.kernels:Twice"]
    world.driven(again, table, ["reference"], False)
    assert capsys.readouterr().out == ""


def test_a_suite_is_compared_test_by_test(made_up: Path) -> None:
    fact = suites.compared(Suite("madeup", ("tests",), inside="madeup"))
    assert fact["tests"] == 3
    assert fact["plain"]["outcomes"] == {"passed": 2, "failed": 1}
    (name, before, after, why), = fact["differ"]
    assert name.endswith("test_of_the_class_itself") and (before, after) == ("passed", "failed") and "apply" in why


def test_a_suite_without_its_package_says_so() -> None:
    assert "not installed" in suites.compared(Suite("nobody", (), inside="nobody_has_this"))["absent"]


def test_a_suite_of_a_repository_runs_at_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "someone+something" / "repo"
    tests = copy / "tests"
    tests.mkdir(parents=True)
    (tests / "test_a.py").write_text("import helper, other\n\ndef test_a():\n    assert helper.SEVEN < other.EIGHT\n")
    (copy / "more").mkdir()
    (copy / "more" / "other.py").write_text("EIGHT = 8")
    git = ["git", "-C", str(copy), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (copy / ".git").rename(tmp_path / "bare")
    (copy.parent / "repo").rename(copy.parent / "gone")
    (tmp_path / "bare").rename(copy)
    monkeypatch.setenv("WORLD_REPOSITORIES", str(tmp_path))
    monkeypatch.setattr(suites, "KEPT", tmp_path / "kept")
    lacking = (("helper.py", "SEVEN = 7"),)
    beside = (("someone/something", commit, "more"),)
    suite = Suite("a", ("tests",), repository="someone/something", commit=commit, lacking=lacking, beside=beside)
    fact = suites.compared(suite)
    assert fact["plain"]["outcomes"] == {"passed": 1} and fact["differ"] == []
    absent = suites.compared(Suite("b", ("tests",), repository="someone/something", commit="0" * 40))["absent"]
    assert "can be had" in absent
    without = replace(suite, beside=(("someone/something", "0" * 40, "more"),))
    assert "can be had" in suites.compared(without)["absent"]


def test_known_differences_have_their_reason() -> None:
    assert "contract, 18" in world_page.explained("there/test_autograd.py::TestAutograd::test_custom_function_error")
    assert world_page.explained("there.py::test_another") == ""


def test_the_page_names_every_difference() -> None:
    scenes = {"backward": ["same", ""], "jvp": ["values", "tangent 0: off by 1"],
              "vmap": ["refuses", "KeyError: a | ValueError: b"]}  # fmt: skip
    opaque = {"forward": ["opaque", "it prints (there.py:3)", "FG099"], "backward": ["compiled", "", ""]}
    told = {
        "surveys": {"madeup": {"classes": [["madeup.kernels", "Twice"]],
                               "failed": {"madeup.broken": "ModuleNotFoundError: no"}}},
        "classes": {"madeup.kernels:Twice": {"package": "madeup",
                                             "backends": {"reference": {"scenes": scenes, "records": opaque}}},
                    "madeup.kernels:Gone": {"package": "madeup", "absent": "no such class"}},
        "suites": {"madeup": {"tests": 2, "plain": {"outcomes": {"passed": 2}, "seconds": 1.0, "ended": ""},
                              "fusegrad": {"outcomes": {"passed": 1, "failed": 1}, "seconds": 3.0, "ended": ""},
                              "differ": [["test_a", "passed", "failed", "assert 0"]]}},
    }  # fmt: skip
    text = world_page.page(told, {"torchvision": "needs CUDA"})
    for line in (
        "- `madeup.kernels:Twice`, jvp, `reference`: values; tangent 0: off by 1",
        "- `madeup.kernels:Twice`, vmap, `reference`: KeyError: a \\| ValueError: b",
        "- `madeup.kernels:Gone`: no such class",
        "| 1 | FG099 | it prints | `madeup.kernels:Twice` |",
        "| madeup | 1 | 1 | 0 | 0 | 1 | 0 | 0 |",
        "| madeup | 2 | 2 passed | 1 failed, 1 passed | 1 | 1 -> 3 |",
        "- madeup: `test_a`: passed -> failed; assert 0",
        "- torchvision: needs CUDA",
        "- madeup: 1 modules: ModuleNotFoundError: no",
    ):
        assert line in text.splitlines()


def test_a_class_that_was_tried_is_found_by_the_end_of_its_path():
    one, other = tried.tried("a/b\tsrc/madeup/kernels.py\tTwice\n# text\na/c\tkernels/twice.py\tTwice")
    assert tried.named(one, ["other.kernels:Twice", "madeup.kernels:Outer.Twice"]) == "madeup.kernels:Outer.Twice"
    assert tried.named(other, ["madeup.kernels:Twice"]) is None and one.is_called("kernels", "Twice")
    assert tried.found_in({"madeup": {"classes": [["madeup.kernels", "Twice"]]}}) == ["madeup.kernels:Twice"]
    assert len(tried.tried()) > 400
