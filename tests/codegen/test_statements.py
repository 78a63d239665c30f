"""The statement tree: dead code goes, faults are found, parentheses are where they must be."""

from __future__ import annotations

import pytest

from fusegrad.codegen.emit.statements import (
    Accumulate,
    For,
    Let,
    Store,
    binary,
    check,
    literal,
    name,
    prune,
    render,
    unary,
)
from fusegrad.ir.errors import InvalidGraphError

POINTER = binary("+", name("x_ptr"), name("lane"))


def test_parentheses() -> None:
    a, b, c = name("a"), name("b"), name("c")
    assert str(binary("-", a, binary("-", b, c))) == "a - (b - c)"
    assert str(binary("-", binary("-", a, b), c)) == "a - b - c"
    assert str(binary("*", binary("+", a, b), c)) == "(a + b) * c"
    assert str(binary("<", binary("<", a, b), c)) == "(a < b) < c"
    assert str(binary("*", a, unary("-", b))) == "a * -b"
    assert str(unary("-", literal(-1))) == "--1"
    assert str(binary("&", binary("<", a, b), c)) == "(a < b) & c"


def test_prune() -> None:
    loop = For("i", name("n"), [Accumulate("acc", "+=", name("step")), Let("dead", name("a"))])
    body = [Let("lane", name("a")), Let("step", name("a")), Let("acc", literal(0)), loop, Let("unused", name("acc"))]
    kept = prune([*body, Store(POINTER, name("acc"), None)], set())
    assert list(render(kept, "")) == [
        "lane = a", "step = a", "acc = 0", "for i in n:", "    acc += step", "tl.store(x_ptr + lane, acc)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ([Let("a", name("b"))], "b is read before it is defined"),
        ([Let("a", literal(1)), Let("a", literal(2))], "a is defined twice"),
        ([Store(POINTER, literal(0), None, frozenset(["inside"]))], "a store lacks the mask inside"),
        ([For("i", literal(1), [Let("a", name("i"))]), Let("b", name("a"))], "a is read before it is defined"),
    ],
)
def test_faults(body: list[object], fault: str) -> None:
    with pytest.raises(InvalidGraphError, match=fault):
        check(body, {"x_ptr", "lane"}, "kernel")  # type: ignore[arg-type]
