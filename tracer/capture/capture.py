"""Capture: run Python once on fake tensors with symbolic sizes and keep the ATen operations as a graph.

One `Session` (one ShapeEnv, one fake mode) serves forward and backward of a specialisation, so that both speak of the
same symbols. Nothing of torch is patched outside a capture, and a capture restores what it touched even when it fails.
"""

from __future__ import annotations

import enum
import linecache
import operator
import os
import re
import sys
import threading
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import sympy
import sympy.tensor.tensor  # which the first sum of two sizes imports, for 25 ms
import torch
import torch.utils._pytree as pytree
from torch._dynamo.source import ConstantSource, LocalSource  # a second, paid at import and not in the first call
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from ...ir.codes import code_of
from ..containers import tensors_in
from ..declared import declarations
from ..frames import TORCH, is_user_file, user_frame, user_line, where_raised
from ..locks import CAPTURE, lock_of
from ..loops.lengths import Lengths
from ..opaque.call_interception import plain, watched_by
from ..opaque.extension_calls import (
    CompiledCallError,
    add_call_node,
    callees_as_nodes,
    has_own_autograd,
    newest_node,
    nodes_after,
    operator_node,
    stray_node,
    without_zeros,
)
from ..opaque.opaque import (
    TRACED,
    OpaqueNode,
    Tape,
    Taped,
    Why,
    can_be_handed_on,
    name_of,
    reason_of_caller,
    share_argument,
    why_opaque,
)
from ..opaque.segments import Segment
from ..opaque.watching import watcher
from ..reads.foreign import Crossing
from ..reads.packages import is_cached
from ..reads.reached import Reached, resume_watch, watching_effects
from ..reads.reads import Reads
from ..reads.snapshot import CaptureAgain, Snapshot
from ..reads.value_keys import SCALARS, Handle, is_a_value
from ..scoped_state import attribute_within, variable_within
from ..torch_private import (
    DETACHES,
    FakeTensorMode,
    dispatch_modes,
    is_dual,
    is_fake,
    jit_tracing,
    normalize_detach,
    operator_name,
    sizes_divided_by_floats,
    split_long_sums,
    symbolic_python,
    through_compiled_functions,
    transforms_active,
    variables_as_detached,
    without_address,
    without_hooks,
    without_text,
)
from ..trace import CaptureError, Trace
from . import recorder
from .collectives import COMMUNICATES, communicates
from .data import QUESTIONS, DataReads, is_symbolic
from .debugging import without_anomaly_mode, without_logs_of_failures, without_structured_logs
from .fake_leaks import holds_fakes
from .grad_mode import CUT, UNRECORDED, UNVERSIONED, keeps_graph, why_not_in_its_mode
from .history import history
from .leaves import GET_GRAD, OwnLeaves
from .memory import RESIZES, storages_watched
from .metadata import Fakes, strides_in_order
from .tensor_mutations import TensorMarks

capture_lock = lock_of(CAPTURE)
"""One capture at a time in a process: make_fx patches module state while it runs."""


class Env(Lengths):
    """A ShapeEnv that writes no size in terms of one that is known later: of what an opaque node returns.

    age: which opaque node brought a symbol, counted from 1; the sizes of arguments have age 0.
    equal: symbols in the words of those that are read off arguments, as forward had them: what a backward learns
    later holds for its own sizes.
    """

    def __init__(self, **options: Any) -> None:
        self.age: dict[sympy.Symbol, int] = {}
        self.equal: dict[sympy.Symbol, sympy.Expr] = {}
        super().__init__(**options)

    def age_of(self, expr: Any) -> int:
        """The age of an expression is that of its youngest symbol."""
        return max((self.age.get(s, _youngest(s)) for s in getattr(expr, "free_symbols", ())), default=0)

    def with_replacements(self, expr: Any) -> Any:
        """`replace` that learns nothing: what one trace found out of sizes may contradict what another did."""
        while substitutions := {s: self.replacements[s] for s in expr.free_symbols if self.replacements.get(s, s) != s}:
            expr = expr.xreplace(substitutions)
        return expr

    def _get_user_frame(self) -> types.FrameType | None:
        """Who asked, for logs: torch's own search imports its exporter and Inductor first, for a fifth of a second."""
        return user_frame()

    def _set_replacement(self, a: sympy.Symbol, tgt: sympy.Expr, msg: str) -> None:
        if self.age_of(tgt) <= self.age_of(a):
            super()._set_replacement(a, tgt, msg)
        elif isinstance(tgt, sympy.Symbol):
            super()._set_replacement(tgt, a, msg)


def _youngest(symbol: sympy.Symbol) -> int:
    """The age of a symbol that no node brought: of arguments it is 0; what data decides on the way has no place."""
    return sys.maxsize if symbol.name.startswith("u") else 0


def assumptions_of(fakes: Sequence[Any], known_symbols: Collection[sympy.Symbol]) -> tuple[sympy.Basic, ...]:
    """The assumptions of the traces with these fakes so far about the sizes that are `known_symbols`."""
    numbers = [n for f in fakes for n in ((*f.shape, *f.stride()) if isinstance(f, torch.Tensor) else (f,))]
    env = next((n.node.shape_env for n in numbers if isinstance(n, torch.SymInt)), None)
    if env is None:
        return ()
    least = {s: env.var_to_range[s].lower for s in known_symbols if s in env.var_to_range}
    telling = {s: int(n) for s, n in least.items() if n.is_Integer and n >= (2 if s.is_positive else 0)}
    ranges = [sympy.Ge(s, n, evaluate=False) for s, n in telling.items()]
    relations = [g.expr for g in env.guards if g.expr is not sympy.true and g.expr.free_symbols <= set(known_symbols)]
    return tuple(dict.fromkeys((*ranges, *relations)))


