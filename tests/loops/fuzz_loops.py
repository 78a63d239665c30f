"""Random functions with loops over a size, compiled beside eager: results and gradients at several lengths, bitwise.

    python tests/loops/fuzz_loops.py --seconds 600 --seed 0
"""

from __future__ import annotations

import argparse
import linecache
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fusegrad
from fusegrad.tracer.loops.node import has_loop

Function = Callable[..., Any]
WIDTH = 3
UNARY = ("torch.sin({})", "torch.tanh({})", "({} * {}.sigmoid())", "(-{})", "torch.relu({})", "({} * 0.5)")
BINARY = ("({} + {})", "({} * {})", "({} - {})", "torch.maximum({}, {})", "torch.where({} > 0, {}, 0.1)")
HEADERS = (
    ("for t in range(x.shape[0]):", 0),
    ("for t in range(n):", 0),
    ("for t in reversed(range(n)):", 0),
    ("for t in range(n - 1, -1, -1):", 0),
    ("for t in range(1, n):", 1),
    ("for t in range(2, n):", 2),
    ("for t in range(n - 1):", 0),
    ("for t, (xt, yt) in enumerate(zip(x, y)):", 0),
    ("for t, xt in enumerate(x.unbind(0)):", 0),
    ("for t, yt in enumerate(y.flip(0)):", 0),
)
READS = ("x[t]", "y[t]", "x[n - 1 - t]", "x[t - 1]", "y[-1 - t]", "x[0]", "y[-1]", "w", "x.select(0, t)", "v[:, t]")
STATES = ("h", "k")
BEGINS = ("torch.zeros_like(x[0])", "x[0]", "w", "torch.zeros(3, dtype=x.dtype)", "w * 2", "y[-1]")
CONDITIONS = ("t > 0", "t == 0", "t < n - 1", "t == n - 1", "t != 1", "t > 1")
BUFFERS = ("torch.zeros_like(x)", "torch.ones_like(y)", "x.new_zeros(n, 3)", "torch.zeros(3, n, dtype=x.dtype).t()")


class Writer:
    """One random function as text."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines = ["def f(x, y, w, v):", "    n = " + self.of("x.shape[0]", "len(x)", "y.size(0)")]
        self.results: list[str] = []
        self.lists: list[str] = []

    def of(self, *choices: str) -> str:
        return self.random.choice(choices)

    def text(self) -> str:
        self.lines += [f"    {state} = {self.of(*BEGINS)}" for state in STATES]
        for number in range(self.random.choice((1, 1, 1, 2))):
            self.loop(number)
        self.lines.append(f"    return {', '.join(self.random.sample(self.results, min(3, len(self.results))))},")
        return "\n".join(self.lines) + "\n"

    def loop(self, number: int) -> None:
        header, first = self.random.choice(HEADERS)
        names = [n for n in ("xt", "yt") if n in header]
        kept, buffer = f"hs{number}", f"out{number}"
        collects, writes = self.random.random() < 0.7, self.random.random() < 0.4
        begun = [self.of("x[0]", "w", "h") for _ in range(self.random.choice((0, 0, first, 1)))]
        self.lines.append(f"    {kept} = [{', '.join(begun)}]")
        self.lines.append(f"    {buffer} = {self.of(*BUFFERS)}")
        self.lines.append(f"    {header}")
        reads = [*READS, *names, *(f"{name}[t]" for name in self.lists)]
        reads += [f"{kept}[-1]"] * (2 if begun and collects else 0) + [f"{buffer}[t - 1]"] * (writes and first > 0)
        for _ in range(self.random.choice((1, 2, 3))):
            self.statement(reads)
        if collects:
            self.lines.append(f"        {kept}.append({self.of('h', 'k', 'h * k', 'h')})")
        if writes:
            place, value = self.of("t", "t", "n - 1 - t"), self.of("h", "k", "h + k", "1.0")
            self.lines.append(f"        {buffer}[{place}] = {value}")
        self.collect(kept, buffer, collects, writes)

    def statement(self, reads: Sequence[str]) -> None:
        target, value = self.of(*STATES), self.expression(reads, 2)
        kind = self.random.random()
        if kind < 0.15:
            self.lines.append(f"        if {self.of(*CONDITIONS)}:")
            self.lines.append(f"            {target} = {value}")
        elif kind < 0.3:
            self.lines.append(f"        {target} = {value} if {self.of(*CONDITIONS)} else {self.expression(reads, 1)}")
        elif kind < 0.4:
            self.lines.append(f"        h, k = k, {value}")
        elif kind < 0.45:
            self.lines.append(f"        {target} = {value} * {self.of('t', '(t + 1)', '(n - t)')}")
        else:
            self.lines.append(f"        {target} = {value}")

    def expression(self, reads: Sequence[str], depth: int) -> str:
        if depth == 0 or self.random.random() < 0.2:
            return self.of(*STATES, *STATES, *STATES, *reads)
        if self.random.random() < 0.35:
            return self.of(*UNARY).replace("{}", self.expression(reads, depth - 1))
        form = self.of(*BINARY)
        return form.format(*(self.expression(reads, depth - 1) for _ in range(form.count("{}"))))

    def collect(self, kept: str, buffer: str, collects: bool, writes: bool) -> None:
        self.results += ["h", "k"]
        if collects:
            self.lists.append(kept)
            self.lines.append(f"    {kept}.reverse()" if self.random.random() < 0.2 else "")
            self.results += [f"torch.stack({kept})", f"torch.stack({kept}, 1)", f"{kept}[0] + {kept}[-1]"]
            self.results += [f"torch.stack({kept}[::-1])", f"torch.cat({kept})", f"torch.stack({kept}).sum(0)"]
        if writes:
            self.results += [buffer, f"{buffer} * w", f"{buffer}[0]"]


def function(text: str, name: str) -> Function:
    """The function of a text; its lines can be looked up."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(text, name, "exec"), scope)
    return scope["f"]  # type: ignore[no-any-return]


