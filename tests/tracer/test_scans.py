"""A scan of what a method can reach: it calls nothing, raises nothing, ends, and stays out of other packages."""

from __future__ import annotations

import enum
import functools
import sys
import types
from typing import Any

import pytest
import torch

from fusegrad.runtime.capture.guards import unkeyed_state
from fusegrad.tracer.reads import reads as scans
from fusegrad.tracer.reads import value_keys
from fusegrad.tracer.reads.attributes import ABSENT, attribute
from fusegrad.tracer.reads.reads import scan
from fusegrad.tracer.reads.value_keys import freeze, why_unfit


class Raises:
    """Whatever is asked of it is an error, and no AttributeError."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("there is no driver")

    def __call__(self, x):
        return x

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    def __hash__(self) -> int:
        raise RuntimeError("not to be hashed")

    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")

    def __repr__(self) -> str:
        raise RuntimeError("not to be shown")


class Lies:
    """Says to be a tensor."""

    @property
    def __class__(self):  # type: ignore[override]
        return torch.Tensor


class LiesBadly:
    @property
    def __class__(self):  # type: ignore[override]
        raise RuntimeError("of no class")


class Asked:
    """Counts what is asked of it."""

    count = 0

    @property
    def k(self) -> float:
        Asked.count += 1
        return 2.0

    def __getattr__(self, name: str) -> float:
        Asked.count += 1
        return 3.0


class Slotted:
    __slots__ = ("__hidden", "empty", "k")

    def __init__(self) -> None:
        self.k, self.__hidden = 1.0, 2.0


class Colour(enum.Enum):
    RED = 1


def lazy_module() -> types.ModuleType:
    module = types.ModuleType("lazy_module")

    def load(name: str) -> Any:
        raise OSError("the library is not there")

    module.__getattr__ = load  # type: ignore[method-assign]
    return module


lazy = lazy_module()
OBJECTS = {
    "raises": Raises(),
    "lies": Lies(),
    "lies badly": LiesBadly(),
    "function type": types.FunctionType,
    "code type": types.CodeType,
    "a getset": types.FunctionType.__dict__["__code__"],
    "lazy module": lazy,
    "empty slot": Slotted(),
    "a class with a metaclass": Colour,
    "a member": Colour.RED,
    "a cached function": functools.lru_cache(lambda x: x),
    "in a list": [Raises(), Lies()],
    "as a key": {Colour.RED: Raises()},
}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_scan_raises_nothing_whatever_it_finds(name) -> None:
    found = OBJECTS[name]

    def body(x):
        return found(x) if found.ready else found

    reads = scan(body)
    assert hash(reads.facts()) is not None and reads.facts() is not None
    hash(freeze(found))
    assert why_unfit(found) is None or isinstance(why_unfit(found), str)


def test_a_scan_runs_no_property_and_no_getattr() -> None:
    asked = Asked()

    def body(x):
        return x * asked.k * asked.anything

    before = Asked.count
    reads = scan(body)
    reads.facts()
    freeze(asked)
    assert Asked.count == before and not reads.certain_effects()


def test_what_a_property_reads_counts() -> None:
    class Scaled:
        def __init__(self) -> None:
            self.own = 1.0

        @property
        def k(self) -> float:
            return self.own * FACTOR[0]

    scaled = Scaled()
    reads = scan(lambda x: x * scaled.k)
    before = reads.facts()
    scaled.own = 2.0
    assert reads.facts() != before
    before = reads.facts()
    FACTOR[0] = 7.0
    assert reads.facts() != before


FACTOR = [2.0]


def test_attributes_are_those_that_python_finds() -> None:
    class Base:
        k = 1

        def method(self) -> None: ...

        @staticmethod
        def alone() -> None: ...

        @classmethod
        def of_class(cls) -> None: ...

    class Child(Base):
        own = 2

    child = Child()
    child.k = 5
    for owner, names in (
        (child, ("k", "own", "alone")), (Child, ("k", "own", "alone", "method", "__name__", "__mro__")),
        (Slotted(), ("k",)), (torch, ("float32", "nn", "relu")), (torch.nn.Linear(2, 2), ("weight", "training")),
        (torch.backends.cudnn, ("enabled",)), (Colour, ("RED",)), (Colour.RED, ("value", "name")),
    ):  # fmt: skip
        for name in names:
            assert attribute(owner, name) is getattr(owner, name) or attribute(owner, name) == getattr(owner, name)
    assert attribute(child, "method") == child.method and attribute(Child, "of_class") == Child.of_class
    assert attribute(child, "missing") is ABSENT and attribute(Slotted(), "empty") is ABSENT


def chain(count: int) -> types.ModuleType:
    """Functions of which each names the next."""
    lines = (f"def step{i}(x):\n    return step{i + 1}(x) if x.dim() > {i} else x * K\n" for i in range(count))
    module = types.ModuleType("chain")
    exec("K = 2.0\n" + "".join(lines) + f"def step{count}(x):\n    return x\n", module.__dict__)
    return module


def test_functions_are_followed_to_any_depth() -> None:
    module = chain(300)
    reads = scan(module.step0)
    assert not reads.effects
    before = reads.facts()
    module.step300.__code__ = module.step299.__code__
    assert reads.facts() != before


def test_a_scan_ends_with_a_reason(monkeypatch) -> None:
    monkeypatch.setattr(scans, "FUNCTIONS", 20)
    reads = scan(chain(50).step0)
    assert [e.reason for e in reads.certain_effects()] == ["it can reach more than 20 functions"]


def test_a_large_object_is_read_by_the_attributes_that_are_asked_for() -> None:
    class Case:
        def __init__(self) -> None:
            self.everything = list(range(100_000))
            self.k = 2.0

        def scale(self, x):
            return x * self.k

    case = Case()
    reads = scan(lambda x: case.scale(x))
    assert not reads.effects
    before = reads.facts()
    case.k = 3.0
    assert reads.facts() != before
    before = reads.facts()
    case.everything.clear()
    assert reads.facts() == before


def test_a_large_object_as_an_argument_has_a_picture_that_ends() -> None:
    class Node:
        def __init__(self) -> None:
            self.parts = {}

    root = Node()
    for i in range(100):
        root.parts[i] = Node()
        root.parts[i].parts = {j: Node() for j in range(100)}
    assert freeze(root) != freeze(root) and "2000" in str(why_unfit(root))


# ------------------------------------------------------------------ other packages
@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package as pip installs one: `inner` reads a setting, `outer` calls it."""
    folder = tmp_path / "site-packages" / "some_installed"
    folder.mkdir(parents=True)
    text = "SETTING = 2.0\ndef inner(x):\n    return x * SETTING\ndef outer(x):\n    return inner(x)\n"
    (folder / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder.parent))
    module = __import__("some_installed")
    yield module
    del sys.modules["some_installed"]


