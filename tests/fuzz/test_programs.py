"""Random programs: some in each run of the tests, 100,000 with `make fuzz`; and the tool finds what is planted."""

from __future__ import annotations

import argparse
import linecache
import random
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import fuzz_dying
import fuzz_runs
import pytest
import torch
from fuzz_laws import LAWS, broken
from fuzz_operations import FORWARD, LINEAR, NUMBERS, RANDOM
from fuzz_programs import Argument, Written, program, source, works
from fuzz_shrinking import script, shrunk
from fuzz_trials import Fault, Recipe, recipes, subject_of, tensors
from fuzz_trials import tested as tried
from torch.autograd import Function

import fusegrad
from fusegrad.runtime.check.compare import Difference, Tolerance
from fusegrad.runtime.check.subject import Subject, examine
from fusegrad.runtime.report.explain import compiler_of

SEEDS = range(0, 100_000, 5_000)
PER_TEST = 5


@pytest.mark.parametrize("first", range(0, len(SEEDS), PER_TEST))
def test_programs(first: int) -> None:
    for seed in SEEDS[first : first + PER_TEST]:
        found = tried(program(seed), "reference", seed, 3)
        assert not found.faults, f"seed {seed}: `make fuzz SEED={seed} N=1`\n{found.faults[0]}"


def test_a_program_on_kernels() -> None:
    seed = 20
    found = tried(program(seed), "interpret", seed, 2)
    assert not found.faults, f"seed {seed}: `make fuzz SEED={seed} N=1 BACKEND=interpret`\n{found.faults[0]}"


# ------------------------------------------------------------------ breadth
def test_there_are_enough_operations() -> None:
    texts = [t for table, _ in FORWARD for t in table] + [*LINEAR, *NUMBERS, *RANDOM]
    filled = [t.replace("{axis}", "0").replace("{k}", "True").replace("{", "").replace("}", "") for t in texts]
    assert len({name for text in filled for name in fuzz_runs.operations(text)}) >= 150


def test_every_kind_of_program_is_drawn() -> None:
    drawn = [program(seed) for seed in range(110)]
    kinds = {
        "functions": lambda p: p.kind == "function", "setup_context": lambda p: p.style == "setup",
        "autograd in backward": lambda p: p.inner, "writes to an argument": lambda p: p.dirty,
        "marks outputs": lambda p: p.fixed, "undefined gradients": lambda p: not p.materialize,
        "once differentiable": lambda p: p.once, "vmap rule": lambda p: p.vmap_rule,
        "None as output": lambda p: "None" in p.outputs, "numbers": lambda p: any(a.text for a in p.arguments),
        "random numbers": lambda p: any(w in source(p) for w in ("rand", "dropout", "normal_", "bernoulli")),
        "several outputs": lambda p: len(p.outputs) > 1,
        "three dtypes": lambda p: len({a.dtype for a in p.arguments}) > 2,
        "saved intermediates": lambda p: p.style == "ctx" and any(s.startswith("v") for s in p.saved),
        "empty": lambda p: any(0 in p.shape(a) for a in p.arguments),
        "0-d": lambda p: any(a.axes == () for a in p.arguments),
    }  # fmt: skip
    assert [kind for kind, holds in kinds.items() if not any(map(holds, drawn))] == []


def test_a_program_is_always_the_same() -> None:
    assert [program(seed) for seed in (7, 8)] == [program(seed) for seed in (7, 8)]


def test_every_kind_of_case_is_drawn() -> None:
    drawn = list(recipes(PLANTED, tensors(PLANTED, 0), random.Random(0), 2_000))
    assert {r.mode for r in drawn} > set(LAWS) | {"backward", "jvp", "hessian", "vmap(grad)"}
    assert any(r.sizes for r in drawn) and any(r.layouts for r in drawn)
    assert any(r.gradient != "contiguous" for r in drawn) and any(r.only is not None for r in drawn)


# ------------------------------------------------------------------ what is planted is found, and made small
PLANTED = Written(
    "Program0", "class", "setup", (3, 5, 7), (Argument("x0", (0, 1), "float32"), Argument("x1", (1,), "float32")),
    (("v0", "torch.tanh(x0)"), ("v1", "v0 + x1"), ("v2", "torch.sigmoid(v1)"), ("v3", "v2.sum(0)")), ("v2", "v3"),
    ("x0", "r1"), (("w0", "g0 * s0"), ("w1", "w0.neg()"), ("w2", "w1 + g1")), ("w2", "None"),
)  # fmt: skip