class Session:
    """Where sizes have names, unless `dynamic` is False. rolls: a loop over a size is one node where it can be, from so
    many steps on; 0: none is.

    unrolled: why loops were traced step by step. stacking: the runs of saved tensors that are as long as a loop.
    """

    def __init__(self, dynamic: bool = True, rolls: int = 0) -> None:
        self.dynamic = dynamic
        self.env = Env(duck_shape=False)
        self.env.rolls = rolls
        self.unrolled: list[str] = []
        self.stacking: frozenset[int] = frozenset()
        self.mode = Fakes(shape_env=self.env, allow_non_fake_inputs=True)
        self.mode.cache_enabled = False  # symbols are a session's own: filling the cache takes longer than it saves
        self.named: list[tuple[str, Any]] = []
        self.returned: list[torch.Tensor] = []  # fakes of what opaque nodes returned
        self.moved = False

    def take_unrolled(self) -> list[str]:
        """Why loops were traced step by step since this was asked."""
        reasons, self.unrolled = self.unrolled, []
        return reasons

    @without_structured_logs()
    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake of `tensor` whose sizes are fresh symbols; reading its memory raises."""
        name = f"t{len(self.named)}"
        sizes = DimDynamic.DYNAMIC if self.dynamic else DimDynamic.STATIC
        context: Any = StatelessSymbolicContext(
            dynamic_sizes=[sizes] * tensor.dim(), dynamic_strides=[DimDynamic.INFER_STRIDE] * tensor.dim()
        )
        with torch.no_grad():
            fake = self.mode.from_tensor(_without_memory(tensor), source=LocalSource(name), symbolic_context=context)
        self.named.append((name, fake))
        return _guarded_memory(fake, tensor.requires_grad)

    def number(self, value: float) -> Any:
        """A fresh symbol for a number that was read from a tensor."""
        source = ConstantSource(f"d{len(self.named)}")
        if type(value) is int:
            symbol = self.env.create_symbol(value, source, DimDynamic.DYNAMIC, None, True, True)
            self.env.var_to_range[symbol] = ValueRanges(sympy.Integer(1), int_oo)
            symbolic: Any = self.env.create_symintnode(symbol, hint=value, source=source)
        else:
            symbol = self.env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
            symbolic = self.env.create_symfloatnode(symbol, hint=value, source=source)
        self.named.append((f"d{len(self.named)}", symbolic))
        self.returned.append(symbolic)
        self.env.age[symbolic.node.expr] = len(self.returned)
        return symbolic

    def fix_equalities(self) -> None:
        """Declares the equalities of sizes known by now as true of every later call."""
        self.env.equal = {s: self.env.replace(s) for s in self.env.replacements}

    def move_to(self, sizes: Mapping[sympy.Symbol, int]) -> None:
        """Traces from now on at these sizes: an opaque node's results have the sizes of the call at hand."""
        values = self.env.hints()
        values.update({s: sympy.Integer(n) for s, n in sizes.items() if s in values})
        equal = {s: e.xreplace(values) for s, e in self.env.equal.items() if s in values and not e.is_number}
        values.update({s: n for s, n in equal.items() if n.is_Integer})
        self.moved = True

    def with_current_sizes(self, sizes: Sequence[Any]) -> list[Any]:
        """`settled` sizes that speak of the sizes of the call at hand."""
        known_sizes = with_known_sizes(sizes)
        if not self.moved:
            return known_sizes
        values = self.env.hints()
        exprs = [n if isinstance(n, int) else n.node.expr for n in known_sizes]
        return [e if isinstance(e, int) else self.env.create_symintnode(e, hint=int(e.xreplace(values))) for e in exprs]

    def date_symbols_of(self, fake: torch.Tensor) -> None:
        """The symbols of a fake that an opaque node returned are younger than all others."""
        exprs = [n.node.expr for n in (*fake.shape, *fake.stride()) if not isinstance(n, int)]
        for symbol in sorted({s for e in exprs for s in e.free_symbols} - set(self.env.age), key=str):
            self.env.age[symbol] = len(self.returned)

    def conditions(self, known_symbols: Collection[sympy.Symbol], since: int = 0) -> tuple[sympy.Basic, ...]:
        """The assumptions of the traces about sizes, from guard number `since` on, over the symbols that are
        `known_symbols`."""
        symbols = set(known_symbols)
        guards = (g.expr for g in self.env.guards[since:])
        assumed = (e if e.free_symbols <= symbols else self.env.with_replacements(e) for e in guards)
        return tuple(dict.fromkeys(c for c in assumed if c is not sympy.true and c.free_symbols <= symbols))

    def fake_like(self, like: torch.Tensor, expanded: bool = False) -> torch.Tensor:
        """A fake gradient of a fake output: its shape, row-major, or every stride 0."""
        shape = self.with_current_sizes(like.shape)
        with self.mode, torch.no_grad():
            if expanded:
                fake = torch.empty((), dtype=like.dtype, device=like.device).expand(shape)
            else:
                fake = torch.empty(shape, dtype=like.dtype, device=like.device)
        return _guarded_memory(fake, False)

    def fake_again(self, fake: torch.Tensor) -> torch.Tensor:
        """The same metadata as a fresh fake: sizes that an earlier trace made constant are plain ints in it."""
        if fake.layout is not torch.strided:  # how many values it has, no fake of it says
            raise CaptureError(reason="it is given a tensor subclass, or one that is not strided")
        with self.mode, torch.no_grad():
            shape, strides = self.with_current_sizes(fake.shape), self.with_current_sizes(fake.stride())
            again = torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device)
        return _guarded_memory(again, fake.requires_grad)

    @contextmanager
    def at_lengths(self, lengths: Mapping[sympy.Symbol, int]) -> Iterator[dict[sympy.Basic, bool]]:
        """Within the block these sizes have such values; what Python was told of comparisons of them."""
        with attribute_within(self, "moved", True), self.env.at(lengths) as asked:
            yield asked

    def axes(self) -> dict[sympy.Symbol, int]:
        """Of each symbol that is a size of an argument, the axis."""
        tensors = [fake for _, fake in self.named if isinstance(fake, torch.Tensor)]
        sizes: list[tuple[Any, int]] = [(n, axis) for t in tensors for axis, n in enumerate(t.shape)]
        exprs = {n.node.expr: axis for n, axis in sizes if isinstance(n, torch.SymInt)}
        return {expr: axis for expr, axis in exprs.items() if expr.is_Symbol}

    def at_present(self, value: Any) -> Any:
        """A fake, or a symbolic number, at the present values of symbols."""
        if isinstance(value, torch.Tensor):
            return self.fake_again(value)
        return self.with_current_sizes([value])[0] if isinstance(value, torch.SymInt) else value

    def fake_permuted(self, like: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        """A fake gradient of a fake output: its shape, dense; `order` names its axes from outermost to innermost.

        ~axis: the stride along it is 0.
        """
        shape = self.with_current_sizes(like.shape)
        strides = strides_in_order(shape, order[::-1])
        with self.mode, torch.no_grad():
            fake = torch.empty_strided(shape, with_known_sizes(strides), dtype=like.dtype, device=like.device)
        return _guarded_memory(fake, False)

    @contextmanager
    def drop_unbacked_unless_returned(self, results: Callable[[], Any]) -> Iterator[None]:
        """Within the block a nested body runs: sizes that depend on data and are in no result are its own business."""
        before = list(self.env.pending_fresh_unbacked_symbols)
        try:
            yield
        except BaseException:  # nothing came of it: no result has them
            self.env.pending_fresh_unbacked_symbols[:] = before
            raise
        in_results = {s for t in tensors_in(results()) for n in (*t.shape, *t.stride()) for s in _symbols_in(n)}
        fresh = [s for s in self.env.pending_fresh_unbacked_symbols if s in before or s in in_results]
        self.env.pending_fresh_unbacked_symbols[:] = fresh

    def integer(self, value: int) -> Any:
        """A fresh symbolic integer with the hint `value`."""
        source = ConstantSource(f"i{len(self.named)}")
        symint = self.env.create_unspecified_symint_and_symbol(value, source, DimDynamic.DYNAMIC)
        self.named.append((source.source_name if hasattr(source, "source_name") else f"i{len(self.named)}", symint))
        return symint

    def trace(
        self,
        fn: Callable[..., Any],
        fakes: Sequence[Any],
        reads: Reads | None = None,
        from_source: bool = True,
        tape: Tape | None = None,
    ) -> Trace:
        """The ATen graph of `fn(*fakes)`. Tensors from outside become extra placeholders, each found in `reads`.

        from_source: every operation has to come from a line of Python; not so where a captured graph is batched.
        tape: the nested calls of a run of `fn` on real tensors; without one, an opaque call raises OpaqueMet.
        """
        snapshot = Snapshot(reads)
        try:
            # Within this thread: the engine's thread of a device may be waiting for the lock that is held here.
            with torch.autograd.set_multithreading_enabled(False):
                recording = _Recording(self, fakes, reads, tape, snapshot)
                trace = recording.trace_of(recording.graph_of(fn), from_source)
        except CaptureAgain as again:
            # The caches of the user's that were filled stay so: the trace begins again, and finds them full.
            if not again.filled:
                snapshot.restore()
            raise
        except BaseException:
            snapshot.restore()
            raise
        # All is put back as it was before the method ran; what had to be put back, no graph would do at each call.
        if (changed := snapshot.restore()) is not None and reads is not None:
            # It came to functions that were not known when all was copied: once more, with these known, too.
            if snapshot.is_partial:
                raise CaptureAgain(snapshot, filled=False)
            reads.foreign.failures += 1
        if changed is not None:
            raise CaptureError(reason=f"it changes what it reaches by the {changed}")
        return trace


class _Recording:
    """One run of a method under the tracer: what is watched while it runs, and the checks of the graph that it left."""

    def __init__(
        self, session: Session, fakes: Sequence[Any], reads: Reads | None, tape: Tape | None, snapshot: Snapshot
    ) -> None:
        self.session, self.fakes, self.reads, self.snapshot = session, fakes, reads, snapshot
        self.answers_data = tape is not None and bool(tape.data)
        # The present values, before the method runs: `_refuse_changed_reads` compares what it leaves with them.
        self.before = reads.by_path() if reads is not None else {}
        self.crossing = Crossing(reads, snapshot, self.before) if reads is not None and reads.calls_unknown else None
        self.leaves, self.unmarked = OwnLeaves(fakes), TensorMarks(fakes)
        generators = [] if reads is None else [get() for get in reads.generators]
        self.calls = Calls(session, tape, self.leaves, generators)

    def graph_of(self, fn: Callable[..., Any]) -> torch.fx.GraphModule:
        """The graph as make_fx recorded it."""
        cache = torch.is_autocast_cache_enabled()
        callees = list(self.reads.callees.values()) if self.reads is not None else []
        with (
            # Fakes are made by one thread at a time; the session's own mode makes them.
            capture_lock, self.session.mode, torch.no_grad(), symbolic_python(), sizes_divided_by_floats(),
            # Every operation and call is seen: nested classes, the lines of operations, compiled code of extensions.
            watched_by(self.calls), _Provenance(self.leaves),
            callees_as_nodes(callees, lambda: _origin_of(user_frame())), without_hooks(),
            through_compiled_functions(), variables_as_detached(), storages_watched(_refuse_resize),
            # What torch says of a run on fakes is not for the user, and takes time.
            without_anomaly_mode(), without_logs_of_failures(), without_structured_logs(), without_text(),
        ):  # fmt: skip
            try:
                # The cache holds casts of real weights, and would hold those of fakes after the trace.
                torch.set_autocast_cache_enabled(False)
                traced = make_fx(self._body(fn), tracing_mode="real", _allow_non_fake_inputs=True)
                gm = _run_refusing_effects(self.reads, self.crossing, lambda: traced(*self.fakes))
            finally:
                torch.set_autocast_cache_enabled(cache)
                self.session.mode.memories.clear()  # they hold no data, but a count of all tensors would find them
        if self.calls.error is not None:  # the method may have caught it
            raise self.calls.error.without_frames()
        return gm  # type: ignore[no-any-return]

    def _body(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def body(*inputs: Any) -> Any:
            recorder.begin_recording()
            with DataReads(self.calls.read_data) if self.answers_data else nullcontext():
                returned = fn(*inputs)
            recorder.end_recording()
            # Here, and not after the trace: make_fx keeps the nodes of what is returned, not the tensors.
            if (why := self.unmarked.why_not(returned)) is not None:
                raise CaptureError(reason=why)
            return returned

        return body

    def trace_of(self, gm: torch.fx.GraphModule, from_source: bool) -> Trace:
        """The graph made regular and checked. The order of the checks decides which reason the user reads."""
        # Spellings that depend on the version of torch, or on forward mode, go first: checks know one of each.
        normalize_detach(gm.graph)
        without_zeros(gm.graph)
        split_long_sums(gm.graph)
        # What no graph may hold, with the user's line where there is one.
        _refuse_data_dependence(gm)
        if from_source:
            _refuse_unseen_calls(gm)
        _refuse_objects(gm)
        # Functions of other packages that ran are reads from here on; only then can a tensor of theirs be found.
        if self.crossing is not None:
            self.crossing.leave()
        lifted = _lift_captured(gm, self.reads)
        # Writes are looked for last: which tensors come from outside is known since they were lifted.
        _refuse_outside_writes(gm, len(lifted))
        _refuse_late_writes(gm)
        self._refuse_changed_reads()
        _settle_opaque(gm, self.calls.nodes)
        return Trace(gm, list(self.fakes), lifted, opaque=self.calls.nodes, inlines=self.calls.inlines)

    def _refuse_changed_reads(self) -> None:
        """A method that changes what it also reads would find it changed at the next call, and the graph would not."""
        if self.reads is None or (changed := self.reads.changed(self.before)) is None:
            return
        if self.snapshot.is_partial:
            raise CaptureAgain(self.snapshot, filled=False)
        self.reads.foreign.failures += 1
        raise CaptureError(reason=f"it changes the {changed}, which it also reads")


def _run_refusing_effects(reads: Reads | None, crossing: Crossing | None, run: Callable[[], Any]) -> Any:
    """Returns the result of `run`; raises CaptureError where the method does what a graph would lose."""
    try:
        effects = reads.uncertain_effects() if reads is not None else ()
        with watching_effects(effects, crossing.enter if crossing is not None else None):
            return run()
    except Reached as reached:
        raise CaptureError(reason=reached.effect.reason, where=reached.effect.where) from None


def _symbols_in(size: Any) -> set[sympy.Symbol]:
    return set() if isinstance(size, int) else set(size.node.expr.free_symbols)


def with_known_sizes(sizes: Sequence[Any]) -> list[Any]:
    """Sizes as ints where the session has learnt their value, else as the symbols that they are."""
    return [s if isinstance(s, int) or not s.node.expr.is_number else int(s.node.expr) for s in sizes]


def is_capturing() -> bool:
    """True if Python code runs under a tracer (ours or another), so that no capture may begin."""
    return bool(dispatch_modes()) or bool(jit_tracing())


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same metadata at storage offset 0: where a view begins must not decide which graph is used."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _guarded_memory(fake: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    without_address(fake)
    return fake.requires_grad_() if requires_grad else fake


# ------------------------------------------------------------------ where something happened


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_DETACH = (torch.detach, torch.Tensor.detach)
_FRESH = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__)
"""Functions that return memory of their own in eager, and a view of something in between where Python takes it
apart."""


_traced = threading.local()


def operations_traced() -> int:
    """The number of operations that all captures of this thread have recorded so far, failed ones as well: their
    cost."""
    return getattr(_traced, "operations", 0)


def operations_kept() -> int:
    """The same without those that came into no graph: the traces at small lengths from which a loop was rolled."""
    return operations_traced() - getattr(_traced, "dropped", 0)


def drop_operations(count: int) -> None:
    """So many of them came into no graph."""
    _traced.dropped = getattr(_traced, "dropped", 0) + count


class _Provenance(TorchFunctionMode):
    """Marks every node with the user's line that caused it: meta["fusegrad_origin"] = (name, where, line)."""

    def __init__(self, leaves: OwnLeaves) -> None:
        super().__init__()
        self.leaves = leaves

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        proxy_mode = get_proxy_mode()
        graph = getattr(getattr(proxy_mode, "tracer", None), "graph", None)
        if graph is None:  # what runs by chance before the graph begins: a generator that is finalised, say
            return func(*args, **(kwargs or {}))
        kwargs = {k: v for k, v in (kwargs or {}).items() if k != "generator" or v is not None}  # sizes are ints there
        _refuse_write(func, args, kwargs)
        if (why := self.leaves.why_not(func, args, kwargs) or why_not_in_its_mode(func, args)) is not None:
            raise CaptureError(reason=why, where=user_line())
        _refuse_generator((*args, *kwargs.values()))
        last = newest_node(graph)
        args = tuple(map(_as_traced, args)) if getattr(func, "__name__", "") in _TELLS else args
        answer = _answer_about_history(func, args)
        result: Any = self._run_operation(func, args, kwargs) if answer is None else answer
        if func is torch.autograd.grad and not keeps_graph(*args, **kwargs):
            result = _without_history(result, graph, _weights(*args, **kwargs))
        if func == GET_GRAD and isinstance(result, torch.Tensor):
            (result,) = _without_history([result], graph, ())
        if func in _FRESH and isinstance(result, torch.Tensor) and result._is_view():
            result = _own_memory_for_view(result, newest_node(graph))
        if nodes := list(nodes_after(last, graph)):
            _traced.operations = operations_traced() + len(nodes)
            origin = _origin_override.get() or _origin_of(user_frame())
            for node in nodes:
                node.meta.setdefault("fusegrad_origin", origin)
            if func in _DETACH or func == _DATA:
                nodes[-1].meta[CUT] = True
            if func == _DATA:
                nodes[-1].meta[UNVERSIONED] = True
        return result

    def _run_operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, watching, followed_history = operator_name(func), watcher(), history()
        if func is torch.Tensor.__getitem__ and (parts := _indexed_as_in_eager(*args)) is not None:
            result = parts
        else:
            result = func(*args, **kwargs) if name is None or watching is None else watching(name, func, args, kwargs)
        if followed_history is not None:
            followed_history.note_result(result)
        return result


def _indexed_as_in_eager(x: torch.Tensor, index: Any) -> torch.Tensor | None:
    """x[:, None] without a slice that takes all of an axis: eager makes none, torch does where a length is a symbol.

    Its derivative would be a copy that lies as `x` does, where eager has none. None for any other index.
    """
    items = index if isinstance(index, tuple) else (index,)
    if _WHOLE not in [i for i in items if type(i) is slice] or not all(map(_is_basic, items)):
        return None
    dim, left, result = 0, x.dim() - sum(type(i) in (int, slice) for i in items), x
    if left < 0 or items.count(Ellipsis) > 1:
        return None
    for item in items:
        if type(item) is int:
            result = result.select(dim, item)
            continue
        if item is None:
            result = result.unsqueeze(dim)
        elif item is not Ellipsis and item != _WHOLE:
            result = _sliced(result, dim, item)
        dim += left if item is Ellipsis else 1
    return torch.ops.aten.alias.default(x) if result is x else result


_WHOLE = slice(None)


def _is_basic(item: Any) -> bool:
    return item is None or item is Ellipsis or type(item) in (int, slice)


def _sliced(x: torch.Tensor, dim: int, item: slice) -> torch.Tensor:
    start, step = 0 if item.start is None else item.start, 1 if item.step is None else item.step
    stop = sys.maxsize if item.stop is None else item.stop
    return torch.ops.aten.slice.Tensor(x, dim, start, stop, step)  # type: ignore[no-any-return]


_TELLS = frozenset(
    "item tolist numpy equal is_nonzero __array__ __bool__ __int__ __float__ __index__ __complex__ __contains__ "
    "__format__ __repr__ __dlpack__".split()
)
"""By which Python is told what is in a tensor."""


def _as_traced(value: Any) -> Any:
    """A tensor from outside as one that is traced: Python is told what it holds at each call."""
    is_outside = isinstance(value, torch.Tensor) and not is_fake(value)
    return torch.ops.aten.alias.default(value) if is_outside else value


def _own_memory_for_view(result: torch.Tensor, node: torch.fx.Node) -> torch.Tensor:
    """Instead of the view that a decomposition ends with, what eager's own kernel ends with: memory of its own."""
    if node.target is not torch.ops.aten.view.default or node.users or result._base is None:
        return result
    fresh: torch.Tensor = torch.ops.aten._unsafe_view.default(result._base, result.shape)
    return fresh


def is_a_view(fake: torch.Tensor) -> bool:
    """True if a tensor in another's memory is a view to autograd, as the result of detach() is not.

    Fakes made in inference mode are views of nothing; what they stand for may be.
    """
    tracer: Any = getattr(get_proxy_mode(), "tracer", None)
    if not fake.is_inference() or tracer is None:
        return fake._is_view()
    node = tracer.unwrap_proxy(fake).node
    while not node.meta.get(CUT) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return not node.meta.get(CUT)


def _without_history(gradients: Sequence[Any], graph: torch.fx.Graph, weights: Sequence[Any]) -> tuple[Any, ...]:
    """The gradients as `autograd.grad` returns them in eager unless it is asked to create a graph; a weight itself
    stays what it is.

    So does a dual number, which has no history: its tangent goes on, and would not through a detach.
    """
    last = newest_node(graph)
    cut = tuple(g if g is None or any(g is w for w in weights) or is_dual(g) else g.detach() for g in gradients)
    for node in nodes_after(last, graph):
        node.meta[CUT] = node.meta[UNRECORDED] = True
    return cut


def _weights(outputs: Any, inputs: Any, grad_outputs: Any = None, *_: Any, **__: Any) -> Sequence[Any]:
    """The gradients that `torch.autograd.grad` with these arguments starts from."""
    return (grad_outputs,) if isinstance(grad_outputs, torch.Tensor) else grad_outputs or ()


def _refuse_write(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """A tensor from outside is no fake: a write to it would happen while tracing. Elements that share memory are, for
    what makes a graph without writes, the sum of what is written to each."""
    target = kwargs.get("out", args[0] if args and _is_in_place(getattr(func, "__name__", "")) else None)
    if not isinstance(target, torch.Tensor) or user_frame() is None:
        return
    if not is_fake(target):
        raise CaptureError(reason="it writes to a tensor that is no argument", where=user_line())
    is_shared = getattr(func, "__name__", "") in _SHARED and target.layout is torch.strided
    sides = zip(target.shape, target.stride(), strict=True) if is_shared else ()
    if any(type(stride) is int and stride == 0 and not _is_one(size) for size, stride in sides):
        reason = "it writes to an expanded tensor, whose elements share memory"
        raise CaptureError(reason=reason, where=user_line())


_SHARED = frozenset("__setitem__ fill_ zero_ index_put_ masked_fill_ index_fill_ fill_diagonal_ tril_ triu_".split())
"""What eager writes to elements that share memory; anything else raises."""


def _is_one(size: Any) -> bool:
    return type(size) is int and size == 1


def _refuse_resize() -> None:
    raise CaptureError(reason=RESIZES, where=user_line())


_DRAWS = "it draws from a torch.Generator, whose state no graph has"


def _refuse_generator(arguments: Sequence[Any]) -> None:
    """A generator has a state of its own, which is another one at the next call."""
    if any(isinstance(value, torch.Generator) for value in arguments) and user_frame() is not None:
        raise CaptureError(reason=_DRAWS, where=user_line())


_HISTORY = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def _answer_about_history(func: Any, args: Sequence[Any]) -> bool | None:
    """The answer to the user's question whether autograd follows a tensor, which is one per call."""
    followed_history = history() if func == _HISTORY else None
    if followed_history is None or not _is_asked_by_the_user():
        return None
    return followed_history.ask(args[0], CUT, user_line())


def _is_asked_by_the_user() -> bool:
    """True if the operation at hand comes from the user's code, not from ours."""
    frame: types.FrameType | None = sys._getframe(3)  # behind `__torch_function__`
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)


def _is_in_place(name: str) -> bool:
    return name in ("__setitem__", "__delitem__") or (name.startswith("__i") and name not in _QUESTIONS) or (
        name.endswith("_") and not name.endswith("__")
    )  # fmt: skip


_origin_override: ContextVar[tuple[str | None, str, str] | None] = ContextVar("fusegrad_speaking", default=None)


def origin_overridden(origin: tuple[str | None, str, str] | None) -> AbstractContextManager[Any]:
    """Within the block, operations come from this (name, place, line): a graph of before is run again."""
    return variable_within(_origin_override, origin)


_QUESTIONS = ("__invert__", "__int__", "__index__", "__iter__", "__init__")
_ASSIGNMENT = re.compile(r"^\s*([A-Za-z_]\w*)\s*(?::[^=]+)?=[^=]")


def _origin_of(frame: types.FrameType | None) -> tuple[str | None, str, str] | None:
    if frame is None:
        return None
    filename, lineno = frame.f_code.co_filename, frame.f_lineno
    line = linecache.getline(filename, lineno).strip()
    assigned = _ASSIGNMENT.match(line)
    return (assigned.group(1) if assigned else None, f"{filename}:{lineno}", line)


# ------------------------------------------------------------------ nested calls stay one node
class OpaqueCallError(CaptureError):
    """The method calls what must not be captured: it can be, once its calls were recorded on real tensors.

    `callee` is the class, or the name of an operator; `why` the reason. Internal, as CaptureError is.
    """

    def __init__(self, callee: Any, why: Why, location: str) -> None:
        super().__init__(reason=reason_of_caller(callee, why), where=location)
        self.callee, self.why, self.where = callee, why, location


class DataReadError(OpaqueCallError):
    """The method asks what is in a tensor: it can be captured, once the answers of a run on real tensors are known."""

    def __init__(self, reason: str, location: str) -> None:
        CaptureError.__init__(self, reason=reason, where=location)
        self.callee, self.why, self.where = "data", Why(reason, True), location


def as_data_read_error(error: CaptureError, tape: Tape | None) -> CaptureError:
    """The error itself, or that the method asks what is in a tensor, where no answers are on the tape yet."""
    is_final = isinstance(error, OpaqueCallError) or (tape is not None and tape.data)
    asking = not is_final and code_of(error.facts["reason"]) in ("FG010", "FG011")
    return DataReadError(error.facts["reason"], error.facts["where"]) if asking else error


class Calls:
    """While a method is traced, nested calls become `call` nodes, opaque ones their own kind; see tracer/opaque/.

    Only with grad mode off: where autograd records (derivatives), it records the nested Function's own backward.
    """

    def __init__(self, session: Session, tape: Tape | None, leaves: OwnLeaves, generators: Sequence[Any]) -> None:
        self.session, self.tape, self.leaves = session, tape, leaves
        self.generators = generators  # that a segment may be given: arguments
        self.nodes: list[OpaqueNode] = []
        self.depth = 0  # within a nested body that runs on fakes
        self.inlined = 0  # within a nested body that is traced itself
        self.inlines = False  # whether there was one
        self.error: CaptureError | None = None  # the method may catch it
        self.follows = False  # the body is captured in grad mode only to see which results need a gradient

    def __call__(self, callee: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._route(callee, apply, args, kwargs)
        except CaptureError as error:
            if not self.depth and self.error is None:
                self.error = error.without_frames()
            raise

    def _route(self, callee: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Where autograd records the nested body itself, or fakes run through it, there is nothing to decide.
        mode, why = get_proxy_mode(), why_opaque(callee)
        recorded = torch.is_grad_enabled() and not (self.follows and why is not None)
        if self.depth or recorded or transforms_active() or mode is None or _is_of_a_transform(callee):
            return self._trace_inline(callee, apply, args, kwargs, why)
        # Taken off the tape whatever becomes of the call: the next one of its kind is another.
        taped = self.tape.take(callee) if self.tape is not None else None
        if why is None and kwargs and not isinstance(callee, str):
            return self._trace_inline(callee, apply, args, kwargs, None)
        if why is None:
            try:
                if isinstance(callee, str):
                    return self._operator(apply, args, kwargs, mode)
                return self._call_node(callee, args)
            except Exception as error:
                why = self._why_no_fake_run(callee, error)
        return self._opaque_node(callee, apply, args, kwargs, taped, why)

    def read_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that says what is in a tensor: a node of its own, unless a nested body asks."""
        if self.depth or self.inlined or get_proxy_mode() is None or self.tape is None:
            return func(*args, **kwargs)
        taped, why = self.tape.take(str(func)), Why("says what is in a tensor", True)
        if taped is None or sum(node.of_data for node in self.nodes) >= QUESTIONS:
            raise CaptureError(reason=f"it reads the data of a tensor too often (`{func}`)", where=user_line())
        return self._opaque_node(str(func), func, args, kwargs, taped, why)

    def note_unseen_call(self, callee: Any) -> None:
        """Only where autograd records the nested backward by itself is there nothing to decide."""
        if not torch.is_grad_enabled() or why_opaque(callee) is not None:
            name = name_of(callee)
            reason = f"it calls `{name}.apply` by a name that was bound before, which this torch does not show"
            raise CaptureError(reason=reason, where=user_line())

    def _trace_inline(self, callee: Any, apply: Any, args: Any, kwargs: Any, why: Why | None) -> Any:
        """The body itself is traced, or runs on fakes within another body."""
        if why is not None and self.depth:
            raise OpaqueCallError(callee, why, user_line())
        if why is not None:
            raise _nested_opaque_error(callee, why)
        self.inlined += 1
        self.inlines = True
        try:
            if isinstance(callee, str):
                return apply(*args, **kwargs)
            return _apply_marking_copies(callee, args, kwargs)
        finally:
            self.inlined -= 1

    def _call_node(self, cls: type, args: tuple[Any, ...]) -> Any:
        self.depth += 1
        try:
            with disable_proxy_modes_tracing(), self.session.drop_unbacked_unless_returned(lambda: result):
                result = plain(cls, *args)
        finally:
            self.depth -= 1
        needs = tuple(i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.requires_grad)
        return add_call_node(
            function_of_call_node(cls, needs), args, {}, result, cls.__name__, _origin_of(user_frame())
        )

    def _operator(self, apply: Any, args: Any, kwargs: Any, mode: Any) -> Any:
        """A custom operator as one operation; nothing is left in the graph where it has no fake implementation."""
        graph = mode.tracer.graph
        last = newest_node(graph)
        try:
            if has_own_autograd(apply):
                return operator_node(apply, args, kwargs, _origin_of(user_frame()))
            return apply(*args, **kwargs)
        except Exception:
            for node in reversed(list(nodes_after(last, graph))):
                graph.erase_node(node)
            raise

    def _why_no_fake_run(self, callee: Any, error: Exception) -> Why:
        """The reason why the body cannot run on fakes; raises the error where that is no reason to call it as it is."""
        if isinstance(error, Reached):
            resume_watch()
            return Why(f"is opaque: {error.effect.reason} ({error.effect.where})")
        if isinstance(error, OpaqueCallError):
            return Why(error.facts["reason"].replace("it calls", "calls", 1), error.why.declared)
        if isinstance(callee, str) and not any(mark in str(error) + type(error).__name__ for mark in _NO_FAKE):
            raise error
        if not isinstance(callee, str) and declarations(callee, None)["forward"].value:
            raise error
        if isinstance(callee, str):
            return Why("has no fake implementation", True)
        place = where_raised(error)
        return Why(f"cannot be traced: {reason_of(error)} ({place})")

    def _opaque_node(self, callee: Any, apply: Any, args: Any, kwargs: Any, taped: Taped | None, why: Why) -> Any:
        location = user_line()
        odd = None
        if isinstance(callee, Segment):
            odd = self.leaves.tracked_type(tensors_in(args)) or _type_of_no_constant(args, self.generators)
        if odd is not None:
            callee.apart |= {name for name, value in args[0].items() if _type_of_no_constant(value, self.generators)}
            reason = f"{reason_of_caller(callee, why)}, given a {odd}"
            raise CaptureError(reason=reason, where=location).because_of(callee)
        if self.inlined:
            raise _nested_opaque_error(callee, why)
        if taped is None:
            raise OpaqueCallError(callee, why, location)
        if taped.fault is not None:
            if isinstance(callee, Segment):
                names, *_ = pytree.tree_unflatten(taped.leaves, taped.tree)
                callee.apart |= {name for name, value in names.items() if not can_be_handed_on(value)}
            reason = f"{reason_of_caller(callee, why)} and {taped.fault}"
            raise CaptureError(reason=reason, where=location).because_of(callee)
        # Fakes of what the real call returned go on in the place of its results, with sizes of their own.
        node = OpaqueNode(callee, apply, args, kwargs, taped, why, location)
        tensors = tensors_in((args, kwargs))
        with disable_proxy_modes_tracing():
            node.leaves = self._stand_ins(taped, tensors, node.of_data)
            contents = tuple(torch.empty_like(tensors[i]) for i in node.written_inputs)
        node.bind_results(self.session, taped.leaves)
        # The node stands in the graph before its writes: they read its results.
        self.nodes.append(node)
        taped.opaque = True
        traced = tuple(leaf for leaf in node.leaves if isinstance(leaf, TRACED))
        name, results = re.sub(r"\W+", "_", node.name), (*traced, *contents)
        add_call_node(node.target(), node.inputs, {}, results, name, _origin_of(user_frame()))
        self._write_back(node, tensors, contents, taped)
        return pytree.tree_unflatten(node.leaves, taped.tree)

    @staticmethod
    def _write_back(
        node: OpaqueNode, tensors: Sequence[torch.Tensor], contents: Sequence[torch.Tensor], taped: Taped
    ) -> None:
        """The graph writes what the body wrote; unseen by autograd what the body wrote so."""
        mode = get_proxy_mode()
        with torch.no_grad():
            for i, content in zip(node.written_inputs, contents, strict=True):
                tensors[i].copy_(content)
                if mode is not None and i in taped.unversioned:
                    newest_node(mode.tracer.graph).meta[UNVERSIONED] = True

    def _stand_ins(self, taped: Taped, tensors: Sequence[torch.Tensor], of_data: bool) -> list[Any]:
        """Fakes of the results, their sizes fresh symbols; a result that shows an argument is a view of its fake."""
        stand_ins: list[Any] = []
        for place, (leaf, alias) in enumerate(zip(taped.leaves, taped.aliases, strict=True)):
            if alias is not None:
                leaf = share_argument(alias[0], tensors[alias[1]])
            elif isinstance(leaf, torch.Tensor):
                fake = self.session.fake(leaf)
                leaf = fake.view_as(fake) if place in taped.views else fake
                if self.follows and leaf.is_floating_point():
                    leaf.requires_grad_(any(t.requires_grad for t in tensors))
                self.session.returned.append(leaf)
                self.session.date_symbols_of(leaf)
            elif of_data and is_symbolic(leaf):
                leaf = self.session.number(leaf)
            stand_ins.append(leaf)
        return stand_ins


def _apply_marking_copies(cls: type, args: Any, kwargs: Any) -> Any:
    """The nested class itself; the `detach`es with which autograd keeps what it saves belong to the call's line."""
    mode = get_proxy_mode()
    if mode is None:
        return plain(cls, *args, **kwargs)
    last = newest_node(mode.tracer.graph)
    result = plain(cls, *args, **kwargs)
    for node in nodes_after(last, mode.tracer.graph):
        if node.target in DETACHES:
            node.meta.setdefault("fusegrad_origin", _origin_of(user_frame()))
    return result


def _type_of_no_constant(args: Any, generators: Sequence[Any]) -> str | None:
    """The type of what a node cannot be given: each call has one of its own. generators: those that each call has."""
    lasting = (*TRACED, *SCALARS, type, types.ModuleType, types.BuiltinFunctionType, torch.nn.Module, enum.Enum, Handle)
    odd = (v for v in pytree.tree_leaves(args) if not (isinstance(v, lasting) or any(v is g for g in generators)))
    refused = (v for v in odd if not (isinstance(v, types.FunctionType) or is_a_value(v)) or holds_fakes(v))
    return next((type(v).__qualname__ for v in refused), None)


def _is_of_a_transform(callee: Any) -> bool:
    """True if a class is one that torch.func makes of another, for one call."""
    return getattr(callee, "__module__", "").startswith("torch._functorch.")


def _nested_opaque_error(callee: Any, why: Why) -> CaptureError:
    reason = f"it calls `{name_of(callee)}` within something that is traced whole, which {why.reason}"
    return CaptureError(reason=reason, where=user_line()).because_of(callee)


_NO_FAKE = ("UnsupportedOperatorException", "no fake impl", "'Meta' backend", "fake impl")
_REASONS = (
    ("GuardOnDataDependentSymNode", "its control flow depends on the data of a tensor"),
    ("DataDependentOutputException", "an operation's result in Python depends on the data of a tensor"),
    ("PendingUnbackedSymbolNotFound", "sizes in it depend on the data of a tensor"),
    (".numpy() is not supported", "it leaves torch: a tensor is turned into a numpy array"),
    ("Cannot access data pointer", "it reads the memory address of a tensor"),
    ("data pointer", "it reads the memory address of a tensor"),
    ("mutable data ptr", "it reads the memory address of a tensor"),
    ("__array__", "it leaves torch: a tensor is turned into a numpy array"),
    ("loop of ufunc does not support argument", "it leaves torch: numpy computes with the size of a tensor"),
    ("AttributeError: 'SymInt' object has no attribute", "it leaves torch: numpy computes with the size of a tensor"),
    ("AttributeError: 'SymFloat' object has no attribute", "it leaves torch: numpy computes with the size of a tensor"),
)
_DEPENDS = ("its control flow depends on the data of a tensor", "an operation's result in Python depends on the data")
_DISTRIBUTIONS = os.path.join(TORCH, "distributions", "")


_PLACE_IN_TORCH = re.compile(r"^\S+\.(?:cpp|h|cu):\d+:? *| *\(Triggered internally at [^)]*\)")
"""Where an error was raised, on the machine that torch was built on."""


def reason_of(error: BaseException) -> str:
    """A failed capture in one line."""
    if isinstance(error, CompiledCallError):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    known_reason = next((reason for mark, reason in _REASONS if mark in text), None)
    if known_reason is not None and known_reason.startswith(_DEPENDS) and any(
        f.filename.startswith(_DISTRIBUTIONS) for f in traceback.extract_tb(error.__traceback__)
    ):
        return "a distribution of torch looks at its parameters"
    first = _PLACE_IN_TORCH.sub("", str(error).strip()).partition("\n")[0].strip()
    return known_reason or (f"{type(error).__name__}: {first}" if first else type(error).__name__)


_calls: dict[tuple[type, tuple[int, ...]], Callable[..., Any]] = {}


def function_of_call_node(cls: type, needs: tuple[int, ...] = ()) -> Callable[..., Any]:
    """The function that a `call` node runs: the same object for the same class, so that nodes compare equal.

    needs: which arguments required grad when the call was captured, as the class may ask (`ctx.needs_input_grad`).
    """
    if (cls, needs) not in _calls:

        def call(*args: Any) -> Any:
            return cls.apply(*_requiring_grad_as_captured(args, needs))  # type: ignore[attr-defined]

        call.__name__ = call.__qualname__ = f"call_{cls.__name__}"
        call.fusegrad_call, call.fusegrad_needs = cls, needs  # type: ignore[attr-defined]
        _calls[cls, needs] = call
    return _calls[cls, needs]


def _requiring_grad_as_captured(args: tuple[Any, ...], needs: tuple[int, ...]) -> Sequence[Any]:
    """The arguments, requiring grad where they did: not so at the bottom of torch.func, which passes plain tensors.

    Where a graph is recorded or a transform is active they say themselves what is differentiated.
    """
    if not needs or torch.is_grad_enabled() or transforms_active():
        return args
    plain = {i for i in needs if not args[i].requires_grad}
    return [a.detach().requires_grad_() if i in plain else a for i, a in enumerate(args)]


# ------------------------------------------------------------------ after the trace
def _refuse_objects(gm: torch.fx.GraphModule) -> None:
    """Refuses objects with a state (generators, objects of scripts): a graph would hold the present one for good."""
    for node in gm.graph.nodes:
        operands = [getattr(gm, node.target, None)] if node.op == "get_attr" else [*node.args, *node.kwargs.values()]
        if any(isinstance(value, torch.Generator | torch.ScriptObject) for value in operands):
            raise CaptureError(reason=_why_no_object(node, operands), where=_place_of(node, *node.users))


def _place_of(*nodes: torch.fx.Node) -> str:
    """`file:line` of the first of these nodes that has one."""
    return next((origin[1] for n in nodes if (origin := n.meta.get("fusegrad_origin"))), "unknown")


def _why_no_object(node: torch.fx.Node, operands: Sequence[Any]) -> str:
    if any(isinstance(value, torch.Generator) for value in operands):
        return _DRAWS
    if any(communicates(n.target) for n in (node, *node.users)):
        return f"it {COMMUNICATES}"
    return "it hands on an object of a script, whose state no graph has"


def _lift_captured(gm: torch.fx.GraphModule, reads: Reads | None) -> list[torch.Tensor]:
    """Tensors from outside become placeholders at the end. A tensor made during the trace stays a constant."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    anchor = placeholders[-1] if placeholders else None
    lifted: list[torch.Tensor] = []
    nodes: dict[int, torch.fx.Node] = {}
    for node in [n for n in gm.graph.nodes if n.op == "get_attr"]:
        tensor = getattr(gm, node.target, None)
        if not isinstance(tensor, torch.Tensor) or _is_made_in_trace(node):
            continue
        if reads is not None and reads.tensor_path(tensor) is None:
            shape = tuple(tensor.shape)
            raise CaptureError(reason=f"it reads a tensor {shape} that cannot be found again on the next call")
        if id(tensor) not in nodes:
            insert = (
                gm.graph.inserting_after(anchor) if anchor else gm.graph.inserting_before(next(iter(gm.graph.nodes)))
            )
            with insert:
                anchor = nodes[id(tensor)] = gm.graph.placeholder(f"captured_{len(lifted)}")
            anchor.meta["val"] = node.meta.get("val")
            lifted.append(tensor)
        node.replace_all_uses_with(nodes[id(tensor)])
        gm.graph.erase_node(node)
    gm.recompile()
    return lifted


def _is_made_in_trace(node: torch.fx.Node) -> bool:
    return all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)


_DATA_READS = {"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero"}


def _refuse_data_dependence(gm: torch.fx.GraphModule) -> None:
    """`.item()` used as a number replays right, but a promise of `is_traceable` excludes it: refused with its line."""
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.name in _DATA_READS:
            reason = f"it reads the data of a tensor (`{schema.name.split('::')[1]}`)"
            raise CaptureError(reason=reason, where=_place_of(node))


def _refuse_unseen_calls(gm: torch.fx.GraphModule) -> None:
    """Operations that compiled code made behind Python's back: a backward that it brings would be lost."""
    stray = stray_node(gm)
    if stray is not None:
        reason = f"it calls compiled code (its `{stray.target}`) in a way that the source does not show"
        raise CaptureError(reason=reason)


def _refuse_outside_writes(gm: torch.fx.GraphModule, lifted: int) -> None:
    """A write to a tensor that is no argument has to happen once a call, in the user's own body."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    cached = [n for n in gm.graph.nodes if is_cached(getattr(n.target, "fusegrad_call", None))]
    write = _first_write(gm, [*placeholders[len(placeholders) - lifted :], *cached])
    if write is not None:
        raise CaptureError(reason="it writes to a tensor that is no argument", where=_place_of(write))


def _refuse_late_writes(gm: torch.fx.GraphModule) -> None:
    """A view made while the grad mode was off, and written to when it is on: where that is recorded, eager raises."""
    views: set[torch.fx.Node] = set()
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not any(r.alias_info is not None for r in schema.returns):
            continue
        targets = [a for a in node.all_input_nodes if _writes(schema, node, a)]
        if any(a in views for a in targets) and not node.meta.get(UNRECORDED):
            reason = "it writes to a view that it made while the grad mode was off"
            raise CaptureError(reason=reason, where=_place_of(node))
        if any(a in views for a in node.all_input_nodes) or (not targets and _is_unrecorded_view(node)):
            views.add(node)


def _is_unrecorded_view(node: torch.fx.Node) -> bool:
    """True if a view was made while the grad mode was off; not so one in which memory is made, as by `empty_like`."""
    shows = any(a.op == "placeholder" or a.all_input_nodes for a in node.all_input_nodes)
    detached = node.meta.get(CUT) or node.target in DETACHES
    return shows and not detached and bool(node.meta.get(UNRECORDED))


def _settle_opaque(gm: torch.fx.GraphModule, opaque: Sequence[OpaqueNode]) -> None:
    """Checks opaque nodes against the rest of the graph: none may share memory with what is written to."""
    if not opaque:
        return
    writes = any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in gm.graph.nodes)
    for node in opaque:
        node.copies = writes
        if writes and any(node.aliases):
            reason = f"it calls `{node.name}`, which {node.why.reason} and returns an argument, and it writes in place"
            raise CaptureError(reason=reason, where=node.where)


def written_placeholders(gm: torch.fx.GraphModule, count: int) -> list[int]:
    """The first `count` inputs to whose memory the graph writes."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"][:count]
    return [i for i, node in enumerate(placeholders) if _first_write(gm, [node]) is not None]


def unversioned_placeholders(gm: torch.fx.GraphModule, count: int) -> list[int]:
    """Those of the first `count` inputs to whose memory the graph writes by way of `.data` alone."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"][:count]
    versioned = [i for i, node in enumerate(placeholders) if _first_write(gm, [node], unseen=False) is not None]
    return [i for i in written_placeholders(gm, count) if i not in versioned]


def writes_through_data(gm: torch.fx.GraphModule) -> bool:
    """True if the graph writes to a `.data`, of whatever tensor: autograd does not see such a write."""
    data_nodes = [n for n in gm.graph.nodes if n.meta.get(UNVERSIONED)]
    return _first_write(gm, data_nodes) is not None


def _first_write(
    gm: torch.fx.GraphModule, roots: Sequence[torch.fx.Node], unseen: bool = True
) -> torch.fx.Node | None:
    """The first node that writes to one of `roots`, or to a view of one. unseen: by way of `.data`, too."""
    watched = set(roots)
    for node in gm.graph.nodes if watched else ():
        if node.meta.get(UNVERSIONED) and not unseen:
            continue
        touched = [a for a in node.all_input_nodes if a in watched]
        if touched and node.target is operator.getitem:  # of several results
            watched.add(node)
        if not touched or (schema := getattr(node.target, "_schema", None)) is None:
            continue
        aliased = [alias for a in touched for alias in _aliases(schema, node, a)]
        if any(alias.is_write for alias in aliased):
            return node  # type: ignore[no-any-return]
        if aliased and any(r.alias_info is not None for r in schema.returns):  # not of x in `y.mul_(x)`
            watched.add(node)
    return None


def _writes(schema: Any, node: torch.fx.Node, operand: torch.fx.Node) -> bool:
    return any(alias.is_write for alias in _aliases(schema, node, operand))


def _aliases(schema: Any, node: torch.fx.Node, operand: torch.fx.Node) -> list[Any]:
    """What the operation's results may share of the operand's memory, or writes to it, by its places in the call."""
    operands = [*zip(schema.arguments, node.args, strict=False)]
    operands += [(a, node.kwargs[a.name]) for a in schema.arguments if a.name in node.kwargs]
    places = [(a, v if isinstance(v, list | tuple) else (v,)) for a, v in operands if a.alias_info is not None]
    return [a.alias_info for a, values in places if operand in values]
