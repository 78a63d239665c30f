"""A difference that `check` found, smaller, as a script that shows it without `check`.

The script holds the source of the very functions that ran (`modes.py`), the tensors, and how to get the class.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from ...ir.text.syntax_trees import source_of as text_of
from . import modes
from . import reference_transforms as mathematics
from .compare import Difference
from .modes import DERIVABLE, MODES
from .run_case import Row, run_case, saved_intermediates
from .subject import Case, Subject, Weights
from .variations import lengths, with_sizes

Tensor = torch.Tensor
ATTEMPTS, SECONDS = 24, 5.0
PACKAGE = modes.__name__.partition(".")[0] + "."
LITERAL = 400  # numbers of a tensor that are written out; a larger one is drawn anew


def reproduce(subject: Subject, case: Case, row: Row, first: Difference) -> tuple[Case, Difference, str]:
    """(the smallest case that still differs, its difference, the script)."""
    smaller, difference = shrink(subject, case, first)
    return smaller, difference, script(subject, smaller, row.backend, difference)


# ------------------------------------------------------------------ shrinking
def shrink(subject: Subject, case: Case, difference: Difference) -> tuple[Case, Difference]:
    """Simpler layouts and sizes, as long as a fresh compilation differs too."""
    stop = time.perf_counter() + SECONDS
    attempts = 0
    simpler = True
    while simpler:
        simpler = False
        for candidate in simpler_cases(case):
            attempts += 1
            if attempts > ATTEMPTS or time.perf_counter() > stop:
                return case, difference
            if (smaller := failure_of(subject, candidate)) is not None:
                case, difference, simpler = candidate, smaller, True
                break
    return case, difference


def failure_of(subject: Subject, case: Case) -> Difference | None:
    subject.fast, subject.compiler = subject.compile_again()
    return run_case(subject, case)[1]


def simpler_cases(case: Case) -> Iterator[Case]:
    """The cases that are one step simpler."""
    for n in lengths(case.xs):
        for m in sorted({1, 2, 3, n // 2}):
            if 0 < m < n:
                yield replace(case, xs=tuple(with_sizes(case.xs, {n: m})))
    if case.weights.layout != "contiguous":
        yield replace(case, weights=Weights("contiguous", case.weights.only))
    for i, x in enumerate(case.xs):
        if not x.is_contiguous():
            simple = x.detach().contiguous().requires_grad_(x.requires_grad)
            yield replace(case, xs=tuple(simple if i == j else y for j, y in enumerate(case.xs)))


# ------------------------------------------------------------------ the script
SCRIPT = """# {title}
# torch {torch}; raises AssertionError where the two differ.
from __future__ import annotations

import torch
import torch.utils._pytree
import torch.utils.checkpoint
from torch.autograd import Function, forward_ad
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

import fusegrad

inf, nan = float("inf"), float("nan")
Tensor = torch.Tensor


{subject}


def strided(numbers, shape, strides, dtype, requires_grad=False):
    if 0 in strides and 0 not in shape:
        whole = torch.tensor(numbers, dtype=dtype).view([1 if s == 0 else n for n, s in zip(shape, strides)])
        return whole.expand(shape).requires_grad_(requires_grad)
    memory = torch.empty_strided(shape, strides, dtype=dtype)
    return memory.copy_(torch.tensor(numbers, dtype=dtype).view(shape)).requires_grad_(requires_grad)


{tensors}


def f(apply):
    def call(*xs):
        {clones}result = apply({call})
        return result if isinstance(result, tuple) else tuple(torch.utils._pytree.tree_leaves(result))

    return call


# what ran, word for word out of fusegrad.runtime
{sources}

torch.manual_seed({seed})
with fusegrad.config.patch(debug=True):  # a fault raises: otherwise eager answers
    ours = {mode}({toolkit}, f(fast), xs, gs)
{remade}
torch.manual_seed({seed})
eager = {mode}({other}, f(theirs), xs, gs)
for name in eager:
    print(name, "fusegrad:", ours[name], "eager:", eager[name], sep="\\n  ")
