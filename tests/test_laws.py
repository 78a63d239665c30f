"""The laws of the architecture: which room may import what, read from the sources with `ast`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusegrad.ir.codes import CODES, code_of

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]
NOT_PACKAGED = {"tests", "examples", "benchmarks", "docs", "build", "dist"}

# room -> the rooms that it may import, and the libraries that it may import besides Python's own
ROOMS = {
    "ir": {"ir"},
    "tracer": {"ir", "tracer"},
    "codegen": {"ir", "codegen"},
    "runtime": {"ir", "tracer", "codegen", "runtime"},
    "": {"ir", "tracer", "codegen", "runtime", ""},
}
LIBRARIES = {
    "ir": {"networkx", "numpy", "sympy"},
    "tracer": {"networkx", "numpy", "sympy", "torch"},
    "codegen": {"networkx", "numpy", "sympy"},
    "runtime": {"jinja2", "markupsafe", "networkx", "numpy", "pygments", "rich", "sympy", "torch", "triton"},
    "": set(),
}


def folder(package: str) -> Path:
    """fusegrad.ir.passes -> ROOT/ir/passes"""
    return ROOT.joinpath(*package.split(".")[1:])


MODULES = sorted(path for package in PACKAGES for path in folder(package).glob("*.py"))


def dotted(path: Path) -> tuple[str, ...]:
    """ROOT/ir/passes/fuse.py -> ("ir", "passes", "fuse")"""
    return path.relative_to(ROOT).with_suffix("").parts


def room_of(parts: tuple[str, ...]) -> str:
    return parts[0] if parts and parts[0] in ROOMS else ""


def inner_targets(node: ast.ImportFrom, parts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The modules that `from ..ir import Graph` in `parts` names, seen from the root."""
    base = parts[: len(parts) - node.level] + tuple((node.module or "").split(".") if node.module else ())
    yield from ((*base, alias.name) for alias in node.names)


def imports(path: Path) -> Iterator[tuple[bool, tuple[str, ...]]]:
    """(inside the package?, dotted name) of every import of a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((False, tuple(alias.name.split("."))) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield from ((True, target) for target in inner_targets(node, dotted(path)))
        elif isinstance(node, ast.ImportFrom):
            yield False, tuple((node.module or "").split("."))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_rooms_import_downwards(path: Path) -> None:
    allowed = ROOMS[room_of(dotted(path))]
    found = {room_of(target) for inside, target in imports(path) if inside}
    assert found <= allowed, f"{name(path)} imports {sorted(found - allowed)}"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_rooms_import_only_their_libraries(path: Path) -> None:
    allowed = LIBRARIES[room_of(dotted(path))]
    found = {target[0] for inside, target in imports(path) if not inside} - sys.stdlib_module_names
    assert found <= allowed, f"{name(path)} imports {sorted(found - allowed)}"


@pytest.mark.parametrize("path", [p for p in MODULES if dotted(p)[:2] == ("ir", "passes")], ids=name)
def test_passes_do_not_derive_programs(path: Path) -> None:
    assert not any(target[:2] == ("ir", "transforms") for inside, target in imports(path) if inside)


@pytest.mark.parametrize("path", [p for p in MODULES if dotted(p)[:2] == ("ir", "transforms")], ids=name)
def test_transforms_do_not_make_programs_cheaper(path: Path) -> None:
    assert not any(target[:2] == ("ir", "passes") for inside, target in imports(path) if inside)


def test_every_folder_with_modules_is_packaged() -> None:
    tops = {d for d in ROOT.iterdir() if d.is_dir() and d.name.isidentifier() and d.name not in NOT_PACKAGED}
    folders = {p.parent for top in tops for p in top.rglob("*.py")} | {ROOT}
    assert {folder(package) for package in PACKAGES} == folders


def test_every_package_has_an_init() -> None:
    assert all((folder(package) / "__init__.py").is_file() for package in PACKAGES)


def run_python(code: str) -> None:
    """Run `code` in a fresh interpreter; it must not fail."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_import_works_without_triton() -> None:
    run_python("import sys; sys.modules['triton'] = None; import fusegrad; fusegrad.compile")


def test_the_ground_does_not_load_torch() -> None:
    """ir alone, without the package's face, needs neither torch nor triton."""
    code = (
        "import importlib.util, sys, types\n"
        f"root = types.ModuleType('fusegrad'); root.__path__ = [{str(ROOT)!r}]\n"
        "sys.modules.update(fusegrad=root, torch=None, triton=None)\n"
        "import fusegrad.ir, fusegrad.codegen"
    )
    run_python(code)


