"""A Function class, one specialisation at a time: forward and setup_context as one graph, backward as another.

By object identity each tensor that the methods save, mark or return is found among the inputs, the outputs, or the
values in between (`hidden`, which become extra outputs). That map is all that backward needs to be captured apart.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from ..ir.program import ValueRef
from .arithmetic import SYMBOLIC, compute_number
from .capture.capture import Session, as_data_read_error, is_a_view, is_capturing, reason_of
from .capture.context import ForwardContext, attributes_of, backward_context
from .capture.fake_leaks import holds_fakes
from .capture.grad_mode import following_grad_mode
from .capture.history import ASKS, History, text_of
from .containers import (
    Hole,
    close_containers,
    copy_containers,
    fill_holes,
    holds_tensors,
    holes,
    leaves,
    map_leaves,
    with_replaced,
)
from .frames import where_raised
from .gradients import exact_gradients
from .loops.looped import RESULTS, SAVED_RUNS, trace_with_loops
from .loops.stacks import runs_of, stacked, unstacked
from .methods import backward_method, is_once_differentiable, takes_boxed_gradients, uses_setup_context
from .opaque.opaque import Tape
from .opaque.output_aliasing import whole_tensors
from .opaque.shared import Shared, shared_with
from .reads.reads import Reads
from .reads.snapshot import CaptureAgain, Snapshot
from .reads.value_keys import SCALARS, has_hidden_state, state_of
from .torch_private import FakeTensor, expression_of, memory_of, sizes_as_keys
from .trace import CaptureError, Trace

Tensor = torch.Tensor
SYMBOLS = (*SYMBOLIC, torch.Size)


methods_now = operator.attrgetter("forward", "setup_context", "backward", "vjp", "jvp", "vmap")
"""The methods of a class as they are at this moment: user code may have put others in their place."""


@dataclass(frozen=True)
class Output:
    """One output of the user's forward: a tensor of its own, an input as it is, a view of an input, a plain object,
    a part of another output or of a hidden tensor: it shows the same memory.

    Tensors inside a plain object are holes with their Place: autograd does not track them. The value of a tensor is
    whether it is a view to autograd, be it of a tensor that nothing else refers to: then autograd refuses to write to
    it.
    """

    kind: str  # "tensor", "input", "view", "same", "part of output", "part of hidden", "object"
    index: int = 0  # of the input (by tensor slot), of the output that is the same object, of what it is a part of
    value: Any = None


@dataclass
class ForwardTrace:
    """forward on fakes: what a process that finds a capture on disk makes again only where it is asked for."""

    session: Session
    trace: Trace
    fakes: list[Tensor]
    fake_outputs: list[Tensor]  # of the tensor outputs
    fake_hidden: list[Tensor]
    constants: dict[str, Any] = field(default_factory=dict)
    since: int = 0  # the session's guards from this number on are backward's


@dataclass
class ForwardCapture:
    """forward + setup_context at one key.

    `saved` and `tensor_attributes` say where everything comes from that the real ctx must be given.
    """

    source: ForwardTrace | Callable[[], ForwardTrace]
    outputs: list[Output]
    is_tuple: bool
    tensor_outputs: list[int]  # positions among the user's outputs
    hidden_count: int
    saved: list[ValueRef | None]
    stacks: tuple[int, ...]  # those of the saved that are several of the user's, stacked
    saved_for_forward: list[ValueRef | None]
    dirty: list[ValueRef]
    non_differentiable: list[ValueRef]
    materialize_grads: bool
    materialize_non_diff_grads: bool
    needs_input_grad: tuple[bool, ...]
    tensor_attributes: dict[str, ValueRef] = field(default_factory=dict)
    shared: tuple[Shared, ...] = ()

    @property
    def traced(self) -> ForwardTrace:
        """The trace and its fakes, made now where they were not yet."""
        if not isinstance(self.source, ForwardTrace):
            self.source = self.source()
        return self.source

    @property
    def is_traced(self) -> bool:
        """True if this process has the trace already."""
        return isinstance(self.source, ForwardTrace)

    @property
    def session(self) -> Session:
        """Where forward was traced."""
        return self.traced.session

    @property
    def trace(self) -> Trace:
        """The graph: the user's tensor outputs, then the hidden tensors."""
        return self.traced.trace

    @property
    def fakes(self) -> list[Tensor]:
        """Its tensor arguments."""
        return self.traced.fakes

    @property
    def fake_outputs(self) -> list[Tensor]:
        """Its tensor outputs."""
        return self.traced.fake_outputs

    @property
    def fake_hidden(self) -> list[Tensor]:
        """The residuals that are neither argument nor output."""
        return self.traced.fake_hidden

    @property
    def constants(self) -> dict[str, Any]:
        """The attributes of ctx that are no tensors; they may hold symbols of the session."""
        return self.traced.constants

    @property
    def returns_hidden(self) -> bool:
        """True if the user gets to see a hidden tensor, inside a container, or a part of one."""
        kinds = (hole.key.kind for o in self.outputs if o.kind == "object" for hole in holes(o.value))
        return "hidden" in kinds or any(o.kind == "part of hidden" for o in self.outputs)

    def fake_at(self, place: ValueRef | None) -> Tensor | None:
        """The fake of what is at `place`."""
        if place is None:
            return None
        source = {"input": self.fakes, "output": self.fake_outputs, "hidden": self.fake_hidden}[place.kind]
        return source[place.index]


