"""Random Functions whose scores need not be in memory: a product of matrices, what is made of it, and what sums it.

    operands  ->  s = q @ k.mT  ->  scales, caps, biases  ->  masks  ->  a normaliser  ->  p @ v, a loss, rows

Each comes with a backward in plain code, put together of the derivatives of its pieces.
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Tensor = torch.Tensor
ROWS = (17, 18, 23, 31, 32, 33, 37, 48, 50, 64, 65, 67)
FEW_ROWS = (1, 2, 5, 16)
DEPTHS = (1, 3, 4, 8, 13, 16)
OPERANDS_FROM = 100_000
"""From this seed on, what is multiplied may be made of an argument, and the depths are of more kinds.

Those before stay the programs that they were: what was found by them is found again.
"""
WIDER_FROM = 200_000
"""From this seed on, rows may fill several blocks, masks of data may leave some of them nothing, every second program
is a plain function, whose backward is derived, and gradients may be one number.
"""
MORE_ROWS = (*ROWS, 130, 145, 190, 257)
MORE_DEPTHS = (1, 3, 5, 7, 8, 11, 13, 16, 19, 24, 31, 33)
SCORES = ("b", "h", "r", "n", "m")
HEADER = "import torch\nimport torch.nn.functional as F\nfrom torch.autograd import Function\n\nINF = float('inf')\n"


@dataclass(frozen=True)
class Argument:
    """A tensor by the letters of its axes. kind: "float", "positive", "places", or one of WHOLE."""

    name: str
    axes: tuple[str, ...]
    kind: str = "float"

    def tensor(self, sizes: dict[str, int], dtype: torch.dtype, at: torch.Generator) -> Tensor:
        shape = [sizes[a] for a in self.axes]
        if self.kind in WHOLE:
            return WHOLE[self.kind](shape, sizes, at)
        made = torch.randn(shape, dtype=torch.float64, generator=at) / 2
        made = made.abs() + 0.5 if self.kind == "positive" else made
        return made.to(dtype).requires_grad_()


WHOLE: dict[str, Callable[[list[int], dict[str, int], torch.Generator], Tensor]] = {
    "lengths or none": lambda shape, sizes, at: torch.randint(0, sizes["m"] + 1, shape, generator=at),
    "rows or none": lambda shape, _, at: (
        (torch.rand(shape, generator=at) < 0.8) & (torch.rand(shape[:-1], generator=at) < 0.9)[..., None]
    ),
    "documents": lambda shape, _, at: torch.randint(0, 3, shape, generator=at).sort(-1).values,
    "lengths": lambda shape, sizes, at: torch.randint(1, sizes["m"] + 1, shape, generator=at),
    "kept": lambda shape, _, at: torch.rand(shape, generator=at) < 0.8,
}


@dataclass
class Written:
    """A program: the statements of both methods, and what they are of."""

    seed: int
    scores: tuple[str, ...] = ()
    arguments: list[Argument] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    gradients: dict[str, str] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    made: int = 0

    @property
    def name(self) -> str:
        return f"Stream{self.seed}"

    def argument(self, stem: str, axes: Sequence[str], kind: str = "float") -> str:
        name = f"{stem}{len(self.arguments)}" if any(a.name == stem for a in self.arguments) else stem
        self.arguments.append(Argument(name, tuple(axes), kind))
        return name

    def over_scores(self, name: str) -> str:
        """An argument with axes of length one in the place of those that it has not."""
        axes = next(a.axes for a in self.arguments if a.name == name)
        if not axes:
            return name
        return f"{name}[{', '.join(':' if a in axes else 'None' for a in self.scores)}]"

    def summed_to(self, name: str, text: str) -> str:
        """A sum of something of all scores over the axes that an argument has not."""
        axes = next(a.axes for a in self.arguments if a.name == name)
        over = tuple(n for n, a in enumerate(self.scores) if a not in axes)
        return f"({text}).sum({over})" if over else text

    def fresh(self, stem: str) -> str:
        self.made += 1
        return f"{stem}{self.made}"

    @property
    def is_plain(self) -> bool:
        """A function, whose backward is derived."""
        return self.seed >= WIDER_FROM and self.seed % 2 == 1

    @property
    def source(self) -> str:
        names = ", ".join(a.name for a in self.arguments)
        kept = [*(a.name for a in self.arguments), *self.saved]
        results = self.results[0] if len(self.results) == 1 else f"({', '.join(self.results)})"
        if self.is_plain:
            lines = [f"def {self.name}({names}):", *(f"    {line}" for line in self.forward), f"    return {results}"]
            return HEADER + "\n\n" + "\n".join(lines) + "\n"
        given = ", ".join(f"g_{r}" for r in self.results)
        found = ", ".join(self.gradients.get(a.name, "None") for a in self.arguments)
        lines = [
            f"class {self.name}(Function):", "    @staticmethod", f"    def forward(ctx, {names}):",
            *(f"        {line}" for line in self.forward), f"        ctx.save_for_backward({', '.join(kept)})",
            f"        return {results}", "", "    @staticmethod", f"    def backward(ctx, {given}):",
            f"        {', '.join(kept)}, = ctx.saved_tensors",
            *(f"        {line}" for line in self.backward), f"        return {found}",
        ]  # fmt: skip
        return HEADER + "\n\n" + "\n".join(lines) + "\n"

    def load(self) -> Any:
        """The class or the function, in a module whose text `inspect` finds."""
        path, text = f"<{self.name}>", self.source
        linecache.cache[path] = (len(text), None, text.splitlines(True), path)
        module: dict[str, Any] = {"__name__": self.name}
        exec(compile(text, path, "exec"), module)
        return module[self.name]

    def forget(self) -> None:
        linecache.cache.pop(f"<{self.name}>", None)

    def tensors(self, sizes: dict[str, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
        at = torch.Generator().manual_seed(self.seed)
        return tuple(a.tensor(sizes, dtype, at) for a in self.arguments)


# ------------------------------------------------------------------------------------------------------------ drawing
def program(seed: int) -> Written:
    """The program of a seed, the same one each time."""
    rng, p = random.Random(seed), Written(seed)
    of_operands = random.Random(f"{seed} operands") if seed >= OPERANDS_FROM else None
    lead = rng.choice(((), ("b",), ("b", "h"), ("b", "h"), ("b", "h", "r")))
    p.scores = (*lead, "n", "m")
    shared = [a for a in lead if a != "r" and not (a == "h" and rng.random() < 0.2)]
    q, k = p.argument("q", (*lead, "n", "d")), p.argument("k", (*shared, "m", "d"))
    chain = _Chain(p, rng, of_operands)
    left, right = chain.operand(q), chain.spread(chain.operand(k))
    p.forward += [f"s = {left} @ {right}.mT", *PLACES]
    chain.score_steps()
    chain.mask()
    ends = LOSSES if rng.random() < 0.25 else CONSUMERS
    rng.choice(ends)(chain)
    chain.finish(shared)
    return p


PLACES = (
    "n, m = s.shape[-2:]",
    "i = torch.arange(n, device=s.device)[:, None]",
    "j = torch.arange(m, device=s.device)[None, :]",
)


def sizes_of(seed: int, turn: int = 0) -> dict[str, int]:
    """Sizes of a program's axes; another turn has others, of the same depths."""
    rng, fixed = random.Random(f"{seed} sizes {turn}"), random.Random(f"{seed} depths")
    usual = MORE_ROWS if seed >= WIDER_FROM else ROWS
    rows = [rng.choice(FEW_ROWS if rng.random() < 0.05 else usual) for _ in "nm"]
    depths = MORE_DEPTHS if seed >= OPERANDS_FROM else DEPTHS
    return {
        "b": rng.choice((1, 2)), "h": fixed.choice((1, 2, 3)), "r": fixed.choice((2, 3)), "n": rows[0], "m": rows[1],
        "d": fixed.choice(depths), "e": fixed.choice(depths),
    }  # fmt: skip