def test_private_corners_of_torch_live_in_one_file() -> None:
    """`torch._C` and private attributes of its objects appear in tracer/torch_private.py and nowhere else."""
    spelled = ("torch._C", "_cdata", "forward_ad._current_level")
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for room in ("tracer", "runtime")
        for path in sorted((ROOT / room).rglob("*.py"))
        if path.name != "torch_private.py"
        for word in spelled
        if word in path.read_text(encoding="utf-8")
    ]
    assert not found


# ------------------------------------------------------------------ what is read from disk is never code of its own
PICKLES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "copyreg", "dill", "cloudpickle", "joblib",
           "multiprocessing"}  # fmt: skip
LOADERS = {("torch", "load"), ("torch", "save"), ("numpy", "load"), ("np", "load")}


def unpickling(tree: ast.AST) -> Iterator[str]:
    """Imports of what pickles, also by name, and calls of libraries' functions that do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            yield from (m for m in module if m.split(".")[0] in PICKLES)
        elif isinstance(node, ast.Constant) and node.value in PICKLES:
            yield node.value
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in LOADERS:
                yield f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_nothing_is_pickled(path: Path) -> None:
    """One module says how others pickle compiled classes; it reads nothing."""
    told = ["copyreg"] if name(path) == "runtime/dispatch/pickling.py" else []
    assert list(unpickling(ast.parse(path.read_text(encoding="utf-8")))) == told


def test_the_scan_for_pickles_finds_them() -> None:
    hidden = "import pickle\nfrom marshal import loads\n__import__('dill')\nimport torch\ntorch.load(f)"
    assert list(unpickling(ast.parse(hidden))) == ["pickle", "marshal", "dill", "torch.load"]


# ------------------------------------------------------------------ codes of reasons and errors
EFFECTS = ROOT / "tracer" / "reads.py"


def text_of(node: ast.expr | None) -> str | None:
    """The words of a literal, each value in an f-string as `x`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "x" for v in node.values)
    return None


def given_reasons(node: ast.AST) -> Iterator[ast.expr]:
    """`CaptureError(reason=...)`, `Why(...)`, `Record(status, ...)`, `reason = ...`: what is given there."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        named = [k.value for k in node.keywords if k.arg == "reason"]
        yield from {"CaptureError": named, "Why": node.args[:1], "Record": node.args[1:2]}.get(node.func.id, [])
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "reason":
        yield node.value


def reasons(path: Path) -> Iterator[str]:
    """The texts of a module that end as the reason of a record; in the scan of byte code, all that begin like one."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    found = [text_of(e) for n in nodes for e in given_reasons(n)]
    if path == EFFECTS:
        parts = {id(part) for n in nodes if isinstance(n, ast.JoinedStr) for part in n.values}
        texts = (text_of(n) for n in nodes if isinstance(n, ast.expr) and id(n) not in parts)
        found += [text for text in texts if text and text.startswith("it ")]
    yield from (text for text in found if text and text[0] != "x")


RECORDED = re.compile(r"\b(CaptureError|Record|Why)\b")
REASONED = [p for p in MODULES if RECORDED.search(p.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", [p for p in REASONED if any(reasons(p))], ids=name)
def test_every_reason_has_a_code(path: Path) -> None:
    """A new reason needs a row in ir/codes.py, or a pattern in one that fits."""
    assert [text for text in reasons(path) if code_of(text) == "FG080"] == []


def test_every_error_has_a_code() -> None:
    trees = [ast.parse(p.read_text(encoding="utf-8")) for p in MODULES]
    classes = {n.name: [b.id for b in n.bases if isinstance(b, ast.Name)]
               for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}  # fmt: skip
    errors, size = {"FusegradError"}, 0
    while len(errors) > size:
        size = len(errors)
        errors |= {n for n, bases in classes.items() if errors & set(bases)}
    named = [word for row in CODES if row.code >= "FG2" for word in row.words]
    assert sorted(named) == sorted(errors), "one row of ir/codes.py for each class"


def test_codes_are_unique_and_find_themselves() -> None:
    codes = [row.code for row in CODES]
    assert codes == sorted(set(codes))
    for row in CODES:
        assert row.meaning and row.fix
        assert row.code >= "FG2" or code_of(row.says.removeprefix("fusion break: ")) == row.code
