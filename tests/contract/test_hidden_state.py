"""What a method finds around it, changes and reads: as in eager, at every call, and never as it was at a capture.

Each row is a line of forward, or of backward, that makes a number `k` of something outside.
"""

from __future__ import annotations

import datetime
import linecache
import sys
import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import fusegrad

AROUND = """
import array, collections, contextvars, dataclasses, functools, heapq, io, itertools, operator, queue, random
import threading, types, weakref
import numpy as np
import torch

COUNT, CYCLE, STEPS, PAIRS = itertools.count(1), itertools.cycle([1.0, 2.0, 3.0]), iter(range(1000)), zip(range(1000))
NUMBERS = (float(i) for i in range(1000))
WORDS, VARIABLE = io.StringIO("a" * 3), contextvars.ContextVar("variable", default=1.0)
OWN = threading.local()
OWN.k = 1.0
ROW, STACK, LINE = [1.0], [float(i) for i in range(200)], queue.Queue()
for i in range(50):
    LINE.put(float(i))
RING, TALLY, PLAIN = collections.deque([1.0, 2.0, 3.0]), collections.Counter(), {"n": {"a": [0]}}
MEMORY, BYTES, FLAT = np.zeros(1), bytearray(b"0"), array.array("d", [0.0])
VIEW, CHAIN, USERS = memoryview(bytearray(2)), collections.ChainMap({}, {}), collections.UserDict()
TABLE = {}
SHOWN, WEAK = types.MappingProxyType(TABLE), weakref.WeakKeyDictionary()
MEAN, MEANS, RNG = torch.zeros(()), [torch.zeros(())], torch.Generator().manual_seed(1)
ACCUMULATED = []
PUSHED = functools.partial(lambda held: held.append(1) or float(len(held)), ACCUMULATED)


def by_default(held=[0]):
    held[0] += 1
    return float(held[0])


def by_iterator(held=itertools.count(1)):
    return float(next(held))


def named():
    named.n += 1
    return float(named.n)


named.n = 0


def around():
    n, steps = 0, itertools.count(1)

    def counts():
        nonlocal n
        n += 1
        return float(n)

    return counts, lambda: float(next(steps))


COUNTS, ITERATES = around()


@functools.cache
def window(n):
    return torch.hann_window(n)[1]


@functools.lru_cache(maxsize=2)
def few(n):
    return {"scale": [torch.hann_window(n)[1]]}


@functools.cache
def number(n):
    return n * 2.0


class Descriptor:
    def __get__(self, owner, cls):
        owner.n += 1
        return float(owner.n)


class Holder:
    n, of_class, seen = 0, itertools.count(1), Descriptor()

    @staticmethod
    @functools.cache
    def table(n, **facts):
        return torch.as_tensor(np.hanning(n)[1], **facts)

    @functools.cache
    def kept(self, x):
        return torch.ones_like(x).sum()

    def __init__(self):
        self.n, self.steps, self.rng, self.inner = 0, itertools.count(1), random.Random(0), [[0]]
        self.numbers, self.memory = torch.Generator().manual_seed(1), np.zeros(1)

    def __call__(self):
        self.n += 1
        return float(self.n)

    def __getattr__(self, name):
        self.n += 1
        return float(self.n)


class Missing(dict):
    def __missing__(self, key):
        self["n"] = self.get("n", 0) + 1
        return float(self["n"])


class Module(torch.nn.Module):
    steps = 0

    def forward(self, x):
        self.steps += 1
        return x * self.steps


class Slotted:
    __slots__ = ("n",)

    def up(self):
        self.n = getattr(self, "n", 0) + 1
        return float(self.n)


class Counted:
    n = 0

    def __get__(self, owner, cls):
        Counted.n += 1
        return float(Counted.n)


class Meta(type):
    n = 0

    @property
    def up(cls):
        Meta.n += 1
        return float(Meta.n)


class OfClass(metaclass=Meta):
    seen = Counted()


HOLDER, MISSING, MODULE, SLOTTED = Holder(), Missing(), Module(), Slotted()
"""
LINES = {
    "an iterator": "k = float(next(COUNT))",
    "a cycle": "k = next(CYCLE)",
    "an iterator of a range": "k = float(next(STEPS))",
    "zip": "k = float(next(PAIRS)[0])",
    "a generator": "k = next(NUMBERS)",
    "a loop over a generator": "k = 0.0\nfor k in NUMBERS:\n    break",
    "a file": "k = float(len(WORDS.read(1)))",
    "a context variable": "VARIABLE.set(VARIABLE.get() + 1)\nk = VARIABLE.get()",
    "a thread's own": "OWN.k += 1\nk = OWN.k",
    "a thread's own, by setattr": "setattr(OWN, 'k', OWN.k + 1)\nk = OWN.k",
    "a queue": "k = LINE.get()",
    "a stack": "k = STACK.pop()",
    "a slice of a list": "ROW[:] = [ROW[0] + 1]\nk = ROW[0]",
    "operator": "operator.iadd(ROW, [1.0])\nk = float(len(ROW))",
    "a heap": "heapq.heappush(ROW, 1.0)\nk = float(len(ROW))",
    "a method by a name": "push = ROW.append\npush(1.0)\nk = float(len(ROW))",
    "a deque": "RING.rotate(1)\nk = RING[0]",
    "a counter": "TALLY.update(['a'])\nk = float(TALLY['a'])",
    "parts of parts": "PLAIN['n']['a'][len('')] += 1\nk = float(PLAIN['n']['a'][0])",
    "an array, by a method": "MEMORY.fill(MEMORY[0] + 1)\nk = float(MEMORY[0])",
    "an array, by out=": "np.add(MEMORY, 1, out=MEMORY)\nk = float(MEMORY[0])",
    "bytes": "BYTES.append(1)\nk = float(len(BYTES))",
    "an array.array": "FLAT[0] += 1\nk = FLAT[0]",
    "a memoryview": "VIEW[0] = (VIEW[0] + 1) % 256\nk = float(VIEW[0])",
    "a ChainMap": "CHAIN['a'] = CHAIN.get('a', 0) + 1.0\nk = CHAIN['a']",
    "a UserDict": "USERS['a'] = USERS.get('a', 0) + 1.0\nk = USERS['a']",
    "a proxy": "TABLE['a'] = TABLE.get('a', 0) + 1\nk = float(SHOWN['a'])",
    "a weak table": "WEAK[HOLDER] = WEAK.get(HOLDER, 0.0) + 1\nk = WEAK[HOLDER]",
    "a default": "k = by_default()",
    "a default that is an iterator": "k = by_iterator()",
    "an attribute of a function": "k = named()",
    "what a function was made around": "k = COUNTS()",
    "an iterator that it was made around": "k = ITERATES()",
    "a partial": "k = PUSHED()",
    "an attribute": "HOLDER.n += 1\nk = float(HOLDER.n)",
    "an attribute's iterator": "k = float(next(HOLDER.steps))",
    "a class's iterator": "k = float(next(Holder.of_class))",
    "an attribute's generator": "k = HOLDER.rng.random()",
    "an attribute's torch.Generator": "HOLDER.numbers.manual_seed(3)\nk = torch.rand((), generator=HOLDER.numbers)",
    "an attribute's array": "HOLDER.memory[[0]] += 1\nk = float(HOLDER.memory[0])",
    "a class's attribute": "Holder.n += 1\nk = float(Holder.n)",
    "a class's attribute, by type": "type.__setattr__(Holder, 'n', Holder.n + 1)\nk = float(Holder.n)",
    "an object that is called": "k = HOLDER()",
    "a descriptor": "k = HOLDER.seen",
    "a descriptor that counts on its class": "k = OfClass().seen",
    "a property of a metaclass": "k = OfClass.up",
    "an attribute that is computed": "k = HOLDER.anything",
    "a missing key": "k = MISSING[1.0]",
    "vars": "vars(HOLDER)['n'] = HOLDER.n + 1\nk = float(HOLDER.n)",
    "globals": "globals()['FRESH'] = globals().get('FRESH', 0) + 1\nk = float(FRESH)",
    "exec": "exec('RING.rotate(1)')\nk = RING[0]",
    "a module": "k = MODULE(torch.ones(()))",
    "slots": "k = SLOTTED.up()",
    "a generator that is seeded": "RNG.manual_seed(4)\nk = torch.rand((), generator=RNG)",
    "a tensor": "MEAN.mul_(0.9).add_(0.1)\nk = MEAN.clone()",
    "a tensor in a list": "MEANS[0] = MEANS[0] + 1\nk = MEANS[0]",
    "a cache": "k = window(4)",
    "a cache of few": "few(5)\nfew(6)\nk = few(4)['scale'][0]",
    "a cache of numbers": "k = number(4)",
    "a cache in a class": "k = Holder.table(4, dtype=torch.float32)",
    "a cache of a method": "k = HOLDER.kept(torch.ones(3))",
    "a try": "try:\n    k = TABLE['late']\nexcept KeyError:\n    TABLE['late'] = 3.0\n    k = 1.0",
}


