"""What the compiler does while it does it: `FUSEGRAD_LOGS="trace,fusion,+codegen,-guards"`, `config.logs(...)`.

name: one message for each event; +name: with every detail; -name: nothing; all: every name; help: what there is. The
loggers are Python's own, `fusegrad.trace` and so on. Only captures, generations and look-ups on disk are told, nothing
of a call that finds what it needs.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from ...ir.codes import code_of
from ...ir.errors import FusegradError

if TYPE_CHECKING:
    import torch

    from ...codegen import Kernels, Target
    from ...ir import Graph
    from ...tracer.capture.capture import Trace
    from ..execution.executable import GroupRunner
    from ..execution.executable import Variant as KernelVariant
    from ..execution.pipeline import Generated
    from ..kernels.autotune import Trial
    from ..specialize.compiled import Compiler
    from ..specialize.specialization import Specialization

VARIABLE = "FUSEGRAD_LOGS"
ROOT = "fusegrad"
NAMES = {
    "trace": "what was captured, in how many milliseconds, and what runs as written; +trace: every line and operation",
    "fusion": "groups, library calls, and the reason for every cut",
    "codegen": "the text of every kernel; +codegen: its grid, warps and guards, too",
    "guards": "what each variant was captured for: facts, and conditions on sizes",
    "recompiles": "what tells a call from the nearest variant, in one line",
    "autotune": "candidates, their times, and the choice",
    "cache": "hits, misses and evictions; +cache: entries written, too",
}
EVERY = "all"
SILENT = logging.CRITICAL + 10
LEVELS = {"": logging.INFO, "+": logging.DEBUG, "-": SILENT}

_loggers = {name: logging.getLogger(f"{ROOT}.{name}") for name in NAMES}
trace, fusion, codegen, guards, recompiles, autotune, cache = _loggers.values()


class LogsError(FusegradError, ValueError):
    """A name that is none of the logs."""

    message = "{asked}: there is no log {name!r}\n  at:   {where}\n  fix:  {fix}"


# ------------------------------------------------------------------ turning them on
def set_logs(wanted: str | None = None) -> None:
    """Turn logs on and off for the process: "trace,+codegen"; "" for none; None for what the environment says.

    Raises LogsError for an unknown name.
    """
    asked = "config.logs" if wanted is not None else VARIABLE
    levels = levels_of(os.environ.get(VARIABLE, "") if wanted is None else wanted, asked)
    for name, logger in _loggers.items():
        logger.setLevel(levels.get(name, logging.NOTSET))
    _print_to_stderr(bool(levels))


def levels_of(text: str, asked: str = VARIABLE) -> dict[str, int]:
    """ "trace,+codegen" -> {"trace": INFO, "codegen": DEBUG}; later words win."""
    levels: dict[str, int] = {}
    for word in filter(None, (w.strip() for w in text.split(","))):
        sign = word[0] if word[0] in "+-" else ""
        name = word[len(sign) :].strip()
        if name == "help":
            print(help_text(), file=sys.stderr)
        elif name == EVERY:
            levels |= dict.fromkeys(NAMES, LEVELS[sign])
        elif name in NAMES:
            levels[name] = LEVELS[sign]
        else:
            place = {"where": "the environment"} if asked == VARIABLE else {}
            raise LogsError(asked=asked, name=name, fix=_instead(name), **place)
    return levels


def _instead(name: str) -> str:
    near = get_close_matches(name, NAMES, n=1)
    return f"did you mean {near[0]}?" if near else f"use some of {', '.join(NAMES)}, all, help"


def help_text() -> str:
    """What FUSEGRAD_LOGS=help prints."""
    wide = max(map(len, NAMES))
    lines = (f"  {name:<{wide}}  {told}" for name, told in {**NAMES, EVERY: "every one of them"}.items())
    return "\n".join([f'{VARIABLE}="name,+name,-name": what is told on stderr', *lines])


_handler: logging.Handler | None = None


class _Stderr(logging.StreamHandler[Any]):
    """Writes to what sys.stderr is at the time."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        pass


def _print_to_stderr(wanted: bool) -> None:
    """Our handler, while a log is turned on through us; who uses `logging` himself has handlers of his own."""
    global _handler
    root = logging.getLogger(ROOT)
    if _handler is not None:
        root.removeHandler(_handler)
        root.propagate, _handler = True, None
    if wanted:
        _handler = _Stderr()
        _handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
        root.addHandler(_handler)
        root.propagate = False


# ------------------------------------------------------------------ what is told
@contextmanager
def capturing(name: str, made: Callable[[], Trace], place: str | None = None) -> Iterator[None]:
    """A capture, with its time and its lines. made: what came of it."""
    began = time.perf_counter()
    yield
    if trace.isEnabledFor(logging.INFO):
        milliseconds = (time.perf_counter() - began) * 1e3
        operations = [n for n in made().graph_module.graph.nodes if n.op == "call_function"]
        where = f" ({place})" if place else ""
        trace.info("%s captured in %.1f ms: %d operations%s", name, milliseconds, len(operations), where)
        for node in operations:
            trace.debug("  %s", _line_of(node))