def call_users_method(method: Callable[..., Any], *args: Any) -> Any:
    """Calls a method of the user's. An error that comes through here on real tensors is the user's own."""
    return method(*args)


def call_forward(cls: type, ctx: Any, args: Sequence[Any]) -> Any:
    """The user's forward and, where there is one, setup_context, on whatever `args` are."""
    if not uses_setup_context(cls):
        return call_users_method(cls.forward, ctx, *args)  # type: ignore[attr-defined]
    output = call_users_method(cls.forward, *args)  # type: ignore[attr-defined]
    call_users_method(cls.setup_context, ctx, tuple(args), output)  # type: ignore[attr-defined]
    return output


def capture_forward(
    cls: type,
    args: Sequence[Any],
    fakes: Sequence[Tensor],
    session: Session,
    reads: Reads,
    needs: tuple[bool, ...],
    tape: Tape | None = None,
) -> ForwardCapture:
    """Trace forward with setup_context. `args`: the call's arguments; `fakes` stand for its tensors, in order."""
    slots = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
    count = user_count(args)
    recorded: dict[str, Any] = {}

    def whole(*tensors: Tensor) -> tuple[Any, ...]:
        full = with_replaced(args, slots, tensors)
        ctx = ForwardContext(needs[:count])
        user_args = close_containers(full, count)
        # What is no tensor and may change is noted before the method runs: no graph would change it at each call.
        before = [leaves(a) for a in user_args]
        objects = [o for group in before for leaf in group for o in _changeable_parts(leaf)]
        states = [(value, state_of(value)) for value in objects]
        output = call_forward(cls, ctx, user_args)
        _refuse_changed(before, user_args)
        _refuse_changed_objects(states)
        _refuse_made_here(attributes_of(ctx), [leaf for group in before for leaf in group], reads)
        recorded.update(_classify(ctx, output, tensors, {id(o) for o in objects}, session.stacking))
        recorded["shared"] = shared_with(attributes_of(ctx), user_args)
        if uses_setup_context(cls) and not hasattr(cls, "_fusegrad_keeps_arguments"):
            _refuse_saved_as_returned(recorded)
        return (*recorded["returned"], *recorded["fake_hidden"])

    trace = guarded_trace(session, whole, fakes, reads, tape=tape, facts=recorded)
    if (results := recorded.pop(RESULTS, None)) is not None:
        count = len(recorded["fake_outputs"])
        recorded["fake_outputs"], recorded["fake_hidden"] = results[:count], results[count:]
    # Sizes of results that depend on data show only when the trace has ended.
    results = (*recorded["fake_outputs"], *recorded["fake_hidden"])
    if any(has_unbacked(n) for t in results for n in (*t.shape, *t.stride()) if not isinstance(n, int)):
        raise as_data_read_error(CaptureError(reason="it reads the data of a tensor (a size)"), tape)
    recorded.pop("returned")
    recorded.pop(SAVED_RUNS)
    on_fakes = {name: recorded.pop(name) for name in ("fake_outputs", "fake_hidden", "constants")}
    traced = ForwardTrace(session, trace, list(fakes), **on_fakes)
    hidden_count = len(traced.fake_hidden)
    return ForwardCapture(source=traced, hidden_count=hidden_count, needs_input_grad=needs, **recorded)


