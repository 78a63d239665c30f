"""Type rules: results, and refusals."""

import pytest
import sympy

from fusegrad.ir import TensorType
from fusegrad.ir.errors import TypeRuleError
from fusegrad.ir.infer import infer, is_at_most, sizes_equal, type_rules
from fusegrad.ir.prims import PRIMS

M = sympy.Symbol("M", integer=True, positive=True)
N = sympy.Symbol("N", integer=True, positive=True)


def t(*shape: object, dtype: str = "f32") -> TensorType:
    return TensorType(shape, dtype)


i64 = {"dtype": "i64"}

RIGHT = [
    ("neg", [t(M, 4)], {}, t(M, 4)),
    ("isnan", [t(M)], {}, t(M, dtype="b1")),
    ("add", [t(M * 2), t(M + M)], {}, t(2 * M)),
    ("lt", [t(3), t(3)], {}, t(3, dtype="b1")),
    ("where", [t(3, dtype="b1"), t(3), t(3)], {}, t(3)),
    ("cast", [t(3)], {"dtype": "bf16"}, t(3, dtype="bf16")),
    ("full", [], {"value": 1, "shape": (M,), "dtype": "i8"}, t(M, dtype="i8")),
    ("iota", [], {"size": M, "dtype": "i64"}, t(M, **i64)),
    ("broadcast", [t(4)], {"shape": (M, 4), "axes": (1,)}, t(M, 4)),
    ("broadcast", [t(M, 1)], {"shape": (M, 4), "axes": (0, 1)}, t(M, 4)),
    ("reshape", [t(M, 6)], {"shape": (2 * M, 3)}, t(2 * M, 3)),
    ("permute", [t(M, 4, 5)], {"perm": (2, 0, 1)}, t(5, M, 4)),
    ("slice", [t(M, 7)], {"start": (1, 0), "stop": (M, 7), "step": (1, 3)}, t(M - 1, 3)),
    ("pad", [t(3)], {"lo": (1,), "hi": (2,), "inner": (1,)}, t(8)),
    ("flip", [t(3)], {"axes": (0,)}, t(3)),
    ("cat", [t(M, 2), t(N, 2)], {"axis": 0}, t(M + N, 2)),
    ("sum", [t(M, 4, 5)], {"axes": (0, 2)}, t(4)),
    ("argmax", [t(M, 4)], {"axis": 1}, t(M, **i64)),
    ("cumsum", [t(M)], {"axis": 0, "reverse": False}, t(M)),
    ("dot", [t(M, 4), t(4, N)], {"x_axes": (0, 1), "y_axes": (1, 2), "out_axes": (2, 0)}, t(N, M)),
    ("gather", [t(M, 9, 5), t(7, 8, **i64)], {"axes": (1,)}, t(7, 8, M, 5)),
    ("scatter", [t(9, 5), t(7, 5), t(7, **i64)], {"axes": (0,), "mode": "add"}, t(9, 5)),
    ("random", [t(**i64), t(**i64)], {"shape": (M,), "dtype": "f32", "kind": "normal"}, t(M)),
]


@pytest.mark.parametrize(("prim", "operands", "params", "result"), RIGHT, ids=lambda p: p if isinstance(p, str) else "")
def test_result_types(prim: str, operands: list[TensorType], params: dict, result: TensorType) -> None:
    assert infer(prim, [(o,) for o in operands], params) == (result,)


WRONG = [
    ("mull", [t(3)], {}),
    ("neg", [t(3), t(3)], {}),
    ("neg", [t(3)], {"axis": 0}),
    ("add", [t(3), t(4)], {}),
    ("add", [t(3), t(3, dtype="f64")], {}),
    ("add", [t(M), t(N)], {}),
    ("add", [t(3), t(3, 1)], {}),
    ("where", [t(4, dtype="b1"), t(3), t(3)], {}),
    ("broadcast", [t(4)], {"shape": (M, 5), "axes": (1,)}),
    ("broadcast", [t(4, 5)], {"shape": (5, 4), "axes": (1, 0)}),
    ("reshape", [t(M, 6)], {"shape": (M, 5)}),
    ("sum", [t(4)], {"axes": (1,)}),
    ("sum", [t(4, 4)], {"axes": (1, 0)}),
    ("dot", [t(M, 4), t(4, N, dtype="bf16")], {"x_axes": (0, 1), "y_axes": (1, 2), "out_axes": (0, 2)}),
    ("gather", [t(9)], {"axes": ()}),
    ("scatter", [t(9, 5), t(7, 4), t(7, **i64)], {"axes": (0,), "mode": "add"}),
    ("scatter", [t(9, 5), t(7, 5), t(7, **i64)], {"axes": (0,), "mode": "mean"}),
]


@pytest.mark.parametrize(("prim", "operands", "params"), WRONG, ids=lambda p: p if isinstance(p, str) else "")
def test_refusals(prim: str, operands: list[TensorType], params: dict) -> None:
    with pytest.raises(TypeRuleError):
        infer(prim, [(o,) for o in operands], params)


def test_a_node_with_several_results_is_read_through_pick() -> None:
    two = (t(3), t(4))
    assert infer("pick", [two], {"index": 1}) == (t(4),)
    with pytest.raises(TypeRuleError, match="pick"):
        infer("neg", [two], {})


def test_every_primitive_has_a_rule() -> None:
    assert set(PRIMS) - set(type_rules) == {"input", "pick"}


@pytest.mark.parametrize(("a", "b"), [(M * (N + 1), M * N + M), (2 * M, M + M), (4, sympy.Integer(4)), (M, M)])
def test_equal_sizes(a: object, b: object) -> None:
    assert sizes_equal(a, b)


@pytest.mark.parametrize(("a", "b"), [(M, N), (M, 1), (3, 4), (M * N, M + N)])
def test_sizes_that_may_differ(a: object, b: object) -> None:
    assert not sizes_equal(a, b)


@pytest.mark.parametrize(("a", "b"), [(M, 2 * M - 1), (1, M), (M + N, M * N + 1), (3, 3), (M - 1, M)])
def test_sizes_that_are_at_most_as_large(a: object, b: object) -> None:
    assert is_at_most(a, b)


@pytest.mark.parametrize(("a", "b"), [(M, N), (2, M), (M + N, M * N), (2 * M, M + 1), (M, sympy.floor(M / 2) + 1)])
def test_sizes_that_may_be_larger(a: object, b: object) -> None:
    assert not is_at_most(a, b)
