"""The pictures of the site: drawn by the package from real captures; the pipeline and a call as boxes and arrows."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import fusegrad

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "swiglu": ("SwiGLU", ("bf16[8192,4096]", "bf16[8192,4096]")),
    "rms_norm": ("RMSNorm", ("bf16[8192,4096]", "bf16[4096]", 1e-6)),
    "cross_entropy": ("CrossEntropy", ("bf16[8192,32000]", "i64[8192]", -100, 0.0, 0.0)),
}
"""Examples that are drawn: the class, and what it is called with."""


def example(name: str) -> Any:
    """The compiled class of a script under examples/."""
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return getattr(importlib.import_module(name), ARGUMENTS[name][0])


def files() -> Iterator[tuple[str, str]]:
    """(path within the site, content)"""
    yield "pictures/pipeline.svg", pipeline()
    yield "pictures/call.svg", call()
    for name, (_, arguments) in ARGUMENTS.items():
        yield f"pictures/{name}.svg", fusegrad.export(example(name), *arguments, format="svg")
        yield f"samples/{name}.html", fusegrad.export(example(name), *arguments, format="html")
        yield f"samples/{name}.py", fusegrad.export(example(name), *arguments, format="py")


# ------------------------------------------------------------------ the pipeline
STAGES = (
    ("Function class", ("forward", "backward", "in plain PyTorch"), "yours"),
    ("tracer", ("runs each method once", "on fake tensors"), "tracer"),
    ("graphs", ("forward, backward", "and the residual map"), "ir"),
    ("transforms", ("batch, linearize,", "transpose: when asked"), "ir"),
    ("passes", ("simplify, contract,", "recompute, fuse"), "ir"),
    ("codegen", ("axes, schedule, loops", "one kernel a group"), "codegen"),
    ("Triton text", ("readable, exported", "or compiled"), "codegen"),
    ("runtime", ("guards, cache, launch", "Fast.apply(...)"), "runtime"),
)
"""The name of a stage, what it does in two or three lines, and where it lives."""
FILLS = {"yours": "#fff1d6", "tracer": "#e6f6ea", "ir": "#e7f0fb", "codegen": "#efe9fb", "runtime": "#f3f4f6"}
LINES = {"yours": "#b7791f", "tracer": "#2f855a", "ir": "#3b6fb6", "codegen": "#6b46c1", "runtime": "#6b7280"}
BOX, GAP, TALL, ROW, EDGE = 208, 52, 104, 4, 20


def pipeline() -> str:
    """Two rows of boxes with arrows between, the second from right to left below the first."""
    width, height = EDGE * 2 + ROW * BOX + (ROW - 1) * GAP, EDGE * 2 + 2 * TALL + GAP
    parts = [*arrows(), *(part for at in range(len(STAGES)) for part in stage(at))]
    return drawing("from a class to kernels", width, height, parts)


def drawing(title: str, width: float, height: float, parts: Iterable[str]) -> str:
    """A picture of boxes and arrows."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif" font-size="14"><title>{escape(title)}</title>'
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 8 4 0 8z" fill="#6b7280"/></marker></defs>'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def corner(at: int) -> tuple[int, int]:
    """Where a box begins: rows are read as one writes a snake."""
    row, column = divmod(at, ROW)
    column = column if row % 2 == 0 else ROW - 1 - column
    return EDGE + column * (BOX + GAP), EDGE + row * (TALL + GAP)


def stage(at: int) -> Iterator[str]:
    yield from box(*corner(at), BOX, TALL, *STAGES[at])


def box(x: float, y: float, width: float, height: float, name: str, words: Sequence[str], home: str) -> Iterator[str]:
    """A room: its name above what it does."""
    middle = x + width / 2
    paint = f'fill="{FILLS[home]}" stroke="{LINES[home]}"'
    yield f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" {paint}/>'
    yield f'<text x="{middle}" y="{y + 28}" text-anchor="middle" font-weight="bold">{escape(name)}</text>'
    for i, line in enumerate(words):
        yield f'<text x="{middle}" y="{y + 52 + 19 * i}" text-anchor="middle" fill="#374151">{escape(line)}</text>'


def arrows() -> Iterator[str]:
    for at in range(len(STAGES) - 1):
        (x, y), (to_x, to_y) = corner(at), corner(at + 1)
        if y != to_y:
            path = f"M{x + BOX / 2} {y + TALL}V{to_y - 3}"
        elif to_x > x:
            path = f"M{x + BOX} {y + TALL / 2}H{to_x - 3}"
        else:
            path = f"M{x} {y + TALL / 2}H{to_x + BOX + 3}"
        yield arrow(path)


def arrow(path: str) -> str:
    return f'<path d="{path}" stroke="#6b7280" stroke-width="1.6" fill="none" marker-end="url(#tip)"/>'


# ------------------------------------------------------------------ one call
Room = tuple[str, tuple[str, ...], str]
FLOORS: tuple[tuple[Room, ...], ...] = (
    (("dispatch/", ("Fast.apply(x): which way does this call take?",), "runtime"),),
    (
        ("fast_path/", ("came often: one", "written-out function"), "runtime"),
        ("autograd/", ("eager: a node", "and its backward"), "runtime"),
        ("functorch/", ("torch.func: vjp,", "jvp, vmap"), "runtime"),
        ("dynamo/", ("torch.compile,", "torch.export"), "runtime"),
        ("distributed/", ("DTensors: on", "each rank's parts"), "runtime"),
        ("fallback/", ("the user's own", "method, on record"), "yours"),
    ),
    (
        ("compiled/", ("the table of a class: one", "specialization a kind of call"), "runtime"),
        ("persistence/", ("from disk:", "another process made it"), "runtime"),
        ("specialize/", ("made now: capture, check,", "lower; then kernels"), "runtime"),
    ),
    (
        ("capture/ and tracer/", ("methods to graphs, with", "guards; the first call checked"), "tracer"),
        ("execution/ and ir/", ("lowered, simplified, fused;", "a plan of launches"), "ir"),
        ("codegen/", ("a group to Triton text,", "and its proofs"), "codegen"),
        ("kernels/", ("loaded, launched,", "interpreted"), "runtime"),
    ),
)
"""The floors that a call falls through; on each the rooms, left to right."""
WIDE, LOW = 1100, 84


def call() -> str:
    """Floors of boxes as wide as the picture, each under the arrows from the floor above."""
    parts: list[str] = []
    for level, rooms in enumerate(FLOORS):
        y, width = EDGE + level * (LOW + GAP), (WIDE - (len(rooms) - 1) * EDGE) / len(rooms)
        for at, room in enumerate(rooms):
            x = EDGE + at * (width + EDGE)
            parts += box(x, y, width, LOW, *room)
            parts += [arrow(f"M{x + width / 2} {y - GAP + 2}V{y - 3}")] if level else []
    return drawing("one call through the rooms", WIDE + 2 * EDGE, EDGE + len(FLOORS) * (LOW + GAP), parts)