def _line_of(node: torch.fx.Node) -> str:
    _, where, line = node.meta.get("fusegrad_origin") or (None, None, None)
    value: Any = node.meta.get("val")
    kind = f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}" if hasattr(value, "dtype") else ""
    return f"{node.name:<16} {node.target!s:<32} {kind:<24} {where or ''}  {(line or '').strip()}".rstrip()


def as_written(name: str, reason: str | None, where: str | None) -> None:
    """A method runs as the user wrote it."""
    trace.info("%s runs as written: %s (%s) [%s]", name, reason, where, code_of(reason))


def split(call: str) -> None:
    """Lines of a method, or a call in it, run as the user wrote them between compiled parts."""
    trace.info("%s", call)


def divided(graph: Graph, made: Generated) -> None:
    """A graph became groups and calls."""
    if not fusion.isEnabledFor(logging.INFO):
        return
    from ...ir.passes.fuse import Extern
    from ..execution.fusion_report import cuts_of, groups_of

    groups = groups_of(made)
    calls = sum(isinstance(s, Extern) for s in made.steps)
    fusion.info("%s: fused groups: %d, library calls: %d", graph.name, len(groups), calls)
    for group in groups:
        fusion.info("  %s: %s; reads %s; writes %s", ", ".join(group.kernels), " ".join(group.operations),
                    ", ".join(group.reads), ", ".join(group.writes))  # fmt: skip
        fusion.debug("    of %s", ", ".join(group.lines))
    for cut in cuts_of(graph, made):
        fusion.info("  %s", cut)


def generated(kernels: Kernels, target: Target) -> None:
    """Kernels were generated."""
    for kernel in kernels.kernels if codegen.isEnabledFor(logging.INFO) else ():
        codegen.info("%s for %s\n%s", kernel.name, target, kernel.source.rstrip())
        pinned = {str(s): n for s, n in kernel.pinned.items()}
        codegen.debug("%s: grid %s, %d warps, %d stages, constants %s, pinned %s, guards %s", kernel.name, kernel.grid,
                      kernel.num_warps, kernel.num_stages, kernel.constants, pinned, list(kernel.guards))  # fmt: skip


def captured(compiler: Compiler, key: Sequence[Any], specialization: Specialization) -> None:
    """A class has one more variant."""
    if not guards.isEnabledFor(logging.INFO):
        return
    from ..specialize.variants import conditions_of, named_facts

    name, count = compiler.cls.__name__, sum(map(len, compiler.known.values()))
    facts = named_facts(compiler, key, specialization.names)
    guards.info("%s, variant %d: %s", name, count, "; ".join(f"{n}: {f}" for n, f in facts.items()))
    guards.info("  if %s", " and ".join(conditions_of(specialization)) or "whatever the sizes")


def captured_again(compiler: Compiler, key: Sequence[Any], args: Sequence[Any]) -> None:
    """A call found no variant, and there are some."""
    if not compiler.known or not recompiles.isEnabledFor(logging.INFO):
        return
    from ..specialize.variants import why_another

    recompiles.info("%s is captured again: %s", compiler.cls.__name__, why_another(compiler, key, args))


def admitted(runner: GroupRunner, variant: KernelVariant) -> None:
    """Kernels of a group are ready, for these sizes."""
    if guards.isEnabledFor(logging.INFO):
        pinned = [f"{symbol} = {value}" for symbol, value in variant.pinned.items()]
        held = ", ".join([*pinned, *map(str, variant.guards)]) or "every size"
        guards.info("%s holds for %s", runner.name, _named(runner, held))


def generated_again(runner: GroupRunner, sizes: Any) -> None:
    """No kernels of a group admit these sizes."""
    if not runner.variants or not recompiles.isEnabledFor(logging.INFO):
        return
    last = runner.variants[-1]
    pinned = [f"{s}: {n} -> {sizes[s]}" for s, n in last.pinned.items() if sizes[s] != n]
    failed = [f"not {g}" for g in last.guards if not bool(g.xreplace(sizes))]
    recompiles.info("%s is generated again: %s", runner.name, _named(runner, "; ".join([*pinned, *failed])))


def _named(runner: GroupRunner, text: str) -> str:
    """s37 = 16  ->  x.shape[1] = 16"""
    shapes = [(v.params["name"], axis, n) for v in runner.group.graph.inputs for axis, n in enumerate(v.shape)]
    names = {str(n): f"{name}.shape[{axis}]" for name, axis, n in reversed(shapes)}
    return re.sub(r"\bs\d+\b", lambda found: names.get(found[0], found[0]), text)


def tried(trial: Trial) -> None:
    """A group was timed, or its choice was found again."""
    if autotune.isEnabledFor(logging.INFO):
        times = trial.milliseconds or [None] * len(trial.candidates)
        shown = (f"{c} {'' if t is None else f'{t * 1e3:.1f} us'}".rstrip()
                 for c, t in zip(trial.candidates, times, strict=True))  # fmt: skip
        how = "found again" if trial.milliseconds is None else "timed"
        autotune.info("%s %s: %s; %s; chosen: %s", trial.kernel, list(trial.sizes), how, ", ".join(shown), trial.chosen)


def _from_environment() -> None:
    """At import, where a mistake must not keep the program from running."""
    try:
        set_logs()
    except LogsError as error:
        warnings.warn(str(error), stacklevel=2)


if os.environ.get(VARIABLE):
    _from_environment()