def mistaken(cls: Any) -> Any:
    """The class with outputs that are one in a hundred too large."""

    class Mistaken(cls):  # type: ignore[misc]
        @staticmethod
        def forward(*args: Any) -> Any:
            made = cls.forward(*args)
            return 1.01 * made if isinstance(made, torch.Tensor) else tuple(1.01 * o for o in made)

    return Mistaken


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What computes a sigmoid is compiled wrongly."""
    fresh = Subject.compile_again

    def faulty(self: Subject) -> Any:
        if "torch.sigmoid" not in "".join(linecache.getlines(f"<{self.name}>")):
            return fresh(self)
        fast = fusegrad.compile(mistaken(self.user), **self.options)
        return fast.apply, compiler_of(fast)

    monkeypatch.setattr(Subject, "compile_again", faulty)


def test_a_fault_is_found_made_small_and_written(
    planted: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert works(PLANTED)
    (fault,) = tried(PLANTED, "reference", 0, 1).faults
    small = shrunk(replace(fault, recipe=replace(fault.recipe, gradient="transposed")))
    assert [text for _, text in small.program.forward] in (["torch.sigmoid(x0)"], ["torch.sigmoid(x1)"])
    assert (len(small.program.arguments), len(small.program.outputs), small.program.saved) == (1, 1, ())
    assert small.recipe == Recipe() and max(x.numel() for x in small.case.xs) <= 5
    path = tmp_path / "reproducer.py"
    path.write_text(script(small), encoding="utf-8")
    runpy.run_path(str(path), run_name="__main__")  # nothing is wrong without what is planted
    own = fusegrad.compile
    monkeypatch.setattr(fusegrad, "compile", lambda cls, **options: own(mistaken(cls), **options))
    with pytest.raises(AssertionError):
        runpy.run_path(str(path), run_name="__main__")
    assert "fusegrad:" in capsys.readouterr().out


def test_a_law_that_is_broken_is_written_too(tmp_path: Path) -> None:
    p = replace(PLANTED, name="Program1")
    _, xs = subject_of(p, "reference", 0)
    recipe = Recipe("law: backward is linear")
    fault = Fault(p, "reference", recipe, recipe.case(xs), Difference("gradient 0", "differs", (0,), 1.0, 2.0))
    path = tmp_path / "reproducer.py"
    path.write_text(script(fault), encoding="utf-8")
    with pytest.raises(SystemExit) as found:
        runpy.run_path(str(path), run_name="__main__")
    assert not found.value.code


def test_laws_are_broken_by_what_breaks_them() -> None:
    """A backward that is not linear, and one row that knows of the others."""
    case = Recipe("law: backward is linear").case((torch.arange(4.0).requires_grad_(),))
    for wrong, broken_one in ((Affine, "law: backward is linear"), (FirstRow, "law: permuted rows")):
        subject, _ = examine(fusegrad.compile(Kept), case.xs, {}, "reference", Tolerance(), 0)
        assert [broken(subject, replace(case, mode=law), 1e-7)[1] for law in LAWS] == [None] * len(LAWS)
        subject.fast = wrong.apply
        assert broken(subject, replace(case, mode=broken_one), 1e-7)[1] is not None


class Kept(Function):
    """Each row by itself, with a linear backward."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


class Affine(Kept):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2 + 1


class FirstRow(Kept):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + x[0]


# ------------------------------------------------------------------ the command
def test_a_process_that_dies_or_hangs_is_a_fault_and_the_run_goes_on() -> None:
    options = argparse.Namespace(jobs=1, timeout=0.5, work=fuzz_dying.work)
    run_faults = {a["seed"]: [f["kind"] for f in a["faults"]] for a in fuzz_runs.answers(range(4), options)}
    assert run_faults == {0: [], 1: ["the process died, exit code 3"], 2: ["no answer in 0.5 s"], 3: []}


def test_runs_in_pieces_add_up(tmp_path: Path) -> None:
    path = tmp_path / "fuzz.json"
    for seeds in ((0, 1, 2), (7, 5, 6)):
        total = fuzz_runs.Sum()
        for seed in seeds:
            counts = {"modes": {"backward": 2}, "results": {"ok": 2}, "written": []}
            total.add({"seed": seed, "faults": [], "ops": ["exp"], "by_backend": {"reference": counts}})
        fuzz_runs.keep(path, fuzz_runs.saved(path), total)
    found = fuzz_runs.saved(path)["total"]
    assert found == {"programs": 6, "seeds": [[0, 3], [5, 8]], "operations": 1, "cases": 12, "faults": 0, "open": []}


def test_what_was_wrong_counts_until_it_ran_again(tmp_path: Path) -> None:
    path, wrong = tmp_path / "fuzz.json", [{"kind": "numbers", "text": ""}]
    for seeds, faults in (((0, 1, 2), {1: wrong, 2: wrong}), ((2, 3), {3: wrong})):
        total = fuzz_runs.Sum()
        for seed in seeds:
            total.add({"seed": seed, "faults": faults.get(seed, [])})
        fuzz_runs.keep(path, fuzz_runs.saved(path), total)
    found = fuzz_runs.saved(path)["total"]
    assert (found["programs"], found["faults"], found["open"]) == (4, 3, [1, 3])


def test_operations_are_counted_by_name() -> None:
    found = fuzz_runs.operations("y = torch.exp(-x) + F.silu(x)[0] @ (x > 0)")
    assert found == ["add", "exp", "getitem", "gt", "matmul", "neg", "silu"]
