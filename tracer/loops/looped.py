"""A trace that comes to a loop over a size: traced at three small lengths, rolled, proved, and written with the length
as a symbol. What cannot be rolled is traced as it is, step by step, with the reason on record."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import sympy
import torch

from ..capture.capture import Session, drop_operations, operations_kept, operations_traced, written_placeholders
from ..containers import leaves, map_leaves
from ..lowering.functional import without_writes, writes
from ..scoped_state import attribute_within
from ..torch_private import memory_of
from ..trace import CaptureError, Trace
from .affine import fit_lengths, number_of
from .alignment import repetitions
from .buffers import without_buffers, without_sums_of_places
from .buffers.layouts import in_layout, result_strides, result_values
from .buffers.unfollowed import require_followed_writes
from .description import Rolled
from .emission import Emission
from .floats import floats_apart
from .lengths import FEW, FEWEST, LoopMet, is_number
from .program import Program, program_of
from .proof import is_proved, require_proved
from .reasons import NotRolled, OtherSteps
from .rolling import roll, roll_fixed
from .stacks import growing
from .turns import completed
from .turns.multiples import EACH, Multiples, are_parts, multiples_of

if TYPE_CHECKING:
    from ..reads.reads import Reads

SHORT = ((5, 6, 8), (9, 10, 12))
"""The lengths of the short traces: two that are rolled, and one that proves it; longer ones where those are too short
for what begins and ends a loop, and the loop is longer still."""
LONG = 64
"""Operations from which on what is repeated a fixed number of times is a loop: fewer fuse as they are."""
MOST = 8192
"""Operations that the short traces of one loop may have, or as many as its steps one by one, where these are more: what
stays unrolled after that costs at most twice what it has to, and else half a minute."""
Facts = dict[str, Any]
Short = tuple[Program, Facts, Mapping[sympy.Basic, bool]]
"""A short trace: the program, the facts that the method told, and the questions that it asked."""
Found = tuple[Rolled, Sequence[Program], Sequence[Facts]]
HAD_WRITES = "fusegrad_had_writes"
"""Among the meta data of a rolled trace: the method writes in place, which the trace does not."""
RESULTS = "results"
"""Among the facts of a rolled trace: its results, fakes of the official session."""
SAVED_RUNS = "saved_runs"
"""Among the facts that forward tells: how many of the saved tensors in a row are alike."""


def trace_with_loops(
    session: Session,
    fn: Callable[..., Any],
    fakes: Sequence[Any],
    reads: Reads | None,
    from_source: bool,
    facts: Facts | None = None,
) -> Trace:
    """The trace of `fn(*fakes)`, each loop over a size in it one node where it can be rolled.

    facts: filled by `fn` with what it found besides the graph.
    """
    trace = _traced(session, fn, fakes, reads, from_source, facts)
    if session.env.small or len(trace.graph_module.graph.nodes) < LONG or trace.opaque:
        return trace
    try:
        return _Rolling(session, fn, fakes, reads, from_source, facts).with_fixed_loops(trace)
    except NotRolled:
        return trace


def _traced(session: Session, fn: Any, fakes: Any, reads: Any, from_source: bool, facts: Any) -> Trace:
    """The same, with each loop of a fixed number of steps as it is."""
    while True:
        met = None
        try:
            with session.env.watching():
                trace = session.trace(fn, fakes, reads, from_source)
        except LoopMet as loop:
            met = loop
        except BaseException:
            if (met := session.env.met) is None:
                raise
        met = met or session.env.met
        if met is None:
            return trace
        session.env.met = None
        try:
            return _Rolling(session, fn, fakes, reads, from_source, facts).trace(met)
        except NotRolled as why:
            session.env.unrolled.add(met.symbol)
            if met.turns >= FEW:  # fewer are as well off one by one, and are traced once more for another number
                session.unrolled.append(why.reason)


class _Rolling:
    """One attempt to roll a loop."""

    def __init__(self, session: Session, fn: Any, fakes: Any, reads: Any, from_source: bool, facts: Any) -> None:
        self.session, self.fn, self.fakes, self.reads = session, fn, fakes, reads
        self.from_source, self.facts = from_source, facts if facts is not None else {}
        self.tokens: list[Any] | None = None  # what the newest short trace of two is made of
        self.failed: list[tuple[Any, NotRolled]] = []  # first short traces that came to nothing, and why
        self.traced_before, self.kept_before = operations_traced(), operations_kept()
        self.turns, self.most = 0, MOST

    def trace(self, met: LoopMet) -> Trace:
        """The rolled trace of the loop over this size. Raises NotRolled."""
        self.turns = met.turns
        try:
            if are_parts(met.expr, met.steps, met.turns):  # of whose short lengths no number is affine in the length
                raise NotRolled(f"short traces of it, which has {met.turns} steps, would be longer than it is")
            return self.with_steps_for(EACH, met)
        except NotRolled as why:
            failure = why
        for multiples in self.multiples(met, failure):
            with suppress(NotRolled):
                return self.with_steps_for(multiples, met)
        raise failure

    def with_steps_for(self, multiples: Multiples, met: LoopMet) -> Trace:
        """The same, where the loop has a step for so much of the size."""
        *attempts, last = self.attempts(met, SHORT if multiples is EACH else SHORT[:1])
        for attempt in attempts:
            with suppress(NotRolled):
                return self.traced(met.symbol, *attempt, multiples)
        return self.traced(met.symbol, *last, multiples)

    def multiples(self, met: LoopMet, failure: NotRolled) -> Iterator[Multiples]:
        """What a loop may have a step for, where not for each; not asked of few steps, nor of a loop in a loop."""
        if self.session.env.small:
            return
        may_be_in_turns = isinstance(failure, OtherSteps) and self.comes_round()
        for multiples in multiples_of(met.expr, met.steps, may_be_in_turns):
            if met.steps > multiples.size(SHORT[0][-1]):
                yield multiples

    def comes_round(self) -> bool:
        """Whether half of a short trace is repeated: of a length that the method does not take that is not known."""
        return self.tokens is None or bool(repetitions(self.tokens, len(self.tokens) // 2, 2))

    def attempts(
        self, met: LoopMet, short: Sequence[Sequence[int]]
    ) -> Iterator[tuple[Sequence[int], Mapping[sympy.Symbol, int]]]:
        """Lengths of short traces, and the sizes that have them: those that are as long, or this one alone.

        A loop in a loop is looked for at the shortest lengths only: each of them is as many loops as the outer one has
        steps.
        """
        groups = self.groups(met.symbol)
        yield from ((lengths, group) for lengths in short[: 2 if self.is_long(met) else 1] for group in groups)

    def is_long(self, met: LoopMet) -> bool:
        """Whether longer short traces are worth it: for a long loop, and for a shorter one whose steps are launches, or
        whose length turned out to vary."""
        env = self.session.env
        least = SHORT[0][-1] + 1 if env.rolls <= FEWEST else 2 * SHORT[1][-1]
        return not env.small and met.steps >= least

    def groups(self, symbol: sympy.Symbol) -> list[Mapping[sympy.Symbol, int]]:
        """Sizes that may be those of one loop, each with what it is longer than this one.

        Of the same axis of other arguments, as long or nearly so; this alone; of any axis. Of a loop in a loop the last
        are left out.
        """
        near, axes = self.session.env.group_of(symbol), self.session.axes()
        along = {s: more for s, more in near.items() if axes.get(s) == axes.get(symbol)}
        equal = {s: more for s, more in along.items() if not more}
        likely = [equal, along] if len(equal) > 1 else [along]
        groups = [*likely, {symbol: 0}, *([] if self.session.env.small else [near])]
        return [group for i, group in enumerate(groups) if group not in groups[:i]]

    def traced(
        self, symbol: sympy.Symbol, lengths: Sequence[int], sizes: Mapping[sympy.Symbol, int], multiples: Multiples
    ) -> Trace:
        """The same, from traces of these lengths."""
        with self.session.env.attempt():
            rolled, programs, told = self.rolled(lengths, sizes, multiples)
        self.require_multiples(symbol, multiples)
        facts = _Facts(self.session, symbol, lengths, multiples)
        strides = [facts.strides(found) for found in zip(*(p.strides for p in programs), strict=True)]
        in_no_graph = operations_kept() - self.kept_before
        trace, results = self.written(rolled, symbol, [*programs[0].trace.lifted], strides, multiples)
        self.require_together(symbol, sizes)
        if any(p.memory != shared_memory(trace.graph_module) for p in programs):
            raise NotRolled("what it returns or keeps shares memory in a way that depends on its steps")
        trace.inlines = any(p.trace.inlines for p in programs)
        looped = map(self.session.env.replace, (symbol, *programs[0].trace.rolled))
        trace.rolled = tuple(dict.fromkeys(size for size in looped if size.is_Symbol))
        trace.graph_module.meta[HAD_WRITES] = programs[0].had_writes
        self.settle(facts.of(told), results)
        drop_operations(in_no_graph)
        return trace

    def rolled(self, lengths: Sequence[int], sizes: Mapping[sympy.Symbol, int], multiples: Multiples) -> Found:
        """The rolled form of short traces, these, and what the method told in each."""
        known = len(self.session.env.replacements)
        short = partial(self.at_length, sizes=sizes, multiples=multiples)
        shorts = map(short, lengths)
        first = next(shorts)
        is_learnt = len(self.session.env.replacements) > known
        look = lengths, multiples, _look(first[0])
        self.refuse_again(look)
        second = next(shorts)
        self.tokens = [step.token for step in second[0].steps]
        if longer := growing([told.get(SAVED_RUNS, ()) for _, told, _ in (first, second)]) - self.session.stacking:
            with attribute_within(self.session, "stacking", longer):
                return self.rolled(lengths, sizes, multiples)
        try:
            return self.rolled_of(first, second, shorts, sizes)
        except NotRolled as why:
            self.failed.append((look, why))
            if not is_learnt:
                raise
            # sizes that turned out to be equal, or numbers, were symbols of their own up to then
            again = short(lengths[0])
            if _look(again[0]) == look[-1]:
                raise
        return self.rolled_of(again, second, map(short, lengths[2:]), sizes)

    def refuse_again(self, look: Any) -> None:
        """Raises what came of a first short trace that looked alike, where sizes were small that it does not show."""
        for failed, why in self.failed:
            if failed == look:
                raise why

    def rolled_of(self, first: Short, second: Short, others: Iterable[Short], sizes: Collection[sympy.Symbol]) -> Found:
        """The same of two short traces, proved by the others."""
        rolled, is_completed, form = self.roll_in_some_form(first[0], second[0])
        programs, told, asked = zip(first, second, *others, strict=True)
        rolled, programs = self.proved(rolled, [form(p) for p in programs], is_completed)
        lifted = [p.trace.lifted for p in programs]
        if any(len(ts) != len(lifted[0]) or any(map(_is_another, ts, lifted[0])) for ts in lifted):
            raise NotRolled("it reads other tensors from outside at each length")
        # In `range(0, n, 16)` short lengths have one step each
        if not rolled.bodies and not self.session.env.counted.isdisjoint(sizes):
            raise NotRolled("nothing repeats at small lengths")
        self.require_asked(asked)
        return rolled, programs, told

    def roll_in_some_form(self, short: Program, long: Program) -> tuple[Rolled, bool, Callable[[Program], Program]]:
        """The same as `roll` of the programs as they are, or else with floats apart; and that form of a program."""
        try:
            return *self.roll(short, long), as_it_is
        except NotRolled:
            whole = floats_apart(short), floats_apart(long)
            if whole[0] is not short:
                with suppress(NotRolled):
                    return *self.roll(*whole), floats_apart
            raise

    def roll(self, short: Program, long: Program) -> tuple[Rolled, bool]:
        """The rolled form, and whether its turns were completed: where that can be."""
        with self.refusals():
            whole = completed(short), completed(long)
            if whole[0] is not short or whole[1] is not long:
                with suppress(NotRolled):
                    return roll(*whole), True
            return roll(short, long), False

    def proved(
        self, rolled: Rolled, programs: Sequence[Program], is_completed: bool
    ) -> tuple[Rolled, Sequence[Program]]:
        """The rolled form of these programs, or of these with completed turns, and the programs."""
        with self.refusals():
            if is_completed:
                whole = [completed(p) for p in programs]
                if all(is_proved(rolled, p) for p in whole):
                    return rolled, whole
                rolled = roll(*programs[:2])
            for program in programs:
                require_proved(rolled, program)
        return rolled, programs

    def with_fixed_loops(self, trace: Trace) -> Trace:
        """The trace with one node for what is repeated a fixed number of times. Raises NotRolled."""
        with self.refusals():
            program = self.program(trace, 0)
            rolled = self.fixed(program)
        found, results = self.written(rolled, None, [*trace.lifted], program.strides)
        if program.memory != shared_memory(found.graph_module):
            raise NotRolled("what it returns or keeps shares memory in a way that depends on its steps")
        found.inlines, found.rolled = trace.inlines, trace.rolled
        found.graph_module.meta[HAD_WRITES] = program.had_writes
        self.facts[RESULTS] = list(results)
        return found

    def fixed(self, program: Program) -> Rolled:
        """The rolled form of one program, as it is or else with floats apart."""
        apart = floats_apart(program)
        forms = [program] if apart is program else [program, apart]
        failures: list[NotRolled] = []
        for form in forms:
            try:
                require_proved(rolled := roll_fixed(form, LONG), form)
                return rolled
            except NotRolled as failure:
                failures.append(failure)
        raise failures[0]

    def written(
        self, rolled: Rolled, symbol: sympy.Symbol | None, lifted: Sequence[Any], strides: Sequence[Any],
        multiples: Multiples = EACH,
    ) -> tuple[Trace, Sequence[Any]]:  # fmt: skip
        """The trace of the rolled form in this session, and fakes of its results, which have these strides."""
        results: list[Any] = []

        def body(*inputs: Any) -> Any:
            found = Emission(rolled, symbol, [*inputs, *lifted], multiples).run()
            results[:] = map(in_layout, found, strides)
            return tuple(results)

        with self.refusals():
            return self.session.trace(body, self.fakes, self.reads, from_source=False), results

    def at_length(self, length: int, sizes: Mapping[sympy.Symbol, int], multiples: Multiples) -> Short:
        """At a short length the program, the facts that the method told, and the questions that it asked."""
        self.require_patience()
        small = {s: multiples.size(length) + d for s, d in sizes.items()}
        before = operations_traced()
        with self.refusals(), self.session.at_lengths(small) as asked:
            program = self.short_trace(length)
        self.most = max(self.most, (operations_traced() - before) * self.turns // length)
        return program, dict(self.facts), dict(asked)

    def require_patience(self) -> None:
        """Raises NotRolled where the short traces have taken more than they may."""
        taken = operations_traced() - self.traced_before
        if taken > self.most:
            raise NotRolled(f"looking for what is repeated took {taken:,} operations at small lengths, and found none")

    def short_trace(self, length: int) -> Program:
        fakes = [self.session.at_present(fake) for fake in self.fakes]
        trace = trace_with_loops(self.session, self.fn, fakes, self.reads, self.from_source, self.facts)
        if trace.opaque:
            raise NotRolled("it calls what runs in eager")
        self.facts.pop(RESULTS, None)
        return self.program(trace, length)

    def program(self, trace: Trace, length: int) -> Program:
        """A short trace as steps, without its writes."""
        memory, strides = shared_memory(trace.graph_module), result_strides(trace.graph_module)
        if not writes(trace.graph_module):
            had_writes = trace.graph_module.meta.get(HAD_WRITES, False)
            program = without_sums_of_places(program_of(trace, length))
            return replace(program, memory=memory, strides=strides, had_writes=had_writes)
        if written_placeholders(trace.graph_module, len(trace.fakes)):
            raise NotRolled("it writes to an argument")
        require_followed_writes(trace.graph_module.graph)
        functional = without_writes(self.session, trace, ())
        program = without_buffers(program_of(replace(trace, graph_module=functional), length))
        return replace(program, memory=memory, strides=strides)

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Within the block what goes wrong is a reason not to roll."""
        try:
            yield
        except NotRolled:
            raise
        except CaptureError as error:
            raise NotRolled(str(error.facts["reason"])) from None
        except Exception as error:
            raise OtherSteps(f"{type(error).__name__}: {error}".partition("\n")[0]) from None

    def require_asked(self, asked: Sequence[Mapping[sympy.Basic, bool]]) -> None:
        """What each short length answered alike has that answer now, and is assumed to have it in every later call."""
        for question, answer in asked[0].items():
            if any(others.get(question) is not answer for others in asked[1:]):
                continue
            if not self.session.env.assume(question, answer):
                raise NotRolled("it asks how long the loop is")

    def require_together(self, symbol: sympy.Symbol, sizes: Mapping[sympy.Symbol, int]) -> None:
        """The sizes that had the length of the loop, or a little more, have it in every later call: that is a guard."""
        for other, more in sizes.items():
            if other != symbol and not self.session.env.assume(sympy.Eq(other, symbol + more), True):
                raise NotRolled("sizes that go together at small lengths do not now")

    def require_multiples(self, symbol: sympy.Symbol, multiples: Multiples) -> None:
        """The size is such a multiple in every later call: that is a guard."""
        if multiples != EACH and not self.session.env.assume(multiples.assumption(symbol), True):
            raise NotRolled("the size is no such multiple")

    def settle(self, told: Facts, results: Sequence[Any]) -> None:
        self.facts.clear()
        self.facts |= told | {RESULTS: list(results)}


