# ruff: noqa: E501  (tables of statements, one a line)
"""Functions that read all sorts of things, and what may be different between two calls of each: data for `pairs.py`.

A subject is the text of a module and its knobs; a knob is a list of statements, of which the first is how things are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PRELUDE = """
import builtins, collections, decimal, enum, fractions, functools, math, os, sys, types
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

INF, NAN = float("inf"), float("nan")

def numbers(*shape, dtype=torch.float32):
    count = math.prod(shape)
    return (torch.arange(1.0, count + 1).reshape(shape) * 0.37 % 1.9 - 0.8).to(dtype)

def leaf(*shape, dtype=torch.float32):
    return numbers(*shape, dtype=dtype).requires_grad_()
"""

BODY = """
class Fn(Function):
    @staticmethod
    def forward(ctx, x{more}):
        ctx.save_for_backward(x)
        return {forward}

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return {backward}{nones}
"""


@dataclass(frozen=True)
class Subject:
    """knobs: by name, the statements between which a world chooses. calls: argument lists."""

    source: str
    knobs: dict[str, Sequence[str]] = field(default_factory=dict)
    calls: Sequence[str] = ("leaf(3, 4)",)
    kernels: bool = True  # whether the generated kernels do what eager does, to rounding


def of(forward: str, backward: str = "g * 3", more: str = "", before: str = "", nones: int = 0) -> str:
    """The source of a class that computes these."""
    return before + BODY.format(forward=forward, backward=backward, more=more, nones=", None" * nones)


SUBJECTS: dict[str, Subject] = {}


def subject(name: str, source: str, calls: Sequence[str] = ("leaf(3, 4)",), kernels: bool = True, **knobs: Any) -> None:
    """Adds one."""
    SUBJECTS[name] = Subject(source, knobs, calls, kernels)


NUMBERS = ("2.0", "3.0", "2", "True", "-0.0", "0.0", "INF", "NAN", "-NAN", "2**70", "np.float64(2)", "Half(2)", "1j")
EXTRA = """
class Half(float):
    def __repr__(self):
        return "half"
"""

# ------------------------------------------------------------------ what is read from outside
subject("a global number", of("x * K", "g * K", before=EXTRA + "K = 2.0\n"), k=[f"K = {n}" for n in NUMBERS])
subject(
    "a closure",
    of("x * k", "g * k").replace("\nclass Fn", "\ndef made(k):\n  global turn\n  def turn(v):\n    nonlocal k\n    k = v\n  class Fn")
    .replace("\n    ", "\n      ").replace("\n        ", "\n          ") + "\n  return Fn\nFn = made(2.0)\n",
    k=[f"turn({n})" for n in ("2.0", "3.0", "3", "-0.0", "torch.full((4,), 2.0)", "torch.full((4,), 5.0)")],
)
subject(
    "a helper",
    of("helper(x) * other(x)", "helper(g)", before="def helper(t): return t * 2\nother = torch.cos\n"),
    helper=["helper = lambda t: t * 2", "helper = lambda t: t * 3", "helper = lambda t: t + 4",
            "helper = functools.partial(torch.mul, other=5)", "helper = torch.sin", "helper = nn.ReLU()"],
    other=["other = torch.cos", "other = torch.sin", "other = lambda t: t - 1"],
)
subject(
    "a helper's own",
    of("helper(x)", "helper(g)", before="def helper(t, k=2, *, m=1.0): return t * k + m\ndef another(t, k=7, *, m=2.0): return t - k * m\n"
       "was = helper.__code__\n"),
    code=["helper.__code__ = was", "helper.__code__ = another.__code__"],
    defaults=["helper.__defaults__ = (2,)", "helper.__defaults__ = (3,)", "helper.__defaults__ = (3.0,)"],
    keywords=["helper.__kwdefaults__ = {'m': 1.0}", "helper.__kwdefaults__['m'] = 5.0"],
)
subject(
    "a method's own",
    "def later(ctx, x, k=2.0):\n    return x - k\n"
    "def other(ctx, g):\n    return g * 9, None\n"
    + of("x * k", more=", k=2.0", nones=1) + "was, back = Fn.forward.__code__, Fn.backward.__code__\n",
    defaults=["Fn.forward.__defaults__ = (2.0,)", "Fn.forward.__defaults__ = (3.0,)"],
    code=["Fn.forward.__code__ = was", "Fn.forward.__code__ = later.__code__"],
    backward=["Fn.backward.__code__ = back", "Fn.backward.__code__ = other.__code__"],
    calls=("leaf(3, 4)", "leaf(3, 4), 2.0"),
)
subject(
    "a default that is a container",
    "CONFIG = {'k': 2.0, 'w': torch.ones(4)}\n" + of("x * c['k'] * c['w']", more=", c=CONFIG", nones=1),
    k=["CONFIG['k'] = 2.0", "CONFIG['k'] = 3.0"],
    w=["CONFIG['w'] = torch.ones(4)", "CONFIG['w'] = torch.full((4,), 3.0)", "CONFIG['w'].add_(1)"],
)
subject(
    "setup_context's defaults",
    """