def _refuse_saved_as_returned(recorded: dict[str, Any]) -> None:
    """torch has a rule of its own for these, by who requires grad: most of such calls raise, and so do ours.

    Not of classes that we make, of plain functions and for containers: those have no eager counterpart that raises.
    """
    places = (*recorded["saved"], *recorded["saved_for_forward"])
    saved = {place.index for place in places if place and place.kind == "input"}
    dirty = {place.index for place in recorded["dirty"] if place.kind == "input"}
    if any(o.kind == "input" and o.index in saved - dirty for o in recorded["outputs"]):
        raise CaptureError(reason="it saves an argument that it returns as it is")


def user_count(args: Sequence[Any]) -> int:
    """The number of arguments that the user gave: tensors from inside containers stand behind them."""
    return len(args) - sum(len(holes(a)) for a in args if not isinstance(a, Tensor))


def _refuse_changed(before: Sequence[Sequence[Any]], arguments: Sequence[Any]) -> None:
    """A container that forward changes has to be changed at every call."""
    for leaves_before, argument in zip(before, arguments, strict=True):
        leaves_after = leaves(argument)
        pairs = zip(leaves_before, leaves_after, strict=False)
        if len(leaves_before) != len(leaves_after) or any(a is not b for a, b in pairs):
            raise CaptureError(reason=f"it changes a {type(argument).__name__} that is an argument")


_ABSENT = object()


def _refuse_changed_objects(states: Sequence[tuple[Any, dict[str, Any]]]) -> None:
    """The same for objects, which cannot be copied: they become what they were."""
    changed = None
    for value, before in states:
        after = state_of(value)
        for name in (n for n in {**after, **before} if after.get(n, _ABSENT) is not before.get(n, _ABSENT)):
            changed = value
            if name in before:
                object.__setattr__(value, name, before[name])
            else:
                object.__delattr__(value, name)
    if changed is not None:
        raise CaptureError(reason=f"it changes a {type(changed).__name__} that is an argument")


NO_KEY = "unhashable type: non-nested SymInt"
"""Torch's words for a size that is looked up in a dict (a cache by size)."""


def guarded_trace(
    session: Session,
    fn: Callable[..., Any],
    fakes: Sequence[Any],
    reads: Reads | None,
    from_source: bool = True,
    tape: Tape | None = None,
    facts: dict[str, Any] | None = None,
) -> Trace:
    """`session.trace`, with whatever goes wrong in the user's code turned into a CaptureError with its place.

    facts: what `fn` tells besides, in terms of the session's symbols; with the results, where loops were rolled.
    """

    def trace(tape: Tape | None) -> Trace:
        if session.env.rolls and tape is None:
            return trace_with_loops(session, fn, fakes, reads, from_source, facts)
        return session.trace(fn, fakes, reads, from_source, tape)

    try:
        return _trace_with_sizes_as_keys(trace, reads, tape)
    except CaptureError as error:
        if as_data_read_error(error.with_lines_of(error), tape) is error:
            raise  # an error that is its own cause is a cycle
        raise as_data_read_error(error, tape) from error
    except (Exception, RecursionError) as error:
        # No name for the new error here: a frame that holds its error is a cycle.
        raise as_data_read_error(_as_capture_error(error), tape) from error