class _Chain:
    """Scores on their way. `back`: for each step the statements that take a gradient back through it.

    of_operands: what draws the operands, None where they are the arguments. `made_of`: the argument of an operand;
    `ends`: the statements that take the gradient of an operand, `d_` and its argument, back to the argument.
    """

    def __init__(self, p: Written, rng: random.Random, of_operands: random.Random | None) -> None:
        self.p, self.rng, self.at, self.of_operands = p, rng, "s", of_operands
        self.made_of: dict[str, str] = {}
        self.ends: list[str] = []
        self.back: list[Callable[[str], list[str]]] = []
        self.more: dict[str, list[str]] = {}
        self.after_softmax = True

    def operand(self, name: str) -> str:
        """What is multiplied in the place of an argument: the argument, or something made of it."""
        if self.of_operands is None or self.of_operands.random() > 0.35:
            return name
        made = f"{name}_"
        self.made_of[made] = name
        text, back = self.of_operands.choice(OPERANDS)(self, name)
        self.p.forward.append(f"{made} = {text}")
        if self.of_operands.random() < 0.3:
            self.p.saved.append(made)
        self.ends += back
        return made

    def multiplied(self, name: str) -> str:
        """The operand that an argument stands for."""
        return f"{name}_" if f"{name}_" in self.made_of else name

    def spread(self, name: str) -> str:
        """Keys as batched as scores are."""
        axes = next(a.axes for a in self.p.arguments if a.name == self.made_of.get(name, name))
        lead = self.p.scores[:-2]
        if all(a in axes for a in lead):
            return name
        return f"{name}[{', '.join(':' if a in axes else 'None' for a in lead)}]"

    def gathered(self, name: str, text: str) -> str:
        """The gradient of something that was spread."""
        axes = next(a.axes for a in self.p.arguments if a.name == name)
        over = tuple(n for n, a in enumerate(self.p.scores[:-2]) if a not in axes)
        return f"({text}).sum({over})" if over else text

    def step(self, text: str, back: Callable[[str, str, str], list[str]]) -> None:
        """A statement of the scores, `{s}`; back: (before, after, gradient) -> statements that change the gradient."""
        before, after = self.at, self.p.fresh("s")
        self.p.forward.append(f"{after} = {text.format(s=before)}")
        self.back.append(lambda g: back(before, after, g))
        self.at = after

    def score_steps(self) -> None:
        if self.rng.random() < 0.75:
            STEPS["scale"](self)
        for name in self.rng.sample(sorted(STEPS), self.rng.choice((0, 1, 1, 2, 3))):
            STEPS[name](self)

    def mask(self) -> None:
        """The condition under which a score counts; what the others are is decided by what comes next."""
        self.condition = None
        if self.rng.random() < 0.7:
            self.condition = self._condition(self.rng.choice((0, 0, 0, 1, 2)))
            self.p.forward.append(f"alive = {self.condition}")

    def _condition(self, depth: int) -> str:
        if depth == 0:
            return self.rng.choice(MASKS)(self)
        kind, first = self.rng.random(), self._condition(depth - 1)
        if kind < 0.15:
            return f"~({first})"
        return f"({first}) {'&' if kind < 0.65 else '|'} ({self._condition(0)})"

    def masked(self, number: str) -> None:
        if self.condition is not None:
            self.step(f"torch.where(alive, {{s}}, {number})", lambda x, y, g: [f"{g} = torch.where(alive, {g}, 0.0)"])

    def finish(self, shared: Sequence[str]) -> None:
        """Backward: all of forward again but for what was saved, then the gradient of the scores, step by step."""
        p = self.p
        kept = set(p.saved)
        again = [line for line in p.forward if line.partition(" = ")[0] not in kept]
        p.backward = [*again, *p.backward]
        for back in reversed(self.back):
            p.backward += back("ds")
        q, k = self.multiplied("q"), self.multiplied("k")
        p.gradients["q"] = " + ".join([f"ds @ {self.spread(k)}", *self.more.get("q", [])])
        p.gradients["k"] = self.gathered("k", " + ".join([f"ds.mT @ {q}", *self.more.get("k", [])]))
        for name, text in p.gradients.items():
            line = f"d_{name} = {text}"
            if name in ("q", "k"):
                p.backward.append(line)
                p.gradients[name] = f"d_{name}"
        p.backward += self.ends


