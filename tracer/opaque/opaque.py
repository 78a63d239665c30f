"""Opaque nodes: nested calls that stay the user's own, each run once between the compiled segments of a graph.

What such a call returns is known only by running it. A `Tape` keeps the calls of one run of a method, so that whatever
runs the method again (its capture, the check, another graph half way) never runs an opaque body a second time.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sympy
import torch
import torch.utils._pytree as pytree

from ...ir import Value
from ...ir.errors import InternalError
from ..capture.collectives import COMMUNICATES, Received
from ..capture.data import is_symbolic
from ..capture.memory import copy_tensor, has_same_content, overlap, storage_bytes
from ..containers import tensors_in
from ..declared import declarations
from ..reads.reads import scan
from ..reads.value_keys import SCALARS, freeze
from ..scoped_state import attribute_within
from .segments import Segment

Tensor = torch.Tensor
Sizes = dict[sympy.Symbol, int]
REMEMBERED = 512
"""Distinct sizes for which a node remembers that its results are as they were captured."""


class Why(NamedTuple):
    """The reason why calls of a class or an operator are not captured. declared: the author says so."""

    reason: str
    declared: bool = False


_operators: dict[str, Why] = {}
_classes: weakref.WeakKeyDictionary[type, Why | None] = weakref.WeakKeyDictionary()


def why_opaque(callee: Any) -> Why | None:
    """The reason why a Function class, or an operator by its name, stays opaque; None where nothing speaks against a
    capture."""
    if isinstance(callee, str):
        return _operators.get(callee)
    if isinstance(callee, Segment):
        return callee.why  # type: ignore[no-any-return]
    if callee in _classes:
        return _classes[callee]
    declared = declarations(callee, None)["forward"]
    if declared.value is not None:
        return None if declared.value else Why(declared.how.removeprefix("it "), True)
    if callee not in _classes:
        effects = scan(callee.forward, callee.setup_context).certain_effects()
        _classes[callee] = Why(f"is opaque: {effects[0][0]} ({effects[0][1]})") if effects else None
    return _classes[callee]


def remember_opaque(callee: Any, why: Why) -> None:
    """From now on calls of `callee` are opaque."""
    if isinstance(callee, str):
        _operators[callee] = why
    elif not isinstance(callee, Segment):
        _classes[callee] = why


def opaque_operators() -> bool:
    """True if an operator turned out to be opaque, so that a recording has to look at operators."""
    return bool(_operators)


_SAID = {"aten._local_scalar_dense.default": "item"}


def name_of(callee: Any) -> str:
    """A class, a custom operator, or an operation of torch, as users call it."""
    if not isinstance(callee, str):
        return str(callee.__name__)
    return _SAID.get(callee, callee.removeprefix("aten.").partition(".")[0] if callee.startswith("aten.") else callee)


def reason_alone(reason: str) -> str:
    """The reason why a segment is one, as it is told of the method that it was taken out of."""
    cannot = "cannot be traced: "
    return reason.removeprefix(cannot) if reason.startswith(cannot) else f"it {reason}"


def reason_of_caller(callee: Any, why: Why) -> str:
    """The same of what calls `callee`: a segment is the method's own lines, and no name of the user's."""
    if isinstance(callee, Segment):
        return reason_alone(why.reason)
    return f"it calls `{name_of(callee)}`, which {why.reason}"


# ------------------------------------------------------------------ calls that happened
@dataclass
class Taped:
    """One call of a nested body: what it returned, and what matters of what it was given.

    aliases: per result None, or ("is" | "view" | "detached", number of the tensor argument whose memory it shows).
    written_inputs: arguments that the body changed, with their new content; filled: those that it did not read.
    unversioned: those written to that autograd takes for what they were (numpy writes).
    fault: why no graph may hold the call. views: results that autograd takes for views, be it of a tensor that
    nothing else refers to.
    """

    callee: Any
    flags: tuple[bool, ...]
    leaves: list[Any]
    tree: Any
    aliases: list[tuple[str, int] | None]
    written_inputs: dict[int, Tensor]
    fault: str | None
    filled: frozenset[int] = frozenset()
    opaque: bool = False  # a captured graph has it as an opaque node
    views: frozenset[int] = frozenset()
    unversioned: frozenset[int] = frozenset()

    def select_compared(self, per_argument: Sequence[Any]) -> list[Any]:
        """Of something for each argument, that of the arguments whose content matters."""
        return [value for i, value in enumerate(per_argument) if i not in self.filled]

    def play(self, args: Any, kwargs: Any) -> Any:
        """The result once more, without the body."""
        tensors = tensors_in((args, kwargs))
        with torch.no_grad():
            for index, after in self.written_inputs.items():
                tensors[index].copy_(after)
            leaves = [self._leaf(i, tensors) for i in range(len(self.leaves))]
        return pytree.tree_unflatten(leaves, self.tree)

    def _leaf(self, i: int, tensors: Sequence[Tensor]) -> Any:
        leaf, alias = self.leaves[i], self.aliases[i]
        if alias is not None:
            return share_argument(alias[0], tensors[alias[1]])
        if not isinstance(leaf, Tensor):
            return leaf
        return share_argument("view", copy_tensor(leaf)) if i in self.views else copy_tensor(leaf)


def share_argument(kind: str, tensor: Tensor) -> Tensor:
    """An argument as a result that shares its memory."""
    return {"is": lambda: tensor, "view": lambda: tensor.view_as(tensor), "detached": tensor.detach}[kind]()


@dataclass
class Tape:
    """The nested calls of one run: those still to be played back, and all that there were."""

    pending: list[Taped] = field(default_factory=list)
    completed: list[Taped] = field(default_factory=list)
    data: bool = False  # operations that say what is in a tensor are on it, too
    broken: Exception | None = None  # what went wrong while a call was recorded: it is missing here

    def require_whole(self) -> None:
        """Raises what went wrong while it was recorded."""
        if self.broken is not None:
            raise self.broken

    def take(self, callee: Any) -> Taped | None:
        """The next recorded call of `callee`."""
        taped = next((t for t in self.pending if t.callee == callee), None)
        if taped is not None:
            self.pending = [t for t in self.pending if t is not taped]
        return taped

    def rewound_tape(self) -> Tape:
        """A tape that plays back all that there was: what it has not come to again happened, too."""
        return Tape(self.calls(), data=self.data)

    def calls(self) -> list[Taped]:
        """All calls that happened, in their order."""
        return [*self.completed, *self.pending]


def call_for_real(callee: Any, apply: Callable[..., Any], args: Any, kwargs: Any, keep: bool) -> tuple[Any, Taped]:
    """Call the user's body; the result, and its record. keep: look for writes that torch does not see, copy results."""
    tensors = tensors_in((args, kwargs))
    # What the body may change, before it runs: afterwards there is nothing to compare with.
    before = [copy_tensor(t) for t in tensors] if keep else None
    versions, storage_sizes = list(map(version, tensors)), list(map(storage_bytes, tensors))
    flags, gradients = tuple(t.requires_grad for t in tensors), list(map(_gradient, tensors))
    with _receiving(callee) as received:
        result = apply(*args, **kwargs)
    leaves, tree = pytree.tree_flatten(result)
    # Writes: those that versions count, those of collectives, and those that only the content shows (numpy's).
    changed = [i for i, (t, v) in enumerate(zip(tensors, versions, strict=True)) if version(t) != v]
    filled = frozenset(i for i, t in enumerate(tensors) if any(t is r for r in received.outputs))
    communicated = [*received.outputs, *received.changed]
    changed = [i for i, t in enumerate(tensors) if i in changed or any(_shares(t, w) for w in communicated)]
    versioned = frozenset(changed)
    if before is not None:
        pairs = enumerate(zip(tensors, before, strict=True))
        changed = [i for i, (t, b) in pairs if i in versioned or not has_same_content(t, b)]
    # Whether a graph can hold such a call. A segment may write: its new contents become further results.
    aliases = [_alias(leaf, tensors) for leaf in leaves]
    if isinstance(callee, Segment) and _can_be_results(changed, tensors, leaves):
        fault = _fault(leaves, aliases, tensors, ()) or _fault_of_history(leaves, aliases)
    else:
        fault = _fault(leaves, aliases, tensors, changed)
    if any(t.requires_grad != f or _gradient(t) is not g for t, f, g in zip(tensors, flags, gradients, strict=True)):
        fault = fault or "leaves a gradient on what it is given"  # which is another tensor where a graph calls it
    if list(map(storage_bytes, tensors)) != storage_sizes:
        fault = "resizes the storage of an argument"
    # The record has copies: the method may go on and write to what it was given back.
    views = frozenset(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf._is_view())
    if keep:
        leaves = [copy_tensor(v) if isinstance(v, Tensor) else v for v in leaves]
    contents = {i: copy_tensor(tensors[i]) for i in changed}
    unseen = frozenset(changed) - versioned
    return result, Taped(callee, flags, leaves, tree, aliases, contents, fault, filled, False, views, unseen)


