"""Pages that are read out of the package: command line, settings, errors by code, examples.

The API is no such page: mkdocstrings reads the docstrings that docs/api.md names.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import itertools
import pkgutil
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fusegrad
from fusegrad.__main__ import COMMANDS, parser
from fusegrad.ir import switches
from fusegrad.ir.codes import CODES, Code
from fusegrad.ir.errors import FusegradError
from fusegrad.runtime.cache import location
from fusegrad.runtime.settings import config, logs

ROOT = Path(__file__).resolve().parents[2]


def text(body: str, language: str = "text") -> str:
    return f"```{language}\n{body.rstrip()}\n```\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Bars within `code` are no borders of cells to Python-Markdown, others are escaped."""
    lines = [head, ["---"] * len(head), *([barred(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def barred(cell: str) -> str:
    return "".join(p if p.startswith("`") else p.replace("|", "\\|") for p in re.split(r"(`[^`\n]*`)", cell))


def prose(words: str) -> str:
    """Text that is no Markdown: `code` stays code, everything else is shown as it is written."""
    parts = re.split(r"(`[^`\n]*`)", words)
    return "".join(p if p.startswith("`") else re.sub(r"([*_<>\[\]])", r"\\\1", p) for p in parts)


# ------------------------------------------------------------------ command line
COMMANDS_TOP = """# Command line

`fusegrad COMMAND` and `python -m fusegrad COMMAND` are the same. Commands that look at a Function take `module:Class`
or `file.py:Class`, compiled or not, and its arguments: tensors as `"f32[64,128]"`, anything else as a Python literal.

    fusegrad explain examples/rms_norm.py:RMSNorm --args "bf16[8192,4096]" "bf16[4096]" 1e-6

Exit codes: 0 as asked for, 1 a mistake in what was asked, 2 compiled and eager differ, 3 a mistake of fusegrad, for
which a file is written that shows it again. `NO_COLOR` and a pipe make the output plain.
"""


def commands_page() -> str:
    _, parsers = parser()
    return "\n".join([COMMANDS_TOP, *(f"## {name}\n\n{command(name, parsers[name])}" for name in COMMANDS)])


def command(name: str, own: argparse.ArgumentParser) -> str:
    places = [f"[{shown(a)} ...]" if a.nargs == "*" else shown(a) for a in own._actions if not a.option_strings]
    words = [f"{sentence(own.description or '')}\n", text(" ".join(["fusegrad", name, *places, "[options]"]))]
    rows = [[f"`{shown(a)}`", prose(argument_help(a))] for a in own._actions if not isinstance(a, argparse._HelpAction)]
    return "\n".join([*words, table(["argument", ""], rows), prose(own.epilog or "")])


def argument_help(action: argparse.Action) -> str:
    choices = f" One of {', '.join(map(str, action.choices))}." if action.choices else ""
    return f"{sentence((action.help or '').replace('%%', '%'))}{choices}"


def shown(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest)
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return f"{', '.join(action.option_strings)}{value}"


def sentence(words: str) -> str:
    """The first word with a capital, if it is a word; a full stop behind the last."""
    first, _, rest = words.partition(" ")
    begun = f"{first.capitalize() if first.islower() and first.rstrip(',:').isalpha() else first} {rest}".rstrip()
    return begun if not words or words.endswith(".") else f"{begun}."


# ------------------------------------------------------------------ settings
VARIABLES = {
    "FUSEGRAD_BACKEND": ("a backend's name", "Of every compiled class, ahead of what `compile` was asked for."),
    "FUSEGRAD_WARN": ("`0`", "No warning where a method runs in eager; `explain` still says it."),
    "FUSEGRAD_DEBUG": ("`1`", "Verify every graph after every step; tracebacks show fusegrad's own frames. Slow."),
    "FUSEGRAD_STORE": ("`0`", "Traces are neither cached on disk nor found there: every process makes its own."),
    "FUSEGRAD_DISABLE": ("names, comma-separated", "Steps of the pipeline that are left out: [which](#steps)."),
    "FUSEGRAD_NUMERICS": ("`eager` or `fast`", "Of every compiled class, ahead of what `compile` was asked for."),
    "FUSEGRAD_SLAB_BYTES": ("a number of bytes", "Memory of a slab, ahead of what `compile` was asked for."),
    "FUSEGRAD_TUNE": ("`1`", "On a GPU, time a few versions of each kernel and keep the fastest."),
    "FUSEGRAD_CACHE_DIR": ("a folder", "Where compiled kernels are kept, instead of `~/.cache/fusegrad`."),
    "FUSEGRAD_CACHE_LIMIT": ("`500M`, `10G`", "Bytes on disk (2 GiB); the entries used longest ago go first."),
    "FUSEGRAD_RECYCLE_MEMORY": ("`1`", "Deprecated, does nothing: [memory on CPU](#memory-on-cpu)."),
    "FUSEGRAD_LOGS": ("names, or `help`", "What is written to the log, in the manner of `TORCH_LOGS`."),
    "FUSEGRAD_TESTS": ("`all`", "The test-suite takes every case of its long tables, not a sample."),
}
"""By name, what they are set to and what they do. Those that no source reads are left out; a test wants the others."""


def variables_read() -> set[str]:
    """The variables that the package and its tests read, by the text of their sources."""
    folders = ("ir", "tracer", "codegen", "runtime", "tests")
    sources = [p for folder in folders for p in ROOT.joinpath(folder).rglob("*.py") if "golden" not in p.parts]
    return {name for p in sources for name in re.findall(r"\"(FUSEGRAD_[A-Z_]+)\"", p.read_text(encoding="utf-8"))}


STEPS_TOP = """`fusegrad.config.patch(disable=("algebra", "fuse"))` and `FUSEGRAD_DISABLE=algebra,fuse` leave steps out
that make a program cheaper. Results stay right, with more launches. What was compiled with a step is never used without
it. `fusegrad.bisect` finds [which step makes a difference](bisect.md).
"""
STEPS = {"Graphs": switches.GRAPHS, "Kernels": switches.KERNELS, "Calls": switches.CALLS}


def steps_part(title: str, steps: dict[str, str]) -> tuple[str, str]:
    return f"### {title}\n", table(["step", ""], [[f"`{name}`", prose(sentence(what))] for name, what in steps.items()])


LOGS_TOP = """`FUSEGRAD_LOGS="trace,+codegen,-guards"` and `fusegrad.config.logs("trace,+codegen")` tell on stderr what
the compiler does, through Python's own loggers `fusegrad.trace` and so on. `+` is with every detail, `-` turns one off.
"""
MEMORY = f"""glibc hands blocks from 128 kB to 32 MB on back to the system when they are freed, and the page faults of
the next one cost more than most arithmetic on it: a process that is started with `{config.KEEPS_MEMORY}` keeps them,
for eager code as well.
"""


def attribute_docstrings(found: type) -> dict[str, str]:
    """What stands below each annotated attribute of a class, in its source, on one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(found))).body
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
    for attribute, below in itertools.pairwise(definition.body):
        match attribute, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                texts[name] = " ".join(words.split())
    return texts


SETTINGS_TOP = """`with fusegrad.config.patch(backend="interpret"): ...` changes settings for a block of code, in this
thread or task. It goes before the environment, which goes before the options of `compile`.
"""


def settings_page() -> str:
    texts = attribute_docstrings(config.Settings)
    settings = dataclasses.fields(config.Settings)
    fields = [[f"`{f.name}`", f"`{f.type}`", f"`{f.default!r}`", prose(texts[f.name])] for f in settings]
    variables = [[f"`{n}`", value, what] for n, (value, what) in VARIABLES.items() if n in variables_read()]
    compile_page = inspect.signature(fusegrad.compile).parameters.values()
    options = [[f"`{p.name}`", f"`{p.default!r}`"] for p in compile_page if p.kind is p.KEYWORD_ONLY]
    return "\n".join([
        "# Settings and environment variables\n", SETTINGS_TOP,
        "## Settings\n", table(["setting", "type", "default", ""], fields),
        "## Environment variables\n", table(["variable", "set to", ""], variables),
        "## Options of compile\n", table(["option", "default"], options),
        "What they mean: [compile](api.md#fusegrad.compile).\n",
        "## Backends\n", f"{', '.join(f'`{b}`' for b in config.BACKENDS)}: [what they run](quickstart.md#backends).\n",
        "## Steps\n", STEPS_TOP, *(part for title, steps in STEPS.items() for part in steps_part(title, steps)),
        "## Logs\n", LOGS_TOP, table(["name", "tells"], [[f"`{n}`", prose(what)] for n, what in logs.NAMES.items()]),
        "## The cache\n", prose(inspect.getdoc(location.default_root) or "") + "\n",
        "`fusegrad cache dir` says where it is, `fusegrad cache clear` empties it.\n",
        "## Memory on CPU\n", MEMORY,
    ])  # fmt: skip


# ------------------------------------------------------------------ errors
SERIES = {
    "FG0": ("Why a method, or a part of it, is not compiled", "The method falls back to eager: slower, never wrong."),
    "FG1": ("Compiled, with a launch more", "The reasons that `explain` gives for a fusion break between two kernels."),
    "FG2": ("Errors", "Exception classes, derived from `fusegrad.FusegradError`, which is a `RuntimeError`."),
    "FG9": ("Mistakes of fusegrad", "None of these should ever reach you."),
}
FACTS: dict[str, Any] = {
    "function": "RMSNorm", "method": "backward", "where": "model.py:12", "reason": "it calls `print`", "names": "scale",
    "detail": "it is neither a Function class nor a function", "what": "is_traceable must be exactly a bool, not int",
    "fix": "pass the class or the function itself", "backend": "triton", "spec": "bf16(8)", "target": "cuda:42",
    "known": "cuda:80, cuda:90, cuda:100", "device": "tpu", "value": "sideways", "why": "`clamp` is not linear",
    "expected": 2, "got": 1, "argument": "x", "path": "gradient[0]['w']", "model": "the output", "format": "png",
    "mode": "backward", "case": "f32[64,128]", "difference": "gradient 0 differs by 3 ulp",
    "reproducer": "import torch ...",
    "folder": "/usr/lib/python3.11", "prim": "clamp", "node": "%3", "line": 3, "text": "%3 = clamp",
    "kernel": "RMSNorm_forward", "program": 7, "callee": "step", "graph": "Clip_backward", "inputs": "grad_output",
    "refusal": "`clamp` is not linear", "transform": "batch", "op": "aten.unique",
}
"""What stands in the place of a call's own facts in the examples of messages."""
OWN_FACTS: dict[str, dict[str, Any]] = {
    "ConfigError": {"detail": "there is no backend 'cuda'", "fix": f"use one of {', '.join(config.BACKENDS)}"},
    "DeclarationError": {"fix": "write True or False; leave it out to have every method tried"},
    "UnsupportedBackendError": {"what": "RMSNorm_forward", "reason": "it needs a GPU", "fix": "use backend='auto'."},
    "NoRuleError": {"why": "gives other shapes for other data"},
    "KeywordOnlyError": {"fix": "take the `*` out of its parameters, so that they can be given by position."},
    "TreeError": {"got": "a tensor", "expected": "a tuple", "what": "gradients"},
    "CheckArgumentError": {"detail": "there is no transform 'vmp'", "fix": "use some of forward, backward, vjp"},
    "ProfileArgumentError": {"detail": "there is no baseline 'jax'", "fix": "use some of eager, torch.compile"},
    "ExportFormatError": {"path": "graph.png", "format": None, "reason": "there is no format 'png'",
                          "known": "py, json, graphml, dot, svg, html", "hint": ""},
    "ExportError": {"reason": "its argument scale is a Decimal", "fix": "give numbers, strings, dtypes or None."},
    "DeriveJvpError": {"fix": "use one of them"},
    "SwapError": {"model": "LlamaModel", "detail": "no module is called 'nrom'", "fix": "did you mean norm?"},
    "BundleError": {"path": "norm.zip", "file": "graphs/forward.json", "fact": "its sum is not the manifest's",
                    "fix": "export it again, or get it from where it was made."},
    "BundleCallError": {"fact": "x is torch.float64 with 2 axes; it was exported for f32 with 2",
                        "fix": "call it as it was exported, or export it for such arguments too."},
    "OuterTransformError": {"reason": "it draws random numbers, which a derivative of it would draw anew"},
    "OuterGraphError": {"who": "torch.compile", "reason": "it writes to an argument, which an operator does not"},
    "SavedProgramError": {"path": "model.pt2", "operator": "norm_forward_3f2a91c0d4", "fix": "export it again",
                          "fact": "models:Norm is no longer what it was when the program was saved"},
    "LogsError": {"asked": "FUSEGRAD_LOGS=fuson", "name": "fuson", "fix": "did you mean fusion?"},
    "UnknownTargetError": {"hint": ""},
    "UnknownDeviceError": {"hint": ""},
    "OutputError": {"path": "report/norm.html", "fact": "cannot be written: there is no folder report",
                    "where": "-o report/norm.html", "fix": "mkdir -p report"},
    "NonLinearJvp": {"why": "`mul` multiplies two values that depend on the tangents"},
    "TargetError": {"target": "rms_norm.py:RMSnorm", "reason": "the module rms_norm has no 'RMSnorm'",
                    "fix": "did you mean RMSNorm?"},
}  # fmt: skip


def error_classes() -> list[type[FusegradError]]:
    """Every error class of the package."""
    for room in ("ir", "tracer", "runtime"):
        for module in pkgutil.walk_packages([str(ROOT / room)], f"fusegrad.{room}."):
            if "worker" not in module.name:
                importlib.import_module(module.name)
    found, todo = {FusegradError}, [FusegradError]
    while todo:
        fresh = [c for c in todo.pop().__subclasses__() if c.__module__.startswith("fusegrad.")]
        todo += [c for c in fresh if c not in found]
        found |= set(fresh)
    return sorted(found - {FusegradError}, key=lambda c: c.__name__)


def example_message(error: type[FusegradError]) -> str:
    """The message of a class, with facts such as a call would give."""
    fields = re.findall(r"{(\w+)", error.message)
    facts = {**FACTS, **OWN_FACTS.get(error.__name__, {})}
    return error.message.format(**{name: facts.get(name, name) for name in fields})


def codes_page() -> str:
    classes = {c.__name__: c for c in error_classes()}
    parts = [CODES_TOP]
    for prefix, (title, words) in SERIES.items():
        rows = [code for code in CODES if code.code.startswith(prefix)]
        parts += [f"## {title}\n", f"{words}\n", *(part for code in rows for part in code_parts(code, classes))]
    return "\n".join(parts)


def code_parts(code: Code, classes: dict[str, type[FusegradError]]) -> list[str]:
    parts = [f"### {code.code}\n", text(code.says)]
    parts += [f"**Means.** {prose(code.meaning)}\n", f"**Do.** {prose(code.fix)}\n"]
    errors = [classes[name] for name in code.words if name in classes]
    for error in errors if code.code < "FG9" else []:
        parts += [f"`{error.__name__}`: {prose(' '.join((inspect.getdoc(error) or '').split()))}\n",
                  text(example_message(error))]  # fmt: skip
    if code.code >= "FG9":
        parts.append(f"Classes: {', '.join(f'`{e.__name__}`' for e in errors)}.\n")
    return parts


CODES_TOP = """# Codes

Every reason and every error has a code. `fusegrad explain module:Class --args ...` prints it beside the method; a
warning and an error say the same in words. [Troubleshooting](troubleshooting.md) begins with what went wrong instead.
This page is generated from the table of the codes (`ir/codes.py`).
"""


# ------------------------------------------------------------------ examples
IN_A_FILE = 'python title="in a file"'


def examples_page() -> str:
    folder = ROOT / "examples"
    readme = (folder / "README.md").read_text(encoding="utf-8").replace("](../docs/", "](")
    paths = [path for part in (folder, folder / "gallery") for path in sorted(part.glob("*.py"))]
    names = [path.relative_to(folder).as_posix() for path in paths]
    for name in names:
        readme = readme.replace(f"`{name}`", f"[`{name}`](#{name.replace('.', '')})")
    sources = [(name, (folder / name).read_text(encoding="utf-8")) for name in names]
    shown = [f'### {name}\n\n{text(source, IN_A_FILE)}' for name, source in sources]
    return "\n".join([readme, "## Sources\n", *shown])


# ------------------------------------------------------------------ measured tables
SHOWN = ("case", "launches", "Inductor", "bytes / minimal", "Inductor", "GB moved", "Inductor", "registers")
"""Columns of the table of cases, in their order there; `Inductor` stands behind what it is compared with."""

PERFORMANCE_TOP = """# Performance

Nothing on this page was timed on a GPU: launches, bytes and registers are counted from the kernels that are generated
and compiled for one. Host times are a CPU's. The whole tables, and what every column means:
[Measured without a GPU](benchmarks.md); `make bench ARGS=--write-docs` writes them, `make bench-gpu` times on a GPU,
and [`make gpu`](gpu.md) is what to run on a first one.
"""
HOST = """What a call costs beside its kernels, against a Function that does nothing."""
CASES = """One size of each Function: forward and backward (launches: forward + backward). *Inductor* is what the
compiler of torch.compile makes of the same forward and backward. Bytes are over the minimum traffic, which is every
input read once and every output written once. Registers are those of sm_90."""


def performance_page() -> str:
    measured = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    machine = next(line for line in measured.splitlines() if line.startswith("Written by"))
    return "\n".join([
        PERFORMANCE_TOP, f"{machine}\n", "![bytes, launches, host time and first calls](pictures/cpu.svg)\n",
        "## Goals\n", "What was aimed at, and where it is missed.\n", tabled(measured, "goal"),
        "## Host time\n", f"{HOST}\n", tabled(measured, "microseconds per call"),
        "## Kernels\n", f"{CASES}\n", cases(measured),
    ])  # fmt: skip


def tabled(page: str, first: str) -> str:
    """The table of a page whose first column has this head."""
    lines = page.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    end = next(i for i in range(start, len(lines) + 1) if i == len(lines) or not lines[i].startswith("|"))
    return "\n".join(lines[start:end]) + "\n"


def cases(page: str) -> str:
    """A row for each Function: at 8192 x 8192 where there is one, else its first."""
    lines = tabled(page, "case | launches").splitlines()
    head, _, *rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    columns, at = [], 0
    for name in SHOWN:
        at = head.index(name, at)
        columns.append(at)
    chosen: dict[str, list[str]] = {}
    for row in rows:
        function = row[0].partition("[")[0]
        if function not in chosen or "[8192,8192]" in row[0]:
            chosen[function] = row
    return table([head[i] for i in columns], [[row[i] for i in columns] for row in chosen.values()])


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands_page, "settings.md": settings_page, "codes.md": codes_page,
    "examples.md": examples_page, "performance.md": performance_page,
}  # fmt: skip
