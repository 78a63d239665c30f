"""One cell of the table: an OpInfo of torch's `autograd_function_db` under one composition, and what came of it.

During a run the classes of that module are replaced, in its namespace, by the classes under test: so a Function that
calls another by its global name (NumpyMul inside NumpyCube.backward) calls the one under test as well.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from compositions import BATCH, COMPOSITIONS, Batch, Fn
from torch.testing._internal import autograd_function_db as db

import fusegrad

Tensor = torch.Tensor
OPINFOS: dict[str, Any] = {o.name.removesuffix("AutogradFunction"): o for o in db.autograd_function_db}
CLASSES = {
    name: value
    for name, value in vars(db).items()
    if isinstance(value, type) and issubclass(value, torch.autograd.Function)
}
RIGHT, RAISES, WRONG, NOTHING = "right", "raises", "WRONG", "does not apply"


@dataclass(frozen=True)
class Outcome:
    """right, raises (with the message), WRONG (silently), or nothing to compare; `how` it ran, where it is known."""

    status: str
    message: str = ""
    how: str = ""


# ------------------------------------------------------------------ the classes under test
@contextlib.contextmanager
def classes_in_place(classes: Mapping[str, type]) -> Iterator[None]:
    """Within the block the module's names mean these classes."""
    vars(db).update(classes)
    try:
        yield
    finally:
        vars(db).update(CLASSES)


def compiled_classes(backend: str) -> dict[str, type]:
    return {name: fusegrad.compile(cls, backend=backend) for name, cls in CLASSES.items()}


def operation(opinfo: Any, classes: Mapping[str, type]) -> Callable[..., Any]:
    """What the OpInfo calls: a class's `apply`, bound when the module was imported, or a lambda that looks names up."""
    owner = getattr(opinfo.op, "__self__", None)
    return classes[owner.__name__].apply if isinstance(owner, type) else opinfo.op  # type: ignore[attr-defined,no-any-return]


# ------------------------------------------------------------------ samples
def batch_of(opinfo: Any) -> tuple[Batch, Callable[[Callable[..., Any]], Fn]]:
    """Samples of the tensor arguments, and the operation as a function of them alone."""
    torch.manual_seed(0)
    samples = [next(iter(opinfo.sample_inputs("cpu", torch.float64))) for _ in range(BATCH)]
    arguments = [[s.input, *s.args] for s in samples]
    slots = [i for i, a in enumerate(arguments[0]) if isinstance(a, Tensor)]
    moving = tuple(n for n, i in enumerate(slots) if arguments[0][i].is_floating_point())

    def of_tensors(op: Callable[..., Any]) -> Fn:
        def call(*tensors: Tensor) -> tuple[Any, ...]:
            full = list(arguments[0])
            for i, t in zip(slots, tensors, strict=True):
                full[i] = t
            outputs = op(*full)
            return outputs if isinstance(outputs, tuple) else (outputs,)

        return call

    return Batch([[a[i].detach() for i in slots] for a in arguments], moving), of_tensors


# ------------------------------------------------------------------ outcomes
def expected(name: str, composition: str) -> Any:
    """What the author's rules give, by loops of plain eager autograd; an Outcome where there is nothing to expect."""
    batch, of_tensors = batch_of(OPINFOS[name])
    how = COMPOSITIONS[composition]
    if composition == "vmap mixed" and len(batch.samples[0]) == 1:
        return Outcome(NOTHING, "one tensor argument")
    f = of_tensors(operation(OPINFOS[name], CLASSES))
    try:
        return how.expected(f, batch, batch.dims(how.pattern))
    except Exception as error:
        return Outcome(RAISES, first_line(error))


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


def run(name: str, composition: str, classes: Mapping[str, type], around: Any = None) -> Any:
    """The composition over these classes; `around`: what compiles the function (or the whole composition)."""
    batch, of_tensors = batch_of(OPINFOS[name])
    how = COMPOSITIONS[composition]
    f = of_tensors(operation(OPINFOS[name], classes))
    around = around or (lambda g: g)
    f = around(f) if how.outside else f
    composed = how.run(f, batch.moving, batch.dims(how.pattern))
    composed = composed if how.outside else around(composed)
    return composed(*how.arguments(batch))


def outcome(name: str, composition: str, wanted: Any, classes: Mapping[str, type], around: Any = None) -> Outcome:
    """The composition's result, judged."""
    if isinstance(wanted, Outcome) and wanted.status == NOTHING:
        return wanted
    try:
        with classes_in_place(classes), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = run(name, composition, classes, around)
    except Exception as error:
        return Outcome(RAISES, first_line(error))
    if isinstance(wanted, Outcome):
        return Outcome(WRONG, f"a result where a loop of plain autograd raises {wanted.message}")
    why = difference(found, wanted)
    return Outcome(RIGHT) if why is None else Outcome(WRONG, why)


def difference(found: Any, wanted: Any) -> str | None:
    mine, theirs = pytree.tree_leaves(found), pytree.tree_leaves(wanted)
    if len(mine) != len(theirs):
        return f"{len(mine)} results for {len(theirs)}"
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if not isinstance(b, Tensor):
            continue
        if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
            return f"result {i}: {kind(a)} for {kind(b)}"
        if not torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-8, equal_nan=True):
            return f"result {i} is off by {float((a.double() - b.double()).abs().max()):.3g}"
    return None


def kind(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def as_written(classes: Mapping[str, type]) -> list[str]:
    """`Class.method: reason (where)` for every method that ran as its author wrote it."""
    found = []
    for name, fast in classes.items():
        records = fast._fusegrad.ledger.records  # type: ignore[attr-defined]
        found += [f"{name}.{m}: {r.reason} ({r.where})" for m, r in records.items() if r.status == "opaque"]
    return found


def ours(name: str, composition: str, wanted: Any, backend: str) -> tuple[Outcome, list[str]]:
    """The same by compiled classes, fresh ones: with what of it was compiled."""
    classes = compiled_classes(backend)
    result = outcome(name, composition, wanted, classes)
    opaque = as_written(classes)
    records = [r.status for fast in classes.values() for r in fast._fusegrad.ledger.records.values()]  # type: ignore[attr-defined]
    kinds = {s == "opaque" for s in records}
    return Outcome(result.status, result.message, _HOW[frozenset(kinds)]), opaque


_HOW = {
    frozenset[bool](): "",
    frozenset({True}): "as written",
    frozenset({False}): "compiled",
    frozenset({True, False}): "in part",
}