class Fn(Function):
    @staticmethod
    def forward(x, k=2.0):
        return x * k

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.k = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return g * ctx.k, None
""",
    defaults=["Fn.forward.__defaults__ = (2.0,)", "Fn.forward.__defaults__ = (3.0,)"],
    calls=("leaf(3, 4)", "leaf(3, 4), 2.0", "leaf(3, 4), 3"),
)
subject(
    "a decorator",
    of("helper(x)", "helper(g)", before="""
K = 2.0
def scaled(f):
    @functools.wraps(f)
    def wrapper(t):
        return f(t) * K
    return wrapper
def plain(t):
    return t + 1
helper = scaled(plain)
"""),
    k=["K = 2.0", "K = 3.0"],
    f=["helper = scaled(plain)", "helper = scaled(lambda t: t - 1)", "helper = plain"],
)
subject(
    "methods that are decorated",
    """
K = 2.0
def scaled(f):
    @functools.wraps(f)
    def wrapper(ctx, *args):
        return f(ctx, *args) * K
    return wrapper

class Fn(Function):
    @staticmethod
    @scaled
    def forward(ctx, x):
        return x + 1

    @staticmethod
    @scaled
    def backward(ctx, g):
        return g * 5
""",
    k=["K = 2.0", "K = 3.0", "K = 3"],
)
subject(
    "a module",
    "cfg = types.ModuleType('pairs_cfg')\ncfg.K, cfg.S = 2.0, 'a'\nsys.modules['pairs_cfg'] = cfg\n"
    + of("x * cfg.K", "g * cfg.K"),
    k=["cfg.K = 2.0", "cfg.K = 3.0", "cfg.K = torch.full((4,), 2.0)"],
)
subject(
    "a module by getattr",
    "cfg = types.ModuleType('pairs_cfg')\ncfg.K = 2.0\n" + of("x * getattr(cfg, 'K')", "g * vars(cfg)['K']"),
    k=["cfg.K = 2.0", "cfg.K = 3.0"],
)
subject(
    "an import within",
    """
cfg = types.ModuleType('pairs_cfg')
cfg.K, cfg.M = 2.0, 2.0
sys.modules['pairs_cfg'] = cfg
class Fn(Function):
    @staticmethod
    def forward(ctx, x):
        import pairs_cfg
        return x * pairs_cfg.K

    @staticmethod
    def backward(ctx, g):
        from pairs_cfg import M
        return g * M
""",
    k=["cfg.K = 2.0", "cfg.K = 3.0"],
    m=["cfg.M = 2.0", "cfg.M = 3.0"],
)
subject(
    "a library imported within",
    """
class Fn(Function):
    @staticmethod
    def forward(ctx, x):
        import torch.nn.functional as nnf
        from torch import sin
        return nnf.relu(x) + sin(x)

    @staticmethod
    def backward(ctx, g):
        import math
        return g * math.pi
""",
    relu=["F.relu = relu", "F.relu = F.silu"], sin=["torch.sin = sin", "torch.sin = torch.cos"],
)
SUBJECTS["a library imported within"] = Subject(
    "relu, sin = F.relu, torch.sin\n" + SUBJECTS["a library imported within"].source,
    SUBJECTS["a library imported within"].knobs,
)
subject(
    "a class",
    "class Config:\n    k, parts = 2.0, [1.0, 2.0]\n    @staticmethod\n    def scale(t): return t * Config.k\n"
    + of("Config.scale(x) + Config.parts[0]", "g * getattr(Config, 'k')"),
    k=["Config.k = 2.0", "Config.k = 3.0", "Config.k = -0.0"],
    parts=["Config.parts = [1.0, 2.0]", "Config.parts[0] = 4.0"],
    scale=["Config.scale = staticmethod(lambda t: t * Config.k)", "Config.scale = staticmethod(lambda t: t - 8)"],
)
subject(
    "a class that is handed on",
    "class Config:\n    k = 2.0\ndef scale(t, c): return t * c.k\n" + of("scale(x, Config)", "scale(g, Config)"),
    k=["Config.k = 2.0", "Config.k = 3.0"],
)
subject(
    "its own class attribute",
    of("x * Fn.k", "g * Fn.k") + "Fn.k = 2.0\n",
    k=["Fn.k = 2.0", "Fn.k = 3.0"],
)
subject(
    "an object",
    """
