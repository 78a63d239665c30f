"""What a method reads of the world around it may change between two calls: each call sees what eager sees.

Each row is an expression in forward, or in backward, and the statement that changes its value between two calls.
"""

from __future__ import annotations

import linecache
import sys
import threading
import types
import warnings
from typing import Any

import pytest
import torch

import fusegrad

AROUND = '''
import abc, collections, contextlib, dataclasses, enum, functools, operator, types, weakref
import torch


class Base:
    of_class = 1.0

    def __init__(self):
        self.k, self.table = 1.0, {"a": 1.0}

    def __getitem__(self, i): return self.k * i
    def __eq__(self, other): return self.k > 2
    def __hash__(self): return 1
    def __bool__(self): return self.k > 2
    def __len__(self): return int(self.k)
    def __contains__(self, value): return value < self.k
    def __format__(self, how): return str(self.k)
    def __iter__(self): return iter([self.k] * 2)
    def __reversed__(self): return iter([self.k * 2])
    def __add__(self, other): return other + self.k
    def __matmul__(self, other): return other * self.k
    def __neg__(self): return -self.k
    def __lt__(self, other): return self.k < other
    def __float__(self): return self.k
    def __index__(self): return int(self.k) % 7
    def __enter__(self): return self.k
    def __exit__(self, *error): return False
    def __call__(self, x): return x * self.k
    def __str__(self): return "x" * int(self.k)

    def __getattr__(self, name):
        if name.startswith("computed"):
            return self.k + 5
        raise AttributeError(name)

    @property
    def twice(self): return self.k * 2
    @classmethod
    def by_class(cls): return cls.of_class
    @staticmethod
    def by_name(): return Base.of_class
    def doubled(self): return self.k * 2


class Sub(Base):
    def of_super(self): return super().twice
    def by_super(self): return super().doubled()


class Abstract(abc.ABC): pass
class Concrete: pass
class Mode(enum.Enum): A, B = 1, 2


@dataclasses.dataclass
class Data:
    held: list = dataclasses.field(default_factory=lambda: [1.0])


@functools.singledispatch
def dispatched(value): return 1.0


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor, self.linear = 1.0, torch.nn.Linear(3, 3)
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x): return self.linear(x) * self.factor * self.offset


def around():
    held = [1.0]
    return lambda: held[0], lambda value: held.__setitem__(0, value)


@contextlib.contextmanager
def managed():
    yield O.k


def of_manager():
    with managed() as k:
        return k


def of_match():
    match O:
        case Base(k=1.0): return 1.0
        case _: return 2.0


def of_try():
    try:
        return TABLE["late"]
    except KeyError:
        return 1.0


def outer(): return inner()
def inner(): return 1.0
def default(k=1.0): return k
def keyword(*, k=1.0): return k
def coded(): return 5.0
def carrying(): pass


O, SUB, DATA, SPACE, TABLE = Base(), Sub(), Data(), types.SimpleNamespace(a=1.0), {}
REFERENCE, PROXY, HOLDER = weakref.ref(O), weakref.proxy(O), types.SimpleNamespace(up=weakref.ref(O))
NESTED, DEEP, SET, TEXT = [1.0, [2.0]], {"a": {"b": 1.0}}, {1}, "abc"
MODE, OF_MODE, PARTIAL = Mode.A, {Mode.A: 1.0, Mode.B: 2.0}, functools.partial(operator.mul, 2.0)
CHAIN, PAIR = collections.ChainMap({"a": 1.0}, {}), collections.namedtuple("Pair", "a b")([1.0], 2)
GET, PUT = around()
carrying.k = 1.0
torch.manual_seed(0)
MODULE, TENSOR, PARAMETER = Module(), torch.ones(3), torch.nn.Parameter(torch.ones(3))
TENSOR.tag = PARAMETER.tag = 1.0
OF_TENSOR = weakref.ref(TENSOR)
'''
UP = "O.k += 1"
ROWS = {
    "an item": ("O[2]", UP),
    "an equality": ("(2.0 if O == 1 else 3.0)", "O.k = 4 - O.k"),
    "a truth": ("(2.0 if O else 3.0)", "O.k = 4 - O.k"),
    "a length": ("len(O)", UP),
    "a membership": ("(2.0 if 1.5 in O else 3.0)", "O.k = 3 - O.k"),
    "a format": ("float(f'{O}')", UP),
    "a sum": ("sum(O)", UP),
    "a star": ("sum([*O])", UP),
    "reversed": ("next(reversed(O))", UP),
    "an addition": ("(O + 1.0)", UP),
    "a product": ("(O @ 1.0)", UP),
    "a negation": ("(-O)", UP),
    "an order": ("(1.0 if O < 2 else 2.0)", "O.k = 4 - O.k"),
    "a float": ("float(O)", UP),
    "an index": ("[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0][O]", UP),
    "a call": ("O(1.0)", UP),
    "a call that is replaced": ("O(1.0)", "Base.__call__ = (lambda v: lambda self, x: v)(O(1.0) + 1)"),
    "a text": ("float(len(str(O)))", UP),
    "a computed attribute": ("O.computed", UP),
    "a property": ("O.twice", UP),
    "a class method": ("O.by_class()", "Base.of_class += 1"),
    "a static method": ("O.by_name()", "Base.of_class += 1"),
    "an attribute of a type": ("type(O).of_class", "Base.of_class += 1"),
    "a property by super": ("SUB.of_super()", "SUB.k += 1"),
    "a method by super": ("SUB.by_super()", "SUB.k += 1"),
    "a method of a base that is put in": ("SUB.by_super()", "Base.doubled = (lambda v: lambda s: v)(O.doubled() + 1)"),
    "an abstract class": ("(1.0 if isinstance(Concrete(), Abstract) else 2.0)", "Abstract.register(Concrete)"),
    "an enumeration": ("OF_MODE[MODE]", "MODE = Mode.B if MODE is Mode.A else Mode.A"),
    "a dataclass": ("DATA.held[0]", "DATA.held[0] += 1"),
    "a namespace": ("SPACE.a", "SPACE.a += 1"),
    "a weak reference": ("REFERENCE().k", UP),
    "a weak reference in an object": ("HOLDER.up().k", UP),
    "a weak reference to a tensor": ("OF_TENSOR()[0]", "TENSOR.add_(1)"),
    "a proxy": ("PROXY.k", UP),
    "a named tuple": ("PAIR.a[0]", "PAIR.a[0] += 1"),
    "a chain of tables": ("CHAIN['a']", "CHAIN.maps[0]['a'] += 1"),
    "a nested list": ("NESTED[1][0]", "NESTED[1][0] += 1"),
    "a nested table": ("DEEP['a']['b']", "DEEP['a']['b'] += 1"),
    "a set": ("float(len(SET))", "SET.add(len(SET) + 1)"),
    "a string by its method": ("float(TEXT.__len__())", "TEXT += 'x'"),
    "a list by its method": ("NESTED[1].__len__()", "NESTED[1].append(1.0)"),
    "a class's name": ("float(len(Concrete.__name__.upper()))", "Concrete.__name__ += 'x'"),
    "a string": ("float(len(TEXT))", "TEXT += 'x'"),
    "a helper's helper": ("outer()", "inner = (lambda v: lambda: v)(inner() + 1)"),
    "a closure": ("GET()", "PUT(GET() + 1)"),
    "a partial": ("PARTIAL(2.0)", "PARTIAL = functools.partial(operator.mul, PARTIAL.args[0] + 1)"),
    "a function by types": ("dispatched(1)", "dispatched.register(int, (lambda v: lambda x: v)(dispatched(1) + 1))"),
    "a module's attribute": ("MODULE(x).sum()", "MODULE.factor += 1"),
    "a module's parameter, in place": ("MODULE(x).sum()", "MODULE.linear.weight.data.add_(1)"),
    "a module's parameter": (
        "MODULE(x).sum()", "MODULE.linear.weight = torch.nn.Parameter(MODULE.linear.weight.data + 1)"
    ),
    "a module's buffer": ("MODULE.offset.sum()", "MODULE.offset = MODULE.offset + 1"),
    "a module's mode": ("(1.0 if MODULE.training else 2.0)", "MODULE.train(not MODULE.training)"),
    "a module's hook": ("MODULE(x).sum()", "MODULE.register_forward_hook(lambda m, i, o: o * 2)"),
    "a tensor": ("TENSOR.sum()", "TENSOR.add_(1)"),
    "a tensor's data": ("TENSOR.sum()", "TENSOR.data = TENSOR.data * 2"),
    "a tensor's attribute": ("TENSOR.tag", "TENSOR.tag += 1"),
    "a parameter's attribute": ("PARAMETER.tag", "PARAMETER.tag += 1"),
    "an attribute a tensor gets": ("getattr(TENSOR, 'late', 1.0)", "TENSOR.late = vars(TENSOR).get('late', 1) + 1"),
    "an attribute that comes and goes": (
        "(1.0 if hasattr(SPACE, 'late') else 2.0)",
        "vars(SPACE).pop('late') if 'late' in vars(SPACE) else vars(SPACE).update(late=1)",
    ),
    "a default of getattr": ("getattr(SPACE, 'q', 1.0)", "SPACE.q = getattr(SPACE, 'q', 1.0) + 1"),
    "vars": ("float(len(vars(SPACE)))", "vars(SPACE)[f'n{len(vars(SPACE))}'] = 1"),
    "globals": ("globals().get('NEW', 1.0)", "NEW = globals().get('NEW', 1.0) + 1"),
    "a docstring": ("float(len(outer.__doc__ or ''))", "outer.__doc__ = (outer.__doc__ or '') + 'x'"),
    "defaults": ("default()", "default.__defaults__ = (default() + 1,)"),
    "keyword defaults": ("keyword()", "keyword.__kwdefaults__['k'] += 1"),
    "code": ("coded()", "coded.__code__ = (lambda v: (lambda: 7.0) if v == 5 else (lambda: 5.0))(coded()).__code__"),
    "an attribute of a function": ("carrying.k", "carrying.k += 1"),
    "a context manager": ("of_manager()", UP),
    "a match": ("of_match()", "O.k = 3 - O.k"),
    "a try": ("of_try()", "TABLE.pop('late') if 'late' in TABLE else TABLE.update(late=5.0)"),
    "any": ("(1.0 if any(o.k > 3 for o in [O]) else 2.0)", "O.k = 5 - O.k"),
    "map": ("sum(map(float, [O]))", UP),
    "a comprehension": ("{k: v for k, v in DEEP['a'].items()}['b']", "DEEP['a']['b'] += 1"),
    "itemgetter": ("operator.itemgetter('b')(DEEP['a'])", "DEEP['a']['b'] += 1"),
    "attrgetter": ("operator.attrgetter('table')(O)['a']", "O.table['a'] += 1"),
    "methodcaller": ("operator.methodcaller('by_class')(O)", "Base.of_class += 1"),
    "reduce": ("functools.reduce(lambda a, b: a + b, NESTED[1])", "NESTED[1].append(1.0)"),
    "the default dtype": (
        "float(torch.tensor(1.0).element_size())",
        "torch.set_default_dtype(torch.float64 if torch.get_default_dtype() == torch.float32 else torch.float32)",
    ),
}  # fmt: skip