# check said: {difference}
assert ours.keys() == eager.keys()
for name in eager:
    a, b = ours[name], eager[name]
    if isinstance(b, torch.Tensor) and isinstance(a, torch.Tensor):
        facts = [(t.dtype, t.requires_grad, [s for s, n in zip(t.stride(), t.shape) if n > 1]) for t in (a, b)]
        assert facts[0] == facts[1] or {loose}, (name, *facts)
        torch.testing.assert_close(a, b{near})
    else:
        assert a == b or {loose}, (name, a, b)
"""


NESTED = """
from fusegrad.runtime.dispatch.pytree import bound, call_flat


def theirs(*args, **kwargs):  # the user's methods, uncompiled, around flat tensors
    user = fast.__self__._fusegrad.user
    return call_flat(user.cls.apply if user.derives_backward else user.run, bound(subject, args, kwargs))"""


def script(subject: Subject, case: Case, backend: str, difference: Difference) -> str:
    """The text; it runs where the class can be imported, or where its source is all that it needs."""
    # Where eager has no rule, the script has the toolkit of single calls in its place.
    gs = subject.gradients(case.xs, case.weights)
    derived = case.mode in DERIVABLE and _eager_raises(subject, case, gs)
    partial = derived and case.mode == "hessian" and bool(saved_intermediates(subject.compiler))
    toolkit = mathematics.Differences if partial else mathematics.Mathematics if derived else modes.Transforms
    near = ", equal_nan=True" + (", atol=1e-4, rtol=1e-2" if partial else "")
    function = MODES[case.mode]
    roots = list({t.__name__: t for t in (function, modes.Transforms, toolkit)}.values())
    tensors = "\n".join([_list("xs", case.xs), _list("gs", gs)])
    return SCRIPT.format(
        title=f"check({subject.name}): {case.mode}, {case.label}, backend {backend}",
        torch=torch.__version__,
        subject=_subject(subject, backend),
        tensors=tensors,
        remade=tensors,
        clones="xs = [x.clone() for x in xs]\n        " if subject.cloned else "",
        call=_call(subject),
        sources="\n\n\n".join(_sources(roots)),
        seed=subject.seed,
        mode=function.__name__,
        toolkit="Transforms",
        other=toolkit.__name__,
        difference=str(difference).replace("\n", " "),
        loose=case.mode in DERIVABLE or not subject.tolerance.strict,
        near="" if difference.index is None else near,
    )


def _eager_raises(subject: Subject, case: Case, gs: Sequence[Any]) -> bool:
    return subject.run(subject.eager, case.mode, case.xs, gs).error is not None


def _list(name: str, values: Sequence[Any]) -> str:
    first: dict[int, int] = {}
    lines = []
    for i, value in enumerate(values):
        again = first.setdefault(id(value), i)
        lines.append(f"    {_tensor(value)}," if again == i else "    None,")
    doubles = [(i, first[id(v)]) for i, v in enumerate(values) if first[id(v)] != i and v is not None]
    aliases = [f"{name}[{i}] = {name}[{j}]" for i, j in doubles]
    return "\n".join([f"{name} = [", *lines, "]", *aliases])


def _tensor(value: Any) -> str:
    """The call that makes a tensor again; numbers of large ones are drawn."""
    if not isinstance(value, Tensor):
        return repr(value)
    expanded = 0 in value.stride() and value.numel()
    numbers_of = value.detach()
    if expanded:
        numbers_of = numbers_of[tuple(slice(0, 1) if s == 0 else slice(None) for s in value.stride())]
    numbers: Any = numbers_of.reshape(-1).tolist()
    if len(numbers) > LITERAL:
        drawn = f"torch.sin(torch.arange({len(numbers)}, dtype=torch.float64)).tolist()"
        numbers = drawn if value.is_floating_point() else numbers
    return f"strided({numbers}, {tuple(value.shape)}, {value.stride()}, {value.dtype}, {value.requires_grad})"


def _call(subject: Subject) -> str:
    """The user's call, its tensors written as xs[i]."""
    at = iter(range(len(subject.leaves)))
    leaves = [_Text(f"xs[{next(at)}]") if isinstance(a, Tensor) else a for a in subject.leaves]
    args, kwargs = pytree.tree_unflatten(leaves, subject.spec)
    return ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])


