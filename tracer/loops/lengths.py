"""Sizes while loops over them are looked for: a trace stops where one begins; then such sizes have small values."""

from __future__ import annotations

import dis
import functools
import itertools
import linecache
import math
import os
import re
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import Mod

from ..frames import TORCH, is_user_file
from ..sizes import multiples_in, with_whole_parts
from .reasons import NotRolled

FEW, FEWEST = 9, 2
"""The fewest steps of loops that are rolled where no kernels are made: shorter ones are traced step by step, faster
than the short traces from which a loop is rolled, until another short length shows that it varies. And where kernels
are made: that of a loop costs less to make than those of a few steps, and moves fewer bytes."""
NEAR = 2
"""The most by which the sizes of one loop differ: x[t + 1] of an x that is one longer."""
LEARNT = ("guards", "replacements", "var_to_range", "divisible", "axioms", "multiples", "unrolled")
"""What is kept of assumptions: torch's ShapeEnv's own, the sizes that have a number as divisor, and what was found of
loops in one that is looked at."""
CACHED = [name for name, method in vars(ShapeEnv).items() if hasattr(method, "cache_clear")]
"""Its methods that keep what they answered: an answer that was an assumption has to be asked for again."""
_FAKES = os.path.join(TORCH, "_subclasses", "")
_NUMBERS = os.path.join(TORCH, "__init__.py")


class LoopMet(BaseException):
    """A trace turns a size into a number where the source has a loop. Internal, and no Exception: no method may
    catch it. turns: how many it has, which may be fewer than the size has places: `split(3)` of a row."""

    def __init__(self, symbol: sympy.Symbol, steps: int, expr: sympy.Expr, turns: int) -> None:
        super().__init__(f"a loop of {steps} steps over {symbol}")
        self.symbol, self.steps, self.expr, self.turns = symbol, steps, expr, turns