def _gradient(tensor: Tensor) -> Tensor | None:
    return tensor.grad if tensor.is_leaf else None


@contextlib.contextmanager
def _receiving(callee: Any) -> Iterator[Received]:
    """The tensors that collectives write to, within a call of what is known to communicate."""
    why, received = why_opaque(callee), Received()
    with received if why is not None and COMMUNICATES in why.reason else contextlib.nullcontext():
        yield received


def _shares(a: Tensor, b: Tensor) -> bool:
    return _is_plain(a) and _is_plain(b) and overlap(a, b)


def _can_be_results(changed: Sequence[int], tensors: Sequence[Tensor], leaves: Sequence[Any]) -> bool:
    """True if a graph can take the new content of what was written to as one more result."""
    if not all(_is_plain(tensors[i]) and not tensors[i].requires_grad for i in changed):
        return False
    other_tensors = [[t for j, t in enumerate(tensors) if j != i] + tensors_in(leaves) for i in changed]
    return not any(_shares(tensors[i], t) for i, group in zip(changed, other_tensors, strict=True) for t in group)


def read_data_for_real(operation: str, func: Any, args: Any, kwargs: Any) -> tuple[Any, Taped]:
    """An operation that says what is in a tensor: the result, and its record."""
    result = func(*args, **kwargs)
    leaves, tree = pytree.tree_flatten(result)
    tensors = tensors_in((args, kwargs))
    copies = [copy_tensor(v) if isinstance(v, Tensor) else v for v in leaves]
    fault = _fault(leaves, [None] * len(leaves), tensors, ())
    return result, Taped(operation, tuple(False for _ in tensors), copies, tree, [None] * len(leaves), {}, fault)