class _Text(str):
    """Prints as it is inside the repr of a container."""

    def __repr__(self) -> str:
        return str(self)


def _subject(subject: Subject, backend: str) -> str:
    """The lines that define the class: its module where that can be imported, else its source."""
    user, options = subject.user, {**subject.options, "backend": backend}
    arguments = ", ".join(f"{k}={v!r}" for k, v in options.items())
    name = subject.name if subject.name.isidentifier() else "subject"
    is_class = isinstance(user, type)
    original = "_fusegrad_user_class" if is_class else "__wrapped__"
    lines = [
        source_of(user, name),
        f"subject = getattr({name}, {original!r}, {name})",
        f"fast = fusegrad.compile(subject, {arguments}){'.apply' if is_class else ''}",
    ]
    if options.get("pytree") and is_class:
        return "\n".join([*lines, NESTED])
    return "\n".join([*lines, f"theirs = subject{'.apply' if is_class else ''}"])


def source_of(user: Any, name: str) -> str:
    """An import of the class or function under this name where it can be imported, else its source."""
    module, qualified = user.__module__, user.__qualname__
    if "<locals>" not in qualified and module != "__main__" and module in sys.modules and _importable(module):
        top = qualified.split(".")[0]
        alias = "" if qualified == name else f"\n{name} = {qualified}"
        return f"from {module} import {top}{alias}"
    try:
        text = textwrap.dedent(text_of(user))
    except (OSError, TypeError):
        return f"# define {qualified} of module {module} here: its source cannot be read"
    return f"# {qualified} of module {module}; what it reads from around it is to be added\n{text}"


def _importable(module: str) -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec(module) is not None
    except (ValueError, ImportError):
        return False


CONSTANTS = (
    (modes, "BATCH"), (mathematics, "STEP"), (mathematics, "STEADY"), (mathematics, "WIDER"),
)  # fmt: skip


def _sources(roots: Sequence[Any]) -> list[str]:
    """The source of functions and classes, and of everything of this package that they use."""
    # By name, so that each is there once; Python looks names up when it calls, so that the order is free.
    definitions: dict[str, Any] = {}
    waiting = list(roots)
    while waiting:
        item = waiting.pop()
        if item.__name__ in definitions:
            continue
        definitions[item.__name__] = item
        waiting += [used for name in _names_in(item) if (used := _own_definition(name, item.__module__)) is not None]
    # Constants first, and classes last: their bodies run where they stand.
    constants = [f"{n} = {getattr(m, n)}" for m, n in CONSTANTS]
    functions = [text_of(v).rstrip() for v in definitions.values() if not isinstance(v, type)]
    types = sorted((v for v in definitions.values() if isinstance(v, type)), key=lambda t: len(t.__mro__))
    classes = [text_of(v).rstrip() for v in types]
    return ["\n".join(constants), *functions, *classes]


def _names_in(item: Any) -> set[str]:
    if isinstance(item, type):
        bases = {b.__name__ for b in item.__bases__}
        methods = [v for v in vars(item).values() if inspect.isfunction(v)]
        static = {v.__func__.__name__ for v in vars(item).values() if isinstance(v, staticmethod)}
        return bases.union(static, *(_names_of(inspect.unwrap(m).__code__) for m in methods))
    return _names_of(item.__code__)


def _names_of(code: Any) -> set[str]:
    inner = [c for c in code.co_consts if inspect.iscode(c)]
    return set(code.co_names).union(*map(_names_of, inner))


def _own_definition(name: str, module: str) -> Any:
    space = vars(sys.modules[module]) if module in sys.modules else {}
    definition = space.get(name)
    if not (inspect.isfunction(definition) or isinstance(definition, type)):
        return None
    return definition if definition.__module__.startswith(PACKAGE) else None