def _trace_with_sizes_as_keys(trace: Callable[[Tape | None], Trace], reads: Reads | None, tape: Tape | None) -> Trace:
    """The trace, once more for one size alone where the method looks it up in a dict."""
    try:
        return _trace_with_caches_filled(trace, reads, tape)
    except TypeError as error:
        if not str(error).startswith(NO_KEY):
            raise
    with sizes_as_keys():
        return _trace_with_caches_filled(trace, reads, None if tape is None else tape.rewound_tape())


def _trace_with_caches_filled(trace: Callable[[Tape | None], Trace], reads: Reads | None, tape: Tape | None) -> Trace:
    """The trace, once more where it came to functions of other packages that change something, or fill caches."""
    filled: list[Snapshot] = []
    try:
        for _ in range(PASSES):
            try:
                return trace(tape)
            except CaptureAgain as again:
                filled += [again.snapshot] if again.filled else []
            if len(filled) > 1:
                break
            tape = None if tape is None else tape.rewound_tape()
    except BaseException:
        _restore_all(filled)
        raise
    if reads is not None:
        reads.foreign.failures += 1
    changed = _restore_all(filled) or "functions of other packages"
    raise CaptureError(reason=f"it changes what it reaches by the {changed}")


PASSES = 4
"""Captures of one body: for what is met, what that comes to then, what is filled, and one that changes nothing."""


def _restore_all(filled: Sequence[Snapshot]) -> str | None:
    """The content of caches before they were filled; the path to one of them."""
    paths = [snapshot.restore() for snapshot in reversed(filled)]
    return next((path for path in paths if path is not None), None)


def require_no_difference(first_history: History, trace: Trace, second_history: History, second_trace: Trace) -> None:
    """Raises CaptureError where two answers to the question whether autograd follows a tensor make two graphs."""
    pairs = zip(trace.lifted, second_trace.lifted, strict=False)
    differ = len(trace.lifted) != len(second_trace.lifted) or any(a is not b for a, b in pairs)
    second_graph = second_trace.graph_module
    if differ or text_of(trace.graph_module) != text_of(second_graph) or second_history.shows(second_graph):
        raise CaptureError(reason=ASKS, where=first_history.place or "unknown")


def _as_capture_error(error: BaseException) -> CaptureError:
    return CaptureError(reason=reason_of(error), where=where_raised(error)).with_lines_of(error)


def _changeable_parts(leaf: Any) -> list[Any]:
    """The parts of an argument that may change, where it is no container: itself, and the modules within a module."""
    if isinstance(leaf, torch.nn.Module):
        return list(leaf.modules())
    return [] if isinstance(leaf, Tensor | type) else [leaf]


def _classify(
    ctx: ForwardContext,
    output: Any,
    tensors: Sequence[Tensor],
    argument_ids: Collection[int] = (),
    stacking: Collection[int] = (),
) -> dict[str, Any]:
    """Where everything is that forward returned, saved and marked, by the identity of its objects.

    stacking: the runs of saved tensors that are one value each.
    """
    is_tuple = isinstance(output, tuple)
    outputs = output if is_tuple else (output,)
    places: dict[int, ValueRef] = {}
    for index, tensor in enumerate(tensors):
        places.setdefault(id(tensor), ValueRef("input", index))
    # Outputs come before all else: what is saved or marked may be one of them. Objects wait until the parts of
    # outputs are found, since a tensor within them may be hidden by then.
    described, returned, positions = _describe_outputs(outputs, tensors, places, ctx)
    hidden: list[Tensor] = []
    _find_parts(described, positions, returned, hidden)
    places |= {id(t): ValueRef("hidden", i) for i, t in enumerate(hidden) if id(t) not in places}
    described = [_describe_object(o, tensors, places, hidden) if o.kind == "object" else o for o in described]
    runs = runs_of(ctx.to_save, [*tensors, *returned, *hidden])
    to_save, stacks = stacked(runs, stacking)
    saved = [_place(t, places, hidden) for t in to_save]
    saved_for_forward = [_place(t, places, hidden) for t in ctx.saved_for_forward]
    tensor_attributes, constants = _split_attributes(attributes_of(ctx), places, hidden, argument_ids)
    return {
        "outputs": described,
        "is_tuple": is_tuple,
        "tensor_outputs": positions,
        "returned": returned,
        "fake_outputs": list(returned),
        "fake_hidden": hidden,
        "saved": saved,
        "stacks": stacks,
        SAVED_RUNS: list(map(len, runs)),
        "saved_for_forward": saved_for_forward,
        "dirty": _places_of_marked(ctx.dirty_tensors, places, "mark_dirty"),
        "non_differentiable": _places_of_marked(ctx.non_differentiable, places, "mark_non_differentiable"),
        "materialize_grads": ctx.materialize_grads,
        "materialize_non_diff_grads": ctx._materialize_non_diff_grads,
        "constants": constants,
        "tensor_attributes": tensor_attributes,
    }