def version(value: Any) -> int:
    """The version of a tensor: the number of writes to it; 0 where it does not count."""
    return 0 if not isinstance(value, Tensor) or value.is_inference() else value._version


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and value.layout is torch.strided


def can_be_handed_on(value: Any) -> bool:
    """True if a graph can hand a result to what follows: plain tensors and scalars, in containers."""
    return all(_is_plain(v) if isinstance(v, Tensor) else isinstance(v, SCALARS) for v in pytree.tree_leaves(value))


def _alias(leaf: Any, tensors: Sequence[Tensor]) -> tuple[str, int] | None:
    """The argument whose memory a result shows as it is."""
    if not _is_plain(leaf):
        return None
    for index, argument in enumerate(tensors):
        if leaf is argument:
            return "is", index
        if _is_plain(argument) and overlap(leaf, argument) and _geometry(leaf) == _geometry(argument):
            return ("view" if leaf._is_view() else "detached"), index
    return None


def _geometry(t: Tensor) -> tuple[Any, ...]:
    return t.dtype, t.shape, t.stride(), t.data_ptr()


def _fault(
    leaves: Sequence[Any], aliases: Sequence[Any], tensors: Sequence[Tensor], changed: Sequence[int]
) -> str | None:
    """The reason why a graph cannot hold the call."""
    if changed:
        return "writes to an argument"
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not _is_plain(leaf):
            return "returns a tensor subclass or a tensor that is not strided"
        if not isinstance(leaf, (Tensor, *SCALARS)):
            return f"returns a {type(leaf).__name__}"
    own = [leaf for leaf, alias in zip(leaves, aliases, strict=True) if alias is None and isinstance(leaf, Tensor)]
    if any(overlap(leaf, t) for leaf in own for t in tensors if _is_plain(t)):
        return "returns a view of an argument"
    if any(overlap(a, b) for i, a in enumerate(own) for b in own[:i]):
        return "returns the same memory twice"
    return None


