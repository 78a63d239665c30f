"""The name of a value in reports: the user's own, else what its line makes of it, else the line."""

from __future__ import annotations

import re

from ..graph import Value
from ..prims import PRIMS

LONGEST = 60
"""Letters of a line that stands for a name."""


def source_name(value: Value) -> str:
    """s of `s = (q @ k.mT) * scale`, for the product as well as for what is scaled."""
    known = value.origin.name or _name_on_its_line(value) or assigned_name(value)
    return known or _quoted(value) or value.origin.where or f"%{value.id}"


def made_name(value: Value) -> str:
    """The user's name, or the operation and what it is of: "amax of scores"."""
    if value.origin.name or not value.args:
        return value.origin.name or value.prim
    names = dict.fromkeys(_own_name(_below_layout(a)) for a in value.args)
    if all(names):
        return f"{value.prim} of {' and '.join(map(str, names))}"
    made = assigned_name(value)
    return f"{value.prim} for {made}" if made else value.prim


WORDS = {"amax": "max", "amin": "min", "sum": "sum", "prod": "product", "log": "log"}
"""How a variable of a reduction ends."""
ALONE = {"amax": "maxima", "amin": "minima", "sum": "sums"}
"""The same, where nothing has a name."""


def variable_name(value: Value) -> str | None:
    """The user's name, or one for what is reduced: scores_max, g_out_sum; None for other values without a name."""
    value = _below_layout(value)
    if value.origin.name or value.prim not in WORDS:
        return value.origin.name
    operand = _below_layout(value.args[0])
    parts = [operand] if operand.origin.name or operand.prim != "mul" else list(map(_below_layout, operand.args))
    names = [_own_name(p) for p in parts]
    stem = "_".join(n for n in names if n) if all(names) else assigned_name(value)
    return f"{stem}_{WORDS[value.prim]}" if stem else ALONE.get(value.prim)


def _own_name(value: Value) -> str | None:
    return str(value.params["name"]) if value.prim == "input" else value.origin.name


def _below_layout(value: Value) -> Value:
    """The named value, or what is under its casts and changes of shape."""
    while value.args and not value.origin.name and (value.prim == "cast" or PRIMS[value.prim].family == "layout"):
        value = value.args[0]
    return value


def source_place(value: Value) -> str:
    """`file:line` without folders; "" where it is not known."""
    return (value.origin.where or "").rsplit("/", 1)[-1].rsplit("\\", 1)[-1]


def _name_on_its_line(value: Value) -> str | None:
    """The name that the rest of its line gives to what is made of it alone."""
    where, users = value.origin.where, value.users
    while where and len(users) == 1 and users[0].origin.where == where:
        if users[0].origin.name:
            return users[0].origin.name
        users = users[0].users
    return None


def assigned_name(value: Value) -> str | None:
    """p of `p = softmax(q @ k.mT, -1)`."""
    found = re.match(r"(\w+) = ", (value.origin.line or "").strip())
    return found[1] if found else None


def _quoted(value: Value) -> str:
    """The line in quotation marks, or how it begins."""
    line = " ".join((value.origin.line or "").split())
    return f"`{line if len(line) <= LONGEST else line[: LONGEST - 3] + '...'}`" if line else ""