# ----------------------------------------------------------------------------------- operands: (text, the way back)
def _quotient(c: _Chain, u: str) -> tuple[str, list[str]]:
    """By a number for each column of the depth, or for each row."""
    axes = next(a.axes for a in c.p.arguments if a.name == u)
    w = c.p.argument("by", axes[-1:] if c.of_operands.random() < 0.5 else axes[:-1], "positive")
    kept = next(a.axes for a in c.p.arguments if a.name == w)
    by = w if kept == axes[-1:] else f"{w}[..., None]"
    over = tuple(n for n, a in enumerate(axes) if a not in kept)
    c.p.gradients[w] = f"d_{w}"
    return f"{u} / {by}", [f"d_{w} = (-d_{u} * {u} / ({by} * {by})).sum({over})", f"d_{u} = d_{u} / {by}"]


def _exponential(c: _Chain, u: str) -> tuple[str, list[str]]:
    return f"torch.exp({u} / 4.0)", [f"d_{u} = d_{u} * {u}_ / 4.0"]


def _logarithm_of_one_more(c: _Chain, u: str) -> tuple[str, list[str]]:
    return f"torch.log1p({u} * {u})", [f"d_{u} = d_{u} * 2 * {u} / (1 + {u} * {u})"]


def _unit(c: _Chain, u: str) -> tuple[str, list[str]]:
    """Of length one."""
    length = f"({u} * {u}).sum(-1, keepdim=True).add(0.1).sqrt()"
    return f"{u} / {length}", [f"d_{u} = (d_{u} - {u}_ * ({u}_ * d_{u}).sum(-1, keepdim=True)) / {length}"]