def _fault_of_history(leaves: Sequence[Any], aliases: Sequence[Any]) -> str | None:
    """The reason why a graph would lose what autograd recorded within statements of a method."""
    own = (leaf for leaf, alias in zip(leaves, aliases, strict=True) if alias is None and isinstance(leaf, Tensor))
    return "returns a tensor that requires grad" if any(leaf.requires_grad for leaf in own) else None


# ------------------------------------------------------------------ calls in a graph
class Mismatch(Exception):
    """An opaque node returned what its graph was not captured for. `tape`: what opaque nodes returned in this run."""

    def __init__(self, name: str, tape: Tape) -> None:
        super().__init__(f"internal: {name} returned something else than at the trace")
        self.tape = tape


class Run:
    """One execution of a graph with opaque nodes: its tape, and the symbols' values, which grow as the nodes return.

    laid_out: arguments get the strides that they were captured with.
    compared_inputs: copies of the arguments are kept for a comparison.
    """

    def __init__(
        self, tape: Tape, sizes: Any, laid_out: bool = False, compared_inputs: list[Tensor] | None = None
    ) -> None:
        self.tape, self.sizes, self.laid_out, self.compared_inputs = tape, sizes, laid_out, compared_inputs
        self.autocasts = [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]

    @contextlib.contextmanager
    def as_in_eager(self) -> Iterator[None]:
        """The state in which the user's body would run in eager."""
        with contextlib.ExitStack() as stack, running(None):
            for device, dtype in self.autocasts:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield


_runs = threading.local()


def running(run: Run | None) -> contextlib.AbstractContextManager[None]:
    """Within the block opaque nodes belong to `run`, in this thread."""
    return attribute_within(_runs, "now", run)