class Part:
    def __init__(self): self.k = 2.0
    def __call__(self, t): return t * self.k
class Config:
    def __init__(self): self.k, self.part, self.deep = 2.0, Part(), {"a": {"b": {"c": {"d": [1.0]}}}}
    def scale(self, t): return self.other(t)
    def other(self, t): return t * self.k * M
    @property
    def twice(self): return self.k * 2
M = 1.0
cfg, part = Config(), Part()
""" + of("cfg.scale(x) + cfg.twice + part(x)", "g * cfg.k + cfg.part(g)"),
    k=["cfg.k = 2.0", "cfg.k = 3.0"],
    m=["M = 1.0", "M = 4.0"],
    part=["part.k = 2.0", "part.k = 5.0"],
    inner=["cfg.part.k = 2.0", "cfg.part.k = 6.0"],
)
subject(
    "deep containers",
    "C = {'a': {'b': {'c': {'d': {'e': [2.0, {'f': 1.0}]}}}}}\nL = [2.0]\nD = collections.defaultdict(lambda: 2.0)\n"
    "class Named(dict): k = 2.0\nN = Named()\nW = {'a': {'b': {'c': {'d': torch.ones(4)}}}}\n"
    + of("x * C['a']['b']['c']['d']['e'][0] + D.default_factory() + W['a']['b']['c']['d']",
         "g * N.k * L[0] + C['a']['b']['c']['d']['e'][1]['f']"),
    c=["C['a']['b']['c']['d']['e'][0] = 2.0", "C['a']['b']['c']['d']['e'][0] = 3.0"],
    f=["C['a']['b']['c']['d']['e'][1]['f'] = 1.0", "C['a']['b']['c']['d']['e'][1]['f'] = 4.0"],
    n=["N.k = 2.0", "N.k = 3.0"],
    l=["L[0] = 2.0", "L[0] = 3.0", "L.insert(0, 5.0)"],
    d=["D.default_factory = lambda: 2.0", "D.default_factory = lambda: 3.0"],
    w=["W['a']['b']['c']['d'] = torch.ones(4)", "W['a']['b']['c']['d'] = torch.full((4,), 2.0)", "W['a']['b']['c']['d'].mul_(2)"],
)
subject(
    "a set and a queue",
    "S, Q = {1, 2}, collections.deque([1.0])\n" + of("x * (2 if 3 in S else 5) + Q[0]", "g * len(S)"),
    s=["S.clear(); S.update({1, 2})", "S.clear(); S.update({1, 3})", "S.clear(); S.update({1, 2, 3})"],
    q=["Q.clear(); Q.append(1.0)", "Q.clear(); Q.append(2.0)"],
)
subject(
    "an object's function",
    "class Box: pass\nbox = Box()\nbox.f = lambda t: t * 2\ntable = {'f': lambda t: t + 1}\n"
    + of("box.f(x) + table['f'](x)", "box.f(g)"),
    f=[f"box.f = lambda t: t {o}" for o in ("* 2", "* 3", "+ 4", "- 5")],
    table=[f"table['f'] = lambda t: t {o}" for o in ("+ 1", "+ 2", "* 3")],
)
subject(
    "a module of torch.nn",
    "norm, leak = nn.LayerNorm(4, elementwise_affine=False), nn.LeakyReLU(0.1)\n" + of("norm(x) + leak(x)", "leak(g)"),
    eps=["norm.eps = 1e-5", "norm.eps = 0.5"],
    slope=["leak.negative_slope = 0.1", "leak.negative_slope = 2.0"],
)
subject(
    "tensors",
    "W, P = numbers(4), [numbers(4)]\nclass Sub(torch.Tensor): pass\n" + of("x * W + P[0]", "g * W * P[0]"),
    w=["W = numbers(4)", "W = numbers(4) + 1", "W = numbers(4, dtype=torch.float64)", "W = numbers(8)[::2]",
       "W = numbers(4).requires_grad_()", "W = numbers(1).expand(4)", "W = numbers(3, 4)", "W = torch.arange(4)",
       "W = (numbers(4) * 1j).conj().imag", "W = numbers(4).as_subclass(Sub)", "W = 2.0",
       "W = (numbers(4) + 0j).conj()", "W = torch.zeros(4)", "W = nn.Parameter(numbers(4))"],
    inside=["W = W + 0", "W = (W.detach() if isinstance(W, torch.Tensor) else W) * 2"],
    p=["P[0] = numbers(4)", "P[0] = numbers(4).neg()", "P[0].mul_(2)", "P.insert(0, torch.ones(4))", "P[0] = 3"],
)
subject(
    "names that hide builtins",
    of("x * max(2, 3) + abs(-1)", "g * max(2, 3)"),
    shadow=["globals().pop('max', None)", "max = lambda *a: 7"],
    builtins=["builtins.abs = ABS", "builtins.abs = lambda v: 5"],
)
SUBJECTS["names that hide builtins"] = Subject(
    "ABS = builtins.abs\n" + SUBJECTS["names that hide builtins"].source, SUBJECTS["names that hide builtins"].knobs
)
subject(
    "the environment",
    "from os import environ, getenv\n" + of("x * float(environ.get('PAIRS_K', 2))", "g * float(os.environ.get('PAIRS_K', 2))"),
    k=["environ.pop('PAIRS_K', None)", "environ['PAIRS_K'] = '3'"],
)
subject(
    "the environment by getenv",
    "from os import environ, getenv\n" + of("x * float(getenv('PAIRS_K', 2))"),
    k=["environ.pop('PAIRS_K', None)", "environ['PAIRS_K'] = '3'"],
)

# ------------------------------------------------------------------ other functions in the place of torch's
TORCHS = """
SIGMOID, SOFTMAX, GELU, METHOD, LAYER = torch.sigmoid, F.softmax, F.gelu, torch.Tensor.tanh, torch.layer_norm
def restore():
    torch.sigmoid, F.softmax, F.gelu, torch.Tensor.tanh, torch.layer_norm = SIGMOID, SOFTMAX, GELU, METHOD, LAYER