def _look(program: Program) -> Any:
    """Equal for programs that take the same steps on the same values."""
    return [(step.token, step.leaves) for step in program.steps], program.results


def as_it_is(program: Program) -> Program:
    """The program."""
    return program


def shared_memory(gm: torch.fx.GraphModule) -> list[int | None]:
    """Of the inputs and the results of a graph, for each the first that it shares memory with."""
    values = [*(n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")), *result_values(gm)]
    memory = [memory_of(v) if isinstance(v, torch.Tensor) else None for v in values]
    return [None if m is None else memory.index(m) for m in memory]


def _is_another(a: Any, b: Any) -> bool:
    return a is not b


class _Facts:
    """What a method told at several lengths, in terms of the symbol."""

    def __init__(self, session: Session, symbol: sympy.Symbol, lengths: Sequence[int], multiples: Multiples) -> None:
        self.session, self.symbol, self.lengths, self.multiples = session, symbol, lengths, multiples

    def of(self, told: Sequence[Any]) -> Any:
        """Raises NotRolled where what was told depends on the length in another way than an affine one."""
        skeletons = [repr(map_leaves(t, _nothing)) for t in told]
        if any(s != skeletons[0] for s in skeletons):
            raise NotRolled("what it returns or keeps depends on the length of the loop")
        merged = iter([self.leaf(values) for values in zip(*map(leaves, told), strict=True)])
        return map_leaves(told[0], lambda _: next(merged))

    def leaf(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, torch.Tensor):
            return first
        if isinstance(first, torch.Size):
            if any(len(v) != len(first) for v in values):
                raise NotRolled("what it returns or keeps depends on the length of the loop")
            return torch.Size([self.leaf(sizes) for sizes in zip(*values, strict=True)])
        if all(map(is_number, values)):
            return self.number(values)
        if any(type(v) is not type(first) or not _is_equal(v, first) for v in values):
            raise NotRolled("what it returns or keeps depends on the length of the loop")
        return first

    def strides(self, found: Sequence[torch.Size | None]) -> torch.Size | None:
        """Of one result, from those at each length; None where it is no tensor, or they are not affine."""
        if any(s is None for s in found):
            return None
        with suppress(NotRolled):
            return cast(torch.Size, self.leaf(found))
        return None

    def number(self, values: Sequence[Any]) -> Any:
        fit = fit_lengths([number_of(v) for v in values], self.lengths)
        terms = [term * self.multiples.value(a.length, a.constant, self.symbol) for term, a in fit.terms]
        expr = sympy.expand(sum(terms, sympy.Integer(0)))
        if expr.is_Integer:
            return int(expr)
        return self.session.env.create_symintnode(expr, hint=int(self.session.env.value(expr)))


def _nothing(leaf: Any) -> None:
    return None


def _is_equal(a: Any, b: Any) -> bool:
    return a is b or bool(a == b)