def arguments(n: int, seed: int) -> list[Tensor]:
    torch.manual_seed(seed + n)
    shapes = ((n, WIDTH), (n, WIDTH), (WIDTH,), (WIDTH, n))
    return [(torch.randn(shape) * 0.5).requires_grad_(seed % GRADIENTS == 0) for shape in shapes]


def outcome(f: Function, n: int, seed: int) -> list[Tensor | None]:
    """Results and gradients."""
    args = arguments(n, seed)
    results = f(*args)
    moving = [r for r in results if r.requires_grad]
    torch.manual_seed(seed)
    cotangents = [torch.randn_like(r) for r in moving]
    grads = torch.autograd.grad(moving, args, cotangents, allow_unused=True) if moving else ()
    return [*(r.detach() for r in results), *grads]


def same(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    pairs = zip(a, b, strict=True)
    return all((p is None and q is None) or (p is not None and q is not None and _equal(p, q)) for p, q in pairs)


def _equal(p: Tensor, q: Tensor) -> bool:
    return p.shape == q.shape and p.dtype == q.dtype and torch.equal(p.nan_to_num(), q.nan_to_num())


LENGTHS = (13, 17, 5)
GRADIENTS = 4
"""One function in so many is differentiated, too."""


def try_one(seed: int) -> str:
    """What became of one random function: "skipped", "rolled", "stepwise"; raises AssertionError where it is wrong."""
    text = Writer(seed).text()
    f = function(text, f"<loop {seed}>")
    try:
        for n in LENGTHS:
            outcome(f, n, seed)
    except Exception:
        return "skipped"
    fast, verdict = fusegrad.compile(f), "stepwise"
    with fusegrad.config.patch(disable="patience"):
        for n in LENGTHS:
            expected, found = outcome(f, n, seed), outcome(fast, n, seed)
            assert same(expected, found), f"seed {seed}, n = {n}\n{text}"
    for spec in (s for specs in compiler_of(fast).table.by_facts.values() for s in specs):
        if has_loop(spec.captured.forward.trace.graph_module):
            verdict = "rolled"
    return verdict


def compiler_of(fast: Any) -> Any:
    """The compiled class behind a function."""
    return fast._fusegrad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    end, seed, verdicts = time.time() + options.seconds, options.seed, Counter[str]()
    warnings.simplefilter("ignore")
    while time.time() < end:
        try:
            verdicts[try_one(seed)] += 1
        except Exception as error:
            verdicts["WRONG"] += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
        seed += 1
    print(dict(verdicts), f"seeds {options.seed} to {seed - 1}")


if __name__ == "__main__":
    main()
