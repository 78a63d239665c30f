"""A fault made smaller, step by step while the same kind of difference stays, and written as a script of its own."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import fuzz_laws
from fuzz_programs import Statement, Written, live, source, works
from fuzz_trials import Fault, Recipe, confirmed, eps_of, judged, subject_of

from fusegrad.runtime.check import reproducer

Step = tuple[Written, Recipe]
SECONDS = 60.0
SMALL = (2, 3, 5)
NAME = re.compile(r"[A-Za-z_]\w*")
CONTIGUOUS = "contiguous"


def shrunk(fault: Fault, seconds: float = SECONDS) -> Fault:
    """The smallest fault of this kind that single steps lead to."""
    stop = time.monotonic() + seconds
    simpler: Fault | None = fault
    while simpler is not None:
        fault = simpler
        simpler = next(filter(None, _tried(fault, stop)), None)
    return fault


def _tried(fault: Fault, stop: float) -> Iterator[Fault | None]:
    for p, recipe in candidates(fault.program, fault.recipe):
        if time.monotonic() > stop:
            return
        found = again(live(p), recipe, fault.backend)
        yield found if found is not None and found.kind == fault.kind else None


def again(p: Written, recipe: Recipe, backend: str) -> Fault | None:
    """The fault of a program in a case, compiled afresh; None where there is none, or eager cannot run it."""
    if not works(p):
        return None
    try:
        subject, xs = subject_of(p, backend, 0)
        case = recipe.case(xs)
    except Exception:
        return None
    difference = judged(p, subject, case)[1]
    if difference is None or not confirmed(p, subject, recipe, difference):
        return None
    return Fault(p, backend, recipe, case, difference)


# ------------------------------------------------------------------ one step simpler
def candidates(p: Written, recipe: Recipe) -> Iterator[Step]:
    """Large steps first."""
    yield from ((q, recipe) for q in without_statements(p))
    yield from ((q, replace(recipe, only=None)) for q in without_outputs(p))
    yield from ((p, r) for r in simpler_cases(recipe))
    yield from without_arguments(p, recipe)
    for programs in (without_saved, without_gradients, without_marks, simpler_dtypes, without_axes):
        yield from ((q, recipe) for q in programs(p))
    yield from smaller_lengths(p, recipe)


def simpler_cases(recipe: Recipe) -> Iterator[Recipe]:
    plain = Recipe(recipe.mode)
    for name in ("layouts", "sizes", "gradient", "only", "alone", "same"):
        if getattr(recipe, name) != getattr(plain, name):
            yield replace(recipe, **{name: getattr(plain, name)})
    for i, layout in enumerate(recipe.layouts):
        if layout != CONTIGUOUS:
            yield replace(recipe, layouts=_with(recipe.layouts, i, CONTIGUOUS))


def without_statements(p: Written) -> Iterator[Written]:
    """Each statement replaced by something that it reads, in forward and in backward."""
    for statements, gone in ((p.forward, _gone_forward), (p.backward, _gone_backward)):
        known = {a.name for a in p.arguments} | {n for n, _ in statements}
        known |= {f"{stem}{i}" for stem, of in (("g", p.outputs), ("s", p.saved)) for i in range(len(of))}
        for i in reversed(range(len(statements))):
            name, text = statements[i]
            read = dict.fromkeys(n for n in NAME.findall(text) if n in known and n != name)
            yield from (gone(p, i, {name: other}) for other in read if name != p.dirty)


def _gone_forward(p: Written, at: int, other: Mapping[str, str]) -> Written:
    left = _replaced(p.forward[:at] + p.forward[at + 1 :], other)
    saved = p.saved if p.style == "setup" else tuple(dict.fromkeys(other.get(n, n) for n in p.saved))
    if len(saved) != len(p.saved):
        return p
    return replace(p, forward=left, outputs=tuple(other.get(n, n) for n in p.outputs), saved=saved,
                   fixed=tuple(other.get(n, n) for n in p.fixed))  # fmt: skip


def _gone_backward(p: Written, at: int, other: Mapping[str, str]) -> Written:
    left = _replaced(p.backward[:at] + p.backward[at + 1 :], other)
    return replace(p, backward=left, gradients=tuple(_named(g, other) for g in p.gradients))


def without_outputs(p: Written) -> Iterator[Written]:
    for k in range(len(p.outputs)):
        if len(p.outputs) == 1 or p.outputs[k] == p.dirty:
            continue
        others = [i for i in range(len(p.outputs)) if i != k]
        moved = {f"g{i}": f"g{j}" for j, i in enumerate(others)} | {f"r{i}": f"r{j}" for j, i in enumerate(others)}
        for stand_in in (f"g{i}" for i in range(len(others))):
            names = {**moved, f"g{k}": stand_in}
            saved = tuple(names.get(n, n) for n in p.saved if n != f"r{k}" or p.style == "ctx")
            if len(saved) == len(p.saved):
                fixed = tuple(n for n in p.fixed if n != p.outputs[k])
                gradients = tuple(_named(g, names) for g in p.gradients)
                q = replace(p, outputs=_without(p.outputs, k), fixed=fixed, saved=saved, gradients=gradients)
                yield replace(q, backward=_replaced(p.backward, names))


def without_saved(p: Written) -> Iterator[Written]:
    if p.inner:
        return
    for k in range(len(p.saved)):
        moved = {f"s{i}": f"s{i - 1}" for i in range(k + 1, len(p.saved))}
        stand_in = {f"s{k}": "s0"} if len(p.saved) > 1 else {}
        names = {**moved, **stand_in}
        yield replace(p, saved=_without(p.saved, k), backward=_replaced(p.backward, names),
                      gradients=tuple(_named(g, names) for g in p.gradients))  # fmt: skip


def without_gradients(p: Written) -> Iterator[Written]:
    for i, text in enumerate(p.gradients):
        if text != "None" and sum(g != "None" for g in p.gradients) > 1:
            yield replace(p, gradients=_with(p.gradients, i, "None"))


def without_arguments(p: Written, recipe: Recipe) -> Iterator[Step]:
    read = {n for _, text in p.forward for n in NAME.findall(text)} | set(p.outputs) | {p.dirty}
    read |= set() if p.inner else set(p.saved) | {n for t in p.gradients for n in NAME.findall(t)}
    for i, a in enumerate(p.arguments):
        if a.name not in read and len(p.arguments) > 1:
            saved = _without(p.saved, p.saved.index(a.name)) if p.inner and a.name in p.saved else p.saved
            gradients = _without(p.gradients, i) if p.gradients else ()
            q = replace(p, arguments=_without(p.arguments, i), saved=saved, gradients=gradients)
            yield q, replace(recipe, layouts=(), alone=None, same=None)


def without_marks(p: Written) -> Iterator[Written]:
    plain = {"fixed": (), "materialize": True, "once": False, "vmap_rule": False, "style": "ctx"}
    for name, value in plain.items():
        saved = p.saved
        if name == "style":  # setup_context names outputs r0, r1, ...
            saved = tuple(p.outputs[int(n[1:])] if re.fullmatch(r"r\d+", n) else n for n in p.saved)
        if getattr(p, name) != value and not (name == "style" and p.vmap_rule):
            yield replace(p, saved=saved, **{name: value})


def simpler_dtypes(p: Written) -> Iterator[Written]:
    for i, a in enumerate(p.arguments):
        if not a.text and a.dtype != "float32" and a.dtype not in ("int64", "bool"):
            yield replace(p, arguments=_with(p.arguments, i, replace(a, dtype="float32")))
    floats = tuple(replace(a, dtype="float32") if a.dtype in ("bfloat16", "float16") else a for a in p.arguments)
    if floats != p.arguments:
        yield replace(p, arguments=floats)


def without_axes(p: Written) -> Iterator[Written]:
    for axis in (-1, 0, 1, 2):
        fewer = tuple(replace(a, axes=tuple(i for i in a.axes if i != axis)) for a in p.arguments)
        if fewer != p.arguments:
            yield replace(p, arguments=fewer)


def smaller_lengths(p: Written, recipe: Recipe) -> Iterator[Step]:
    for i, n in enumerate(p.lengths):
        for m in SMALL:
            if m < n and any(i in a.axes for a in p.arguments):
                sizes = tuple((m if old == n else old, new) for old, new in recipe.sizes)
                yield replace(p, lengths=_with(p.lengths, i, m)), replace(recipe, sizes=sizes)


def _replaced(statements: Sequence[Statement], names: Mapping[str, str]) -> tuple[Statement, ...]:
    return tuple((n, _named(text, names)) for n, text in statements)


def _named(text: str, names: Mapping[str, str]) -> str:
    return NAME.sub(lambda m: names.get(m.group(), m.group()), text)


def _with(values: Sequence, i: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:i], value, *values[i + 1 :])


def _without(values: Sequence, i: int) -> tuple:  # type: ignore[type-arg]
    return (*values[:i], *values[i + 1 :])


# ------------------------------------------------------------------ the script
LAW = '''{program}

# ---- the law, word for word
{laws}

# ---- the case
import sys

import fusegrad
from fusegrad.runtime.check.subject import examine
from fusegrad.runtime.check.compare import Tolerance


def strided(numbers, shape, strides, dtype, requires_grad=False):
    if 0 in strides and 0 not in shape:
        whole = torch.tensor(numbers, dtype=dtype).view([1 if s == 0 else n for n, s in zip(shape, strides)])
        return whole.expand(shape).requires_grad_(requires_grad)
    memory = torch.empty_strided(shape, strides, dtype=dtype)
    return memory.copy_(torch.tensor(numbers, dtype=dtype).view(shape)).requires_grad_(requires_grad)


{tensors}
fast = fusegrad.compile({name}, backend={backend!r})
subject, _ = examine(fast, ({args},), {{}}, {backend!r}, Tolerance(), 0)
result, difference = broken(subject, Case({mode!r}, "", tuple(xs)), {eps!r})
print("eager keeps {mode!r}; compiled:", result, difference)
sys.exit(difference is not None)
'''


def script(fault: Fault, opening: str = "") -> str:
    """The text of a file that shows it, with torch and fusegrad alone; its exit code is 1 where the two differ."""
    write: Callable[[Fault], str] = _of_law if fault.recipe.mode in fuzz_laws.LAWS else _of_mode
    head = "".join(f"# {line}\n" for line in (opening, f"{fault.kind}; {fault.difference}") if line)
    return head + write(fault)


def _of_law(fault: Fault) -> str:
    laws = Path(inspect.getfile(fuzz_laws)).read_text(encoding="utf-8").split("from __future__ import annotations")[1]
    supply = iter(range(len(fault.case.xs)))
    args = [a.text or f"xs[{next(supply)}]" for a in fault.program.arguments]
    return LAW.format(
        program=source(fault.program), laws=laws.strip(), tensors=reproducer._list("xs", fault.case.xs),
        name=fault.program.name, args=", ".join(args), backend=fault.backend, mode=fault.recipe.mode,
        eps=eps_of(fault.program),
    )  # fmt: skip


def _of_mode(fault: Fault) -> str:
    subject, _ = subject_of(fault.program, fault.backend, 0)
    text = reproducer.script(subject, fault.case, fault.backend, fault.difference)
    return text.replace(reproducer.source_of(subject.user, subject.name), source(fault.program).rstrip(), 1)


__all__ = ["again", "script", "shrunk"]
