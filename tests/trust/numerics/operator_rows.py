"""Every ATen operation that the tracer lowers, on torch's own samples: the lowered graph beside the operation itself.

The graph runs through torch, primitive by primitive, and where it is elementwise as a kernel under the interpreter.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from accuracy import Errors, compared
from dense import everything, integer_pairs, integers, pairs
from harness import INTERPRET, run
from torch._ops import OpOverload

from fusegrad.codegen import generate, module
from fusegrad.ir import Graph
from fusegrad.ir.errors import FusegradError, Unfusible
from fusegrad.ir.passes.simplify import Simplify
from fusegrad.ir.prims import PRIMS
from fusegrad.runtime.execution.aten import reference
from fusegrad.tracer.lowering.aten import lower
from fusegrad.tracer.lowering.rules import composites, rules
from fusegrad.tracer.lowering.rules_composite import decompositions

sys.path.append(str(Path(__file__).parents[2] / "tracer"))
from capturing import capture, symbols

warnings.filterwarnings("ignore")
Tensor = torch.Tensor
FLOATS = (torch.float32,)
WHOLE = ()
SAMPLES = 1
"""How many of torch's samples are taken of an operation, beside dense ones where it is elementwise."""
NEVER_LOWERED = ("fft.", "linalg.", "sparse.", "signal.", "special.", "torch.ops.", "jiterator")
"""Families of operations that are called as they are, and take torch long to sample."""
CHOOSING = set("relu clamp clamp_min clamp_max maximum minimum fmax fmin".split())
"""Operations that are a maximum or minimum."""
LARGEST = 20_000
"""Samples with more elements are left out."""


def lowered_ops() -> dict[str, str]:
    """Each ATen overload of tensors that is lowered, and by what.

    Not those that write to their arguments, which are made functional before, nor those that torch itself takes apart
    before it dispatches them.
    """
    found = dict.fromkeys(decompositions(), "decomposition") | dict.fromkeys(composites, "formula")
    found |= dict.fromkeys(rules, "rule")
    return {str(op): how for op, how in found.items() if _is_dispatched(op)}


def _is_dispatched(op: OpOverload) -> bool:
    tensors = any("Tensor" in str(a.type) for a in op._schema.arguments)
    if not tensors or op.namespace != "aten" or op._schema.is_mutable:
        return False
    known = torch._C._dispatch_has_kernel(op.name())  # there are overloads of TorchScript alone
    return known and not op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


@dataclass
class Case:
    """A function of tensors, and whether its samples are dense."""

    name: str
    function: Callable[..., Any]
    tensors: list[Tensor]
    dense: bool = False


def cases(info: Any, dtype: torch.dtype) -> Iterator[Case]:
    """torch's first samples of an operation, and dense numbers in place of theirs where it is elementwise."""
    torch.manual_seed(0)
    samples = list(_first(info.sample_inputs("cpu", dtype), SAMPLES))
    for sample in samples:
        yield _case(info, sample)
    if samples and _is_dense(info):
        case = _case(info, samples[0])
        floats, two = dtype.is_floating_point, len(case.tensors) == 2
        if two:
            case.tensors = list(pairs(dtype, 1 << 12) if floats else _divisible(dtype))
        elif len(case.tensors) == 1:
            case.tensors = [everything(dtype, 1 << 13) if floats else integers(dtype, 1 << 10)]
        case.dense = len(case.tensors) in (1, 2)
        if case.dense:
            yield case


def _first(samples: Any, count: int) -> Iterator[Any]:
    taken = 0
    for sample in samples:
        leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        if tensors and sum(t.numel() for t in tensors) <= LARGEST and tensors[0].numel() > 1:
            yield sample
            taken += 1
        if taken == count:
            return


