"""The generated kernels under Triton's interpreter: every kind of composition, for some Functions of every kind."""

from __future__ import annotations

import pytest
from compose.composing import LANES, agree, directions
from compose.functions import CASES
from torch.func import grad, jacfwd, jvp, vmap

BY_NAME = {c.name: c for c in CASES}
COMPOSED = {
    "vmap(grad)": lambda f: vmap(grad(f.loss, f.argnums))(*f.batch(LANES)),
    "grad(vmap)": lambda f: grad(lambda *t: vmap(f.loss)(*t).square().sum(), f.argnums)(*f.batch(LANES)),
    "vmap(jvp)": lambda f: vmap(
        lambda *t: jvp(f.of_floats(f.outputs, t), f.floats(t), directions(f.floats(t)))
    )(*f.batch(LANES)),
    "jacfwd": lambda f: jacfwd(f.outputs, f.argnums)(*f.point),
    "jvp(grad)": lambda f: jvp(
        grad(f.of_floats(f.loss), tuple(range(len(f.argnums)))), f.floats(), directions(f.floats())
    ),
}
SAMPLE = [
    ("Snake", "vmap(grad)"),
    ("CrossEntropy", "vmap(grad)"),
    ("RMSNorm", "jvp(grad)"),
    ("LearnedStep", "grad(vmap)"),
    ("Embedding", "vmap(jvp)"),
    ("CumSum", "jacfwd"),
    ("Attention", "grad(vmap)"),
    ("SeededDropout", "vmap(grad)"),
    ("ForwardOnly", "vmap(jvp)"),
    ("BackwardAndJvp", "vmap(jvp)"),
    ("Moments", "vmap(grad)"),
    ("Wrong", "jacfwd"),
]


@pytest.mark.parametrize(("name", "composition"), SAMPLE)
def test_kernels(name, composition) -> None:
    agree(BY_NAME[name], COMPOSED[composition], "interpret")
