"""Virtual values: which products outgrow their operands, and how far what is made of them reaches."""

import sympy

from fusegrad.ir import parse
from fusegrad.ir.passes.virtual import virtual_values

HEADER = 'graph "g"\nsymbols m: positive, n: positive\n'
PAIR = """  %0 = input(name="q") : f32[n, 64]
  %1 = input(name="k") : f32[m, 64]
  %2 = dot(%0, %1, out_axes=(0, 2), x_axes=(0, 1), y_axes=(2, 1)) : f32[n, m]
"""
LARGE = {"n": 300, "m": 200}


def virtual(body: str, sizes: dict[str, int] = LARGE, pair: str = PAIR) -> list[str]:
    """The primitives of the virtual values of a graph, written as lines behind q, k and their product."""
    graph = parse(HEADER + pair + body)
    symbols = {s: sizes[s.name] for v in graph.inputs for n in v.shape for s in sympy.sympify(n).free_symbols}
    found = virtual_values(graph, symbols)
    return [v.prim for v in graph.order() if v.id in found]


ROWS = """  %3 = exp(%2) : f32[n, m]
  %4 = sum(%3, axes=(1,)) : f32[n]
  %5 = broadcast(%4, axes=(0,), shape=(n, m)) : f32[n, m]
  %6 = div(%3, %5) : f32[n, m]
  %7 = permute(%6, perm=(1, 0)) : f32[m, n]
  %8 = dot(%7, %0, out_axes=(0, 2), x_axes=(0, 1), y_axes=(1, 2)) : f32[m, 64]
  return %8, %4
"""


def test_what_is_made_of_a_large_product_is_virtual_and_what_it_is_summed_to_is_not() -> None:
    assert virtual(ROWS) == ["dot", "exp", "div", "permute"]


def test_the_sizes_at_hand_decide() -> None:
    assert virtual(ROWS, {"n": 64, "m": 64}) == [], "no larger than either operand"
    assert virtual(ROWS, {"n": 65, "m": 65}) == ["dot", "exp", "div", "permute"]


def test_few_rows_are_virtual_where_their_many_columns_are_summed() -> None:
    assert virtual(ROWS, {"n": 3, "m": 300}) == ["dot", "exp", "div", "permute"]
    assert virtual(ROWS, {"n": 300, "m": 3}) == ["dot", "exp", "div", "permute"], "of the transpose: by a product"
    columns = "  %3 = exp(%2) : f32[n, m]\n  %4 = sum(%3, axes=({},)) : f32[{}]\n  return %4\n"
    assert virtual(columns.format(1, "n"), {"n": 3, "m": 300}) == ["dot", "exp"]
    assert virtual(columns.format(1, "n"), {"n": 300, "m": 3}) == [], "a sum of few columns"
    assert virtual(columns.format(0, "m"), {"n": 3, "m": 300}) == [], "a sum of few rows"


def test_few_rows_that_are_contracted_along_too_many_places_are_not_virtual() -> None:
    body = "  %3 = exp(%2) : f32[n, m]\n  %4 = sum(%3, axes=(1,)) : f32[n]\n  return %4\n"
    for depth, found in ((256, ["dot", "exp"]), (257, [])):
        assert virtual(body, {"n": 3, "m": 300}, PAIR.replace("64", str(depth))) == found


def test_a_product_of_a_virtual_value_is_none_however_large_it_is() -> None:
    wide = """  %3 = input(name="v") : f32[m, 500]
  %4 = dot(%2, %3, out_axes=(0, 2), x_axes=(0, 1), y_axes=(1, 2)) : f32[n, 500]
  return %4
"""
    assert virtual(wide) == ["dot"]


def test_an_element_picked_of_a_virtual_value_is_none() -> None:
    picked = """  %3 = input(name="target") : i64[n]
  %4 = permute(%2, perm=(1, 0)) : f32[m, n]
  %5 = gather(%4, %3, axes=(0,)) : f32[n, n]
  return %5
"""
    assert virtual(picked) == ["dot", "permute"]


def test_nothing_dead_is_virtual() -> None:
    assert virtual("  return %0\n") == []
