"""Random Functions that are valid by construction: a statement is kept where eager runs it on small, ordinary numbers.

A program is data (arguments, statements, what is saved, what is returned): it can be shrunk, and written as a class.
"""

from __future__ import annotations

import ast
import linecache
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from fuzz_operations import DIRTY, FORWARD, LINEAR, NUMBERS, RANDOM

Tensor = torch.Tensor
Statement = tuple[str, str]
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 13, 15, 16, 17, 31, 33)
RARE_LENGTHS = (0, 1, 63, 64, 65, 127, 129)
FLOATS = ("float32", "float32", "float32", "float32", "float64", "bfloat16", "float16")
CONSTANTS = ("0.5", "2", "1.5", "-0.75", "3")
OTHERS = ("1.5", "2", "-0.5", "0.1", "True", "False", "None", "'mean'", "'sum'")
"""Arguments that are no tensors."""
LARGEST, ELEMENTS = 300.0, 6000
TRIES = 60
SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Argument:
    """A tensor argument: its shape as indices of `lengths`, an index of -1 being a one. Or else the text of a value."""

    name: str
    axes: tuple[int, ...]
    dtype: str
    text: str = ""


@dataclass(frozen=True)
class Written:
    """A program. kind: "class", or "function" (its backward is autograd's). style: of a class, "ctx" or "setup"."""

    name: str
    kind: str
    style: str
    lengths: tuple[int, ...]
    arguments: tuple[Argument, ...]
    forward: tuple[Statement, ...]
    outputs: tuple[str, ...]
    saved: tuple[str, ...] = ()
    backward: tuple[Statement, ...] = ()
    gradients: tuple[str, ...] = ()
    inner: bool = False  # backward differentiates forward by autograd
    dirty: str = ""  # the argument that is written to
    fixed: tuple[str, ...] = ()  # outputs that are marked as not differentiable
    materialize: bool = True
    once: bool = False
    vmap_rule: bool = False

    def tensors(self, seed: int) -> list[Any]:
        """What it is called with: numbers for the tensors, the same for the same seed."""
        numbers = torch.Generator().manual_seed(seed)
        return [ast.literal_eval(a.text) if a.text else drawn(self.shape(a), a.dtype, numbers) for a in self.arguments]

    def shape(self, argument: Argument) -> tuple[int, ...]:
        return tuple(1 if i < 0 else self.lengths[i] for i in argument.axes)


def drawn(shape: Sequence[int], dtype: str, numbers: torch.Generator) -> Tensor:
    if dtype in ("int64", "int32"):
        return torch.randint(-4, 9, tuple(shape), generator=numbers).to(getattr(torch, dtype))
    made = torch.randn(tuple(shape), generator=numbers, dtype=torch.float64)
    return made > 0 if dtype == "bool" else made.to(getattr(torch, dtype)).requires_grad_()


# ------------------------------------------------------------------ as a class
HEAD = (
    "import torch\nimport torch.nn.functional as F\nfrom torch.autograd import Function\n"
    "from torch.autograd.function import once_differentiable\n\n\n"
)


def source(p: Written) -> str:
    """The text of a module with the class, or the function."""
    return HEAD + (_function(p) if p.kind == "function" else _class(p))


def _lines(statements: Sequence[Statement], indent: int) -> str:
    return "".join(f"{' ' * indent}{name} = {text}\n" for name, text in statements)


def _names(p: Written) -> str:
    return ", ".join(a.name for a in p.arguments)


def _tuple(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names)


def _unpacked(names: Sequence[str]) -> str:
    return ", ".join(names) + ("," if len(names) == 1 else "")


def _function(p: Written) -> str:
    return f"def {p.name}({_names(p)}):\n{_lines(p.forward, 4)}    return {_tuple(p.outputs)}\n"


def _class(p: Written) -> str:
    ctx = p.style == "ctx"
    rule = "    generate_vmap_rule = True\n\n" if p.vmap_rule else ""
    taken = ("ctx, " if ctx else "") + _names(p)
    head = f"class {p.name}(Function):\n{rule}    @staticmethod\n    def forward({taken}):\n"
    keeps = _keeps(p)
    body = _lines(p.forward, 8)
    if ctx:
        body += f"{keeps}        return {_tuple(p.outputs)}\n"
    else:
        returned = _tuple([f"r{i}" for i in range(len(p.outputs))])
        body += (
            f"        return {_tuple(p.outputs)}\n\n    @staticmethod\n    def setup_context(ctx, inputs, output):\n"
            f"        {_unpacked([a.name for a in p.arguments])} = inputs\n        {returned} = output\n{keeps}"
        )
    once = "    @once_differentiable\n" if p.once else ""
    return f"{head}{body}\n    @staticmethod\n{once}{_backward(p)}"


