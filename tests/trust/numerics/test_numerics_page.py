"""The page has a row for everything that is lowered, says what is on record, and a sample of it is measured again."""

from __future__ import annotations

import json
import re
from typing import Any

import derivative_rows
import measure
import nvidia
import operator_rows
import primitive_rows
import pytest
import reduction_rows
import torch
from harness import T
from numerics_page import KNOWN, page

from fusegrad.ir import emit

FOUND: dict[str, Any] = json.loads(measure.RESULTS.read_text(encoding="utf-8"))
NAMES = sorted(primitive_rows.elementwise())
OPS = ("nn.functional.gelu", "nn.functional.softplus", "hypot")


def names(part: str, **like: str) -> set[str]:
    return {r["op"] for r in FOUND[part] if all(r[k] == v for k, v in like.items())}


def test_the_page_is_what_is_on_record() -> None:
    assert measure.PAGE.read_text(encoding="utf-8") == page(FOUND), "python tests/trust/numerics/measure.py --page"


def test_everything_that_is_emitted_has_a_row() -> None:
    assert names("primitives") == {*primitive_rows.elementwise(), "cast"}, "make numerics"
    assert names("reductions") == set(reduction_rows.NAMES), "make numerics"
    assert names("derivatives", kind="primitive") == set(derivative_rows.of_primitives()), "make numerics"
    assert FOUND["nvidia"].keys() == {
        n for n in primitive_rows.elementwise() if "f32" in primitive_rows.dtypes_of(n) and n != "where"
    }


@pytest.mark.skipif(FOUND["torch"] != torch.__version__, reason="another torch has other operations")
def test_everything_that_is_lowered_has_a_row() -> None:
    assert names("operators") == operator_rows.lowered_ops().keys(), "make numerics"


def test_no_row_breaks_the_bound() -> None:
    rows = [r for part in ("primitives", "reductions", "operators", "derivatives") for r in FOUND[part]]
    assert not [(r["op"], r["dtype"], r["worst"]) for r in rows if (r["over"] or r["odd"]) and r["op"] not in KNOWN]


@pytest.mark.parametrize("name", NAMES)
def test_primitives_are_as_accurate_as_eager(name: str) -> None:
    for dtype in primitive_rows.dtypes_of(name):
        found = primitive_rows.measured(name, dtype, 1 << 10)
        assert found.good, (dtype, found.worst)


@pytest.mark.parametrize("name", ["relu", "atan2", "softplus", "amax, ties"])
def test_derivatives_are_torch_s_where_functions_bend(name: str) -> None:
    assert derivative_rows.singular(name).good


def test_rules_of_derivatives_are_torch_s() -> None:
    for name in ("atan2", "pow", "abs", "hypot", "log10"):
        found = derivative_rows.primitive(name)
        assert found.good, found.worst


def test_operations_are_as_accurate_as_eager() -> None:
    shown = list(operator_rows.all_shown(lambda info: info.name in OPS, (torch.float32,)))
    assert len(shown) >= 5 and all(s.errors.keys() >= {"reference"} for _, _, s in shown)
    assert all(e.good for _, _, s in shown for e in s.errors.values())


def together(x: T, y: T) -> T:
    """A quotient, a root, a function, and a product that could be contracted with a sum."""
    product = T(emit("add", emit("mul", x.v, y.v), x.v))
    return T(emit("sigmoid", emit("div", emit("sqrt", product.v), y.v)))


def test_nothing_is_approximated_unless_asked() -> None:
    exact, loose = (nvidia.ptx(together, "f32", 2, fast) for fast in (False, True))
    assert {"div.rn.f32", "sqrt.rn.f32", "mul.rn.f32", "add.rn.f32"} <= set(nvidia.ARITHMETIC.findall(exact))
    assert not re.search(r"div\.full|sqrt\.approx", exact)
    assert {"div.full.f32", "sqrt.approx.ftz.f32"} <= set(re.findall(r"[\w.]*(?:div|sqrt)\.[\w.]+", loose))


def test_a_wrong_result_is_seen() -> None:
    """The measure itself: an error of three units, a zero of the other sign, and an infinity are told from eager's."""
    from accuracy import compared

    eager = torch.tensor([1.0, 0.0, 2.0, float("nan")])
    truth = eager.double().numpy()
    assert compared(eager.clone(), eager, truth).good
    for place, value in ((0, 1.0 + 3 * 2.0**-23), (1, -0.0), (2, float("inf")), (3, 1.0)):
        found = eager.clone()
        found[place] = value
        assert not compared(found, eager, truth).good