def _describe_outputs(
    outputs: Sequence[Any], tensors: Sequence[Tensor], places: dict[int, ValueRef], ctx: ForwardContext
) -> tuple[list[Output], list[Tensor], list[int]]:
    described: list[Output] = []
    returned: list[Tensor] = []
    positions: list[int] = []
    for position, value in enumerate(outputs):
        if not isinstance(value, Tensor):
            described.append(Output("object", value=value))  # settled once the outputs are known
            continue
        place = places.get(id(value))
        if place is not None and place.kind == "output":
            described.append(Output("same", place.index))
        elif place is not None:
            described.append(Output("input", place.index))
        else:
            described.append(_describe_new_tensor(value, tensors))
            places[id(value)] = ValueRef("output", len(returned))
        positions.append(position)
        returned.append(value)
    return described, returned, positions


def _find_parts(
    described: list[Output], positions: Sequence[int], returned: Sequence[Tensor], hidden: list[Tensor]
) -> None:
    """Outputs that show the memory of another one, or of a value in between, which becomes hidden."""
    own = {n: returned[n] for n, position in enumerate(positions) if described[position].kind == "tensor"}
    for number, base in whole_tensors(own).items():
        if isinstance(base, Tensor) and not any(base is h for h in hidden):
            hidden.append(base)
        at = next(i for i, h in enumerate(hidden) if h is base) if isinstance(base, Tensor) else base
        kind = f"part of {'hidden' if isinstance(base, Tensor) else 'output'}"
        described[positions[number]] = Output(kind, at, own[number]._is_view())


def _describe_new_tensor(value: Tensor, tensors: Sequence[Tensor]) -> Output:
    for index, tensor in enumerate(tensors):
        if memory_of(value) == memory_of(tensor):
            return Output("view", index, is_a_view(value))
    return Output("tensor", value=is_a_view(value))