def _keeps(p: Written) -> str:
    ctx, first = p.style == "ctx", f"ctx.save_for_backward({', '.join(p.saved)})"
    shown = {n: n if ctx or n == p.dirty else f"r{p.outputs.index(n)}" for n in p.outputs if n != "None"}
    fixed = [f"ctx.mark_non_differentiable({', '.join(shown[n] for n in p.fixed)})"] if p.fixed else []
    dirty = [f"ctx.mark_dirty({p.dirty})"] if p.dirty else []
    kept = [f"ctx.c_{a.name} = {a.name}" if a.text else f"ctx.shape_{a.name} = {a.name}.shape" for a in p.arguments]
    lines = [first, *dirty, *fixed, "ctx.k = 1.25", *kept]
    if not p.materialize:
        given = [(i, shown[n]) for i, n in enumerate(p.outputs) if n in shown]
        lines += ["ctx.set_materialize_grads(False)", *(f"ctx.like_{i} = {n}.shape, {n}.dtype" for i, n in given)]
    return "".join(f"        {line}\n" for line in lines)


def _backward(p: Written) -> str:
    gs = ", ".join(f"g{i}" for i in range(len(p.outputs)))
    unpacked = _unpacked([f"s{i}" for i in range(len(p.saved))])
    lines = f"    def backward(ctx, {gs}):\n" + (f"        {unpacked} = ctx.saved_tensors\n" if p.saved else "")
    if not p.materialize:
        given = [i for i, n in enumerate(p.outputs) if n != "None"]
        zeros = "torch.zeros(ctx.like_{0}[0], dtype=ctx.like_{0}[1]) if g{0} is None else g{0}"
        lines += _lines([(f"g{i}", zeros.format(i)) for i in given], 8)
    if p.inner:
        return lines + _again(p)
    return lines + _lines(p.backward, 8) + f"        return {', '.join(p.gradients)}\n"


def _again(p: Written) -> str:
    """Forward once more, with autograd, on what was saved."""
    moving = [n for n in p.gradients if n != "None"]
    marks = [".requires_grad_()" if a.name in moving else "" for a in p.arguments]
    at = iter(range(len(p.arguments)))
    leaves = [
        (a.name, f"ctx.c_{a.name}" if a.text else f"s{next(at)}.detach(){mark}")
        for a, mark in zip(p.arguments, marks, strict=True)
    ]
    found, ends = _unpacked([f"d{n}" for n in moving]), ", ".join(p.outputs)
    given = ", ".join(f"g{i}" for i in range(len(p.outputs)))
    return (
        f"        with torch.enable_grad():\n{_lines(leaves, 12)}{_lines(p.forward, 12)}"
        f"            pairs = [(o, g) for o, g in zip(({ends},), ({given},)) if o.requires_grad]\n"
        f"            ends, weights = zip(*pairs)\n"
        f"            {found} = torch.autograd.grad(ends, [{', '.join(moving)}], weights, allow_unused=True)\n"
        f"        return {', '.join(n if n == 'None' else f'd{n}' for n in p.gradients)}\n"
    )


def load(p: Written, text: str | None = None) -> Any:
    """The class, or the function, of a module whose text `inspect` finds."""
    text = source(p) if text is None else text
    path = f"<{p.name}>"
    linecache.cache[path] = (len(text), None, text.splitlines(True), path)
    module: dict[str, Any] = {"__name__": p.name}
    exec(compile(text, path, "exec"), module)
    return module[p.name]


def forget(p: Written) -> None:
    """Without its text, once it has been run."""
    linecache.cache.pop(f"<{p.name}>", None)


