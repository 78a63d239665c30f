"""Random Functions as people write them: registries, modules, generators, objects on ctx, `.data`, sizes of data.

A class is a chain of fragments, each of which makes the next value of the last one: any of them can be left out.
A fragment is data: what the module has for it, its lines of forward or backward, and where it may stand.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

DTYPES = ("float32", "float32", "float32", "float64", "bfloat16")
SHAPES = ((4, 5), (3, 8), (7,), (2, 3, 4), (1, 6), (5, 1), (16,))
HEAD = """import dataclasses, functools, logging, math, random, types, warnings
from collections import OrderedDict, deque, namedtuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable

LOG = []
"""


@dataclass(frozen=True)
class Fragment:
    """`lines` make `{o}` of `{v}`; `before` is the module's, once. only: where it may stand, "forward" or "backward".

    kept: lines that put something on ctx in the place where it is kept; then the fragment of backward is `used`.
    """

    name: str
    lines: tuple[str, ...]
    before: str = ""
    only: str = "any"
    kept: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    random: bool = False  # draws from the global generator
    linear: bool = True  # in {v}, so that it may stand in a backward


def _f(name: str, *lines: str, before: str = "", only: str = "any", **more: object) -> Fragment:
    return Fragment(name, lines, before, only, **more)  # type: ignore[arg-type]


def _curved(name: str, *lines: str, before: str = "", **more: object) -> Fragment:
    return _f(name, *lines, before=before, only="forward", linear=False, **more)


PLAIN = (
    _f("scale", "{o} = {v} * 0.75"),
    _f("product", "{o} = {v} * a"),
    _f("centre", "{o} = {v} - {v}.mean(-1, keepdim=True)"),
    _f("sum", "{o} = {v} + {v}.sum(-1, keepdim=True)"),
    _f("flip", "{o} = {v}.flip(-1)"),
    _f("cumulate", "{o} = {v}.cumsum(-1) * 0.25"),
    _f("halves", "{o} = torch.cat([{v}[..., :1], {v}[..., 1:] * 2], -1)"),
    _curved("tanh", "{o} = torch.tanh({v})"),
    _curved("softmax", "{o} = torch.softmax({v}, -1)"),
    _curved("gate", "{o} = {v} * torch.sigmoid({v})"),
    _curved("norm", "{o} = {v} / ({v}.pow(2).mean(-1, keepdim=True) + 1.0).sqrt()"),
    _curved("round", "{o} = torch.round({v} * 4) / 4"),
)
"""What no habit stands in."""

BOX = "@dataclasses.dataclass\nclass Box:\n    value: object\n    scale: float = 2.0\n    names: tuple = ()\n"
INNER = (
    "class Inner(Function):\n"
    "    @staticmethod\n    def forward(ctx, x):\n        ctx.n = x.shape[-1]\n        return x * 2\n"
    "    @staticmethod\n    def backward(ctx, g):\n"
    "        return g * ctx.n if ctx.needs_input_grad[0] else None\n"
)
MODULE = (
    "class Learned(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.weight = torch.nn.Parameter(torch.tensor(0.7))\n"
    "        self.register_buffer('shift', torch.tensor(0.1))\n"
    "    def forward(self, x):\n        return x * self.weight.to(x.dtype) + self.shift.to(x.dtype)\n"
    "LEARNED = Learned()\n"
)

HABITS = (
    # registries, caches, counters
    _f(
        "a registry that is filled", "if {v}.dtype not in SCALES:", "    SCALES[{v}.dtype] = 0.75",
        "{o} = {v} * SCALES[{v}.dtype]", before="SCALES = {}\n",
    ),
    _f(
        "a cache of tensors", "key = ({v}.shape[-1], {v}.dtype)", "if key not in RAMPS:",
        "    RAMPS[key] = torch.arange(key[0], dtype=torch.float32).to(key[1]) * 0.1", "{o} = {v} * RAMPS[key]",
        before="RAMPS = {}\n",
    ),
    _f(
        "lru_cache", "{o} = {v} * factor({v}.shape[-1])",
        before="@functools.lru_cache(maxsize=None)\ndef factor(n):\n    return 1.0 / (1 + n)\n",
    ),
    _f("a counter", "COUNT['calls'] = COUNT.get('calls', 0) + 1", "{o} = {v} * 1.5", before="COUNT = {}\n"),
    _f("a counter that is read", "TIMES[0] += 1", "{o} = {v} * TIMES[0]", before="TIMES = [0]\n"),
    _f("a list that grows", "LOG.append(('shape', tuple({v}.shape)))", "{o} = {v} * 0.5"),
    _f("a number in a list", "LOG.append(round(float({v}.float().sum()), 2) + 0.0)", "{o} = {v} + 0.0"),
    _f("a global", "{o} = {v} * SCALE", before="SCALE = 1.25\n"),
    _f("a global counter", "global STEPS", "STEPS = STEPS + 1", "{o} = {v} * 0.5", before="STEPS = 0\n"),
    # modules and callables
    _curved("a module", "{o} = LEARNED({v})", before=MODULE),
    _curved("a module's parameter", "{o} = {v} * LEARNED.weight.to({v}.dtype)", before=MODULE),
    _curved("modules in a list", "for m in LAYERS:", "    {v} = m({v})", "{o} = {v}",
            before="LAYERS = torch.nn.ModuleList([torch.nn.Tanh(), torch.nn.Hardtanh(-0.5, 0.5)])\n"),
    _f("a function in a dict", "{o} = KINDS['double']({v})", before="KINDS = {'double': lambda x: x * 2}\n"),
    _f("a partial", "{o} = HALVE({v})", before="HALVE = functools.partial(torch.mul, other=0.5)\n"),
    _f("a callable object", "{o} = SCALER({v})",
       before="class Scaler:\n    def __init__(self, k):\n        self.k = k\n"
              "    def __call__(self, x):\n        return x * self.k\nSCALER = Scaler(1.5)\n"),
    _f("a method by name", "{o} = getattr({v}, 'neg')()"),
    _f("is it a function", "{o} = {v} * 2 if isinstance(SHIFT, types.FunctionType) else {v}",
       before="def SHIFT(x):\n    return x\n"),
    _curved("a scripted function", "{o} = scripted({v})",
            before="@torch.jit.script\ndef scripted(x: torch.Tensor) -> torch.Tensor:\n    return x * 2 + 1\n"),
    _curved("a nested Function", "{o} = Inner.apply({v})", before=INNER),
    # random numbers
    _f("a generator made here", "rng = torch.Generator().manual_seed(11)",
       "{o} = {v} * torch.rand({v}.shape, generator=rng).to({v}.dtype)"),
    _f("a generator from outside", "{o} = {v} * torch.rand({v}.shape, generator=RNG).to({v}.dtype)",
       before="RNG = torch.Generator().manual_seed(5)\n"),
    _f("a draw", "{o} = {v} * torch.rand_like({v})", random=True),
    _f("dropout", "{o} = F.dropout({v}, 0.5, True) * 1.0", random=True),  # of an empty tensor it is that itself
    _f("a draw under fork_rng", "with torch.random.fork_rng():", "    torch.manual_seed(3)",
       "    {o} = {v} * torch.rand({v}.shape).to({v}.dtype)"),
    _f("Python's random", "{o} = {v} * random.random()"),
    _f("numpy's random", "{o} = {v} * float(np.random.default_rng(4).random())"),
    # data
    _f("a branch on data", "{o} = {v} * 2 if bool(({v} > 0.3).any()) else {v} * 0.5"),
    _f("a branch on a sum", "if {v}.float().sum() > 0.1:", "    {o} = {v} * 2", "else:", "    {o} = {v} * 3"),
    _curved("a number of data", "{o} = {v} / (1.0 + {v}.abs().max().item())"),
    _f("a count of data", "{o} = {v} * int(({v} > 0).sum())", linear=False),
    _curved("a loop on data", "{o} = {v}", "while {o}.abs().max() > 0.5:", "    {o} = {o} / 2"),
    _curved("a masked sum", "{o} = {v} + {v}[{v} > 0].sum()"),
    _curved("nonzero", "{o} = {v} * ({v} > 0).nonzero().shape[0]"),
    _curved("unique", "{o} = {v} * torch.unique(({v} > 0)).numel()"),
    _f("a masked write", "{o} = {v}.clone()", "{o}[a > 0] = 0"),
    _curved("a masked write of its own", "{o} = {v}.clone()", "{o}[{o} > 0] *= 0.5"),
    _f("a check of data", "assert torch.isfinite({v}).all()", "{o} = {v} * 0.5"),
    _f("a check by raise", "if torch.isnan({v}).any():", "    raise ValueError('nan')", "{o} = {v} * 0.5"),
    # outside of torch
    _f("numpy", "{o} = torch.from_numpy({v}.detach().double().numpy() * 2).to({v}.dtype)"),
    _curved("numpy's function",
            "{o} = torch.as_tensor(np.arctan({v}.detach().cpu().double().numpy()), dtype={v}.dtype)"),
    _f("numpy of sizes", "{o} = {v} * float(np.sqrt({v}.shape[-1]))"),
    _f("math of sizes", "{o} = {v} / math.sqrt({v}.numel() + 1)"),
    _f("a list of numbers", "{o} = {v} * torch.tensor([0.5] * {v}.shape[-1], dtype={v}.dtype)"),
    _curved("tolist", "{o} = {v} + sum({v}.flatten().tolist()[:2])"),
    # objects
    _f("a dataclass", "box = Box({v}, 2.0, ('a',))", "{o} = box.value * box.scale", before=BOX),
    _f("replace", "{o} = dataclasses.replace(Box({v}), scale=3.0).value * 1.5", before=BOX),
    _f("a namespace", "ns = types.SimpleNamespace(value={v}, k=2)", "{o} = ns.value * ns.k"),
    _f("a named tuple", "{o} = Pair({v}, 0.5).left * Pair({v}, 0.5).right",
       before="Pair = namedtuple('Pair', 'left right')\n"),
    _f("a deque", "queue = deque([{v}, {v} * 2], maxlen=1)", "{o} = queue.pop()"),
    _f("an ordered dict", "table = OrderedDict(a={v})", "table['b'] = table['a'] * 2", "{o} = table['b']"),
    _f("an attribute of a tensor", "{v}._tag = 2.0", "{o} = {v} * {v}._tag"),
    _f("hasattr", "{o} = {v} * (3.0 if hasattr({v}, '_tag_of_mine') else 0.5)"),
    # memory
    _f(".data written", "{o} = {v}.clone()", "{o}.data[..., :1] = 0"),
    _f(".data copied", "{o} = torch.empty_like({v})", "{o}.data.copy_({v})"),
    _f(".data read", "{o} = {v}.data * 2", linear=False),
    _f("a buffer that is filled", "{o} = torch.zeros_like({v})", "for i in range({v}.shape[-1]):",
       "    {o}[..., i] = {v}[..., i] * (i + 1)"),
    _f("written in place", "{o} = {v} * 1.0", "{o} *= 2", "{o}.add_({v})"),
    _f("an own product in place", "{o} = {v}.clone()", "{o}.mul_(a)"),
    _curved("normalised in place", "{o} = {v}.exp()", "{o} /= {o}.sum(-1, keepdim=True)"),
    _f("out=", "{o} = torch.empty_like({v})", "torch.mul({v}, 2, out={o})"),
    _f("tried as a view", "try:", "    {o} = {v}.view(-1).view({v}.shape) * 2", "except RuntimeError:",
       "    {o} = {v}.contiguous() * 2"),
    _f("contiguous or not", "{o} = {v} * (2 if {v}.is_contiguous() else 2)"),
    _f("detached", "{o} = {v}.detach() * 2", only="forward"),
    # effects and words
    _f("print", "print('value', tuple({v}.shape))", "{o} = {v} * 0.5"),
    _f("print of data", "print('sum', round(float({v}.float().sum()), 2) + 0.0)", "{o} = {v} * 0.5"),
    _f("print that is off", "if VERBOSE:", "    print({v})", "{o} = {v} * 0.5", before="VERBOSE = False\n"),
    _f("logging", "LOGGER.debug('shape %s', {v}.shape)", "{o} = {v} * 0.5",
       before="LOGGER = logging.getLogger('habits')\n"),
    _f("a warning", "warnings.warn('slow path', UserWarning)", "{o} = {v} * 0.5"),
    _f("an import", "import math as m", "{o} = {v} * m.pi"),
    _f("an import of a part", "from torch.nn.functional import pad", "{o} = pad({v}, (1, 0))[..., 1:]"),
    _f("grad mode", "with torch.no_grad():", "    {o} = {v} * 2", only="forward"),
    _f("autocast off", "with torch.autocast('cpu', enabled=False):", "    {o} = {v} * 2"),
    _f("a match", "match {v}.dim():", "    case 1:", "        {o} = {v} * 2", "    case _:", "        {o} = {v} * 3"),
    _f("a generator expression", "{o} = sum({v} * k for k in (0.5, 0.25))"),
    _f("sorted by a key", "{o} = {v} * sorted([3, 1, 2], key=lambda k: -k)[0]"),
    _f("a closure", "def inner(x):", "    return x * a", "{o} = inner({v})"),
    # on ctx
    Fragment("an object on ctx", ("{o} = {v} * 1.0",), BOX, kept=("ctx.box = Box(a * 2, 3.0)",),
             used=("{o} = {v} * ctx.box.value * ctx.box.scale",)),
    Fragment("a namespace on ctx", ("{o} = {v} * 1.0",), kept=("ctx.ns = types.SimpleNamespace(a=a, k=2)",),
             used=("{o} = {v} * ctx.ns.a * ctx.ns.k",)),
    Fragment("a dict on ctx", ("{o} = {v} * 1.0",), kept=("ctx.table = {{'a': a, 'names': ['x']}}",),
             used=("{o} = {v} * ctx.table['a'] * len(ctx.table['names'])",)),
    Fragment("a module on ctx", ("{o} = {v} * 1.0",), MODULE, kept=("ctx.module = LEARNED",),
             used=("{o} = {v} * ctx.module.weight.detach().to({v}.dtype)",)),
    Fragment("a function on ctx", ("{o} = {v} * 1.0",), kept=("ctx.f = lambda t: t * 2",), used=("{o} = ctx.f({v})",)),
    Fragment("a generator on ctx", ("{o} = {v} * 1.0",), kept=("ctx.rng = torch.Generator().manual_seed(2)",),
             used=("{o} = {v} * torch.rand({v}.shape, generator=ctx.rng).to({v}.dtype)",)),
    Fragment("a count on ctx", ("{o} = {v} * 1.0",), kept=("ctx.calls = 0",),
             used=("ctx.calls += 1", "{o} = {v} * ctx.calls")),
    Fragment("a tensor on ctx", ("{o} = {v} * 1.0",), kept=("ctx.a = a",), used=("{o} = {v} * ctx.a",)),
    Fragment("a number of data on ctx", ("{o} = {v} * 1.0",), kept=("ctx.top = float(a.float().abs().max())",),
             used=("{o} = {v} * ctx.top",)),
    # backward alone
    _f("autograd in backward", "with torch.enable_grad():", "    t = a.detach().requires_grad_()",
       "    y = torch.tanh(t) * t", "{o} = torch.autograd.grad(y, t, {v})[0]", only="backward"),
    _f("requires_grad assigned", "with torch.enable_grad():", "    t = a.detach()", "    t.requires_grad = True",
       "    y = torch.sin(t)", "{o} = torch.autograd.grad(y, t, {v})[0]", only="backward"),
    _f("backward in backward", "with torch.enable_grad():", "    t = a.detach().requires_grad_()",
       "    (t * t).backward({v})", "{o} = t.grad", only="backward"),
    _f("needs_input_grad", "{o} = {v} * 2 if ctx.needs_input_grad[1] else {v} * 3", only="backward"),
    _f("a gradient in place", "{o} = {v}.clone()", "{o}[..., 0] = 0", only="backward"),
    _f("clipped", "{o} = {v}.clamp(-0.5, 0.5)", only="backward", linear=False),
    _f("scaled by its norm", "{o} = {v} / ({v}.norm() + 1.0)", only="backward", linear=False),
)  # fmt: skip

EARLY = {
    "": (),
    "no gradient": ("if not ctx.needs_input_grad[0]:", "    return x * 1.0"),
    "nothing": ("if x.numel() == 0:", "    return x * 1.0"),
    "a flag": ("if flag == 'same':", "    return x * 2.0"),
    "data": ("if not bool((x > 0).any()):", "    return x * 2.0"),
}
"""Ways of leaving forward before anything is saved; backward then has zeros to give."""
EARLY_BACK = {
    "": (),
    "not needed": ("if not any(ctx.needs_input_grad):", "    return None, None, None"),
    "no gradient": ("if g is None:", "    return None, None, None"),
    "zero": ("if not g.any():", "    return torch.zeros_like(g), torch.zeros_like(g), None"),
}


@dataclass(frozen=True)
class Form:
    """What forward returns, and how backward begins. {v}: the last value; given: what backward has besides ctx.

    writes: into `x`, which is no leaf then.
    """

    returned: str = "{v}"
    before: tuple[str, ...] = ()  # in forward
    marks: tuple[str, ...] = ()  # where ctx is; `output` is what forward returned
    given: str = "g"
    begins: tuple[str, ...] = ()
    writes: bool = False


FORMS = {
    "": Form(),
    "two": Form("({v}, {v} * 2)", given="g, h", begins=("g = g + h * 2",)),
    "two, one unused": Form(
        "({v}, {v} * 2)", marks=("ctx.set_materialize_grads(False)",), given="g, h",
        begins=("g = h * 2 if g is None else g if h is None else g + h * 2",),
    ),
    "a number beside it": Form("({v}, 3)", given="g, _"),
    "a mask beside it": Form(
        "({v}, {v} > 0)", marks=("ctx.mark_non_differentiable(output[1])",), given="g, _",
    ),
    "whole numbers beside it": Form("({v}, {v}.argmax(-1))", given="g, _"),
    "a list": Form("({v}, [{v} * 2, None])", given="g, _"),
    "written": Form("x", ("x.mul_({v})",), ("ctx.mark_dirty(x)",), begins=("g = g * 2",), writes=True),
    "written, and one more": Form(
        "(x, {v})", ("x.add_(1)",), ("ctx.mark_dirty(x)",), given="g, h", begins=("g = g + h",), writes=True,
    ),
    "x itself": Form("x", ("unused = {v}",)),
    "x and more": Form("(x, {v})", given="g, h", begins=("g = g + h",)),
    "twice the same": Form("({v}, {v})", given="g, h", begins=("g = g + h",)),
    "transposed": Form("{v}.transpose(0, -1)", begins=("g = g.transpose(0, -1)",)),
    "a part": Form("{v}[..., :1]", begins=("g = g.expand(x.shape)",)),
    "a sum": Form("{v}.sum()", begins=("g = g.expand(x.shape)",)),
    "one number": Form("{v}.sum(-1)", begins=("g = g.unsqueeze(-1).expand(x.shape)",)),
}  # fmt: skip
"""Beyond one new tensor."""


@dataclass(frozen=True)
class Habitual:
    """A class: what forward and backward are made of, in order. style: "ctx" or "setup". form: of FORMS."""

    name: str
    style: str
    shape: tuple[int, ...]
    dtype: str
    forward: tuple[Fragment, ...]
    backward: tuple[Fragment, ...]
    early: str = ""
    early_back: str = ""
    once: bool = False
    vmap_rule: bool = False
    form: str = ""

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        return *self.forward, *self.backward

    def draws(self) -> bool:
        return any(f.random for f in self.fragments)


def program(seed: int) -> Habitual:
    """The class of this number."""
    rng = random.Random(f"habits {seed}")
    style = rng.choice(("ctx", "ctx", "setup"))
    forward = _chain(rng, "forward")
    on_ctx = [f for f in forward if f.kept]
    backward = _chain(rng, "backward")
    for fragment in on_ctx:
        backward.insert(rng.randrange(len(backward) + 1), replace(fragment, lines=fragment.used, kept=()))
    return Habitual(
        f"Habitual{seed}", style, rng.choice(SHAPES), rng.choice(DTYPES), tuple(forward), tuple(backward),
        early=rng.choice(list(EARLY)) if style == "ctx" and rng.random() < 0.2 else "",
        early_back=rng.choice(list(EARLY_BACK)) if rng.random() < 0.2 else "",
        once=rng.random() < 0.08, vmap_rule=style == "setup" and rng.random() < 0.4, form=_form(seed, style),
    )  # fmt: skip


def _form(seed: int, style: str) -> str:
    rng = random.Random(f"form {seed}")
    return "" if rng.random() < 0.5 else rng.choice([name for name, f in FORMS.items() if _has_place(f, style)])


def _has_place(form: Form, style: str) -> bool:
    """Only forward itself writes."""
    return style == "ctx" or not form.writes


def _chain(rng: random.Random, where: str) -> list[Fragment]:
    """Some plain steps, and the habits among them."""
    fits = [f for f in HABITS if _may_stand(f, where)]
    plain = [f for f in PLAIN if _may_stand(f, where)]
    habits = rng.sample(fits, rng.choice((1, 1, 1, 2, 3)) if where == "forward" else rng.choice((0, 0, 1, 1, 2)))
    chain = [*habits, *(rng.choice(plain) for _ in range(rng.choice((1, 2, 3))))]
    rng.shuffle(chain)
    return chain


def _may_stand(f: Fragment, where: str) -> bool:
    if where == "forward":
        return f.only in ("any", "forward")
    return f.only in ("any", "backward") and not f.kept and (f.linear or f.only == "backward")


# ------------------------------------------------------------------ as text
def source(p: Habitual) -> str:
    """The text of a module with the class."""
    before = "".join(dict.fromkeys(f.before for f in p.fragments))
    ctx, keeps, form = p.style == "ctx", list(_keeps(p)), FORMS[p.form]
    rule = ["    generate_vmap_rule = True"] if p.vmap_rule else []
    early = [line for line in EARLY[p.early] if "return" not in line]
    leaves = [_returned(form, line) for line in EARLY[p.early] if line not in early]
    body = [*(early and ["ctx.save_for_backward(x, a)", *early, *leaves]), *_steps(p.forward, "x", "v")]
    v = _last(p.forward, "x", "v")
    body += [*(line.format(v=v) for line in form.before), f"output = {form.returned.format(v=v)}"]
    lines = [f"class {p.name}(Function):", *rule, "    @staticmethod"]
    if ctx:
        lines += ["    def forward(ctx, x, a, flag='other'):", *_indented([*body, *keeps, "return output"])]
    else:
        lines += ["    def forward(x, a, flag='other'):", *_indented([*body, "return output"]), "    @staticmethod"]
        lines += ["    def setup_context(ctx, inputs, output):", *_indented(["x, a, flag = inputs", *keeps])]
    back = ["x, a = ctx.saved_tensors", *EARLY_BACK[p.early_back], *form.begins, *_steps(p.backward, "g", "w")]
    end_back = f"return {_last(p.backward, 'g', 'w')}, g * x, None"
    once = ["    @once_differentiable"] if p.once else []
    lines += ["    @staticmethod", *once, f"    def backward(ctx, {form.given}):", *_indented([*back, end_back])]
    return HEAD + before + "\n\n" + "\n".join(lines) + "\n"


def _returned(form: Form, line: str) -> str:
    """A line that leaves forward early, with as many results; what is written is not, then."""
    value = line.strip().removeprefix("return ")
    given = "x" if form.writes else value
    return f"    return {form.returned.format(v=f'({given})')}"


def _keeps(p: Habitual) -> Iterator[str]:
    yield "ctx.save_for_backward(x, a)"
    yield "ctx.alpha, ctx.flag = 0.5, flag"
    if p.early_back == "no gradient":
        yield "ctx.set_materialize_grads(False)"
    yield from FORMS[p.form].marks
    for f in p.forward:
        yield from (line.format() for line in f.kept)


def _steps(fragments: Sequence[Fragment], first: str, stem: str) -> list[str]:
    names = [first, *(f"{stem}{i}" for i in range(len(fragments)))]
    return [
        line.format(v=v, o=o) for f, v, o in zip(fragments, names, names[1:], strict=False) for line in f.lines
    ]


def _last(fragments: Sequence[Fragment], first: str, stem: str) -> str:
    return f"{stem}{len(fragments) - 1}" if fragments else first


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"        {line}" for line in lines]


def simpler(p: Habitual) -> Iterator[Habitual]:
    """Each with one thing less."""
    for i in range(len(p.forward)):
        gone = p.forward[i]
        back = tuple(f for f in p.backward if not gone.kept or f.name != gone.name)
        yield replace(p, forward=(*p.forward[:i], *p.forward[i + 1 :]), backward=back)
    for i, f in enumerate(p.backward):
        if not any(g.kept and g.name == f.name for g in p.forward):
            yield replace(p, backward=(*p.backward[:i], *p.backward[i + 1 :]))
    for change in ({"early": ""}, {"early_back": ""}, {"once": False}, {"vmap_rule": False}, {"dtype": "float32"},
                   {"form": ""}):
        if any(getattr(p, name) != value for name, value in change.items()):
            yield replace(p, **change)  # type: ignore[arg-type]
