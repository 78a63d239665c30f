"""What README shows of the package, written by it: `python docs/site/front_page.py` renews README.md and its picture.

A test compares: no table, kernel or picture of the front page can go stale.
"""

from __future__ import annotations

import functools
import json
import linecache
import re
import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import fusegrad
from fusegrad.benchmarks.suite import CASES
from fusegrad.examples.demo import model, training
from fusegrad.runtime.report.terminal import Table, plain

ROOT = Path(__file__).resolve().parents[2]
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "pictures" / "overview.svg"
RESULTS, CONFORMANCE = ROOT / "benchmarks" / "results" / "cpu.json", ROOT / "docs" / "conformance.md"
SHOWN = "RMSNorm[4096,4096]"
"""The case whose costs README has beside torch.compile's."""


# ------------------------------------------------------------------ README's blocks
def renewed(readme: str) -> str:
    """README with what stands between each pair of marks written anew."""
    for name, block in BLOCKS.items():
        marks = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
        assert marks.search(readme), f"README has no block {name!r}"
        text = block()
        readme = marks.sub(lambda found, text=text: f"{found[1]}{text}\n{found[2]}", readme)  # type: ignore[misc]
    return readme


def beside_compile() -> str:
    """Three measured lines: what is right, what is moved, how long a first call takes."""
    counts = conformance()
    ours, theirs, eager = costs()
    rows = [
        ("", "eager", "fusegrad", "torch.compile"),
        ("---", "---", "---", "---"),
        ("torch's own test Functions under 15 compositions: right / raises / **silently wrong**",
         *(" / ".join(counts[name]) for name in ("eager", "fusegrad", "torch.compile"))),
        (f"backward of `{SHOWN}` in bf16: launches, bytes over the minimum traffic",
         *(f"{launches}, {ratio:.2f} x" for launches, ratio in (eager, ours, theirs))),
        ("first call of RMSNorm with empty caches, ms (kernels for sm_90; torch.compile's for the CPU at hand)",
         "-", *first_calls()),
    ]  # fmt: skip
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def conformance() -> dict[str, list[str]]:
    """{"eager": ["191", "9", "0"], ..} of docs/conformance.md."""
    rows = re.findall(r"^\| (eager|fusegrad|torch\.compile) \| (\d+) \| (\d+) \| (\d+) \|$",
                      CONFORMANCE.read_text(encoding="utf-8"), re.MULTILINE)  # fmt: skip
    return {name: numbers for name, *numbers in rows}


Cost = tuple[int, float]
"""Launches, and bytes over the minimum traffic."""


@functools.cache
def costs() -> tuple[Cost, Cost, Cost]:
    """Backward of the shown case by fusegrad, by Inductor, and in eager."""
    case = next(c for c in CASES if c.name == SHOWN)
    report = fusegrad.explain(case.function, *case.args).directions["backward"]
    assert report.eager is not None
    row = _row("inductor", "case", SHOWN)
    return (
        (len(report.launches), report.moved / report.minimal),
        (row["launches"][1], row["bytes"][1] / row["minimal"][1]),
        (report.eager.launches, report.eager.bytes / report.minimal),
    )


def first_calls() -> tuple[str, str]:
    row = _row("latency", "function", "RMSNorm")
    return tuple(f"{row[name]['cold']['forward']:,.0f}" for name in ("triton", "compile"))  # type: ignore[return-value]


def _row(part: str, key: str, value: str) -> dict[str, Any]:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    return next(row for row in results[part]["rows"] if row[key] == value)


