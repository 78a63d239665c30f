"""Where a derivative is a matter of choice, and at infinities: the numbers that torch 2.13 gives for the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from transform_samples import Rules, f64, run

from fusegrad.ir import Graph, Value, building, emit
from fusegrad.ir.transforms.linearize import linearize
from fusegrad.ir.transforms.transpose import vjp

INF, NAN = float("inf"), float("nan")
Build = Callable[..., Value]


def prim(name: str, **params: object) -> Build:
    return lambda *xs: emit(name, *xs, **params)


def clamp(x: Value) -> Value:
    low, high = (emit("full", value=v, shape=x.shape, dtype=x.dtype) for v in (-1.0, 1.0))
    x = emit("where", emit("lt", x, low), low, x)
    return emit("where", emit("gt", x, high), high, x)


def relu(x: Value) -> Value:
    zero = emit("full", value=0.0, shape=x.shape, dtype=x.dtype)
    return emit("where", emit("le", x, zero), zero, x)


# name, function, inputs, the gradient of each for a cotangent of ones
KINKS: list[tuple[str, Build, list[list[float]], list[list[float]]]] = [
    ("abs", prim("abs"), [[-2, 0, 3, NAN]], [[-1, 0, 1, 0]]),
    ("clamp on its bounds", clamp, [[-2, -1, 0, 1, 2]], [[0, 1, 1, 1, 0]]),
    ("relu", relu, [[-1, 0, 1]], [[0, 0, 1]]),
    ("maximum of equals", prim("max"), [[1, 2, 3], [2, 2, 2]], [[0, 0.5, 1], [1, 0.5, 0]]),
    ("minimum of equals", prim("min"), [[1, 2, 3], [2, 2, 2]], [[1, 0.5, 0], [0, 0.5, 1]]),
    ("amax of equals", prim("amax", axes=(0,)), [[3, 1, 3, 3]], [[1 / 3, 0, 1 / 3, 1 / 3]]),
    ("amin of equals", prim("amin", axes=(0,)), [[3, 1, 1, 3]], [[0, 0.5, 0.5, 0]]),
    ("sqrt", prim("sqrt"), [[0, 4]], [[INF, 0.25]]),
    ("rsqrt", prim("rsqrt"), [[0, 4]], [[-INF, -0.0625]]),
    ("log", prim("log"), [[0, 2]], [[INF, 0.5]]),
    ("pow", prim("pow"), [[0, 0, 0, 2], [0, 2, 0.5, 0]], [[0, 0, INF, 0], [0, 0, 0, np.log(2)]]),
    ("pow of a negative base", prim("pow"), [[-2, -2], [2, 3]], [[-4, 12], [NAN, NAN]]),
    ("prod with one zero", prim("prod", axes=(0,)), [[2, 0, 3]], [[0, 6, 0]]),
    ("prod with two zeros", prim("prod", axes=(0,)), [[2, 0, 0]], [[0, 0, 0]]),
    ("remainder", prim("rem"), [[7, -7], [3, 3]], [[1, 1], [-2, 3]]),
    ("fmod", prim("fmod"), [[7, -7], [3, 3]], [[1, 1], [-2, 2]]),
]


def gradients(build: Build, inputs: list[list[float]]) -> list[np.ndarray]:
    graph = Graph("kink")
    xs = [graph.input(f64(len(x)), f"x{i}") for i, x in enumerate(inputs)]
    with building(graph):
        graph.returning([build(*xs)])
    pulled = vjp(graph, range(len(xs)), rules=Rules())
    arrays = [np.array(x, float) for x in inputs]
    return run(pulled, [*arrays, np.ones(tuple(graph.outputs[0].shape))], {})


@pytest.mark.parametrize(("build", "inputs", "expected"), [k[1:] for k in KINKS], ids=[k[0] for k in KINKS])
def test_the_gradient_at_a_kink_is_torchs(build: Build, inputs: list[list[float]], expected: list[list[float]]) -> None:
    for found, numbers in zip(gradients(build, inputs), expected, strict=True):
        np.testing.assert_allclose(found, numbers)


def test_a_zero_tangent_through_the_root_of_zero_is_not_a_number() -> None:
    """As in torch: 0 / (2 * sqrt(0))."""
    graph = Graph("root")
    x = graph.input(f64(2), "x")
    graph.returning([graph.emit("sqrt", (x,), {})])
    (found,) = run(linearize(graph, (0,)), [np.array([0.0, 1.0]), np.zeros(2)], {})
    assert np.isnan(found[0]) and found[1] == 0


def test_the_second_derivative_of_a_product_with_zeros_is_whole() -> None:
    """prod(2, 0, 0) has a gradient of zeros, and d2/dx1 dx2 = 2."""
    graph = Graph("product")
    x = graph.input(f64(3), "x")
    graph.returning([graph.emit("prod", (x,), {"axes": (0,)})])
    second = linearize(vjp(graph, (0,), rules=Rules()), (0,), Rules())
    (found,) = run(second, [np.array([2.0, 0.0, 0.0]), np.array(1.0), np.array([0.0, 1.0, 0.0])], {})
    np.testing.assert_allclose(found, [0, 0, 2])


def test_complex_residuals_are_conjugated_by_the_adjoint() -> None:
    """Cotangents of complex values pair by Re<a, conj b>: for y = x * w, x_bar = y_bar * conj(w)."""
    graph = Graph("complex")
    x, w = (graph.input(f64(2).with_dtype("c128"), name) for name in "xw")
    graph.returning([graph.emit("mul", (x, w), {}), graph.emit("conj", (x,), {}), graph.emit("div", (x, w), {})])
    a, b, c, d, e = np.random.default_rng(0).normal(size=(5, 2)) + 1j * np.random.default_rng(1).normal(size=(5, 2))
    back = run(vjp(graph, (0, 1)), [a, b, c, d, e], {})
    np.testing.assert_allclose(back[0], c * b.conj() + d.conj() + e / b.conj())
    np.testing.assert_allclose(back[1], c * a.conj() - e * (a / b / b).conj())