class Lengths(ShapeEnv):
    """A ShapeEnv in which a loop over a size can be looked at: `watching` for one, then at `small` lengths of it.

    rolls: the fewest steps of a loop that is one node; 0: none is. is_cut_short: a shorter one was met.
    unrolled: sizes with loops that are none.
    asked: at small lengths, the user's own questions about them, with their answers.
    counted: the sizes that the user's own source took as numbers, such as `range` does, and not only an operation of
    torch that makes one tensor for each step.
    """

    def __init__(self, **options: Any) -> None:
        self.rolls, self.is_watching, self.is_cut_short = 0, False, False
        self.met: LoopMet | None = None
        self.unrolled: set[sympy.Symbol] = set()
        self.small: dict[sympy.Symbol, int] = {}
        self.asked: dict[sympy.Basic, bool] = {}
        self.multiples: dict[sympy.Symbol, int] = {}
        self.counted: set[sympy.Symbol] = set()
        super().__init__(**options)

    def hints(self) -> Any:
        """The values of the symbols, under the name that this torch has for them."""
        return self.backed_var_to_val if hasattr(self, "backed_var_to_val") else self.var_to_val

    # ------------------------------------------------------------------ where a loop begins
    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block a loop over a size ends the trace."""
        before, self.is_watching, self.met = self.is_watching, self.rolls > 0, None
        try:
            yield
        finally:
            self.is_watching = before

    def evaluate_expr(self, orig_expr: Any, hint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The value of an expression, which becomes an assumption; of small lengths nothing is assumed."""
        if self.small and self._is_small(orig_expr):
            return self._answer(orig_expr)
        if self.is_watching and isinstance(orig_expr, sympy.Expr):
            self._stop_at_loop(orig_expr)
        answer = super().evaluate_expr(orig_expr, hint, *args, **kwargs)
        if isinstance(orig_expr, sympy.Rel):
            self._learn_multiples(multiples_in(orig_expr, bool(answer)))
        return answer

    def replace(self, expr: Any) -> Any:  # type: ignore[override]  # its own has a cache
        """The expression in sizes that are no others, and in no quotient of one that is a multiple."""
        expr = super().replace(expr)
        known = tuple((size, n) for size, n in self.multiples.items() if size not in self.small)
        return with_whole_parts(expr, known) if known and isinstance(expr, sympy.Expr) else expr

    def _learn_multiples(self, found: Mapping[sympy.Symbol, int]) -> None:
        """Each is asked for as well, so that it is an assumption in as many words."""
        for size, divisor in found.items():
            before = self.multiples.get(size, 1)
            if before % divisor:
                self.multiples[size] = math.lcm(divisor, before)
                self.evaluate_expr(sympy.Eq(Mod(size, divisor), 0))
                self._forget_versions()

    def _stop_at_loop(self, expr: sympy.Expr) -> None:
        symbols = expr.free_symbols & self.hints().keys() - self.unrolled - self.small.keys()
        if len(symbols) != 1 or len(expr.free_symbols) != 1 or not expr.is_integer or not is_in_loop():
            return
        if is_for_mathematics():  # which counts no steps
            return
        (symbol,) = symbols
        if (steps := int(self.hints()[symbol])) < self.rolls:
            self.is_cut_short = True
            return
        # what is asked for may be another number that is made of the size
        if (turns := int(self.value(expr))) >= self.rolls and not is_constant(expr, symbol, steps):
            self.met = LoopMet(symbol, steps, expr, turns)
            raise self.met

    # ------------------------------------------------------------------ at small lengths
    def group_of(self, symbol: sympy.Symbol) -> dict[sympy.Symbol, int]:
        """The sizes that are as long as this one, or nearly so, each with the difference; none that is small now."""
        hints, length = self.hints(), int(self.hints()[symbol])
        numbers = {s: n for s, n in hints.items() if s.is_integer and n.is_Integer and s not in self.small}
        differences = {s: int(n) - length for s, n in numbers.items()}
        return {s: d for s, d in differences.items() if abs(d) <= NEAR}

    @contextmanager
    def at(self, lengths: Mapping[sympy.Symbol, int]) -> Iterator[dict[sympy.Basic, bool]]:
        """Within the block these sizes are as small as that, and nothing is learnt of them; what is asked of them.

        Within another such block those of both are small: a loop in a loop.
        """
        hints, around = self.hints(), (self.small, self.asked)
        before = {s: hints[s] for s in lengths}
        hints.update({s: sympy.Integer(n) for s, n in lengths.items()})
        self.small, self.asked = {**self.small, **lengths}, {}
        self._forget_hints()
        try:
            yield self.asked
        finally:
            self.small, self.asked = around
            hints.update(before)
            self._forget_hints()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Within the block a loop may turn out to be none that can be rolled: then nothing was learnt of sizes."""
        before = {name: getattr(self, name).copy() for name in LEARNT}
        try:
            yield
        except NotRolled:
            for name, known in before.items():
                setattr(self, name, known)
            self._forget_versions()
            raise

    def _forget_versions(self) -> None:
        for name in ("_version_counter", "_replacements_version_counter"):
            vars(self)[name] = vars(self).get(name, 0) + 1
        self._prev_cache_key = self._get_key()
        self._clear(CACHED)

    def assume(self, question: sympy.Basic, answer: bool) -> bool:
        """Whether the answer is true of the present sizes, which is a guard then; of small ones it is noted."""
        if self._is_small(question):
            self.asked.setdefault(question, answer)
            return True
        return bool(self.evaluate_expr(question)) is answer

    def _is_small(self, expr: Any) -> bool:
        return bool(getattr(expr, "free_symbols", set()) & self.small.keys())

    def value(self, expr: Any) -> Any:
        """The number that an expression is at the present sizes."""
        return expr.xreplace(self.hints())

    def _answer(self, expr: Any) -> Any:
        value = self.value(expr)
        if not isinstance(expr, sympy.Expr) and asked_by_the_user("__bool__"):
            self.asked.setdefault(expr, bool(value))
        if isinstance(expr, sympy.Expr) and asked_by_the_user("__index__", "__int__"):
            self.counted |= expr.free_symbols
        return value

    def _forget_hints(self) -> None:
        """What torch keeps of values that symbols have no longer."""
        self._clear(("_maybe_evaluate_static", "size_hint", "guarding_hint_or_throw", "has_guarding_hint"))

    def _clear(self, names: Collection[str]) -> None:
        for name in names:
            getattr(getattr(self, name, None), "cache_clear", _nothing)()


def _nothing() -> None:
    pass


def is_constant(expr: sympy.Expr, symbol: sympy.Symbol, size: int) -> bool:
    """True of a number that is the same for longer sizes: the parts of `chunk(3)` are no loop over a row."""
    return len({expr.xreplace({symbol: sympy.Integer(size * times)}) for times in (1, 2, 4)}) == 1


def asked_by_the_user(*methods: str) -> bool:
    """True if it is Python that is told what these methods of a size say, and not an operation of torch on fakes."""
    frame, told = sys._getframe(2), False
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        code = frame.f_code
        if code.co_filename.startswith(_FAKES):
            return False
        told = told or (code.co_name in methods and code.co_filename == _NUMBERS)
        frame = frame.f_back  # type: ignore[assignment]
    return told


def is_for_mathematics() -> bool:
    """True if it is a function of `math`, called from the user's source, that is told a number: it counts no steps."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    called = () if frame is None else _called(frame.f_code, frame.f_lasti)
    if frame is None or not called:
        return False
    first, *names = called
    found = frame.f_locals.get(first, frame.f_globals.get(first))
    if names and found is math:
        found = getattr(math, names.pop(0), None)
    return not names and getattr(found, "__module__", None) == math.__name__