def test_other_packages_are_not_looked_into(installed) -> None:
    outer = installed.outer
    reads = scan(lambda x: outer(x) + installed.inner(x))
    assert not any("SETTING" in path for path in reads.entries) and not reads.effects


def test_a_function_of_another_package_that_is_replaced_is_noticed(installed) -> None:
    reads = scan(lambda x: installed.outer(x))
    before = reads.facts()
    installed.outer = lambda x: x
    assert reads.facts() != before


def test_the_package_of_the_method_itself_is_looked_into(installed) -> None:
    reads = scan(installed.outer)
    before = reads.facts()
    installed.SETTING = 3.0
    assert reads.facts() != before


def test_what_another_package_wraps_is_looked_into(installed) -> None:
    exec("def wrap(f):\n    def inner(*a):\n        return f(*a)\n    return inner", vars(installed))
    code = installed.wrap.__code__.replace(co_filename=installed.__file__)
    inner = next(c for c in code.co_consts if isinstance(c, types.CodeType))
    outer = code.replace(co_consts=tuple(inner.replace(co_filename=installed.__file__) if c is inner else c
                                         for c in code.co_consts))  # fmt: skip
    installed.wrap.__code__ = outer

    @installed.wrap
    def body(x):
        return x * FACTOR[0]

    reads = scan(body)
    before = reads.facts()
    FACTOR[0] = 11.0
    assert reads.facts() != before


def test_a_device_that_nobody_used_is_not_asked_which_one_is_current() -> None:
    reads = scan(lambda x: x * torch.cuda.current_device() if x.is_cuda else x)
    assert reads.facts() == reads.facts() and not reads.effects


def test_a_picture_of_code_that_reads_a_whole_package_ends(monkeypatch) -> None:
    monkeypatch.setattr(value_keys, "FACTS", 50)
    module = chain(60)
    own = types.SimpleNamespace(step=module.step0)
    assert freeze(own) == freeze(own) and unkeyed_state([own]) is None
    own.others = [module.step1, module.step2]
    assert freeze(own) != freeze(own) and "more than can be compared" in str(unkeyed_state([own]))


def test_methods_that_call_each_other_read_one_object() -> None:
    class Steps:
        k = 2.0

    for i in range(60):
        exec(f"def step{i}(self, x):\n    return self.step{i + 1}(x) + self.k", namespace := {})
        setattr(Steps, f"step{i}", namespace[f"step{i}"])
    Steps.step60 = lambda self, x: x
    steps = Steps()
    reads = scan(lambda x: steps.step0(x))
    assert max(path.count("__self__") for path in reads.entries) == 1 and not reads.effects
    before = reads.facts()
    steps.k = 3.0
    assert reads.facts() != before