class OpaqueNode:
    """A nested call in a captured graph: `target(*tensors and numbers) -> tensors`, the user's own body inside.

    inputs: the fakes and symbolic numbers that it takes. leaves: fakes of its tensors, its other results as constants.
    """

    def __init__(
        self, callee: Any, apply: Callable[..., Any], args: Any, kwargs: Any, taped: Taped, why: Why, location: str
    ) -> None:
        self.callee, self.apply, self.why, self.where = callee, apply, why, location
        self.name = name_of(callee)
        self.constants, self.structure = pytree.tree_flatten((args, kwargs))
        self.slots = [i for i, leaf in enumerate(self.constants) if isinstance(leaf, TRACED)]
        self.inputs = [self.constants[i] for i in self.slots]
        self.constants = [None if i in self.slots else c for i, c in enumerate(self.constants)]
        self.flags, self.tree, self.aliases = taped.flags, taped.tree, taped.aliases
        self.written_inputs = sorted(taped.written_inputs)  # of its tensors: their new content is its last results
        self.of_data = isinstance(apply, torch._ops.OpOverload)  # what is in a tensor: its numbers are symbols
        self.facts = [leaf_fact(leaf, self.of_data) for leaf in taped.leaves]
        self.leaves: list[Any] = []
        self.named: list[Any] = []  # the expressions in the fakes' shapes and strides, as they were first named
        self.hints: Sizes = {}
        self.copies = False
        self.conditions: Callable[[set[sympy.Symbol]], Sequence[sympy.Basic]] = lambda known: ()
        self.env: Any = None
        self._bound_by_key: OrderedDict[Any, Sizes | None] = OrderedDict()

    def target(self) -> Callable[..., Any]:
        """The function that stands in the graph."""

        def call(*values: Any) -> tuple[Tensor, ...]:
            return self(*values)

        call.__name__ = call.__qualname__ = f"opaque_{self.name.replace('::', '_')}"
        call.fusegrad_call = self.callee  # type: ignore[attr-defined]
        call.opaque = self  # type: ignore[attr-defined]
        call.brings = self.hints.keys()  # type: ignore[attr-defined]
        return call

    def bind_results(self, session: Any, leaves: Sequence[Any]) -> None:
        """The node's fakes are made: which symbols are its own, and their values at the capture."""
        real = tensors_in(leaves)
        self.env = session.env
        self.conditions = session.conditions
        pairs = list(zip((f for f in self.leaves if isinstance(f, Tensor)), real, strict=True))
        self.named = [e for fake, _ in pairs for e in _exprs(fake)]
        values = [n for _, t in pairs for n in (*t.shape, *t.stride())]
        self.named += [leaf.node.expr for leaf in self.leaves if isinstance(leaf, NUMBERS)]
        values += self._numbers(leaves)
        self.hints = {s: n for s, n in zip(self.named, values, strict=True) if isinstance(s, sympy.Symbol)}

    def _numbers(self, leaves: Sequence[Any]) -> list[Any]:
        """The numbers among results that are symbols in the graph."""
        return [real for real, leaf in zip(leaves, self.leaves, strict=True) if isinstance(leaf, NUMBERS)]

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        run: Run | None = getattr(_runs, "now", None)
        if run is None:
            raise InternalError(f"the opaque node {self.name} runs outside a run of its graph")
        args, kwargs = self._arguments(run, values)
        tensors = tensors_in((args, kwargs))
        before = [copy_tensor(t) for t in tensors] if run.compared_inputs is not None else []
        taped = run.tape.take(self.callee)
        if taped is None:
            with run.as_in_eager():
                result, taped = self._call(args, kwargs)
        else:
            result = taped.play(args, kwargs)
        run.tape.completed.append(taped)
        if run.compared_inputs is not None:
            run.compared_inputs += taped.select_compared(before)
        # Only now: the body ran, and its call is on the tape, from which another graph goes on.
        if not self.fits(taped, run.sizes):
            raise Mismatch(self.name, run.tape)
        leaves = pytree.tree_leaves(result)
        results = (leaf for leaf, captured in zip(leaves, self.leaves, strict=True) if isinstance(captured, TRACED))
        return (*results, *(tensors[i] for i in self.written_inputs))

    def _call(self, args: Any, kwargs: Any) -> tuple[Any, Taped]:
        if self.of_data:
            return read_data_for_real(str(self.apply), self.apply, args, kwargs)
        return call_for_real(self.callee, self.apply, args, kwargs, self.copies)

    def _arguments(self, run: Run, values: Sequence[Any]) -> Any:
        leaves, flags, numbers = list(self.constants), iter(self.flags), itertools.count()
        for slot, fake, value in zip(self.slots, self.inputs, values, strict=True):
            if isinstance(value, Tensor):
                value = _with_flag(self._lay_out(run, fake, value), next(flags))
                value = copy_tensor(value) if next(numbers) in self.written_inputs else value
            leaves[slot] = value
        return pytree.tree_unflatten(leaves, self.structure)

    def _lay_out(self, run: Run, fake: Tensor, value: Tensor) -> Tensor:
        """In the strides that the argument was captured with: kernels write row-major."""
        if not run.laid_out or all(a == b for a, b in zip(_exprs(fake), (*value.shape, *value.stride()), strict=True)):
            return value
        strides = [_number(e, run.sizes) for e in _exprs(fake)[value.dim() :]]
        if (
            any(s != t for s, t, n in zip(strides, value.stride(), value.shape, strict=True) if n > 1)
            and 0 not in strides
        ):
            copy = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
            return copy.copy_(value)
        return value

    # ------------------------------------------------------------------ what was captured still holds
    def fits(self, taped: Taped | None, sizes: Any) -> bool:
        """True if the results are as they were captured; then the symbols in their shapes have values."""
        if taped is None or taped.fault is not None:
            return False
        if (taped.tree, taped.aliases, sorted(taped.written_inputs)) != (self.tree, self.aliases, self.written_inputs):
            return False
        if [leaf_fact(leaf, self.of_data) for leaf in taped.leaves] != self.facts:
            return False
        tensors, numbers = tensors_in(taped.leaves), self._numbers(taped.leaves)
        shapes = ((t.shape, t.stride()) for t in tensors)
        key = (len(self.env.guards), tuple(sizes.values()), *shapes, *numbers)
        if key not in self._bound_by_key:
            self._bound_by_key[key] = self._bind_symbols(tensors, sizes, numbers)
            while len(self._bound_by_key) > REMEMBERED:
                self._bound_by_key.popitem(last=False)
        bound = self._bound_by_key[key]
        if bound:
            sizes.learn(bound)
        return bound is not None

    def _bind_symbols(
        self, tensors: Sequence[Tensor], sizes: Mapping[sympy.Symbol, int], numbers: Sequence[Any] = ()
    ) -> Sizes | None:
        """The values of the symbols that these results bring; None where they break what the graph assumes."""
        fakes = [f for f in self.leaves if isinstance(f, Tensor)]
        dims = [pair for fake, t in zip(fakes, tensors, strict=True) for pair in _dims(fake, t)]
        values = [*(n for t in tensors for n in (*t.shape, *t.stride())), *numbers]
        pairs = zip(self.named, values, strict=True)
        bound = {e: n for e, n in pairs if isinstance(e, sympy.Symbol) and e not in sizes}
        all_sizes = {**sizes, **bound}
        holds = all(_number(e, all_sizes) == n for e, n in dims) and all(self._in_range(s, n) for s, n in bound.items())
        own = set(bound)
        assumed = [c for c in self.conditions(set(all_sizes)) if c.free_symbols & own]
        return bound if holds and all(bool(c.xreplace(all_sizes)) for c in assumed) else None

    def _in_range(self, symbol: sympy.Symbol, n: int) -> bool:
        if isinstance(n, float):
            return True
        bounds = self.env.bound_sympy(symbol)
        return bool(bounds.lower <= n) and bool(n <= bounds.upper)


