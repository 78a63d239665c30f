"""Environments: what a machine lacks, how Python is started, where source comes from, how classes are written.

    python tests/trust/environments.py --only triton --json

A table of small scripts. Each has to give eager's results, forward and backward, an `explain` that works, and nothing
on stderr that was not announced. Those with `alone` need a process of their own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import outcome

PATIENCE = 300.0
ROOT = Path(__file__).resolve().parents[2]
REMOVED = ("LC_", "LANG", "PYTHON", "FUSEGRAD", "CC", "CXX")
"""Beginnings of variables that no script inherits."""

CUBE = '''
class Cube(torch.autograd.Function):
    """Documented."""

    @staticmethod
    def forward(ctx, x, k=2.0):
        """Documented, too."""
        assert x.dim() < 9, "an assert of the user"
        ctx.save_for_backward(x)
        ctx.k = k
        return x**3 * k

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g * x**2 * ctx.k, None
'''
CHECK = '''
def check(cls, *more, apply=None, backend="reference", status="compiled", expected=None):
    """Three calls (the last ones take other ways), backward, explain; raises where something is not as in eager."""
    fast = fusegrad.compile(cls, backend=backend) if apply is None else None
    apply = fast.apply if apply is None else apply
    for n in (3, 3, 3, 3, 4):
        x, y = (torch.linspace(-1, 2, n).requires_grad_() for _ in range(2))
        mine, eager = apply(x, *more), (cls.apply if expected is None else expected)(y, *more)
        mine.sum().backward(), eager.sum().backward()
        if not (torch.allclose(mine, eager) and torch.allclose(x.grad, y.grad)):
            raise SystemExit(f"wrong: {mine} {eager} {x.grad} {y.grad}")
    if fast is not None:
        told = fusegrad.explain(fast, torch.ones(3), *more)
        if not str(told) or fast._fusegrad.ledger.records["forward"].status != status:
            raise SystemExit(f"on record: {fast._fusegrad.ledger.records}")
        return fast, str(told)
    return None, ""
'''
HEAD = "import sys, torch, fusegrad\n" + CHECK
PLAIN = HEAD + CUBE + "check(Cube)\ncheck(Cube, 3.0, backend='interpret')\nprint('right')\n"
Way = Callable[["Environment", Path], tuple[Sequence[str], str | None]]
"""How a script is started in a folder: the command line, and what comes on stdin."""


@dataclass(frozen=True)
class Environment:
    """One row. said: what has to be on stderr (nothing else may be). alone: not within another process."""

    script: str = PLAIN
    flags: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    folder: str = "plain"
    way: str = "file"
    said: tuple[str, ...] = ()
    package: str | None = None
    alone: bool = True


# ------------------------------------------------------------------ how a script is started
def _file(row: Environment, folder: Path) -> tuple[Sequence[str], str | None]:
    path = folder / "script.py"
    path.write_text(row.script, encoding="utf-8")
    return [str(path)], None


def _argument(row: Environment, folder: Path) -> tuple[Sequence[str], str | None]:
    return ["-c", row.script], None


def _stdin(row: Environment, folder: Path) -> tuple[Sequence[str], str | None]:
    return ["-"], row.script


def _prompt(row: Environment, folder: Path) -> tuple[Sequence[str], str | None]:
    """Typed at a prompt: blocks end with an empty line, prompts go to stderr."""
    typed = row.script.replace("\n\n    @", "\n    @").replace('"""\n\n', '"""\n')
    lines, inside = [], False
    for line in filter(None, typed.splitlines()):
        if inside and not line.startswith((" ", "\t")):
            lines.append("")
        inside = line.startswith((" ", "def ", "class "))
        lines.append(line)
    return ["-i", "-q", "-c", "import sys; sys.ps1 = sys.ps2 = ''"], "\n".join([*lines, ""])


def _zipapp(row: Environment, folder: Path) -> tuple[Sequence[str], str | None]:
    with zipfile.ZipFile(folder / "app.pyz", "w") as file:
        file.writestr("users.py", "import torch\n" + CUBE)
        file.writestr("__main__.py", HEAD + "from users import Cube\ncheck(Cube)\nprint('right')\n")
    return [str(folder / "app.pyz")], None


def _bytecode(row: Environment, folder: Path) -> tuple[Sequence[str], str | None]:
    (folder / "users.py").write_text("import torch\n" + CUBE, encoding="utf-8")
    compiled = "import py_compile; py_compile.compile('users.py', 'users.pyc')"
    subprocess.run([sys.executable, "-c", compiled], cwd=folder, check=True)
    (folder / "users.py").unlink()
    return _file(Environment(HEAD + "from users import Cube\ncheck(Cube)\nprint('right')\n"), folder)


def _inside(row: Environment, folder: Path) -> tuple[Sequence[str], str | None]:
    """In isolated mode nothing but the script says where fusegrad is."""
    path = f"import sys\nsys.path[:0] = {[str(folder), *filter(None, sys.path)]!r}\n"
    return _file(Environment(path + row.script), folder)


WAYS: dict[str, Way] = {
    "file": _file, "argument": _argument, "stdin": _stdin, "prompt": _prompt, "zipapp": _zipapp,
    "bytecode": _bytecode, "inside": _inside,
}  # fmt: skip

# ------------------------------------------------------------------ scripts
WITHOUT = "import sys\nsys.modules[{name!r}] = None\n"
NO_TRITON = (
    WITHOUT.format(name="triton") + HEAD + CUBE + """