# ------------------------------------------------------------------ drawing one
class Bench:
    """Values by name, and statements that were tried on them."""

    def __init__(self, rng: random.Random, values: Mapping[str, Any], stem: str) -> None:
        self.rng, self.values, self.stem = rng, dict(values), stem
        self.statements: list[Statement] = []

    def add(self, text: str) -> str | None:
        """The name of the statement's value; None where eager refuses it, or the numbers are out of hand."""
        value = self.value(text)
        if not isinstance(value, Tensor) or not ordinary(value):
            return None
        name = f"{self.stem}{len(self.statements)}"
        self.statements.append((name, text))
        self.values[name] = value
        return name

    def value(self, text: str) -> Any:
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return eval(text, {"torch": torch, "F": F}, self.values)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return None

    def pick(self, fits: Callable[[Any], bool]) -> str | None:
        """A name that fits, the latest more often."""
        names = [n for n, v in self.values.items() if fits(v)]
        return self.rng.choice(names + 4 * names[-2:]) if names else None

    def filled(self, template: str, fits: Mapping[str, Callable[[Any], bool]]) -> str | None:
        """The template with every slot chosen; None where nothing fits."""
        chosen: dict[str, str] = {}
        for slot in dict.fromkeys(SLOT.findall(template)):
            found = self.slot(slot, chosen, fits)
            if found is None:
                return None
            chosen[slot] = found
        return SLOT.sub(lambda m: chosen[m.group(1)], template)

    def slot(self, slot: str, chosen: Mapping[str, str], fits: Mapping[str, Callable[[Any], bool]]) -> str | None:
        if slot == "axis":
            first = self.values[next(iter(chosen.values()))] if chosen else None
            dims = first.dim() if isinstance(first, Tensor) else 0
            return str(self.rng.randrange(-dims, dims)) if dims else None
        if slot == "k":
            return self.rng.choice(("True", "False"))
        if slot == "c":
            return self.rng.choice(CONSTANTS)
        return self.pick(fits[slot])


def ordinary(value: Tensor) -> bool:
    if value.numel() > ELEMENTS:
        return False
    if not value.is_floating_point():
        return not value.is_complex() and (value.dtype is torch.bool or not bool((value.abs() > 10**6).any()))
    return bool(torch.isfinite(value).all()) and not bool((value.abs() > LARGEST).any())


def is_float(v: Any) -> bool:
    return isinstance(v, Tensor) and v.is_floating_point()


FITS: dict[str, Callable[[Any], bool]] = {
    "f": is_float,
    "g": is_float,
    "v": lambda v: isinstance(v, Tensor),
    "i": lambda v: isinstance(v, Tensor) and v.dtype in (torch.int64, torch.int32),
    "b": lambda v: isinstance(v, Tensor) and v.dtype is torch.bool,
    "m": lambda v: is_float(v) and v.dim() >= 2,
    "n": lambda v: type(v) in (int, float),
    "t": lambda v: type(v) is bool,
    "o": lambda v: v is None,
    "u": lambda v: type(v) is str,
}


def program(seed: int) -> Written:
    """The program of this number: always the same one with the same torch."""
    rng = random.Random(seed)
    while True:
        found = _drawn(rng, f"Program{seed}")
        if found is not None:
            return found


def _drawn(rng: random.Random, name: str) -> Written | None:
    lengths = tuple(rng.choice(RARE_LENGTHS if rng.random() < 0.08 else LENGTHS) for _ in range(3))
    kind = "function" if rng.random() < 0.2 else "class"
    p = Written(name, kind, rng.choice(("ctx", "setup")), lengths, _arguments(rng), (), ())
    bench = Bench(rng, zip((a.name for a in p.arguments), p.tensors(0), strict=True), "v")
    early, late = ((0.03, 0.03) if kind == "class" else (0.0, 0.0))
    dirty = _write(rng, bench) if rng.random() < early else ""
    _fill(rng, bench, _tables(rng, p))
    dirty = dirty or (_write(rng, bench) if rng.random() < late else "")
    p = replace(p, forward=tuple(bench.statements), outputs=_outputs(rng, bench, dirty), dirty=dirty)
    if not p.outputs:
        return None
    p = _with_backward(rng, _marked(rng, p, bench), bench) if kind == "class" else p
    return live(p) if works(p) else None


