"""Rules for loads, stores and atomic operations."""

from __future__ import annotations

import ast
from collections.abc import Callable

from ..polynomials import ZERO, Poly
from .reader import Reader
from .values import (
    Access,
    Assertion,
    Int,
    Kind,
    Opaque,
    Pointer,
    Ticket,
    Tiles,
    Truth,
    UnreadableText,
    Value,
    names_in,
)

WIDTHS = {"b1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "u8": 8, "u16": 16, "u32": 32, "u64": 64}


def access(reader: Reader, kind: Kind, node: ast.Call) -> Pointer:
    """Record an access of the first argument, under the mask where there is one."""
    pointer = reader.value(node.args[0])
    if not isinstance(pointer, Pointer):
        raise UnreadableText(f"{ast.unparse(node)} is no access", node.lineno)
    # The mask's facts hold where it touches memory; both the mask and the address have to be right in 32 bits.
    mask = mask_of(node)
    truth = reader.value(mask) if mask is not None else Truth()
    asserted = reader.asserted(mask)
    facts, needs = reader.facts + asserted, pointer.needs
    if isinstance(truth, Truth):
        facts, needs = facts + truth.true, needs + truth.needs
    reader.require(needs)
    stored = frozenset(names_in(node.args[1])) if kind == "store" else frozenset[str]()
    place, text = (pointer.name, pointer.offset), ast.unparse(node)
    atoms = pointer.offset.atoms & {a for fact in asserted for a in fact.atoms}
    by_assertion = any(reader.is_data(Poly.atom(a)) for a in atoms)
    reader.read.accesses.append(Access(kind, *place, facts, reader.tickets, node.lineno, text, stored, by_assertion))
    return pointer


def descriptor(reader: Reader, node: ast.Call) -> Value:
    """Lengths and strides are as wide as the accelerator takes them."""
    pointer, rest = reader.value(node.args[0]), [_listed(reader, a) for a in node.args[1:]]
    if not isinstance(pointer, Pointer) or len(rest) != 3:
        raise UnreadableText(f"{ast.unparse(node)} is no descriptor", node.lineno)
    reader.require(pointer.needs)
    return Tiles(pointer, *(tuple(i.poly for i in numbers) for numbers in rest))


def _listed(reader: Reader, node: ast.expr) -> list[Int]:
    if not isinstance(node, ast.List):
        raise UnreadableText(f"{ast.unparse(node)} is no list", node.lineno)
    numbers = [reader.integer(e) for e in node.elts]
    reader.require(need for n in numbers for need in n.needs)
    return numbers


def load_tile(reader: Reader, tiles: Tiles, node: ast.Call) -> Value:
    """Lanes outside of the matrix touch no memory: each index is within its length, or the place is not read."""
    offset, facts = tiles.matrix.offset, reader.facts
    for dim, (first, block) in enumerate(zip(_listed(reader, node.args[0]), tiles.blocks, strict=True)):
        lane = reader.along(f"tile {dim}", reader.lanes(ZERO, block))
        assert lane is not None
        at = first.poly + lane
        facts += (at, tiles.lengths[dim] - 1 - at)
        offset = offset + at * tiles.strides[dim]
    pointer = Pointer(tiles.matrix.name, offset)
    reader.read.accesses.append(
        Access("load", pointer.name, offset, facts, reader.tickets, node.lineno, ast.unparse(node))
    )
    return content(reader, pointer)


def mask_of(node: ast.Call) -> ast.expr | None:
    return next((k.value for k in node.keywords if k.arg == "mask"), None)


def device_assert(reader: Reader, node: ast.Call) -> Value:
    """The condition is a fact from here on, wherever the mask of the assertion holds."""
    truth, mask = reader.value(node.args[0]), mask_of(node)
    if isinstance(truth, Truth):
        reader.require(truth.needs)
        reader.assertions += (Assertion(truth.true, reader.conditions(mask)),)
    return Opaque()


def content(reader: Reader, pointer: Pointer) -> Value:
    """The value in memory: nothing is known of it but its dtype."""
    width = WIDTHS.get(reader.dtypes[pointer.name], 0)
    if width == 1:
        return Truth()
    return Int(reader.datum(pointer.name.removesuffix("_ptr")), width) if width else Opaque()


def store(reader: Reader, node: ast.Call) -> Value:
    reader.value(node.args[1])
    access(reader, "store", node)
    return Opaque()


def atomic_add(reader: Reader, node: ast.Call) -> Value:
    reader.value(node.args[1])
    return content(reader, access(reader, "atomic", node))


def are_missing(reader: Reader, node: ast.Call) -> Value:
    access(reader, "atomic", node)
    reader.require([need for argument in node.args[1:] for need in reader.integer(argument).needs])
    return Truth()


def tell(reader: Reader, node: ast.Call) -> Value:
    access(reader, "atomic", node)
    return Opaque()


def in_vain(reader: Reader, node: ast.Call) -> Value:
    access(reader, "atomic", node)
    return Truth()


def last_to_arrive(reader: Reader, node: ast.Call) -> Value:
    counter = access(reader, "atomic", node)
    reader.require(reader.integer(node.args[1]).needs)
    return Truth(ticket=Ticket(counter.name, counter.offset))


MEMORY: dict[str, Callable[[Reader, ast.Call], Value]] = {
    "tl.device_assert": device_assert,
    "tl.make_tensor_descriptor": descriptor,
    "tl.load": lambda reader, node: content(reader, access(reader, "load", node)),
    "tl.store": store,
    "tl.atomic_add": atomic_add,
    "known": lambda reader, node: content(reader, access(reader, "atomic", node)),
    "are_missing": are_missing,
    "last_to_arrive": last_to_arrive,
    "tell": tell,
    "in_vain": in_vain,
}