def _case(info: Any, sample: Any) -> Case:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def function(*tensors: Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        given, args, kwargs = pytree.tree_unflatten(filled, spec)
        result = info.op(given, *args, **kwargs)
        return tuple(t for t in pytree.tree_leaves(result) if isinstance(t, Tensor))

    name = f"{info.name}{'.' + info.variant_test_name if info.variant_test_name else ''}"
    return Case(name, function, [leaves[i].detach() for i in places])


@dataclass
class Shown:
    """What one case showed: the operations in its capture, and errors by what ran it."""

    ops: set[str]
    errors: dict[str, Errors] = field(default_factory=dict)
    failure: str = ""


def shown_by(case: Case) -> Shown:
    """Nothing of what cannot be captured, draws numbers, or writes to its arguments, nor of what eager refuses."""
    try:
        wanted = case.function(*(t.clone() for t in case.tensors))
        gm, fakes = capture(case.function, case.tensors)
    except Exception:
        return Shown(set())
    called = [n.target for n in gm.graph.nodes if isinstance(n.target, OpOverload)]
    shown = Shown({str(op) for op in called})
    if any(torch.Tag.nondeterministic_seeded in op.tags or op._schema.is_mutable for op in called):
        return Shown(set())
    graph = lower(gm, fakes)
    sizes = symbols(graph, case.tensors)
    truth = _truth(case, wanted)
    others = _others(case, wanted, shown.ops)
    shown.errors["reference"] = _worst(reference.run(graph, case.tensors, sizes), wanted, truth, case, others)
    if case.dense and _is_elementwise(graph):
        shown.errors["interpret"] = _worst(_interpreted(graph, case.tensors, sizes), wanted, truth, case, others)
    return shown


def _others(case: Case, wanted: Sequence[Tensor], ops: set[str]) -> list[list[Tensor]]:
    """What eager has in other places: its vector and scalar code differ in the sign of a zero (softshrink of -0.0).

    And so do processors in the maximum of 0.0 and -0.0, of which IEEE 754 says that it may be either.
    """
    if not case.dense or not all(w.is_floating_point() for w in wanted):
        return []
    found = [list(case.function(*(with_gaps(t) for t in case.tensors)))]
    if {op.split(".")[1] for op in ops} & CHOOSING:
        found.append([torch.where(w == 0, -w, w) for w in wanted])
    return found


def with_gaps(tensor: Tensor) -> Tensor:
    """The same numbers, of which no two lie side by side: eager takes its scalar code."""
    return tensor.new_empty((*tensor.shape, 2))[..., 0].copy_(tensor)


def _interpreted(graph: Graph, tensors: Sequence[Tensor], sizes: Any) -> list[Tensor]:
    simple = Simplify()(graph)
    kernels = generate(simple, target=INTERPRET, hints=sizes, name="body")
    return run(kernels, module(kernels.kernels), simple, list(tensors), sizes)


def _is_elementwise(graph: Graph) -> bool:
    families = {PRIMS[v.prim].family for v in graph.order()}
    return families <= {"input", "elementwise", "source", "layout"}


def _truth(case: Case, wanted: Sequence[Tensor]) -> list[np.ndarray]:
    """The same in float64; of what is no float, eager's own results."""
    wide = [t.double() if t.is_floating_point() else t for t in case.tensors]
    try:
        exact = case.function(*wide)
    except RuntimeError:
        exact = wanted
    return [
        (e if e.shape == w.shape and w.is_floating_point() else w).detach().double().numpy()
        for e, w in zip(exact, wanted, strict=True)
    ]


def _worst(
    found: Sequence[Any],
    wanted: Sequence[Tensor],
    truth: Sequence[np.ndarray],
    case: Case,
    others: Sequence[Sequence[Tensor]],
) -> Errors:
    """The first result that breaks the bound, else the one with the largest error."""
    each = []
    for i, (mine, theirs, exact) in enumerate(zip(found, wanted, truth, strict=True)):
        if mine is None or theirs.is_complex() or theirs.dtype == torch.float64 or not theirs.numel():
            continue  # nothing here is wider than float64, to be its truth
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            types = [f"{t.dtype}{tuple(t.shape)}" for t in (mine, theirs)]
            return Errors(0, 0, 0, 1, 1, worst=" not ".join(types))
        inputs = tuple(case.tensors)
        size = None if case.dense else np.full(exact.shape, _largest(exact))
        also = [o[i].detach() for o in others]
        each.append(compared(mine.detach(), theirs.detach(), exact, inputs, case.dense, size, also))
    return max(each, key=lambda e: (not e.good, e.found), default=Errors(0, 0, 0, 0, 0))


def _largest(exact: np.ndarray) -> float:
    finite = np.abs(exact[np.isfinite(exact)])
    return float(finite.max(initial=0.0))


Found = tuple[Case, torch.dtype, Shown]


def infos() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def all_shown(wanted: Callable[[Any], bool], dtypes: Sequence[torch.dtype]) -> Iterator[Found]:
    """Every case of the operations that are wanted, in further dtypes where it is elementwise and lowered."""
    known = lowered_ops().keys()
    for info in infos():
        if not wanted(info) or info.name.startswith(NEVER_LOWERED):
            continue
        for dtype in dtypes:
            if dtype in info.supported_dtypes("cpu") and (dtype == torch.float32 or _is_dense(info)):
                each = list(_shown_of(info, dtype))
                yield from each
                if not any(shown.ops & known for _, _, shown in each):
                    break


def _divisible(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pairs without 0 and -1 as the second: eager raises, or ends the process, where it divides by them."""
    x, y = integer_pairs(dtype, 1 << 10)
    return x, torch.where((y == 0) | (y == -1), 3, y).to(dtype) if dtype != torch.bool else y


def _is_dense(info: Any) -> bool:
    from torch.testing._internal.common_methods_invocations import BinaryUfuncInfo, UnaryUfuncInfo

    return isinstance(info, (UnaryUfuncInfo, BinaryUfuncInfo))


def _shown_of(info: Any, dtype: torch.dtype) -> Iterator[Found]:
    try:
        each = list(cases(info, dtype))
    except Exception:
        return  # torch has no samples of these on a CPU
    for case in each:
        try:
            yield case, dtype, shown_by(case)
        except Unfusible as error:
            yield case, dtype, Shown(set(), failure=f"Unfusible: {error}")
        except FusegradError:
            continue  # sizes read from data, several devices: not lowered at all
        except Exception as error:
            yield case, dtype, Shown(set(), failure=f"{type(error).__name__}: {error}")


def by_op(found: Iterator[Found]) -> dict[tuple[str, str], list[tuple[Case, Shown]]]:
    """(overload, dtype) -> the cases that show it."""
    known, result = lowered_ops(), defaultdict(list)
    for case, dtype, shown in found:
        for op in shown.ops & known.keys():
            result[op, str(dtype).removeprefix("torch.")].append((case, shown))
    return result