def _fill(rng: random.Random, bench: Bench, tables: Sequence[tuple[Sequence[str], float]]) -> None:
    wanted = rng.choice((1, 2, 3, 4, 6, 9, 13))
    for _ in range(TRIES):
        (table,) = rng.choices([t for t, _ in tables], [w for _, w in tables])
        text = bench.filled(rng.choice(table), FITS)
        if text is not None and bench.add(text) is not None and len(bench.statements) >= wanted:
            break


def _tables(rng: random.Random, p: Written) -> list[tuple[Sequence[str], float]]:
    numbers = [(NUMBERS, 8)] if any(a.text for a in p.arguments) else []
    return [*FORWARD, *numbers, *([(RANDOM, 8)] if rng.random() < 0.06 else [])]


def _write(rng: random.Random, bench: Bench) -> str:
    """Writes to an argument; its name, or none where eager refuses."""
    name = rng.choice([n for n, v in bench.values.items() if is_float(v) and not n.startswith(bench.stem)])
    text = rng.choice(DIRTY).format(x=name)
    if bench.value(text) is None or not ordinary(bench.values[name]):
        return ""
    bench.statements.append((name, text))
    return name


def _marked(rng: random.Random, p: Written, bench: Bench) -> Written:
    """With what a class may say on ctx."""
    floats = [n for n in p.outputs[1:] if n != p.dirty and is_float(bench.values.get(n))]
    fixed = tuple(n for n in floats if rng.random() < 0.15)
    return replace(
        p, fixed=fixed, materialize=rng.random() > 0.1, once=rng.random() < 0.05,
        vmap_rule=p.style == "setup" and rng.random() < 0.3,
    )  # fmt: skip


def _arguments(rng: random.Random) -> tuple[Argument, ...]:
    main = tuple(rng.sample((0, 1, 2), rng.choice((0, 1, 1, 2, 2, 2, 3, 3))))
    dtype = rng.choice(FLOATS)
    made = [Argument("x0", main, dtype)]
    for i in range(1, rng.choice((1, 2, 2, 3, 4))):
        axes = main[rng.randrange(len(main) + 1) :] if rng.random() < 0.6 else main
        axes = tuple(-1 if rng.random() < 0.15 else a for a in axes)
        other = rng.choice((dtype, dtype, dtype, dtype, rng.choice(FLOATS), "int64", "bool", "int32"))
        made.append(Argument(f"x{i}", axes, other))
    if rng.random() < 0.25:
        made += [Argument(f"c{i}", (), "", rng.choice(OTHERS)) for i in range(rng.choice((1, 1, 2)))]
    return tuple(made)


def _outputs(rng: random.Random, bench: Bench, dirty: str) -> tuple[str, ...]:
    made = [n for n, _ in bench.statements]
    floats = [n for n in made if is_float(bench.values[n]) and n != dirty]
    if not floats:
        return ()
    others = rng.sample(made, min(len(made), rng.choice((0, 0, 1, 2))))
    nothing = ["None"] if rng.random() < 0.04 else []
    chosen = dict.fromkeys([floats[-1], *([dirty] if dirty else []), *others])
    return (*chosen, *nothing)


# ------------------------------------------------------------------ backward
def _with_backward(rng: random.Random, p: Written, bench: Bench) -> Written:
    differentiable = [a.name for a in p.arguments if is_float(bench.values[a.name])]
    if rng.random() < 0.15 and not p.dirty and "None" not in p.outputs and p.materialize:
        return _inner(p, differentiable)
    at_hand = [a.name for a in p.arguments if not a.text]
    at_hand += [n for n, _ in bench.statements] if p.style == "ctx" else [n for n in p.outputs if n != "None"]
    saved = tuple(dict.fromkeys(rng.sample(at_hand, min(len(at_hand), rng.choice((0, 1, 2, 3))))))
    values = {f"s{i}": bench.values[n].detach() for i, n in enumerate(saved)}
    back = Bench(rng, values, "w")
    carrying = {f"g{i}" for i, n in enumerate(p.outputs) if n not in p.fixed and is_float(bench.values.get(n))}
    numbers = torch.Generator().manual_seed(1)
    back.values |= {g: _like(bench.values[n], numbers) for g, n in _gradients_of(p) if g in carrying}
    back.values |= {f"ctx_{a.name}": bench.values[a.name] for a in p.arguments if a.text}
    _statements(rng, back, carrying)
    shown = {s: f"r{p.outputs.index(n)}" if n in p.outputs else n for s, n in zip(values, saved, strict=True)}
    kept = tuple(shown[s] if p.style == "setup" else n for s, n in zip(values, saved, strict=True))
    returned = tuple(_gradient(rng, a, bench, back, sorted(carrying)) for a in p.arguments)
    named = [("ctx_k", "ctx.k"), *((f"ctx_{a.name}", f"ctx.c_{a.name}") for a in p.arguments if a.text)]
    return replace(p, saved=kept, backward=(*named, *back.statements), gradients=returned)