check(Cube)
fast, told = check(Cube, backend="auto")
for backend in ("interpret", "triton"):
    try:
        fusegrad.compile(Cube, backend=backend).apply(torch.ones(3))
    except fusegrad.FusegradError as error:
        assert "triton" in str(error).lower() and "at:" in str(error) and "fix:" in str(error), error
    else:
        raise SystemExit(f"{backend} without triton raised nothing")
print("right")
"""
)
CELLS = HEAD + '''
import linecache
def cell(number, text, space):
    name = f"<ipython-input-{number}-abcdef>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    exec(compile(text, name, "exec"), space)
space = {"torch": torch, "fusegrad": fusegrad, "__name__": "__main__"}
text = CUBE + "fast = fusegrad.compile(Cube)\\n"
cell(1, text, space)
first = space["fast"]
check(space["Cube"], apply=first.apply)
cell(2, text.replace("x**3", "x**2").replace("3 * g * x**2", "2 * g * x"), space)
check(space["Cube"], apply=space["fast"].apply)
x = torch.tensor([2.0])
assert (first.apply(x).item(), space["fast"].apply(x).item()) == (16, 8)
cell(3, "class Sub(fast):\\n    @staticmethod\\n    def backward(ctx, g):\\n        return 7 * g, None\\n", space)
y = x.clone().requires_grad_()
space["Sub"].apply(y).backward()
assert y.grad.item() == 7
print("right")
'''.replace("CUBE + ", f"{CUBE!r} + ")
NO_FILE = HEAD + '''
import types
for name in ("<string>", "", "no/such/file.py", "<frozen users>"):
    module = types.ModuleType("users")
    exec(compile("import torch" + CUBE, name, "exec"), vars(module))
    check(module.Cube)
space = {}  # not even a __name__
exec("import torch" + CUBE, space)
check(space["Cube"])
print("right")
'''.replace("CUBE", f"{CUBE!r}")
CHANGED = HEAD + '''
import importlib, os, tempfile
for change in ("x = 1\\n", "", "not python at all (\\n" * 99, None):
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "changed_later.py")
    open(path, "w").write("import torch" + CUBE)
    sys.path.insert(0, folder)
    sys.modules.pop("changed_later", None)
    importlib.invalidate_caches()
    import changed_later
    fast = fusegrad.compile(changed_later.Cube)
    os.unlink(path) if change is None else open(path, "w").write(change)
    check(changed_later.Cube)
    sys.path.remove(folder)
print("right")
'''.replace(" + CUBE)", f" + {CUBE!r})").replace('open(path, "w").write(', 'write(path, ').replace(
    "import importlib", "def write(path, text):\n    with open(path, 'w') as file:\n        file.write(text)\n"
    "import importlib")  # fmt: skip
SAME_NAMES = HEAD + '''
import types
modules = {}
for name, power in (("one", 2), ("two", 3)):
    modules[name] = types.ModuleType(name)
    exec(f"""import torch
class Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**{power}
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * {power} * x**{power - 1}
""", vars(modules[name]))
fasts = [fusegrad.compile(m.Power) for m in modules.values()]
for fast, module in zip(fasts, modules.values()):
    check(module.Power, apply=fast.apply)
    check(module.Power, backend="interpret")
print("right")
'''
FORMS = HEAD + CUBE + '''
import abc, functools, typing
F = torch.autograd.Function
def cube(ctx, x, k=2.0):
    ctx.save_for_backward(x)
    ctx.k = k
    return x**3 * k
def slope(ctx, g):
    (x,) = ctx.saved_tensors
    return 3 * g * x**2 * ctx.k, None
def logged(method):
    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        return method(*args, **kwargs)
    return wrapper
class Callable:
    """An object in the place of a method."""
    def __init__(self, function):
        self.function = function
    def __call__(self, *args):
        return self.function(*args)
class Meta(type(F)):
    def __new__(mcs, name, bases, body, **options):
        return super().__new__(mcs, name, bases, body)
    def __init__(cls, name, bases, body, **options):
        super().__init__(name, bases, body)
        cls.options = options
def local(scale):
    class Local(F):
        forward = staticmethod(lambda ctx, x, k=2.0: cube(ctx, x, k) * scale)
        backward = staticmethod(lambda ctx, g: tuple(None if v is None else v * scale for v in slope(ctx, g)))
    return Local
T = typing.TypeVar("T")
class Generic(F, typing.Generic[T]):
    forward, backward = staticmethod(cube), staticmethod(slope)
class Slots(F):
    __slots__ = ()
    forward, backward = staticmethod(cube), staticmethod(slope)
class WithMeta(F, metaclass=Meta, option=1):
    forward, backward = staticmethod(cube), staticmethod(slope)
class Mixin:
    forward = staticmethod(cube)
class Inherits(Mixin, F):
    backward = staticmethod(slope)
class Child(Cube):
    pass
class Override(Cube):
    @staticmethod
    def backward(ctx, g):
        first, second = Cube.backward(ctx, g)
        return 2 * first, second
class Super(Cube):
    @staticmethod
    def backward(ctx, g):
        first, second = super(Super, Super).backward(ctx, g)
        return first / 2, second
class Wrapped(F):
    forward, backward = staticmethod(logged(cube)), staticmethod(logged(slope))
class Partial(F):
    forward, backward = staticmethod(functools.partial(cube)), staticmethod(functools.partial(slope))
class Objects(F):
    forward, backward = staticmethod(Callable(cube)), staticmethod(Callable(slope))
class Outer:
    class Inner(F):
        forward, backward = staticmethod(cube), staticmethod(slope)
Factory = type("Factory", (F,), {"forward": staticmethod(cube), "backward": staticmethod(slope)})
class Abstract(F):
    @staticmethod
    @abc.abstractmethod
    def scale():
        ...
class Concrete(Abstract):
    @staticmethod
    def scale():
        return 3
    @staticmethod
    def forward(ctx, x, k=2.0):
        return cube(ctx, x, k) * Concrete.scale()
    @staticmethod
    def backward(ctx, g):
        return slope(ctx, g * Concrete.scale())
Dataclass = type("Übergröße", (F,), {"forward": staticmethod(cube), "backward": staticmethod(slope)})
for cls in (local(1.0), local(2.0), Generic, Slots, WithMeta, Inherits, Child, Override, Super, Wrapped, Partial,
            Outer.Inner, Factory, Concrete, Dataclass):
    check(cls)
    check(cls, 0.5)
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore", fusegrad.FallbackWarning)
    fast = fusegrad.compile(Objects)
    check(Objects, apply=fast.apply)
    str(fusegrad.explain(fast, torch.ones(3)))
print("right")
'''
DOCTEST = HEAD + CUBE + '''
import doctest
def example():
    """
    >>> class Twice(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return 2 * x
    ...     @staticmethod
    ...     def backward(ctx, g):
    ...         return 2 * g
    >>> fast = fusegrad.compile(Twice)
    >>> x = torch.ones(3, requires_grad=True)
    >>> fast.apply(x).sum().backward()
    >>> x.grad
    tensor([2., 2., 2.])
    """
found = doctest.DocTestFinder().find(example, "example", globs=globals())
runner = doctest.DocTestRunner()
assert not sum(runner.run(test).failed for test in found)
check(Cube)
print("right")
'''
ASSERTS = HEAD + CUBE + '''
class Checked(Cube):
    @staticmethod
    def forward(ctx, x, k=2.0):
        assert x.shape[0] != 5, "five"
        return Cube.forward(ctx, x, k)
check(Checked)
fast, seen = fusegrad.compile(Checked), []
for apply in (Checked.apply, fast.apply):
    try:
        apply(torch.ones(5))
        seen.append("nothing")
    except AssertionError as error:
        seen.append(str(error))
assert_is_on = __debug__
if seen != (["five"] * 2 if assert_is_on else ["nothing"] * 2):
    raise SystemExit(str(seen))
print("right")
'''
PROFILED = HEAD + CUBE + '''
seen = []
def trace(frame, event, argument):
    seen.append(event)
    return trace
sys.settrace(trace)
check(Cube)
sys.settrace(None)
sys.setprofile(lambda *a: seen.append(a[1]))
check(Cube, backend="interpret")
sys.setprofile(None)
if not seen:
    raise SystemExit("nothing was traced")
print("right")
'''
GONE = (  # torch itself wants a folder when it is imported
    "import os, tempfile, torch, fusegrad\ntorch.ones(3).pow(3).exp()\nos.chdir(folder := tempfile.mkdtemp())\n"
    "os.rmdir(folder)\n" + PLAIN
)
NO_STREAMS = "import sys\nout, sys.stdout, sys.stderr = sys.stdout, None, None\n" + PLAIN.replace(
    "print('right')", "print('right', file=out)")
C_LOCALE = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NO_COMPILER = {"PATH": "/no/such/folder", "CC": "/no/such/cc", "CXX": "/no/such/c++"}
ODD = "ünï cødé  日本 'quoted' \"twice\" $x #1 {a} %s"
LONG = "/".join(["a" * 100] * 3)

ENVIRONMENTS: dict[str, Environment] = {
    "as it is": Environment(),
    "without a C++ compiler": Environment(variables=NO_COMPILER),
    "without triton": Environment(NO_TRITON),
    "without a GPU": Environment(variables={"CUDA_VISIBLE_DEVICES": ""}),
    "C locale": Environment(variables=C_LOCALE),
    "POSIX locale": Environment(variables={**C_LOCALE, "LANG": "POSIX", "LC_ALL": "POSIX"}),
    "C locale, Python's UTF-8 mode": Environment(variables={**C_LOCALE, "PYTHONUTF8": "1"}),
    "a locale that does not exist": Environment(variables={"LANG": "xx_YY.nothing", "LC_ALL": "xx_YY.nothing"}),
    "script in an odd folder": Environment(folder=ODD),
    "script in a folder of 300 characters": Environment(folder=LONG),
    "fusegrad in an odd folder": Environment(package=ODD),
    "fusegrad in a folder of 300 characters": Environment(package=LONG),
    "-O": Environment(ASSERTS, flags=("-O",)),
    "-OO": Environment(ASSERTS, flags=("-OO",)),
    "-OO, generated text": Environment(flags=("-OO",)),
    "asserts of the user": Environment(ASSERTS, alone=False),
    "-I": Environment(flags=("-I",), way="inside"),
    "-B -s": Environment(flags=("-B", "-s")),
    "-X dev": Environment(flags=("-X", "dev")),
    "-X dev -W error::ResourceWarning": Environment(flags=("-X", "dev", "-W", "error::ResourceWarning")),
    "warnings are errors": Environment("import torch, warnings\nwarnings.simplefilter('error')\n" + PLAIN),
    "-X frozen_modules=off": Environment(flags=("-X", "frozen_modules=off")),
    "python -c": Environment(way="argument"),
    "stdin": Environment(way="stdin"),
    "a prompt": Environment(way="prompt"),
    "a zipapp": Environment(way="zipapp"),
    "byte code without source": Environment(way="bytecode"),
    "exec without a file": Environment(NO_FILE, alone=False),
    "cells of a notebook": Environment(CELLS, alone=False),
    "source that changes after the import": Environment(CHANGED, alone=False),
    "classes of the same name": Environment(SAME_NAMES, alone=False),
    "classes of every form": Environment(FORMS, alone=False),
    "doctest": Environment(DOCTEST, alone=False),
    "a debugger and a profiler": Environment(PROFILED, alone=False),
    "a folder that is gone": Environment(GONE),
    "without stdout and stderr": Environment(NO_STREAMS),
    "another hash seed": Environment(variables={"PYTHONHASHSEED": "4294967295"}),
}  # fmt: skip


# ------------------------------------------------------------------ running them
def run(row: Environment) -> str:
    """What is wrong in an environment; "" where all is right."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / row.folder
        folder.mkdir(parents=True)
        arguments, given = WAYS[row.way](row, folder)
        done = subprocess.run(
            [sys.executable, *row.flags, *arguments], input=given, capture_output=True, text=True, encoding="utf-8",
            errors="replace", timeout=PATIENCE, cwd=folder, env=_variables(row, Path(name)),
        )  # fmt: skip
    if done.returncode or (done.stdout.split() or [""])[-1] != "right":
        return f"status {done.returncode}: {done.stdout[-500:]} {done.stderr[-3000:]}"
    noise = [line for line in done.stderr.splitlines() if line.strip() and not any(s in line for s in row.said)]
    return "on stderr: " + "\n".join(noise[:20]) if noise else ""


def _variables(row: Environment, folder: Path) -> dict[str, str]:
    """The environment of a script: nothing of ours, fusegrad from where the row wants it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(REMOVED)}
    place = folder / (row.package or "site")
    place.mkdir(parents=True, exist_ok=True)
    (place / "fusegrad").symlink_to(ROOT)
    path = os.pathsep.join([str(place), *(p for p in sys.path if p.endswith("-packages"))])
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FUSEGRAD_CACHE_DIR": str(folder / "cache")}
    return {**kept, **own, **row.variables}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", default="", help="a part of the environments' names")
    options.add_argument("--json", action="store_true", help="write benchmarks/results/trust/environments.json")
    chosen = options.parse_args()
    told: dict[str, Any] = {}
    began = time.perf_counter()
    for name, row in ENVIRONMENTS.items():
        if chosen.only in name:
            told[name] = run(row) or "right"
            print(f"{name:45} {told[name]}", flush=True)
    wrong = [name for name, said in told.items() if said != "right"]
    print(f"{len(told) - len(wrong)} of {len(told)} right")
    if chosen.json:
        numbers = {"seconds": round(time.perf_counter() - began, 1), "right": len(told) - len(wrong)}
        print(outcome.write("environments", {**numbers, "environments": told}))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