def kernel() -> str:
    """The forward kernel of README's own example."""
    scope: dict[str, Any] = {}
    example = re.search(r"```python\n(.*?)^gate, up", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert example is not None
    # As from a file, which a user's class is in: the kernel's comments quote its lines.
    linecache.cache["swiglu.py"] = (len(example[1]), None, example[1].splitlines(keepends=True), "swiglu.py")
    exec(compile(example[1], "swiglu.py", "exec"), scope)
    text = fusegrad.export(scope["SwiGLU"], "bf16[8192,4096]", "bf16[8192,4096]", format="py")
    found = re.search(r"^@triton\.jit[^\n]*\ndef SwiGLU_forward\(.*?(?=\n\n)", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return f"```text\n{found[0]}\n```"


def kernel_text(report: Any, name: str) -> str:
    """One kernel without the helpers above it."""
    source = next(k.source for k in report.kernels if k.name == name)
    return source[source.rindex("@triton.jit") :].strip()


def demo_table() -> str:
    """The table of kernels that `fusegrad demo` prints."""
    cases = training.cases(model.Sizes())
    explanations = [fusegrad.explain(case.fast, *case.specs, target=training.TARGET) for case in cases]
    rows = [row for explanation in explanations for row in training.kernel_rows(explanation)]
    return "```text\n" + textwrap.dedent(plain(Table("", training.HEADER, rows))) + "\n```"


BLOCKS = {"beside torch.compile": beside_compile, "kernel": kernel, "demo": demo_table}


# ------------------------------------------------------------------ the picture
WIDTH, LINE, TOP, LEFT, RIGHT = 1000, 17, 62, 24, 500
CLASS = """\
@fusegrad.compile
class RMSNorm(torch.autograd.Function):

  def forward(ctx, x, weight, eps):
    rstd = torch.rsqrt(
        x.square().mean(-1, keepdim=True) + eps)
    ctx.save_for_backward(x, weight, rstd)
    return x * rstd * weight

  def backward(ctx, grad):
    x, weight, rstd = ctx.saved_tensors
    x_hat, scaled = x * rstd, grad * weight
    mean = (scaled * x_hat).mean(-1, keepdim=True)
    return (rstd * (scaled - x_hat * mean),
            (grad * x_hat).sum(0), None)"""
"""The demo's RMSNorm, without decorators and types."""
COLORS = {"eager": "#9aa4b2", "torch.compile": "#c2843a", "fusegrad": "#3b6fb6"}


def picture() -> str:
    """The class on the left, its forward kernel on the right, and below the bytes that both directions move."""
    rms_norm = training.cases(model.Sizes())[0]
    report = fusegrad.explain(rms_norm.fast, "f32[4096,4096]", "f32[4096]", 1e-6)
    text = _narrow(kernel_text(report, "RMSNorm_forward"), 62)
    lines = max(len(CLASS.splitlines()), len(text))
    height = TOP + LINE * lines + 150
    parts = [*_panel("what you write", LEFT, CLASS.splitlines()), *_panel("what runs forward", RIGHT, text)]
    parts += _bars(TOP + LINE * lines + 40)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="14" fill="#111827"><title>a class and its kernel</title>'
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _narrow(text: str, most: int) -> list[str]:
    """Lines without their comments, broken where they are too long for the picture."""
    bare = [re.sub(r"\s+#.*", "", line) for line in text.splitlines()]
    broken: list[str] = []
    for line in bare:
        indent = " " * (len(line) - len(line.lstrip()))
        broken += textwrap.wrap(line.strip(), most, initial_indent=indent, subsequent_indent=f"{indent}    ",
                                break_long_words=False)  # fmt: skip
    return broken


def _panel(title: str, x: int, lines: list[str]) -> Iterator[str]:
    yield f'<text x="{x}" y="36" font-weight="bold" fill="#374151">{escape(title)}</text>'
    for number, line in enumerate(lines):
        yield (f'<text x="{x}" y="{TOP + LINE * number + 4}" font-family="ui-monospace, Menlo, Consolas, monospace" '
               f'font-size="12" xml:space="preserve">{escape(line)}</text>')  # fmt: skip


def _bars(y: int) -> Iterator[str]:
    ours, theirs, eager = costs()
    yield (f'<text x="{LEFT}" y="{y}" font-weight="bold" fill="#374151">backward of {SHOWN}: bytes moved over the '
           f"minimum traffic (counted, not timed)</text>")  # fmt: skip
    longest = max(eager[1], theirs[1], ours[1])
    for number, (name, (launches, ratio)) in enumerate(
        (("eager", eager), ("torch.compile", theirs), ("fusegrad", ours))
    ):
        at, width = y + 14 + 24 * number, 620 * ratio / longest
        yield f'<text x="{LEFT}" y="{at + 14}">{name}</text>'
        yield f'<rect x="150" y="{at + 2}" width="{width:.1f}" height="16" rx="2" fill="{COLORS[name]}"/>'
        plural = "es" * (launches != 1)
        yield f'<text x="{158 + width:.1f}" y="{at + 15}">{ratio:.2f} x, {launches} launch{plural}</text>'


if __name__ == "__main__":
    README.write_text(renewed(README.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(), encoding="utf-8")