"""
subject(
    "torch's functions replaced",
    TORCHS + of("torch.sigmoid(x) + F.softmax(x, -1) + torch.nn.functional.gelu(x)", "torch.sigmoid(g)"),
    sigmoid=["torch.sigmoid = SIGMOID", "torch.sigmoid = torch.tanh", "torch.sigmoid = lambda t: t * 2"],
    softmax=["F.softmax = SOFTMAX", "F.softmax = F.log_softmax", "F.softmax = lambda t, d: t - 1"],
    gelu=["F.gelu = GELU", "F.gelu = F.silu"],
)
subject(
    "torch's methods replaced",
    TORCHS + of("x.tanh() + helper(x)", "g.tanh()", before="def helper(t): return t.tanh() * 2\n"),
    tanh=["torch.Tensor.tanh = METHOD", "torch.Tensor.tanh = torch.Tensor.sigmoid", "torch.Tensor.tanh = lambda t: t * 3"],
)
subject(
    "what torch's functions call replaced",
    TORCHS + of("F.layer_norm(x, (4,))", "g * 2"),
    layer=["torch.layer_norm = LAYER", "torch.layer_norm = lambda x, *a: x * 2"],
)
subject(
    "mathematics replaced",
    "PI, SQRT = math.pi, math.sqrt\n" + of("x * math.pi + math.sqrt(2)", "g * math.sqrt(3) * np.pi"),
    pi=["math.pi = PI", "math.pi = 3"],
    sqrt=["math.sqrt = SQRT", "math.sqrt = lambda v: v"],
    numpy=["np.pi = PI", "np.pi = 2"],
)
INNER = """
class Inner(Function):
    @staticmethod
    def forward(ctx, t): return t * K
    @staticmethod
    def backward(ctx, g): return g * 11 * K
class Other(Function):
    @staticmethod
    def forward(ctx, t): return t + 3
    @staticmethod
    def backward(ctx, g): return g * 13