def module_with(expression: str, where: str) -> types.ModuleType:
    """A module with a Function that has the expression in forward or in backward."""
    in_forward, in_backward = (expression, "1.0") if where == "forward" else ("1.0", expression)
    text = (
        f"{AROUND}\n\nclass Reads(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        f"        ctx.save_for_backward(x)\n        return x * {in_forward}\n\n"
        "    @staticmethod\n    def backward(ctx, g):\n        (x,) = ctx.saved_tensors\n"
        f"        return g * {in_backward}\n"
    )
    name = f"reads_in_{where}_{abs(hash(expression))}"
    module = sys.modules[name] = types.ModuleType(name)
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    exec(compile(text, name, "exec"), vars(module))
    return module


def told(expression: str, change: str, where: str, compiled: bool) -> tuple[list[Any], Any]:
    """Five calls, the world changed between them."""
    module = module_with(expression, where)
    cls: Any = fusegrad.compile(module.Reads) if compiled else module.Reads
    results = []
    for _ in range(5):
        x = torch.ones(3, requires_grad=True)
        y = cls.apply(x)
        results += [y.detach(), *torch.autograd.grad(y.sum(), x)]
        exec(change, vars(module))
    return results, cls


@pytest.fixture(autouse=True)
def _as_it_was():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", ROWS)
def test_each_call_sees_the_world_as_it_is(name, where) -> None:
    expected, _ = told(*ROWS[name], where, compiled=False)
    torch.set_default_dtype(torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        found, fast = told(*ROWS[name], where, compiled=True)
    assert len({str(t.tolist()) for t in expected}) > 1, "nothing changed"
    for mine, users in zip(found, expected, strict=True):
        assert mine.dtype == users.dtype and torch.equal(mine, users)
    records = fast._fusegrad.ledger.records.values()
    assert not [r.reason for r in records if r.code in ("FG070", "FG071", "FG080", "FG083")]


OF_THREAD = threading.local()


@pytest.mark.parametrize("backend", ["reference"])
def test_what_a_thread_holds_for_itself_counts_in_that_thread(backend: str) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            return x * OF_THREAD.k

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            return g * 2

    fast, found = fusegrad.compile(Scaled, backend=backend, fullgraph=True), {}

    def call(k: float) -> None:
        OF_THREAD.k = k
        found[k] = [fast.apply(torch.ones(3)).tolist() for _ in range(6)]

    for k in (2.0, 3.0):
        thread = threading.Thread(target=call, args=(k,))
        thread.start()
        thread.join()
    call(4.0)
    OF_THREAD.k = 5.0
    assert fast.apply(torch.ones(3)).tolist() == [5.0] * 3
    assert found == {k: [[k] * 3] * 6 for k in (2.0, 3.0, 4.0)}