def _gradients_of(p: Written) -> Iterator[Statement]:
    return ((f"g{i}", n) for i, n in enumerate(p.outputs))


def _like(v: Tensor, numbers: torch.Generator) -> Tensor:
    return torch.randn(v.shape, generator=numbers, dtype=torch.float64).to(v.dtype)


def _statements(rng: random.Random, back: Bench, carrying: set[str]) -> None:
    """Statements that are linear in the gradients."""
    wanted = rng.choice((0, 1, 2, 4, 6, 8))
    back.values["ctx_k"] = 1.25
    saved = [v for n, v in back.values.items() if n.startswith("s")]

    def is_carrying(v: Tensor) -> bool:
        return any(back.values[n] is v for n in carrying)

    def is_saved(v: Tensor) -> bool:
        return any(v is s for s in saved)

    fits = {"g": is_carrying, "h": is_carrying, "s": is_saved, "n": FITS["n"]}
    for _ in range(TRIES if wanted else 0):
        text = back.filled(rng.choice(LINEAR), fits)
        if text is not None and (found := back.add(text)) is not None:
            carrying.add(found)
            if len(back.statements) >= wanted:
                break


def _gradient(rng: random.Random, a: Argument, bench: Bench, back: Bench, carrying: Sequence[str]) -> str:
    """An expression of the argument's shape; None for what has no gradient."""
    x = bench.values[a.name]
    if not is_float(x) or not carrying or rng.random() < 0.05:
        return "None"
    for name in rng.sample(carrying, len(carrying)):
        value = back.values[name]
        if value.shape == x.shape:
            return name
        if _broadcasts(value.shape, x.shape):
            return f"{name}.expand(ctx.shape_{a.name})"
        if _broadcasts(x.shape, value.shape):
            return f"{name}.sum_to_size(ctx.shape_{a.name})"
    return f"{rng.choice(carrying)}.sum().expand(ctx.shape_{a.name})"


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    try:
        return tuple(torch.broadcast_shapes(a, b)) == tuple(b)
    except RuntimeError:
        return False


def _inner(p: Written, differentiable: Sequence[str]) -> Written:
    """A backward that runs forward again and differentiates it by autograd."""
    returned = tuple(a.name if a.name in differentiable else "None" for a in p.arguments)
    return replace(p, saved=tuple(a.name for a in p.arguments if not a.text), gradients=returned, inner=True)


# ------------------------------------------------------------------ is it valid, is it all used
def works(p: Written) -> bool:
    """Whether eager runs it forward and backward, on these numbers and on others."""
    try:
        subject = load(p)
        call = subject if p.kind == "function" else subject.apply
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return all(_runs(call, [_fresh(p, x) for x in p.tensors(seed)]) for seed in (0, 1))
    except Exception:
        return False


def _fresh(p: Written, x: Any) -> Any:
    return x.clone() if p.dirty and isinstance(x, Tensor) else x


def _runs(call: Callable[..., Any], args: Sequence[Any]) -> bool:
    found = call(*args)
    tensors = [o for o in (found if isinstance(found, tuple) else (found,)) if isinstance(o, Tensor)]
    outputs = [o for o in tensors if o.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
    return bool(outputs)


def live(p: Written) -> Written:
    """Without statements that nothing reads."""
    saved = p.saved if p.style == "ctx" else ()
    return replace(p, forward=_read(p.forward, [*p.outputs, *saved]), backward=_read(p.backward, p.gradients))


def _read(statements: Sequence[Statement], ends: Sequence[str]) -> tuple[Statement, ...]:
    kept: list[Statement] = []
    wanted = set(re.findall(r"\w+", " ".join(ends)))
    for name, text in reversed(statements):
        if name in wanted:
            kept.append((name, text))
            wanted |= set(re.findall(r"\w+", text))
    return tuple(reversed(kept))