TRACED = (Tensor, torch.SymInt, torch.SymFloat)
NUMBERS = (torch.SymInt, torch.SymFloat)


def leaf_fact(leaf: Any, of_data: bool = False) -> Any:
    """The facts of a result that must be equal, whatever its sizes. of_data: or its number."""
    if of_data and is_symbolic(leaf):
        return "number", type(leaf)
    return (leaf.dtype, leaf.device, leaf.dim()) if isinstance(leaf, Tensor) else freeze(leaf)


def _with_flag(tensor: Tensor, requires_grad: bool) -> Tensor:
    """The tensor with eager's flag: it is what the body sees as ctx.needs_input_grad."""
    return tensor if tensor.requires_grad == requires_grad else tensor.detach().requires_grad_(requires_grad)


def _exprs(fake: Tensor) -> list[Any]:
    sizes = (*fake.shape, *fake.stride())
    return [n if isinstance(n, int) else n.node.expr for n in sizes]


def _dims(fake: Tensor, real: Tensor) -> list[tuple[Any, int]]:
    """(expression, value) of every size, and of every stride that matters."""
    exprs, n = _exprs(fake), real.dim()
    strides = zip(exprs[n:], real.stride(), real.shape, strict=True)
    return [*zip(exprs[:n], real.shape, strict=True), *((e, s) for e, s, size in strides if size > 1 and real.numel())]


def _number(expr: Any, sizes: Mapping[sympy.Symbol, int]) -> Any:
    if isinstance(expr, int):
        return expr
    return sizes[expr] if isinstance(expr, sympy.Symbol) else int(expr.xreplace(dict(sizes)))


def opaque_of(value: Value) -> OpaqueNode | None:
    """The opaque node that a `call` calls."""
    return getattr(value.params.get("target"), "opaque", None)