def _describe_object(
    output: Output, inputs: Sequence[Tensor], places: dict[int, ValueRef], hidden: list[Tensor]
) -> Output:
    """A Python value that goes back to the user as it is; sizes and tensors in it are those of each call."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return Hole(_place_returned(value, inputs, places, hidden))
        if isinstance(value, torch.SymInt | torch.SymFloat) and has_unbacked(value):
            raise CaptureError(reason="it returns a number that depends on the data of a tensor")
        if not isinstance(value, (*SCALARS, *SYMBOLIC)) and not callable(value):
            raise CaptureError(reason=f"it returns a {type(value).__name__}")
        if not isinstance(value, SYMBOLS) and holds_fakes(value):
            raise CaptureError(reason=f"it returns a {type(value).__name__} that holds tensors")
        return value

    return Output("object", value=map_leaves(output.value, leaf))


def _place_returned(
    tensor: Tensor, inputs: Sequence[Tensor], places: dict[int, ValueRef], hidden: list[Tensor]
) -> ValueRef | None:
    """Where a tensor comes from that is returned inside a container. It has memory of its own, or is an argument."""
    is_placed = id(tensor) in places
    if not is_placed and any(memory_of(tensor) == memory_of(t) for t in (*inputs, *hidden)):
        raise CaptureError(reason="it returns a container with a view")
    return _place(tensor, places, hidden)


def _place(tensor: Tensor | None, places: dict[int, ValueRef], hidden: list[Tensor]) -> ValueRef | None:
    if tensor is None:
        return None
    if id(tensor) not in places:
        if isinstance(tensor, FakeTensor) and tensor.requires_grad and tensor.grad_fn is not None:
            raise CaptureError(reason="it keeps a tensor with a history of its own, made in grad mode")
        places[id(tensor)] = ValueRef("hidden", len(hidden))
        hidden.append(tensor)
    return places[id(tensor)]


def _places_of_marked(tensors: Sequence[Any], places: dict[int, ValueRef], call: str) -> list[ValueRef]:
    unknown = [t for t in tensors if id(t) not in places]
    if unknown:
        raise CaptureError(reason=f"{call} is given something that is neither an input nor an output")
    return [places[id(t)] for t in tensors]


def _split_attributes(
    attributes: dict[str, Any], places: dict[int, ValueRef], hidden: list[Tensor], argument_ids: Collection[int] = ()
) -> tuple[dict[str, ValueRef], dict[str, Any]]:
    """ctx attributes by nature: tensors have a place, everything else is constant at this key.

    argument_ids: the objects that are arguments, by their addresses: with tensors in them they are constants, too.
    """
    tensors: dict[str, ValueRef] = {}
    constants: dict[str, Any] = {}

    def placed(key: str, tensor: Tensor) -> str:
        place = _place(tensor, places, hidden)
        assert place is not None
        tensors[key] = place
        return key

    for name, value in attributes.items():
        if isinstance(value, Tensor):
            placed(name, value)
        elif holds_tensors(value):
            constants[name] = map_leaves(value, _hole_maker(name, placed))
        else:
            constants[name] = copy_containers(value)
        for leaf in leaves(value):
            if id(leaf) not in argument_ids or holds_fakes(state_of(leaf)):
                _refuse_leaf(name, leaf)
    return tensors, constants


def _hole_maker(name: str, place_tensor: Callable[[str, Tensor], str]) -> Callable[[Any], Any]:
    """Every tensor of `ctx.name` becomes the hole `name[i]`."""
    numbers = itertools.count()
    return lambda leaf: Hole(place_tensor(f"{name}[{next(numbers)}]", leaf)) if isinstance(leaf, Tensor) else leaf


def tensors_of_attributes(attributes: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among ctx attributes and inside their containers, in the order of `tensor_attributes`."""
    return [leaf for value in attributes.values() for leaf in leaves(value) if isinstance(leaf, Tensor)]


def merge_attributes(constants: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """ctx attributes again: tensors, containers with their holes filled, constants."""
    hole_keys = {hole.key for value in constants.values() for hole in holes(value)}
    complete = {k: fill_holes(v, tensors) for k, v in constants.items()}
    return complete | {k: t for k, t in tensors.items() if k not in hole_keys}


def _refuse_leaf(name: str, leaf: Any) -> None:
    if isinstance(leaf, torch.SymInt | torch.SymFloat) and has_unbacked(leaf):
        raise CaptureError(reason=f"`ctx.{name}` depends on the data of a tensor")
    if not isinstance(leaf, Tensor | type) and any(holds_tensors([v]) for v in state_of(leaf).values()):
        raise CaptureError(reason=f"`ctx.{name}` is a {type(leaf).__name__} with tensors")
    if not isinstance(leaf, (Tensor, *SYMBOLS)) and holds_fakes(leaf):
        raise CaptureError(reason=f"`ctx.{name}` is a {type(leaf).__name__} that holds tensors")


def _refuse_made_here(attributes: Mapping[str, Any], argument_leaves: Sequence[Any], reads: Reads) -> None:
    """The object that forward makes at each call and puts on ctx, with a state that no key can hold: a generator, an
    iterator."""
    for name, leaf in ((name, leaf) for name, value in attributes.items() for leaf in leaves(value)):
        is_from_outside = any(leaf is argument for argument in argument_leaves)
        if not is_from_outside and has_hidden_state(leaf) and not reads.has_object(leaf):
            raise CaptureError(reason=f"`ctx.{name}` holds a {type(leaf).__name__}")


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)


