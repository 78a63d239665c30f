"""Random functions with loops over a size, as text, and Function classes whose backward has a loop of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence

UNARY = (
    "torch.sin({})",
    "torch.tanh({})",
    "({} * {}.sigmoid())",
    "(-{})",
    "torch.relu({})",
    "({} * 0.5)",
    "{}.flip(0)",
    "torch.softmax({}, 0)",
    "({} - {}.mean())",
    "({} * {}).sum().expand(3)",
    "{}.cumsum(0)",
    "({} @ m)",
    "(m @ {})",
    "cell({})",
    "({} > 0).to(x.dtype)",
    "{}.clamp(-1, 1)",
    "torch.roll({}, 1)",
    "{}.amax().expand(3)",
    "torch.logsumexp({}, 0).expand(3)",
    "({} @ w).expand(3)",
    "torch.outer({}, w).sum(0)",
    "({} / ({}.abs().sum() + 1))",
    "{}.cumprod(0)",
    "torch.linalg.vector_norm({} + 1).expand(3)",
    "{}[[2, 0, 1]]",
)
BINARY = (
    "({} + {})",
    "({} * {})",
    "({} - {})",
    "torch.maximum({}, {})",
    "torch.where({} > 0, {}, 0.1)",
    "torch.cat([{}[:1], {}[1:]])",
    "torch.stack([{}, {}]).sum(0)",
    "torch.where(q[t], {}, {})",
    "torch.lerp({}, {}, 0.3)",
    "torch.addcmul({}, {}, w)",
    "torch.minimum({}, {} + 0.1)",
    "torch.where({} > 0, {}, w)",
)
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
    ("for t, xt in enumerate(reversed(list(x))):", 0),
    ("for t, yt in reversed(list(enumerate(y))):", 0),
    ("for t, xt in zip(range(n), x.split(1)):", 0),
    ("for t in list(range(n)):", 0),
    ("for xt in x:", None),
    ("for t in range(3, n):", 3),
    ("for t in range(0, n, 2):", 0),
    ("for t in range(n // 2):", 0),
)
"""Heads of loops, and the first step; None: no step is named."""
READS = (
    "x[t]",
    "y[t]",
    "x[n - 1 - t]",
    "x[t - 1]",
    "y[-1 - t]",
    "x[0]",
    "y[-1]",
    "w",
    "x.select(0, t)",
    "v[:, t]",
    "x[t : t + 1].sum(0)",
    "x[t, :]",
    "v.t()[t]",
    "x[t][0].expand(3)",
    "y.sum(0)",
    "x.narrow(0, t, 1).squeeze(0)",
    "x[n - 1]",
    "x[t] * y[t]",
    "x[t].detach()",
)
BEGINS = (
    "torch.zeros_like(x[0])",
    "x[0]",
    "w",
    "torch.zeros(3, dtype=x.dtype)",
    "w * 2",
    "y[-1]",
    "x.new_zeros(3)",
    "y.mean(0)",
)
CONDITIONS = ("t > 0", "t == 0", "t < n - 1", "t == n - 1", "t != 1", "t > 1")
BUFFERS = ("torch.zeros_like(x)", "torch.ones_like(y)", "x.new_zeros(n, 3)", "torch.zeros(3, n, dtype=x.dtype).t()")
IN_PLACE = (
    "{} += {}",
    "{} *= 0.5",
    "{}.add_({})",
    "{}[0] = 0.5",
    "{}[1:] += 1",
    "{}.copy_({})",
    "{}[q[t].expand(3)] = 0.1",
)
COUNTS = ("c = c + (h > 0).sum()", "c += 1", "c = torch.where(q[t], c + 1, 0)", "c = torch.maximum(c, (k > 0).sum())")
FLAGS = ("b = b | (h > 0)", "b = (k > 0) ^ b", "b = b & q[t]", "b = ~b")
NUMBERS = ("i += 1", "i = t", "i = n - t", "i = i + 2")
STEPS = ("i = 0", "c = torch.zeros((), dtype=torch.int64)", "b = torch.zeros(3, dtype=torch.bool)")
CELLS = (
    "    def cell(a):\n        return torch.tanh(a * w)",
    "    cell = lambda a: a + h",
    "    def cell(a, s=0.5):\n        r = a.sigmoid()\n        return r * a + s",
)


class Writer:
    """One random function as text: `f(x, y, w, v, m, q)` of [n, 3], [n, 3], [3], [3, n], [3, 3] and booleans [n]."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines = ["    n = " + self.of("x.shape[0]", "len(x)", "y.size(0)")]
        self.results: list[str] = []
        self.lists: list[str] = []

    def of(self, *choices: str) -> str:
        return self.random.choice(choices)

    def chance(self, part: float) -> bool:
        return self.random.random() < part

    def text(self) -> str:
        """The function."""
        self.body()
        count = self.random.choice((1, 2, 3, 3, 4))
        self.lines.append(f"    return {', '.join(self.random.sample(self.results, min(count, len(self.results))))},")
        return "def f(x, y, w, v, m, q):\n" + "\n".join(self.lines) + "\n"

    def body(self) -> None:
        self.lines += [f"    {state} = {self.of(*BEGINS)}" for state in ("h", "k")]
        self.lines += [*(f"    {line}" for line in STEPS), self.of(*CELLS)]
        for number in range(self.random.choice((1, 1, 1, 2))):
            self.loop(number)

    # ------------------------------------------------------------------ a loop
    def loop(self, number: int) -> None:
        header, first = self.random.choice(HEADERS)
        if first is None:  # the others count
            self.lines.append("    t = 0")
        names = [n for n in ("xt", "yt") if n in header]
        kept, buffer = f"hs{number}", f"out{number}"
        collects, writes = self.chance(0.7), self.chance(0.3)
        begun = [self.of("x[0]", "w", "h") for _ in range(self.random.choice((0, 0, first or 0, 1)))]
        self.lines.append(f"    {kept} = [{', '.join(begun)}]")
        self.lines.append(f"    {buffer} = {self.of(*BUFFERS)}")
        owned = self.own_state() if self.chance(0.25) else None
        self.lines.append(f"    {header}")
        if "split" in header:
            self.lines.append("        xt = xt.squeeze(0)")
        reads = [*READS, *names, *names, *(f"{name}[t]" for name in self.lists)]
        reads += [f"{kept}[-1]"] * (2 if begun and collects else 0) + [f"{buffer}[t - 1]"] * (writes and bool(first))
        for _ in range(self.random.choice((1, 2, 3))):
            self.statement(reads, owned)
        if self.chance(0.08):
            self.lines += [f"        for u in {self.of('range(3)', 'range(x.shape[1])', 'reversed(range(2))')}:"]
            value = self.expression((*reads, "m[u]", "v[u, t].expand(3)"), 1)
            self.lines += [f"            {self.of('h', 'k')} = {value}"]
        self.others()
        if collects:
            add = self.of("{}.append({})", "{}.append({})", "{}.append({})", "{}.insert(0, {})", "{} += [{}]")
            self.lines.append("        " + add.format(kept, self.of("h", "k", "h * k", "h", "h.clone()")))
        if writes:
            place, value = self.of("t", "t", "n - 1 - t"), self.of("h", "k", "h + k", "1.0")
            self.lines.append(f"        {buffer}[{place}] = {value}")
        if first is None:
            self.lines.append("        t += 1")
        self.collect(kept, buffer, collects, writes)

    def own_state(self) -> str:
        """A state that is written to in place."""
        state = self.of("h", "k")
        self.lines.append(f"    {state} = {state}.clone()")
        return state

    def others(self) -> None:
        """States that are whole numbers, booleans, and Python's."""
        for forms, part in ((COUNTS, 0.2), (FLAGS, 0.15), (NUMBERS, 0.2)):
            if self.chance(part):
                self.lines.append(f"        {self.of(*forms)}")
                self.results += {COUNTS: ["c"], FLAGS: ["b", "b & (h > 0)"], NUMBERS: ["h * i"]}[forms]

    def statement(self, reads: Sequence[str], owned: str | None) -> None:
        if owned is not None and self.chance(0.5):
            form = self.of(*IN_PLACE)
            text = form.format(owned, self.expression(reads, 1)) if form.count("{}") > 1 else form.format(owned)
            self.lines.append(f"        {text}")
            return
        target, value = self.of("h", "k"), self.expression(reads, 2)
        kind = self.random.random()
        if kind < 0.12:
            self.lines += [f"        if {self.of(*CONDITIONS)}:", f"            {target} = {value}"]
        elif kind < 0.22:
            self.lines.append(f"        {target} = {value} if {self.of(*CONDITIONS)} else {self.expression(reads, 1)}")
        elif kind < 0.32:
            self.lines.append(f"        h, k = k, {value}")
        elif kind < 0.37:
            self.lines.append(f"        {target} = {value} * {self.of('t', '(t + 1)', '(n - t)', 'i')}")
        else:
            self.lines.append(f"        {target} = {value}")

    def expression(self, reads: Sequence[str], depth: int) -> str:
        if depth == 0 or self.chance(0.2):
            return self.of("h", "k", *("h", "k") * (len(reads) // 4), *reads)
        if self.chance(0.45):
            return self.of(*UNARY).replace("{}", self.expression(reads, depth - 1))
        form = self.of(*BINARY)
        return form.format(*(self.expression(reads, depth - 1) for _ in range(form.count("{}"))))

    # ------------------------------------------------------------------ what becomes of it
    def collect(self, kept: str, buffer: str, collects: bool, writes: bool) -> None:
        self.results += ["h", "k"]
        if collects:
            self.lists.append(kept)
            self.lines.append(f"    {kept}.reverse()" if self.chance(0.2) else "")
            self.results += [form.replace("{}", kept) for form in COLLECTED]
        if writes:
            self.results += [buffer, f"{buffer} * w", f"{buffer}[0]"]


COLLECTED = (
    "torch.stack({})",
    "torch.stack({}, 1)",
    "{}[0] + {}[-1]",
    "torch.stack({}[::-1])",
    "torch.cat({})",
    "torch.stack({}).sum(0)",
    "torch.stack({}[1:])",
    "torch.stack({}[:-1], dim=-1)",
    "torch.cat([a[None] for a in {}])",
    "torch.stack([w, *{}])",
    "torch.stack(list(reversed({})))",
    "torch.vstack({})",
    "torch.stack([a * 2 for a in {}])",
    "sum({})",
    "torch.stack({}).cumsum(0)",
    "torch.stack({})[-1]",
    "torch.stack(tuple({})).t()",
)


class WriterOfClasses(Writer):
    """One random Function class: forward keeps what its loop collects, backward has a loop over it of its own."""

    def text(self) -> str:
        """The class F."""
        self.body()
        kept = self.lists[-1] if self.lists else "[h] * n"
        lines = [*self.lines, f"    hs = torch.stack({kept})"]
        lines += ["    ctx.save_for_backward(x, y, w, m, q, hs)", "    return hs, k"]
        head = "class F(torch.autograd.Function):\n    @staticmethod\n"
        forward = "def forward(ctx, x, y, w, v, m, q):\n" + "\n".join(lines)
        return head + indented(forward) + "\n\n    @staticmethod\n" + indented(self.backward()) + "\n"

    def backward(self) -> str:
        self.lines, self.lists = [], []
        header = self.of("for t in reversed(range(n)):", "for t in range(n - 1, -1, -1):", "for t in range(n):")
        reads = ("x[t]", "y[t]", "w", "hs[t]", "g[t]", "g[t]", "x[t - 1]")
        self.lines += ["def backward(ctx, g, gk):", "    x, y, w, m, q, hs = ctx.saved_tensors"]
        self.lines += ["    n, h, k, i = min(len(g), len(x)), gk, g[-1], 1"]
        self.lines += ["    cell = lambda a: a * w", "    gx, gw = [], torch.zeros_like(w)", f"    {header}"]
        for _ in range(self.random.choice((1, 2, 3))):
            self.statement(reads, None)
        add = self.of("gx.append(h)", "gx.insert(0, h)", "gx.append(h * k)")
        self.lines += [f"        {add}", f"        gw {self.of('= gw +', '+=')} {self.expression(reads, 1)}"]
        stacked = self.of("torch.stack(gx)", "torch.stack(gx[::-1])", "torch.stack(list(reversed(gx)))")
        stacked = f"torch.cat([{stacked}, x[: len(x) - n]])" if self.chance(0.2) else stacked
        self.lines += [f"    return {stacked}, None, gw, None, None, None"]
        return "\n".join(self.lines)


def indented(text: str) -> str:
    """The text as it stands in a class."""
    return "\n".join(f"    {line}" if line else "" for line in text.split("\n"))