def _shares(c: _Chain, u: str) -> tuple[str, list[str]]:
    axis = c.of_operands.choice((-1, -2))
    return f"torch.softmax({u}, {axis})", [f"d_{u} = {u}_ * (d_{u} - ({u}_ * d_{u}).sum({axis}, keepdim=True))"]


def _rolled(c: _Chain, u: str) -> tuple[str, list[str]]:
    back = f"d_{u} = torch.cat((d_{u}[..., -1:], d_{u}[..., :-1]), -1)"
    return f"torch.cat(({u}[..., 1:], {u}[..., :1]), -1)", [back]


def _gate(c: _Chain, u: str) -> tuple[str, list[str]]:
    return f"{u} * torch.sigmoid({u})", [f"g_{u} = torch.sigmoid({u})", f"d_{u} = d_{u} * (g_{u} + {u}_ * (1 - g_{u}))"]


def _mean_taken_off(c: _Chain, u: str) -> tuple[str, list[str]]:
    axis = c.of_operands.choice((-1, -2))
    return f"{u} - {u}.mean({axis}, keepdim=True)", [f"d_{u} = d_{u} - d_{u}.mean({axis}, keepdim=True)"]


OPERANDS: tuple[Callable[[_Chain, str], tuple[str, list[str]]], ...] = (
    _quotient, _quotient, _exponential, _logarithm_of_one_more, _unit, _shares, _rolled, _gate, _mean_taken_off,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------- score steps
def _scale(c: _Chain) -> None:
    by = c.rng.choice(("0.25", "0.5", "0.7", "1.3"))
    if c.rng.random() < 0.5:
        c.step(f"{{s}} * {by}", lambda x, y, g: [f"{g} = {g} * {by}"])
    else:
        c.step(f"{{s}} / {by}", lambda x, y, g: [f"{g} = {g} / {by}"])


def _softcap(c: _Chain) -> None:
    c.step("2.0 * torch.tanh({s} / 2.0)", lambda x, y, g: [f"{g} = {g} * (1 - ({y} / 2.0) ** 2)"])


def _alibi(c: _Chain) -> None:
    if "h" in c.p.scores:
        slope = c.p.over_scores(c.p.argument("slope", ("h",)))
        c.step(f"{{s}} + 0.1 * {slope} * (j - i).to(s.dtype)", lambda x, y, g: [])
    else:
        c.step("{s} - 0.05 * (j - i).to(s.dtype)", lambda x, y, g: [])


def _distance(c: _Chain) -> None:
    c.step("{s} - 0.1 * (i - j).abs().to(s.dtype)", lambda x, y, g: [])


def _bias(c: _Chain) -> None:
    axes = c.rng.choice((("m",), ("n",), ("n", "m"), *((("h", "n", "m"), ("h",)) if "h" in c.p.scores else ()), ()))
    name = c.p.argument("bias", axes)

    def back(before: str, after: str, g: str) -> list[str]:
        c.p.gradients[name] = f"d_{name}"
        return [f"d_{name} = {c.p.summed_to(name, g)}"]

    c.step(f"{{s}} + {c.p.over_scores(name)}", back)


def _factor(c: _Chain) -> None:
    """A factor for each row, column or head, or one for all."""
    axes = c.rng.choice((("n",), ("m",), (), *((("h",),) if "h" in c.p.scores else ())))
    name = c.p.argument("factor", axes, "positive")
    over = c.p.over_scores(name)

    def back(before: str, after: str, g: str) -> list[str]:
        c.p.gradients[name] = f"d_{name}"
        return [f"d_{name} = {c.p.summed_to(name, f'{g} * {before}')}", f"{g} = {g} * {over}"]

    c.step(f"{{s}} * {over}", back)


def _temperature(c: _Chain) -> None:
    name = c.p.argument("t", ("h",) if "h" in c.p.scores and c.rng.random() < 0.5 else (), "positive")
    over = c.p.over_scores(name)
    c.step(f"{{s}} / {over}", lambda x, y, g: [f"{g} = {g} / {over}"])


def _square(c: _Chain) -> None:
    c.step("0.2 * {s} * {s}", lambda x, y, g: [f"{g} = {g} * 0.4 * {x}"])


def _swish(c: _Chain) -> None:
    c.step("{s} * torch.sigmoid({s})", lambda x, y, g: [
        f"sg = torch.sigmoid({x})", f"{g} = {g} * (sg + {x} * sg * (1 - sg))",
    ])  # fmt: skip


def _norms(c: _Chain) -> None:
    """Squares of distances."""
    q = c.multiplied("q")
    less = f"({q} * {q}).sum(-1)[..., :, None] / 2"
    c.step(f"{{s}} - {less}", lambda x, y, g: [f"of_q = {g}.sum(-1, keepdim=True) * {q}"])
    c.more.setdefault("q", []).append("(-of_q)")


STEPS: dict[str, Callable[[_Chain], None]] = {
    "scale": _scale, "softcap": _softcap, "alibi": _alibi, "distance": _distance, "bias": _bias, "factor": _factor,
    "temperature": _temperature, "square": _square, "swish": _swish, "norms": _norms,
}  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- masks
def _window(c: _Chain) -> str:
    width = c.rng.choice((1, 3, 8, 20))
    return c.rng.choice((f"i - j < {width}", f"j - i <= {width}", f"(i - j).abs() <= {width}", f"i < j + {width}"))


def _prefix(c: _Chain) -> str:
    return c.rng.choice(("j < 5", "j < 20", "j >= 3", "i >= 9", "j < m - 4", "j < m // 2"))


def _documents(c: _Chain) -> str:
    rows, columns = (c.p.argument(stem, (axis,), "documents") for stem, axis in (("of_row", "n"), ("of_column", "m")))
    return f"{rows}[:, None] {c.rng.choice(('==', '>='))} {columns}[None, :]"


def _lengths(c: _Chain) -> str:
    kind = "lengths or none" if c.p.seed >= WIDER_FROM else "lengths"
    name = c.p.argument("length", ("b",) if "b" in c.p.scores else (), kind)
    return f"j < {c.p.over_scores(name)}"


def _any_mask(c: _Chain) -> str:
    axes = c.rng.choice((("n", "m"), ("m",), ("n",), *((("b", "n", "m"),) if "b" in c.p.scores else ())))
    return c.p.over_scores(c.p.argument("keep", axes, "rows or none" if c.p.seed >= WIDER_FROM else "kept"))


MASKS: tuple[Callable[[_Chain], str], ...] = (
    lambda c: "i >= j", lambda c: "j <= i", lambda c: "j - i <= m - n", lambda c: "i != j", _window, _window, _prefix,
    _documents, _lengths, _any_mask,
)  # fmt: skip


# -------------------------------------------------------------------------------------- p of scores, and back to them
def _softmax(c: _Chain) -> tuple[list[str], list[str]]:
    number = c.rng.choice(("-INF", "-INF", "-INF", "-1e30", "torch.finfo(s.dtype).min", "-1e4"))
    c.masked(number)
    axis = c.rng.choice((-1, -1, -1, -2))
    s = c.at
    ways = (
        [f"p = torch.softmax({s}, {axis})"],
        [f"p = torch.exp(torch.log_softmax({s}, {axis}))"],
        [f"top = {s}.amax({axis}, keepdim=True)", f"z = torch.exp({s} - top)", f"p = z / z.sum({axis}, keepdim=True)"],
        [f"lse = torch.logsumexp({s}, {axis}, keepdim=True)", f"p = torch.exp({s} - lse)"],
        [f"top = {s}.amax({axis}, keepdim=True).clamp_min(-1.0)", f"z = torch.exp({s} - top)",
         f"total = z.sum({axis}, keepdim=True) + torch.exp(-1.0 - top)", "p = z / total"],
        [f"top = {s}.amax({axis}, keepdim=True)", f"z = torch.exp2(1.5 * ({s} - top))",
         f"p = z / z.sum({axis}, keepdim=True)"],
    )  # fmt: skip
    # the logarithm is lost beside a great number, so that eager has 1 in the place of 1 / n
    way = c.rng.choice([w for w in ways if number == "-INF" or not w[0].startswith("lse")])
    rate = " * 1.5 * 0.6931471805599453" if "exp2" in way[1 % len(way)] else ""
    if any(line.startswith("lse") for line in way) and c.rng.random() < 0.4:
        c.p.saved.append("lse")
    return way, [f"ds = p * (dp - (p * dp).sum({axis}, keepdim=True)){rate}"]


def _sigmoid(c: _Chain) -> tuple[list[str], list[str]]:
    c.masked("-INF")
    return [f"p = torch.sigmoid({c.at} - 1.0)"], ["ds = dp * p * (1 - p)"]


def _plain(c: _Chain) -> tuple[list[str], list[str]]:
    c.masked("0.0")
    return [f"p = {c.at} * 0.5"], ["ds = dp * 0.5"]


def _relu_squared(c: _Chain) -> tuple[list[str], list[str]]:
    c.masked("0.0")
    return [f"r = torch.relu({c.at})", "p = r * r / 8.0"], ["ds = dp * r / 4.0"]


def _share(c: _Chain) -> tuple[list[str], list[str]]:
    """Sigmoids by their sum."""
    c.masked("-INF")
    way = [f"z = torch.sigmoid({c.at})", "total = z.sum(-1, keepdim=True) + 1.0", "p = z / total"]
    return way, ["ds = (dp - (p * dp).sum(-1, keepdim=True)) / total * z * (1 - z)"]


def _exponentials(c: _Chain) -> tuple[list[str], list[str]]:
    """By their sum, no maximum taken off."""
    c.step("torch.tanh({s} / 4.0) * 4.0", lambda x, y, g: [f"{g} = {g} * (1 - ({y} / 4.0) ** 2)"])
    c.masked("-INF")
    way = [f"z = torch.exp({c.at})", "total = z.sum(-1, keepdim=True) + 0.5", "p = z / total"]
    return way, ["ds = p * (dp - (p * dp).sum(-1, keepdim=True))"]


NORMALISERS = (_softmax, _softmax, _softmax, _sigmoid, _plain, _relu_squared, _share, _exponentials)


def _normalised(c: _Chain) -> list[str]:
    way, back = c.rng.choice(NORMALISERS)(c)
    c.p.forward += way
    if c.rng.random() < 0.3:
        c.p.saved.append("p")
    return back


# ------------------------------------------------------------------------------------------------------ what sums them
def _dropout(c: _Chain) -> tuple[str, str]:
    """(p as it is multiplied, what its gradient is multiplied by)."""
    if c.rng.random() > 0.25:
        return "p", ""
    if c.rng.random() < 0.5:
        kept = c.p.over_scores(c.p.argument("keep", c.p.scores, "kept"))
    else:
        c.p.forward.append("kept = (i * 40503 + j * 9973) % 11 < 9")
        kept = "kept"
    return f"(p * {kept} / 0.8)", f" * {kept} / 0.8"


def _values(c: _Chain) -> None:
    """p @ v"""
    axes = next(a.axes for a in c.p.arguments if a.name == "k")
    v = c.p.argument("v", (*axes[:-1], "e"))
    back = _normalised(c)
    used, factor = _dropout(c)
    spread = c.spread(c.operand("v"))
    g = _finished(c, f"{used} @ {spread}")
    c.p.backward += [f"dp = ({g} @ {spread}.mT){factor}", f"d_v = {c.gathered(v, f'{used}.mT @ {g}')}", *back]
    c.p.gradients[v] = "d_v"


def _finished(c: _Chain, text: str) -> str:
    """The result, with a residual, a gate or a factor for each row where they are drawn; the product's gradient."""
    c.p.results.append("out")
    kind = 1.0 if c.of_operands is None else c.of_operands.random()
    if kind > 0.35:
        c.p.forward.append(f"out = {text}")
        return "g_out"
    o = c.p.argument("o", (*c.p.scores[:-1], "e")[: -1 if kind < 0.1 else None])
    over = f"{o}[..., None]" if kind < 0.1 else o
    c.p.gradients[o] = f"d_{o}"
    c.p.forward.append(f"held = {text}")
    if kind > 0.22:
        c.p.forward.append(f"out = held + {over}")
        c.p.backward.append(f"d_{o} = g_out")
        return "g_out"
    c.p.forward.append(f"out = held * torch.sigmoid({over})")
    slope = f"g_out * held * torch.sigmoid({over}) * (1 - torch.sigmoid({over}))"
    c.p.backward.append(f"d_{o} = ({slope}).sum(-1)" if kind < 0.1 else f"d_{o} = {slope}")
    c.p.backward.append(f"g_held = g_out * torch.sigmoid({over})")
    return "g_held"


def _transposed_values(c: _Chain) -> None:
    """p.mT @ w"""
    w = c.p.argument("w", (*c.p.scores[:-1], "e"))
    back = _normalised(c)
    used, factor = _dropout(c)
    c.p.forward.append(f"out = {used}.mT @ w")
    c.p.results.append("out")
    c.p.backward += [f"dp = (w @ g_out.mT){factor}", f"d_w = {used} @ g_out", *back]
    c.p.gradients[w] = "d_w"


def _weighted_rows(c: _Chain) -> None:
    """Sums of squares of each row."""
    back = _normalised(c)
    c.p.forward.append("out = (p * p).sum(-1)")
    c.p.results.append("out")
    c.p.backward += ["dp = 2 * p * g_out[..., None]", *back]


CONSUMERS = (_values, _values, _values, _values, _transposed_values, _weighted_rows)


def _logarithm(c: _Chain) -> None:
    c.masked("-INF")
    axis = c.rng.choice((-1, -2))
    c.p.forward.append(f"lse = torch.logsumexp({c.at}, {axis}, keepdim=True)")
    c.p.forward.append(f"out = lse.{c.rng.choice(('sum', 'sum'))}()")
    c.p.results.append("out")
    c.p.backward.append(f"ds = torch.exp({c.at} - lse) * g_out")


def _both_logarithms(c: _Chain) -> None:
    c.p.forward.append(f"out = (torch.logsumexp({c.at}, -1).sum() + 2 * torch.logsumexp({c.at}, -2).sum()) / n")
    c.p.results.append("out")
    c.p.backward.append(f"ds = (torch.softmax({c.at}, -1) + 2 * torch.softmax({c.at}, -2)) * (g_out / n)")


def _pairs(c: _Chain) -> None:
    c.p.forward += ["sign = 2.0 * (i == j).to(s.dtype) - 1.0", f"out = -F.logsigmoid(sign * {c.at}).sum() / n"]
    c.p.results.append("out")
    c.p.backward.append(f"ds = -sign * torch.sigmoid(-sign * {c.at}) * (g_out / n)")


def _entropy(c: _Chain) -> None:
    """Of each row."""
    s = c.at
    c.p.forward += [f"logp = torch.log_softmax({s}, -1)", "out = -(torch.exp(logp) * logp).sum(-1)"]
    c.p.results.append("out")
    c.p.backward.append("ds = -torch.exp(logp) * (logp + out[..., None]) * g_out[..., None]")
    if c.rng.random() < 0.5:
        c.p.saved.append("out")


LOSSES = (_logarithm, _logarithm, _both_logarithms, _pairs, _entropy)