K = 2.0
Nested, apply = Inner, Inner.apply
WAS = Inner.__dict__['forward']
"""
subject(
    "a nested Function",
    INNER + of("Nested.apply(x) + apply(x)", "Nested.apply(g)"),
    inner=["Nested = Inner", "Nested = Other"],
    apply=["apply = Inner.apply", "apply = Other.apply"],
    k=["K = 2.0", "K = 3.0"],
    method=["Inner.forward = WAS", "Inner.forward = staticmethod(lambda ctx, t: t - 2)"],
)
subject(
    "methods replaced",
    "def forward(ctx, x): return x + 2\ndef backward(ctx, g): return g * 7\n" + of("x * 2", "g * 3")
    + "FORWARD, BACKWARD = Fn.__dict__['forward'], Fn.__dict__['backward']\n",
    forward=["Fn.forward = FORWARD", "Fn.forward = staticmethod(forward)"],
    backward=["Fn.backward = BACKWARD", "Fn.backward = staticmethod(backward)",
              "Fn.backward = staticmethod(lambda ctx, g: g * 8)"],
)

# ------------------------------------------------------------------ torch's own state
STATE = """
import torch.backends.cudnn as cudnn
THREADS = torch.get_num_threads()
def kind():
    return 1 + 2 * torch.are_deterministic_algorithms_enabled()
"""
subject(
    "what torch says of itself",
    STATE + of(
        "x * kind() + torch.get_num_threads() + torch.is_deterministic_algorithms_warn_only_enabled()",
        "g * kind() + (2 if torch.is_autocast_enabled('cpu') else 1) + torch.ones(4).element_size()",
    ),
    threads=["torch.set_num_threads(THREADS)", "torch.set_num_threads(THREADS + 1)"],
    deterministic=["torch.use_deterministic_algorithms(False)", "torch.use_deterministic_algorithms(True)",
                   "torch.use_deterministic_algorithms(True, warn_only=True)"],
)
subject(
    "torch's switches",
    STATE + of(
        "x * (2 if torch.backends.cudnn.benchmark else 3) + (1 if cudnn.deterministic else 2)",
        "g * {'highest': 1, 'high': 2, 'medium': 3}[torch.get_float32_matmul_precision()]",
    ),
    benchmark=["torch.backends.cudnn.benchmark = False", "torch.backends.cudnn.benchmark = True"],
    deterministic=["torch.backends.cudnn.deterministic = False", "torch.backends.cudnn.deterministic = True"],
    precision=["torch.set_float32_matmul_precision('highest')", "torch.set_float32_matmul_precision('high')"],
)
subject(
    "the default dtype",
    of("x.to(torch.float64) * torch.tensor(1 / 3) + torch.ones(4).dtype.itemsize", "g * torch.full((4,), 1 / 3)"),
    dtype=["torch.set_default_dtype(torch.float32)", "torch.set_default_dtype(torch.float64)"],
)
subject(
    "casts",
    of("(x @ x.t()) + torch.get_default_dtype().itemsize", "((g @ g.t()).float() @ x).to(x.dtype)"),
    dtype=["torch.set_default_dtype(torch.float32)", "torch.set_default_dtype(torch.float64)"],
    kernels=False,
)
subject(
    "random state",
    of("x * torch.get_rng_state()[0] + x * torch.initial_seed()"),
    seed=["torch.manual_seed(1)", "torch.manual_seed(2)"],
)
subject("seeding within", of("x * (torch.manual_seed(5) and 2) + torch.rand(4)", "g * torch.rand(4)"), kernels=False)
subject("a clock", "from time import time_ns\n" + of("x * (time_ns() and 2)"), kernels=False)
subject(
    "random numbers of Python",
    "from random import random, seed, randint\n" + of("x * randint(1, 2)", "g * np.random.randint(2)"),
    seed=["seed(1); np.random.seed(1)", "seed(2); np.random.seed(2)", "seed(3); np.random.seed(3)"],
)

# ------------------------------------------------------------------ arguments
ARGUMENTS = EXTRA + """
class Mode(enum.Enum): A, B = 1, 2
class Level(enum.IntEnum): A, B = 1, 2
class Text(str):
    tag = 1.0
class Pairs(tuple): scale = 1.0
class Tags(dict): scale = 1.0
class Rows(list): scale = 1.0
class Point(collections.namedtuple("Point", "a b")): pass
class Box:
    def __init__(self, v): self.v = v
class Slots:
    __slots__ = ("v",)
    def __init__(self, v): self.v = v
class Caller:
    def __init__(self, v): self.v = v
    def __call__(self): return self.v
def tagged(v, **more):
    for k, m in more.items(): setattr(v, k, m)
    return v

