"""No loop over the batch: neither the author's Python nor the kernels run more often for more samples."""

from __future__ import annotations

import sys

import pytest
from compose.composing import Call, compiled, directions, each
from compose.functions import CASES
from torch.func import grad, hessian, jvp, vmap

from fusegrad.runtime.kernels import interpreter as interpret

BY_NAME = {c.name: c for c in CASES}


def bodies(case) -> set:
    methods = (getattr(case.cls, n, None) for n in ("forward", "setup_context", "backward", "jvp"))
    return {code for m in methods if (code := getattr(m, "__code__", None)) is not None}


def calls(case, run) -> int:
    """How often the author's methods run within a call."""
    found, mine = 0, bodies(case)

    def watch(frame, event, _):
        nonlocal found
        found += event == "call" and frame.f_code in mine

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@each("bodies", where=lambda c: "vmap" not in c.wrote and "backward" in c.wrote)
def test_python_runs_while_capturing_only(case) -> None:
    f = Call(case, compiled(case).apply)
    per_sample = vmap(grad(f.loss, f.argnums))
    per_sample(*f.batch(3))
    assert calls(case, lambda: per_sample(*f.batch(3))) == 0
    assert calls(case, lambda: per_sample(*f.batch(40))) == 0


@pytest.mark.parametrize("name", ["AllRules", "BackwardAndJvp"])
def test_the_authors_own_rules_run_once_a_batch(name) -> None:
    case = BY_NAME[name]
    f = Call(case, compiled(case).apply)

    def run(lanes):
        tensors = f.batch(lanes)
        return lambda: jvp(f.of_floats(vmap(f.outputs), tensors), tensors, directions(tensors))

    run(3)()
    assert calls(case, run(3)) == calls(case, run(40)) <= 4


def test_the_count_can_find_a_loop() -> None:
    case = BY_NAME["GeluTanh"]
    eager = Call(case, case.cls.apply)
    assert calls(case, lambda: [eager.all(*eager.tensors(i)) for i in range(5)]) == 5


def launches(monkeypatch, run) -> int:
    """How many kernels Triton's interpreter launches within a call."""
    found, plain = [], interpret.run
    with monkeypatch.context() as patched:
        patched.setattr(interpret, "run", lambda kernel, *rest: (found.append(kernel.name), plain(kernel, *rest)))
        run()
    return len(found)


COMPOSED = {
    "vmap": lambda f: vmap(f.outputs),
    "vmap(grad)": lambda f: vmap(grad(f.loss, f.argnums)),
    "vmap(jvp)": lambda f: vmap(lambda *t: jvp(f.of_floats(f.outputs, t), f.floats(t), f.floats(t))),
    "vmap(hessian)": lambda f: vmap(hessian(f.loss, f.argnums)),
}
SAMPLE = [
    *[(n, c) for n in ("Snake", "RMSNorm", "Softmax") for c in ("vmap", "vmap(grad)", "vmap(jvp)")],
    *[(n, "vmap(grad)") for n in ("LearnedStep", "GatherColumns", "CumSum", "Moments", "Embedding")],
    ("GeluTanh", "vmap(hessian)"),
]


@pytest.mark.parametrize(("name", "composition"), SAMPLE)
def test_launches_do_not_depend_on_the_batch(name, composition, monkeypatch) -> None:
    f = Call(BY_NAME[name], compiled(BY_NAME[name], "interpret").apply)
    run = COMPOSED[composition](f)
    run(*f.batch(2))
    few, many = (launches(monkeypatch, lambda n=n: run(*f.batch(n))) for n in (2, 9))
    assert 0 < few == many