@functools.lru_cache(maxsize=4096)
def _called(code: types.CodeType, at: int) -> tuple[str, ...]:
    """The dotted name of what an instruction calls, by the source; () for any other instruction, or without one."""
    line, end, start, stop = next(itertools.islice(code.co_positions(), at // 2, None), (None,) * 4)
    if line is None or line != end:
        return ()
    text = linecache.getline(code.co_filename, line).encode()[start:stop].decode()
    match = re.match(r"([A-Za-z_][\w.]*)\(", text)
    return tuple(match[1].split(".")) if match else ()


def is_in_loop() -> bool:
    """True if a frame of the user's, from which we come, has a loop in it."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename) and has_loop(frame.f_code):
            return True
        if frame.f_code is each_of.__code__:
            return True
        if frame.f_code.co_name == "graph_of" and frame.f_code.co_filename.endswith(_TRACER):
            return False
        frame = frame.f_back
    return False


def each_of(stack: torch.Tensor) -> Sequence[torch.Tensor]:
    """The slices of what a loop stacked: as many as it had steps, so that asking for them begins a loop."""
    return stack.unbind(0)


_TRACER = os.path.join("tracer", "capture", "capture.py")


@functools.lru_cache(maxsize=4096)
def has_loop(code: types.CodeType) -> bool:
    """True if a body jumps back somewhere, or one within it (a comprehension) does."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return any(i.opname.startswith("JUMP_BACKWARD") for i in dis.get_instructions(code)) or any(map(has_loop, inner))


def is_number(value: Any) -> bool:
    """True for what a size may be in a graph: a whole number, or a symbol for one."""
    return type(value) is int or isinstance(value, torch.SymInt)


def symbols_of(values: Collection[Any]) -> dict[sympy.Symbol, Any]:
    """The symbols that stand alone as a size of these fakes, or are one of them, each with its number."""
    sizes = [n for v in values for n in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    symbolic = [n for n in sizes if isinstance(n, torch.SymInt | torch.SymFloat)]
    return {n.node.expr: n for n in reversed(symbolic) if isinstance(n.node.expr, sympy.Symbol)}