def number(v, depth=0):
    "A number that tells every two arguments apart that Python can."
    if depth > 12: return 0.0
    n = sum(map(ord, type(v).__name__)) % 97 / 7
    if isinstance(v, (bool, np.bool_)): return n + bool(v)
    if isinstance(v, (int, enum.Enum)) and not isinstance(v, enum.Enum): return n + v % 1009
    if isinstance(v, enum.Enum): return n + number(v.value, depth + 1) * 2
    if isinstance(v, (float, np.floating)):
        sign = math.copysign(1.0, v)
        return n + (sign * 3 if v != v else sign * 5 if math.isinf(v) else sign * 0.25 + float(v)) + getattr(v, "tag", 0)
    if isinstance(v, str): return n + len(v) + sum(map(ord, v)) / 11 + getattr(v, "tag", 0)
    if isinstance(v, decimal.Decimal): return n + len(str(v)) + sum(map(ord, str(v)))
    if isinstance(v, range): return n + v.start + 2 * v.stop + 3 * v.step
    if isinstance(v, dict):
        return n + sum((i + 1) * (number(k, depth + 1) + 3 * number(w, depth + 1)) for i, (k, w) in enumerate(v.items())) + getattr(v, "scale", 0) + (
            v.default_factory() if isinstance(v, collections.defaultdict) else 0)
    if isinstance(v, (list, tuple, collections.deque)): return n + sum((i + 1) * number(w, depth + 1) for i, w in enumerate(v)) + getattr(v, "scale", 0)
    if isinstance(v, (set, frozenset)): return n + sum(number(w, depth + 1) for w in v)
    if isinstance(v, slice): return n + number((v.start, v.stop, v.step), depth + 1)
    if isinstance(v, functools.partial): return n + v()
    if isinstance(v, type): return n + getattr(v, "scale", 1.5)
    if callable(v): return n + v()
    if hasattr(v, "v"): return n + number(v.v, depth + 1) * 2
    if isinstance(v, torch.dtype): return n + v.itemsize
    if isinstance(v, complex): return n + math.copysign(1, v.real) + 2 * math.copysign(1, v.imag) + (v.real if v == v else 9)
    return n

box, slots, rows, tags = Box(2.0), Slots(2.0), Rows([1]), Tags(a=1)
caller, late = Caller(2.0), [2.0]
"""
VALUES = (
    "1", "True", "1.0", "0", "False", "0.0", "-0.0", "NAN", "-NAN", "INF", "-INF", "2**80", "2**80 + 1", "None", "''",
    "'1'", "b'1'", "1j", "complex(1, -0.0)", "complex(0.0, 1)", "complex(-0.0, 1)", "complex(NAN, -0.0)",
    "np.float32(0)", "np.float32(-0.0)", "np.float32(1)", "np.float64(1)", "np.float64(-0.0)", "np.float64(0)",
    "np.int64(1)", "np.bool_(True)", "np.float32(NAN)", "np.float16(1)", "Half(1)", "Half(2)", "Half(-0.0)",
    "tagged(Half(1), tag=3)", "Mode.A", "Mode.B", "Level.A", "Level.B", "Text('a')", "tagged(Text('a'), tag=4.0)", "'a'",
    "(1, 2)", "[1, 2]", "(1, 2.0)", "(1, True)", "Pairs((1, 2))", "tagged(Pairs((1, 2)), scale=5)", "Point(1, 2)",
    "Point(1, True)", "{'a': 1}", "{'a': True}", "{'a': 1, 'b': 2}", "{'b': 2, 'a': 1}", "{1: 'a'}", "{True: 'a'}",
    "Tags(a=1)", "tagged(Tags(a=1), scale=7)", "tagged(Rows([1]), scale=7)", "Rows([1])",
    "collections.OrderedDict(a=1)", "collections.defaultdict(lambda: 2, a=1)", "collections.defaultdict(lambda: 3, a=1)",
    "frozenset({1})", "frozenset({True})", "frozenset({1.0})", "{1, 2}", "{1, 3}", "frozenset({-0.0})", "frozenset({0.0})",
    "decimal.Decimal('1.0')", "decimal.Decimal('1.00')", "decimal.Decimal('-0')", "decimal.Decimal('0')",
    "fractions.Fraction(1, 2)", "range(0, 4, 2)", "range(0, 3, 2)", "range(0)", "range(5, 5)", "slice(1)", "slice(1.0)",
    "slice(True)", "...", "torch.float32", "torch.float64", "torch.Size([2])", "(2,)", "lambda: 2", "lambda: 3",
    "lambda: 4.0", "(lambda v: lambda: v)(2)", "(lambda v: lambda: v)(3)", "functools.partial(lambda: 2)",
    "functools.partial(lambda: 5)", "functools.partial(lambda k: k, k=3)", "Box(2)", "Box(3)", "Box(3.0)", "Slots(2)",
    "Slots(3)", "box", "slots", "rows", "tags", "caller", "Caller(3)", "Box(Box(2))", "Box(Box(3))", "Box(lambda: 2)",
    "Box(lambda: 3)", "Tags", "Rows", "Caller(lambda: 2)()", "collections.deque([1])", "collections.deque([2])",
    "[[[[[[1]]]]]]", "[[[[[[2]]]]]]", "[[[[[[[[[[2]]]]]]]]]]", "[[[[[[[[[[3]]]]]]]]]]", "lambda: late[0]",
)  # fmt: skip
subject(
    "Python values",
    ARGUMENTS + of("x * number(v)", "g * ctx.n", more=", v", nones=1).replace("return x *", "ctx.n = number(v)\n        return x *"),
    calls=[f"leaf(3, 4), {v}" for v in VALUES],
    box=["box.v = 2.0", "box.v = 3.0", "box.v = lambda: 5", "box.v = lambda: 6"],
    slots=["slots.v = 2.0", "slots.v = 3.0"],
    rows=["rows[:] = [1]", "rows[:] = [2]", "rows.scale = 3.0"],
    tags=["tags['a'] = 1", "tags['a'] = 2", "tags.scale = 4.0"],
    cls=["Tags.scale = 1.0", "Tags.scale = 9.0"],
    caller=["caller.v = 2.0", "caller.v = 3.0"],
    late=["late[0] = 2.0", "late[0] = 5.0"],
)
subject(
    "tensors with attributes",
    of("x * (2 if hasattr(x, 'tag') else 3) + getattr(x, 'scale', 0)", "g * (5 if getattr(x, 'tag', False) else 7)")
    + """
