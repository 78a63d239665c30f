"""The rooms of the package: their order, their size, and no circle of files. Read from the sources with `ast`."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("ir", "tracer", "codegen", "runtime")
ORDER = (
    "settings", "values", "cache", "kernels", "execution", "capture", "fallback", "specialize", "compiled",
    "distributed", "persistence", "functorch", "autograd", "dynamo", "fast_path", "dispatch", "report",
    "swap", "profile", "export", "check", "bisect", "integrations", "commands",
)  # fmt: skip
"""The rooms of runtime/, the ground first: an import, lazy and TYPE_CHECKING ones included, never goes up."""
MOST_FILES = 13
"""Modules that a folder holds, beside its `__init__`."""

Edge = tuple[str, str]


def modules() -> dict[str, Path]:
    """ "ir.passes.fuse" -> its path."""
    return {".".join(dotted(path)): path for top in TOPS for path in sorted((ROOT / top).rglob("*.py"))}


def dotted(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported(path: Path, known: dict[str, Path]) -> Iterator[Path]:
    """The files that a file imports, wherever in it, for types alone as well."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = ".".join((*package[: len(package) - node.level + 1], *filter(None, [node.module])))
        found = (known.get(f"{base}.{alias.name}", known.get(base)) for alias in node.names)
        yield from (target for target in found if target is not None and target != path)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def edges() -> set[Edge]:
    known = modules()
    return {(name(path), name(target)) for path in known.values() for target in imported(path, known)}


def room(file: str) -> str | None:
    """The room of runtime/ that a file is in."""
    parts = file.split("/")
    return parts[1] if parts[0] == "runtime" and len(parts) > 2 else None


def goes_up(edge: Edge) -> bool:
    """Whether an import leads to a room above its own."""
    rooms = [room(file) for file in edge]
    return None not in rooms and ORDER.index(rooms[1]) > ORDER.index(rooms[0])  # type: ignore[arg-type]


def circles(found: set[Edge]) -> list[set[str]]:
    return [c for c in nx.strongly_connected_components(nx.DiGraph(sorted(found))) if len(c) > 1]


def crowded() -> dict[str, int]:
    counts = Counter(name(path.parent) for path in modules().values() if path.name != "__init__.py")
    return {folder: n for folder, n in counts.items() if n > MOST_FILES}


def test_every_room_has_its_place_in_the_order() -> None:
    assert {room(name(path)) for path in modules().values()} - {None} == set(ORDER)


def test_every_room_says_what_it_is() -> None:
    folders = {path.parent for path in modules().values()} - {ROOT / top for top in TOPS}
    inits = [folder / "__init__.py" for folder in sorted(folders)]
    assert [name(i) for i in inits if not ast.get_docstring(ast.parse(i.read_text(encoding="utf-8")))] == []


def test_no_import_goes_up() -> None:
    assert [edge for edge in sorted(edges()) if goes_up(edge)] == []


def test_no_circle_of_files() -> None:
    assert circles(edges()) == []


def test_no_folder_is_crowded() -> None:
    assert crowded() == {}


@pytest.mark.parametrize("line", ["from ..commands import bench", "def f():\n    from ..commands import bench"])
def test_an_import_that_goes_up_is_found(line: str, tmp_path: Path) -> None:
    known = modules()
    path = ROOT / "runtime" / "values" / "tensor_specs.py"
    tree = ast.parse(line)
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom))
    assert node.level == 2 and "runtime.commands.bench" in known
    assert goes_up((name(path), name(known["runtime.commands.bench"])))


def test_a_circle_is_found() -> None:
    found = edges()
    low, high = next((a, b) for a, b in sorted(found) if (b, a) not in found)
    assert {low, high} in [c & {low, high} for c in circles({*found, (high, low)})]


def test_the_documentation_lists_the_rooms() -> None:
    """From the roof to the ground, each with its own sentence."""
    page = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    inits = {r: ROOT / "runtime" / r / "__init__.py" for r in reversed(ORDER)}
    sentences = {r: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for r, path in inits.items()}
    rows = [f"| `{r}/` | {(text or '').splitlines()[0]} |" for r, text in sentences.items()]
    assert "\n".join(rows) in page