def class_with(lines: str, where: str) -> Any:
    """A Function of a module of its own, with the lines in forward or in backward."""
    body = "".join(f"        {line}\n" for line in lines.split("\n"))
    none = "        k = 1.0\n"
    text = (
        f"{AROUND}\n\nclass Finds(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        f"        y = x.sin()\n{body if where == 'forward' else none}        return y * k\n\n"
        f"    @staticmethod\n    def backward(ctx, g):\n        w = g * 2\n{body if where == 'backward' else none}"
        "        return w * k\n"
    )
    name = f"finds_in_{where}_{abs(hash(lines))}"
    module = sys.modules[name] = types.ModuleType(name)
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    exec(compile(text, name, "exec"), vars(module))
    return vars(module)["Finds"]


def told(cls: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    results = []
    for call in range(6):
        x = torch.linspace(-1, 1, 5 if call == 3 else 4).requires_grad_()
        y = cls.apply(x)
        results += [y.detach(), *torch.autograd.grad(y.sum(), x)]
    return [*results, torch.rand(())]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", LINES)
def test_what_is_outside_is_as_it_is_at_the_call(name, where) -> None:
    """Six calls, as many steps of whatever it is; and no mistake of ours that eager's answer stands in for."""
    expected = told(class_with(LINES[name], where))
    fast = fusegrad.compile(class_with(LINES[name], where), backend="reference")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        found = told(fast)
    np.testing.assert_allclose([t.sum() for t in found], [t.sum() for t in expected], rtol=1e-5, atol=1e-6)
    assert not [r.reason for r in fast._fusegrad.ledger.records.values() if r.code == "FG071"]


@pytest.mark.parametrize("name", ["window", "few", "number"])
@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_a_cache_holds_what_eager_puts_there(name, backend) -> None:
    """And what it held before the first call, the same objects."""
    finds = class_with(f"k = {name}(4)" + ("['scale'][0]" if name == "few" else ""), "forward")
    cached = vars(sys.modules[finds.__module__])[name]
    earlier = cached(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        fast = fusegrad.compile(finds, backend=backend)
        for _ in range(3):
            fast.apply(torch.ones(4, requires_grad=True)).sum().backward()
    leaves = torch.utils._pytree.tree_leaves(cached(4))
    assert [type(leaf) for leaf in leaves] == [float if name == "number" else torch.Tensor]
    assert cached(7) is earlier or name == "few"


def test_a_cache_of_numbers_is_no_reason_to_run_as_written() -> None:
    fast = fusegrad.compile(class_with(LINES["a cache of numbers"], "forward"), backend="reference")
    told(fast)
    assert [str(r.status) for m, r in fast._fusegrad.ledger.records.items() if m == "forward"] == ["compiled"]


def today() -> int:
    return datetime.date.today().year


@pytest.mark.parametrize("ask", [datetime.datetime.now, datetime.date.today, today], ids=("now", "today", "of a date"))
def test_the_clock_is_asked_at_every_call_by_way_of_a_class_too(ask) -> None:
    """The day of a capture would be the day of all calls."""

    class Dated(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            day = ask()
            return x * (day if isinstance(day, int) else day.year)

        @staticmethod
        def backward(ctx, g):
            return g

    with pytest.raises(fusegrad.NotTraceableError, match="it uses the module `datetime`"):
        fusegrad.compile(Dated, fullgraph=True).apply(torch.ones(3, requires_grad=True))