def has_unbacked(symbol: Any) -> bool:
    """True if the size is known only once data is seen (the result of nonzero, say)."""
    return any(s.name.startswith(("u", "zuf")) for s in symbol.node.expr.free_symbols)


def symbols_in(values: Iterable[Any]) -> set[sympy.Symbol]:
    """The session symbols inside Python values (sizes kept on ctx)."""
    numbers = [n for value in values for leaf in leaves(value) for n in (leaf if _is_size(leaf) else (leaf,))]
    exprs = [n.node.expr for n in numbers if isinstance(n, SYMBOLIC)]
    return {s for e in exprs for s in e.free_symbols}


def expression_at_forward(symbol: Any, known_symbols: Collection[sympy.Symbol]) -> Any:
    """The expression over the symbols as forward had it: what a later trace learnt of them holds for its sizes only."""
    original = expression_of(symbol)
    for expr in (original, original.xreplace(getattr(symbol.node.shape_env, "equal", {}))):
        if expr.free_symbols <= set(known_symbols):
            return expr
    return symbol.node.expr


def rebind(value: Any, sizes: Mapping[sympy.Symbol, Any]) -> Any:
    """`value` with every session symbol replaced: by ints at run time, by another session's SymInts while tracing."""
    return map_leaves(value, lambda leaf: _rebound(leaf, sizes))


def _rebound(leaf: Any, sizes: Mapping[sympy.Symbol, Any]) -> Any:
    if isinstance(leaf, SYMBOLIC):
        return compute_number(expression_at_forward(leaf, sizes), sizes)
    return torch.Size(tuple(_rebound(n, sizes) for n in leaf)) if _is_size(leaf) else leaf


# ------------------------------------------------------------------ backward
def run_backward(
    cls: type,
    forward: ForwardCapture,
    saved: Sequence[Any],
    attributes: dict[str, Any],
    gradients: Sequence[Any],
    count: int,
    attached: bool = False,
    may_change: bool = False,
) -> tuple[Any, ...]:
    """The user's own backward body on `saved`, `attributes` and `gradients`, fake or real.

    attributes: afterwards what the body left on ctx.
    attached: without the `once_differentiable` around it, which would cut the gradients off.
    may_change: the caller keeps what it leaves on ctx; else a capture is refused where that differs.
    """
    method = backward_method(cls)
    assert method is not None
    if attached and is_once_differentiable(method):
        method = method.__wrapped__  # type: ignore[attr-defined]
    ctx = backward_context(cls.__name__)(unstacked(saved, forward.stacks), attributes, forward.needs_input_grad[:count])
    # A capture runs once, and its graph many times: what a run leaves on ctx, the next one would not find.
    before = _identities_on(ctx) if is_capturing() and not may_change else None
    with nullcontext() if is_once_differentiable(method) else following_grad_mode():  # of which nothing is recorded
        arguments = (list(gradients),) if takes_boxed_gradients(cls) else gradients
        result = call_users_method(method, ctx, *arguments)
    if before is not None and before != _identities_on(ctx):
        raise CaptureError(reason="it changes what is on ctx, which its next run reads")
    attributes.clear()
    attributes.update(ctx.left())
    return exact_gradients(cls, result, count)


def _identities_on(ctx: Any) -> dict[str, list[int]]:
    return {k: [id(v), *map(id, leaves(v))] for k, v in vars(ctx).items()}