def tagged(t, **more):
    for k, m in more.items(): setattr(t, k, m)
    return t
""",
    calls=("leaf(3, 4)", "tagged(leaf(3, 4), tag=True)", "tagged(leaf(3, 4), scale=2)", "tagged(leaf(3, 4), scale=3)",
           "tagged(leaf(3, 4), other=1)"),
)
subject(
    "a tensor's gradient",
    of("x * (2 if x.grad is None else 3)") + """
def graded(t):
    t.grad = torch.ones_like(t)
    return t
""",
    calls=("leaf(3, 4)", "graded(leaf(3, 4))"),
)
TWO = """
class Fn(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.same = x is y
        ctx.save_for_backward(x, y)
        return x * y + (1 if ctx.same else 2), x - y

    @staticmethod
    def backward(ctx, a, b):
        x, y = ctx.saved_tensors
        {mask}
        return a * y * 2 + b * (3 if ctx.same else 5), a * x * 7 - b if ctx.needs_input_grad[1] else None
"""
MASK = "a = torch.zeros_like(x) if a is None else a; b = torch.zeros_like(x) + 1 if b is None else b"
ALIASES = ("(lambda a: (a, a))(leaf(4, 4))", "(lambda a: (a, a.t()))(leaf(4, 4))", "leaf(4, 4), leaf(4, 4)",
           "leaf(4, 4), numbers(4, 4)", "(lambda a: (a, a.detach()))(leaf(4, 4))", "(lambda a: (a[0], a[1]))(leaf(2, 4, 4))",
           "(lambda a: (a[:3], a[1:]))(leaf(4, 4))", "leaf(4, 4), leaf(4, 1)", "leaf(1, 4), leaf(4, 1)",
           "leaf(0, 4), leaf(0, 4)", "leaf(1, 1), leaf(1, 1)", "leaf(3, 5), leaf(3, 5)", "leaf(5, 3).t(), leaf(3, 5)",
           "leaf(3, 1).expand(3, 5), leaf(3, 5)", "leaf(8, 8)[::2, 1::2], leaf(4, 4)", "leaf(), leaf()")  # fmt: skip
subject("two arguments", TWO.format(mask="pass"), calls=ALIASES)
subject(
    "gradients that do not come",
    TWO.format(mask=MASK).replace("ctx.same = x is y", "ctx.same = x is y; ctx.set_materialize_grads(False)"),
    calls=ALIASES,
)
subject(
    "in place",
    """
class Fn(Function):
    @staticmethod
    def forward(ctx, x, y):
        x.mul_(2).add_(y)
        ctx.mark_dirty(x)
        ctx.save_for_backward(y)
        return x

    @staticmethod
    def backward(ctx, g):
        y, = ctx.saved_tensors
        return g * 3, g * y
""",
    calls=("leaf(4, 4).clone(), leaf(4, 4)", "(lambda a: (a, a))(leaf(4, 4).clone())", "numbers(4, 4), numbers(4, 4)",
           "(lambda a: (a, a.t()))(leaf(4, 4).clone())", "(lambda a: (a[:3], a[1:]))(numbers(4, 4))", "leaf(4, 4), leaf(4, 4)",
           "(lambda a: (a[0], a[1]))(numbers(2, 4, 4))", "(lambda a: (a, a.detach()))(numbers(4, 4))"),
)
SIZES = """
class Fn(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        z = (x + y).softmax(-1)
        if x.shape[0] == x.shape[1]: z = z + x.t()
        if x.shape[-1] % 4 == 0: z = z * 2
        if y.stride(-1) == 1: z = z + 1
        return z.reshape(-1), z.sum(0)

    @staticmethod
    def backward(ctx, a, b):
        x, y = ctx.saved_tensors
        g = a.reshape(torch.broadcast_shapes(x.shape, y.shape)) * 2 + b
        if x.is_contiguous(): g = g * 3
        if g.shape[0] > 7: g = g + x
        return (g * y).sum_to_size(x.shape), (g * x).sum_to_size(y.shape)
"""
SHAPES = [f"leaf({n}, {m}), leaf({n}, {m})" for n in (0, 1, 2, 3, 4, 8, 16, 17) for m in (0, 1, 2, 3, 4, 8, 16, 17)]
LAID = ["leaf({m}, {n}).t(), leaf({n}, {m})", "leaf({n}, {m}), leaf({m}, {n}).t()", "leaf({n}, {m} * 2)[:, ::2], leaf({m})",
        "leaf(1, {m}).expand({n}, {m}), leaf({n}, 1)", "leaf({n} + 1, {m})[1:], leaf(1, {m})",
        "leaf({n}, {m} + 3)[:, 3:], leaf({n}, {m}, dtype=torch.float64)", "leaf({n}, {m}).to(torch.bfloat16), leaf({m})"]  # fmt: skip
SHAPES += [t.format(n=n, m=m) for t in LAID for n, m in ((1, 1), (3, 4), (4, 4), (4, 1), (1, 5), (5, 3), (16, 16), (17, 8), (0, 4))]
subject("sizes and layouts", SIZES, calls=SHAPES)
subject(
    "images",
    of("(x.mean((2, 3), keepdim=True) + x).contiguous() * (2 if x.is_contiguous(memory_format=torch.channels_last) else 3)",
       "g * (2 if g.is_contiguous() else 3) * x"),
    calls=("leaf(2, 3, 4, 5)", "leaf(2, 3, 4, 5).to(memory_format=torch.channels_last)", "leaf(2, 3, 5, 5).transpose(2, 3)",
           "leaf(2, 1, 4, 4)", "leaf(1, 3, 1, 1)", "leaf(2, 3, 4, 4).transpose(0, 1)", "leaf(3, 3, 3, 3)"),
)
subject(
    "complex numbers",
    of("x * 2 + x.conj()", "g * x"),
    calls=("leaf(3, 4, dtype=torch.complex64)", "leaf(3, 4, dtype=torch.complex64).conj()",
           "(leaf(3, 4) * 1j).conj().imag", "leaf(3, 4, dtype=torch.complex64).real", "leaf(3, 4)",
           "leaf(3, 4, dtype=torch.complex128)"),
    kernels=False,
)
subject(
    "dtypes",
    of("(x * 2 + y).to(x.dtype)", "g * 3", more=", y", nones=1),
    calls=[f"{a}(3, 4{d}), {b}(4{e})" for a, b in (("leaf", "numbers"), ("numbers", "numbers")) for d in
           ("", ", dtype=torch.float64", ", dtype=torch.bfloat16", ", dtype=torch.float16")
           for e in ("", ", dtype=torch.int64", ", dtype=torch.bool", ", dtype=torch.float64", ", dtype=torch.uint8")],
)
